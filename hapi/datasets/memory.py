"""Labelled images that lie in memory as bytes and become floats a batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import index as as_index
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

__all__ = ["InMemoryImages", "Transform"]

Transform = Callable[[Tensor], Any]
"""Takes a float32 image ``[C, H, W]`` in [0, 1]; what it returns is the sample's first part."""


class InMemoryImages(Dataset[tuple[Any, int]]):
    """Images and labels in tensors; samples are float32 in [0, 1], channels first, with an integer label.

    The bytes are kept as they are (a quarter of the memory of floats); ``pixel / divisor`` is computed when a
    sample or a batch is read. The same pixel gives the same bits whichever way it is read.

    Args:
        images: uint8 ``[N, C, H, W]``.
        labels: int64 ``[N]``, each in ``0 .. len(classes) - 1``.
        classes: The name of each class.
        transform: Called with each float32 image ``[C, H, W]``; its result takes the image's place.
        divisor: The pixel value that stands for 1.0.

    Raises:
        TypeError: A tensor has the wrong dtype, or ``transform`` cannot be called.
        ValueError: A tensor has the wrong shape, or a label has no class.

    Example:
        >>> images = torch.zeros(10, 1, 28, 28, dtype=torch.uint8)
        >>> data = InMemoryImages(images, torch.arange(10), classes=[str(i) for i in range(10)])
        >>> image, label = data[3]
        >>> batch, labels = data.gather(torch.tensor([0, 5]))
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        classes: Sequence[str],
        transform: Transform | None = None,
        *,
        divisor: int = 255,
    ) -> None:
        where = type(self).__name__
        if images.dtype != torch.uint8 or labels.dtype != torch.int64:
            raise TypeError(f"{where}: images must be uint8 and labels int64, not {images.dtype} and {labels.dtype}")
        if images.ndim != 4 or labels.shape != images.shape[:1]:
            raise ValueError(
                f"{where}: images must have shape [N, C, H, W] and labels [N], "
                f"not {list(images.shape)} and {list(labels.shape)}"
            )
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < len(classes):
            raise ValueError(
                f"{where}: labels lie in {int(labels.min())} .. {int(labels.max())}, "
                f"but there are {len(classes)} classes"
            )
        if transform is not None and not callable(transform):
            raise TypeError(f"{where}: transform must be callable or None, not {type(transform).__name__}")
        if divisor < 1:
            raise ValueError(f"{where}: divisor must be at least 1, not {divisor}")
        self.images = images
        self.labels = labels
        self.classes = list(classes)
        self.transform = transform
        self.divisor = divisor
        # A tensor, not a number: bytes / float32 tensor is float32 whatever the default dtype, in one pass.
        self._scale = torch.tensor(divisor, dtype=torch.float32)

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """The raw ``(uint8 [N, C, H, W], int64 [N])``, not copied."""
        return self.images, self.labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        """One sample; indices behave as a list's do.

        Raises:
            IndexError: There is no such sample.
        """
        position = as_index(index)
        if not -len(self) <= position < len(self):
            raise IndexError(f"index {position} is out of range: {type(self).__name__} has {len(self)} samples")
        return self._transformed(self.images[position] / self._scale), int(self.labels[position])

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Any, int]]:
        """The samples at ``indices``, read by one gather. torch's DataLoader calls this."""
        images, labels = self._rows(torch.as_tensor(indices, dtype=torch.int64))
        return [(self._transformed(image), label) for image, label in zip(images, labels.tolist(), strict=True)]

    def gather(self, index: Tensor | slice) -> tuple[Any, Tensor]:
        """A whole batch: what collating the samples at ``index`` gives, bit for bit, without making them.

        Args:
            index: int64 ``[B]``, or a slice.

        Returns:
            Images, float32 ``[B, C, H, W]`` in [0, 1] (with a ``transform``: its results, collated), and
            labels, int64 ``[B]``.

        Raises:
            IndexError: There is no such sample.
        """
        images, labels = self._rows(index)
        if self.transform is None:
            return images, labels
        return default_collate([self.transform(image) for image in images]), labels

    def finish(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of :attr:`tensors` -> the batch that :meth:`gather` makes of them without a transform, bit for bit.

        Computed on the device where the rows are: bytes are a quarter of the way of floats.

        Args:
            images: uint8 ``[B, C, H, W]``.
            labels: int64 ``[B]``.

        Returns:
            Images, float32 ``[B, C, H, W]`` in [0, 1], and the labels.
        """
        return images / _on_device(self.divisor, images.device), labels

    def _rows(self, index: Tensor | slice) -> tuple[Tensor, Tensor]:
        if isinstance(index, slice):
            # Cloned: a slice is a view, and writing into the batch would write into the dataset.
            return self.images[index] / self._scale, self.labels[index].clone()
        try:
            labels = self.labels.index_select(0, index)  # several times faster than labels[index]
        except IndexError:  # index_select knows no negative indices
            index = torch.where(index < 0, index + len(self), index)
            try:
                labels = self.labels.index_select(0, index)
            except IndexError:
                name = type(self).__name__
                raise IndexError(f"an index is out of range: {name} has {len(self)} samples") from None
        return self.images.index_select(0, index) / self._scale, labels

    def _transformed(self, image: Tensor) -> Any:
        return image if self.transform is None else self.transform(image)


@lru_cache(maxsize=64)
def _on_device(divisor: int, device: torch.device) -> Tensor:
    # On CUDA a divisor on the host would be turned into a factor: other last bits.
    return torch.full((), divisor, dtype=torch.float32, device=device)
