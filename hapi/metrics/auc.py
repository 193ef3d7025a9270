"""Area under the ROC or precision-recall curve, from histograms or exact."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hapi.metrics._shapes import positive_scores
from hapi.metrics.base import Metric, Totals

__all__ = ["Auc"]

_CURVES = ("ROC", "PR")
# Half-precision softmax may leave [0, 1] by this much; logits do not stay within it.
_SLACK = 1e-3

Counts = NDArray[np.float64]


class Auc(Metric):
    """Area under a curve over all thresholds, of two-class scores.

    ``"ROC"`` is the area under the trapezoids of the receiver operating characteristic; ``"PR"`` is the
    average precision, the area under the steps of the precision-recall curve (scikit-learn's
    ``roc_auc_score`` and ``average_precision_score``). Where a class is absent the result is 0.0, as in the
    reference.

    By default scores are counted in ``num_thresholds + 1`` buckets of equal width, separately for both
    classes, so that memory does not grow; scores that share a bucket count as ties. ``exact=True`` keeps
    every score instead.

    Args:
        curve: ``"ROC"`` or ``"PR"``.
        num_thresholds: Probability ``p`` is counted in bucket ``int(p * num_thresholds)``.
        name: The name in logs.
        from_logits: The output is logits, not probabilities.
        exact: Keep all scores (any finite numbers, logits included), and compute the area without buckets.

    The output is ``[N]`` or ``[N, 1]`` (the probability of the positive class) or ``[N, 2]`` (the second
    column counts); labels are ``[N]`` or ``[N, 1]``, where 1 is positive.

    Raises:
        ValueError: An option or a shape that is not accepted; when read, scores that are no probabilities.

    Example:
        >>> m = Auc()
        >>> m.update(torch.tensor([0.9, 0.4, 0.6, 0.1]), torch.tensor([1, 1, 0, 0]))
        >>> m.accumulate()
        0.75
    """

    def __init__(
        self,
        curve: Literal["ROC", "PR"] = "ROC",
        num_thresholds: int = 4095,
        name: str = "auc",
        *,
        from_logits: bool = False,
        exact: bool = False,
    ) -> None:
        super().__init__(name)
        if curve not in _CURVES:
            raise ValueError(f"Auc: curve={curve!r}; accepted: 'ROC' or 'PR'")
        if isinstance(num_thresholds, bool) or not isinstance(num_thresholds, int) or num_thresholds < 1:
            raise ValueError(f"Auc: num_thresholds={num_thresholds!r}; accepted: a positive int")
        self.curve = curve
        self.num_thresholds = num_thresholds
        self.from_logits = from_logits
        self.exact = exact
        if exact:
            self.add_state("score", reduce="cat")
            self.add_state("positive", reduce="cat")
        else:
            self.add_state("positives", [num_thresholds + 1])
            self.add_state("negatives", [num_thresholds + 1])
            self.add_state("outside")

    def update(self, output: Tensor, label: Tensor) -> None:
        """Add a batch. See the class for shapes."""
        score, label = positive_scores(self, output.detach(), label, from_logits=self.from_logits)
        score, positive = score.flatten(), label.flatten() == 1
        if self.exact:
            # Copies: a column of the output would keep all of it, and the caller may write over either.
            self.lists["score"].append(score.clone())
            self.lists["positive"].append(positive)
            return
        self._to(output.device)
        score = score.float()
        if self.from_logits:
            score = score.sigmoid()
        # NaN is outside too; it must not become an index.
        inside = (score >= -_SLACK) & (score <= 1 + _SLACK)
        bucket = torch.where(inside, score * self.num_thresholds, 0).long().clamp_(0, self.num_thresholds)
        weight = positive.to(torch.float64)
        self.state["positives"].scatter_add_(0, bucket, weight)
        self.state["negatives"].scatter_add_(0, bucket, 1 - weight)
        self.state["outside"].add_((~inside).sum())

    def compute(self, totals: Totals) -> float:
        """The area.

        Raises:
            ValueError: Scores that are no probabilities (exact: that are not finite).
        """
        if self.exact:
            positives, negatives = self._counts_by_score(totals["score"], totals["positive"])
        else:
            if totals["outside"] > 0:
                advice = "are they NaN?" if self.from_logits else "for logits pass from_logits=True"
                raise ValueError(
                    f"Auc {self._name!r}: {int(totals['outside'])} scores are NaN or outside [0, 1]; "
                    f"accepted: probabilities ({advice})"
                )
            positives, negatives = totals["positives"].numpy()[::-1], totals["negatives"].numpy()[::-1]
        if not positives.sum() or not negatives.sum():
            return 0.0
        return _roc_area(positives, negatives) if self.curve == "ROC" else _average_precision(positives, negatives)

    def _counts_by_score(self, score: Tensor, positive: Tensor) -> tuple[Counts, Counts]:
        """Positives and negatives at every different score, from the highest down."""
        bad = int((~score.isfinite()).sum())
        if bad:
            raise ValueError(f"Auc {self._name!r}: {bad} scores are NaN or infinite; accepted: finite numbers")
        values, place = np.unique(score.double().numpy(), return_inverse=True)
        truth: NDArray[Any] = positive.double().numpy()
        place = place.reshape(-1)
        positives = np.bincount(place, weights=truth, minlength=len(values)).astype(np.float64)
        negatives = np.bincount(place, weights=1 - truth, minlength=len(values)).astype(np.float64)
        return positives[::-1], negatives[::-1]


def _roc_area(positives: Counts, negatives: Counts) -> float:
    """Trapezoids under the ROC curve, of counts from the highest score down."""
    above = np.cumsum(positives) - positives
    area = float((negatives * (above + positives / 2)).sum())
    return area / float(positives.sum() * negatives.sum())


def _average_precision(positives: Counts, negatives: Counts) -> float:
    """Steps under the precision-recall curve, of counts from the highest score down."""
    found = np.cumsum(positives)
    answered = found + np.cumsum(negatives)
    precision = np.divide(found, answered, out=np.zeros_like(found), where=answered > 0)
    return float((positives * precision).sum() / found[-1])
