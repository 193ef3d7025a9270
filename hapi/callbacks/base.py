"""The callback contract.

A callback runs on rank 0 only and gets numbers that are already global. It *asks* for things
(``self.run.control.request_stop(...)``, ``request_save(...)``); the engine does them on every rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from hapi.engine.state import Logs

if TYPE_CHECKING:
    from hapi.engine.state import Run

__all__ = ["Callback"]


class Callback:
    """Base class of all callbacks: override the hooks you need.

    ``logs`` is one mutable dict per hook round: what an earlier callback adds is seen by later ones and by
    the progress printer. Every hook's logs hold ``step`` (batches finished in this epoch) and ``batch_size``
    (rows over all ranks) after a batch; ``loss`` and the metrics are there at *log points* only (every
    ``log_freq`` batches and at the last batch), because reading them makes the host wait for the device.

    Attributes:
        model: The :class:`hapi.Model`, set before the first hook.
        params: ``{"epochs", "steps", "batch_size", "verbose", "metrics", "log_freq", "save_dir"}``.
        run: The :class:`hapi.engine.state.Run` in progress: ``run.progress``, ``run.control``, ``run.optimizer``.
        all_ranks: Set to True in a subclass that must run on every rank.
        log_freq: Set to an int in a subclass that needs ``loss`` and metrics every so many batches.

    Example:
        >>> class PrintEpoch(Callback):
        ...     def on_epoch_end(self, epoch, logs=None):
        ...         print(epoch, logs["loss"])
    """

    all_ranks: ClassVar[bool] = False
    log_freq: int | None = None

    # Subclasses in the reference's style skip super().__init__(), hence class-level defaults.
    model: Any = None
    params: dict[str, Any] = {}  # noqa: RUF012  # replaced, never mutated, by set_params
    run: Run

    def set_model(self, model: Any) -> None:
        """Called by ``fit``, ``evaluate`` and ``predict`` before the first hook."""
        self.model = model

    def set_params(self, params: dict[str, Any]) -> None:
        """Called by ``fit``, ``evaluate`` and ``predict`` before the first hook."""
        self.params = params

    def set_run(self, run: Run) -> None:
        """Called by ``fit``, ``evaluate`` and ``predict`` before the first hook."""
        self.run = run

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint should hold of this callback: tensors and plain containers."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave. Called before ``on_train_begin`` of a resumed run."""

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Before the first epoch of ``fit``."""

    def on_train_end(self, logs: Logs | None = None) -> None:
        """After the last epoch of ``fit``, also when training failed (then after ``on_exception``)."""

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Before an epoch; ``epoch`` counts from 0 in this ``fit``."""

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """After an epoch and its evaluation: training means, ``eval_*`` values and ``lr``."""

    def on_train_batch_begin(self, step: int, logs: Logs | None = None) -> None:
        """Before a training batch; ``step`` counts batches of the epoch from 0."""

    def on_train_batch_end(self, step: int, logs: Logs | None = None) -> None:
        """After a training batch. The learning rate is still the one of this batch."""

    def on_before_optimizer_step(self, step: int, logs: Logs | None = None) -> None:
        """Before an optimizer step: gradients are complete (over micro-batches and ranks), unscaled, not yet clipped.

        ``self.run.gradients()`` gives them by name. ``step`` is that of the batch, from 0.
        """

    def on_eval_begin(self, logs: Logs | None = None) -> None:
        """Before an evaluation; logs: ``{"steps", "metrics"}`` (steps is None where unknown)."""

    def on_eval_end(self, logs: Logs | None = None) -> None:
        """After an evaluation; logs hold ``loss``, the metrics (no prefix) and ``samples``."""

    def on_eval_batch_begin(self, step: int, logs: Logs | None = None) -> None:
        """Before an evaluation batch."""

    def on_eval_batch_end(self, step: int, logs: Logs | None = None) -> None:
        """After an evaluation batch."""

    def on_predict_begin(self, logs: Logs | None = None) -> None:
        """Before a prediction; logs: ``{"steps"}``."""

    def on_predict_end(self, logs: Logs | None = None) -> None:
        """After a prediction; logs: ``{"samples"}``."""

    def on_predict_batch_begin(self, step: int, logs: Logs | None = None) -> None:
        """Before a prediction batch."""

    def on_predict_batch_end(self, step: int, logs: Logs | None = None) -> None:
        """After a prediction batch; ``logs["outputs"]`` is the list of this batch's numpy outputs."""

    def on_save(self, path: str, logs: Logs | None = None) -> None:
        """After a checkpoint that a callback asked for is whole on disk at prefix ``path`` (absolute)."""

    def on_exception(self, exception: BaseException) -> None:
        """When ``fit``, ``evaluate`` or ``predict`` fails, before the end hook; the error goes on afterwards."""
