"""Arrays, Dataset, DataLoader, iterable -> one loader: an iterator of this rank's raw batches per epoch.

A raw batch is what the data gives (a tensor, nested tuples, a dict); ``data/batch.py`` turns it into forward
arguments and labels. A rank without rows in a global batch gets ``None``.
"""

from __future__ import annotations

import itertools
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from hapi.data.randomness import GeneratorsState, seed_sample
from hapi.data.sampler import BatchPlan, OrderedBatches, epoch_order, fold
from hapi.data.trees import describe
from hapi.distributed._bootstrap import die_with_parent
from hapi.errors import add_note

__all__ = ["GatherLoader", "Loader", "MapLoader", "StreamLoader", "short"]


class Start(NamedTuple):
    """How much of an epoch has been seen: batches, and rows over all ranks."""

    batches: int = 0
    rows: int = 0


NOTHING_SEEN = Start()


class Loader(ABC):
    """What the loop iterates.

    Attributes:
        batches: Global batches per epoch; None where unknown.
        samples: Rows per epoch over all ranks; None where unknown.
        again: Whether the data can be read more than once.
        cuts: Whether hapi forms the batches, of any size.
        early: Whether nothing shows when a batch is read before the step that goes before it.
    """

    batches: int | None = None
    samples: int | None = None
    again: bool = True
    cuts: bool = False
    early: bool = False

    def rows(self, index: int, seen: int = 0) -> int | None:
        """Rows over all ranks of global batch ``index`` after ``seen`` rows, known without reading; None if unknown."""
        return None

    def samples_of(self, epoch: int, index: int, seen: int = 0) -> list[int] | None:
        """This rank's samples in global batch ``index`` after ``seen`` rows of an epoch; None if unknown."""
        return None

    def left(self, start: Start) -> int | None:
        """Global batches left in an epoch; None where unknown."""
        return None if self.batches is None else self.batches - start.batches

    @abstractmethod
    def epoch(self, epoch: int, start: Start = NOTHING_SEEN) -> Iterator[Any]:
        """This rank's raw batches of what is left of an epoch; None for a part without rows."""

    def template(self) -> Any:
        """A raw batch of any number of rows, for a rank that has none; None where there is nothing to make it of."""
        return None

    def close(self) -> None:
        """End worker processes."""


class _PlannedLoader(Loader):
    """Rows with an index: order from (seed, epoch), cut by a plan."""

    cuts = True

    def __init__(self, plan: BatchPlan, *, shuffle: bool, seed: int) -> None:
        self.plan = plan
        self.shuffle = shuffle
        self.seed = seed
        self.batches = plan.batches
        self.samples = plan.served

    def rows(self, index: int, seen: int = 0) -> int | None:
        return self.plan.after(seen).rows(index)

    def samples_of(self, epoch: int, index: int, seen: int = 0) -> list[int]:
        first, last = (seen + bound for bound in self.plan.after(seen).local(index))
        order = self.order(epoch)
        return list(range(first, last)) if order is None else order[first:last].tolist()

    def left(self, start: Start) -> int | None:
        return self.plan.after(start.rows).batches

    def order(self, epoch: int) -> Tensor | None:
        return epoch_order(self.plan.samples, seed=self.seed, epoch=epoch) if self.shuffle else None


class GatherLoader(_PlannedLoader):
    """In-memory data: a whole batch is one gather.

    Args:
        gather: Takes an int64 index tensor or a slice, returns the batch.
        plan: How the epoch is cut.
        shuffle: Whether an epoch's order is shuffled.
        seed: Of the order.
        device: Where the gather takes its indices; None for the host. The order is moved there once per epoch.
        early: See :class:`Loader`.
        ordered: Takes numbers of rows and of rows per batch, gives the batches of one process where they come in the
            data's order. None: ``gather`` does.
    """

    def __init__(
        self,
        gather: Callable[[Tensor | slice], Any],
        plan: BatchPlan,
        *,
        shuffle: bool,
        seed: int,
        device: torch.device | None = None,
        early: bool = False,
        ordered: Callable[[int, int], Iterator[Any]] | None = None,
    ) -> None:
        super().__init__(plan, shuffle=shuffle, seed=seed)
        self.gather = gather
        self.ordered = ordered
        self.device = device
        self.early = early

    def order(self, epoch: int) -> Tensor | None:
        order = super().order(epoch)
        return order if order is None or self.device is None else to_device(order, self.device)

    def template(self) -> Any:
        return self.gather(slice(0, 1))

    def epoch(self, epoch: int, start: Start = NOTHING_SEEN) -> Iterator[Any]:
        order, gather, plan, seen = self.order(epoch), self.gather, self.plan.after(start.rows), start.rows
        if plan.world == 1 and order is None and not seen and self.ordered is not None:
            yield from self.ordered(plan.served, plan.batch)
            return
        if plan.world == 1:
            # The plan's own arithmetic, without a call per batch.
            rows = seen + plan.served
            for first in range(seen, rows, plan.batch):
                last = min(first + plan.batch, rows)
                yield gather(slice(first, last) if order is None else order[first:last])
            return
        for index in range(plan.batches):
            first, last = (seen + bound for bound in plan.local(index))
            if first == last:
                yield None
            else:
                yield gather(slice(first, last) if order is None else order[first:last])


class MapLoader(_PlannedLoader):
    """A map-style Dataset, read sample by sample (or by ``__getitems__``), with or without workers.

    Args:
        dataset: The dataset.
        plan: How the epoch is cut.
        shuffle: Whether an epoch's order is shuffled.
        seed: Of the order and of the workers' own generators.
        num_workers: Reader processes; they are kept over the epochs.
        pin_memory: Page-locked batches, for copies to a GPU that do not block.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        plan: BatchPlan,
        *,
        shuffle: bool,
        seed: int,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        super().__init__(plan, shuffle=shuffle, seed=seed)
        self.named = NamedSamples(dataset, plan.rank, seed)
        self.sampler = OrderedBatches(plan)
        self.torch_loader: DataLoader[Any] | None = None
        self.early = bool(num_workers)
        if num_workers:
            # Its own generator: iter(DataLoader) draws the workers' base seed, by default from the global one.
            self.generator = torch.Generator()
            self.torch_loader = DataLoader(
                self.named,
                batch_sampler=self.sampler,
                num_workers=num_workers,
                collate_fn=collate,
                pin_memory=pin_memory,
                persistent_workers=True,
                generator=self.generator,
                worker_init_fn=_ends_with_me(),
            )

    def template(self) -> Any:
        return collate(self.named.__getitems__([0]))

    def epoch(self, epoch: int, start: Start = NOTHING_SEEN) -> Iterator[Any]:
        sampler, plan = self.sampler, self.plan.after(start.rows)
        sampler.order, sampler.skip, sampler.epoch = self.order(epoch), start.rows, epoch
        batches: Iterator[Any]
        if self.torch_loader is None:
            named = self.named
            batches = (collate(named.__getitems__(indices)) for indices in sampler)
        else:
            self.generator.manual_seed(fold(self.seed, epoch, 1))
            batches = iter(self.torch_loader)
        for index in range(plan.batches):
            first, last = plan.local(index)
            yield None if first == last else next(batches)

    def close(self) -> None:
        # torch ends persistent workers when the iterator is collected, which a traceback can put off for ever.
        iterator = getattr(self.torch_loader, "_iterator", None)
        if iterator is not None:
            iterator._shutdown_workers()
        self.torch_loader = None


class StreamLoader(Loader):
    """Batches as somebody else makes them: a DataLoader, a list of batches, a generator.

    Args:
        source: Iterated once per epoch.
        name: What to call it in messages.
        seed: Where hapi made the DataLoader: of its workers' generators, which then depend on the epoch alone.
    """

    def __init__(self, source: Iterable[Any], name: str, seed: int | None = None) -> None:
        self.source = source
        self.name = name
        self.seed = seed
        self.again = not (isinstance(source, Iterator) and iter(source) is source)
        self.spent = False
        try:
            self.batches = len(source)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            self.batches = None

    def epoch(self, epoch: int, start: Start = NOTHING_SEEN) -> Iterator[Any]:
        if self.spent:
            warnings.warn(
                f"{self.name} is a one-shot iterator and was used up by an earlier epoch: this epoch has no "
                "batches. Give a list, a DataLoader, or an object whose __iter__ starts anew.",
                UserWarning,
                stacklevel=2,
            )
        self.spent = not self.again
        if self.seed is not None and isinstance(self.source, _Unsized):
            self.source.reseed(fold(self.seed, epoch, 1))
        for sampler in (getattr(self.source, "sampler", None), getattr(self.source, "batch_sampler", None)):
            set_epoch = getattr(sampler, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)
        batches = self._read()
        for _ in itertools.islice(batches, start.batches):
            pass  # read again, so that generators and workers go the same way
        return batches

    def _read(self) -> Iterator[Any]:
        count = 0
        try:
            for batch in self.source:
                count += 1
                yield batch
        except Exception as exc:
            add_note(exc, f"while reading batch {count} of {self.name}")
            raise


class NamedSamples(Dataset[Any]):
    """A dataset whose failing sample says its index, dataset and rank. Asked for a whole batch at once.

    What a sample draws from the global generators is a function of (seed, epoch, index); see data/randomness.py.
    """

    def __init__(self, dataset: Any, rank: int, seed: int = 0) -> None:
        self.dataset = dataset
        self.rank = rank
        self.seed = seed
        self.draws = False
        # torch's Dataset base has __getitems__ commented out, so having the attribute means having it.
        self.batched = callable(getattr(dataset, "__getitems__", None))

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, indices: list[int]) -> Any:
        before = GeneratorsState()
        if not self.draws:
            read = self._read(indices, None)
            if not before.moved():
                return read
            # This dataset draws: read again, and from now on, with generators that depend on the sample alone.
            self.draws = True
        try:
            return self._read(indices, getattr(indices, "epoch", 0))
        finally:
            before.restore()

    def _read(self, indices: list[int], epoch: int | None) -> Any:
        if self.batched:
            if epoch is not None:
                seed_sample(self.seed, epoch, indices[0] if indices else 0)
            try:
                return self.dataset.__getitems__(indices)
            except Exception as exc:
                add_note(exc, f"while reading samples {short(indices)} of {self._where()}")
                raise
        samples = []
        dataset = self.dataset
        for index in indices:
            if epoch is not None:
                seed_sample(self.seed, epoch, index)
            try:
                samples.append(dataset[index])
            except Exception as exc:
                add_note(exc, f"while reading sample {index} of {self._where()}")
                raise
        return samples

    def _where(self) -> str:
        return f"{type(self.dataset).__name__} (rank {self.rank})"


def collate(samples: Any) -> Any:
    """A list of samples -> a batch by torch's rules; anything else is taken to be a batch already."""
    if not isinstance(samples, list):
        return samples
    try:
        return default_collate(samples)
    except Exception as exc:
        add_note(exc, f"while putting {len(samples)} samples into one batch; the first is {describe(samples[0])}")
        raise


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """On the device, without making the host wait: only a copy from page-locked memory does not."""
    if device.type == "cuda" and tensor.device.type == "cpu" and not tensor.is_pinned():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class ShardedStream(IterableDataset[Any]):
    """An IterableDataset cut by (rank, worker): of the stream, this process keeps every n-th sample.

    The dataset is shown one worker only while it starts, so that one that splits itself by worker does not split
    twice. A dataset that shards itself over ranks *and* workers says so with a true attribute ``sharded``.
    """

    def __init__(self, dataset: IterableDataset[Any], rank: int, world: int) -> None:
        self.dataset = dataset
        self.rank = rank
        self.world = world

    def __iter__(self) -> Iterator[Any]:
        shard, shards = self._shard()
        stream = self._named(shards)
        if shards == 1:
            yield from stream
            return
        for position, sample in enumerate(stream):
            if position % shards == shard:
                yield sample

    def _shard(self) -> tuple[int, int]:
        info = torch.utils.data.get_worker_info()
        workers, worker = (info.num_workers, info.id) if info else (1, 0)
        if getattr(self.dataset, "sharded", False):
            return 0, 1
        return worker * self.world + self.rank, workers * self.world

    def _named(self, shards: int) -> Iterator[Any]:
        count = 0
        worker_module: Any = torch.utils.data._utils.worker
        info = worker_module._worker_info
        try:
            if shards > 1:
                worker_module._worker_info = None
            stream = iter(self.dataset)
            while True:
                try:
                    if shards > 1:
                        worker_module._worker_info = None
                    sample = next(stream)
                except StopIteration:
                    return
                finally:
                    worker_module._worker_info = info
                count += 1
                yield sample
        except Exception as exc:
            add_note(exc, f"while reading sample {count} of {type(self.dataset).__name__} (rank {self.rank})")
            raise
        finally:
            worker_module._worker_info = info


def stream_loader(
    dataset: IterableDataset[Any],
    *,
    batch_size: int,
    drop_last: bool,
    num_workers: int,
    pin_memory: bool,
    seed: int,
    rank: int,
    world: int,
) -> StreamLoader:
    """An IterableDataset as a loader; ``batch_size`` is this rank's."""
    loader: DataLoader[Any] = DataLoader(
        ShardedStream(dataset, rank, world),
        batch_size=batch_size,
        drop_last=drop_last,
        num_workers=num_workers,
        collate_fn=collate,
        pin_memory=pin_memory,
        # Not kept over epochs: a worker's generators would then depend on the epochs that it has lived through.
        generator=torch.Generator(),
        worker_init_fn=_ends_with_me(),
    )
    return StreamLoader(_Unsized(loader), type(dataset).__name__, seed)


def _ends_with_me() -> Callable[[int], None]:
    """For a reader process: the kernel ends it when this one is killed.

    torch's readers look for their parent every 5 seconds, and can then wait for ever for each other's pipes.
    """
    return partial(_end_with, os.getpid())


def _end_with(parent: int, worker: int) -> None:
    die_with_parent(parent)


class _Unsized(Iterable[Any]):
    """Hides a length that a sharded stream's DataLoader would get wrong."""

    def __init__(self, source: Iterable[Any]) -> None:
        self.source = source

    def reseed(self, seed: int) -> None:
        """Seed the generator that the workers' seeds are drawn from."""
        generator = getattr(self.source, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.source)


def short(indices: Sequence[int]) -> str:
    """Sample numbers for messages: the first few, and how many there are."""
    shown = ", ".join(map(str, indices[:8]))
    return f"[{shown}, ... {len(indices)} in all]" if len(indices) > 8 else f"[{shown}]"
