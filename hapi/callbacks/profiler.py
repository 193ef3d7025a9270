"""Where the time of a few batches goes: a trace of torch's profiler."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from hapi.callbacks.base import Callback
from hapi.callbacks.checks import flag, whole
from hapi.callbacks.console import say
from hapi.engine.state import Logs
from hapi.errors import suggest

__all__ = ["ProfilerCallback"]

_ACTIVITIES = tuple(name.lower() for name in ProfilerActivity.__members__)


class ProfilerCallback(Callback):
    """Record a few batches of ``fit`` with ``torch.profiler`` and write a trace of them.

    Batches are counted over the whole ``fit``. A cycle is ``wait`` batches without the profiler, ``warmup``
    batches that are recorded and thrown away, and ``active`` batches that go into one file
    ``<host>_<process>.<time>.pt.trace.json``. Perfetto, ``chrome://tracing`` and TensorBoard's profiler plugin
    open it. Where training ends or fails within the active batches, the trace of those done is written. After
    the last cycle the profiler is off, and costs nothing.

    Args:
        log_dir: The folder of the traces; it is created.
        wait: Batches to skip at the beginning of a cycle.
        warmup: Batches to run with the profiler before recording, since its start distorts them.
        active: Batches to record.
        repeat: Cycles; 0 goes on until training ends.
        activities: What to record: some of ``"cpu"``, ``"cuda"``, ``"xpu"`` ..., or members of
            ``torch.profiler.ProfilerActivity``. Default: all that this machine has.
        record_shapes: Record the shapes of the operators' inputs.
        profile_memory: Record what operators allocate and free.
        with_stack: Record the lines of Python code that called the operators. Slow.
        with_flops: Estimate the floating-point operations of matrix products and convolutions.
        print_table: Print so many operators that took the most time, when a cycle ends. 0: no table.

    Raises:
        TypeError: An argument of the wrong type.
        ValueError: An argument out of range.
        OSError: At the start of ``fit``: the folder cannot be made.

    Example:
        >>> model.fit(train, callbacks=ProfilerCallback("traces", wait=5, active=3, print_table=10))
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str],
        *,
        wait: int = 1,
        warmup: int = 1,
        active: int = 3,
        repeat: int = 1,
        activities: Iterable[str | ProfilerActivity] | None = None,
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
        with_flops: bool = False,
        print_table: int = 0,
    ) -> None:
        owner = "ProfilerCallback"
        if not os.fspath(log_dir):
            raise ValueError(f"{owner}: log_dir=''; accepted: the path of a folder")
        self.log_dir = Path(log_dir)
        self.wait = whole(owner, "wait", wait, 0)
        self.warmup = whole(owner, "warmup", warmup, 0)
        self.active = whole(owner, "active", active, 1)
        self.repeat = whole(owner, "repeat", repeat, 0)
        self.activities = None if activities is None else _names(activities)
        self.record_shapes = flag(owner, "record_shapes", record_shapes)
        self.profile_memory = flag(owner, "profile_memory", profile_memory)
        self.with_stack = flag(owner, "with_stack", with_stack)
        self.with_flops = flag(owner, "with_flops", with_flops)
        self.print_table = whole(owner, "print_table", print_table, 0)
        self._profiler: Any = None
        self._batches = 0
        self._traces = 0

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Begin the first cycle."""
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self._batches = self._traces = 0
        self._start()

    def on_train_batch_end(self, step: int, logs: Logs | None = None) -> None:
        """Go on in the cycle, or to the next."""
        if self._profiler is None:
            return
        self._batches += 1
        self._profiler.step()
        cycles, position = divmod(self._batches, self._cycle)
        if position == 0:
            self._stop()
            if self.repeat == 0 or cycles < self.repeat:
                self._start()

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Write what was recorded."""
        running = self._profiler is not None
        self._stop()
        if running and not self._traces:
            warnings.warn(
                f"ProfilerCallback: nothing was recorded: training had {self._batches} batches, and recording begins "
                f"after wait={self.wait} and warmup={self.warmup}",
                UserWarning,
            )

    def on_exception(self, exception: BaseException) -> None:
        """Write what was recorded before training failed."""
        self._stop()

    @property
    def _cycle(self) -> int:
        return self.wait + self.warmup + self.active

    def _start(self) -> None:
        # One profiler per cycle: torch warns where one of several cycles forgets the events of the last.
        chosen = self.activities
        profiler = torch.profiler.profile(
            activities=None if chosen is None else [ProfilerActivity.__members__[name.upper()] for name in chosen],
            schedule=torch.profiler.schedule(wait=self.wait, warmup=self.warmup, active=self.active, repeat=1),
            on_trace_ready=self._write,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
        )
        profiler.start()
        self._profiler = profiler

    def _stop(self) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()

    def _write(self, profiler: Any) -> None:
        """The recorded batches are over: all of them, or those that there were."""
        if (self._batches - 1) % self._cycle < self.wait + self.warmup:
            return  # the profiler was ready for a batch that did not come
        self._traces += 1
        try:
            torch.profiler.tensorboard_trace_handler(str(self.log_dir))(profiler)
        except (OSError, RuntimeError) as exc:
            # A full disk must not end the training.
            warnings.warn(f"ProfilerCallback: cannot write a trace to {str(self.log_dir)!r}: {exc}", RuntimeWarning)
        if self.print_table:
            say(_table(profiler.key_averages(), self.print_table))

    def __getstate__(self) -> dict[str, Any]:
        """Without the profiler: a copy is one that has not begun."""
        return {**vars(self), "_profiler": None}


def _names(activities: Any) -> tuple[str, ...]:
    accepted = f"some of {', '.join(map(repr, _ACTIVITIES))}"
    if isinstance(activities, (str, ProfilerActivity)) or not isinstance(activities, Iterable):
        raise TypeError(f"ProfilerCallback: activities={activities!r}; accepted: a list with {accepted}")
    names = []
    for given in activities:
        name = (given.name if isinstance(given, ProfilerActivity) else str(given)).lower()
        if name not in _ACTIVITIES:
            hint = suggest(name, _ACTIVITIES)
            raise ValueError(f"ProfilerCallback: activities holds {given!r}{hint}; accepted: {accepted}")
        names.append(name)
    if not names:
        raise ValueError(f"ProfilerCallback: activities=[]; accepted: {accepted}")
    return tuple(dict.fromkeys(names))


def _table(averages: Any, rows: int) -> str:
    """The operators with the most time of their own, without what they call: on the device if it did anything."""
    events = [event for event in averages if not event.key.startswith("ProfilerStep")]
    on_device = any(event.self_device_time_total for event in events)
    column = "self_device_time_total" if on_device else "self_cpu_time_total"
    events = sorted(events, key=lambda event: getattr(event, column), reverse=True)
    total = sum(getattr(event, column) for event in events)
    kind = "device" if on_device else "CPU"
    lines = [f"Profiler: operators by their own {kind} time", f"{'time':>12}{'part':>8}{'calls':>9}  operator"]
    for event in events[:rows]:
        time = getattr(event, column)
        name = event.key if len(event.key) <= 80 else f"{event.key[:77]}..."
        lines.append(f"{time / 1e3:>9.3f} ms{time / max(total, 1e-9):>8.1%}{event.count:>9}  {name}")
    return "\n".join(lines)
