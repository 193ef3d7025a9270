"""Which samples make up global batch k, in which order, and which of them are this rank's.

Order is a pure function of (seed, epoch) over the *global* batch, so global batch k is the same set of samples
for every number of ranks. Batches are cut without padding: parts differ by at most one row, and the tail may
leave ranks without rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from hapi.distributed.environment import detect

__all__ = ["BatchPlan", "DistributedBatchSampler", "epoch_order", "fold"]

_MASK = (1 << 64) - 1


def fold(seed: int, *numbers: int) -> int:
    """Mix integers into one 63-bit seed. The same on every machine and Python version, unlike ``hash``.

    The finaliser is SplitMix64's (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
    OOPSLA 2014), applied once per number.
    """
    state = 0
    for number in (seed, *numbers):
        state = (state + 0x9E3779B97F4A7C15 + (number & _MASK)) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def epoch_order(samples: int, *, seed: int, epoch: int) -> Tensor:
    """The shuffled order of an epoch: int64 ``[samples]``. Draws nothing from the global generators."""
    generator = torch.Generator().manual_seed(fold(seed, epoch))
    return torch.randperm(samples, generator=generator)


@dataclass(frozen=True)
class BatchPlan:
    """How an epoch of ``samples`` rows is cut into global batches, and those into one part per rank.

    Args:
        samples: Rows in the epoch, over all ranks.
        batch: Rows in a full global batch.
        rank: This process.
        world: Number of processes.
        drop_last: Leave out a last global batch that is not full.

    Example:
        >>> plan = BatchPlan(samples=10, batch=4, rank=1, world=3)
        >>> [plan.local(k) for k in range(plan.batches)]
        [(2, 3), (6, 7), (9, 10)]
    """

    samples: int
    batch: int
    rank: int = 0
    world: int = 1
    drop_last: bool = False

    @property
    def batches(self) -> int:
        """Global batches in the epoch; the same on every rank."""
        return self.samples // self.batch if self.drop_last else -(-self.samples // self.batch)

    @property
    def served(self) -> int:
        """Rows in the epoch once ``drop_last`` has been applied."""
        return self.batches * self.batch if self.drop_last else self.samples

    def rows(self, index: int) -> int:
        """Rows in global batch ``index``, over all ranks."""
        return min(self.batch, self.samples - index * self.batch)

    def local(self, index: int) -> tuple[int, int]:
        """This rank's part of global batch ``index``: start and stop in the epoch's order."""
        start, rows = index * self.batch, self.rows(index)
        share, extra = divmod(rows, self.world)
        first = start + self.rank * share + min(self.rank, extra)
        return first, first + share + (self.rank < extra)

    def after(self, rows: int) -> BatchPlan:
        """The plan of what is left of an epoch of which ``rows`` rows have been seen."""
        return replace(self, samples=self.samples - rows) if rows else self

    def some_rank_empty(self, index: int) -> bool:
        """Whether global batch ``index`` has fewer rows than there are ranks."""
        return self.rows(index) < self.world


class DistributedBatchSampler(Sampler[list[int]]):
    """Batches of indices for one rank, padded so that every rank has the same number of equal batches.

    For hand-written data-parallel loops, which need equal batch counts; ``Model.fit`` does not use it, since it
    cuts without padding. Ranks get contiguous blocks of each global batch, as in the reference.

    Args:
        dataset: Anything with a length.
        batch_size: Rows per rank and batch.
        num_replicas: Number of ranks. Default: from the launcher's environment.
        rank: This rank. Default: from the launcher's environment.
        shuffle: Shuffle with (seed, epoch); the epoch goes up by one per iteration.
        drop_last: Drop a short last batch.
        seed: Shuffling seed; the same on every rank.

    Raises:
        ValueError: An argument of the wrong type or range.

    Example:
        >>> sampler = DistributedBatchSampler(range(10), 2, num_replicas=2, rank=0)
        >>> list(sampler)
        [[0, 1], [4, 5], [8]]
    """

    def __init__(
        self,
        dataset: Sized,
        batch_size: int,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = False,
        drop_last: bool = False,
        *,
        seed: int = 0,
    ) -> None:
        if num_replicas is None or rank is None:
            env = detect()
            num_replicas = env.world if num_replicas is None else num_replicas
            rank = env.rank if rank is None else rank
        _check_int("batch_size", batch_size, 1)
        _check_int("num_replicas", num_replicas, 1)
        _check_int("rank", rank, 0)
        if rank >= num_replicas:
            raise ValueError(f"rank={rank} is not below num_replicas={num_replicas}")
        for name, value in (("shuffle", shuffle), ("drop_last", drop_last)):
            if not isinstance(value, bool):
                raise ValueError(f"{name} must be a bool, not {value!r}")
        self.dataset = dataset
        self.batch_size = batch_size
        self.nranks = num_replicas
        self.local_rank = rank
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.seed = seed
        self.epoch = 0
        self.num_samples = -(-len(dataset) // num_replicas)
        self.total_size = self.num_samples * num_replicas

    def __len__(self) -> int:
        if self.drop_last:
            return self.num_samples // self.batch_size
        return -(-self.num_samples // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        indices = self._local_indices()
        self.epoch += 1
        stop = len(self) * self.batch_size
        for start in range(0, min(stop, len(indices)), self.batch_size):
            yield indices[start : start + self.batch_size]

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration the one of ``epoch``."""
        self.epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """The epoch and the seed."""
        return {"epoch": self.epoch, "seed": self.seed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take :meth:`state_dict` back."""
        self.epoch, self.seed = int(state_dict["epoch"]), int(state_dict["seed"])

    def _local_indices(self) -> list[int]:
        count = len(self.dataset)
        order = epoch_order(count, seed=self.seed, epoch=self.epoch).tolist() if self.shuffle else range(count)
        padded = [order[i % count] for i in range(self.total_size)] if count else []
        block = self.batch_size * self.nranks
        tail = self.total_size % block
        indices: list[int] = []
        for start in range(self.local_rank * self.batch_size, self.total_size - tail, block):
            indices.extend(padded[start : start + self.batch_size])
        share = tail // self.nranks
        first = self.total_size - tail + self.local_rank * share
        indices.extend(padded[first : first + share])
        return indices


def _check_int(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an int of at least {least}, not {value!r}")


class OrderedBatches(Sampler[list[int]]):
    """The index lists of this rank's part of every global batch, for torch's DataLoader.

    ``order`` (set before each iteration) is the epoch's order, or None for 0, 1, 2 ...; ``skip`` rows of it have been
    seen; ``epoch`` goes with the indices, for generators that depend on it. A part without rows is left out: the loader
    above knows which those are.
    """

    def __init__(self, plan: BatchPlan) -> None:
        self.plan = plan
        self.order: Tensor | Sequence[int] | None = None
        self.skip = 0
        self.epoch = 0

    def __iter__(self) -> Iterator[list[int]]:
        plan, skip = self.plan.after(self.skip), self.skip
        for index in range(plan.batches):
            first, last = plan.local(index)
            if first == last:
                continue
            if self.order is None:
                indices = Indices(range(skip + first, skip + last))
            else:
                part = self.order[skip + first : skip + last]
                indices = Indices(part.tolist() if isinstance(part, Tensor) else part)
            indices.epoch = self.epoch
            yield indices

    def __len__(self) -> int:
        plan = self.plan.after(self.skip)
        return sum(a != b for a, b in map(plan.local, range(plan.batches)))


class Indices(list[int]):
    """The indices of a batch, with the epoch that they are read in. Survives the way to a worker process."""

    epoch: int = 0
