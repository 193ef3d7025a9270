"""Images, or any files, in folders."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from hapi.errors import add_note

__all__ = ["IMAGE_EXTENSIONS", "DatasetFolder", "ImageFolder", "load_image"]

IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")

Loader = Callable[[str], Any]
PathTest = Callable[[str], bool]
StrPath = str | os.PathLike[str]


def load_image(path: str) -> Tensor:
    """Read an image file as float32 ``[3, H, W]`` in [0, 1], RGB.

    Raises:
        ImportError: Pillow is not installed.
        FileNotFoundError: There is no such file.
        ValueError: The file is damaged, or not an image.
    """
    try:
        from PIL import Image
    except ImportError as exc:
        raise ImportError("reading image files needs Pillow: pip install pillow, or pass loader=") from exc
    with Path(path).open("rb") as file:
        try:
            with Image.open(file) as image:
                pixels = np.array(image.convert("RGB"))
        except Exception as exc:  # decoders of damaged files raise OSError, SyntaxError, struct.error, ...
            raise ValueError(f"{path} is damaged, or not an image: {exc}") from exc
    return torch.from_numpy(pixels).permute(2, 0, 1).to(torch.float32).div_(255).contiguous()


class DatasetFolder(Dataset[tuple[Any, int]]):
    """Files in one folder per class: ``root/cat/1.png``, ``root/dog/extra/2.png``.

    A sample is ``(loaded file, class index)``; with the default loader the file is an image, float32
    ``[3, H, W]`` in [0, 1]. Classes and files are in sorted order; links are followed.

    Args:
        root: The folder that holds the class folders.
        loader: Takes a path, returns the sample. Default: :func:`load_image`.
        extensions: File name endings that count, in any case. Default: those of images.
        transform: Called with what the loader returned; its result takes its place.
        is_valid_file: Takes a path, says whether it counts; instead of ``extensions``.

    Attributes:
        classes: Names of the class folders.
        class_to_idx: Name -> class index.
        samples: ``(path, class index)`` of each file.
        targets: The class index of each file.

    Raises:
        FileNotFoundError: There is no folder ``root``.
        RuntimeError: It has no folders, or they have no files that count.
        ValueError: Both ``extensions`` and ``is_valid_file`` are given.

    Example:
        >>> data = DatasetFolder("photos", transform=lambda image: image[:, :224, :224])
        >>> image, label = data[0]
    """

    def __init__(
        self,
        root: StrPath,
        loader: Loader | None = None,
        extensions: Sequence[str] | None = None,
        transform: Callable[[Any], Any] | None = None,
        is_valid_file: PathTest | None = None,
    ) -> None:
        valid = _path_test(extensions, is_valid_file, "DatasetFolder")
        self.root = os.fspath(root)
        self.loader = loader or load_image
        self.transform = transform
        with os.scandir(self.root) as entries:
            self.classes = sorted(entry.name for entry in entries if entry.is_dir())
        if not self.classes:
            raise RuntimeError(f"Found 0 directories in {self.root}: each class has its own")
        self.class_to_idx = {name: index for index, name in enumerate(self.classes)}
        self.samples = [
            (path, index)
            for name, index in self.class_to_idx.items()
            for path in _walk(os.path.join(self.root, name))
            if valid(path)
        ]
        if not self.samples:
            raise _nothing_found(f"subfolders of {self.root}", extensions, is_valid_file)
        self.targets = [target for _, target in self.samples]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        path, target = self.samples[index]
        return _read(path, self.loader, self.transform), target


class ImageFolder(Dataset[tuple[Any]]):
    """All files below a folder, without labels: for prediction. A sample is ``(loaded file,)``.

    Args:
        root: The folder; its subfolders count too.
        loader: As in :class:`DatasetFolder`.
        extensions: As in :class:`DatasetFolder`.
        transform: As in :class:`DatasetFolder`.
        is_valid_file: As in :class:`DatasetFolder`.

    Attributes:
        samples: The path of each file, sorted within each folder.

    Raises:
        FileNotFoundError: There is no folder ``root``.
        RuntimeError: It has no files that count.
        ValueError: Both ``extensions`` and ``is_valid_file`` are given.

    Example:
        >>> (image,) = ImageFolder("photos")[0]
    """

    def __init__(
        self,
        root: StrPath,
        loader: Loader | None = None,
        extensions: Sequence[str] | None = None,
        transform: Callable[[Any], Any] | None = None,
        is_valid_file: PathTest | None = None,
    ) -> None:
        valid = _path_test(extensions, is_valid_file, "ImageFolder")
        self.root = os.fspath(root)
        self.loader = loader or load_image
        self.transform = transform
        self.samples = [path for path in _walk(self.root) if valid(path)]
        if not self.samples:
            raise _nothing_found(self.root, extensions, is_valid_file)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any]:
        return (_read(self.samples[index], self.loader, self.transform),)


def _path_test(extensions: Sequence[str] | None, is_valid_file: PathTest | None, where: str) -> PathTest:
    if is_valid_file is not None:
        if extensions is not None:
            raise ValueError(f"{where}: give extensions or is_valid_file, not both")
        return is_valid_file
    if isinstance(extensions, str):
        extensions = (extensions,)
    endings = tuple(ending.lower() for ending in (IMAGE_EXTENSIONS if extensions is None else extensions))
    return lambda path: path.lower().endswith(endings)


def _walk(root: str) -> Iterator[str]:
    """All files below ``root``, in an order that does not depend on the file system."""

    def fail(exc: OSError) -> None:
        raise exc  # os.walk would leave an unreadable folder out, without a word

    for folder, subfolders, files in os.walk(root, onerror=fail, followlinks=True):
        subfolders.sort()
        for name in sorted(files):
            yield os.path.join(folder, name)


def _nothing_found(where: str, extensions: Sequence[str] | None, is_valid_file: PathTest | None) -> RuntimeError:
    if is_valid_file is not None:
        return RuntimeError(f"Found 0 files in {where} that is_valid_file accepts")
    accepted = IMAGE_EXTENSIONS if extensions is None else extensions
    return RuntimeError(f"Found 0 files in {where}; accepted extensions: {', '.join(accepted)}")


def _read(path: str, loader: Loader, transform: Callable[[Any], Any] | None) -> Any:
    try:
        sample = loader(path)
        return sample if transform is None else transform(sample)
    except Exception as exc:
        add_note(exc, f"while reading {path}")
        raise
