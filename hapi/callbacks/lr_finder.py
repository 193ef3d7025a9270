"""A learning rate from a short trial."""

from __future__ import annotations

import math
import os
import warnings
from typing import Any

import numpy as np

from hapi.callbacks.base import Callback
from hapi.callbacks.checks import flag, number, whole
from hapi.callbacks.console import say
from hapi.engine.state import Logs

__all__ = ["LearningRateFinder"]

_WIDTH = 0.03  # of the smoothing: a share of the steps
_LOOKS = 5  # steps whose median says whether the loss has diverged


class LearningRateFinder(Callback):
    """Before training, tries rising learning rates for some steps, and trains with the one it suggests.

    The trial does real steps, on all ranks; afterwards weights, optimizer, random numbers and counters are what they
    were. A run that goes on from a checkpoint is not tried again.

    Args:
        min_lr: The rate of the first step.
        max_lr: The rate of the last one.
        steps: How many.
        mode: ``"exponential"`` or ``"linear"``: how rates lie between.
        diverged: The trial ends when the loss (the median of 5 steps) is this many times its least; None: never.
        method: ``"steepest"``: the rate at which the loss falls fastest; ``"minimum"``: a tenth of the rate of its
            least value. Both look at the loss smoothed over its neighbours on both sides, so that it does not lag.
        update: Train with the suggestion. Parameter groups keep their ratios. False only measures.
        verbose: 1 prints the suggestion.

    Attributes:
        lrs: The rates that were tried (of the first parameter group).
        losses: The loss of each step, over all ranks.
        suggestion: The rate; None before, and where the losses show none.

    Raises:
        TypeError, ValueError: An argument of the wrong type or value; ``update`` in a run that has a scheduler; data
            that can be read only once.

    Example:
        >>> finder = LearningRateFinder(update=False)
        >>> model.fit(train, batch_size=64, epochs=1, callbacks=finder)
        >>> finder.plot("rates.png")
        >>> finder.suggestion
        0.0036

    Source: Smith, Cyclical Learning Rates for Training Neural Networks (2017), section 3.3.
    """

    all_ranks = True

    def __init__(
        self,
        min_lr: float = 1e-7,
        max_lr: float = 1.0,
        steps: int = 100,
        *,
        mode: str = "exponential",
        diverged: float | None = 4.0,
        method: str = "steepest",
        update: bool = True,
        verbose: int = 1,
    ) -> None:
        owner = "LearningRateFinder"
        self.min_lr, self.max_lr = number(owner, "min_lr", min_lr), number(owner, "max_lr", max_lr)
        if not 0 < self.min_lr < self.max_lr:
            raise ValueError(f"{owner}: min_lr={min_lr!r}, max_lr={max_lr!r}; accepted: 0 < min_lr < max_lr")
        self.steps = whole(owner, "steps", steps, 10)
        if mode not in ("exponential", "linear"):
            raise ValueError(f"{owner}: mode={mode!r}; accepted: 'exponential', 'linear'")
        if method not in ("steepest", "minimum"):
            raise ValueError(f"{owner}: method={method!r}; accepted: 'steepest', 'minimum'")
        self.mode, self.method = mode, method
        self.diverged = None if diverged is None else number(owner, "diverged", diverged, 1)
        self.update = flag(owner, "update", update)
        self.verbose = whole(owner, "verbose", verbose, 0)
        self.lrs: list[float] = []
        self.losses: list[float] = []
        self.suggestion: float | None = None
        self._resumed = False

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Try, and set the rate."""
        run = self.run
        if self._resumed:
            self._resumed = False
            return
        if self.update and run.scheduler is not None:
            raise ValueError(
                f"LearningRateFinder: update=True in a run with the scheduler {type(run.scheduler).__name__}, which "
                "sets the rate itself; give update=False and build the scheduler with .suggestion"
            )
        self._try()
        self.suggestion = self._suggest()
        if self.suggestion is None:
            warnings.warn(
                f"LearningRateFinder: the loss falls at none of the rates from {self.lrs[0]:.3g} to "
                f"{self.lrs[-1]:.3g}; the rate is left as it is",
                UserWarning,
            )
        elif self.update:
            self._set(self.suggestion)
        if self.verbose and self.suggestion is not None and run.env.rank == 0:
            say(f"LearningRateFinder: {self.suggestion:.3g}" + (" is used" if self.update else ""))

    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Draw the loss over the rate.

        Args:
            path: Where to save the picture; the suffix says which kind.

        Returns:
            The :class:`matplotlib.figure.Figure`.

        Raises:
            ImportError: matplotlib is missing.
            RuntimeError: Nothing has been tried yet.
        """
        if not self.lrs:
            raise RuntimeError("LearningRateFinder.plot: nothing has been tried yet; give the callback to fit first")
        try:
            from matplotlib.figure import Figure
        except ImportError as exc:
            raise ImportError("LearningRateFinder.plot needs matplotlib: pip install matplotlib") from exc
        figure = Figure(figsize=(7, 4.2), dpi=120, layout="constrained")
        axes = figure.add_subplot()
        smooth = self._smoothed()
        axes.plot(self.lrs, self.losses, color="#bbbbbb", linewidth=1, label="loss")
        axes.plot(self.lrs[: len(smooth)], smooth, color="#0072b2", linewidth=2, label="smoothed")
        if self.suggestion is not None:
            height = float(np.interp(self.suggestion, self.lrs[: len(smooth)], smooth))
            axes.plot([self.suggestion], [height], "o", color="#d55e00", label=f"suggestion {self.suggestion:.3g}")
        if smooth:
            low, high = min([*smooth, *self.losses]), max(smooth[: len(smooth) // 2])
            axes.set_ylim(low - 0.1 * (high - low), high + 0.5 * (high - low))  # not to where it diverged
        axes.set_xscale("log" if self.mode == "exponential" else "linear")
        axes.set_xlabel("learning rate")
        axes.set_ylabel("loss")
        axes.grid(alpha=0.3)
        axes.legend()
        if path is not None:
            figure.savefig(path)
        return figure

    def state_dict(self) -> dict[str, Any]:
        """What was found."""
        return {"lrs": list(self.lrs), "losses": list(self.losses), "suggestion": self.suggestion}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave; the fit that is resumed has the rate already."""
        self.lrs, self.losses = list(state_dict["lrs"]), list(state_dict["losses"])
        self.suggestion = state_dict["suggestion"]
        self._resumed = True

    def _try(self) -> None:
        assert self.run.trials is not None and self.run.optimizer is not None
        self.lrs, self.losses = [], []
        share = np.linspace(0, 1, self.steps)
        if self.mode == "linear":
            rates = self.min_lr + share * (self.max_lr - self.min_lr)
        else:
            rates = self.min_lr * (self.max_lr / self.min_lr) ** share
        least = math.inf
        for index, loss in enumerate(self.run.trials.losses(self.steps, lambda index: self._set(float(rates[index])))):
            self.lrs.append(float(rates[index]))
            self.losses.append(loss)
            middle = float(np.median(self.losses[-_LOOKS:]))
            least = min(least, middle)
            # Every rank has the same loss, so every rank ends here.
            if not math.isfinite(loss) or (self.diverged is not None and index > 10 and middle > self.diverged * least):
                break

    def _set(self, rate: float) -> None:
        """Of the first group; the others keep their ratios to it."""
        groups = self.run.optimizer.param_groups if self.run.optimizer else []
        first = float(groups[0]["lr"])
        for group in groups:
            ratio = float(group["lr"]) / first if first else 1.0
            group["lr"] = rate * ratio

    def _smoothed(self) -> list[float]:
        """Means over neighbours on both sides, weighted by a bell whose width is a share of all steps."""
        losses = np.array([loss for loss in self.losses if math.isfinite(loss)])
        places = np.arange(len(losses))
        # What has diverged must not reach back to where the loss still fell.
        losses = np.minimum(losses, 2 * losses[:_LOOKS].max(initial=0.0))
        weights = np.exp(-0.5 * ((places[:, None] - places) / max(1.0, _WIDTH * self.steps)) ** 2)
        return [float(value) for value in (weights * losses).sum(1) / weights.sum(1)]

    def _suggest(self) -> float | None:
        """Without the last steps, which may have diverged."""
        smooth = np.array(self._smoothed())
        inner = smooth[: max(0, len(smooth) - _LOOKS)]
        if len(inner) < 3 or np.ptp(inner) <= 1e-6 * np.abs(inner).max():  # rounding is no slope
            return None
        rates = np.array(self.lrs[: len(inner)])
        if self.method == "minimum":
            return float(rates[int(inner.argmin())]) / 10
        slope = np.gradient(inner, np.log(rates) if self.mode == "exponential" else rates)
        steepest = int(slope.argmin())
        return float(rates[steepest]) if slope[steepest] < 0 else None
