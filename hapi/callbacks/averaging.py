"""What EMA and SWA share: an average of the weights, kept on every rank beside the weights that are trained."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from hapi.callbacks.base import Callback
from hapi.callbacks.checks import flag
from hapi.engine.state import Logs

__all__: list[str] = []


class _WeightAverage(Callback):
    """Keeps a :class:`torch.optim.swa_utils.AveragedModel`, and tells the engine what to do with it.

    Every rank keeps one: all have the same weights, and all evaluate.

    Attributes:
        network: A copy of the network with the averaged weights; None before there are any.
    """

    all_ranks = True

    def __init__(self, evaluate: bool, save: bool, apply: bool, *, refresh: bool) -> None:
        owner = type(self).__name__
        self.evaluates = flag(owner, "evaluate", evaluate)
        self.saves = flag(owner, "save", save)
        self.applies = flag(owner, "apply", apply)
        self.refreshes = refresh
        self.network: nn.Module | None = None
        self._average: AveragedModel | None = None
        self._saved: dict[str, Any] | None = None
        self._owner: Callable[[], Any] | None = None

    def _new_average(self, network: nn.Module) -> AveragedModel:
        raise NotImplementedError

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Begin anew, or go on with the average of this model's earlier fits or of a checkpoint."""
        run, owner = self.run, type(self).__name__
        if run.average is not None and run.average is not self:
            raise ValueError(f"{owner}: {type(run.average).__name__} averages the weights already; give one of them")
        low = {p.dtype for p in run.network.parameters() if p.is_floating_point()} & {torch.bfloat16, torch.float16}
        if low:
            kind = str(next(iter(low))).removeprefix("torch.")
            raise ValueError(
                f"{owner}: the network's weights are {kind}, in which small changes of an average are lost; "
                "train with amp='bf16', 'fp16' or 'O1', which keep float32 weights"
            )
        run.average = self
        same = self._owner is not None and self._owner() is run.network
        if self._average is None or self._saved is not None or not same:
            self._average, self.network = self._new_average(run.network), None
            self._owner = weakref.ref(run.network)
        if self._saved is not None:
            saved, self._saved = self._saved, None
            self._average.load_state_dict(saved)
            self._show()

    def end_epoch(self) -> None:
        """Called by the engine after an epoch's last step, before its evaluation."""

    def _add(self) -> None:
        """Add the network's current weights to the average."""
        assert self._average is not None
        self._average.update_parameters(self.run.network)
        self._show()

    def _show(self) -> None:
        assert self._average is not None
        self.network = self._average.module if int(self._average.n_averaged) else None

    def state_dict(self) -> dict[str, Any]:
        """The averaged weights, and how many were added."""
        average = self._saved if self._average is None else self._average.state_dict()
        copied = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in (average or {}).items()}
        return {"average": copied or None}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave."""
        saved: Mapping[str, Any] | None = state_dict["average"]
        self._average = self.network = None
        self._saved = None if saved is None else dict(saved)

    def __getstate__(self) -> dict[str, Any]:
        """Without the run and what belongs to its network: a copy is a callback that has not begun."""
        state = {k: v for k, v in vars(self).items() if k not in ("run", "model")}
        return state | {"network": None, "_average": None, "_owner": None}
