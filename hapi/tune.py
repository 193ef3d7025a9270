"""``tune``: which switches make this model on this data faster, measured in seconds, without a trace."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from hapi.callbacks import Callback
from hapi.callbacks.console import say
from hapi.engine import rng
from hapi.engine.config import check_int, check_number
from hapi.model import Model

__all__ = ["Measured", "Tuned", "tune"]

# A switch is worth a line in the user's script from 3 % on; less is within the noise of a busy machine.
_WORTH = 0.97
_HOPELESS = 1.1
_LOSS_STEPS = 6
_ROUND_SECONDS = 0.1
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 15
_SEED = 0
_ANY = object()


@dataclass(frozen=True)
class Measured:
    """One switch, measured against what was best before it.

    Attributes:
        switch: What was switched, as it is written: ``"fused=True"``.
        before: Milliseconds per step without it.
        after: Milliseconds per step with it; NaN where it was not measured.
        ratio: The median over rounds of ``after / before``.
        difference: The largest relative difference of the losses of the first steps from those of the model as it is.
        taken: Whether it is part of the result.
        why: Why it was not measured; empty where it was.
    """

    switch: str
    before: float = math.nan
    after: float = math.nan
    ratio: float = math.nan
    difference: float = math.nan
    taken: bool = False
    why: str = ""

    def __str__(self) -> str:
        if self.why:
            return f"{self.switch:<24} {self.why}"
        mark = "  taken" if self.taken else ""
        figures = f"{self.before:>9.3f} {self.after:>9.3f} {self.ratio:>6.2f} {self.difference:>11.1e}"
        return f"{self.switch:<24} {figures}{mark}"


@dataclass(frozen=True)
class Tuned:
    """What :func:`tune` found. Its text can be pasted.

    Attributes:
        arguments: ``{"prepare": {"fused": True}, "fit": {"num_workers": 2}}``: what to add to the two calls.
        threads: For ``torch.set_num_threads``; None where the present number is best.
        measured: All switches in the order in which they were tried.
    """

    arguments: dict[str, dict[str, Any]]
    threads: int | None = None
    measured: tuple[Measured, ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        lines = [] if self.threads is None else [f"torch.set_num_threads({self.threads})"]
        for call, values in self.arguments.items():
            if values:
                lines.append(f"model.{call}(..., {', '.join(f'{name}={value!r}' for name, value in values.items())})")
        return "\n".join(lines) or "# the model is as fast as it gets with these switches"


@dataclass(frozen=True)
class _Setting:
    """Switches that are on."""

    prepare: dict[str, Any] = field(default_factory=dict)
    fit: dict[str, Any] = field(default_factory=dict)
    threads: int | None = None

    def __str__(self) -> str:
        parts = [f"{name}={value!r}" for name, value in (self.prepare | self.fit).items()]
        return ", ".join(parts + ([] if self.threads is None else [f"threads={self.threads}"]))

    def plus(self, switch: _Setting) -> _Setting:
        threads = self.threads if switch.threads is None else switch.threads
        return _Setting(self.prepare | switch.prepare, self.fit | switch.fit, threads)


@dataclass(frozen=True)
class _Switch:
    """A switch to try.

    Attributes:
        setting: What it adds.
        keeps_bits: Whether it cannot change a result, or is taken only where it does not.
        evaluates: Whether it is measured on evaluation.
        compile_before: Tried only where ``compile`` is this.
    """

    setting: _Setting
    keeps_bits: bool = False
    evaluates: bool = False
    compile_before: Any = _ANY


def tune(
    model: Model,
    data: Any,
    *,
    batch_size: int = 1,
    num_workers: int = 0,
    tolerance: float | None = None,
    seconds: float = 20.0,
    verbose: int = 1,
) -> Tuned:
    """Measure the switches of ``prepare`` and ``fit`` on this model and this data, and say which to set.

    Real training steps are done with copies of the model, in turns with and without a switch. The model itself, its
    optimizer and the global generators stay as they are. Switches that keep every bit (``num_workers``,
    ``keep_on_device``, the number of threads where it does) are always tried; those that change last bits (``fused``,
    ``channels_last``, ``compile``) only if a tolerance is given.

    Args:
        model: Prepared with an optimizer and a loss. A copy of it and of its optimizer must fit in memory twice.
        data: As ``train_data`` of :meth:`hapi.Model.fit`; it must be readable more than once.
        batch_size: Rows per batch.
        num_workers: Reader processes that ``fit`` is called with now.
        tolerance: Largest relative difference of the losses of the first 6 steps that is accepted; None: 0.
        seconds: How long to measure, about. A switch that has begun is finished: compiling can take longer.
        verbose: 0 prints nothing, 1 a table.

    Returns:
        The switches that save at least 3 % of a step each. ``print(result)`` gives lines to paste.

    Raises:
        RuntimeError: The model is not prepared, or runs on several processes.
        ValueError: The data can be read only once, or an argument is out of range.

    Example:
        >>> result = hapi.tune(model, train_data, batch_size=64, tolerance=1e-3)  # doctest: +SKIP
        >>> model.prepare(optimizer, loss, **result.arguments["prepare"])  # doctest: +SKIP
    """
    _check(model, data, batch_size, num_workers, tolerance, seconds, verbose)
    draws = _Draws(data)
    tuning = _Tuning(model, data, batch_size, tolerance, time.perf_counter() + seconds, draws)
    best = _Setting(fit={"num_workers": num_workers})
    switches = list(_switches(model, data, num_workers))
    rows: list[Measured] = []
    if verbose:
        say(f"{'switch':<24} {'ms before':>9} {'ms after':>9} {'ratio':>6} {'difference':>11}")
    try:
        for index, switch in enumerate(switches):
            if switch.compile_before not in (_ANY, best.prepare.get("compile")):
                continue
            row, best = tuning.measure(best, switch, len(switches) - index)
            rows.append(row)
            if verbose:
                say(str(row))
    finally:
        draws.restore()
    fit = {name: value for name, value in best.fit.items() if (name, value) != ("num_workers", num_workers)}
    result = Tuned({"prepare": best.prepare, "fit": fit}, best.threads, tuple(rows))
    if verbose:
        say(str(result))
    return result


def _check(
    model: Model, data: Any, batch_size: int, num_workers: int, tolerance: float | None, seconds: float, verbose: int
) -> None:
    if not isinstance(model, Model):
        raise TypeError(f"tune: model={model!r}; accepted: a hapi.Model")
    check_int("batch_size", batch_size, where="tune")
    check_int("num_workers", num_workers, 0, where="tune")
    check_int("verbose", verbose, 0, where="tune")
    check_number("seconds", seconds, where="tune")
    if tolerance is not None:
        check_number("tolerance", tolerance, where="tune")
    if hasattr(data, "__next__"):
        raise ValueError("tune: the data is an iterator, which can be read only once; give a Dataset, arrays or a list")
    model._need("tune", training=True)
    if model._environment().world > 1:
        raise RuntimeError("tune: runs on one process; measure there, and use the result on all")


def _switches(model: Model, data: Any, num_workers: int) -> Iterator[_Switch]:
    """What to try, in order: switches that keep all bits first, cheap ones before those that compile."""
    device = model._device
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if isinstance(data, torch.utils.data.Dataset):
        for workers in (2, 4, 8):
            if workers <= cpus and workers != num_workers:
                yield _Switch(_Setting(fit={"num_workers": workers}), keeps_bits=True)
    if device.type == "cpu":
        for threads in sorted({1, max(1, cpus // 2), cpus} - {torch.get_num_threads()}):
            yield _Switch(_Setting(threads=threads), keeps_bits=True)
    else:
        yield _Switch(_Setting(fit={"keep_on_device": "auto"}), keeps_bits=True)
    assert model._optimizer is not None
    if not any(group.get("fused") for group in model._optimizer.param_groups):
        yield _Switch(_Setting(prepare={"fused": True}))
    if not model._channels_last and any(p.ndim == 4 for p in model.network.parameters()):
        yield _Switch(_Setting(prepare={"channels_last": True}))
    if model._compiled is None:
        yield _Switch(_Setting(prepare={"compile": "eval"}), evaluates=True)
        yield _Switch(_Setting(prepare={"compile": True}))
        yield _Switch(_Setting(prepare={"compile": "step", "fused": False}), compile_before=True)


class _Tuning:
    """Everything that the measurements share."""

    def __init__(
        self, model: Model, data: Any, batch_size: int, tolerance: float | None, deadline: float, draws: _Draws
    ) -> None:
        self._model, self._data, self._batch, self._draws = model, data, batch_size, draws
        self._tolerance, self._deadline = tolerance, deadline
        self._standing: _Side | None = None
        self._known: dict[bool, list[float]] = {}

    def measure(self, best: _Setting, switch: _Switch, left: int) -> tuple[Measured, _Setting]:
        """Try a switch on top of ``best``, one of ``left`` switches; gives what is best then."""
        row = Measured(str(switch.setting))
        if not switch.keeps_bits and self._tolerance is None:
            return replace(row, why="not tried: it changes last bits; give tolerance=1e-3, for example"), best
        now = time.perf_counter()
        if now >= self._deadline:
            return replace(row, why="not tried: no time left; give more seconds"), best
        wanted = best.plus(switch.setting)
        before = self._side_to_beat(best, switch.evaluates)
        try:
            after = _Side(self._model, self._data, self._batch, wanted, switch.evaluates)
            found = after.losses(self._draws)
        except (ValueError, RuntimeError) as exc:
            return replace(row, why=f"not possible: {exc}"), best
        # From the model as it is, so that what several switches change adds up.
        difference = _difference(self._known[switch.evaluates], found)
        times = _in_turns(before, after, now + (self._deadline - now) / left)
        ratio = float(np.median([b / a for a, b in times]))
        old, new = (1e3 * float(np.median(column)) for column in zip(*times, strict=True))
        taken = ratio <= _WORTH and difference <= (self._tolerance or 0.0)
        if taken:
            self._standing = after
        return Measured(row.switch, old, new, ratio, difference, taken), wanted if taken else best

    def _side_to_beat(self, best: _Setting, evaluates: bool) -> _Side:
        side = self._standing
        if side is None or (side.setting, side.evaluates) != (best, evaluates):
            self._standing = None  # its memory goes first
            side = self._standing = _Side(self._model, self._data, self._batch, best, evaluates)
            self._known.setdefault(evaluates, side.losses(self._draws))
        return side


class _Side:
    """A copy of the model with a setting."""

    def __init__(self, model: Model, data: Any, batch: int, setting: _Setting, evaluates: bool) -> None:
        self.setting, self.evaluates = setting, evaluates
        self._model, self._data, self._batch = model._twin(**setting.prepare), data, batch
        self._threads = setting.threads or torch.get_num_threads()
        self._run: Callable[..., Any] = self._evaluate if evaluates else self._fit

    def losses(self, draws: _Draws) -> list[float]:
        """The losses of the first steps, from the same generators."""
        losses = _Losses()
        draws.restore()
        self._run(_LOSS_STEPS, losses)
        return losses.values

    def seconds(self, steps: int) -> float:
        """Seconds per step, reading included."""
        clock = _Clock(steps + 1)
        self._run(steps + 1, clock)
        return (clock.last - clock.first) / steps

    def _fit(self, steps: int, callback: Callback) -> None:
        with _threads(self._threads):
            self._model.fit(
                self._data,
                batch_size=self._batch,
                num_iters=steps,
                seed=_SEED,
                verbose=0,
                log_freq=10**9,
                callbacks=callback,
                **self.setting.fit,
            )

    def _evaluate(self, steps: int, callback: Callback) -> None:
        with _threads(self._threads):
            self._model.evaluate(
                self._data,
                self._batch,
                num_iters=steps,
                verbose=0,
                log_freq=10**9,
                callbacks=callback,
                **self.setting.fit,
            )


class _Losses(Callback):
    """Each step's own loss."""

    log_freq = 1

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_begin(self, logs: Any = None) -> None:
        self._window = self.run.window()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._window.reset()

    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        self.values.append(self._window.read()["loss"])

    def on_eval_end(self, logs: Any = None) -> None:
        self.values.append(logs["loss"])


class _Clock(Callback):
    """When the first and the last of some batches ended; what comes before the first is the cost of a fit."""

    def __init__(self, batches: int) -> None:
        self._batches, self._seen = batches, 0
        self.first = self.last = 0.0

    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        self._count()

    def on_eval_batch_end(self, step: int, logs: Any = None) -> None:
        self._count()

    def _count(self) -> None:
        self._seen += 1
        if self._seen == 1:
            self.first = self._now()
        if self._seen == self._batches:
            self.last = self._now()

    def _now(self) -> float:
        if self.run.meters.device.type == "cuda":
            torch.cuda.synchronize(self.run.meters.device)
        return time.perf_counter()


def _difference(a: Sequence[float], b: Sequence[float]) -> float:
    """The largest relative difference; infinite where one is not a number."""
    worst = 0.0
    for x, y in zip(a, b, strict=True):
        gap = abs(x - y) / max(abs(x), 1e-12)
        worst = max(worst, math.inf if math.isnan(gap) else gap)
    return worst


def _in_turns(before: _Side, after: _Side, deadline: float) -> list[tuple[float, float]]:
    """Seconds per step of both sides, round by round, so that what else the machine does hits both."""
    steps = max(1, min(100, math.ceil(_ROUND_SECONDS / max(after.seconds(2), 1e-6))))
    rounds: list[tuple[float, float]] = []
    while len(rounds) < _LEAST_ROUNDS or (len(rounds) < _MOST_ROUNDS and time.perf_counter() < deadline):
        if len(rounds) >= _LEAST_ROUNDS and all(late > _HOPELESS * early for early, late in rounds):
            break
        if len(rounds) % 2:
            late, early = after.seconds(steps), before.seconds(steps)
        else:
            early, late = before.seconds(steps), after.seconds(steps)
        rounds.append((early, late))
    return rounds


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    if count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Draws:
    """The global generators and those of a user's DataLoader, as they were."""

    def __init__(self, data: Any) -> None:
        self._globals = rng.capture()
        batches = getattr(data, "batch_sampler", None)
        owners = (data, getattr(data, "sampler", None), batches, getattr(batches, "sampler", None))
        own = {getattr(owner, "generator", None) for owner in owners}
        self._own = [(made, made.get_state()) for made in own if isinstance(made, torch.Generator)]

    def restore(self) -> None:
        rng.restore(self._globals)
        for generator, state in self._own:
            generator.set_state(state)
