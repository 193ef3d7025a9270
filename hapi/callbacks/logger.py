"""What all writers share: which values, at which step, in which folder. A writer itself opens, writes and closes."""

from __future__ import annotations

import atexit
import contextlib
import errno
import itertools
import math
import numbers
import os
import time
import warnings
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from hapi.callbacks._clock import StepClock
from hapi.callbacks.base import Callback
from hapi.callbacks.checks import whole
from hapi.callbacks.console import say
from hapi.engine.state import Logs

__all__ = ["Logger"]

_NOT_CURVES = frozenset({"step", "batch_size", "samples", "lr", "outputs"})
# Values that Throughput and DeviceStats add to the logs: of the machine, not of the model.
_PERF = ("samples_per_sec", "step_time_ms", "data_time_ms", "gpu_", "cpu_", "tflops", "mfu")
_GIB = float(1 << 30)
# How an optimizer is carried out, not what it does.
_NOT_HPARAMS = frozenset({"foreach", "fused", "capturable", "differentiable", "maximize", "decoupled_weight_decay"})


class Logger(Callback):
    """Base class of callbacks that write curves: to files, a board or a service.

    Tags are ``train/loss``, ``train/<metric>``, ``train/lr`` (``train/lr_group1`` ... for further parameter
    groups), ``eval/loss``, ``eval/<metric>``, ``perf/samples_per_sec``, ``perf/step_time_ms``,
    ``perf/data_time_ms`` and, on a GPU, ``perf/gpu_mem_gib``. Whatever other callbacks add to the logs at log
    points is written too. The x axis of all is the global step: optimizer updates over the model's whole life.
    A training value is the mean over the steps since the last point; a metric that is not made of sums (AUC, say)
    has its value since the epoch began.

    Each run has a folder of its own: ``log_dir/<name>``. A run that is resumed from a checkpoint goes on in it;
    another run finds it taken and gets ``<name>-2``. What one callback object writes for one model is one run:
    ``fit``, ``evaluate`` and ``fit`` again go to one place.

    A subclass overrides :meth:`open_run`, :meth:`write` and :meth:`close_run`, and where it has something to do
    :meth:`write_hparams` and :meth:`flush`. If one of the last four raises ``OSError`` (a full disk, say), there
    is one warning, the writer is closed, and training goes on without it.

    Args:
        log_dir: The folder of all runs. Made when it is needed.
        name: Of the run. Default: the time at its start, ``20261121-103000``.
        log_freq: Batches between points. Default: ``fit``'s ``log_freq``.
        hparams: True writes the hyper-parameters (network, optimizer, learning rate, batch size, seed ...), a dict
            adds to them, False writes none.

    Attributes:
        folder: This run's folder; None before it is opened.
        live: Names of attributes that a copy or pickle of the callback must not share: open files, threads.

    Raises:
        TypeError, ValueError: An argument of the wrong type or value.

    Example:
        >>> class Print(Logger):
        ...     def write(self, values, step):
        ...         print(step, values)
        >>> model.fit(train, callbacks=Print("log"))
    """

    live: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        log_dir: str | os.PathLike[str],
        name: str | None = None,
        *,
        log_freq: int | None = None,
        hparams: bool | Mapping[str, Any] = False,
    ) -> None:
        owner = type(self).__name__
        if not isinstance(log_dir, (str, os.PathLike)) or not os.fspath(log_dir):
            raise TypeError(f"{owner}: log_dir={log_dir!r}; accepted: a folder's path")
        if name is not None and (not isinstance(name, str) or not name or Path(name).name != name):
            raise ValueError(f"{owner}: name={name!r}; accepted: a folder's name, without a path")
        if not isinstance(hparams, (bool, Mapping)):
            raise TypeError(f"{owner}: hparams={hparams!r}; accepted: True, False, or a dict of further values")
        # Absolute: a script may change its folder before the first step.
        self.log_dir = Path(log_dir).absolute()
        if self.log_dir.exists() and not self.log_dir.is_dir():
            raise ValueError(f"{owner}: log_dir={os.fspath(log_dir)!r} is a file; accepted: a folder's path")
        self.name = name
        self.log_freq = None if log_freq is None else whole(owner, "log_freq", log_freq, 1)
        self.hparams = hparams if isinstance(hparams, bool) else dict(hparams)
        self.folder: Path | None = None
        self._resumed = False
        self._told_hparams = False
        self._clock = StepClock()
        self._begin_run()

    def _begin_run(self) -> None:
        self._step = 0  # of the newest point
        self._train_step = 0  # of the newest training point
        self._owner: Callable[[], Any] | None = None
        self._window: Any = None
        self._saved_window: dict[str, Any] | None = None
        self._told_hparams = False
        self._close_files()

    def _close_files(self) -> None:
        self._pid: int | None = None  # of the process that opened the run
        self._training = False
        self._off = False

    # ---------------------------------------------------------------- for subclasses

    def open_run(self, folder: Path, step: int, resumed: bool) -> None:
        """Open, or open again, what is written to.

        Args:
            folder: This run's folder. It exists.
            step: Optimizer updates done.
            resumed: The run goes on from a checkpoint: records of steps after ``step`` were written by a process
                that was killed, and must go.
        """

    def write(self, values: dict[str, float], step: int) -> None:
        """Write values by tag, at a global step. They may be infinite or NaN."""

    def write_hparams(self, values: dict[str, int | float | str], metrics: list[str]) -> None:
        """Write the hyper-parameters, once per run.

        Args:
            values: By name.
            metrics: The tags that say how good the run is.
        """

    def flush(self) -> None:
        """At the end of an epoch and of an evaluation: bring what was written to the disk."""

    def close_run(self) -> None:
        """Close files and threads. The same folder may be opened again later."""

    # --------------------------------------------------------------------- the hooks

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Open this run, or take it up again."""
        progress = self.run.progress
        self._open()
        self._training = True
        self._window = self.run.window()
        if self._saved_window is not None:
            self._window.load_state_dict(self._saved_window)
            self._saved_window = None
        self._train_step = max(self._train_step, progress.first_step)
        self._every = self.log_freq or self.params["log_freq"]
        self._batches = self.params["steps"]
        if self.hparams is not False and not self._told_hparams:
            self._told_hparams = True
            phase = "eval" if self.params["evaluates"] else "train"
            tags = [f"{phase}/{name}" for name in self.params["metrics"]]
            self._guard(lambda: self.write_hparams(self._hyperparameters(), tags))
        self._clock_step = progress.global_step
        self._clock.start(self.run.read_seconds)

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Values start anew with the epoch, unless it is resumed in its middle."""
        if self.run.progress.batch_in_epoch == 0:
            self._window.reset()
        self._clock.resume()

    def on_train_batch_begin(self, step: int, logs: Logs | None = None) -> None:
        """The time up to here was spent waiting for data."""
        self._clock.data_ready(self.run.read_seconds)

    def on_train_batch_end(self, step: int, logs: Logs | None = None) -> None:
        """Write a point every ``log_freq`` batches and at the epoch's last batch."""
        assert logs is not None
        self._clock.batch_done(logs["batch_size"])
        if "loss" in logs and (logs["step"] % self._every == 0 or logs["step"] == self._batches):
            self._train_point(logs)

    def on_eval_begin(self, logs: Logs | None = None) -> None:
        """Write what is left of the epoch, before its sums go; open the run of an evaluation by itself."""
        if self._training:
            self._clock.pause()
            self._train_point(self.run.logs)
        else:
            self._open()

    def on_eval_end(self, logs: Logs | None = None) -> None:
        """Write the evaluation's values."""
        if logs and self.folder is not None:
            step = self.run.progress.global_step
            self._write({f"eval/{k}": v for k, v in _scalars(logs)}, step)
            self._guard(self.flush)
        if not self._training:
            self._close()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Write what is left of an epoch without an evaluation."""
        self._clock.pause()
        self._train_point(self.run.logs)
        self._guard(self.flush)

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Close files, also after an error."""
        self._close()

    # ------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """The run's folder, and the position of its curves."""
        window = self._saved_window if self._window is None else self._window.state_dict()
        return {
            "folder": None if self.folder is None else self.folder.name,
            "step": self._step,
            "train_step": self._train_step,
            "told_hparams": self._told_hparams,
            "window": window,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on in the folder of the run that is resumed."""
        self._begin_run()
        name = state_dict["folder"]
        self.folder = None if name is None else self.log_dir / name
        self._step, self._train_step = state_dict["step"], state_dict["train_step"]
        self._told_hparams = state_dict["told_hparams"]
        self._saved_window = state_dict["window"]
        self._resumed = name is not None

    def __getstate__(self) -> dict[str, Any]:
        """Without what is open, and without the run: a copy is a callback that has not begun."""
        state = {k: v for k, v in vars(self).items() if k not in ("run", "model", "_window", "_owner")}
        state |= dict.fromkeys(self.live) | {"_window": None, "_owner": None, "_pid": None, "_training": False}
        return state

    # -------------------------------------------------------------------------- inside

    def _open(self) -> None:
        """Open this run's folder: the one of the resumed run, the one of earlier fits, or a new one."""
        if self._is_open():
            return
        progress, resumed = self.run.progress, self._resumed
        mine = self._owner is not None and self._owner() is self.model and progress.global_step >= self._step
        if not resumed and not mine:
            self._begin_run()
            self.folder = None
        if self.folder is None:
            self.folder = self._new_folder()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._owner, self._resumed, self._off = weakref.ref(self.model), False, False
        if resumed:
            # What a killed process wrote after the checkpoint is written again.
            self._step = min(self._step, progress.global_step)
            self._train_step = min(self._train_step, progress.global_step)
        self.open_run(self.folder, progress.global_step, resumed)
        self._pid = os.getpid()
        atexit.register(self._close)

    def _new_folder(self) -> Path:
        """A folder that no other run has; writers of one fit with one name share theirs, if they are of other kinds."""
        owner, key = type(self).__name__, (str(self.log_dir), self.name)
        taken, kinds = self.run.folders.get(key, (None, set()))
        if taken is not None and owner not in kinds:
            kinds.add(owner)
            return taken
        try:
            folder = self._made_folder()
        except OSError as exc:
            raise type(exc)(
                exc.errno, f"{owner}: no folder can be made in log_dir: {exc.strerror}", exc.filename
            ) from exc
        self.run.folders[key] = (folder, {owner})
        if self.name is not None and folder.name != self.name:
            say(f"{owner}: another run has the name {self.name!r}; this one is in {folder}")
        return folder

    def _made_folder(self) -> Path:
        name = self.name or time.strftime("%Y%m%d-%H%M%S")
        self.log_dir.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1):
            folder = self.log_dir / (name if number == 1 else f"{name}-{number}")
            try:
                folder.mkdir()  # fails where another process was first
            except FileExistsError:
                if folder.is_dir() and not any(folder.iterdir()):
                    break
            else:
                break
        return folder

    def _is_open(self) -> bool:
        # A forked child has a copy of the writer, but not its threads: touching it would hang.
        return self._pid is not None and self._pid == os.getpid()

    def _close(self) -> None:
        if self._is_open():
            atexit.unregister(self._close)
            try:
                if not self._off:
                    self._guard(self.close_run)
            finally:
                self._close_files()

    def _guard(self, action: Callable[[], None]) -> None:
        """A writer that cannot write must not end the training."""
        if not self._is_open() or self._off:
            return
        try:
            if self.folder is not None and not self.folder.is_dir():
                # A file that is open can still be written to when it has no name any more.
                raise FileNotFoundError(errno.ENOENT, "the folder is gone")
            action()
        except OSError as exc:
            self._off = True
            owner = type(self).__name__
            warnings.warn(
                f"{owner}: cannot write to {self.folder}: {exc}. Training goes on without {owner}.", RuntimeWarning
            )
            with contextlib.suppress(OSError):  # it has been said
                self.close_run()

    def _write(self, values: dict[str, float], step: int) -> None:
        self._step = max(self._step, step)
        self._guard(lambda: self.write(values, step))

    def _train_point(self, logs: Logs) -> None:
        """Write the values since the last point, if a step was done since then."""
        step = self.run.progress.global_step
        if step <= self._train_step or "loss" not in logs:
            return
        rates = self._clock.read(step - self._clock_step)
        self._train_step = self._clock_step = step
        values: dict[str, float] = {}
        own = self._window.read()
        for name, value in _scalars({**logs, **own}):
            values[f"perf/{name}" if name.startswith(_PERF) else f"train/{name}"] = value
        values |= _rates(self.run.optimizer)
        values |= {f"perf/{name}": value for name, value in (rates or {}).items()}
        memory = self._gpu_memory()
        if memory is not None:
            values.setdefault("perf/gpu_mem_gib", memory)  # DeviceStats resets the peak that is read here
        values |= self.more_values()
        self._write(values, step)

    def more_values(self) -> dict[str, float]:
        """Further values of a training point, by tag."""
        return {}

    def _gpu_memory(self) -> float | None:
        """The most memory that tensors had since training began, in GiB."""
        device = self.run.meters.device
        return torch.cuda.max_memory_allocated(device) / _GIB if device.type == "cuda" else None

    def _hyperparameters(self) -> dict[str, int | float | str]:
        run, params = self.run, self.params
        config, optimizer = run.config, run.optimizer
        found: dict[str, Any] = {
            "network": type(run.network).__name__,
            "parameters": sum(p.numel() for p in run.network.parameters()),
            "optimizer": type(optimizer).__name__,
            **{k: v for k, v in (optimizer.defaults if optimizer else {}).items() if k not in _NOT_HPARAMS},
            "batch_size": params["batch_size"],
            "epochs": params["epochs"],
            "accumulate_grad_batches": config.accumulate,
            "ranks": run.env.world,
            "seed": config.seed,
            "precision": str(config.precision.dtype or "float32").removeprefix("torch."),
        }
        if run.scheduler is not None:
            found["scheduler"] = type(run.scheduler).__name__
        if optimizer is not None:
            found["lr"] = float(optimizer.param_groups[0].get("initial_lr", optimizer.param_groups[0]["lr"]))
        found |= self.hparams if isinstance(self.hparams, dict) else {}
        return {str(name): _plain(value) for name, value in found.items()}


def _plain(value: Any) -> int | float | str:
    if isinstance(value, (np.generic, np.ndarray, Tensor)) and math.prod(value.shape) == 1:
        value = value.item()
    if isinstance(value, (bool, str)) or not isinstance(value, numbers.Real):
        return str(value)
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def _scalars(logs: Logs) -> list[tuple[str, float]]:
    """The numbers in ``logs``; a short vector (a value per class, say) as ``<name>/0`` and on."""
    found: list[tuple[str, float]] = []
    for name, value in logs.items():
        if name in _NOT_CURVES:
            continue
        if isinstance(value, numbers.Real):
            found.append((name, float(value)))
        elif isinstance(value, (np.ndarray, Tensor)) and value.ndim <= 1:
            values = [float(v) for v in np.asarray(value).reshape(-1)]
            found += [(name, values[0])] if value.ndim == 0 else [(f"{name}/{i}", v) for i, v in enumerate(values)]
    return found


def _rates(optimizer: Any) -> dict[str, float]:
    groups = optimizer.param_groups if optimizer else []
    return {"train/lr" + (f"_group{i}" if i else ""): float(group["lr"]) for i, group in enumerate(groups)}
