from __future__ import annotations

import gzip
import hashlib
import io
import os
import pickle
import struct
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from hapi.datasets import Cifar10, Cifar100, DatasetNotFoundError
from tests.helpers.http import FileServer


def python2_pickle(value: Any) -> bytes:
    """Pickle as Python 2 and the numpy of 2009 did, protocol 2: how the members of the real archives look."""
    return pickle.PROTO + b"\x02" + _python2(value) + pickle.STOP


def _python2(value: Any) -> bytes:
    if isinstance(value, dict):
        items = b"".join(_python2(key) + _python2(item) for key, item in value.items())
        return pickle.EMPTY_DICT + pickle.MARK + items + pickle.SETITEMS
    if isinstance(value, list):
        return pickle.EMPTY_LIST + pickle.MARK + b"".join(map(_python2, value)) + pickle.APPENDS
    if isinstance(value, tuple):
        return pickle.MARK + b"".join(map(_python2, value)) + pickle.TUPLE
    if value is None:
        return pickle.NONE
    if isinstance(value, bytes):  # Python 2's str
        if len(value) < 256:
            return pickle.SHORT_BINSTRING + bytes([len(value)]) + value
        return pickle.BINSTRING + struct.pack("<i", len(value)) + value
    if isinstance(value, int):
        return pickle.BININT + struct.pack("<i", value)
    assert isinstance(value, np.ndarray)
    assert value.dtype == np.uint8
    empty = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n" + _python2((0,)) + _python2(b"b") + b"tR"
    dtype = (
        b"cnumpy\ndtype\n" + _python2((b"u1", 0, 1)) + b"R" + _python2((3, b"|", None, None, None, -1, -1, 0)) + b"b"
    )
    state = b"(" + _python2(1) + _python2(value.shape) + dtype + _python2(0) + _python2(value.tobytes()) + b"t"
    return empty + state + b"b"


def batch(count: int, seed: int, **labels: int) -> dict[bytes, Any]:
    random = np.random.default_rng(seed)
    made: dict[bytes, Any] = {b"data": random.integers(0, 256, (count, 3072)).astype(np.uint8)}
    for name, classes in labels.items():
        made[name.encode()] = random.integers(0, classes, count).tolist()
    return made


def names_of(count: int) -> list[bytes]:
    return [f"class {i}".encode() for i in range(count)]


def cifar10() -> dict[str, Any]:
    parts = {f"cifar-10-batches-py/data_batch_{i}": batch(3 + i, i, labels=10) for i in range(1, 6)}
    return {
        "cifar-10-batches-py/test_batch": batch(4, 9, labels=10),  # not in reading order
        **parts,
        "cifar-10-batches-py/batches.meta": {b"label_names": names_of(10), b"num_vis": 3072},
    }


def cifar100() -> dict[str, Any]:
    return {
        "cifar-100-python/train": batch(6, 1, fine_labels=100, coarse_labels=20),
        "cifar-100-python/test": batch(5, 2, fine_labels=100, coarse_labels=20),
        "cifar-100-python/meta": {b"fine_label_names": names_of(100), b"coarse_label_names": names_of(20)},
    }


def archive(path: Path, members: dict[str, Any], dump: Any = python2_pickle) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            data = content if isinstance(content, bytes) else dump(content)
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def modern_pickle(value: Any) -> bytes:
    return pickle.dumps(value, protocol=2)


@pytest.mark.parametrize("dump", [python2_pickle, modern_pickle])
def test_cifar10(tmp_path: Path, dump: Any) -> None:
    members = cifar10()
    path = archive(tmp_path / "c.tar.gz", members, dump)
    train, test = Cifar10(path), Cifar10(str(path), mode="test")
    assert (len(train), len(test)) == (4 + 5 + 6 + 7 + 8, 4)
    parts = [members[f"cifar-10-batches-py/data_batch_{i}"] for i in range(1, 6)]
    assert np.array_equal(train.images.numpy().reshape(-1, 3072), np.concatenate([p[b"data"] for p in parts]))
    assert train.labels.tolist() == [label for part in parts for label in part[b"labels"]]
    assert test.labels.tolist() == members["cifar-10-batches-py/test_batch"][b"labels"]
    assert train.classes == [f"class {i}" for i in range(10)]
    image, label = train[0]
    assert (image.shape, image.dtype, type(label)) == ((3, 32, 32), torch.float32, int)
    red_first_row = parts[0][b"data"][0, :32]  # rows are planes: red, green, blue
    assert torch.equal(image[0, 0], torch.from_numpy(red_first_row) / 255)
    assert [file.name for file in tmp_path.iterdir()] == ["c.tar.gz"], "nothing is unpacked"


@pytest.mark.parametrize(("coarse", "classes"), [(False, 100), (True, 20)])
def test_cifar100(tmp_path: Path, coarse: bool, classes: int) -> None:
    members = cifar100()
    path = archive(tmp_path / "c.tar.gz", members)
    for mode, count in (("train", 6), ("test", 5)):
        data = Cifar100(path, mode=mode, coarse=coarse)
        key = b"coarse_labels" if coarse else b"fine_labels"
        assert len(data) == count
        assert data.labels.tolist() == members[f"cifar-100-python/{mode}"][key]
        assert len(data.classes) == classes


def test_the_default_batch_and_a_transform(tmp_path: Path) -> None:
    path = archive(tmp_path / "c.tar.gz", cifar10())
    images, labels = next(iter(DataLoader(Cifar10(path, transform=lambda image: image[:, :8, :8]), batch_size=6)))
    assert (images.shape, images.dtype) == ((6, 3, 8, 8), torch.float32)
    assert (labels.shape, labels.dtype) == ((6,), torch.int64)


class Malicious:
    """Unpickled without care, it writes a file."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize(
    ("function", "arguments", "name"),
    [
        (os.mkdir, ["{}"], r"(posix|nt)\.mkdir"),
        (eval, ["__import__('os').mkdir('{}')"], r"builtins\.eval|__builtin__\.eval"),
        (np.save, ["{}", 1], r"numpy\.save"),
        (np.load, ["{}"], r"numpy\.load"),
        (getattr, [np.ndarray, "tofile"], r"builtins\.getattr|__builtin__\.getattr"),
    ],
    ids=["mkdir", "eval", "save", "load", "getattr"],
)
@pytest.mark.parametrize("protocol", [2, 4])
def test_a_malicious_archive_runs_nothing(
    tmp_path: Path, function: Any, arguments: list[Any], name: str, protocol: int
) -> None:
    trap = tmp_path / "trap"
    filled = [a.format(trap) if isinstance(a, str) else a for a in arguments]
    data = pickle.dumps({b"data": Malicious(function, *filled)}, protocol=protocol)
    path = archive(tmp_path / "c.tar.gz", {**cifar10(), "cifar-10-batches-py/data_batch_2": data})
    with pytest.raises(ValueError, match=rf"c.tar.gz: cifar-10-batches-py/data_batch_2 .*forbidden global ({name})"):
        Cifar10(path)
    assert [file.name for file in tmp_path.iterdir()] == ["c.tar.gz"]
    pickle.loads(pickle.dumps(Malicious(os.mkdir, str(trap))))  # the trap itself works
    assert trap.exists()


def test_a_codec_other_than_the_one_for_bytes_is_refused(tmp_path: Path) -> None:
    data = b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00xX\x05\x00\x00\x00rot13\x86R."
    path = archive(tmp_path / "c.tar.gz", {**cifar10(), "cifar-10-batches-py/test_batch": data})
    with pytest.raises(ValueError, match="forbidden codec 'rot13'"):
        Cifar10(path, mode="test")


def test_members_with_strange_paths_are_ignored(tmp_path: Path) -> None:
    strange = {"../evil": b"x", "/abs": b"y", "cifar-10-batches-py/../../test_batch": b"z"}
    path = archive(tmp_path / "in.tar.gz", {**strange, **cifar10()})
    assert len(Cifar10(path, mode="test")) == 4
    assert [file.name for file in tmp_path.iterdir()] == ["in.tar.gz"]


TEST = "cifar-10-batches-py/test_batch"
META = "cifar-10-batches-py/batches.meta"


@pytest.mark.parametrize(
    ("member", "content", "message"),
    [
        (TEST, [1, 2], "test_batch holds a list, not a dict"),
        (TEST, b"\x80\x02 no pickle", "test_batch cannot be read"),
        (TEST, {b"labels": [1]}, r"'data' is not a uint8 array of shape \[N, 3072\]"),
        (TEST, {b"data": np.zeros((2, 5), np.uint8), b"labels": [1, 2]}, r"\[N, 3072\]"),
        (
            TEST,
            {b"data": np.zeros((2, 3072), np.uint8), b"labels": [1]},
            "'labels' is not a list of 2 integers",
        ),
        (
            TEST,
            {b"data": np.zeros((1, 3072), np.uint8), b"labels": [b"1"]},
            "'labels' is not a list of 1 int",
        ),
        (
            TEST,
            {b"data": np.zeros((1, 3072), np.uint8), b"labels": [10]},
            "labels lie in 10 .. 10, but there are 10",
        ),
        (META, {b"label_names": 3}, "batches.meta has no list of names 'label_names'"),
    ],
)
def test_content_of_the_wrong_form(tmp_path: Path, member: str, content: Any, message: str) -> None:
    path = archive(tmp_path / "c.tar.gz", {**cifar10(), member: content})
    with pytest.raises(ValueError, match=message):
        Cifar10(path, mode="test")


def test_a_damaged_byte_gives_an_error_that_names_the_archive(tmp_path: Path) -> None:
    path = archive(tmp_path / "c.tar.gz", cifar10())
    whole = path.read_bytes()
    for position in range(0, len(whole), len(whole) // 40):
        broken = bytearray(whole)
        broken[position] ^= 0xFF
        path.write_bytes(broken)
        with pytest.raises(ValueError, match=r"c.tar.gz is damaged"):
            Cifar10(path, mode="test")


def test_archives_of_the_wrong_form(tmp_path: Path) -> None:
    path = archive(tmp_path / "c.tar.gz", {name: data for name, data in cifar10().items() if name != META})
    with pytest.raises(ValueError, match=f"c.tar.gz has no member {META}"):
        Cifar10(path)
    whole = archive(tmp_path / "c.tar.gz", cifar10()).read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"c.tar.gz is damaged: its gzip stream cannot be read"):
        Cifar10(path)
    path.write_bytes(gzip.decompress(whole)[:5000])
    with pytest.raises(ValueError, match=r"c.tar.gz is damaged, or not a tar archive"):
        Cifar10(path)
    path.write_bytes(b"not an archive")
    with pytest.raises(ValueError, match=r"c.tar.gz is damaged, or not a tar archive"):
        Cifar10(path)
    with pytest.raises(FileNotFoundError):
        Cifar10(tmp_path / "none.tar.gz")
    with pytest.raises(ValueError, match="Cifar100: mode must be 'train' or 'test', not 'valid'"):
        Cifar100(mode="valid")


@pytest.fixture
def small(server: FileServer, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Cifar10's right archive is a small one, its mirror the loopback server; the archive's bytes."""
    content = archive(tmp_path / "made.tar.gz", cifar10()).read_bytes()
    monkeypatch.setattr(Cifar10, "digest", f"md5:{hashlib.md5(content).hexdigest()}")
    monkeypatch.setattr(Cifar10, "mirrors", [f"{server.url}/a/"])
    monkeypatch.setenv("HAPI_DATA_HOME", str(tmp_path / "home"))
    return content


def test_download(small: bytes, server: FileServer, tmp_path: Path) -> None:
    server.files["/a/cifar-10-python.tar.gz"] = small
    server.cuts["/a/cifar-10-python.tar.gz"] = [1000]
    assert len(Cifar10(mode="test")) == len(Cifar10(mode="test", download=False)) == 4
    assert len(server.requests) == 2
    assert [file.name for file in (tmp_path / "home" / "cifar10").iterdir()] == ["cifar-10-python.tar.gz"]


def test_a_wrong_archive_is_not_kept(small: bytes, server: FileServer, tmp_path: Path) -> None:
    server.files["/a/cifar-10-python.tar.gz"] = small + b"\0"
    with pytest.raises(DatasetNotFoundError, match=r"gave a wrong file.*the md5 of its content"):
        Cifar10()
    assert list((tmp_path / "home" / "cifar10").iterdir()) == []


def test_found_archives_are_verified(small: bytes, tmp_path: Path) -> None:
    with pytest.raises(DatasetNotFoundError, match=r"Cifar10: cifar-10-python.tar.gz was not found in"):
        Cifar10(download=False)
    path = tmp_path / "home" / "cifar-10-python.tar.gz"
    path.parent.mkdir()
    path.write_bytes(small)
    assert len(Cifar10(download=False)) == 30
    path.write_bytes(small + b"\0")
    with pytest.raises(ValueError, match=r"cifar-10-python.tar.gz is not the file it should be"):
        Cifar10()
