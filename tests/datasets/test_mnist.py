from __future__ import annotations

import gzip
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from hapi.datasets import MNIST, DatasetNotFoundError, FashionMNIST
from tests.helpers.http import FileServer

Encode = Callable[[np.ndarray], bytes]
COUNT = 137  # not a multiple of anything
NAMES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


@pytest.fixture
def contents(idx: Encode) -> dict[str, bytes]:
    """The four files of a small dataset in MNIST's form."""
    random = np.random.default_rng(3)
    files = {}
    for name in NAMES:
        count = COUNT if name.startswith("train") else 41
        shape = (count, 28, 28) if "images" in name else (count,)
        files[name] = idx(random.integers(0, 10, shape).astype(np.uint8))
    return files


@pytest.fixture
def small(contents: dict[str, bytes], server: FileServer, home: Path) -> type[MNIST]:
    """MNIST whose right files are the small ones, and whose mirrors are on the loopback server."""

    class Small(MNIST):
        mirrors = (f"{server.url}/a/", f"{server.url}/b")
        digests = {name: f"sha256:{hashlib.sha256(data).hexdigest()}" for name, data in contents.items()}

    return Small


def write(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def labels_of(contents: dict[str, bytes], name: str) -> list[int]:
    return list(contents[name][8:])


@pytest.mark.parametrize("style", ["{}", "{}.gz", "dotted", "dotted.gz"])
@pytest.mark.parametrize("place", ["data_dir", "home/mnist", "home", "cache"])
def test_files_are_found(
    small: type[MNIST],
    contents: dict[str, bytes],
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    style: str,
    place: str,
) -> None:
    if place.startswith("home"):
        monkeypatch.setenv("HAPI_DATA_HOME", str(tmp_path / "home"))
    folder = home / ".cache" / "hapi" / "mnist" if place == "cache" else tmp_path / place

    def named(name: str) -> str:
        dotted = name.replace("-idx", ".idx")
        return style.format(name) if "{}" in style else style.replace("dotted", dotted)

    write(folder, {named(name): data for name, data in contents.items()})
    data_dir = folder if place == "data_dir" else None
    train = small(download=False, data_dir=data_dir)
    test = small(mode="test", download=False, data_dir=data_dir)
    assert (len(train), len(test)) == (COUNT, 41)
    assert train.labels.tolist() == labels_of(contents, "train-labels-idx1-ubyte")
    assert test.labels.tolist() == labels_of(contents, "t10k-labels-idx1-ubyte")
    pixels = np.frombuffer(contents["train-images-idx3-ubyte"], np.uint8, offset=16)
    assert np.array_equal(train.images.numpy().ravel(), pixels)
    assert train.images.shape == (COUNT, 1, 28, 28)
    assert names(folder) == sorted(named(name) for name in contents), "reading writes nothing"


def test_the_users_folder_comes_first(
    small: type[MNIST],
    contents: dict[str, bytes],
    idx: Encode,
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HAPI_DATA_HOME", str(tmp_path / "home"))
    write(tmp_path / "mine", contents)
    write(tmp_path / "home" / "mnist", dict.fromkeys(contents, b"would be an error"))
    assert len(small(data_dir=tmp_path / "mine")) == COUNT


def test_the_default_batch(small: type[MNIST], contents: dict[str, bytes], tmp_path: Path) -> None:
    write(tmp_path, contents)
    images, labels = next(iter(DataLoader(small(data_dir=tmp_path), batch_size=50)))
    assert (images.shape, images.dtype) == ((50, 1, 28, 28), torch.float32)
    assert (labels.shape, labels.dtype) == ((50,), torch.int64)


def test_a_transform_gets_the_float_image(small: type[MNIST], contents: dict[str, bytes], tmp_path: Path) -> None:
    write(tmp_path, contents)
    plain = small(data_dir=tmp_path)
    image, label = small(data_dir=tmp_path, transform=lambda image: image.mean())[5]
    assert image == plain[5][0].mean()
    assert label == plain[5][1]


# Download


def serve(server: FileServer, contents: dict[str, bytes], mirror: str) -> None:
    server.files.update({f"/{mirror}/{name}.gz": gzip.compress(data) for name, data in contents.items()})


@pytest.mark.parametrize("place", ["data_dir", "home", "cache"])
def test_download(
    small: type[MNIST],
    contents: dict[str, bytes],
    server: FileServer,
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
) -> None:
    serve(server, contents, "a")
    if place == "home":
        monkeypatch.setenv("HAPI_DATA_HOME", str(tmp_path / "home"))
    data_dir = tmp_path / "data_dir" if place == "data_dir" else None
    folder = {
        "data_dir": tmp_path / "data_dir",
        "home": tmp_path / "home" / "mnist",
        "cache": home / ".cache" / "hapi" / "mnist",
    }[place]
    assert len(small(data_dir=data_dir)) == COUNT
    assert names(folder) == ["train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"]
    assert len(server.requests) == 2
    assert len(small(data_dir=data_dir)) == COUNT
    assert len(server.requests) == 2, "the second time nothing is asked for"


def test_mirrors_may_compress_differently(
    small: type[MNIST], contents: dict[str, bytes], server: FileServer, tmp_path: Path
) -> None:
    serve(server, contents, "b")
    server.files = {path: gzip.compress(gzip.decompress(data), 1) for path, data in server.files.items()}
    assert len(small(data_dir=tmp_path)) == COUNT


def test_a_resumed_part_of_another_compression_is_replaced(
    small: type[MNIST], contents: dict[str, bytes], server: FileServer, tmp_path: Path
) -> None:
    serve(server, contents, "b")
    name = "train-images-idx3-ubyte.gz"
    server.files[f"/a/{name}"] = gzip.compress(contents["train-images-idx3-ubyte"], 1)
    server.cuts[f"/a/{name}"] = [5000, 0, 0]
    assert len(small(data_dir=tmp_path / "data")) == COUNT
    asked = [request for request in server.requests if request[0] == f"/b/{name}"]
    assert asked == [(f"/b/{name}", "bytes=5000-"), (f"/b/{name}", None)]
    assert names(tmp_path / "data") == ["train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"]


def test_a_mirror_with_other_content_is_passed_over(
    small: type[MNIST], contents: dict[str, bytes], server: FileServer, tmp_path: Path
) -> None:
    serve(server, dict.fromkeys(contents, b"\0\0\x08\x01 a page that says please log in"), "a")
    server.files["/a/train-labels-idx1-ubyte.gz"] = b"\x1f\x8b not gzip at all"
    serve(server, contents, "b")
    assert len(small(data_dir=tmp_path / "data")) == COUNT
    assert names(tmp_path / "data") == ["train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"]


def test_no_mirror_has_it(small: type[MNIST], home: Path, server: FileServer) -> None:
    with pytest.raises(DatasetNotFoundError, match=r"(?s)/a/train-images.*404.*/b/train-images.*404"):
        small()
    assert names(home / ".cache" / "hapi" / "mnist") == []


def test_not_found_and_no_download(small: type[MNIST], home: Path, server: FileServer, tmp_path: Path) -> None:
    with pytest.raises(DatasetNotFoundError) as caught:
        small(download=False, data_dir=tmp_path / "nowhere")
    assert "Small: train-images-idx3-ubyte was not found in" in str(caught.value)
    assert str(tmp_path / "nowhere") in str(caught.value)
    assert str(home / ".cache" / "hapi" / "mnist") in str(caught.value)
    assert server.requests == []
    assert not (tmp_path / "nowhere").exists()
    assert names(home) == []


# Damage


@pytest.mark.parametrize("name", NAMES[:2])
def test_a_damaged_file_is_named_and_kept(
    small: type[MNIST], contents: dict[str, bytes], server: FileServer, tmp_path: Path, name: str
) -> None:
    changed = bytearray(contents[name])
    changed[-1] ^= 1
    write(tmp_path, {**contents, name: bytes(changed)})
    with pytest.raises(ValueError, match=rf"{name} is not the file it should be: the sha256 of its content"):
        small(data_dir=tmp_path)
    assert (tmp_path / name).read_bytes() == bytes(changed)
    assert server.requests == []


def test_a_truncated_gzip_file_is_named(small: type[MNIST], contents: dict[str, bytes], tmp_path: Path) -> None:
    write(tmp_path, {f"{name}.gz": data for name, data in contents.items()})
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte.gz is damaged: its gzip stream"):
        small(data_dir=tmp_path)


# The user's own files


def test_own_files_need_no_hash(home: Path, idx: Encode, tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (7, 5, 9)).astype(np.uint8)
    labels = np.array([0, 1, 2, 3, 4, 5, 6], np.uint8)
    write(tmp_path, {"x.gz": idx(images), "y": idx(labels)})
    data = MNIST(tmp_path / "x.gz", str(tmp_path / "y"))
    assert data.images.shape == (7, 1, 5, 9)
    assert np.array_equal(data.images.numpy()[:, 0], images)
    assert data.labels.tolist() == labels.tolist()
    assert data.classes == [str(digit) for digit in range(10)]


def test_own_files_may_have_more_classes(home: Path, idx: Encode, tmp_path: Path) -> None:
    write(tmp_path, {"x": idx(np.zeros((2, 4, 4), np.uint8)), "y": idx(np.array([1, 26], np.uint8))})
    assert MNIST(tmp_path / "x", tmp_path / "y").classes == [str(label) for label in range(27)]


HEADER = b"\0\0\x08\x03" + b"\0\0\0\x02" + b"\0\0\0\x04" * 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "x is not an IDX file with 3 dimensions"),
        (b"\0\0\x08", "x is not an IDX file with 3 dimensions: it starts with 00 00 08"),
        (b"\x89PNG" + bytes(44), "x is not an IDX file"),
        (b"\0\0\x0d\x03" + HEADER[4:] + bytes(128), r"type 0x08\) with 3 dimensions, found type 0x0d with 3"),
        (b"\0\0\x08\x02" + HEADER[4:] + bytes(32), "found type 0x08 with 2"),
        (HEADER + bytes(31), r"promises 32 bytes of data for shape \[2, 4, 4\], but 31 follow"),
        (HEADER + bytes(33), "but 33 follow"),
        (HEADER, "but 0 follow"),
    ],
    ids=["empty", "short", "png", "float", "2d", "truncated", "trailing", "header-only"],
)
def test_what_is_not_idx(home: Path, idx: Encode, tmp_path: Path, content: bytes, message: str) -> None:
    write(tmp_path, {"x": content, "y": idx(np.zeros(2, np.uint8))})
    with pytest.raises(ValueError, match=message):
        MNIST(tmp_path / "x", tmp_path / "y")


def test_counts_must_match(home: Path, idx: Encode, tmp_path: Path) -> None:
    write(tmp_path, {"x": idx(np.zeros((3, 4, 4), np.uint8)), "y": idx(np.zeros(2, np.uint8))})
    with pytest.raises(ValueError, match=r"x holds 3 images, but .*y holds 2 labels"):
        MNIST(tmp_path / "x", tmp_path / "y")


def test_wrong_arguments(home: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="MNIST: mode must be 'train' or 'test', not 'tests'; did you mean 'test'"):
        MNIST(mode="tests")
    with pytest.raises(ValueError, match="go together, but label_path is not given"):
        MNIST(image_path=tmp_path / "x")
    with pytest.raises(ValueError, match="go together, but image_path is not given"):
        MNIST(label_path=tmp_path / "x")
    with pytest.raises(FileNotFoundError) as caught:
        MNIST(tmp_path / "x", tmp_path / "y")
    assert not isinstance(caught.value, DatasetNotFoundError), "a wrong path is a mistake, not a missing dataset"


# FashionMNIST


def test_fashion_is_not_taken_from_mnists_files(
    contents: dict[str, bytes], home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HAPI_DATA_HOME", str(tmp_path / "home"))
    write(tmp_path / "home", contents)
    write(tmp_path / "home" / "mnist", contents)
    with pytest.raises(DatasetNotFoundError, match="FashionMNIST: train-images"):
        FashionMNIST(download=False)


def test_fashion_has_its_own_folder_and_classes(
    contents: dict[str, bytes], home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = {name: f"md5:{hashlib.md5(data).hexdigest()}" for name, data in contents.items()}
    monkeypatch.setattr(FashionMNIST, "digests", digests)
    monkeypatch.setenv("HAPI_DATA_HOME", str(tmp_path / "home"))
    write(tmp_path / "home" / "fashion-mnist", contents)
    data = FashionMNIST(mode="test", download=False)
    assert len(data) == 41
    assert len(data.classes) == 10
    assert data.classes[0] == "T-shirt/top"


@pytest.mark.parametrize("dataset", [MNIST, FashionMNIST])
def test_digests_are_well_formed(dataset: type[MNIST]) -> None:
    assert sorted(dataset.digests) == sorted(NAMES)
    for digest in dataset.digests.values():
        algorithm, _, value = digest.partition(":")
        assert len(bytes.fromhex(value)) == hashlib.new(algorithm).digest_size
    assert len(set(dataset.digests.values())) == 4


# The real data


@pytest.mark.skipif(not os.environ.get("HAPI_DATA_HOME"), reason="HAPI_DATA_HOME is not set: no real MNIST here")
def test_the_real_mnist() -> None:
    try:
        train, test = MNIST(download=False), MNIST(mode="test", download=False)
    except DatasetNotFoundError as exc:
        pytest.skip(f"no real MNIST here: {exc}")
    assert train.images.shape == (60000, 1, 28, 28)
    assert test.images.shape == (10000, 1, 28, 28)
    assert train.labels.bincount().tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert test.labels.bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    pixels = train.images.to(torch.float64) / 255
    assert float(pixels.mean()) == pytest.approx(0.1307, abs=5e-5)
    assert float(pixels.std()) == pytest.approx(0.3081, abs=5e-5)
