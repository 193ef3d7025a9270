"""The metric contract: declare states, update them in place on the device, compute from totals.

A metric does not know that ranks exist. It declares its states and how each of them is reduced; the engine
places the ``sum`` states of all metrics in one buffer, reduces that buffer over the ranks with one
collective, copies it to the host once, and hands the totals to :meth:`Metric.compute`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

__all__ = ["Metric", "MetricResult", "StateSpec", "Totals"]

Reduce = Literal["sum", "max", "min", "cat"]
"""How a state is put together over batches and ranks."""

Totals = Mapping[str, Any]
"""What ``compute`` receives: name -> float64 CPU tensor (``cat``: all rows, in their own dtype)."""

MetricResult = Any
"""What ``compute`` returns: a float, a sequence of floats (one per name), or a numpy array."""

_START = {"sum": 0.0, "max": float("-inf"), "min": float("inf")}


@dataclass(frozen=True)
class StateSpec:
    """One declared state.

    Args:
        shape: Shape of the state (ignored by ``cat`` states).
        reduce: ``"sum"``, ``"max"``, ``"min"``, ``"cat"``, or a function that takes the ranks' values stacked
            on a new first axis and returns the total.
        start: The value before any update; by default 0 for sums, -inf for max and inf for min.
    """

    shape: tuple[int, ...]
    reduce: Reduce | Callable[[Tensor], Tensor]
    start: Tensor | None = None

    def initial(self) -> Tensor:
        """A new float64 CPU tensor (the start value's own dtype where one was given) with the start value."""
        if self.start is not None:
            return self.start.detach().clone()
        fill = _START[self.reduce] if isinstance(self.reduce, str) else 0.0
        return torch.full(self.shape, fill, dtype=torch.float64)


class Metric:
    """Base class of all metrics.

    A subclass declares its states in ``__init__`` with :meth:`add_state`, adds to them in :meth:`update`
    and turns totals into numbers in :meth:`compute`. States live in ``self.state`` (a dict of float64
    tensors; write to them **in place**, since the engine owns the memory) and, for ``cat`` states, in
    ``self.lists`` (a dict of lists of tensors; append to them).

    The same object works in a hand-written loop: ``m.reset(); m.update(out, y); m.accumulate()``.

    Args:
        name: The name in logs. Default: the class name in snake case.

    Example:
        >>> class Mean(Metric):
        ...     def __init__(self) -> None:
        ...         super().__init__("mean")
        ...         self.add_state("total")
        ...         self.add_state("count")
        ...     def update(self, output, *labels):
        ...         self.state["total"].add_(output.sum())
        ...         self.state["count"].add_(output.numel())
        ...     def compute(self, totals):
        ...         return float(totals["total"] / totals["count"])
    """

    # Whether the states are the same, to the bit, however rows are put together in updates. A subclass says it anew.
    _counts_rows = False

    def __init__(self, name: str | None = None) -> None:
        self._name = name if name is not None else _snake_case(type(self).__name__)
        self.specs: dict[str, StateSpec] = {}
        self.state: dict[str, Tensor] = {}
        self.lists: dict[str, list[Tensor]] = {}
        self._waiting: dict[str, float] = {}
        self._bound = False

    def name(self) -> str | list[str]:
        """The name of the result in logs, or one name per value where ``compute`` returns several."""
        return self._name

    def add_state(
        self,
        name: str,
        shape: Sequence[int] = (),
        *,
        reduce: Reduce | Callable[[Tensor], Tensor] = "sum",
        start: Tensor | None = None,
    ) -> None:
        """Declare a state. Call in ``__init__`` only. See :class:`StateSpec` for the arguments."""
        if name in self.specs:
            raise ValueError(f"{type(self).__name__}: state {name!r} is declared twice")
        if isinstance(reduce, str) and reduce not in (*_START, "cat"):
            raise ValueError(
                f"{type(self).__name__}: reduce={reduce!r} for state {name!r}; "
                "accepted: 'sum', 'max', 'min', 'cat' or a function"
            )
        spec = StateSpec(tuple(shape), reduce, start)
        self.specs[name] = spec
        if reduce == "cat":
            self.lists[name] = []
        else:
            self.state[name] = spec.initial()

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """Add one batch. ``args`` are the outputs followed by the labels, as tensors on the device.

        Must not wait for the device (no ``.item()``, no ``.cpu()``, no printing of tensors). A subclass may
        name the arguments it takes: ``update(self, output, label)``.
        """
        raise NotImplementedError(f"{type(self).__name__} has no update(*outputs, *labels)")

    def compute(self, totals: Totals) -> MetricResult:
        """Turn totals (host tensors, reduced over ranks) into the result. Must not change the states."""
        raise NotImplementedError(f"{type(self).__name__} has no compute(totals)")

    def reset(self) -> None:
        """Set every state back to its start."""
        for name, tensor in self.state.items():
            tensor.copy_(self.specs[name].initial())
        for rows in self.lists.values():
            rows.clear()
        self._waiting.clear()

    def add_on_host(self, name: str, amount: float) -> None:
        """Add a number that the host knows to a scalar ``sum`` state, without an operator on the device.

        It reaches the state when that is read.
        """
        self._waiting[name] = self._waiting.get(name, 0.0) + amount

    def _settle(self) -> None:
        """Put what :meth:`add_on_host` gathered into the states. The engine calls it before it reads them."""
        for name, amount in self._waiting.items():
            self.state[name].add_(amount)
        self._waiting.clear()

    def accumulate(self) -> MetricResult:
        """The result over everything added on this process since :meth:`reset`. For hand-written loops."""
        self._settle()
        totals: dict[str, Any] = {}
        for name, tensor in self.state.items():
            reduce = self.specs[name].reduce
            totals[name] = reduce(tensor.cpu()[None]) if callable(reduce) else tensor.cpu()
        totals.update({name: cat_rows(rows) for name, rows in self.lists.items()})
        return self.compute(totals)

    def bind(self, views: Mapping[str, Tensor]) -> None:
        """Let the states live in the engine's memory: ``views`` has one tensor per state that it owns."""
        self.state.update(views)
        self._bound = True

    def _to(self, device: torch.device) -> None:
        """In a hand-written loop: move the states to where the outputs are (no-op once bound)."""
        if not self._bound:
            if device.type == "mps" and self.state:
                raise TypeError(f"{self!r}: the device 'mps' has no float64; update with output.cpu(), label.cpu()")
            for name, tensor in self.state.items():
                if tensor.device != device:
                    self.state[name] = tensor.to(device)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(name={self.name()!r})"


def cat_rows(rows: Sequence[Tensor]) -> Tensor:
    """Concatenate on axis 0 on the host; scalars count as one row; no rows give an empty float tensor."""
    if not rows:
        return torch.empty(0)
    return torch.cat([row.reshape(1) if row.ndim == 0 else row for row in rows]).cpu()


def _snake_case(name: str) -> str:
    out = ""
    for i, char in enumerate(name):
        if char.isupper() and i and not name[i - 1].isupper():
            out += "_"
        out += char.lower()
    return out
