"""A user's own loader on several ranks: cut so that each sample is read once, by one rank."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from hapi.data.gathered import served
from hapi.data.loader import NOTHING_SEEN, Loader, ShardedStream, Start, StreamLoader, _Unsized
from hapi.data.sampler import BatchPlan, DistributedBatchSampler, OrderedBatches
from hapi.distributed.collectives import broadcast_object
from hapi.distributed.environment import Environment

__all__ = ["shard_dataloader", "shard_iterable"]


def shard_dataloader(data: DataLoader[Any], what: str, env: Environment) -> Loader:
    """Cut a user's DataLoader over the ranks; ``batch_size`` stays per rank.

    - A distributed sampler is used as it is.
    - A plain sampler's order is asked of rank 0 each epoch, and every global batch is cut in contiguous parts.
    - A batch sampler's batches are dealt out in turn.
    - An IterableDataset is cut by (rank, worker).
    """
    if isinstance(data.dataset, IterableDataset):
        stream = _clone(data, ShardedStream(data.dataset, env.rank, env.world), batch_size=data.batch_size)
        return StreamLoader(_Unsized(stream), f"{what} ({type(data.dataset).__name__})")
    if isinstance(data.sampler, DistributedSampler) or isinstance(data.batch_sampler, DistributedBatchSampler):
        return StreamLoader(served(data), what)
    if type(data.batch_sampler) is BatchSampler:
        return _CutLoader(data, env)
    return _DealtLoader(data, env)


def shard_iterable(data: Iterable[Any], env: Environment) -> Loader:
    """Deal an iterable's batches out in turn: every rank iterates all of them and keeps each n-th."""
    return _TurnLoader(data, env)


def _clone(data: DataLoader[Any], dataset: Any, **chosen: Any) -> DataLoader[Any]:
    """The same DataLoader over something else."""
    if "batch_sampler" not in chosen and chosen.get("batch_size") is not None:
        chosen["drop_last"] = data.drop_last
    if data.num_workers:
        chosen.update(
            prefetch_factor=data.prefetch_factor,
            persistent_workers=data.persistent_workers,
            multiprocessing_context=data.multiprocessing_context,
            timeout=data.timeout,
            worker_init_fn=data.worker_init_fn,
        )
    return DataLoader(
        dataset,
        num_workers=data.num_workers,
        collate_fn=data.collate_fn,
        pin_memory=data.pin_memory,
        generator=data.generator,
        **chosen,
    )


class _CutLoader(Loader):
    """Rank 0's order of samples, cut without padding."""

    def __init__(self, data: DataLoader[Any], env: Environment) -> None:
        self.sampler: Any = data.sampler
        self.env = env
        assert data.batch_size is not None
        sampler: Any = data.sampler
        rows = len(sampler)
        self.plan = BatchPlan(rows, data.batch_size * env.world, env.rank, env.world, data.drop_last)
        self.batches, self.samples = self.plan.batches, self.plan.served
        if self.batches == 0:
            raise ValueError(f"the DataLoader's {rows} samples do not fill one global batch of {self.plan.batch}")
        self.ordered = OrderedBatches(self.plan)
        self.inner = _clone(data, data.dataset, batch_sampler=self.ordered)
        self.source = served(self.inner)

    def rows(self, index: int, seen: int = 0) -> int | None:
        return self.plan.after(seen).rows(index)

    def left(self, start: Start) -> int | None:
        return self.plan.after(start.rows).batches

    def template(self) -> Any:
        assert self.inner.collate_fn is not None
        return self.inner.collate_fn([self.inner.dataset[0]])

    def epoch(self, epoch: int, start: Start = NOTHING_SEEN) -> Iterator[Any]:
        plan = self.plan.after(start.rows)
        if isinstance(self.sampler, SequentialSampler):
            order = None
        else:
            mine = list(self.sampler) if self.env.rank == 0 else None
            order = broadcast_object(mine, group=self.env.group)
        self.ordered.order, self.ordered.skip, self.ordered.epoch = order, start.rows, epoch
        batches = iter(self.source)
        for index in range(plan.batches):
            first, last = plan.local(index)
            yield None if first == last else next(batches)


class _DealtLoader(Loader):
    """Rank 0's batches (from a batch sampler, or single samples where batch_size is None), dealt out in turn."""

    def __init__(self, data: DataLoader[Any], env: Environment) -> None:
        self.single = data.batch_sampler is None
        self.source: Any = data.sampler if self.single else data.batch_sampler
        self.env = env
        source: Any = self.source
        self.batches = -(-len(source) // env.world)
        self.mine: list[Any] = []
        self.inner = _clone(
            data,
            data.dataset,
            **({"sampler": _Listed(self), "batch_size": None} if self.single else {"batch_sampler": _Listed(self)}),
        )
        self.served = served(self.inner)

    def epoch(self, epoch: int, start: Start = NOTHING_SEEN) -> Iterator[Any]:
        everything = list(self.source) if self.env.rank == 0 else None
        everything = broadcast_object(everything, group=self.env.group)
        self.mine = everything[start.batches * self.env.world + self.env.rank :: self.env.world]
        yield from self.served


class _Listed:
    """A sampler that gives what its loader lists at the time."""

    def __init__(self, owner: _DealtLoader) -> None:
        self.owner = owner

    def __iter__(self) -> Iterator[Any]:
        return iter(self.owner.mine)

    def __len__(self) -> int:
        return len(self.owner.mine)


class _TurnLoader(StreamLoader):
    def __init__(self, source: Iterable[Any], env: Environment) -> None:
        super().__init__(source, f"the {type(source).__name__} of batches")
        self.env = env
        if self.batches is not None:
            self.batches = -(-self.batches // env.world)

    def epoch(self, epoch: int, start: Start = NOTHING_SEEN) -> Iterator[Any]:
        world, rank = self.env.world, self.env.rank
        return itertools.islice(super().epoch(epoch), start.batches * world + rank, None, world)
