"""Perplexity of a language model."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from hapi.metrics._shapes import check_class_axis, class_scores, wide
from hapi.metrics.base import Metric, Totals

__all__ = ["Perplexity"]


class Perplexity(Metric):
    """exp of the mean negative log-likelihood of the labels, over all tokens that count.

    Args:
        ignore_index: A label that does not count (padding).
        name: The name in logs.
        class_axis: 1 or -1, where the shapes of output and label allow both.

    The output is logits, ``[N, C]`` with labels ``[N]``, or ``[N, T, C]`` (as language models give them) or
    ``[N, C, T]`` (as ``CrossEntropyLoss`` takes them) with labels ``[N, T]``. Which of the two it is
    follows from the label's shape; where ``T`` equals ``C`` pass ``class_axis=-1`` or ``class_axis=1``.

    Raises:
        ValueError: Shapes that do not go together, or in both ways.

    Example:
        >>> m = Perplexity()
        >>> m.update(torch.zeros(2, 5, 10), torch.ones(2, 5, dtype=torch.long))
        >>> round(m.accumulate(), 4)
        10.0
    """

    def __init__(self, ignore_index: int = -100, name: str = "perplexity", *, class_axis: int | None = None) -> None:
        super().__init__(name)
        self.ignore_index = ignore_index
        self._class_axis = check_class_axis(self, class_axis)
        self.add_state("total")
        self.add_state("count")

    def update(self, output: Tensor, label: Tensor) -> None:
        """Add a batch. See the class for shapes."""
        self._to(output.device)
        scores, label = class_scores(self, wide(output.detach()), label, self._class_axis)
        label = label.long()
        losses = F.cross_entropy(scores, label, ignore_index=self.ignore_index, reduction="none")
        self.state["total"].add_(losses.sum(dtype=torch.float64))
        self.state["count"].add_((label != self.ignore_index).sum())

    def compute(self, totals: Totals) -> float:
        """The perplexity; NaN where nothing was counted, infinite where it is beyond float64."""
        mean = float(totals["total"] / totals["count"])
        try:
            return math.exp(mean)
        except OverflowError:
            return math.inf
