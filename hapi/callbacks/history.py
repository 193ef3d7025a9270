"""The values of every epoch, as ``fit`` returns them."""

from __future__ import annotations

import numbers
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hapi.callbacks._plot import EVALUATION, Line, draw
from hapi.callbacks.base import Callback
from hapi.engine.state import Logs
from hapi.errors import suggest

__all__ = ["History"]


class History(Callback):
    """What each epoch's logs held: training means, ``eval_*`` values and ``lr``.

    ``fit`` adds one and returns it. A ``fit`` begins with empty lists, except when it resumes a checkpoint.

    Attributes:
        history: Name -> values in order of epochs. Floats; numpy arrays where a metric's result is one.
        epochs: Name -> the epoch of each value, from 1. Evaluation values have gaps where ``eval_freq`` > 1.
        epoch: The epochs that ended, from 1.

    Example:
        >>> history = model.fit(train, val, epochs=2)
        >>> history.history["eval_acc"]
        [0.971, 0.983]
    """

    def __init__(self) -> None:
        self.history: dict[str, list[Any]] = {}
        self.epochs: dict[str, list[int]] = {}
        self.epoch: list[int] = []
        self._resumed = False

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Begin with empty lists, unless a checkpoint filled them."""
        if not self._resumed:
            # New objects: what an earlier fit returned may still be in use.
            self.history, self.epochs, self.epoch = {}, {}, []
        self._resumed = False

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Append the epoch's values."""
        self.epoch.append(epoch + 1)
        for name, value in (logs or {}).items():
            if isinstance(value, numbers.Real):
                value = float(value)
            elif isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
                value = value.copy()
            else:
                continue
            self.history.setdefault(name, []).append(value)
            self.epochs.setdefault(name, []).append(epoch + 1)

    def state_dict(self) -> dict[str, Any]:
        """Lists of floats, and of tensors for arrays."""
        return {
            "history": {
                name: [torch.from_numpy(v.copy()) if isinstance(v, np.ndarray) else v for v in values]
                for name, values in self.history.items()
            },
            "epochs": {name: list(epochs) for name, epochs in self.epochs.items()},
            "epoch": list(self.epoch),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave; the next ``fit`` appends to it."""
        self.history = {
            name: [v.numpy().copy() if isinstance(v, torch.Tensor) else v for v in values]
            for name, values in state_dict["history"].items()
        }
        self.epochs = {name: list(epochs) for name, epochs in state_dict["epochs"].items()}
        self.epoch = list(state_dict["epoch"])
        self._resumed = True

    def plot(self, *names: str, path: str | os.PathLike[str] | None = None) -> Any:
        """Draw the values over the epochs: one axes per value, training and evaluation in the same.

        Values that are not finite are gaps; arrays are left out.

        Args:
            *names: What to draw. ``"acc"`` is the training's and the evaluation's; ``"eval_acc"`` only the latter.
                Default: the losses and metrics of the ``fit``, not what other callbacks added.
            path: Save the figure there, as PNG, SVG, PDF ... by the suffix; the folder is created.

        Returns:
            A ``matplotlib.figure.Figure``. A notebook shows it; ``figure.axes`` are in the order of the names.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: An unknown name, or there is nothing to draw.

        Example:
            >>> history = model.fit(train, val, epochs=10)
            >>> history.plot("loss", "acc", path="curves.png")
        """
        scalars = [name for name, values in self.history.items() if all(isinstance(v, float) for v in values)]
        bases = list(dict.fromkeys(name.removeprefix(EVALUATION) for name in scalars))
        if not bases:
            raise ValueError("History.plot: there is nothing to draw: no epoch has ended")
        accepted = [*bases, *(name for name in scalars if name not in bases)]
        for name in names:
            if name not in accepted:
                hint = suggest(str(name), accepted)
                raise ValueError(f"History.plot: unknown name {name!r}{hint}; accepted: {', '.join(accepted)}")
        # A history that was loaded from a file has seen no fit, and does not know which are its metrics.
        metrics = self.params.get("metrics") or [name for name in bases if name != "lr"]
        chosen = names or [name for name in bases if name in metrics] or bases
        groups: dict[str, dict[str, Line]] = {}
        for name in chosen:
            lines = groups.setdefault(name.removeprefix(EVALUATION), {})
            for kind, key in (("training", name), ("evaluation", f"{EVALUATION}{name}")):
                if key in scalars:
                    lines["evaluation" if key.startswith(EVALUATION) else kind] = self._line(key)
        return draw(groups, path)

    def _line(self, name: str) -> tuple[Sequence[int], Sequence[float]]:
        return self.epochs[name], self.history[name]

    def __repr__(self) -> str:
        last = ", ".join(f"{name}={v[-1]:.4g}" for name, v in self.history.items() if isinstance(v[-1], float))
        return f"History(epochs={len(self.epoch)}{', last: ' + last if last else ''})"
