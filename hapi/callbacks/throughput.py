"""How fast training is."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from hapi.callbacks._clock import StepClock, rates
from hapi.callbacks.base import Callback
from hapi.callbacks.checks import number, whole
from hapi.engine.state import Logs

__all__ = ["Throughput"]


class _Mark(NamedTuple):
    """Where training stood: optimizer steps, seconds, seconds of waiting for data, rows."""

    steps: int
    seconds: float
    waiting: float
    rows: int


class Throughput(Callback):
    """Add the speed of training to the logs, at log points and (as the epoch's mean) at the end of an epoch.

    =================== ====================================================================================
    ``samples_per_sec`` training samples per second, over all ranks
    ``step_time_ms``    milliseconds per optimizer step
    ``data_time_ms``    the part of these in which the host waited for data (and did what is done between
                        batches, such as copying weights for a save)
    ``tflops``          10^12 floating-point operations per second, over all ranks (with ``flops_per_sample``)
    ``mfu``             model FLOPs utilisation: ``tflops`` as a part of ``peak_tflops``, 0 to 1
    =================== ====================================================================================

    Evaluations and the saves between epochs do not count. Nothing waits for the device: at log points the
    engine has just read values from it, so a mean between log points is the device's own speed. A point
    without an optimizer step since the last one has no values. List the callback before those that shall see
    its values, such as a CSVLogger.

    Args:
        log_freq: Batches between log points. Default: those of ``fit``.
        window: Intervals between log points over which the values are means. 1 is the last one.
        flops_per_sample: Floating-point operations of training on one sample, forward and backward. Two per
            multiply-add; the backward pass is about twice the forward pass. So for most networks
            ``6 * hapi.flops(net, (1, ...))``.
        peak_tflops: What one device can do, in 10^12 operations per second at the precision in use.

    Raises:
        TypeError: An argument of the wrong type.
        ValueError: An argument out of range, or ``peak_tflops`` without ``flops_per_sample``.

    Example:
        >>> speed = Throughput(flops_per_sample=6 * hapi.flops(net, (1, 3, 224, 224)), peak_tflops=989)
        >>> model.fit(train, epochs=2, callbacks=[speed, CSVLogger("log.csv")])
    """

    def __init__(
        self,
        log_freq: int | None = None,
        window: int = 1,
        *,
        flops_per_sample: float | None = None,
        peak_tflops: float | None = None,
    ) -> None:
        owner = "Throughput"
        self.log_freq = None if log_freq is None else whole(owner, "log_freq", log_freq, 1)
        self.window = whole(owner, "window", window, 1)
        self.flops_per_sample = _positive("flops_per_sample", flops_per_sample)
        self.peak_tflops = _positive("peak_tflops", peak_tflops)
        if self.peak_tflops is not None and self.flops_per_sample is None:
            raise ValueError(f"{owner}: peak_tflops={peak_tflops!r} needs flops_per_sample")
        self._clock = StepClock()
        self._marks: deque[_Mark] = deque(maxlen=self.window)
        self._epoch = _Mark(0, 0.0, 0.0, 0)

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Begin at zero."""
        self._clock.start(self.run.read_seconds)
        self._clock.pause()
        self._marks.clear()
        self._marks.append(self._mark())

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Start the clock: what comes until the first batch is waiting for data."""
        self._clock.resume()
        self._epoch = self._mark()

    def on_train_batch_begin(self, step: int, logs: Logs | None = None) -> None:
        """The data is there."""
        self._clock.data_ready(self.run.read_seconds)

    def on_train_batch_end(self, step: int, logs: Logs | None = None) -> None:
        """Add the values at log points."""
        assert logs is not None
        self._clock.batch_done(logs["batch_size"])
        if "lr" not in logs:
            return
        mark = self._mark()
        values = self._values(self._marks[0], mark)
        if mark.steps > self._marks[-1].steps:
            self._marks.append(mark)
            logs.update(values)

    def on_eval_begin(self, logs: Logs | None = None) -> None:
        """Stop the clock."""
        self._clock.pause()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Stop the clock, also for the saves that follow; add the epoch's means."""
        self._clock.pause()
        if logs is not None:
            logs.update(self._values(self._epoch, self._mark()))

    def _mark(self) -> _Mark:
        clock = self._clock
        return _Mark(self.run.progress.global_step, clock.seconds, clock.waiting, clock.rows)

    def _values(self, first: _Mark, last: _Mark) -> dict[str, float]:
        values = rates(
            last.seconds - first.seconds, last.waiting - first.waiting, last.rows - first.rows, last.steps - first.steps
        )
        if values is None:
            return {}
        if self.flops_per_sample is not None:
            values["tflops"] = values["samples_per_sec"] * self.flops_per_sample / 1e12
            if self.peak_tflops is not None:
                values["mfu"] = values["tflops"] / (self.peak_tflops * self.run.env.world)
        return values


def _positive(name: str, value: float | None) -> float | None:
    if value is None:
        return None
    if number("Throughput", name, value, 0) == 0:
        raise ValueError(f"Throughput: {name}={value!r}; accepted: a finite number > 0")
    return float(value)
