"""Errors of predicted numbers: MSE, MAE and R2."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hapi.metrics._shapes import mismatch, paired
from hapi.metrics.base import Metric, Totals

__all__ = ["MAE", "MSE", "R2"]


class _ElementMean(Metric):
    """Mean of an error over all elements."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self.add_state("total")
        self.add_state("count")

    def update(self, output: Tensor, label: Tensor) -> None:
        """Add a batch: equal shapes, or ``[N]`` with ``[N, 1]``."""
        self._to(output.device)
        output, label = paired(self, output, label)
        self.state["total"].add_(self._error(output - label).sum(dtype=torch.float64))
        self.add_on_host("count", output.numel())

    def compute(self, totals: Totals) -> float:
        """The mean; NaN where nothing was added."""
        return float(totals["total"] / totals["count"])

    def _error(self, difference: Tensor) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} has no _error(difference)")


class MSE(_ElementMean):
    """Mean squared error over all elements.

    Args:
        name: The name in logs.

    Output and label have equal shapes, or are ``[N]`` and ``[N, 1]``: nothing is broadcast.

    Raises:
        ValueError: Shapes that do not go together.

    Example:
        >>> m = MSE()
        >>> m.update(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 1.0]))
        >>> m.accumulate()
        2.0
    """

    def __init__(self, name: str = "mse") -> None:
        super().__init__(name)

    def _error(self, difference: Tensor) -> Tensor:
        return difference.square()


class MAE(_ElementMean):
    """Mean absolute error over all elements.

    Args:
        name: The name in logs.

    Output and label have equal shapes, or are ``[N]`` and ``[N, 1]``: nothing is broadcast.

    Raises:
        ValueError: Shapes that do not go together.

    Example:
        >>> m = MAE()
        >>> m.update(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 1.0]))
        >>> m.accumulate()
        1.0
    """

    def __init__(self, name: str = "mae") -> None:
        super().__init__(name)

    def _error(self, difference: Tensor) -> Tensor:
        return difference.abs()


class R2(Metric):
    """Coefficient of determination: 1 - (sum of squared errors) / (sum of squares around the mean label).

    Sums are kept in float64, so the mean label may be about a million times larger than the labels' spread.
    As in scikit-learn, labels that are all equal give 1.0 for a perfect output and 0.0 otherwise, and fewer
    than two rows give NaN.

    Args:
        name: The name in logs.
        num_outputs: Columns ``D``; the result is the mean of the columns' coefficients.

    Output and label are ``[N]`` or ``[N, 1]`` for one column, ``[N, D]`` for several.

    Raises:
        ValueError: An option or a shape that is not accepted.

    Example:
        >>> m = R2()
        >>> m.update(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1.0, 2.0, 3.0]))
        >>> m.accumulate()
        0.5
    """

    def __init__(self, name: str = "r2", *, num_outputs: int = 1) -> None:
        super().__init__(name)
        if isinstance(num_outputs, bool) or not isinstance(num_outputs, int) or num_outputs < 1:
            raise ValueError(f"R2: num_outputs={num_outputs!r}; accepted: a positive int")
        self.num_outputs = num_outputs
        for state in ("label", "label_squared", "error_squared"):
            self.add_state(state, [num_outputs])
        self.add_state("rows")

    def update(self, output: Tensor, label: Tensor) -> None:
        """Add a batch. See the class for shapes."""
        self._to(output.device)
        found, truth = paired(self, output, label)
        columns = found.shape[1] if found.ndim == 2 else 1
        if found.ndim not in (1, 2) or columns != self.num_outputs:
            raise mismatch(self, output, label, f"num_outputs={self.num_outputs} columns ([N] and [N, 1] have one)")
        found, truth = found.reshape(-1, columns), truth.reshape(-1, columns).double()
        self.state["label"].add_(truth.sum(0))
        self.state["label_squared"].add_(truth.square().sum(0))
        self.state["error_squared"].add_((found - truth).square().sum(0))
        self.add_on_host("rows", found.shape[0])

    def compute(self, totals: Totals) -> float:
        """The mean over columns; NaN for fewer than two rows."""
        rows = float(totals["rows"])
        if rows < 2:
            return math.nan
        squares, error = totals["label_squared"], totals["error_squared"]
        spread = squares - totals["label"].square() / rows
        # Equal labels leave only the rounding of the sums.
        constant = spread <= 1e-13 * squares
        ratio = error / torch.where(constant, 1.0, spread)
        scores = torch.where(constant, (error == 0).to(ratio.dtype), 1 - ratio)
        return float(scores.mean())
