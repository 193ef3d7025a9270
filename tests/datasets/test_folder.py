from __future__ import annotations

import builtins
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from hapi.datasets import DatasetFolder, ImageFolder

Image = pytest.importorskip("PIL.Image")


def picture(path: Path, seed: int = 0, mode: str = "RGB") -> np.ndarray:
    """Write a 6 x 4 picture; its pixels as RGB, [H, W, 3]."""
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = (6, 4, 3) if mode == "RGB" else (6, 4)
    image = Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8))
    image.save(path)
    return np.array(image.convert("RGB"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "photos"
    for seed, name in enumerate(["dog/2.png", "dog/10.bmp", "cat/b/x.PNG", "cat/a/y.png", "bird/z.png"]):
        picture(root / name, seed)
    (root / "cat" / "notes.txt").write_text("no image")
    (root / "readme.png").write_text("not in a class folder")
    return root


def test_classes_and_files_are_sorted(root: Path) -> None:
    data = DatasetFolder(root)
    assert data.classes == ["bird", "cat", "dog"]
    assert data.class_to_idx == {"bird": 0, "cat": 1, "dog": 2}
    expected = [
        ("bird/z.png", 0),
        ("cat/a/y.png", 1),
        ("cat/b/x.PNG", 1),
        ("dog/10.bmp", 2),
        ("dog/2.png", 2),
    ]
    assert data.samples == [(str(root / name), label) for name, label in expected]
    assert data.targets == [0, 1, 1, 2, 2]
    assert len(data) == 5


def test_a_sample_is_a_float_image(root: Path) -> None:
    pixels = picture(root / "bird" / "z.png", seed=11)
    image, label = DatasetFolder(str(root))[0]
    assert (image.shape, image.dtype, label) == ((3, 6, 4), torch.float32, 0)
    assert torch.equal(image, torch.from_numpy(pixels).permute(2, 0, 1) / 255)


def test_grey_images_become_rgb(tmp_path: Path) -> None:
    pixels = picture(tmp_path / "only" / "grey.png", mode="L")
    image = DatasetFolder(tmp_path)[0][0]
    assert torch.equal(image, torch.from_numpy(pixels).permute(2, 0, 1) / 255)


def test_a_data_loader_makes_batches(root: Path) -> None:
    images, labels = next(iter(DataLoader(DatasetFolder(root), batch_size=5)))
    assert images.shape == (5, 3, 6, 4)
    assert labels.tolist() == [0, 1, 1, 2, 2]


def test_loader_extensions_and_transform(root: Path) -> None:
    data = DatasetFolder(root, loader=lambda path: Path(path).read_text(), extensions=(".TXT",), transform=str.upper)
    assert data.samples == [(str(root / "cat" / "notes.txt"), 1)]
    assert data[0] == ("NO IMAGE", 1)
    one = DatasetFolder(root, extensions=".bmp")  # a string is one extension, not its letters
    assert one.samples == [(str(root / "dog" / "10.bmp"), 2)]


def test_is_valid_file(root: Path) -> None:
    data = DatasetFolder(root, is_valid_file=lambda path: Path(path).stem in ("x", "10"))
    assert data.targets == [1, 2]
    with pytest.raises(ValueError, match="DatasetFolder: give extensions or is_valid_file, not both"):
        DatasetFolder(root, extensions=(".png",), is_valid_file=lambda path: True)
    with pytest.raises(ValueError, match="ImageFolder: give extensions or is_valid_file, not both"):
        ImageFolder(root, extensions=(".png",), is_valid_file=lambda path: True)


def test_links_are_followed(root: Path, tmp_path: Path) -> None:
    picture(tmp_path / "elsewhere" / "linked.png")
    (root / "bird" / "more").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    assert str(root / "bird" / "more" / "linked.png") in [path for path, _ in DatasetFolder(root).samples]


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        DatasetFolder(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        ImageFolder(tmp_path / "nowhere")
    with pytest.raises(RuntimeError, match=f"Found 0 directories in {tmp_path}"):
        DatasetFolder(tmp_path)
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "a.txt").write_text("")
    with pytest.raises(RuntimeError, match=rf"Found 0 files in subfolders of {tmp_path}; .*\.jpg, \.jpeg"):
        DatasetFolder(tmp_path)
    with pytest.raises(RuntimeError, match=rf"Found 0 files in {tmp_path}; accepted extensions: \.npy"):
        ImageFolder(tmp_path, extensions=[".npy"])
    with pytest.raises(RuntimeError, match="that is_valid_file accepts"):
        ImageFolder(tmp_path, is_valid_file=lambda path: False)


@pytest.mark.parametrize("damage", ["text", "empty", "truncated"])
@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_a_damaged_image_is_named(tmp_path: Path, damage: str, suffix: str) -> None:
    path = tmp_path / "cat" / f"broken.{suffix}"
    picture(path)
    whole = path.read_bytes()
    path.write_bytes({"text": b"hello", "empty": b"", "truncated": whole[: len(whole) * 2 // 3]}[damage])
    with pytest.raises(ValueError, match=rf"cat/broken.{suffix} is damaged, or not an image"):
        DatasetFolder(tmp_path)[0]


def test_an_own_loaders_failure_names_the_file(root: Path) -> None:
    def fail(path: str) -> Any:
        raise KeyError("x")

    with pytest.raises(KeyError) as caught:
        DatasetFolder(root, loader=fail)[1]
    told = [*getattr(caught.value, "__notes__", ()), *map(str, caught.value.args)]
    assert any(f"while reading {root / 'cat' / 'a' / 'y.png'}" in text for text in told)


def test_an_image_folder_has_every_image_without_labels(root: Path) -> None:
    data = ImageFolder(root)
    names = ["readme.png", "bird/z.png", "cat/a/y.png", "cat/b/x.PNG", "dog/10.bmp", "dog/2.png"]
    assert data.samples == [str(root / name) for name in names]
    assert len(data) == 6
    sample = data[1]
    assert isinstance(sample, tuple)
    assert len(sample) == 1
    assert torch.equal(sample[0], DatasetFolder(root)[0][0])
    (root / "readme.png").unlink()
    [images] = next(iter(DataLoader(ImageFolder(root, transform=lambda image: image[:, :2]), batch_size=5)))
    assert images.shape == (5, 3, 2, 4)


def test_without_pillow(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("PIL"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match="needs Pillow: pip install pillow, or pass loader="):
        DatasetFolder(root)[0]


def test_importing_the_datasets_imports_nothing_heavy() -> None:
    heavy = ("PIL", "sklearn", "scipy", "pandas", "torchvision")
    code = (
        "import sys, torch; before = set(sys.modules); import hapi.datasets; "
        f"print(set({heavy}) & (set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "set()\n"
