"""Stop when the loss is no longer a number."""

from __future__ import annotations

import math
import warnings

from hapi.callbacks.base import Callback
from hapi.callbacks.checks import whole
from hapi.engine.state import Logs

__all__ = ["TerminateOnNaN"]


class TerminateOnNaN(Callback):
    """Stop training when the training loss is NaN or infinite, with a warning that says where.

    The loss in the logs is the mean since the epoch began, so one bad batch is seen at the next log point at
    the latest.

    Args:
        check_every: Batches between checks, each of which makes the host wait for the device. Default: the
            log points of ``fit`` (its ``log_freq``).

    Raises:
        ValueError: ``check_every`` is below 1.

    Example:
        >>> model.fit(train, callbacks=TerminateOnNaN())
    """

    def __init__(self, check_every: int | None = None) -> None:
        self.log_freq = None if check_every is None else whole("TerminateOnNaN", "check_every", check_every, 1)
        self._stopped = False

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Forget earlier runs."""
        self._stopped = False

    def on_train_batch_end(self, step: int, logs: Logs | None = None) -> None:
        """Check at log points."""
        self._check(logs or {})

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Check what came after the last log point, where the epoch's length was not known."""
        self._check(logs or {})

    def _check(self, logs: Logs) -> None:
        loss = logs.get("loss")
        if loss is None or math.isfinite(loss) or self._stopped:
            return
        self._stopped = True
        progress = self.run.progress
        where = f"epoch {progress.epoch - progress.first_epoch + 1}, batch {progress.batch_in_epoch}"
        self.run.control.request_stop(f"TerminateOnNaN: the loss is {loss} in {where}")
        warnings.warn(
            f"TerminateOnNaN: the training loss is {loss} in {where} (global step {progress.global_step}); "
            "training stops",
            RuntimeWarning,
        )
