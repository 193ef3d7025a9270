"""MNIST: 70,000 handwritten digits; and the reader of its file format, IDX."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from hapi.datasets import _files
from hapi.datasets._download import fetch
from hapi.datasets.memory import InMemoryImages, Transform

__all__ = ["MNIST", "parse_idx"]

UINT8 = 0x08
"""IDX's code for unsigned bytes, the only element type that MNIST and its relatives use."""


def parse_idx(payload: bytes, path: Path, ndim: int) -> Tensor:
    """The array in an IDX file of unsigned bytes.

    Format (https://yann.lecun.com/exdb/mnist): two zero bytes, the element type, the number of dimensions,
    each dimension as a big-endian uint32, then the elements in C order.

    Args:
        payload: The file's content, uncompressed.
        path: Of the file, for messages.
        ndim: The number of dimensions it must have.

    Returns:
        uint8, with the shape that the header says.

    Raises:
        ValueError: The header is not that of such a file, or the length is not what the header promises.
    """
    header = 4 + 4 * ndim
    if len(payload) < header or payload[:2] != b"\0\0":
        raise ValueError(f"{path} is not an IDX file with {ndim} dimensions: it starts with {payload[:4].hex(' ')}")
    kind, dims = payload[2], payload[3]
    if kind != UINT8 or dims != ndim:
        raise ValueError(
            f"{path}: expected an IDX file of unsigned bytes (type 0x08) with {ndim} dimensions, "
            f"found type 0x{kind:02x} with {dims}"
        )
    shape = struct.unpack_from(f">{ndim}I", payload, 4)
    promised, found = math.prod(shape), len(payload) - header
    if found != promised:
        raise ValueError(
            f"{path} is damaged: its header promises {promised} bytes of data for shape {list(shape)}, "
            f"but {found} follow"
        )
    data = np.frombuffer(payload, np.uint8, offset=header).reshape(shape)
    return torch.from_numpy(data.copy())  # frombuffer's array is read-only


class MNIST(InMemoryImages):
    """Handwritten digits, 28 x 28: 60,000 for training and 10,000 for testing (LeCun, Cortes, Burges).

    A sample is ``(float32 [1, 28, 28] in [0, 1], int)``. The files, gzip or plain, named as on the original
    page (``train-images-idx3-ubyte``) or with a dot (``train-images.idx3-ubyte``), are looked for in
    ``data_dir``, then in ``$HAPI_DATA_HOME/mnist`` and ``$HAPI_DATA_HOME``, then in ``~/.cache/hapi/mnist``.
    If they are nowhere they are downloaded to the first of these that is set. Their content is verified by
    its hash.

    Args:
        image_path: An IDX file of images ``[N, H, W]`` to read instead, gzip or plain; no hash is checked.
        label_path: The IDX file of its labels ``[N]``; goes with ``image_path``.
        mode: ``"train"`` or ``"test"``.
        transform: Called with each float32 image; see :class:`InMemoryImages`.
        download: Download what is not found.
        data_dir: The folder that holds the files, or shall hold them.

    Attributes:
        mirrors: Where to download from, in order. Set it on the class to use your own.

    Raises:
        DatasetNotFoundError: The files are not here and cannot be had.
        ValueError: A file is damaged or not the right one, or an argument is wrong.

    Example:
        >>> train, test = MNIST(mode="train"), MNIST(mode="test")
        >>> image, label = train[0]
    """

    folder: ClassVar[str] = "mnist"
    mirrors: ClassVar[Sequence[str]] = (
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    )
    digests: ClassVar[Mapping[str, str]] = {
        "train-images-idx3-ubyte": "sha256:ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "train-labels-idx1-ubyte": "sha256:65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "t10k-images-idx3-ubyte": "sha256:0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "t10k-labels-idx1-ubyte": "sha256:ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    }
    """Of the uncompressed content, since mirrors compress differently."""
    class_names: ClassVar[Sequence[str]] = tuple("0123456789")
    bare_home: ClassVar[bool] = True
    """Whether files directly in ``$HAPI_DATA_HOME`` are taken to be this dataset's."""

    def __init__(
        self,
        image_path: str | os.PathLike[str] | None = None,
        label_path: str | os.PathLike[str] | None = None,
        mode: str = "train",
        transform: Transform | None = None,
        download: bool = True,
        data_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        where = type(self).__name__
        _files.check_mode(mode, where)
        if (image_path is None) != (label_path is None):
            missing = "image_path" if image_path is None else "label_path"
            raise ValueError(f"{where}: image_path and label_path go together, but {missing} is not given")
        classes = self.class_names
        if image_path is not None and label_path is not None:
            image_file, label_file = Path(image_path), Path(label_path)
            image_bytes, label_bytes = _files.read_payload(image_file), _files.read_payload(label_file)
            images, labels = _pair(image_file, image_bytes, label_file, label_bytes)
            if len(labels) and int(labels.max()) >= len(classes):
                classes = [str(label) for label in range(int(labels.max()) + 1)]
        else:
            prefix = "train" if mode == "train" else "t10k"
            image_file, image_bytes = self._read(f"{prefix}-images-idx3-ubyte", download, data_dir)
            label_file, label_bytes = self._read(f"{prefix}-labels-idx1-ubyte", download, data_dir)
            images, labels = _pair(image_file, image_bytes, label_file, label_bytes)
        super().__init__(images, labels, classes, transform)
        self.mode = mode

    def _read(self, name: str, download: bool, data_dir: str | os.PathLike[str] | None) -> tuple[Path, bytes]:
        """Find or download one file; its path and its verified content."""
        digest = self.digests[name]

        def checked(path: Path) -> bytes:
            payload = _files.read_payload(path)
            _files.check_digest(payload, digest, path)
            return payload

        dotted = name.replace("-idx", ".idx")
        folders = _files.search_folders(self.folder, data_dir, bare_home=self.bare_home)
        path = _files.find([name, f"{name}.gz", dotted, f"{dotted}.gz"], folders)
        if path is None:
            if not download:
                raise _files.not_found(type(self).__name__, name, folders)
            urls = [f"{mirror.rstrip('/')}/{name}.gz" for mirror in self.mirrors]
            target = _files.download_folder(self.folder, data_dir)
            path = fetch(f"{name}.gz", urls, target, check=checked)
        return path, checked(path)


def _pair(image_file: Path, image_bytes: bytes, label_file: Path, label_bytes: bytes) -> tuple[Tensor, Tensor]:
    images = parse_idx(image_bytes, image_file, ndim=3)
    labels = parse_idx(label_bytes, label_file, ndim=1)
    if len(images) != len(labels):
        raise ValueError(f"{image_file} holds {len(images)} images, but {label_file} holds {len(labels)} labels")
    return images.unsqueeze(1), labels.to(torch.int64)
