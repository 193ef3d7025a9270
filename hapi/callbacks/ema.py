"""An exponential moving average of the weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from hapi.callbacks.averaging import _WeightAverage
from hapi.callbacks.checks import flag, number, whole
from hapi.engine.state import Logs

__all__ = ["EMA"]


class EMA(_WeightAverage):
    """Keeps ``average = decay * average + (1 - decay) * weights``, updated after optimizer steps.

    The average begins with the weights after the first step. Running statistics of BatchNorm and other buffers are
    averaged like the weights; integer ones are copied. Training itself is not changed by it.

    Args:
        decay: Between 0 and 1: the share of the old average. 0.999 looks back over about 1,000 updates.
        update_every: Optimizer steps between updates.
        warmup: Begin with a short memory: the ``n``-th update has ``min(decay, (1 + n) / (10 + n))``.
        evaluate: Evaluations within ``fit`` see the average, and so do callbacks that follow their results.
        save: The ``.pt`` files of checkpoints hold the average, for ``load`` and for use elsewhere. The weights that
            are trained lie in ``.state.pt``, from where ``fit(resume=...)`` goes on. False: the other way round.
        apply: After ``fit``, the network holds the average (what ``evaluate``, ``predict`` and ``save`` then use).

    Raises:
        TypeError, ValueError: An argument of the wrong type or value; weights that are not float32 or float64.

    Example:
        >>> model.fit(train, val, epochs=10, callbacks=EMA(0.999))

    Source: Polyak and Juditsky, Acceleration of Stochastic Approximation by Averaging (1992); the warm-up is that of
    TensorFlow's ExponentialMovingAverage.
    """

    def __init__(
        self,
        decay: float = 0.999,
        *,
        update_every: int = 1,
        warmup: bool = False,
        evaluate: bool = True,
        save: bool = True,
        apply: bool = True,
    ) -> None:
        super().__init__(evaluate, save, apply, refresh=False)
        self.decay = number("EMA", "decay", decay, 0)
        if self.decay >= 1:
            raise ValueError(f"EMA: decay={decay!r}; accepted: a number from 0 to below 1")
        self.update_every = whole("EMA", "update_every", update_every, 1)
        self.warmup = flag("EMA", "warmup", warmup)
        self._step = 0

    def _new_average(self, network: nn.Module) -> AveragedModel:
        return AveragedModel(network, use_buffers=True)

    @torch.no_grad()
    def _add(self) -> None:
        """As ``AveragedModel.update_parameters``, which takes a counter to the device and waits for it."""
        assert self._average is not None
        done = int(self._average.n_averaged)  # on the host
        decay = min(self.decay, (1 + done) / (10 + done)) if self.warmup else self.decay
        averages, weights = self._mixed
        if averages and done:
            torch._foreach_lerp_(averages, weights, 1 - decay)
        elif averages:
            torch._foreach_copy_(averages, weights)
        for copy, value in self._copied:
            copy.copy_(value)
        self._average.n_averaged += 1
        self._show()

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Begin, or go on."""
        super().on_train_begin(logs)
        assert self._average is not None
        pairs = list(zip(_tensors(self._average.module), _tensors(self.run.network), strict=True))
        mixed = [pair for pair in pairs if pair[0].is_floating_point() or pair[0].is_complex()]
        self._mixed: tuple[list[Tensor], list[Tensor]] = ([a for a, _ in mixed], [w for _, w in mixed])
        self._copied = [pair for pair in pairs if not (pair[0].is_floating_point() or pair[0].is_complex())]
        self._step = self.run.progress.global_step

    def on_train_batch_end(self, step: int, logs: Logs | None = None) -> None:
        """Add the weights, if an optimizer step was done."""
        now = self.run.progress.global_step
        if now != self._step:
            self._step = now
            if now % self.update_every == 0:
                self._add()

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Let go of the network."""
        self._mixed, self._copied = ([], []), []


def _tensors(network: nn.Module) -> list[Tensor]:
    return [*network.parameters(), *network.buffers()]
