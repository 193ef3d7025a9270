"""Stochastic weight averaging."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel

from hapi.callbacks.averaging import _WeightAverage
from hapi.callbacks.checks import flag, number, whole
from hapi.engine.state import Logs

__all__ = ["SWA"]


class SWA(_WeightAverage):
    """Averages the weights at the end of each epoch, from a given epoch on, with equal weights.

    Args:
        start: The first epoch (from 0, in this ``fit``) whose weights are averaged; a float is a share of ``epochs``.
        lr: The constant learning rate from ``start`` on. Default: the rate is left as it is.
        anneal_epochs: Epochs over which the rate goes from what it was to ``lr``.
        anneal: ``"cos"`` or ``"linear"``.
        update_batchnorm: BatchNorm's running statistics are computed anew for the average, by a pass over the training
            data without gradients, before it is evaluated and at the end. Has no effect on a net without BatchNorm.
        evaluate: Evaluations from ``start`` on see the average.
        save: The ``.pt`` files of checkpoints from ``start`` on hold the average; the weights that are trained lie in
            ``.state.pt``.
        apply: After ``fit``, the network holds the average.

    Raises:
        TypeError, ValueError: An argument of the wrong type or value; ``lr`` in a run that has a scheduler; a share in
            a ``fit`` without ``epochs``.

    Example:
        >>> model.fit(train, val, epochs=20, callbacks=SWA(start=0.75, lr=0.01))

    Source: Izmailov et al., Averaging Weights Leads to Wider Optima and Better Generalization (2018).
    """

    def __init__(
        self,
        start: int | float = 0.75,
        lr: float | None = None,
        *,
        anneal_epochs: int = 10,
        anneal: str = "cos",
        update_batchnorm: bool = True,
        evaluate: bool = True,
        save: bool = True,
        apply: bool = True,
    ) -> None:
        super().__init__(evaluate, save, apply, refresh=flag("SWA", "update_batchnorm", update_batchnorm))
        self.start = start if isinstance(start, int) else number("SWA", "start", start, 0)
        if isinstance(self.start, int):
            self.start = whole("SWA", "start", start, 0)
        elif self.start >= 1:
            raise ValueError(f"SWA: start={start!r}; accepted: an epoch (int), or a share of the epochs below 1.0")
        self.lr = None if lr is None else number("SWA", "lr", lr, 0)
        self.anneal_epochs = whole("SWA", "anneal_epochs", anneal_epochs, 0)
        if anneal not in ("cos", "linear"):
            raise ValueError(f"SWA: anneal={anneal!r}; accepted: 'cos', 'linear'")
        self.anneal = anneal
        self._epoch = 0
        self._scheduler: SWALR | None = None
        self._saved_scheduler: dict[str, Any] | None = None

    def _new_average(self, network: nn.Module) -> AveragedModel:
        return AveragedModel(network)

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Find the first epoch."""
        if self.lr is not None and self.run.scheduler is not None:
            raise ValueError(f"SWA: lr={self.lr:g} in a run with the scheduler {type(self.run.scheduler).__name__}")
        epochs = self.params["epochs"]
        if isinstance(self.start, float) and epochs is None:
            raise ValueError(f"SWA: start={self.start} is a share of the epochs, but the fit does not say how many")
        self._first = self.start if isinstance(self.start, int) else int(self.start * epochs)
        self._scheduler = None
        super().on_train_begin(logs)
        if self._saved_scheduler is not None:
            rates = [group["lr"] for group in self._groups()]
            self._anneal().load_state_dict(self._saved_scheduler)
            for group, rate in zip(self._groups(), rates, strict=True):
                group["lr"] = rate  # building a scheduler sets a rate; that of the checkpoint counts
            self._saved_scheduler = None

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Set the learning rate."""
        self._epoch = epoch
        resumed = self.run.progress.batch_in_epoch > 0
        if self.lr is not None and epoch >= self._first and not resumed:
            if self._scheduler is None:
                self._anneal()
            else:
                self._scheduler.step()

    def end_epoch(self) -> None:
        """Add the epoch's weights."""
        if self._epoch >= self._first:
            self._add()

    def on_train_end(self, logs: Logs | None = None) -> None:
        """The next ``fit`` anneals anew."""
        self._scheduler = None

    def state_dict(self) -> dict[str, Any]:
        """The average, and where the learning rate is."""
        scheduler = self._saved_scheduler
        if self._scheduler is not None:
            hidden = ("anneal_func", "optimizer")
            scheduler = {k: v for k, v in self._scheduler.state_dict().items() if k not in hidden}
        return {**super().state_dict(), "scheduler": scheduler}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave."""
        super().load_state_dict(state_dict)
        self._saved_scheduler = state_dict["scheduler"]

    def __getstate__(self) -> dict[str, Any]:
        """Without the scheduler, which belongs to a run."""
        return super().__getstate__() | {"_scheduler": None}

    def _groups(self) -> list[dict[str, Any]]:
        return self.run.optimizer.param_groups if self.run.optimizer else []

    def _anneal(self) -> SWALR:
        assert self.run.optimizer is not None and self.lr is not None
        anneal: Any = self.anneal
        self._scheduler = SWALR(self.run.optimizer, self.lr, self.anneal_epochs, anneal)
        return self._scheduler
