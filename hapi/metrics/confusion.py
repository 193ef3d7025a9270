"""Metrics made of confusion counts: precision, recall, F1 and the confusion matrix."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hapi.metrics._shapes import check_class_axis, cut, outside_error, pairs, positive_scores
from hapi.metrics.base import Metric, Totals

__all__ = ["ConfusionMatrix", "F1", "Precision", "Recall"]

Average = Literal["binary", "macro", "micro", "weighted"]
_AVERAGES = ("binary", "macro", "micro", "weighted")
_NORMALIZE = (None, "true", "pred", "all")


class _ConfusionCounts(Metric):
    """Counts of true positives, false positives and false negatives, per class. See :class:`Precision`."""

    def __init__(
        self,
        average: Average = "binary",
        name: str | None = None,
        *,
        threshold: float = 0.5,
        from_logits: bool = False,
        num_classes: int | None = None,
        ignore_index: int | None = None,
        class_axis: int | None = None,
    ) -> None:
        super().__init__(name)
        kind = type(self).__name__
        if average not in _AVERAGES:
            raise ValueError(f"{kind}: average={average!r}; accepted: {', '.join(map(repr, _AVERAGES))}")
        if average == "binary" and num_classes is not None:
            raise ValueError(
                f"{kind}: num_classes={num_classes!r} with average='binary'; "
                "accepted for several classes: average='macro', 'micro' or 'weighted'"
            )
        if average != "binary" and (num_classes is None or num_classes < 2):
            raise ValueError(f"{kind}: average={average!r} needs num_classes of 2 or more; given: {num_classes!r}")
        self.average = average
        self.num_classes = num_classes
        self.ignore_index = ignore_index
        self._cut = cut(self, threshold, from_logits=from_logits)
        self._from_logits = from_logits
        self._class_axis = check_class_axis(self, class_axis)
        shape = () if num_classes is None else (num_classes,)
        for state in ("tp", "fp", "fn"):
            self.add_state(state, shape)
        if num_classes is not None:
            self.add_state("outside")

    def update(self, output: Tensor, label: Tensor) -> None:
        """Add a batch. See :class:`Precision` for shapes."""
        self._to(output.device)
        state = self.state
        if self.num_classes is None:
            score, label = positive_scores(self, output, label, from_logits=self._from_logits)
            positive, actual = score > self._cut, label == 1
            if self.ignore_index is not None:
                keep = label != self.ignore_index
                positive, actual = positive & keep, actual & keep
            state["tp"].add_((positive & actual).sum())
            state["fp"].add_((positive & ~actual).sum())
            state["fn"].add_((actual & ~positive).sum())
            return
        predicted, labels, weight, outside = pairs(
            self, output, label, self.num_classes, self.ignore_index, self._class_axis
        )
        right = weight * (predicted == labels)
        wrong = weight - right
        state["tp"].scatter_add_(0, labels, right)
        state["fp"].scatter_add_(0, predicted, wrong)
        state["fn"].scatter_add_(0, labels, wrong)
        state["outside"].add_(outside)

    def compute(self, totals: Totals) -> float:
        """The average over the classes.

        Raises:
            ValueError: Labels that are no class.
        """
        if self.num_classes is not None and totals["outside"] > 0:
            raise outside_error(self, int(totals["outside"]), self.num_classes, self.ignore_index)
        tp, fp, fn = totals["tp"], totals["fp"], totals["fn"]
        if self.average == "micro":
            return float(self._score(tp.sum(), fp.sum(), fn.sum()))
        scores = self._score(tp, fp, fn)
        if self.average == "binary":
            return float(scores)
        weight = tp + fn if self.average == "weighted" else (tp + fp + fn > 0).to(tp.dtype)
        return float(_quotient((scores * weight).sum(), weight.sum()))

    def _score(self, tp: Tensor, fp: Tensor, fn: Tensor) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} has no _score(tp, fp, fn)")


class Precision(_ConfusionCounts):
    """Share of the positive answers that are right: tp / (tp + fp).

    Equal to scikit-learn's function of the same ``average`` with ``zero_division=0``: a quotient without a
    denominator (a class that is never predicted, say) is 0.0.

    Args:
        average: ``"binary"``: of the positive class. The output is its probability, ``[N]`` or ``[N, 1]``, or
            ``[N, 2]`` of which the second column counts; labels are ``[N]`` or ``[N, 1]``, where 1 is
            positive. With the other averages the output is ``[N, C]`` or ``[N, C, d...]`` and the highest
            score counts; labels are ``[N]``, ``[N, 1]`` or ``[N, d...]``. ``"macro"``: the mean over the
            classes that occur in labels or predictions. ``"weighted"``: that mean, weighted by the number
            of labels of a class. ``"micro"``: of the counts summed over classes.
        name: The name in logs; by default the class's, in lower case.
        threshold: Binary: the probability above which an answer is positive.
        from_logits: Binary: the output is logits, not probabilities.
        num_classes: The number of classes ``C``. Needed unless binary.
        ignore_index: A label that does not count (padding).
        class_axis: 1 or -1, where the shapes of output and label allow both.

    Raises:
        ValueError: An option or a shape that is not accepted.

    Example:
        >>> m = Precision()
        >>> m.update(torch.tensor([0.9, 0.8, 0.1]), torch.tensor([1, 0, 1]))
        >>> m.accumulate()
        0.5
    """

    def _score(self, tp: Tensor, fp: Tensor, fn: Tensor) -> Tensor:
        return _quotient(tp, tp + fp)


class Recall(_ConfusionCounts):
    """Share of the positives that are found: tp / (tp + fn).

    Args, shapes and errors are those of :class:`Precision`.

    Example:
        >>> m = Recall("macro", num_classes=2)
        >>> m.update(torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.7, 0.3]]), torch.tensor([0, 1, 1]))
        >>> m.accumulate()
        0.75
    """

    def _score(self, tp: Tensor, fp: Tensor, fn: Tensor) -> Tensor:
        return _quotient(tp, tp + fn)


class F1(_ConfusionCounts):
    """Harmonic mean of precision and recall: 2 tp / (2 tp + fp + fn).

    Args, shapes and errors are those of :class:`Precision`.

    Example:
        >>> m = F1()
        >>> m.update(torch.tensor([0.9, 0.8, 0.1]), torch.tensor([1, 0, 1]))
        >>> m.accumulate()
        0.5
    """

    def _score(self, tp: Tensor, fp: Tensor, fn: Tensor) -> Tensor:
        return _quotient(2 * tp, 2 * tp + fp + fn)


class ConfusionMatrix(Metric):
    """How often class ``i`` (row) was taken for class ``j`` (column).

    Args:
        num_classes: The number of classes ``C``.
        normalize: None: counts. ``"true"``: shares of each row (of a class's labels). ``"pred"``: of each
            column. ``"all"``: of everything. A row or column without items is 0.
        name: The name in logs.
        ignore_index: A label that does not count (padding).
        class_axis: 1 or -1, where the shapes of output and label allow both.

    The output is ``[N, C]`` or ``[N, C, d...]`` and the highest score counts; labels are ``[N]``, ``[N,
    1]`` or ``[N, d...]``. The result is a numpy array ``[C, C]``, int64 for counts and float64 for shares.

    Raises:
        ValueError: An option or a shape that is not accepted.

    Example:
        >>> m = ConfusionMatrix(2)
        >>> m.update(torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.7, 0.3]]), torch.tensor([0, 1, 1]))
        >>> m.accumulate().tolist()
        [[1, 0], [1, 1]]
    """

    def __init__(
        self,
        num_classes: int,
        normalize: Literal["true", "pred", "all"] | None = None,
        *,
        name: str = "confusion_matrix",
        ignore_index: int | None = None,
        class_axis: int | None = None,
    ) -> None:
        super().__init__(name)
        if isinstance(num_classes, bool) or not isinstance(num_classes, int) or num_classes < 2:
            raise ValueError(f"ConfusionMatrix: num_classes={num_classes!r}; accepted: an int of 2 or more")
        if normalize not in _NORMALIZE:
            raise ValueError(f"ConfusionMatrix: normalize={normalize!r}; accepted: None, 'true', 'pred' or 'all'")
        self.num_classes = num_classes
        self.normalize = normalize
        self.ignore_index = ignore_index
        self._class_axis = check_class_axis(self, class_axis)
        self.add_state("matrix", (num_classes, num_classes))
        self.add_state("outside")

    def update(self, output: Tensor, label: Tensor) -> None:
        """Add a batch. See the class for shapes."""
        self._to(output.device)
        predicted, labels, weight, outside = pairs(
            self, output, label, self.num_classes, self.ignore_index, self._class_axis
        )
        cells = labels * self.num_classes + predicted
        self.state["matrix"].view(-1).scatter_add_(0, cells, weight)
        self.state["outside"].add_(outside)

    def compute(self, totals: Totals) -> NDArray[Any]:
        """The matrix.

        Raises:
            ValueError: Labels that are no class.
        """
        if totals["outside"] > 0:
            raise outside_error(self, int(totals["outside"]), self.num_classes, self.ignore_index)
        matrix = totals["matrix"]
        if self.normalize is None:
            return np.asarray(matrix.long().numpy())
        axes = {"true": [1], "pred": [0], "all": [0, 1]}[self.normalize]
        return np.asarray(_quotient(matrix, matrix.sum(axes, keepdim=True)).numpy())


def _quotient(top: Tensor, bottom: Tensor) -> Tensor:
    """``top / bottom`` of counts, 0 where the bottom is 0 (the top is part of it)."""
    return top / bottom.clamp(min=1)
