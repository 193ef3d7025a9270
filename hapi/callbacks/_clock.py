"""The clock of training steps: how fast they are, and how much of that is waiting for data."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["StepClock", "rates"]


class StepClock:
    """Adds up the time of training, without what lies between (evaluations, saves).

    A device works behind the host's back, so the host's time of one batch says little. At a log point the
    host has just read values from the device: sums between log points are right. So read it there, after
    ``batch_done``.

    Args:
        clock: Seconds that only go up.

    Attributes:
        seconds: Training time since :meth:`start`.
        waiting: The part of ``seconds`` spent waiting for data.
        rows: Rows since :meth:`start`.

    Example:
        >>> clock = StepClock()
        >>> clock.start()
        >>> clock.data_ready(0.002)  # on_train_batch_begin, with run.read_seconds
        >>> clock.batch_done(32)  # on_train_batch_end
        >>> clock.read(steps=1)["step_time_ms"]
        12.5
    """

    __slots__ = ("_clock", "_last", "_mark", "_paused", "_read", "rows", "seconds", "waiting")

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.start()

    def start(self, read: float = 0.0) -> None:
        """Begin at zero.

        Args:
            read: Seconds that the run has spent reading data so far: ``run.read_seconds``.
        """
        self.seconds = self.waiting = 0.0
        self._read = read
        self.rows = 0
        self._last = (0.0, 0.0, 0)
        self._paused = False
        self._mark = self._clock()

    def data_ready(self, read: float) -> None:
        """A batch is there. Ends a pause.

        Args:
            read: Seconds that the run has spent reading data so far. What else lies between two batches, other
                callbacks for the most, is no waiting for data.
        """
        now = self._clock()
        if not self._paused:
            self.seconds += now - self._mark
            self.waiting += read - self._read
        self._read = read
        self._paused = False
        self._mark = now

    def batch_done(self, rows: int) -> None:
        """A batch of ``rows`` rows (over all ranks) has been computed."""
        now = self._clock()
        self.seconds += now - self._mark
        self.rows += rows
        self._mark = now

    def pause(self) -> None:
        """What comes now is no training. The time since the last batch is: the host may have waited for it."""
        if not self._paused:
            now = self._clock()
            self.seconds += now - self._mark
            self._mark = now
            self._paused = True

    def resume(self) -> None:
        """Training goes on. Without a pause before it, nothing happens."""
        if self._paused:
            self._mark = self._clock()
            self._paused = False

    def read(self, steps: int) -> dict[str, float] | None:
        """The rates since the last reading that gave some.

        Args:
            steps: Optimizer steps since then, the difference of ``global_step``.

        Returns:
            See :func:`rates`. None where no step was done; its time then counts in the next reading.
        """
        seconds, waiting, rows = self._last
        values = rates(self.seconds - seconds, self.waiting - waiting, self.rows - rows, steps)
        if values is not None:
            self._last = (self.seconds, self.waiting, self.rows)
        return values


def rates(seconds: float, waiting: float, rows: int, steps: int) -> dict[str, float] | None:
    """Rates of a stretch of training.

    Returns:
        ``samples_per_sec``, over all ranks; ``step_time_ms``, milliseconds per optimizer step;
        ``data_time_ms``, the part of them spent waiting for data. None without a step or time.
    """
    if steps <= 0 or seconds <= 0:
        return None
    return {
        "samples_per_sec": rows / seconds,
        "step_time_ms": 1e3 * seconds / steps,
        "data_time_ms": 1e3 * waiting / steps,
    }
