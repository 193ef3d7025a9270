"""What ``fit``, ``evaluate`` and ``predict`` print while they run."""

from __future__ import annotations

import numbers
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hapi.callbacks.base import Callback
from hapi.callbacks.checks import verbosity, whole
from hapi.callbacks.console import bar_class, bar_size, say
from hapi.engine.state import Logs

if TYPE_CHECKING:
    from tqdm import tqdm

__all__ = ["ProgBarLogger"]

_HEADER = "The loss and metrics of a training step are running means since its epoch began."
_BAR = "step {{n:>{width}}}/{{total}} [{{bar}}]{values} - {{elapsed}}<{{remaining}}"
_BAR_WITHOUT_LENGTH = "step {{n:>3}}{values} - {{elapsed}}"
_BAR_SYMBOLS = ".>="  # blank, partly and wholly filled
_REDRAW_SECONDS = 0.1
# Never printed as values: they have their own places.
_RESERVED = frozenset({"step", "batch_size", "samples", "outputs", "lr"})


class ProgBarLogger(Callback):
    """Print the progress of every phase to ``sys.stdout``.

    ``fit``, ``evaluate`` and ``predict`` add one by themselves where ``verbose`` is not 0; give your own to
    change it, or a subclass that writes its values into ``logs`` before it calls the hook of this class.

    ======= ================================================================================================
    verbose prints
    ======= ================================================================================================
    0       nothing
    1       one live bar per phase in a terminal or notebook; elsewhere (files, pipes) lines as with 2, so
            that no log file gets control characters
    2       a line every ``log_freq`` batches and after the last
    3       as 2, with the seconds per batch spent on reading and in all, and the samples per second
    ======= ================================================================================================

    Each epoch closes with a line of its training means, the evaluation's values (``eval_``) and the learning
    rate.

    Args:
        log_freq: Batches between lines. Default: that of ``fit``, ``evaluate`` or ``predict``.
        verbose: 0 to 3. Default: that of ``fit``, ``evaluate`` or ``predict``.

    Attributes:
        train_metrics: Names that are printed first, in this order. Set it after ``set_params`` (in
            ``on_train_begin``) to choose among the run's own; what callbacks add to ``logs`` is printed too.

    Raises:
        ValueError: ``log_freq`` is below 1, or ``verbose`` is not 0 to 3.

    Example:
        >>> model.fit(train, epochs=2, verbose=2)
        Epoch 1/2
        step 400/938 - loss: 0.0555 - acc_top1: 0.9217 - acc_top2: 0.9649 - 50ms/step
    """

    train_metrics: list[str] = []  # noqa: RUF012  # replaced, never mutated, by set_params

    def __init__(self, log_freq: int | None = None, verbose: int | None = None) -> None:
        self.log_freq = None if log_freq is None else whole("ProgBarLogger", "log_freq", log_freq, 1)
        self.verbose = None if verbose is None else verbosity("ProgBarLogger", verbose)
        self._phase: _Phase | None = None
        self._epoch_start = 0.0
        self._failed = False

    def set_params(self, params: dict[str, Any]) -> None:
        """Take the names of the run's values."""
        super().set_params(params)
        self.train_metrics = list(params.get("metrics") or [])

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Say what the numbers of the lines are."""
        self._failed = False
        if self._level:
            say(_HEADER)

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Print ``Epoch 1/2``."""
        if self._level:
            self._epoch_start = time.perf_counter()
            say(self._epoch_name(epoch))
            # A resumed epoch begins in its middle.
            self._begin(self.params.get("steps"), self.run.progress.batch_in_epoch)

    def on_train_batch_begin(self, step: int, logs: Logs | None = None) -> None:
        """Note that reading ended."""
        if self._phase is not None:
            self._phase.mark_read()

    def on_train_batch_end(self, step: int, logs: Logs | None = None) -> None:
        """Print a line at log points and at the last batch."""
        phase = self._phase
        if phase is not None and logs is not None:
            phase.mark_end(logs)
            if phase.step % self._freq == 0 or phase.step == phase.steps:
                self._show(phase, logs)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Print the epoch's line."""
        self._finish(self.run.logs)
        if self._level:
            values = self._text(logs or {}, with_evaluation=True)
            if "lr" in (logs or {}):
                values += f" - lr: {logs['lr']:.4e}"  # type: ignore[index]  # always all its digits
            elapsed = _duration(time.perf_counter() - self._epoch_start)
            say(f"{self._epoch_name(epoch)} done{values} - {elapsed}")

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Close the bar of an epoch that did not end."""
        self._close()

    def on_eval_begin(self, logs: Logs | None = None) -> None:
        """Print ``Eval begin...``."""
        self._finish(self.run.logs)  # within fit: the epoch's last training line
        self._failed = False
        if self._level:
            say("Eval begin...")
            self._begin((logs or {}).get("steps"))

    def on_eval_batch_begin(self, step: int, logs: Logs | None = None) -> None:
        """Note that reading ended."""
        if self._phase is not None:
            self._phase.mark_read()

    def on_eval_batch_end(self, step: int, logs: Logs | None = None) -> None:
        """Print a line at log points."""
        self._between(logs)

    def on_eval_end(self, logs: Logs | None = None) -> None:
        """Print the last line and ``Eval samples: N``."""
        self._end_of("Eval", logs or {})

    def on_predict_begin(self, logs: Logs | None = None) -> None:
        """Print ``Predict begin...``."""
        self._failed = False
        if self._level:
            say("Predict begin...")
            self._begin((logs or {}).get("steps"))

    def on_predict_batch_begin(self, step: int, logs: Logs | None = None) -> None:
        """Note that reading ended."""
        if self._phase is not None:
            self._phase.mark_read()

    def on_predict_batch_end(self, step: int, logs: Logs | None = None) -> None:
        """Print a line at log points."""
        self._between(logs)

    def on_predict_end(self, logs: Logs | None = None) -> None:
        """Print the last line and ``Predict samples: N``."""
        self._end_of("Predict", logs or {})

    def on_exception(self, exception: BaseException) -> None:
        """Leave the bar as it is, and the cursor on a line of its own, for the error's text."""
        self._failed = True
        self._close()

    @property
    def _level(self) -> int:
        return int(self.params.get("verbose", 2)) if self.verbose is None else self.verbose

    @property
    def _freq(self) -> int:
        return self.log_freq or self.params.get("log_freq") or 10

    def _epoch_name(self, epoch: int) -> str:
        epochs = self.params.get("epochs")
        return f"Epoch {epoch + 1}" + ("" if epochs is None else f"/{epochs}")

    def _begin(self, steps: int | None, first: int = 0) -> None:
        stream = sys.stdout
        kind = bar_class(stream) if self._level == 1 else None
        bar = None
        if kind is not None:
            bar = kind(
                total=steps,
                initial=first,
                file=stream,
                unit="step",
                ascii=_BAR_SYMBOLS,
                bar_format=_bar_format(steps, ""),
                mininterval=_REDRAW_SECONDS,
                miniters=1,
                **bar_size(stream),
            )
        self._phase = _Phase(steps, first, bar)

    def _between(self, logs: Logs | None) -> None:
        """After a batch of a phase whose last line is printed at its end."""
        phase = self._phase
        if phase is not None and logs is not None:
            phase.mark_end(logs)
            if phase.step % self._freq == 0 and phase.step != phase.steps:
                self._show(phase, logs)

    def _end_of(self, name: str, logs: Logs) -> None:
        if not self._failed:
            self._finish(logs)
            if self._level:
                say(f"{name} samples: {logs.get('samples')}")
        self._close()

    def _finish(self, logs: Logs) -> None:
        """Print the phase's last line, unless it is printed, and close its bar."""
        phase = self._phase
        if phase is None:
            return
        # A batch of an evaluation may have had no values yet when its line was printed.
        missing = phase.shown != phase.step or (phase.bare and self._text(logs))
        if missing and phase.step > phase.first and not self._failed:
            self._show(phase, logs)
        self._close()

    def _close(self) -> None:
        phase, self._phase = self._phase, None
        if phase is not None and phase.bar is not None:
            phase.bar.close()

    def _show(self, phase: _Phase, logs: Logs) -> None:
        while self.run.notes:
            say(self.run.notes.pop(0))
        values = self._text(logs)
        phase.shown, phase.bare = phase.step, not values
        if self._level == 3:
            values += phase.costs()
        values += f" - {_duration(phase.seconds_per_batch())}/step"
        if phase.bar is not None:
            phase.bar.bar_format = _bar_format(phase.steps, values)
        else:
            say(f"{_position(phase.step, phase.steps)}{values}")

    def _text(self, logs: Logs, with_evaluation: bool = False) -> str:
        """`` - name: value`` of the chosen names, then of what callbacks added."""
        own = [*self.train_metrics, *(self.params.get("metrics") or [])]
        names = list(self.train_metrics)
        if with_evaluation:
            names += [f"eval_{name}" for name in self.train_metrics]
            own += [f"eval_{name}" for name in own]
        # A name with a slash is one of many (a value per layer, say): for curves, not for a line.
        names += [name for name in logs if name not in own and name not in _RESERVED and "/" not in name]
        texts = {name: _value(logs[name]) for name in names if name in logs}
        return "".join(f" - {name}: {text}" for name, text in texts.items() if text is not None)


@dataclass
class _Phase:
    """One pass over data.

    Attributes:
        steps: Batches of the whole pass; None where unknown.
        first: Batches that were done before it began (of a resumed epoch).
        bar: The live bar; None where lines are printed.
        step: Batches done.
        shown: The batch whose line was shown last.
        bare: Whether that line had no values.
        reading, total, rows, batches: Seconds, rows and batches since :meth:`costs` was asked last.
    """

    steps: int | None
    first: int
    bar: tqdm[Any] | None
    step: int = 0
    shown: int = 0
    bare: bool = False
    start: float = field(default_factory=time.perf_counter)
    last: float = field(default_factory=time.perf_counter)
    reading: float = 0.0
    total: float = 0.0
    rows: int = 0
    batches: int = 0

    def mark_read(self) -> None:
        """A batch has been read."""
        self.reading += time.perf_counter() - self.last

    def mark_end(self, logs: Mapping[str, Any]) -> None:
        """A batch has been computed."""
        now = time.perf_counter()
        self.total += now - self.last
        self.last = now
        self.rows += logs.get("batch_size") or 0
        self.batches += 1
        self.step = logs["step"]
        if self.bar is not None:
            self.bar.update(self.step - self.bar.n)

    def seconds_per_batch(self) -> float:
        """The mean since the phase began, reading included."""
        return (self.last - self.start) / max(1, self.step - self.first)

    def costs(self) -> str:
        """The text of ``verbose`` 3; begins a new window."""
        batches = max(1, self.batches)
        text = (
            f" - avg_reader_cost: {self.reading / batches:.5f} sec"
            f" - avg_batch_cost: {self.total / batches:.5f} sec"
            f" - ips: {self.rows / max(self.total, 1e-9):.5f} samples/sec"
        )
        self.reading, self.total, self.rows, self.batches = 0.0, 0.0, 0, 0
        return text


def _position(step: int, steps: int | None) -> str:
    if steps is None:
        return f"step {step:>3}"
    return f"step {step:>{len(str(steps))}}/{steps}"


def _bar_format(steps: int | None, values: str) -> str:
    values = values.replace("{", "{{").replace("}", "}}")
    if steps is None:
        return _BAR_WITHOUT_LENGTH.format(values=values)
    return _BAR.format(width=len(str(steps)), values=values)


def _value(value: Any) -> str | None:
    """A value's text, as in ``loss: 0.0555``; None for what has no place on a line."""
    if isinstance(value, (list, tuple)):
        texts = [_value(item) if isinstance(item, numbers.Real) else None for item in value]
        return " ".join(text for text in texts if text is not None) if value and None not in texts else None
    if not isinstance(value, (str, numbers.Real)) and getattr(value, "ndim", None) == 0:
        value = value.item()
    if isinstance(value, (str, numbers.Integral)):
        return str(value)
    if isinstance(value, numbers.Real):
        number = float(value)
        return f"{number:.4f}" if abs(number) > 1e-3 else f"{number:.4e}"
    return None


def _duration(seconds: float) -> str:
    """``698us``, ``50ms``, ``12s``, ``15:00``, ``12:30:00``."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f}us"
    if seconds < 1:
        return f"{seconds * 1e3:.0f}ms"
    if seconds < 60:
        return f"{seconds:.0f}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
