"""Checkpoints on a schedule and at the best value."""

from __future__ import annotations

import os
from typing import Any

from hapi.callbacks.base import Callback
from hapi.callbacks.checks import flag, verbosity, whole
from hapi.callbacks.console import say
from hapi.callbacks.monitor import PREFIX, Monitor
from hapi.engine.state import Logs

__all__ = ["ModelCheckpoint"]


class ModelCheckpoint(Callback):
    """Save the model every so many epochs or steps, at the best value, and at the end.

    ================================ =======================================================================
    file prefix in ``save_dir``      written
    ================================ =======================================================================
    ``1``, ``2``, ...                after an epoch whose number, from 1, is a multiple of ``save_freq``
    ``step-1000``, ``step-2000`` ... every ``every_n_steps`` optimizer steps
    ``best``                         after an epoch in which ``monitor`` beat its best
    ``final``                        when training ends without an error
    ================================ =======================================================================

    An epoch's checkpoint is written after its evaluation. On several ranks a checkpoint within an epoch waits
    for the next log point, where the ranks agree, and bears the number of the step that it holds.

    Args:
        save_freq: Epochs between numbered checkpoints.
        save_dir: Folder of the files; by default ``fit``'s ``save_dir``. It is an error to have neither.
        monitor: Value that decides about ``best``. With evaluation data the evaluation's value is meant,
            written ``"eval_loss"`` or ``"loss"``; without, the training mean of the epoch.
        mode: ``"min"``, ``"max"`` or ``"auto"`` (by the name of the value).
        save_best_only: Write ``best`` and nothing else. Needs ``monitor``; refuses ``every_n_steps``.
        max_to_keep: Keep only so many of the newest numbered and step checkpoints; ``best`` and ``final`` are
            not counted. An older one is removed when the newer one is whole on disk. Default: keep all.
        every_n_steps: Optimizer steps between checkpoints within epochs, by the global step. Default: none.
        verbose: 0 prints nothing; else ``save checkpoint at PATH`` for each file, unless ``fit``'s is 0.

    Raises:
        ValueError: An argument out of range, or arguments that exclude each other; at the start of ``fit``:
            no ``save_dir`` here nor there.

    Example:
        >>> keep_three = ModelCheckpoint(save_dir="out", monitor="eval_acc", max_to_keep=3)
        >>> model.fit(train, val, epochs=10, callbacks=keep_three)
    """

    def __init__(
        self,
        save_freq: int = 1,
        save_dir: str | os.PathLike[str] | None = None,
        *,
        monitor: str | None = None,
        mode: str = "auto",
        save_best_only: bool = False,
        max_to_keep: int | None = None,
        every_n_steps: int | None = None,
        verbose: int = 1,
    ) -> None:
        owner = "ModelCheckpoint"
        self.save_freq = whole(owner, "save_freq", save_freq, 1)
        self.save_dir = None if save_dir is None else os.fspath(save_dir)
        if self.save_dir == "":
            raise ValueError(f"{owner}: save_dir=''; accepted: a folder, or None for the save_dir of fit")
        self.save_best_only = flag(owner, "save_best_only", save_best_only)
        self.max_to_keep = None if max_to_keep is None else whole(owner, "max_to_keep", max_to_keep, 1)
        self.every_n_steps = None if every_n_steps is None else whole(owner, "every_n_steps", every_n_steps, 1)
        self.verbose = verbosity(owner, verbose)
        if monitor is None and mode != "auto":
            raise ValueError(f"{owner}: mode={mode!r} without monitor; give monitor='eval_loss' or the like")
        if monitor is None and self.save_best_only:
            raise ValueError(f"{owner}: save_best_only=True needs monitor='eval_loss' or the like")
        if self.save_best_only and (self.every_n_steps or self.max_to_keep):
            raise ValueError(f"{owner}: save_best_only=True excludes every_n_steps and max_to_keep")
        self._monitor = None if monitor is None else Monitor(monitor, mode, owner=owner)
        self._dir = ""
        self._kept: list[str] = []  # names within the folder, oldest first
        self._pending: set[str] = set()
        self._last_step = 0
        self._failed = False
        self._resumed = False

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Find the folder. Files of an earlier ``fit`` in the same folder stay this callback's own."""
        folder = self.save_dir if self.save_dir is not None else self.params.get("save_dir")
        if not folder:
            raise ValueError(
                "ModelCheckpoint: nowhere to save; give ModelCheckpoint(save_dir=...) or fit(save_dir=...)"
            )
        folder = os.path.abspath(folder)
        if not self._resumed:
            if folder != self._dir:
                self._kept = []
            if self._monitor is not None:
                self._monitor.reset()
        self._dir = folder
        self._last_step = self.run.progress.global_step
        self._pending.clear()
        self._failed = self._resumed = False

    def on_train_batch_end(self, step: int, logs: Logs | None = None) -> None:
        """Save when the global step passed a multiple of ``every_n_steps``."""
        every, now = self.every_n_steps, self.run.progress.global_step
        if every is None or now // every == self._last_step // every:
            return
        # The engine saves on all ranks at log points only, which are known by their learning rate.
        if self.run.env.world == 1 or "lr" in (logs or {}):
            self._last_step = now
            self._save_periodic(f"step-{now}")

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Save the epoch, and the best."""
        logs = logs or {}
        if not self.save_best_only and (epoch + 1) % self.save_freq == 0:
            self._save_periodic(str(epoch + 1))
        if self._monitor is not None:
            evaluates = self.params.get("evaluates", any(name.startswith(PREFIX) for name in logs))
            value = self._monitor.in_epoch(logs, evaluates)
            if value is not None and self._monitor.improved(value):
                self._save("best")

    def on_exception(self, exception: BaseException) -> None:
        """A run that failed has no final checkpoint."""
        self._failed = True

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Save the final weights."""
        if not self.save_best_only and not self._failed:
            self._save("final")

    def on_save(self, path: str, logs: Logs | None = None) -> None:
        """Say that a file is written."""
        if path in self._pending:
            self._pending.discard(path)
            if self.verbose and self.params.get("verbose") != 0:
                say(f"save checkpoint at {path}")

    def _save_periodic(self, name: str) -> None:
        # A later fit writes "1" again: the file is then the newest, not one to remove.
        self._kept = [old for old in self._kept if old != name] + [name]
        surplus = 0 if self.max_to_keep is None else max(0, len(self._kept) - self.max_to_keep)
        outdated, self._kept = self._kept[:surplus], self._kept[surplus:]
        self._save(name, outdated)

    def _save(self, name: str, outdated: list[str] | None = None) -> None:
        path = os.path.join(self._dir, name)
        self._pending.add(path)
        self.run.control.request_save(path, tuple(os.path.join(self._dir, old) for old in outdated or ()))

    def state_dict(self) -> dict[str, Any]:
        """The files that are kept, and the best value."""
        best = {} if self._monitor is None else self._monitor.state_dict()
        return {"kept": list(self._kept), **best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave."""
        self._kept = list(state_dict["kept"])
        if self._monitor is not None and "best" in state_dict:
            self._monitor.load_state_dict(state_dict)
        self._resumed = True
