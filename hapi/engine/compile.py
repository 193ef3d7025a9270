"""``torch.compile`` for the steps: what is compiled, when, and what is said when that fails."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hapi.data.batch import Batch
from hapi.engine.forward import Compute, Parts, PartsOf
from hapi.engine.loss import LossFunction, normalize_outputs
from hapi.errors import add_note, suggest

__all__ = ["Compilation", "Compiled"]

Result = TypeVar("Result")

_WHAT = ("all", "eval", "step", "graph")


@dataclass(frozen=True)
class Compilation:
    """What ``prepare(compile=...)`` asks for.

    Attributes:
        what: ``"all"``: forward and loss, in training and evaluation. ``"eval"``: in evaluation and prediction only.
            ``"step"``: as ``"all"``, and the optimizer's step. ``"graph"``: as ``"all"``, in CUDA graphs.
        options: Of ``torch.compile``.
    """

    what: str = "all"
    options: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def parse(given: Any) -> Compilation | None:
        """From False, True, a word, or a dict of options of ``torch.compile``, in which ``what`` is the word.

        Raises:
            TypeError, ValueError: Something else.
        """
        if given is False or given is None:
            return None
        if given is True:
            return Compilation()
        if not isinstance(given, (str, dict)):
            raise TypeError(f"prepare: compile={given!r}; accepted: {_ACCEPTED}")
        options = dict(given) if isinstance(given, dict) else {}
        what = options.pop("what", "all") if isinstance(given, dict) else given
        if what not in _WHAT or given == "all":
            hint = suggest(what, _WHAT) if isinstance(what, str) else ""
            raise ValueError(f"prepare: compile={given!r}; accepted: {_ACCEPTED}{hint}")
        if what == "graph":
            fixed = sorted({"mode", "dynamic", "options"} & set(options))
            if fixed:
                raise ValueError(f"prepare: compile='graph' chooses {fixed[0]} itself; leave it out")
            options |= {"mode": "reduce-overhead", "dynamic": False}
        return Compilation(what, options)

    def check(self, device: torch.device, world: int, optimizer: Optimizer | None, *, scaled: bool) -> None:
        """Refuse what cannot work, before anything is built.

        Args:
            device: Where the network is.
            world: Number of ranks.
            optimizer: As it will step.
            scaled: Whether a gradient scaler steps it.

        Raises:
            ValueError: Options that do not go together.
            RuntimeError: There is no compiler on this machine.
        """
        if self.what == "graph" and (device.type != "cuda" or world > 1):
            where = f"{world} processes" if world > 1 else f"the {device.type}"
            raise ValueError(f"prepare: compile='graph' needs one process with one CUDA device; this is {where}")
        fused = optimizer is not None and any(group.get("fused") for group in optimizer.param_groups)
        if self.what == "step" and fused:
            raise ValueError("prepare: compile='step' compiles the optimizer's step; leave fused=True out")
        if self.what == "step" and scaled:
            raise ValueError("prepare: compile='step' and a gradient scaler exclude each other; use amp='bf16'")
        if self.options.get("backend", "inductor") == "inductor":
            _need_compiler(device)


_ACCEPTED = "True, False or a dict of torch.compile's options, 'eval', 'step', 'graph'"


class Compiled:
    """What one ``prepare`` compiles, when it is first used. It is kept over fits: a second one compiles nothing.

    Args:
        choice: What was asked for.
        module: What training calls.
        network: What evaluation and prediction call.
        loss: The loss; None where there is none.
        optimizer: The optimizer; None where there is none.

    Attributes:
        notes: How long compiling took, a line for each part, for whoever prints.
    """

    def __init__(
        self,
        choice: Compilation,
        module: nn.Module,
        network: nn.Module,
        loss: LossFunction | None,
        optimizer: Optimizer | None,
    ) -> None:
        self.choice = choice
        self.notes: list[str] = []
        self.trains = choice.what != "eval"
        self._timed: set[str] = set()
        program = partial(_Program, choice)
        self._predict = program(network, None)
        self._evaluate = program(network, None if loss is None else loss.means)
        self._means = self._totals = None
        if loss is not None and self.trains:
            self._means, self._totals = program(module, loss.means), program(module, loss.totals)
        self.step = None
        if choice.what == "step" and optimizer is not None:
            self.step = _compiled_step(optimizer, choice.options)

    def training(self, plain: Compute, *, means: bool) -> Compute:
        """Forward and loss in training; ``plain`` is the same, not compiled."""
        program = self._means if means else self._totals
        return plain if program is None else partial(program, plain)

    def evaluation(self, plain: Compute, *, loss: bool) -> Compute:
        """Forward, and the loss if wanted, without gradients."""
        name, program = ("evaluation", self._evaluate) if loss else ("prediction", self._predict)
        return self.timed(name, partial(program, plain))

    def timed(self, name: str, function: Callable[..., Result]) -> Callable[..., Result]:
        """``function``; its first call in this object's life compiles, so it is timed."""

        def call(*args: Any) -> Result:
            if name in self._timed:
                return function(*args)
            start = time.perf_counter()
            result = function(*args)
            self._timed.add(name)
            self.notes.append(f"Compiled the {name}: its first batch took {time.perf_counter() - start:.1f} s")
            return result

        return call

    def check_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Refuse gradients that outlive a batch in a CUDA graph, whose next replay overwrites them."""
        if self.choice.what == "graph" and any(parameter.grad is not None for parameter in parameters):
            raise ValueError(
                "compile='graph' keeps gradients in the graph's own memory, so they cannot be accumulated; "
                "accepted: accumulate_grad_batches=1, or prepare(compile=True)"
            )


class _Program:
    """Forward and loss as one compiled function."""

    def __init__(self, choice: Compilation, module: nn.Module, parts_of: PartsOf | None) -> None:
        self._compiled = torch.compile(_function(module, parts_of), **choice.options)
        self._graph = choice.what == "graph"
        # One program for all batch sizes, instead of one for the first and a second for every other.
        self._marks = "dynamic" not in choice.options
        self._rows: int | None = None

    def __call__(self, plain: Compute, batch: Batch) -> tuple[Any, Parts]:
        if self._rows is None:
            self._rows = batch.rows
            if self._marks:
                _mark_rows(batch)
        if self._graph:
            if batch.rows != self._rows:
                return plain(batch)  # a graph has one shape
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        try:
            outputs, parts = self._compiled(batch.args, batch.kwargs, batch.labels, batch.weight)
        except Exception as exc:
            _explain(exc, plain, batch)
            raise
        # The next replay writes over them, and metrics may keep them.
        return _cloned(outputs) if self._graph else outputs, parts


def _function(module: nn.Module, parts_of: PartsOf | None) -> Callable[..., tuple[Any, Parts]]:
    def compute(args: Any, kwargs: Any, labels: Any, weight: Tensor | None) -> tuple[Any, Parts]:
        outputs = normalize_outputs(module(*args, **kwargs))
        if parts_of is None:
            return outputs, ()
        rows = (*args, *kwargs.values())[0].shape[0]
        return outputs, parts_of(outputs, Batch(args, kwargs, labels, weight, rows))

    made: Callable[..., tuple[Any, Parts]] = _own_code(compute)
    return made


def _own_code(function: Any) -> Any:
    """The same function with code of its own: torch counts recompilations per code object, and gives up after a few."""
    return FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__, None, function.__closure__
    )


def _cloned(outputs: Any) -> Any:
    """Normalised outputs in memory of their own."""
    if isinstance(outputs, Mapping):
        return {key: _cloned(value) for key, value in outputs.items()}
    if isinstance(outputs, tuple):
        return tuple(_cloned(value) for value in outputs)
    return outputs.detach().clone() if isinstance(outputs, Tensor) else outputs


def _mark_rows(batch: Batch) -> None:
    labels = batch.labels.values() if isinstance(batch.labels, dict) else batch.labels
    for tensor in (*batch.args, *batch.kwargs.values(), *labels, batch.weight):
        if tensor is not None and tensor.ndim and tensor.shape[0] == batch.rows > 1:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)


def _explain(exc: Exception, plain: Compute, batch: Batch) -> None:
    """Run the batch uncompiled: a mistake in the network, the loss or the data then has its own error, and place."""
    with torch.no_grad():  # data parallelism must not prepare for another backward
        try:
            plain(batch)
        except Exception as own:
            raise own from None
    add_note(exc, "torch.compile failed; the same batch runs uncompiled, as prepare(compile=False) does it")


def _compiled_step(optimizer: Optimizer, options: dict[str, Any]) -> Callable[[], None]:
    """The optimizer's step, compiled."""

    def step() -> None:
        optimizer.step()

    compiled: Callable[[], None] = torch.compile(_own_code(step), **options)
    # A number would be compiled in, and every new rate would compile anew.
    rates = [torch.tensor(float(group["lr"])) for group in optimizer.param_groups]

    def step_with_tensor_rates() -> None:
        groups = optimizer.param_groups
        given = [group["lr"] for group in groups]
        for group, rate, value in zip(groups, rates, given, strict=True):
            if not isinstance(value, Tensor):
                group["lr"] = rate.fill_(value)
        try:
            compiled()
        finally:
            # Schedulers, logs and checkpoints see numbers.
            for group, value in zip(groups, given, strict=True):
                group["lr"] = value

    return step_with_tensor_rates


def _need_compiler(device: torch.device) -> None:
    """Look for what torch's default backend calls when it compiles.

    Raises:
        RuntimeError: It is not there; the message says what to install.
    """
    if sys.platform == "win32" or device.type not in ("cpu", "cuda"):
        return  # torch searches in more places there, and says what it misses
    if device.type == "cpu":
        named, usual = os.environ.get("CXX"), ["clang++" if sys.platform == "darwin" else "g++"]
    else:
        named, usual = os.environ.get("CC"), ["gcc", "clang"]
    wanted = [named] if named else usual
    instead = "Or choose a backend that needs none: prepare(compile={'backend': 'aot_eager'})"
    if not any(shutil.which(name) for name in wanted):
        raise RuntimeError(
            f"prepare: compile needs a C++ compiler, and {' or '.join(wanted)} is not on the PATH. "
            f"Install one (Debian, Ubuntu: apt install g++; macOS: xcode-select --install), or set CXX or CC. {instead}"
        )
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        raise RuntimeError(
            f"prepare: compile needs Python's headers, and {header.name} is not in {header.parent}. "
            f"Install them (Debian, Ubuntu: apt install python3-dev). {instead}"
        )
