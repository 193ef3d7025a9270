"""An epoch's batches, cut into optimizer steps: how much each batch of a step weighs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hapi.data.batch import Batch
from hapi.data.loader import Loader, Start
from hapi.distributed.collectives import all_gather_objects, all_reduce
from hapi.engine import rng
from hapi.engine.loss import Count, LossFunction
from hapi.engine.state import Run
from hapi.engine.step import TrainStep

__all__ = ["Feed", "Share", "shares", "uneven"]


@dataclass(frozen=True)
class Feed:
    """A phase's data: the loader, and how its raw batches become :class:`Batch`.

    Attributes:
        empty: Makes a batch without rows of ``loader.template()``; None where a rank without rows sits a step out.
    """

    loader: Loader
    split: Callable[[Any], Batch]
    empty: Callable[[Any], Batch] | None = None


class Share(NamedTuple):
    """One batch of a step.

    Attributes:
        batch: This rank's rows; None where it has none.
        totals: The weight of each loss term over the whole step and all ranks; None where the batch is the step.
        last: Whether the step's update follows.
        rows: Rows over all ranks.
        everyone: Whether every rank has rows.
    """

    batch: Batch | None
    totals: Sequence[Count] | None
    last: bool
    rows: int
    everyone: bool = True


def shares(run: Run, feed: Feed, loss: LossFunction) -> Generator[Share, None, None]:
    """Cut the epoch into optimizer steps, and tell each batch the weight of its whole step."""
    size, env, loader, split = run.config.accumulate, run.env, feed.loader, feed.split
    progress = run.progress
    start = Start(progress.batch_in_epoch, progress.row_in_epoch)
    if run.resume_rng is not None:
        # A loader that draws from the global generators draws what it drew when the epoch began; then the rest goes on
        # from where the checkpoint was written.
        rng.restore(run.resume_rng["epoch"])
    run.epoch_rng = rng.capture()
    raws = loader.epoch(progress.epoch, start)
    if run.resume_rng is not None:
        rng.restore(run.resume_rng["now"])
        run.resume_rng = None
    if size == 1 and env.world == 1:
        for raw in raws:
            batch = split(raw)
            yield Share(batch, None, True, batch.rows)
        return
    batches: Iterator[Batch | None] = (None if raw is None else split(raw) for raw in raws)
    first = list(itertools.islice(batches, 1))
    # Whether weights lie in the labels shows in their shape and dtype; a rank without rows asks the others.
    counted = any(batch is not None and loss.counted(batch) for batch in first)
    counted = any(all_gather_objects(counted, group=env.group))
    batches = itertools.chain(first, batches)
    if loader.rows(0) is not None and not counted:
        yield from _planned_shares(batches, loader, start, size, len(loss.terms), env.world)
    else:
        yield from _weighed_shares(run, batches, loader, start, loss, counted)


def _planned_shares(
    batches: Iterator[Batch | None], loader: Loader, start: Start, size: int, terms: int, world: int
) -> Iterator[Share]:
    """The host knows every batch's rows, so nothing is read ahead and nothing is communicated."""
    # A run starts and resumes at the beginning of a step, so steps are counted from there.
    rows = [loader.rows(i, start.rows) or 0 for i in range(loader.left(start) or 0)]
    for index, batch in enumerate(batches):
        begin = index - index % size
        total = sum(rows[begin : begin + size])
        last = (index + 1) % size == 0 or index + 1 == len(rows)
        yield Share(batch, [total] * terms, last, rows[index], rows[index] >= world)


def _weighed_shares(
    run: Run, batches: Iterator[Batch | None], loader: Loader, start: Start, loss: LossFunction, counted: bool
) -> Iterator[Share]:
    """Weights lie in the labels, or lengths are unknown: read one step ahead, and add up over the ranks."""
    size, world = run.config.accumulate, run.env.world
    index = 0
    left = loader.left(start) if loader.rows(0) is not None else None
    while True:
        window = list(itertools.islice(batches, size))
        window += [None] * (size - len(window))
        totals, rows, having = _weigh(run, window, loss, counted)
        if left is not None:
            rows = [loader.rows(i, start.rows) or 0 for i in range(index, min(index + size, left))]
            having = [min(count, world) for count in rows]
        length = sum(count > 0 for count in having)
        if length == 0:
            return
        for i in range(length):
            yield Share(window[i], totals, i + 1 == length, rows[i], having[i] == world)
        index += length


def _weigh(
    run: Run, window: Sequence[Batch | None], loss: LossFunction, counted: bool
) -> tuple[list[Count], list[int], list[int]]:
    """Over all ranks: the weight of each loss term in the window, and per batch its rows and ranks with rows."""
    counts = [[0] * len(loss.terms) if batch is None else loss.counts(batch) for batch in window]
    rows = [0 if batch is None else batch.rows for batch in window]
    having = [int(batch is not None) for batch in window]
    totals: list[Count] = [sum(column[1:], start=column[0]) for column in zip(*counts, strict=True)]
    if run.env.world == 1:
        return totals, rows, having
    head = torch.tensor([*rows, *having], dtype=torch.float64)
    table = torch.cat([head.to(run.meters.device), torch.stack([_as_float64(t, run.meters.device) for t in totals])])
    all_reduce(table, group=run.env.group)
    if counted:
        totals = list(table[len(head) :].float())
    host = table.tolist()
    if not counted:
        totals = [int(value) for value in host[len(head) :]]
    return totals, [int(v) for v in host[: len(window)]], [int(v) for v in host[len(window) : len(head)]]


def _as_float64(value: Count, device: torch.device) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64, device=device)


def uneven(run: Run, feed: Feed, share: Share, step: TrainStep) -> None:
    """Some rank has no rows: those that have keep their gradients, and one exchange by hand follows."""
    if share.batch is not None:
        # Not through the strategy's wrapper: its forward may talk to ranks that have nothing to run.
        step.lone(share.batch, share.totals, False)
    elif feed.empty is not None:
        step.join(feed.empty(feed.loader.template()))
    if share.last:
        assert run.optimizer is not None
        run.strategy.reduce_gradients([p for group in run.optimizer.param_groups for p in group["params"]])
