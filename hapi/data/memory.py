"""Data that lies in memory: a whole batch is one gather.

A host computes on what ``gather`` gives. For other devices bytes stay bytes on the way: rows are gathered as they lie,
moved, and finished there (:class:`InMemory`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from hapi.data.trees import describe, leaves, map_tree

__all__ = [
    "InMemory",
    "Lending",
    "Resident",
    "Rows",
    "accelerated",
    "arrays_gather",
    "dataset_gather",
    "transformed",
]

Gather = Callable[[Tensor | slice], Any]


def accelerated(device: torch.device) -> bool:
    """Whether batches have to be moved to get there."""
    return device.type != "cpu"


class Rows(NamedTuple):
    """Rows as they lie in memory; ``finish(*fields)`` makes the batch of them, on whatever device they are."""

    fields: tuple[Tensor, ...]
    finish: Callable[..., Any]


class InMemory:
    """Tensors that batches are gathered from.

    Args:
        tree: A tensor, or nested tuples, lists and dicts of them; the first dimension is the sample.
        finish: Makes the batch of the gathered tensors of a flat tuple, on the device they lie on. None: they are it.
        chosen: int64 ``[N]``: which rows of the tree are the data, in its order. None: all.
    """

    def __init__(self, tree: Any, finish: Callable[..., Any] | None = None, chosen: Tensor | None = None) -> None:
        self.tree = tree
        self.finish = finish
        self.chosen = chosen

    @staticmethod
    def of(dataset: Any) -> InMemory | None:
        """Of a TensorDataset, a dataset with ``gather``, ``tensors`` and ``finish`` (hapi.datasets), or a Subset."""
        if type(dataset) is TensorDataset:
            return InMemory(tuple(dataset.tensors))
        if type(dataset) is Subset:
            inner = InMemory.of(dataset.dataset)
            return None if inner is None else inner.subset(_positions(dataset))
        lying = getattr(dataset, "tensors", None)
        if (
            isinstance(lying, tuple)
            and all(isinstance(leaf, Tensor) for leaf in lying)
            and dataset_gather(dataset) is not None
            and _own(dataset, "finish", "gather", "__getitem__", "__getitems__")
        ):
            return InMemory(lying, dataset.finish)
        return None

    def subset(self, positions: Tensor) -> InMemory:
        """The rows at ``positions`` (int64)."""
        chosen = positions if self.chosen is None else self.chosen[positions]
        return InMemory(self.tree, self.finish, chosen)

    @property
    def device(self) -> torch.device | None:
        """Where all tensors lie; None where they lie in several places."""
        devices = {leaf.device for leaf in leaves(self.tree)}
        return devices.pop() if len(devices) == 1 else None

    @property
    def bytes(self) -> int:
        """What a copy takes."""
        each = (
            math.prod(leaf.shape[1:]) * leaf.element_size() * (len(leaf) if self.chosen is None else len(self.chosen))
            for leaf in leaves(self.tree)
        )
        return sum(each)

    def to(self, device: torch.device) -> InMemory:
        """A copy on the device, of the chosen rows only."""
        chosen = self.chosen
        tree = self.tree
        if chosen is not None:
            tree = map_tree(lambda leaf: leaf.index_select(0, chosen.to(leaf.device)), tree)
        return InMemory(map_tree(lambda leaf: leaf.to(device), tree), self.finish)

    def batch(self, index: Tensor | slice) -> Any:
        """The finished batch at ``index`` (an int64 tensor on the tensors' device, or a slice), where the rows lie.

        Shares no memory with them: a network may write into its input.
        """
        index = self._chosen(index)
        rows = map_tree(lambda leaf: _taken(leaf, index), self.tree)
        return rows if self.finish is None else self.finish(*rows)

    def pinned(self, index: Tensor | slice) -> Any:
        """The rows at ``index`` in page-locked memory, unfinished: :class:`Rows` where there is something to finish."""
        index = self._chosen(index)
        rows = map_tree(lambda leaf: _taken_pinned(leaf, index), self.tree)
        return rows if self.finish is None else Rows(rows, self.finish)

    def unfinished(self, index: Tensor | slice) -> Any:
        """As :meth:`pinned`, in ordinary memory, for devices that know no other."""
        index = self._chosen(index)
        rows = map_tree(lambda leaf: _taken(leaf, index), self.tree)
        return rows if self.finish is None else Rows(rows, self.finish)

    def _chosen(self, index: Tensor | slice) -> Tensor | slice:
        return index if self.chosen is None else _taken(self.chosen, index)


def _taken(leaf: Tensor, index: Tensor | slice) -> Tensor:
    """Rows as tensors of their own: what a network writes into its input must not change the data."""
    return leaf[index].clone() if isinstance(index, slice) else leaf.index_select(0, index)


def _taken_pinned(leaf: Tensor, index: Tensor | slice) -> Tensor:
    # torch's page-locked memory comes from a cache that gives it out anew only when the copies out of it have ended.
    leaf = leaf.detach()
    if isinstance(index, slice):
        part = leaf[index]
        return torch.empty(part.shape, dtype=leaf.dtype, pin_memory=True).copy_(part)
    out = torch.empty((len(index), *leaf.shape[1:]), dtype=leaf.dtype, pin_memory=True)
    return torch.index_select(leaf, 0, index, out=out)


class Resident:
    """Moves in-memory data to the device once, where that is wanted.

    Args:
        wanted: True, False, or ``"auto"``: where it takes at most half of the device's free memory.
        device: Where to. On a host there is nothing to move.
        where: Whose argument it is, for messages.

    Raises:
        ValueError: ``wanted`` is none of these.
    """

    def __init__(self, wanted: bool | str, device: torch.device, where: str) -> None:
        if not isinstance(wanted, bool) and wanted != "auto":
            raise ValueError(f"{where}: keep_on_device={wanted!r}; accepted: False, True, 'auto'")
        self.wanted = wanted if accelerated(device) else False
        self.device = device
        self._kept: dict[int, tuple[Any, InMemory | None]] = {}

    def __call__(self, data: Any, lying: InMemory | None, what: str) -> InMemory | None:
        """``lying`` on the device; None where it stays where it is. The same ``data`` is moved once only.

        Raises:
            ValueError: It was asked for, but the data does not lie in memory, or does not fit.
        """
        if not self.wanted:
            return None
        if id(data) not in self._kept:
            # The data is kept too: its id stays taken.
            self._kept[id(data)] = data, self._moved(data, lying, what)
        return self._kept[id(data)][1]

    def _moved(self, data: Any, lying: InMemory | None, what: str) -> InMemory | None:
        if lying is None:
            if self.wanted == "auto":
                return None
            raise ValueError(
                f"{what} is {describe(data)}, which does not lie in memory as it is used; keep_on_device=True takes "
                "arrays, a TensorDataset, or a dataset of hapi.datasets without a transform"
            )
        free = free_memory(self.device)
        if self.wanted == "auto" and (free is None or lying.bytes > free / 2):
            return None
        if free is not None and lying.bytes > free:
            raise ValueError(
                f"keep_on_device=True: {what} takes {_gib(lying.bytes)}, but {self.device} has {_gib(free)} free; "
                "give False or 'auto'"
            )
        return lying.to(self.device)


def free_memory(device: torch.device) -> int | None:
    """Free bytes on a device; None where that is not known."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def arrays_gather(tree: Any) -> Gather:
    """The gather function of a tree of tensors. Flat tuples, the common case, get a function without recursion."""
    if isinstance(tree, tuple) and all(isinstance(leaf, Tensor) for leaf in tree):

        def gather_flat(index: Tensor | slice) -> tuple[Tensor, ...]:
            return tuple([_taken(leaf, index) for leaf in tree])

        return gather_flat

    def gather(index: Tensor | slice) -> Any:
        return map_tree(lambda leaf: _taken(leaf, index), tree)

    return gather


class Lending:
    """Batches of host tensors in their order, as views, for a network that only reads what it is given.

    A copy of each batch takes up to a twentieth of an evaluation. Whether the network writes into its input is found
    out on a copy, the first batch: if that has changed when the next one is asked for, all batches are copies. A
    network that begins to write later is told of at the end; torch counts a tensor's changes through all its views.

    Args:
        tensors: The data, on the host.
        what: What to call it in messages.
    """

    def __init__(self, tensors: tuple[Tensor, ...], what: str) -> None:
        self.tensors = tensors
        self.what = what
        self._lends: bool | None = None  # None: not known yet

    @staticmethod
    def of(lying: InMemory, what: str) -> Lending | None:
        """Of plain tensors that are batches as they lie; None of others."""
        # A tensor that was made in inference mode does not count its changes.
        plain = type(lying.tree) is tuple and all(
            type(leaf) is Tensor and not leaf.requires_grad and not leaf.is_inference() for leaf in lying.tree
        )
        return Lending(lying.tree, what) if plain and lying.finish is None and lying.chosen is None else None

    def batches(self, rows: int, size: int) -> Iterator[tuple[Tensor, ...]]:
        """The first ``rows`` rows, ``size`` at a time."""
        done = 0
        if self._lends is None:
            done = min(size, rows)
            copies = tuple([_counting_copy(leaf[:done]) for leaf in self.tensors])
            versions = _versions(copies)
            yield copies
            pairs = zip(copies, self.tensors, strict=True)
            self._lends = _versions(copies) == versions and all(torch.equal(copy, leaf[:done]) for copy, leaf in pairs)
            del copies
        lent = [self._lends and _starts_alike(leaf, size) for leaf in self.tensors]
        before = _versions(self.tensors)
        try:
            for first in range(done, rows, size * _AT_ONCE):
                block = slice(first, min(first + size * _AT_ONCE, rows))
                parts = [torch.split(leaf[block], size) for leaf in self.tensors]
                yield from zip(
                    *(part if alike else map(_counting_copy, part) for part, alike in zip(parts, lent, strict=True)),
                    strict=True,
                )
        finally:
            if self._lends and _versions(self.tensors) != before:
                self._lends = False
                warnings.warn(
                    f"{self.what}: arrays were written into while they were evaluated. The network got parts of them, "
                    "not copies, since it had not written into its first batch. From here on it gets copies; give a "
                    "DataLoader to have copies from the start",
                    RuntimeWarning,
                    stacklevel=2,
                )


_AT_ONCE = 256  # views that are made in one call
_ALIGNED = 64


def _counting_copy(rows: Tensor) -> Tensor:
    """A copy that counts its changes, as a view does: a tensor that is made in inference mode does not."""
    with torch.inference_mode(False):
        return rows.clone()


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    return [tensor._version for tensor in tensors]


def _starts_alike(leaf: Tensor, size: int) -> bool:
    """Whether all batches begin where a copy would, in memory: at an odd place matrix products have other last bits."""
    stride = size * leaf.element_size() * math.prod(leaf.shape[1:])
    return leaf.is_contiguous() and leaf.data_ptr() % _ALIGNED == stride % _ALIGNED == 0


def dataset_gather(dataset: Any) -> Gather | None:
    """The gather function of a dataset that lies in host memory, or None.

    A TensorDataset, a dataset with a ``gather(index)`` method (hapi.datasets), or a Subset of one. A transform runs
    sample by sample, with generators of its own: no gather.
    """
    if type(dataset) is TensorDataset:
        if any(leaf.device.type != "cpu" for leaf in dataset.tensors):
            return None
        return arrays_gather(tuple(dataset.tensors))
    if type(dataset) is Subset:
        inner = dataset_gather(dataset.dataset)
        if inner is None:
            return None
        chosen = _positions(dataset)
        return lambda index: inner(chosen[index])
    if _own(dataset, "gather", "__getitem__", "__getitems__") and not transformed(dataset):
        gather: Gather = dataset.gather
        return gather
    return None


def transformed(dataset: Any) -> bool:
    """Whether a transform makes its samples."""
    return getattr(dataset, "transform", None) is not None


def _own(dataset: Any, name: str, *others: str) -> bool:
    """Whether the method is as new as the others: one that a subclass overrode says what the samples are."""
    if name in getattr(dataset, "__dict__", {}):
        return True
    for owner in type(dataset).__mro__:
        if name in vars(owner):
            return True
        if any(other in vars(owner) for other in others):
            return False
    return False


def _positions(subset: Subset[Any]) -> Tensor:
    indices: Any = subset.indices
    if not isinstance(indices, Tensor):
        # torch takes no array that is read backwards.
        indices = np.ascontiguousarray(indices) if isinstance(indices, np.ndarray) else list(indices)
    return torch.as_tensor(indices, dtype=torch.int64)
