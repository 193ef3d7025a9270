"""The largest batch that fits in memory."""

from __future__ import annotations

from typing import Any

from hapi.callbacks.base import Callback
from hapi.callbacks.checks import flag, whole
from hapi.callbacks.console import say
from hapi.engine.state import Logs

__all__ = ["BatchSizeFinder"]


class BatchSizeFinder(Callback):
    """Before training, finds the largest batch size at which steps do not run out of memory, and trains with it.

    Sizes are doubled from ``fit``'s ``batch_size`` until one fails; then the gap is halved. Each size does some real
    steps, on every rank; afterwards weights, optimizer, random numbers and counters are what they were. A run that
    goes on from a checkpoint takes the size that was found. Where memory runs out, a GPU raises an error that can be
    caught; a CPU's operating system may end the process instead: give ``max_size`` there.

    Args:
        max_size: The largest size to try, in rows per rank. Default: the rows of the data.
        steps: Steps per size. The first allocates what an optimizer keeps; later ones show what the allocator needs.
        halve: Halve the gap between the largest size that fits and the smallest that does not. False: powers of
            two times the first size.
        update: Train with the size that was found. False only measures.
        verbose: 1 prints the size.

    Attributes:
        batch_size: Rows per rank; None before.
        tried: Size -> whether it fits.

    Raises:
        TypeError, ValueError: An argument of the wrong type or value; data that hapi does not cut into batches.
        RuntimeError: Not even the first size fits.

    Example:
        >>> model.fit(train, batch_size=32, epochs=10, callbacks=BatchSizeFinder(max_size=4096))
    """

    all_ranks = True

    def __init__(
        self,
        max_size: int | None = None,
        *,
        steps: int = 3,
        halve: bool = True,
        update: bool = True,
        verbose: int = 1,
    ) -> None:
        owner = "BatchSizeFinder"
        self.max_size = None if max_size is None else whole(owner, "max_size", max_size, 1)
        self.steps = whole(owner, "steps", steps, 1)
        self.halve = flag(owner, "halve", halve)
        self.update = flag(owner, "update", update)
        self.verbose = whole(owner, "verbose", verbose, 0)
        self.batch_size: int | None = None
        self.tried: dict[int, bool] = {}
        self._resumed = False

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Find the size, and take it."""
        trials = self.run.trials
        assert trials is not None
        if not self._resumed:
            self._find()
        self._resumed = False
        assert self.batch_size is not None
        if self.update and self.batch_size != self._first():
            trials.use_batch_size(self.batch_size)
        if self.verbose and self.run.env.rank == 0:
            say(f"BatchSizeFinder: {self.batch_size} rows per rank" + (" are used" if self.update else ""))

    def state_dict(self) -> dict[str, Any]:
        """What was found."""
        return {"batch_size": self.batch_size, "tried": dict(self.tried)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave; a fit that is resumed takes the size."""
        self.batch_size, self.tried = state_dict["batch_size"], dict(state_dict["tried"])
        self._resumed = self.batch_size is not None

    def _first(self) -> int:
        """``fit``'s own size, in rows per rank."""
        return max(1, int(self.params["batch_size"]) // self.run.env.world)

    def _find(self) -> None:
        self.tried = {}
        most, good = self.max_size or self._rows(), self._first()
        if self.max_size is not None and self.max_size < good:
            raise ValueError(f"BatchSizeFinder: max_size={self.max_size} is less than fit's batch_size={good}")
        bad = most + 1
        if not self._fits(good):
            raise RuntimeError(f"BatchSizeFinder: not even batch_size={good} fits in memory; give a smaller one")
        while good < most and (size := min(2 * good, most)) < bad:
            if self._fits(size):
                good = size
            else:
                bad = size
        while self.halve and bad <= most and bad - good > max(1, good // 16):
            middle = (good + bad) // 2
            if self._fits(middle):
                good = middle
            else:
                bad = middle
        self.batch_size = good

    def _rows(self) -> int:
        assert self.run.trials is not None
        rows = self.run.trials.feed.loader.samples
        if rows is None:
            raise ValueError("BatchSizeFinder: the number of rows is unknown; give max_size")
        return max(1, rows // self.run.env.world)

    def _fits(self, size: int) -> bool:
        assert self.run.trials is not None
        self.tried[size] = self.run.trials.fits(size, self.steps)
        return self.tried[size]
