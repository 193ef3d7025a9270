"""Stop when the evaluation no longer improves."""

from __future__ import annotations

import os
import warnings
from typing import Any

from hapi.callbacks.base import Callback
from hapi.callbacks.checks import flag, number, verbosity, whole
from hapi.callbacks.console import say
from hapi.callbacks.monitor import Monitor
from hapi.engine.state import Logs

__all__ = ["EarlyStopping"]


class EarlyStopping(Callback):
    """Stop ``fit`` when a value of its evaluations has stopped improving.

    Only the evaluations of ``fit`` count; a separate ``evaluate`` changes nothing.

    Args:
        monitor: A value of the evaluation: ``"loss"`` or ``"eval_loss"``, ``"acc"`` or ``"eval_acc"``.
        mode: ``"min"``, ``"max"`` or ``"auto"`` (by the name of the value).
        patience: Evaluations in a row without improvement that end training. 0 and 1 both end it at the first
            one that did not improve.
        verbose: 0 prints nothing; else ``Epoch N: Early stopping.``, unless ``fit``'s ``verbose`` is 0.
        min_delta: An improvement is better than the best by more than this.
        baseline: A value to beat first: evaluations that do not are without improvement.
        save_best_model: Where ``fit`` has a ``save_dir``, save each best to ``save_dir/best_model``.
        restore_best_weights: When training ends, early or not, put the weights of the best evaluation back.
            One copy of the weights is kept in host memory for this. List this callback before a
            ModelCheckpoint whose ``final`` file should hold the restored weights.

    Raises:
        ValueError: An argument out of range.
        TypeError: An argument of the wrong type, or a monitored value that is not one number.

    Example:
        >>> stop = EarlyStopping("acc", patience=3, restore_best_weights=True)
        >>> model.fit(train, val, epochs=100, callbacks=stop)
    """

    def __init__(
        self,
        monitor: str = "loss",
        mode: str = "auto",
        patience: int = 0,
        verbose: int = 1,
        min_delta: float = 0,
        baseline: float | None = None,
        save_best_model: bool = True,
        *,
        restore_best_weights: bool = False,
    ) -> None:
        owner = "EarlyStopping"
        self.patience = whole(owner, "patience", patience, 0)
        self.verbose = verbosity(owner, verbose)
        self.baseline = None if baseline is None else number(owner, "baseline", baseline)
        self.save_best_model = flag(owner, "save_best_model", save_best_model)
        self.restore_best_weights = flag(owner, "restore_best_weights", restore_best_weights)
        self._monitor = Monitor(monitor, mode, min_delta, owner=owner, start=self.baseline)
        self._training = False
        self._resumed = False
        self._failed = False
        self._begin()

    def _begin(self) -> None:
        self._monitor.reset()
        self._wait = 0
        self._best_epoch = 0  # from 1; 0 while there is none
        self._saved = False

    @property
    def best(self) -> float:
        """The best value so far; before the first one, the baseline or the infinity that is worst."""
        return self._monitor.best

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Forget earlier runs, unless this one resumes a checkpoint."""
        if not self._resumed:
            self._begin()
        self._resumed = self._failed = False
        self._training = True
        if self.params.get("evaluates") is False:
            warnings.warn(
                "EarlyStopping: fit has no evaluation data, so training is never stopped early; "
                "give fit(eval_data=...)",
                UserWarning,
            )

    def on_eval_end(self, logs: Logs | None = None) -> None:
        """Compare with the best."""
        if not self._training or self._failed:
            return
        value = self._monitor.in_evaluation(logs or {})
        if value is None:
            return
        progress, control = self.run.progress, self.run.control
        epoch = progress.epoch - progress.first_epoch + 1
        if self._monitor.improved(value):
            self._wait = 0
            self._best_epoch = epoch
            if self.restore_best_weights:
                control.request_keep_weights()
            if path := self._path():
                control.request_save(path)
                self._saved = True
            return
        self._wait += 1
        if self._wait >= self.patience:
            control.request_stop(f"EarlyStopping: {self._monitor.given} has not improved on {self.best:g}")
            if self.verbose and self.params.get("verbose") != 0:
                say(f"Epoch {epoch}: Early stopping.")
                if self._saved:
                    say(f"Best checkpoint has been saved at {self._path()}")

    def on_exception(self, exception: BaseException) -> None:
        """Leave the weights of a failed run as they are."""
        self._failed = True

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Restore the best weights."""
        self._training = False
        if not self.restore_best_weights or self._failed or not self._best_epoch:
            return
        if self.run.kept is not None:
            self.run.control.request_restore_weights()
        else:
            where = f"; they are in {self._path()}" if self._saved else ""
            warnings.warn(
                f"EarlyStopping: the best weights, of epoch {self._best_epoch}, were kept in the memory of "
                f"the process that this run resumes, and are not restored{where}",
                UserWarning,
            )

    def _path(self) -> str | None:
        folder = self.params.get("save_dir")
        return os.path.abspath(os.path.join(folder, "best_model")) if folder and self.save_best_model else None

    def state_dict(self) -> dict[str, Any]:
        """The best value, its epoch, and how long ago it was."""
        return {
            **self._monitor.state_dict(),
            "wait": self._wait,
            "best_epoch": self._best_epoch,
            "saved": self._saved,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave."""
        self._monitor.load_state_dict(state_dict)
        self._wait = int(state_dict["wait"])
        self._best_epoch = int(state_dict["best_epoch"])
        self._saved = bool(state_dict["saved"])
        self._resumed = True
