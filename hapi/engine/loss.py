"""What the loss of a batch is, and how much it weighs.

To give the same gradient however a global batch is cut over micro-batches and ranks, a loss has to say what it is
a mean *of*. A term is one of

- **rows**: a mean over rows (most losses). It weighs its number of rows, which the host knows.
- **sum**: ``reduction="sum"``. Parts are added, never divided; logs show the mean per row.
- **counted**: a weighted mean whose denominator lies in the labels: sample weights, class weights, an
  ``ignore_index``, one label per token or pixel. It weighs that denominator, a tensor on the device.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hapi.data.batch import Batch
from hapi.data.trees import describe
from hapi.errors import add_note

__all__ = ["LossFunction", "Term"]

Count = int | Tensor
Labels = tuple[Tensor, ...] | dict[str, Tensor]


class Term:
    """One named loss.

    Args:
        name: Its name in logs.
        function: ``function(*outputs, *labels)`` -> a scalar, or one value per sample.
        scale: Its factor in the total.
        place: ``(index, count)`` among several losses. One of several gets the output and the label of its name
            or of its place where there are as many, and all of them where there is one.
    """

    def __init__(
        self, name: str, function: Callable[..., Any], scale: float = 1.0, place: tuple[int, int] = (0, 1)
    ) -> None:
        self.name = name
        self.function = function
        self.scale = scale
        self.place = place
        reduction = getattr(function, "reduction", None)
        self.is_sum = reduction == "sum"
        self.classifies = isinstance(function, (nn.CrossEntropyLoss, nn.NLLLoss))
        self._ignores_nothing = (
            self.classifies and not self.is_sum and function.ignore_index == -100 and function.weight is None  # type: ignore[attr-defined]
        )
        self.elementwise = isinstance(function, _ELEMENTWISE)
        self._summed = self._each = function
        if isinstance(function, nn.Module) and isinstance(reduction, str):
            self._summed, self._each = _reducing(function, "sum"), _reducing(function, "none")
        self.keywords = _parameter_names(function)

    def counted(self, labels: Labels, weight: Tensor | None) -> bool:
        """Whether this term's weight must be counted on the device. Looks at shapes and dtypes only.

        A class label per row with nothing set to be ignored counts as one, so the host knows the total.
        """
        if weight is not None:
            return not self.is_sum
        if not self.classifies or self.is_sum:
            return False
        target = self._target(labels)
        if target is None or target.is_floating_point():
            return False
        function: Any = self.function
        one_per_row = target.ndim == 1 or (target.ndim == 2 and target.shape[1] == 1)
        return not one_per_row or function.ignore_index != -100 or function.weight is not None

    def mean(self, outputs: Any, labels: Labels, weight: Tensor | None, rows: int) -> tuple[Tensor, Count]:
        """The loss as the user defined it, and its weight."""
        if weight is not None:
            total, count = self.total(outputs, labels, weight, rows)
            return (total, rows) if self.is_sum else (total / count, count)
        value = self.checked(self._call(self.function, outputs, labels), rows)
        return value, self.count(labels, None, rows)

    def total(self, outputs: Any, labels: Labels, weight: Tensor | None, rows: int) -> tuple[Tensor, Count]:
        """The sum that, divided by the count, is the mean. Parts of a batch can be added up in this form."""
        if weight is not None:
            return self._weighted(outputs, labels, weight, rows)
        if self.counted(labels, None):
            return self._call(self._summed, outputs, labels), self.count(labels, None, rows)
        value, count = self.mean(outputs, labels, None, rows)
        return (value if self.is_sum else value * count), count

    def count(self, labels: Labels, weight: Tensor | None, rows: int) -> Count:
        """This term's weight, from the labels alone."""
        if not self.counted(labels, weight):
            return rows
        units = self._units(labels)
        if weight is None:
            assert units is not None
            return units.sum()
        if units is None:
            return weight.sum()
        return (units * _like_rows(weight, units)).sum()

    def _weighted(self, outputs: Any, labels: Labels, weight: Tensor, rows: int) -> tuple[Tensor, Count]:
        if weight.shape[:1] != (rows,) or weight.numel() != rows:
            raise ValueError(f"sample weights have the shape {list(weight.shape)}; accepted: [{rows}]")
        each = self._call(self._each, outputs, labels)
        if each.shape[:1] != (rows,):
            raise ValueError(
                f"sample weights need a loss with one value per sample, but {self._label()} gave the shape "
                f"{list(each.shape)} for {rows} samples. Use reduction='none'"
            )
        if self._units(labels) is None:
            each = each.reshape(rows, -1)
            each = each.sum(1) if self.is_sum else each.mean(1)
        total = (each * _like_rows(weight, each)).sum()
        return total, self.count(labels, weight, rows)

    def _units(self, labels: Labels) -> Tensor | None:
        """For class labels: what each label counts (0 where ignored, else its class weight)."""
        target = self._target(labels) if self.classifies else None
        if target is None or target.is_floating_point():
            return None
        if target.ndim == 2 and target.shape[1] == 1:
            target = target.squeeze(1)
        function: Any = self.function
        valid: Tensor = target != function.ignore_index
        if function.weight is None:
            return valid.to(torch.float32)
        chosen: Tensor = function.weight[torch.where(valid, target, 0).long()] * valid
        return chosen

    def _target(self, labels: Labels) -> Tensor | None:
        chosen = self._labels(labels)
        values = tuple(chosen.values()) if isinstance(chosen, dict) else chosen
        return values[0] if values else None

    def _labels(self, labels: Labels) -> Labels:
        index, count = self.place
        if count == 1:
            return labels
        if isinstance(labels, dict):
            if self.name in labels:
                return (labels[self.name],)
            labels = tuple(labels.values()) if len(labels) == count else labels
        if len(labels) == count and isinstance(labels, tuple):
            return (labels[index],)
        if len(labels) > 1 and isinstance(labels, tuple):
            raise ValueError(f"there are {count} losses, but {len(labels)} labels; accepted: {count} or 1")
        return labels

    def _outputs(self, outputs: Any) -> tuple[Any, ...]:
        index, count = self.place
        if count > 1:
            if isinstance(outputs, Mapping) and self.name in outputs:
                return (outputs[self.name],)
            if isinstance(outputs, tuple):
                if len(outputs) == count:
                    return (outputs[index],)
                if len(outputs) > 1:
                    raise ValueError(f"there are {count} losses, but {len(outputs)} outputs; accepted: {count} or 1")
        return outputs if isinstance(outputs, tuple) else (outputs,)

    def _call(self, function: Callable[..., Any], outputs: Any, labels: Labels) -> Tensor:
        mine, given = self._labels(labels), self._outputs(outputs)
        named: dict[str, Tensor] = {}
        chosen: tuple[Tensor, ...] = ()
        if isinstance(mine, tuple):
            chosen = mine
        elif len(mine) > 1 and any(name in self.keywords for name in mine):
            named = mine
        else:
            chosen = tuple(mine.values())
        if len(chosen) == 1 and isinstance(given[0], Tensor):
            if self.classifies:
                chosen = (class_labels(given[0], chosen[0]),)
            elif self.elementwise:
                chosen = (self._alike(given[0], chosen[0]),)
        try:
            value = function(*given, *chosen, **named)
        except Exception as exc:
            self.explain(exc, given, chosen, named)
            raise
        if not isinstance(value, Tensor):
            raise TypeError(f"the loss {self._label()} gave {describe(value)}; accepted: a tensor")
        return value

    def _alike(self, output: Tensor, target: Tensor) -> Tensor:
        """For an elementwise loss: labels in the output's kind of number; broadcasting is nearly always a mistake."""
        if output.shape != target.shape:
            raise ValueError(
                f"the loss {self._label()} compares element by element, but the output is {describe(output)} and the "
                f"label {describe(target)}; accepted: equal shapes"
            )
        return target if target.is_floating_point() else target.to(output.dtype)

    def one_per_row(self, output: Tensor, labels: tuple[Tensor, ...]) -> bool:
        """For a classification loss: whether every row has one plain label in the form that torch wants."""
        return (
            self._ignores_nothing
            and len(labels) == 1
            and labels[0].dtype is torch.int64
            and labels[0].ndim == 1
            and output.ndim == 2
        )

    def checked(self, value: Any, rows: int) -> Tensor:
        """A loss's value as a scalar tensor: the mean of one value per sample."""
        if type(value) is Tensor and value.ndim == 0:
            return value
        if not isinstance(value, Tensor):
            raise TypeError(f"the loss {self._label()} gave {describe(value)}; accepted: a tensor")
        return self._per_row(value, rows).mean() if value.ndim else value

    def explain(self, exc: Exception, outputs: Any, labels: Any, named: Any) -> None:
        """Say which loss failed, and on what."""
        targets = labels if isinstance(labels, tuple) else ()
        hint = ""
        if self.classifies and any(t.dtype not in _INDEX_TYPES for t in targets):
            hint = ". Class labels are integers: use .long() on them"
        add_note(
            exc,
            f"while computing the loss {self._label()} of outputs {describe(outputs)} "
            f"and labels {describe(named or labels)}"
            + ("" if labels or named else ": the batch has no labels left for it; give both together, as fit((x, y))")
            + hint,
        )

    def _per_row(self, value: Tensor, rows: int) -> Tensor:
        if value.shape[0] != rows:
            raise ValueError(
                f"the loss {self._label()} gave the shape {list(value.shape)}; accepted: a scalar, or one value "
                f"for each of the {rows} samples"
            )
        return value

    def _label(self) -> str:
        kind = getattr(self.function, "__name__", type(self.function).__name__)
        return kind if self.name == "loss" else f"{self.name!r} ({kind})"


class LossFunction:
    """All losses of a model.

    Args:
        terms: At least one. With one, logs have ``loss``; with several, ``loss`` is their scaled sum and each
            is logged under its own name.
        class_weight: Weight per class ``[classes]``, looked up by the integer label of each row.
    """

    def __init__(self, terms: Sequence[Term], class_weight: Tensor | None = None) -> None:
        self.terms = tuple(terms)
        self.class_weight = class_weight
        self._plain = terms[0] if len(terms) == 1 and class_weight is None else None
        self.names = ("loss",) if len(terms) == 1 else ("loss", *(term.name for term in terms))
        self.scales = tuple(term.scale for term in terms)

    def to(self, device: torch.device) -> None:
        """Move class weights and loss modules."""
        if self.class_weight is not None:
            self.class_weight = self.class_weight.to(device)
        for term in self.terms:
            for function in (term.function, term._summed, term._each):
                if isinstance(function, nn.Module):
                    function.to(device)

    def weight(self, batch: Batch) -> Tensor | None:
        """The batch's sample weights times the class weights of its labels."""
        if self.class_weight is None:
            return batch.weight
        labels = batch.labels
        target = next(iter(labels.values() if isinstance(labels, dict) else labels), None)
        if target is None or target.is_floating_point() or target.numel() != batch.rows:
            found = "none" if target is None else describe(target)
            raise ValueError(
                f"class_weight needs one integer label per sample; the label is {found}. "
                "For other shapes use CrossEntropyLoss(weight=...)"
            )
        try:
            by_class = self.class_weight[target.reshape(-1).long()]
        except IndexError:
            raise ValueError(
                f"class_weight has weights for the classes 0 to {len(self.class_weight) - 1}, but a label is "
                f"{int(target.max())}; give one for every class"
            ) from None
        return by_class if batch.weight is None else by_class * batch.weight.reshape(-1)

    def counted(self, batch: Batch) -> bool:
        """Whether some term's weight must be counted on the device."""
        weighted = self.class_weight is not None or batch.weight is not None
        stand_in = torch.empty(0) if weighted else None
        return any(term.counted(batch.labels, stand_in) for term in self.terms)

    def counts(self, batch: Batch) -> list[Count]:
        """The weight of each term, from the labels alone."""
        weight = self.weight(batch)
        return [term.count(batch.labels, weight, batch.rows) for term in self.terms]

    def means(self, outputs: Any, batch: Batch) -> list[tuple[Tensor, Count]]:
        """Each term as the user defined it, with its weight."""
        plain = self._plain
        if plain is not None and type(outputs) is Tensor and batch.weight is None and type(batch.labels) is tuple:
            labels = batch.labels
            if plain.one_per_row(outputs, labels) if plain.classifies else not plain.elementwise:
                try:
                    value = plain.function(outputs, *labels)
                except Exception as exc:
                    plain.explain(exc, (outputs,), labels, {})
                    raise
                return [(plain.checked(value, batch.rows), batch.rows)]
        weight = self.weight(batch)
        return [term.mean(outputs, batch.labels, weight, batch.rows) for term in self.terms]

    def totals(self, outputs: Any, batch: Batch) -> list[tuple[Tensor, Count]]:
        """Each term as a sum, with its weight."""
        weight = self.weight(batch)
        return [term.total(outputs, batch.labels, weight, batch.rows) for term in self.terms]


def class_labels(output: Tensor, target: Tensor) -> Tensor:
    """Integer class labels as torch's cross-entropy wants them: int64, without a trailing axis of one.

    Labels of shape [N] and [N, 1] both work, as do int32 and uint8 labels.
    """
    if target.dtype in _INDEX_TYPES:
        if target.ndim == output.ndim and target.shape[1:2] == (1,) and output.ndim > 1:
            target = target.squeeze(1)
        return target if target.dtype is torch.int64 else target.long()
    return target


_ELEMENTWISE = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss)
_INDEX_TYPES = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})


def normalize_outputs(outputs: Any) -> Any:
    """A tensor or a mapping as it is; nested lists and tuples as one flat tuple."""
    if type(outputs) is Tensor or isinstance(outputs, (Tensor, Mapping)):
        return outputs
    if isinstance(outputs, (tuple, list)):
        flat: list[Any] = []
        for item in outputs:
            item = normalize_outputs(item)
            flat.extend(item if isinstance(item, tuple) else (item,))
        return tuple(flat)
    raise TypeError(
        f"the network's forward gave {describe(outputs)}; accepted: a tensor, a tuple, list or dict of tensors"
    )


def _reducing(function: Any, reduction: str) -> Any:
    """The same loss module, buffers shared, with another reduction."""
    twin = copy.copy(function)
    twin.reduction = reduction
    return twin


def _like_rows(weight: Tensor, each: Tensor) -> Tensor:
    return weight.reshape(-1, *[1] * (each.ndim - 1))


def _parameter_names(function: Callable[..., Any]) -> frozenset[str]:
    target = function.forward if isinstance(function, nn.Module) else function
    try:
        return frozenset(inspect.signature(target).parameters)
    except (TypeError, ValueError):  # a builtin without a signature
        return frozenset()
