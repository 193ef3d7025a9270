"""Which axis holds the classes, which column is the score: decided from shapes alone, on the host.

Every function takes the metric first, to name it in errors.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hapi.metrics.base import Metric

__all__ = [
    "check_class_axis",
    "class_scores",
    "cut",
    "is_single_column",
    "mismatch",
    "outside_error",
    "paired",
    "pairs",
    "positive_scores",
    "wide",
]


def mismatch(metric: Metric, output: Tensor, label: Tensor, accepted: str) -> ValueError:
    """The error for shapes that do not go together."""
    return ValueError(
        f"{_who(metric)}: the output has the shape {list(output.shape)} and the label {list(label.shape)}; "
        f"accepted: {accepted}"
    )


def check_class_axis(metric: Metric, class_axis: int | None) -> int | None:
    """Refuse an axis that cannot hold classes."""
    if class_axis not in (None, 1, -1):
        raise ValueError(f"{_who(metric)}: class_axis={class_axis!r}; accepted: 1, -1 or None (from the shapes)")
    return class_axis


def is_single_column(output: Tensor) -> bool:
    """Whether there is one score per item, ``[N]`` or ``[N, 1, ...]``: two classes."""
    return output.ndim < 2 or output.shape[1] == 1


# While metrics are updated with one batch: scores -> their best class. The scores are kept, so that ids stay theirs.
_best: dict[int, tuple[Tensor, Tensor]] | None = None


def share_best_class(on: bool) -> None:
    """Between True and False, :func:`best_class` of the same scores is computed once; they must not change."""
    global _best
    _best = {} if on else None


def best_class(scores: Tensor) -> Tensor:
    """The index of the highest of scores ``[N, C, d...]``, ``[N, d...]``."""
    if _best is None:
        return scores.argmax(1)
    found = _best.get(id(scores))
    if found is None:
        found = _best[id(scores)] = (scores, scores.argmax(1))
    return found[1]


def class_scores(metric: Metric, output: Tensor, label: Tensor, class_axis: int | None = None) -> tuple[Tensor, Tensor]:
    """Scores ``[N, C, d...]`` and class labels ``[N, d...]``.

    Labels may have an axis of one in the place of the classes, or be one-hot or probabilities of the output's
    shape (then the classes are on axis 1, unless ``class_axis`` says otherwise).

    Raises:
        ValueError: The shapes do not go together, or go together both with the classes on axis 1 and on the
            last.
    """
    shape, found = output.shape, label.shape
    if output.ndim == 2 and found[:1] == shape[:1] and label.numel() == shape[0]:
        return output, label if label.ndim == 1 else label.reshape(-1)
    if output.ndim < 2:
        raise mismatch(metric, output, label, _CLASSES)
    if output.ndim == 2:
        class_axis = 1
    axes = [1, output.ndim - 1] if class_axis is None else [class_axis % output.ndim]
    fitting = [
        axis for axis in axes if found in (shape[:axis] + shape[axis + 1 :], (*shape[:axis], 1, *shape[axis + 1 :]))
    ]
    if len(fitting) > 1:
        raise mismatch(
            metric,
            output,
            label,
            f"shapes that say which axis of the output holds the classes; here 1 and {axes[1]} both do: "
            "pass class_axis=1 or class_axis=-1",
        )
    if fitting:
        axis = fitting[0]
        label = label.reshape(shape[:axis] + shape[axis + 1 :])
    elif found == shape:
        axis = axes[0]
        label = (label.byte() if label.dtype is torch.bool else label).argmax(axis)
    else:
        raise mismatch(metric, output, label, _CLASSES)
    return output if axis == 1 else output.movedim(axis, 1), label


_CLASSES = "[N, C] with [N], [N, 1] or [N, C]; [N, C, d...] or [N, d..., C] with [N, d...]"


def positive_scores(metric: Metric, output: Tensor, label: Tensor, *, from_logits: bool) -> tuple[Tensor, Tensor]:
    """The score of the positive class and the label, of one shape.

    One column is the score. Of two columns the second is; from logits it is their difference, which is the
    logit of the second column of their softmax.
    """
    if output.ndim == 2 and output.shape[1] == 2:
        score = output[:, 1] - output[:, 0] if from_logits else output[:, 1]
    elif output.ndim >= 2 and output.shape[1] == 1:
        score = output.squeeze(1)
    else:
        score = output
    found = label.squeeze(1) if label.ndim == score.ndim + 1 > 1 else label
    if score.ndim == 0 or found.shape != score.shape or (score is output and output.ndim == 2):
        raise mismatch(
            metric,
            output,
            label,
            "[N], [N, 1] or [N, 2] with [N] or [N, 1]; [N, 1, d...] or [N, d...] with [N, d...]",
        )
    return score, found


def cut(metric: Metric, threshold: float, *, from_logits: bool) -> float:
    """The score above which the answer is yes: the threshold, or its logit (saves a sigmoid per batch)."""
    if not 0.0 < threshold < 1.0:
        raise ValueError(f"{_who(metric)}: threshold={threshold!r}; accepted: a probability between 0 and 1")
    return math.log(threshold / (1.0 - threshold)) if from_logits else float(threshold)


def pairs(
    metric: Metric,
    output: Tensor,
    label: Tensor,
    num_classes: int,
    ignore_index: int | None,
    class_axis: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Predicted and true class of every item, which items count, and how many labels are no class.

    A label outside the classes would be an out-of-bounds write, which on a GPU ends the process: here it is
    moved to class 0 with no weight and counted, for the metric to report when it is read.
    """
    scores, labels = class_scores(metric, output, label, class_axis)
    if scores.shape[1] != num_classes:
        raise mismatch(metric, output, label, f"num_classes={num_classes} scores per item")
    predicted, labels = best_class(scores).flatten(), labels.flatten().long()
    keep = (labels >= 0) & (labels < num_classes)
    outside = ~keep
    if ignore_index is not None:
        counted = labels != ignore_index
        outside = outside & counted
        keep = keep & counted
    return predicted, torch.where(keep, labels, 0), keep.to(torch.float64), outside.sum()


def outside_error(metric: Metric, count: int, num_classes: int, ignore_index: int | None) -> ValueError:
    """The error for labels that are no class."""
    return ValueError(
        f"{_who(metric)}: {count} labels are no class; accepted: 0 to {num_classes - 1} "
        f"(num_classes={num_classes}) and ignore_index (here {ignore_index})"
    )


def paired(metric: Metric, output: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    """Output and label of one shape, without a graph. ``[N]`` goes with ``[N, 1]``; nothing is broadcast."""
    if output.shape != label.shape:
        rows = output.shape[:1]
        if {output.shape, label.shape} != {rows, (*rows, 1)}:
            raise mismatch(metric, output, label, "equal shapes, or [N] with [N, 1]")
        label = label.reshape(output.shape)
    return wide(output.detach()), wide(label.detach())


def wide(tensor: Tensor) -> Tensor:
    """Half precision as float32, integers as float64: what can be subtracted and squared."""
    if tensor.dtype in (torch.float32, torch.float64):
        return tensor
    return tensor.float() if tensor.is_floating_point() else tensor.double()


def _who(metric: Metric) -> str:
    return f"{type(metric).__name__} {metric.name()!r}"
