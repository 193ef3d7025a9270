"""Training steps that leave no trace: callbacks with ``all_ranks`` try learning rates and batch sizes with them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import torch

from hapi.data.loader import Loader
from hapi.distributed.collectives import all_reduce
from hapi.engine import rng
from hapi.engine.loss import LossFunction
from hapi.engine.shares import Feed, shares, uneven
from hapi.engine.state import Run
from hapi.engine.step import TrainStep

__all__ = ["Trials"]


class Trials:
    """What a callback may try in ``on_train_begin``, before the first step.

    Args:
        run: The run.
        feed: The data; the attribute of that name is what is trained on afterwards.
        step: The training step.
        loss: The loss.
        open_loader: Opens the training data with another number of rows per rank and batch.
        replaced: Told of the loader that took the place of the first.
    """

    def __init__(
        self,
        run: Run,
        feed: Feed,
        step: TrainStep,
        loss: LossFunction,
        open_loader: Callable[[int], Loader],
        replaced: Callable[[Loader, int], None],
    ) -> None:
        self.feed = feed
        self._run, self._step, self._loss = run, step, loss
        self._open_loader, self._replaced = open_loader, replaced

    def losses(self, count: int, before: Callable[[int], None]) -> Iterator[float]:
        """Do ``count`` real optimizer steps, and give each one's loss over all ranks. Then everything is put back.

        Args:
            count: Of steps; the data is read anew where it ends.
            before: Called with the step's number, from 0, before it.

        Raises:
            ValueError: The training data can be read only once.
        """
        run, feed, step = self._run, self.feed, self._step
        self._need_again(feed.loader)
        done = 0
        with self._put_back():
            while done < count:
                # Closed in time, so that reader processes are free for the training.
                with closing(shares(run, feed, self._loss)) as epoch:
                    run.meters.reset()
                    begun = False
                    for share in epoch:
                        if not begun:
                            before(done)
                            begun = True
                        if share.batch is not None and share.everyone:
                            step.micro(share.batch, share.totals, share.last)
                        else:
                            uneven(run, feed, share, step)
                        if share.last:
                            step.update()
                            value = float(run.meters.read()["loss"])
                            run.meters.reset()
                            begun = False
                            yield value
                            done += 1
                            if done == count:
                                break

    def fits(self, size: int, steps: int) -> bool:
        """Whether ``steps`` steps with ``size`` rows per rank and batch fit in memory, on every rank.

        Gradients are not exchanged: a rank that runs out of memory must not leave the others waiting.

        Raises:
            ValueError: hapi does not form the batches.
        """
        self._need_cuts()
        run, step, loader = self._run, self._step, self._open_loader(size)
        failed = False
        try:
            with self._put_back():
                for raw in itertools.islice(loader.epoch(run.progress.epoch), steps):
                    if raw is not None:
                        step.lone(self.feed.split(raw), None, False)
                        step.update()
        except (MemoryError, RuntimeError) as exc:
            if not _out_of_memory(exc):
                raise
            failed = True
        finally:
            loader.close()
        if failed and run.meters.device.type == "cuda":
            torch.cuda.empty_cache()
        flag = torch.tensor([float(failed)], dtype=torch.float64, device=run.meters.device)
        return not all_reduce(flag, "max", group=run.env.group).item()

    def use_batch_size(self, size: int) -> None:
        """Train with ``size`` rows per rank and batch.

        Raises:
            ValueError: hapi does not form the batches.
        """
        self._need_cuts()
        loader = self._open_loader(size)
        self.feed.loader.close()
        self.feed = Feed(loader, self.feed.split, self.feed.empty)
        self._replaced(loader, size)

    def _need_cuts(self) -> None:
        if not self.feed.loader.cuts:
            raise ValueError("batch sizes can be tried where hapi cuts the batches: give arrays or a Dataset")

    def _need_again(self, loader: Loader) -> None:
        if not loader.again:
            raise ValueError("trial steps would use up the training data, an iterator; give a Dataset or a list")

    @contextmanager
    def _put_back(self) -> Iterator[None]:
        run, step = self._run, self._step
        weights = {name: value.clone() for name, value in run.network.state_dict().items()}
        parts = {
            name: copy.deepcopy(part.state_dict())
            for name, part in run.parts.items()
            if name not in ("progress", "callbacks", "fit", "scheduler")
        }
        meters, generators = run.meters.snapshot(), rng.capture()
        run.network.train()
        try:
            yield
        finally:
            step.clear()
            run.network.load_state_dict(weights)
            for name, state in parts.items():
                run.parts[name].load_state_dict(state)
            run.meters.restore(meters)
            rng.restore(generators)


def _out_of_memory(exc: BaseException) -> bool:
    if isinstance(exc, (MemoryError, torch.OutOfMemoryError)):
        return True
    text = str(exc).lower()
    return "out of memory" in text or "can't allocate memory" in text or "not enough memory" in text
