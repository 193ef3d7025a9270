"""CIFAR-10 and CIFAR-100, read from the original archives without running what is in them."""

from __future__ import annotations

import io
import os
import pickle
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from hapi.datasets import _files
from hapi.datasets._download import fetch
from hapi.datasets.memory import InMemoryImages, Transform

__all__ = ["Cifar10", "Cifar100"]

PIXELS = 3 * 32 * 32


def _encode(text: str, encoding: str | bytes) -> bytes:
    """``_codecs.encode`` for the one codec by which pickles of protocol 2 carry bytes."""
    if encoding not in ("latin1", b"latin1"):
        raise pickle.UnpicklingError(f"forbidden codec {encoding!r}")
    return text.encode("latin1")


# What a pickled numpy array is made of. numpy's own function has moved between modules; an array knows it.
_RECONSTRUCT: Any = np.empty(0).__reduce__()[0]
_ALLOWED: Mapping[tuple[str, str], Callable[..., Any]] = {
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): _encode,
}


class _ArrayUnpickler(pickle.Unpickler):
    """Reads plain containers and numpy arrays; any other global is refused, so a pickle can call nothing."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"forbidden global {module}.{name}") from None


def _read_members(archive: Path, names: Sequence[str]) -> dict[str, dict[bytes, Any]]:
    """The dicts pickled in members of a tar archive, by member name. Nothing is written to disk."""
    found: dict[str, dict[bytes, Any]] = {}
    # Uncompressed as a whole: gzip compares its checksum at the very end, which tarfile does not read to.
    payload = _files.read_payload(archive)
    try:
        with tarfile.open(fileobj=io.BytesIO(payload), mode="r:") as tar:
            for member in tar:
                if member.name not in names or not member.isfile():
                    continue
                stream = tar.extractfile(member)
                assert stream is not None  # it is a file
                found[member.name] = _unpickle(stream.read(), f"{archive}: {member.name}")
    except tarfile.TarError as exc:
        raise ValueError(f"{archive} is damaged, or not a tar archive: {exc}") from exc
    missing = [name for name in names if name not in found]
    if missing:
        raise ValueError(f"{archive} has no member {', '.join(missing)}")
    return found


def _unpickle(data: bytes, where: str) -> dict[bytes, Any]:
    try:
        content = _ArrayUnpickler(io.BytesIO(data), encoding="bytes").load()
    except Exception as exc:  # a damaged pickle can raise anything
        raise ValueError(f"{where} cannot be read: {exc}") from exc
    if not isinstance(content, dict):
        raise ValueError(f"{where} holds a {type(content).__name__}, not a dict")
    return content


class _Cifar(InMemoryImages):
    """What the two have in common; the subclasses say where things lie in the archive."""

    folder: ClassVar[str]
    archive: ClassVar[str]
    digest: ClassVar[str]
    members: ClassVar[Mapping[str, Sequence[str]]]
    meta: ClassVar[str]
    mirrors: ClassVar[Sequence[str]] = ("https://www.cs.toronto.edu/~kriz/",)

    def _load(
        self,
        data_file: str | os.PathLike[str] | None,
        mode: str,
        transform: Transform | None,
        download: bool,
        data_dir: str | os.PathLike[str] | None,
        label_key: bytes,
        names_key: bytes,
    ) -> None:
        _files.check_mode(mode, type(self).__name__)
        path = self._obtain(download, data_dir) if data_file is None else Path(data_file)
        members = self.members[mode]
        content = _read_members(path, [*members, self.meta])
        parts = [_images_and_labels(content[name], label_key, f"{path}: {name}") for name in members]
        names = content[self.meta].get(names_key)
        if not isinstance(names, list) or not all(isinstance(name, bytes) for name in names):
            raise ValueError(f"{path}: {self.meta} has no list of names {names_key.decode()!r}")
        images = torch.cat([images for images, _ in parts])
        labels = torch.cat([labels for _, labels in parts])
        super().__init__(images, labels, [name.decode() for name in names], transform)
        self.mode = mode

    def _obtain(self, download: bool, data_dir: str | os.PathLike[str] | None) -> Path:
        """Find or download the archive, and verify it."""

        def check(path: Path) -> None:
            _files.check_digest(path.read_bytes(), self.digest, path)

        folders = _files.search_folders(self.folder, data_dir, bare_home=True)
        path = _files.find([self.archive], folders)
        if path is not None:
            check(path)
            return path
        if not download:
            raise _files.not_found(type(self).__name__, self.archive, folders)
        urls = [f"{mirror.rstrip('/')}/{self.archive}" for mirror in self.mirrors]
        return fetch(self.archive, urls, _files.download_folder(self.folder, data_dir), check=check)


def _images_and_labels(content: dict[bytes, Any], label_key: bytes, where: str) -> tuple[Tensor, Tensor]:
    data, labels = content.get(b"data"), content.get(label_key)
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != PIXELS:
        raise ValueError(f"{where}: 'data' is not a uint8 array of shape [N, {PIXELS}]")
    if not isinstance(labels, list) or len(labels) != len(data) or not all(type(label) is int for label in labels):
        raise ValueError(f"{where}: {label_key.decode()!r} is not a list of {len(data)} integers")
    # .copy(): an unpickled array may be read-only.
    return torch.from_numpy(data.copy()).view(-1, 3, 32, 32), torch.tensor(labels, dtype=torch.int64)


class Cifar10(_Cifar):
    """Photographs of ten classes, 32 x 32 in colour: 50,000 for training, 10,000 for testing.

    Source: A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.

    A sample is ``(float32 [3, 32, 32] in [0, 1], int)``. The archive ``cifar-10-python.tar.gz`` is looked for
    in ``data_dir``, then in ``$HAPI_DATA_HOME/cifar10`` and ``$HAPI_DATA_HOME``, then in
    ``~/.cache/hapi/cifar10``. If it is nowhere it is downloaded to the first of these that is set. It is
    verified by its published MD5, and read in memory by an unpickler that can build arrays and nothing else.

    Args:
        data_file: An archive of the same form to read instead. Not verified by a hash.
        mode: ``"train"`` or ``"test"``.
        transform: Called with each float32 image; see :class:`InMemoryImages`.
        download: Download the archive if it is not found.
        data_dir: The folder that holds the archive, or shall hold it.

    Attributes:
        mirrors: Where to download from, in order. Set it on the class to use your own.

    Raises:
        DatasetNotFoundError: The archive is not here and cannot be had.
        ValueError: The archive is damaged, not the right one, or wants to run code; or an argument is wrong.

    Example:
        >>> image, label = Cifar10(mode="test")[0]
    """

    folder: ClassVar[str] = "cifar10"
    archive: ClassVar[str] = "cifar-10-python.tar.gz"
    digest: ClassVar[str] = "md5:c58f30108f718f92721af3b95e74349a"
    members: ClassVar[Mapping[str, Sequence[str]]] = {
        "train": tuple(f"cifar-10-batches-py/data_batch_{i}" for i in range(1, 6)),
        "test": ("cifar-10-batches-py/test_batch",),
    }
    meta: ClassVar[str] = "cifar-10-batches-py/batches.meta"

    def __init__(
        self,
        data_file: str | os.PathLike[str] | None = None,
        mode: str = "train",
        transform: Transform | None = None,
        download: bool = True,
        data_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        self._load(data_file, mode, transform, download, data_dir, b"labels", b"label_names")


class Cifar100(_Cifar):
    """Photographs of 100 classes in 20 groups, 32 x 32 in colour: 50,000 for training, 10,000 for testing.

    Like :class:`Cifar10`, with the archive ``cifar-100-python.tar.gz`` and the folder ``cifar100``.

    Args:
        data_file: As in :class:`Cifar10`.
        mode: ``"train"`` or ``"test"``.
        transform: As in :class:`Cifar10`.
        download: As in :class:`Cifar10`.
        data_dir: As in :class:`Cifar10`.
        coarse: Label with the 20 groups instead of the 100 classes.

    Example:
        >>> groups = Cifar100(mode="test", coarse=True)
    """

    folder: ClassVar[str] = "cifar100"
    archive: ClassVar[str] = "cifar-100-python.tar.gz"
    digest: ClassVar[str] = "md5:eb9058c3a382ffc7106e4002c42a8d85"
    members: ClassVar[Mapping[str, Sequence[str]]] = {
        "train": ("cifar-100-python/train",),
        "test": ("cifar-100-python/test",),
    }
    meta: ClassVar[str] = "cifar-100-python/meta"

    def __init__(
        self,
        data_file: str | os.PathLike[str] | None = None,
        mode: str = "train",
        transform: Transform | None = None,
        download: bool = True,
        data_dir: str | os.PathLike[str] | None = None,
        coarse: bool = False,
    ) -> None:
        kind = b"coarse" if coarse else b"fine"
        self._load(data_file, mode, transform, download, data_dir, kind + b"_labels", kind + b"_label_names")
