"""The value that EarlyStopping, ModelCheckpoint and ReduceLROnPlateau follow: which, and what is better."""

from __future__ import annotations

import math
import numbers
import re
import warnings
from typing import Any

import numpy as np
from torch import Tensor

from hapi.callbacks.checks import number
from hapi.engine.state import Logs
from hapi.errors import suggest

__all__ = ["Monitor"]

PREFIX = "eval_"
_NOT_VALUES = ("step", "batch_size", "samples", "lr")
# Looked for anywhere in the name; the short ones only as a word of it, since "map" is in "mape".
_HIGHER_IS_BETTER = ("acc", "auc", "auroc", "precision", "recall", "jaccard", "f1score")
_HIGHER_IS_BETTER_WORDS = ("f1", "fbeta", "r2", "iou", "miou", "map", "dice", "bleu", "psnr", "ssim")


class Monitor:
    """Follows one value and keeps its best.

    Args:
        monitor: The name of the value: as in an evaluation's logs (``"loss"``, ``"acc"``) or with the prefix
            that it gets in an epoch's logs (``"eval_loss"``); both mean the same there.
        mode: ``"min"``, ``"max"``, or ``"auto"``: max for accuracy, AUC, precision, recall, F1, R2, IoU and
            the like, min for everything else.
        min_delta: An improvement is better than the best by more than this; in the value's own unit.
        owner: The callback, for messages.
        start: The value to beat first; by default anything but NaN is better.

    Raises:
        ValueError: Unknown mode, empty name, or a negative ``min_delta``.
        TypeError: ``monitor`` is not a string.
    """

    def __init__(
        self,
        monitor: str,
        mode: str = "auto",
        min_delta: float = 0.0,
        *,
        owner: str,
        start: float | None = None,
    ) -> None:
        if not isinstance(monitor, str):
            raise TypeError(f"{owner}: monitor={monitor!r}; accepted: the name of a value in the logs")
        if not monitor.removeprefix(PREFIX):
            raise ValueError(f"{owner}: monitor={monitor!r}; accepted: the name of a value in the logs")
        if mode not in ("auto", "min", "max"):
            raise ValueError(f"{owner}: mode={mode!r}; accepted: 'auto', 'min', 'max'")
        self.given = monitor
        self.name = monitor.removeprefix(PREFIX)
        self.mode = mode if mode != "auto" else _better(self.name)
        self.min_delta = number(owner, "min_delta", min_delta, 0)
        self.owner = owner
        self._start = start
        self._warned = False
        self.reset()

    def reset(self) -> None:
        """Forget the best value."""
        worst = math.inf if self.mode == "min" else -math.inf
        self.best = worst if self._start is None else self._start
        self._warned = False

    def in_evaluation(self, logs: Logs) -> float | None:
        """The value in an evaluation's logs; None, and a warning once, where it is missing."""
        return self._find(logs, (self.name, self.given))

    def in_epoch(self, logs: Logs, evaluates: bool) -> float | None:
        """The value in an epoch's logs; None, and a warning once, where it is missing.

        Where the run has evaluation data, the evaluation's value is meant, with or without the prefix, and an
        epoch without evaluation has none: training and evaluation values are never mixed.
        """
        if not evaluates:
            return self._find(logs, (self.given,))
        if not any(name.startswith(PREFIX) for name in logs):
            return None
        return self._find(logs, (PREFIX + self.name, self.given))

    def improved(self, value: float) -> bool:
        """Whether ``value`` beats the best, which it then becomes. NaN never does."""
        gain = self.best - value if self.mode == "min" else value - self.best
        better = gain > self.min_delta
        if better:
            self.best = value
        return better

    def state_dict(self) -> dict[str, Any]:
        """The best value."""
        return {"best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave."""
        self.best = float(state_dict["best"])

    def _find(self, logs: Logs, names: tuple[str, ...]) -> float | None:
        for name in names:
            if name in logs:
                return self._number(name, logs[name])
        if not self._warned:
            self._warned = True
            available = [name for name in logs if name not in _NOT_VALUES]
            warnings.warn(
                f"{self.owner}: monitor={self.given!r} is not in the logs{suggest(self.given, available)}; "
                f"available: {', '.join(available) or 'nothing'}. Nothing is done until it is there.",
                UserWarning,
            )
        return None

    def _number(self, name: str, value: Any) -> float:
        is_scalar_array = isinstance(value, (np.ndarray, Tensor)) and value.ndim == 0
        if not is_scalar_array and (isinstance(value, bool) or not isinstance(value, numbers.Real)):
            raise TypeError(
                f"{self.owner}: monitor={self.given!r} needs one number per evaluation, "
                f"but logs[{name!r}] is a {type(value).__name__}"
            )
        return float(value)


def _better(name: str) -> str:
    """The mode that a value's name implies."""
    low = name.lower()
    words = re.split(r"[^a-z0-9]+", low)
    if "loss" in low or "error" in low:
        return "min"
    if any(part in low for part in _HIGHER_IS_BETTER) or any(w in _HIGHER_IS_BETTER_WORDS for w in words):
        return "max"
    return "min"
