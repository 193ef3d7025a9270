"""A raw batch -> forward arguments, labels and weights, on the device."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from hapi.data.trees import describe

__all__ = ["Batch", "Fields", "InputSpec", "Signature", "Splitter"]


@dataclass(frozen=True)
class InputSpec:
    """What one input or label looks like.

    Args:
        shape: Its shape, the batch first; None or -1 where a dimension varies.
        dtype: A torch dtype or its name.
        name: Its key in dict batches and, for inputs, the parameter of ``forward``.

    Example:
        >>> InputSpec([None, 1, 28, 28], "float32", "image")
        InputSpec(shape=(None, 1, 28, 28), dtype=torch.float32, name='image')
    """

    shape: Sequence[int | None] = ()
    dtype: torch.dtype | str = torch.float32
    name: str | None = None

    def __post_init__(self) -> None:
        dtype = self.dtype
        if isinstance(dtype, str):
            dtype = getattr(torch, dtype.removeprefix("torch."), None)  # type: ignore[assignment]
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"InputSpec: dtype={self.dtype!r} is not a torch dtype")
        shape = tuple(None if size in (None, -1) else size for size in self.shape)
        if not all(size is None or (isinstance(size, int) and size > 0) for size in shape):
            raise ValueError(f"InputSpec: shape={self.shape!r}; accepted: positive ints, None or -1")
        object.__setattr__(self, "dtype", dtype)
        object.__setattr__(self, "shape", shape)


@dataclass(frozen=True)
class Fields:
    """What the user declared of the inputs or of the labels: how many, and their names where given."""

    count: int
    names: tuple[str | None, ...]
    specs: tuple[InputSpec | None, ...]

    @staticmethod
    def parse(given: Any, what: str) -> Fields | None:
        """From None, a count, an InputSpec, a name, or a sequence or dict of those."""
        if given is None:
            return None
        if isinstance(given, bool):
            raise TypeError(f"Model: {what}={given!r}; {_FIELDS_ACCEPTED}")
        if isinstance(given, int):
            if given < 0:
                raise ValueError(f"Model: {what}={given}; a count cannot be negative")
            return Fields(given, (None,) * given, (None,) * given)
        if isinstance(given, Mapping):
            items: list[Any] = [
                InputSpec(spec.shape, spec.dtype, str(name)) if isinstance(spec, InputSpec) else str(name)
                for name, spec in given.items()
            ]
        else:
            items = list(given) if isinstance(given, (list, tuple)) else [given]
        for item in items:
            if not isinstance(item, (InputSpec, str)):
                raise TypeError(f"Model: {what} holds {item!r}; {_FIELDS_ACCEPTED}")
        names = tuple(item if isinstance(item, str) else item.name for item in items)
        named = [name for name in names if name is not None]
        if len(set(named)) != len(named):
            raise ValueError(f"Model: {what} names one field twice: {named}")
        return Fields(len(items), names, tuple(i if isinstance(i, InputSpec) else None for i in items))


_FIELDS_ACCEPTED = "accepted: hapi.InputSpec, a name, a count, or a list or dict of specs or names"


@dataclass(frozen=True)
class Signature:
    """What ``network.forward`` takes.

    Attributes:
        required: Names of positional parameters without a default.
        positional: Names of all positional parameters.
        open_ended: Whether it takes ``*args``.
        keywords: Whether it takes ``**kwargs``.
        owner: The class, for messages.
    """

    required: tuple[str, ...]
    positional: tuple[str, ...]
    open_ended: bool
    keywords: bool
    owner: str
    names: frozenset[str]

    @staticmethod
    def of(network: nn.Module) -> Signature:
        """Read ``network.forward``; for a compiled module, the original's."""
        inner = getattr(network, "_orig_mod", network)
        required, positional, names = [], [], []
        open_ended = keywords = False
        for parameter in inspect.signature(inner.forward).parameters.values():
            if parameter.kind is parameter.VAR_POSITIONAL:
                open_ended = True
            elif parameter.kind is parameter.VAR_KEYWORD:
                keywords = True
            else:
                names.append(parameter.name)
                if parameter.kind is not parameter.KEYWORD_ONLY:
                    positional.append(parameter.name)
                    if parameter.default is parameter.empty:
                        required.append(parameter.name)
        return Signature(
            tuple(required), tuple(positional), open_ended, keywords, type(inner).__name__, frozenset(names)
        )

    def __str__(self) -> str:
        optional = [f"{name}=" for name in self.positional[len(self.required) :]]
        return f"{self.owner}.forward({', '.join([*self.required, *optional] + ['*args'] * self.open_ended)})"


class Batch(NamedTuple):
    """One batch, split and on the device.

    Attributes:
        args: Positional arguments of forward.
        kwargs: Keyword arguments of forward.
        labels: Label tensors in order, or by name.
        weight: Sample weights ``[rows]`` or None.
        rows: Rows on this rank.
    """

    args: tuple[Tensor, ...]
    kwargs: dict[str, Tensor]
    labels: tuple[Tensor, ...] | dict[str, Tensor]
    weight: Tensor | None
    rows: int


class Splitter:
    """Tells inputs and labels apart, and moves both to the device.

    Args:
        signature: Of the network.
        inputs: What the user declared of the inputs.
        labels: What the user declared of the labels.
        weight_field: Where the sample weights are: a position among the fields, or a key of a dict batch.
        device: Where to.
        float_dtype: Dtype of float64 *numpy* data: that of the network's parameters. Tensors are left alone.
        channels_last: Whether 4-d inputs become channels-last.

    Attributes:
        example: The first batch that was split; None before.
    """

    def __init__(
        self,
        signature: Signature,
        inputs: Fields | None,
        labels: Fields | None,
        weight_field: int | str | None,
        device: torch.device,
        float_dtype: torch.dtype,
        channels_last: bool = False,
    ) -> None:
        self.signature = signature
        self.inputs = inputs
        self.labels = labels
        self.weight_field = weight_field
        self.device = device
        self.float_dtype = float_dtype
        self.channels_last = channels_last
        self.example: Batch | None = None
        # One input, one label: the common case, decided once.
        self._pair = (
            (inputs.count == 1 if inputs else len(signature.required) <= 1 and not signature.open_ended)
            and bool(signature.positional)
            and (labels is None or labels.count == 1)
            and weight_field is None
            and not channels_last
        )

    def split(self, raw: Any, *, with_labels: bool = True) -> Batch:
        """The batch of ``raw``. ``with_labels=False`` (predict) leaves labels out where they are present.

        Raises:
            ValueError: Inputs and labels cannot be told apart; the message names the counts.
        """
        if self._pair and with_labels and type(raw) in _SEQUENCES and len(raw) == 2:
            x, y = raw
            device = self.device
            if type(x) is Tensor and type(y) is Tensor and x.device == y.device == device and x.ndim and y.ndim:
                batch = Batch((x,), {}, (y,), None, x.shape[0])
                if self.example is None:
                    self.example = batch
                return batch
        if isinstance(raw, Mapping):
            batch = self._by_name(raw)
        elif isinstance(raw, (tuple, list)) and raw and isinstance(raw[0], Mapping):
            batch = self._named_inputs(raw)
        else:
            batch = self._by_position(raw, with_labels)
        if self.example is None:
            self._check_labels(raw, batch)
            self.example = batch
        return batch if with_labels else batch._replace(labels=(), weight=None)

    def _check_labels(self, raw: Any, batch: Batch) -> None:
        labels = batch.labels.values() if isinstance(batch.labels, dict) else batch.labels
        if any(label.ndim == 0 for label in labels):
            raise ValueError(
                f"a label of the batch {describe(raw)} has no dimensions; the first must be the batch. A list is a "
                "list of batches: for samples give a Dataset, or arrays"
            )

    def join(self, inputs: Any, labels: Any) -> Batch:
        """A batch of inputs and labels given apart: each an array, a list of them, or a dict by name."""
        kwargs: dict[str, Tensor] = {}
        args: tuple[Tensor, ...] = ()
        if isinstance(inputs, Mapping):
            kwargs = {name: self.move_input(field) for name, field in inputs.items()}
        else:
            args = tuple(self.move_input(field) for field in _fields(inputs))
        moved: tuple[Tensor, ...] | dict[str, Tensor]
        if isinstance(labels, Mapping):
            moved = {name: self.move(field) for name, field in labels.items()}
        else:
            moved = tuple(self.move(field) for field in ([] if labels is None else _fields(labels)))
        return Batch(args, kwargs, moved, None, _rows(args or tuple(kwargs.values())))

    def empty(self, template: Any) -> Batch:
        """A batch without rows, cut from ``template`` or from the first batch that was split.

        Raises:
            ValueError: There is neither.
        """
        batch = self.example if template is None else self.split(template)
        if batch is None:
            raise ValueError("a rank without rows needs the form of a batch, but has not seen one")
        args = tuple(value[:0] for value in batch.args)
        return Batch(args, {name: value[:0] for name, value in batch.kwargs.items()}, (), None, 0)

    def _by_position(self, raw: Any, with_labels: bool) -> Batch:
        if isinstance(raw, (tuple, list)):
            fields: list[Any] = []
            for field in raw:
                if type(field) is Tensor:
                    fields.append(field)
                else:
                    _flatten(field, fields)
        else:
            fields = [raw]
        weight = None
        if self.weight_field is not None and with_labels:
            weight = self._take_weight(fields)
        count = self._input_count(len(fields), with_labels)
        args = tuple([self.move_input(field) for field in fields[:count]])
        labels = tuple([self.move(field) for field in fields[count:]]) if with_labels else ()
        return Batch(args, {}, labels, weight, _rows(args))

    def _take_weight(self, fields: list[Any]) -> Tensor:
        position = self.weight_field
        if isinstance(position, str):
            raise ValueError(f"sample_weight={position!r} is a key, but the batches are not dicts")
        if not -len(fields) <= (position or 0) < len(fields):
            raise ValueError(f"sample_weight={position}, but the batch has {len(fields)} fields")
        return self.move(fields.pop(int(position or 0)))

    def _input_count(self, count: int, with_labels: bool) -> int:
        """How many of ``count`` fields go to forward."""
        takes, inputs, labels = self.signature, self.inputs, self.labels
        if inputs is not None:
            wanted = inputs.count
            if count < wanted or (with_labels and labels is not None and count != wanted + labels.count):
                raise ValueError(self._counts(count))
            return wanted
        least, most = len(takes.required), len(takes.positional)
        if takes.open_ended:
            most = count
        if labels is not None:
            wanted = count - labels.count
            if not with_labels and wanted < max(least, 1):
                wanted = min(count, most)  # predict on data without labels
        elif takes.open_ended and not takes.required:
            if with_labels or count > 1:
                raise ValueError(self._counts(count))
            wanted = count
        else:
            wanted = max(least, 1)
        if not least <= wanted <= most or wanted > count:
            raise ValueError(self._counts(count))
        return wanted

    def _counts(self, count: int) -> str:
        declared = ", ".join(
            f"{what} declared: {fields.count}"
            for what, fields in (("inputs", self.inputs), ("labels", self.labels))
            if fields is not None
        )
        return (
            f"cannot tell inputs from labels: the batch has {count} field{'s' * (count != 1)}, {self.signature} "
            f"needs {len(self.signature.required)}{'; ' + declared if declared else ''}. "
            "Say how many there are with Model(net, inputs=..., labels=...)"
        )

    def _by_name(self, raw: Mapping[str, Any]) -> Batch:
        takes, fields = self.signature, dict(raw)
        weight = None
        if self.weight_field is not None:
            if self.weight_field not in fields:
                raise ValueError(f"sample_weight={self.weight_field!r} is not among the batch's keys {list(raw)}")
            weight = self.move(fields.pop(str(self.weight_field)))
        label_names = self._declared_names(self.labels, fields, "labels")
        input_names = self._declared_names(self.inputs, fields, "inputs")
        if input_names is None:
            known = [name for name in fields if name in takes.names]
            if takes.keywords and label_names is not None:
                known = [name for name in fields if name not in label_names]
            input_names = [name for name in known if name not in (label_names or ())]
        if label_names is None:
            label_names = [name for name in fields if name not in input_names]
        missing = [name for name in takes.required if name not in input_names]
        by_keyword = takes.keywords or all(name in takes.names for name in input_names)
        if not input_names or (by_keyword and missing and self.inputs is None):
            raise ValueError(
                f"the batch has the keys {list(raw)}, but {takes} needs {list(takes.required)}. "
                "Name them: Model(net, inputs=[...], labels=[...])"
            )
        moved = {name: self.move_input(fields[name]) for name in input_names}
        labels = {name: self.move(fields[name]) for name in label_names if name in fields}
        if by_keyword:
            return Batch((), moved, labels, weight, _rows(tuple(moved.values())))
        args = tuple(moved.values())
        return Batch(args, {}, labels, weight, _rows(args))

    @staticmethod
    def _declared_names(declared: Fields | None, raw: Mapping[str, Any], what: str) -> list[str] | None:
        if declared is None:
            return None
        if None in declared.names:
            raise ValueError(f"batches are dicts, so Model's {what} must have names; the keys are {list(raw)}")
        names = [name for name in declared.names if name is not None]
        missing = [name for name in names if name not in raw]
        if missing and what == "inputs":
            raise ValueError(f"the batch has no {missing}; its keys are {list(raw)}")
        return names

    def _named_inputs(self, raw: Sequence[Any]) -> Batch:
        """``({"a": x1, "b": x2}, y, ...)``: the first dict goes to forward by name, the rest are labels."""
        inputs = {name: self.move_input(field) for name, field in raw[0].items()}
        weight = None
        rest = list(raw[1:])
        if isinstance(self.weight_field, int):
            if not rest:
                raise ValueError("sample_weight is set, but the batch has only inputs")
            weight = self.move(rest.pop(self.weight_field if self.weight_field < 0 else self.weight_field - 1))
        if len(rest) == 1 and isinstance(rest[0], Mapping):
            named = {name: self.move(field) for name, field in rest[0].items()}
            return Batch((), inputs, named, weight, _rows(tuple(inputs.values())))
        fields: list[Any] = []
        _flatten(rest, fields)
        labels = tuple(self.move(field) for field in fields)
        return Batch((), inputs, labels, weight, _rows(tuple(inputs.values())))

    def move(self, field: Any) -> Tensor:
        """A label or weight, as a tensor on the device."""
        tensor: Tensor = field if type(field) is Tensor else self._tensor(field)
        device = self.device
        # A pinned source makes the copy asynchronous; for others the flag changes nothing.
        return tensor if tensor.device == device else tensor.to(device, non_blocking=True)

    def move_input(self, field: Any) -> Tensor:
        """An input, as a tensor on the device."""
        tensor = self.move(field)
        if self.channels_last and tensor.ndim == 4:
            return tensor.contiguous(memory_format=torch.channels_last)
        return tensor

    def _tensor(self, field: Any) -> Tensor:
        if isinstance(field, Tensor):
            return field
        if isinstance(field, (np.ndarray, np.generic, int, float)):
            if isinstance(field, np.ndarray) and field.dtype == object:
                raise TypeError("a numpy array of dtype object cannot become a tensor")
            tensor = torch.as_tensor(field)
            return tensor.to(self.float_dtype) if tensor.dtype == torch.float64 else tensor
        raise TypeError(
            f"a batch field is {describe(field)}; accepted: tensors and numpy arrays, in tuples, lists and dicts"
        )


_SEQUENCES = (tuple, list)


def _flatten(field: Any, out: list[Any]) -> None:
    if isinstance(field, (tuple, list)):
        for item in field:
            _flatten(item, out)
    elif isinstance(field, Mapping):
        for key in sorted(field):
            _flatten(field[key], out)
    else:
        out.append(field)


def _fields(given: Any) -> list[Any]:
    fields: list[Any] = []
    _flatten(given, fields)
    return fields


def _rows(inputs: tuple[Tensor, ...]) -> int:
    if not inputs:
        raise ValueError("the batch is empty: it has no fields")
    if inputs[0].ndim == 0:
        raise ValueError("the first input of the batch has no dimensions; the first must be the batch")
    return inputs[0].shape[0]
