"""When the learning-rate scheduler steps."""

from __future__ import annotations

from typing import Literal

from hapi.callbacks.base import Callback
from hapi.callbacks.checks import flag

__all__ = ["LRScheduler"]


class LRScheduler(Callback):
    """Declare when the scheduler that ``prepare`` was given steps.

    The callback does nothing itself: the engine steps the scheduler on every rank, once per optimizer step
    (not per micro-batch, not for a step that mixed precision skipped) or once per epoch, at its end.

    Args:
        by_step: Once per optimizer step.
        by_epoch: Once per epoch. With both False the scheduler is left to you.

    Attributes:
        interval: ``"step"``, ``"epoch"`` or None.

    Raises:
        ValueError: Both are True. For steps by epoch: ``LRScheduler(by_step=False, by_epoch=True)``.

    Example:
        >>> model.prepare(optimizer, loss, scheduler=StepLR(optimizer, 10))
        >>> model.fit(train, epochs=30, callbacks=LRScheduler(by_step=False, by_epoch=True))
    """

    def __init__(self, by_step: bool = True, by_epoch: bool = False) -> None:
        self.by_step = flag("LRScheduler", "by_step", by_step)
        self.by_epoch = flag("LRScheduler", "by_epoch", by_epoch)
        if by_step and by_epoch:
            raise ValueError(
                "LRScheduler: by_step=True and by_epoch=True; accepted: one of them, "
                "as in LRScheduler(by_step=False, by_epoch=True)"
            )

    @property
    def interval(self) -> Literal["step", "epoch"] | None:
        """When the scheduler steps."""
        if self.by_step:
            return "step"
        return "epoch" if self.by_epoch else None
