"""Accuracy, as a metric and as a function."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

from hapi.metrics._shapes import (
    best_class,
    check_class_axis,
    class_scores,
    cut,
    is_single_column,
    mismatch,
    positive_scores,
)
from hapi.metrics.base import Metric, Totals

__all__ = ["Accuracy", "accuracy"]

_TASKS = (None, "multiclass", "binary", "multilabel")


class Accuracy(Metric):
    """Share of right answers, over all items seen.

    What is right depends on the task (found from the shapes where ``task`` is None: a single column is
    binary, several are multiclass):

    - **multiclass**: the label's class is among the ``k`` highest scores. Output ``[N, C]`` with labels
      ``[N]``, ``[N, 1]``, or one-hot or probabilities ``[N, C]``; output ``[N, C, d...]`` or ``[N, d...,
      C]`` with labels ``[N, d...]``.
    - **binary**: whether the score is above the threshold equals the label (0 or 1). Output ``[N]``, ``[N,
      1]`` or ``[N, 2]`` (the second column counts) with labels ``[N]`` or ``[N, 1]``.
    - **multilabel**: as binary, for every entry of output and label ``[N, C]``.

    Args:
        topk: One ``k`` or several. More than the number of classes counts as all of them.
        name: Replaces ``acc``. With another ``k`` than 1 the names are ``acc_top1``, ``acc_top5``, ...
        task: None, ``"multiclass"``, ``"binary"`` or ``"multilabel"``.
        threshold: Probability above which an answer is positive (binary and multilabel).
        from_logits: The output is logits, not probabilities (binary and multilabel).
        ignore_index: A label that does not count (padding).
        class_axis: 1 or -1, where the shapes of output and label allow both.

    Raises:
        ValueError: An option or a shape that is not accepted.

    Example:
        >>> m = Accuracy(topk=(1, 2))
        >>> m.update(torch.tensor([[0.1, 0.2, 0.7], [0.5, 0.3, 0.2]]), torch.tensor([2, 1]))
        >>> dict(zip(m.name(), m.accumulate()))
        {'acc_top1': 0.5, 'acc_top2': 1.0}
    """

    _counts_rows = True

    def __init__(
        self,
        topk: int | Iterable[int] = (1,),
        name: str | None = None,
        *,
        task: Literal["multiclass", "binary", "multilabel"] | None = None,
        threshold: float = 0.5,
        from_logits: bool = False,
        ignore_index: int | None = None,
        class_axis: int | None = None,
    ) -> None:
        super().__init__("acc" if name is None else name)
        self.topk = (topk,) if isinstance(topk, int) else tuple(topk)
        valid = all(isinstance(k, int) and not isinstance(k, bool) and k > 0 for k in self.topk)
        if not self.topk or not valid or len(set(self.topk)) < len(self.topk):
            raise ValueError(f"Accuracy: topk={topk!r}; accepted: a positive int, or several different ones")
        if task not in _TASKS:
            raise ValueError(f"Accuracy: task={task!r}; accepted: {', '.join(map(repr, _TASKS))}")
        self.max_k = max(self.topk)
        if task in ("binary", "multilabel") and self.max_k > 1:
            raise ValueError(f"Accuracy: topk={topk!r} with task={task!r}; accepted: topk=1")
        self.task = task
        self.ignore_index = ignore_index
        self._cut = cut(self, threshold, from_logits=from_logits)
        self._from_logits = from_logits
        self._class_axis = check_class_axis(self, class_axis)
        self.add_state("correct", [len(self.topk)])
        self.add_state("count")

    def name(self) -> str | list[str]:
        """``acc``, or one name per ``k``."""
        if self.max_k == 1:
            return self._name
        names = [f"{self._name}_top{k}" for k in self.topk]
        return names[0] if len(names) == 1 else names

    def update(self, output: Tensor, label: Tensor) -> None:
        """Add a batch. See the class for shapes."""
        self._to(output.device)
        if self.task == "multilabel":
            if output.shape != label.shape:
                raise mismatch(self, output, label, "equal shapes")
            hits = (output > self._cut) == label
        elif self.task == "binary" or (self.task is None and is_single_column(output)):
            if self.max_k > 1:
                raise mismatch(self, output, label, f"scores of several classes for topk={self.topk}")
            score, label = positive_scores(self, output, label, from_logits=self._from_logits)
            hits = (score > self._cut) == label
        else:
            scores, label = class_scores(self, output, label, self._class_axis)
            if self.max_k > 1:
                return self._add_top(scores, label)
            hits = best_class(scores) == label
        if self.ignore_index is None:
            self.state["correct"].add_(hits.sum())
            return self.add_on_host("count", label.numel())
        keep = label != self.ignore_index
        self.state["correct"].add_((hits & keep).sum())
        return self._add_count(label, keep)

    def _add_top(self, scores: Tensor, label: Tensor) -> None:
        best = scores.topk(min(self.max_k, scores.shape[1]), dim=1).indices
        hits = best == label.unsqueeze(1)
        keep = None if self.ignore_index is None else label != self.ignore_index
        if keep is not None:
            hits = hits & keep.unsqueeze(1)
        for correct, k in zip(self.state["correct"].unbind(), self.topk, strict=True):
            correct.add_(hits[:, :k].sum())
        self._add_count(label, keep)

    def _add_count(self, label: Tensor, keep: Tensor | None) -> None:
        if keep is None:
            self.add_on_host("count", label.numel())
        else:
            self.state["count"].add_(keep.sum())

    def compute(self, totals: Totals) -> float | list[float]:
        """One share, or one per ``k``; 0.0 where nothing was counted."""
        count = float(totals["count"])
        shares = [float(correct) / count if count else 0.0 for correct in totals["correct"]]
        return shares[0] if len(shares) == 1 else shares


def accuracy(input: Tensor, label: Tensor, k: int = 1) -> Tensor:
    """Mean top-``k`` hit of a batch, as a 0-d float32 tensor on the input's device.

    Args:
        input: Scores ``[N, C]``.
        label: Classes, ``[N]`` or ``[N, 1]``.
        k: How many of the highest scores may hit. More than ``C`` counts as ``C``.

    Raises:
        ValueError: A shape or a ``k`` that is not accepted.

    Example:
        >>> accuracy(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([[1], [1]]))
        tensor(0.5000)
    """
    if k < 1:
        raise ValueError(f"accuracy: k={k!r}; accepted: a positive int")
    if input.ndim != 2 or label.shape not in (input.shape[:1], (input.shape[0], 1)):
        raise ValueError(
            f"accuracy: the input has the shape {list(input.shape)} and the label {list(label.shape)}; "
            "accepted: [N, C] with [N] or [N, 1]"
        )
    best = input.topk(min(k, input.shape[1]), dim=1).indices
    return (best == label.reshape(-1, 1)).any(1).to(torch.float32).mean()
