"""A user's DataLoader over data that lies in memory, served by one gather per batch where nothing else changes."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)
from torch.utils.data.distributed import DistributedSampler

from hapi.data.loader import to_device
from hapi.data.memory import InMemory
from hapi.data.trees import leaves

__all__ = ["GatheredLoader", "draws_at_the_start", "recognised", "served"]

# Loaders with persistent workers draw the workers' seed once in their life.
_seeded: weakref.WeakSet[DataLoader[Any]] = weakref.WeakSet()


def recognised(data: DataLoader[Any]) -> InMemory | None:
    """What a gather gives the same batches of: torch's own DataLoader and collation, over plain tensors in memory.

    None for any other DataLoader.
    """
    alike = (
        type(data) is DataLoader
        and data.batch_sampler is not None
        and data.collate_fn is default_collate
        and data.worker_init_fn is None
        and not data.timeout
        and getattr(data, "in_order", True)
        and (not data.pin_memory or torch.accelerator.is_available())  # torch warns, and it must
    )
    return _lying(data.dataset) if alike else None


def served(data: DataLoader[Any]) -> Iterable[Any]:
    """What gives the DataLoader's batches, fastest."""
    return data if recognised(data) is None else GatheredLoader(data)


def _lying(dataset: Any) -> InMemory | None:
    try:
        lying = InMemory.of(dataset)
    except (TypeError, ValueError, RuntimeError):  # a Subset whose indices are no ints
        return None
    return lying if lying is not None and all(map(_plain, leaves(lying.tree))) else None


def _plain(leaf: Any) -> bool:
    # Other memory formats would not survive a gather as they survive stacking.
    return (
        type(leaf) is Tensor
        and leaf.device.type == "cpu"
        and leaf.layout is torch.strided
        and leaf.is_contiguous()
        and not leaf.requires_grad
    )


def draws_at_the_start(data: DataLoader[Any]) -> bool:
    """Whether the order is drawn before the first batch, so that reading on draws nothing."""
    batches, sampler = data.batch_sampler, data.sampler
    plain = type(batches) is BatchSampler and batches.sampler is sampler
    return plain and type(sampler) in _EAGER and getattr(sampler, "generator", None) is None


_EAGER = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)


class GatheredLoader(Iterable[Any]):
    """Iterates as the DataLoader would: the same batches, the same draws from the same generators in the same order.

    Args:
        data: A :func:`recognised` DataLoader.
        device: The accelerator that batches go to: they are left unfinished, in page-locked memory for CUDA. None for
            the host.
        resident: The data on the device, where it is kept there.
    """

    def __init__(
        self, data: DataLoader[Any], device: torch.device | None = None, resident: InMemory | None = None
    ) -> None:
        self.data = data
        self.device = device
        self.resident = resident
        self.sampler, self.batch_sampler = data.sampler, data.batch_sampler

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[Any]:
        lying = _lying(self.data.dataset)
        if lying is None:  # it has been given a transform since
            return iter(self.data)
        return self._read(self._indices(), lying)

    def _read(self, indices: Iterator[Any], lying: InMemory) -> Iterator[Any]:
        for chosen in indices:
            index = self._index(chosen)
            if index is None:
                yield self._plainly(chosen)
                continue
            try:
                batch = self._gather(lying, index)
            except (IndexError, RuntimeError):  # a negative index, a dtype that has no gather, or a real mistake
                batch = self._plainly(chosen)
            yield batch

    def _gather(self, lying: InMemory, index: Tensor) -> Any:
        if self.resident is not None:
            assert self.device is not None
            if not 0 <= int(index.min()) <= int(index.max()) < len(self.data.dataset):  # type: ignore[arg-type]
                raise IndexError  # which a device tells only by failing for good
            batch = self.resident.batch(to_device(index, self.device))
        elif self.device is None:
            batch = lying.batch(index)
        else:
            return lying.pinned(index) if self.device.type == "cuda" else lying.unfinished(index)
        return list(batch)

    def _plainly(self, chosen: Any) -> Any:
        dataset: Any = self.data.dataset
        if callable(getattr(dataset, "__getitems__", None)):
            return default_collate(dataset.__getitems__(chosen))
        return default_collate([dataset[index] for index in chosen])

    @staticmethod
    def _index(chosen: Any) -> Tensor | None:
        try:
            index = torch.as_tensor(chosen)
        except (TypeError, ValueError, RuntimeError):
            return None
        return index if index.dtype is torch.int64 and index.ndim == 1 else None

    def _indices(self) -> Iterator[Any]:
        """The sampler's batches, asked for when torch's iterators would ask."""
        data = self.data
        batches: Any = data.batch_sampler
        chosen: Iterator[Any]
        if not (data.persistent_workers and (data in _seeded or data._iterator is not None)):
            chosen = iter(batches)
            # The workers' base seed, which torch draws without workers too.
            torch.empty((), dtype=torch.int64).random_(generator=data.generator)
        if not data.num_workers:
            return chosen
        if data.persistent_workers:
            _seeded.add(data)
        chosen = iter(batches)  # torch's reader with workers begins anew, after the seed
        waiting = deque(itertools.islice(chosen, data.num_workers * (data.prefetch_factor or 2)))
        return _queued(waiting, chosen)


def _queued(waiting: deque[Any], chosen: Iterator[Any]) -> Iterator[Any]:
    while waiting:
        now = waiting.popleft()
        waiting.extend(itertools.islice(chosen, 1))
        yield now
