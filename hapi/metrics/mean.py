"""Means of anything: of an output, or of what a function makes of outputs and labels."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hapi.metrics._shapes import wide
from hapi.metrics.base import Metric, Totals, _snake_case

__all__ = ["FunctionMetric", "Mean"]


class Mean(Metric):
    """Mean over all elements of a value: of the first output, or of ``fn(*outputs, *labels)``.

    A value without axes (a loss, say) is taken as the mean over the batch's rows and weighted by their
    number, so that the result does not depend on how the data is cut into batches.

    Args:
        fn: Makes the value, a tensor or a number, from outputs and labels. It must not wait for the device.
        name: The name in logs.

    Raises:
        TypeError: ``fn`` is not callable, or a value is not a tensor or a number.

    Example:
        >>> m = Mean(lambda output, label: (output > label).float(), name="above")
        >>> m.update(torch.tensor([1.0, 3.0]), torch.tensor([2.0, 2.0]))
        >>> m.accumulate()
        0.5
    """

    def __init__(self, fn: Callable[..., Any] | None = None, name: str = "mean") -> None:
        super().__init__(name)
        if fn is not None and (not callable(fn) or isinstance(fn, type)):
            raise TypeError(f"{type(self).__name__}: fn={fn!r}; accepted: a function of outputs and labels")
        self.fn = fn
        self.add_state("total")
        self.add_state("count")

    def update(self, *args: Any) -> None:
        """Add a batch: outputs, then labels."""
        rows = _rows(args)
        if rows == 0:
            return  # the mean of no rows is NaN, which no weight of 0 takes away
        value = args[0] if self.fn is None else self.fn(*args)
        if isinstance(value, Tensor):
            self._to(value.device)
            value = wide(value.detach())
            if value.ndim:
                self._check(value, rows)
                self.state["total"].add_(value.sum(dtype=torch.float64))
                self.add_on_host("count", value.numel())
                return
        elif isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
            raise TypeError(
                f"{type(self).__name__} {self._name!r}: the value is a {type(value).__name__}; "
                "accepted: a tensor or a number"
            )
        weight = 1 if rows is None else rows
        self.state["total"].add_(value if isinstance(value, Tensor) else float(value), alpha=weight)
        self.state["count"].add_(weight)

    def compute(self, totals: Totals) -> float:
        """The mean; NaN where nothing was added."""
        return float(totals["total"] / totals["count"])

    def _check(self, value: Tensor, rows: int | None) -> None:
        """Refuse a shape."""


class FunctionMetric(Mean):
    """A function as a metric: the mean of ``fn(*outputs, *labels)`` over all rows.

    Args:
        fn: Gives the mean over the batch (a tensor without axes, or a number), or one value per row ``[N]``.
        name: The name in logs; by default the function's.

    Raises:
        TypeError: ``fn`` is not callable, or a value is not a tensor or a number.
        ValueError: A value that is neither a number nor one per row.

    Example:
        >>> m = FunctionMetric(torch.nn.functional.l1_loss)
        >>> m.update(torch.tensor([1.0, 3.0]), torch.tensor([2.0, 2.0]))
        >>> m.name(), m.accumulate()
        ('l1_loss', 1.0)
    """

    def __init__(self, fn: Callable[..., Any], name: str | None = None) -> None:
        if fn is None:
            raise TypeError("FunctionMetric: fn=None; accepted: a function of outputs and labels")
        super().__init__(fn, _name_of(fn) if name is None else name)

    def _check(self, value: Tensor, rows: int | None) -> None:
        if value.ndim != 1 or (rows is not None and value.shape[0] != rows):
            raise ValueError(
                f"FunctionMetric {self._name!r}: the value has the shape {list(value.shape)}; "
                f"accepted: a scalar, or one value for each of the {rows} rows"
            )


def _rows(args: Sequence[Any]) -> int | None:
    """The length of the first axis of the last tensor that has one (a label, where there are labels)."""
    for arg in reversed(args):
        if isinstance(arg, Tensor):
            if arg.ndim:
                return arg.shape[0]
        elif isinstance(arg, (Mapping, list, tuple)):
            found = _rows(list(arg.values()) if isinstance(arg, Mapping) else arg)
            if found is not None:
                return found
    return None


def _name_of(fn: Callable[..., Any]) -> str:
    while isinstance(fn, functools.partial):
        fn = fn.func
    name = getattr(fn, "__name__", None) or _snake_case(type(fn).__name__)
    return "metric" if name == "<lambda>" else name
