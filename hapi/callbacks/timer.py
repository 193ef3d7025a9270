"""How long phases take, and an end of training by the clock."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, Literal

from hapi.callbacks.base import Callback
from hapi.callbacks.checks import number, verbosity
from hapi.callbacks.console import say
from hapi.engine.state import Logs
from hapi.errors import suggest

__all__ = ["Timer"]

Phase = Literal["train", "eval", "predict"]
_PHASES = ("train", "eval", "predict")
_INTERVALS = ("batch", "epoch")
_DURATION = re.compile(r"(\d+):(\d\d):(\d\d):(\d\d)")


class Timer(Callback):
    """Measure the time of training, evaluation and prediction, and end training when its time is over.

    The time of ``fit`` counts from its start to its end, with evaluations and saves. A run that resumes a
    checkpoint goes on counting where the checkpoint was written; any other ``fit`` begins at zero. Training
    ends as by any request to stop: with the last evaluation and ``on_train_end``. Leave time for these.

    Args:
        duration: The time that training may take: seconds, a ``datetime.timedelta``, or
            ``"DD:HH:MM:SS"`` (days, hours, minutes, seconds). None: it is only measured.
        interval: ``"batch"`` ends training at the next batch (on several ranks: at the next log point);
            ``"epoch"`` at the end of the epoch.
        verbose: 0 prints nothing; else one line when the time is over, unless ``fit``'s ``verbose`` is 0.

    Raises:
        TypeError: ``duration`` is of another type.
        ValueError: ``duration`` is negative or no such string, or the interval is unknown.

    Example:
        >>> timer = Timer("00:11:30:00")  # in a queue of 12 hours
        >>> model.fit(train, val, epochs=1000, callbacks=timer)
        >>> timer.time_elapsed("train")
        41400.8
    """

    def __init__(
        self,
        duration: float | str | timedelta | None = None,
        interval: Literal["batch", "epoch"] = "batch",
        verbose: int = 1,
    ) -> None:
        if interval not in _INTERVALS:
            raise ValueError(f"Timer: interval={interval!r}; accepted: 'batch', 'epoch'")
        self.duration = None if duration is None else _seconds(duration)
        self.interval = interval
        self.verbose = verbosity("Timer", verbose)
        self._watches: dict[str, _Watch] = {phase: _Watch() for phase in _PHASES}
        self._resumed = False
        self._over = False

    def time_elapsed(self, phase: Phase = "train") -> float:
        """Seconds of the current phase, or of the last one of this kind; 0 before the first.

        Args:
            phase: ``"train"``, ``"eval"`` or ``"predict"``.
        """
        return self._watch(phase).elapsed()

    def time_remaining(self) -> float | None:
        """Seconds of training that are left, at least 0; None without a duration."""
        return None if self.duration is None else max(0.0, self.duration - self.time_elapsed("train"))

    def start_time(self, phase: Phase = "train") -> datetime | None:
        """When the current or last phase of this kind began, in local time; None before the first."""
        return self._watch(phase).began

    def end_time(self, phase: Phase = "train") -> datetime | None:
        """When the last phase of this kind ended, in local time; None while it runs and before the first."""
        return self._watch(phase).ended

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Begin at zero, or where the run that is resumed stood."""
        watch = self._watches["train"]
        watch.start(watch.total if self._resumed else 0.0)
        self._resumed = self._over = False
        self._check()

    def on_train_batch_end(self, step: int, logs: Logs | None = None) -> None:
        """Look at the clock."""
        if self.interval == "batch":
            self._check()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Look at the clock: the evaluation may have taken long."""
        self._check()

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Stop the clock."""
        self._watches["train"].stop()

    def on_eval_begin(self, logs: Logs | None = None) -> None:
        """Start the clock of the evaluation."""
        self._watches["eval"].start()

    def on_eval_end(self, logs: Logs | None = None) -> None:
        """Stop the clock of the evaluation."""
        self._watches["eval"].stop()

    def on_predict_begin(self, logs: Logs | None = None) -> None:
        """Start the clock of the prediction."""
        self._watches["predict"].start()

    def on_predict_end(self, logs: Logs | None = None) -> None:
        """Stop the clock of the prediction."""
        self._watches["predict"].stop()

    def on_exception(self, exception: BaseException) -> None:
        """Stop every clock: a failed evaluation within ``fit`` has no end of its own."""
        for watch in self._watches.values():
            watch.stop()

    def state_dict(self) -> dict[str, Any]:
        """The training time so far, in seconds."""
        return {"elapsed": self.time_elapsed("train")}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Count on from the time of the run that is resumed."""
        self._watches["train"] = _Watch(float(state_dict["elapsed"]))
        self._resumed = True

    def _watch(self, phase: str) -> _Watch:
        if phase not in _PHASES:
            raise ValueError(
                f"Timer: phase={phase!r}{suggest(str(phase), _PHASES)}; accepted: 'train', 'eval', 'predict'"
            )
        return self._watches[phase]

    def _check(self) -> None:
        if self.duration is None or self._over or self._watches["train"].elapsed() < self.duration:
            return
        self._over = True
        text = f"Timer: the training time of {timedelta(seconds=self.duration)} is over"
        self.run.control.request_stop(text)
        if self.verbose and self.params.get("verbose") != 0:
            say(f"{text}; training stops.")


class _Watch:
    """A stop watch.

    Args:
        total: Seconds measured before.
    """

    clock: Callable[[], float] = staticmethod(time.perf_counter)

    def __init__(self, total: float = 0.0) -> None:
        self.total = total
        self.began: datetime | None = None
        self.ended: datetime | None = None
        self._since: float | None = None

    def start(self, total: float = 0.0) -> None:
        """Begin at ``total`` seconds."""
        self.total, self._since = total, self.clock()
        self.began, self.ended = datetime.now().astimezone(), None

    def stop(self) -> None:
        """Stop, if it runs."""
        if self._since is not None:
            self.total, self._since = self.elapsed(), None
            self.ended = datetime.now().astimezone()

    def elapsed(self) -> float:
        """Seconds so far."""
        return self.total + (0.0 if self._since is None else self.clock() - self._since)


def _seconds(duration: Any) -> float:
    accepted = "seconds, a datetime.timedelta, or 'DD:HH:MM:SS'"
    if isinstance(duration, timedelta):
        duration = duration.total_seconds()
    elif isinstance(duration, str):
        parts = _DURATION.fullmatch(duration.strip())
        if parts is None:
            raise ValueError(f"Timer: duration={duration!r}; accepted: {accepted}")
        days, hours, minutes, seconds = map(int, parts.groups())
        duration = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds).total_seconds()
    try:
        return number("Timer", "duration", duration, 0)
    except TypeError:
        raise TypeError(f"Timer: duration={duration!r}; accepted: {accepted}") from None
