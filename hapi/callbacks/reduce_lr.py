"""Lower the learning rate when the evaluation no longer improves."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hapi.callbacks.base import Callback
from hapi.callbacks.checks import number, verbosity, whole
from hapi.callbacks.console import say
from hapi.callbacks.monitor import Monitor
from hapi.engine.state import Logs

__all__ = ["ReduceLROnPlateau"]


class ReduceLROnPlateau(Callback):
    """Multiply the learning rate by ``factor`` when a value of ``fit``'s evaluations has stopped improving.

    All parameter groups are changed. A run that has a learning-rate scheduler is refused: the two would
    overwrite each other (``torch.optim.lr_scheduler.ReduceLROnPlateau`` can be that scheduler).

    Args:
        monitor: A value of the evaluation: ``"loss"`` or ``"eval_loss"``, ``"acc"`` or ``"eval_acc"``.
        factor: From 0 (not included) to 1 (not included).
        patience: Evaluations without improvement before a reduction.
        verbose: 0 prints nothing; else a line per reduction, unless ``fit``'s ``verbose`` is 0.
        mode: ``"min"``, ``"max"`` or ``"auto"`` (by the name of the value).
        min_delta: An improvement is better than the best by more than this.
        cooldown: Evaluations after a reduction that do not count, the first of which resets the count.
        min_lr: No learning rate goes below this.

    Raises:
        ValueError: An argument out of range; at the start of ``fit``: the run has a scheduler.

    Example:
        >>> model.fit(train, val, epochs=50, callbacks=ReduceLROnPlateau("loss", factor=0.5, patience=3))
    """

    def __init__(
        self,
        monitor: str = "loss",
        factor: float = 0.1,
        patience: int = 10,
        verbose: int = 1,
        mode: str = "auto",
        min_delta: float = 1e-4,
        cooldown: int = 0,
        min_lr: float = 0,
    ) -> None:
        owner = "ReduceLROnPlateau"
        self.factor = number(owner, "factor", factor)
        if not 0 < self.factor < 1:
            raise ValueError(f"{owner}: factor={factor!r}; accepted: a number between 0 and 1")
        self.patience = whole(owner, "patience", patience, 0)
        self.verbose = verbosity(owner, verbose)
        self.cooldown = whole(owner, "cooldown", cooldown, 0)
        self.min_lr = number(owner, "min_lr", min_lr, 0)
        self._monitor = Monitor(monitor, mode, min_delta, owner=owner)
        self._wait = 0
        self._cooling = 0
        self._training = False
        self._resumed = False
        self._failed = False

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Refuse a run with a scheduler; forget earlier runs, unless this one resumes a checkpoint."""
        if self.run.scheduler is not None:
            raise ValueError(
                f"ReduceLROnPlateau: the run has the scheduler {type(self.run.scheduler).__name__}, "
                "which sets the learning rate too; remove one of them, or give prepare a "
                "torch.optim.lr_scheduler.ReduceLROnPlateau as scheduler"
            )
        if not self._resumed:
            self._monitor.reset()
            self._wait = self._cooling = 0
        self._resumed = self._failed = False
        self._training = True

    def on_eval_end(self, logs: Logs | None = None) -> None:
        """Count the evaluation; reduce when patience is at its end."""
        if not self._training or self._failed:
            return
        value = self._monitor.in_evaluation(logs or {})
        if value is None:
            return
        if self._cooling:
            self._cooling -= 1
            self._wait = 0
        if self._monitor.improved(value):
            self._wait = 0
        elif not self._cooling:
            self._wait += 1
            if self._wait >= self.patience and self._reduce():
                self._cooling = self.cooldown
                self._wait = 0

    def on_exception(self, exception: BaseException) -> None:
        """Nothing is decided after a failure."""
        self._failed = True

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Evaluations outside of ``fit`` do not count."""
        self._training = False

    def _reduce(self) -> bool:
        """Lower every group's learning rate that is above ``min_lr``; return whether there was one."""
        reduced = []
        for group in self.run.optimizer.param_groups if self.run.optimizer else ():
            old = float(group["lr"])
            if old <= self.min_lr:
                continue
            new = max(old * self.factor, self.min_lr)
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(new)  # a captured step reads this very tensor
            else:
                group["lr"] = new
            reduced.append(new)
        if reduced and self.verbose and self.params.get("verbose") != 0:
            progress = self.run.progress
            rates = ", ".join(f"{rate:.6g}" for rate in dict.fromkeys(reduced))
            epoch = progress.epoch - progress.first_epoch + 1
            say(f"Epoch {epoch}: ReduceLROnPlateau reducing learning rate to {rates}.")
        return bool(reduced)

    def state_dict(self) -> dict[str, Any]:
        """The best value and the counters. The learning rates are in the optimizer's own state."""
        return {**self._monitor.state_dict(), "wait": self._wait, "cooling": self._cooling}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave."""
        self._monitor.load_state_dict(state_dict)
        self._wait = int(state_dict["wait"])
        self._cooling = int(state_dict["cooling"])
        self._resumed = True
