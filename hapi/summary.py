"""``summary``: a table of a network's layers. ``flops``: its multiply-adds. Both leave the net as it was."""

from __future__ import annotations

import copy
import operator
import random
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from hapi.errors import add_note, suggest

__all__ = ["flops", "summary"]

CustomOp = Callable[[Any, tuple[Any, ...], Any], int]

_SIZES = (
    "a shape such as (1, 1, 28, 28), a list of shapes (several inputs), a dict of shapes (inputs by name) or "
    "hapi.InputSpec"
)


def summary(
    net: nn.Module,
    input_size: Any = None,
    dtypes: Any = None,
    input: Any = None,
    *,
    depth: int | None = None,
    verbose: bool = True,
    **kwargs: Any,
) -> dict[str, int]:
    """Run ``net`` once and print a table of its layers: input shapes, output shape, parameters.

    A row is a call of a layer, in the order in which the calls end; ``nn.Sequential`` and the root have none.
    A row counts the layer's own parameters and those of sub-layers without a row of their own. A parameter is
    counted in the first row that has it, so the column and the line "Params outside the rows" add up to the
    total; where nothing is left to count, the row says ``(shared)``.

    The network runs in evaluation mode without gradients and is left as it was: training flags, gradients and
    the global random generators. One with uninitialised (lazy) parameters is run as a copy and stays lazy.

    Args:
        net: The network, on any device.
        input_size: The shape of the input, batch first; a list of shapes for several positional inputs (a
            list of shapes inside it is one input that is a list of tensors); a dict of shapes for inputs by
            name. An object with ``shape`` and ``dtype``, such as :class:`hapi.InputSpec`, stands for a shape.
            None or -1 is accepted as the batch dimension and means 1. Floating-point inputs are random from 0
            to 1, others are 0.
        dtypes: The dtype of every input, or a list with one per shape: torch dtypes or their names. Default:
            the spec's, else that of the network's first floating-point parameter, else torch's default.
        input: The inputs themselves, instead of ``input_size``: a tensor, a list or tuple of positional
            inputs, or a dict of inputs by name. They are copied to the network's device.
        depth: How many levels of nested layers get rows; the last counts all that is inside. Default: all.
        verbose: Whether to print the table.
        **kwargs: More keyword arguments of ``net.forward``.

    Returns:
        ``total_params``, ``trainable_params``, ``non_trainable_params`` and ``buffer_elements`` count
        elements, each tensor once; ``input_bytes``, ``forward_backward_bytes`` (twice the rows' outputs, each
        tensor once), ``param_bytes``, ``buffer_bytes`` and ``total_bytes`` use the real element sizes.

    Raises:
        TypeError: ``net`` is not a module, or a shape holds something that is not an int.
        ValueError: Not exactly one of ``input_size`` and ``input`` is given, or one is not usable.

    Example:
        >>> summary(nn.Linear(4, 2), (1, 4), verbose=False)["total_params"]
        10
    """
    _check_net("summary", net)
    if (input_size is None) == (input is None):
        raise ValueError(
            f"summary: give input_size ({_SIZES}) or input (the tensors), "
            f"{'not both' if input is not None else 'one of them is needed'}"
        )
    if input is not None and dtypes is not None:
        raise ValueError("summary: dtypes goes with input_size; the tensors of input have their own")
    if depth is not None and (isinstance(depth, bool) or not isinstance(depth, int) or depth < 1):
        raise ValueError(f"summary: depth={depth!r}; accepted: None (all levels) or an int from 1")
    if input is None:
        args, named = _inputs_from_sizes("summary", net, input_size, dtypes)
    else:
        args, named = _inputs_from_values("summary", net, input)
    if clash := sorted(named.keys() & kwargs.keys()):
        raise ValueError(f"summary: {clash} given twice, in the inputs and as keyword arguments")
    device = _device_of(net)
    named |= {name: _to_device(value, device) for name, value in kwargs.items()}
    input_bytes = sum(tensor.nbytes for tensor in _tensors([args, named]))

    net, recorder = _run("summary", net, args, named, depth=depth)
    params = [p for p in net.parameters() if not is_lazy(p)]
    buffers = [b for b in net.buffers() if not is_lazy(b)]
    trainable = sum(p.numel() for p in params if p.requires_grad)
    total = sum(p.numel() for p in params)
    result = {
        "total_params": total,
        "trainable_params": trainable,
        "non_trainable_params": total - trainable,
        "buffer_elements": sum(b.numel() for b in buffers),
        "input_bytes": input_bytes,
        "forward_backward_bytes": 2 * recorder.output_bytes,
        "param_bytes": sum(p.nbytes for p in params),
        "buffer_bytes": sum(b.nbytes for b in buffers),
    }
    result["total_bytes"] = sum(size for name, size in result.items() if name.endswith("_bytes"))
    if verbose:
        column, outside = _param_column(net, recorder.rows)
        uninitialised = sum(is_lazy(p) for p in net.parameters())
        rows = [(r.label, r.inputs, r.outputs, text) for r, text in zip(recorder.rows, column, strict=True)]
        headers = [("Layer (type)", 15), ("Input Shape", 20), ("Output Shape", 20), ("Param #", 15)]
        _show(_table(headers, rows, _summary_footer(result, outside, uninitialised)))
    return result


def flops(
    net: nn.Module,
    input_size: Any,
    custom_ops: Mapping[type[nn.Module], CustomOp] | None = None,
    print_detail: bool = False,
    *,
    dtypes: Any = None,
    verbose: bool = True,
) -> int:
    """Count the multiply-adds of one forward pass.

    The operators that run are counted, not the layers, by ``torch.utils.flop_counter.FlopCounterMode``:
    matrix products, convolutions, recurrent layers and attention, in layers or called as functions. A
    multiply-add is 1, as in the reference (torch counts it as 2); those with zero padding or behind an
    attention mask count. Biases, activations, normalisation, pooling and other elementwise work do not, nor
    do quantised kernels. The reference counts the bias of a convolution, one per output element, and has
    formulas for some layers only.

    Args:
        net: The network; it is run once and left as it was, as by :func:`summary`.
        input_size: As for :func:`summary`. The count is for the batch size in it.
        custom_ops: For a module class (and its subclasses), a function ``fn(module, inputs, output)`` that
            returns the multiply-adds of one call; ``inputs`` is the tuple of positional inputs. It replaces
            what was counted inside the module.
        print_detail: Whether to print a table of the layers; a row has what no row inside it has.
        dtypes: As for :func:`summary`.
        verbose: Whether to print the line with the totals.

    Returns:
        The multiply-adds.

    Raises:
        TypeError: ``net`` is not a module, or ``custom_ops`` is not as described.
        ValueError: ``input_size`` is not usable.

    Example:
        >>> flops(nn.Linear(4, 2), (3, 4), verbose=False)
        24
    """
    _check_net("flops", net)
    if input_size is None:
        raise ValueError(f"flops: input_size is needed: {_SIZES}")
    custom_ops = dict(custom_ops or {})
    for cls, fn in custom_ops.items():
        if not (isinstance(cls, type) and issubclass(cls, nn.Module) and callable(fn)):
            raise TypeError(f"flops: custom_ops maps a module class to a function; given {cls!r}: {fn!r}")
    args, named = _inputs_from_sizes("flops", net, input_size, dtypes)
    # Costs an import of torch internals that a training script never needs.
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False, custom_mapping=_formulas()) as counter:
        net, recorder = _run(
            "flops", net, args, named, custom_ops=custom_ops, counted=lambda: counter.get_total_flops() // 2
        )
    total = recorder.multiply_adds
    if print_detail:
        column, outside = _param_column(net, recorder.rows)
        rows = [
            (r.label, r.inputs, r.outputs, text, f"{r.multiply_adds:,}")
            for r, text in zip(recorder.rows, column, strict=True)
        ]
        elsewhere = total - sum(r.multiply_adds for r in recorder.rows)
        footer = [f"Outside the rows: {outside:,} params, {elsewhere:,} flops", "-"]
        headers = [
            ("Layer (type)", 15),
            ("Input Shape", 20),
            ("Output Shape", 20),
            ("Params", 15),
            ("Flops", 15),
        ]
        _show(_table(headers, rows, footer))
    if verbose:
        params = sum(p.numel() for p in net.parameters() if not is_lazy(p))
        _show(f"Total Flops: {total}     Total Params: {params}")
    return total


# ------------------------------------------------------------------ inputs


@dataclass(frozen=True)
class _Spec:
    shape: tuple[int, ...]
    dtype: torch.dtype | None


def _check_net(where: str, net: Any) -> None:
    if not isinstance(net, nn.Module):
        raise TypeError(f"{where}: net must be a torch.nn.Module, not {type(net).__name__}")


def _tensors_of(net: nn.Module) -> Iterator[torch.Tensor]:
    yield from net.parameters()
    yield from net.buffers()


def _device_of(net: nn.Module) -> torch.device:
    return next((tensor.device for tensor in _tensors_of(net)), torch.device("cpu"))


def _inputs_from_sizes(where: str, net: nn.Module, input_size: Any, dtypes: Any) -> tuple[list[Any], dict[str, Any]]:
    """Positional and named inputs of the given shapes."""
    specs: list[_Spec] = []

    def parse(size: Any) -> int | list[Any]:
        """The position of a spec, or a list (an input that is a list of tensors)."""
        if isinstance(size, (list, tuple)) and size and not _is_single(size):
            return [parse(child) for child in size]
        specs.append(_parse_spec(where, size))
        return len(specs) - 1

    positional: list[Any] = []
    named: dict[str, Any] = {}
    if isinstance(input_size, Mapping):
        _check_names(where, "input_size", input_size)
        named = {name: parse(size) for name, size in input_size.items()}
    elif isinstance(input_size, (list, tuple)) and not _is_single(input_size):
        positional = [parse(size) for size in input_size]
    else:
        positional = [parse(input_size)]
    if not specs:
        raise ValueError(f"{where}: input_size={input_size!r} is empty; accepted: {_SIZES}")

    if not isinstance(dtypes, (list, tuple)):
        dtypes = [dtypes] * len(specs)
    elif len(dtypes) != len(specs):
        raise ValueError(f"{where}: {len(dtypes)} dtypes for {len(specs)} shapes; give one, or one per shape")
    default = next((p.dtype for p in net.parameters() if p.dtype.is_floating_point), torch.get_default_dtype())
    device, generator = _device_of(net), torch.Generator().manual_seed(0)
    made = []
    for spec, given in zip(specs, dtypes, strict=True):
        dtype = spec.dtype or default if given is None else _parse_dtype(where, given)
        made.append(_make_tensor(spec.shape, dtype, generator).to(device))

    def fill(node: int | list[Any]) -> Any:
        return made[node] if isinstance(node, int) else [fill(child) for child in node]

    return [fill(node) for node in positional], {name: fill(node) for name, node in named.items()}


def _inputs_from_values(where: str, net: nn.Module, values: Any) -> tuple[list[Any], dict[str, Any]]:
    """Positional and named inputs, as copies: a layer that works in place must not change the caller's."""
    device = _device_of(net)
    if isinstance(values, Mapping):
        _check_names(where, "input", values)
        return [], {name: _to_device(value, device) for name, value in values.items()}
    # A named tuple, such as a PackedSequence, is one input.
    several = isinstance(values, (list, tuple)) and not hasattr(values, "_fields")
    return [_to_device(value, device) for value in (values if several else [values])], {}


def _check_names(where: str, what: str, given: Mapping[Any, Any]) -> None:
    if not all(isinstance(name, str) for name in given):
        raise ValueError(
            f"{where}: {what} is a dict, so its keys are names of forward's arguments, not {list(given)!r}; "
            "put the dict in a tuple to give it as one positional input"
        )


def _is_spec(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, np.generic)


def _is_single(value: Any) -> bool:
    """Whether it describes one tensor: a spec, a shape or an int, not a list of those."""
    if isinstance(value, (list, tuple)) and not _is_spec(value):
        return bool(value) and not any(isinstance(v, (list, tuple, Mapping)) or _is_spec(v) for v in value)
    return not isinstance(value, Mapping)


def _parse_spec(where: str, size: Any) -> _Spec:
    if _is_spec(size):
        dtype = None if size.dtype is None else _parse_dtype(where, size.dtype)
        return _Spec(_parse_shape(where, tuple(size.shape)), dtype)
    return _Spec(_parse_shape(where, tuple(size) if isinstance(size, (list, tuple)) else (size,)), None)


def _parse_shape(where: str, shape: tuple[Any, ...]) -> tuple[int, ...]:
    sizes = []
    for position, size in enumerate(shape):
        if size is None:
            size = -1
        if isinstance(size, bool) or not hasattr(size, "__index__"):
            raise TypeError(f"{where}: {size!r} in input_size is not an int; accepted: {_SIZES}")
        size = operator.index(size)
        if size == -1 and position > 0:
            raise ValueError(
                f"{where}: dimension {position} of the shape {shape} is open; only the batch dimension, the "
                "first, may be None or -1: give a number"
            )
        if size == 0 or size < -1:
            raise ValueError(f"{where}: dimension {position} of the shape {shape} must be positive")
        sizes.append(1 if size == -1 else size)
    return tuple(sizes)


def _parse_dtype(where: str, given: Any) -> torch.dtype:
    if isinstance(given, torch.dtype):
        return given
    try:
        name = given.removeprefix("torch.") if isinstance(given, str) else np.dtype(given).name
    except TypeError:
        name = repr(given)
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        known = [n for n in dir(torch) if isinstance(getattr(torch, n), torch.dtype)]
        raise ValueError(f"{where}: {given!r} is not a torch dtype{suggest(name, known)}")
    return dtype


def _make_tensor(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    if dtype.is_complex:
        return torch.rand(shape, dtype=torch.complex64, generator=generator).to(dtype)
    if dtype.is_floating_point:  # drawn in float32, since not every type can be drawn
        return torch.rand(shape, dtype=torch.float32, generator=generator).to(dtype)
    return torch.zeros(shape, dtype=dtype)


def _to_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if isinstance(value, torch.Tensor):
        return value.detach().to(device, copy=True)
    if isinstance(value, Mapping):
        return {key: _to_device(child, device) for key, child in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(_to_device(child, device) for child in value)
    return value.to(device) if hasattr(value, "to") else value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for child in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(child)


def _structure(value: Any, leaf: Callable[[torch.Tensor], Any]) -> Any:
    """``leaf`` of every tensor, in the lists and dicts of ``value``; what holds no tensor is left out."""
    if isinstance(value, torch.Tensor):
        return leaf(value)
    if isinstance(value, Mapping):
        return {k: _structure(v, leaf) for k, v in value.items() if next(_tensors(v), None) is not None}
    if isinstance(value, (list, tuple)):
        return [_structure(v, leaf) for v in value if next(_tensors(v), None) is not None]
    return []


def _shape(tensor: torch.Tensor) -> list[int]:
    return list(tensor.shape)


def _shape_and_dtype(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{_shape(tensor)}"


# ------------------------------------------------------------------ the run


@dataclass
class _Row:
    module: nn.Module
    label: str
    inputs: str
    outputs: str
    multiply_adds: int


@dataclass
class _Frame:
    """A call in progress: the count when it began, and how much of it the rows inside have taken."""

    start: int
    custom: CustomOp | None  # what counts this call and all inside it
    in_rows: int = 0


class _Recorder:
    """Forward hooks that write a row per call.

    Args:
        net: The network.
        depth: Levels with rows.
        custom_ops: See :func:`flops`.
        counted: The multiply-adds until now.
    """

    def __init__(
        self,
        net: nn.Module,
        depth: int | None,
        custom_ops: Mapping[type[nn.Module], CustomOp],
        counted: Callable[[], int],
    ) -> None:
        self.rows: list[_Row] = []
        self.output_bytes = 0
        self._shown = _modules_with_rows(net, depth)
        self._custom_ops = custom_ops
        self._counted = counted
        self._correction = 0  # what custom_ops add to the counter
        self._frames: list[_Frame] = []
        self._labels: dict[nn.Module, str] = {}
        self._numbers: Counter[str] = Counter()
        self._outputs: dict[int, weakref.ref[torch.Tensor]] = {}

    @property
    def multiply_adds(self) -> int:
        """The total until now, with the custom counts in place of what they replace."""
        return self._counted() + self._correction

    @contextmanager
    def attached(self, net: nn.Module) -> Iterator[None]:
        """The hooks, for the duration of the block."""
        handles = []
        try:
            for module in net.modules():
                handles.append(module.register_forward_pre_hook(self._enter))
                handles.append(module.register_forward_hook(self._record, with_kwargs=True))
                # Also where the layer raises: the network may catch it and go on.
                handles.append(module.register_forward_hook(self._leave, always_call=True))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        custom = next((self._custom_ops[cls] for cls in type(module).__mro__ if cls in self._custom_ops), None)
        self._frames.append(_Frame(self.multiply_adds, custom))

    def _record(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        *outer, frame = self._frames
        used = self.multiply_adds - frame.start
        inside_custom = any(caller.custom for caller in outer)
        if frame.custom and not inside_custom:
            replaced = self._call_custom(frame.custom, module, args, output)
            self._correction += replaced - used
            used = replaced
        has_row = module in self._shown and not inside_custom
        if has_row:
            self._add_row(module, [*args, *kwargs.values()], output, used - frame.in_rows)
        if outer:
            outer[-1].in_rows += used if has_row else frame.in_rows

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._frames.pop()

    def _call_custom(self, fn: CustomOp, module: nn.Module, args: tuple[Any, ...], output: Any) -> int:
        count = fn(module, args, output)
        if isinstance(count, bool) or not hasattr(count, "__index__") or operator.index(count) < 0:
            raise TypeError(
                f"flops: custom_ops for {type(module).__name__} returned {count!r}; "
                "accepted: the multiply-adds of the call, an int from 0"
            )
        return operator.index(count)

    def _add_row(self, module: nn.Module, inputs: list[Any], output: Any, multiply_adds: int) -> None:
        if module not in self._labels:
            name = type(module).__name__
            self._numbers[name] += 1
            self._labels[module] = f"{name}-{self._numbers[name]}"
        shown_inputs, shown_output = (str(_structure(value, _shape)) for value in (inputs, output))
        self.rows.append(_Row(module, self._labels[module], shown_inputs, shown_output, multiply_adds))
        for tensor in _tensors(output):
            # A block mostly returns the tensor of its last layer: the same object, still alive.
            known = self._outputs.get(id(tensor))
            if known is None or known() is not tensor:
                self._outputs[id(tensor)] = weakref.ref(tensor)
                self.output_bytes += tensor.nbytes


def _modules_with_rows(net: nn.Module, depth: int | None) -> set[nn.Module]:
    shown: set[nn.Module] = set()
    visited: set[nn.Module] = {net}

    def walk(module: nn.Module, level: int) -> None:
        for child in module.children():
            if child in visited:
                continue
            visited.add(child)
            if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
                walk(child, level)  # a mere list: its items are at its own level
                continue
            last = depth is not None and level >= depth
            if last or not isinstance(child, nn.Sequential):
                shown.add(child)
            if not last:
                walk(child, level + 1)

    walk(net, 1)
    return shown if len(visited) > 1 else {net}


def _run(
    where: str,
    net: nn.Module,
    args: list[Any],
    kwargs: dict[str, Any],
    *,
    depth: int | None = None,
    custom_ops: Mapping[type[nn.Module], CustomOp] | None = None,
    counted: Callable[[], int] = lambda: 0,
) -> tuple[nn.Module, _Recorder]:
    """Run the network; return what ran (a copy if the network is lazy) and the record."""
    net = getattr(net, "_orig_mod", net)  # torch.compile's wrapper
    if any(is_lazy(tensor) for tensor in _tensors_of(net)):
        net = copy.deepcopy(net)
    recorder = _Recorder(net, depth, custom_ops or {}, counted)
    with _left_as_it_was(net), recorder.attached(net):
        try:
            net(*args, **kwargs)
        except Exception as exc:
            given = _structure([*args, kwargs], _shape_and_dtype)
            add_note(exc, f"{where}: {type(net).__name__}.forward was called with {given}")
            raise
    return net, recorder


@contextmanager
def _left_as_it_was(net: nn.Module) -> Iterator[None]:
    """Evaluation mode, no gradients, no fused or compiled path past the hooks; restored, as is randomness."""
    modules = list(net.modules())
    flags = [module.training for module in modules]
    fast_path = torch.backends.mha.get_fastpath_enabled()
    compiled = any(hasattr(m, "_orig_mod") or getattr(m, "_compiled_call_impl", None) is not None for m in modules)
    eager = torch.compiler.set_stance("force_eager") if compiled else nullcontext()
    with torch.no_grad(), _same_randomness(net), eager:
        try:
            # Set one by one: train() and eval() may be overridden, and would not give the flags back.
            for module in modules:
                module.training = False
            # The fused attention of evaluation neither calls the inner layers nor counts their products.
            torch.backends.mha.set_fastpath_enabled(False)
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast_path)
            for module, flag in zip(modules, flags, strict=True):
                module.training = flag


@contextmanager
def _same_randomness(net: nn.Module) -> Iterator[None]:
    """The global generators of Python, numpy and torch: a forward, or a lazy layer's first, may draw."""
    devices = {tensor.device for tensor in _tensors_of(net)}
    kind = next((d.type for d in devices if d.type not in ("cpu", "meta", "mps")), None)
    numbers = sorted({d.index or 0 for d in devices if d.type == kind})
    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    mps_state = torch.mps.get_rng_state() if any(d.type == "mps" for d in devices) else None
    try:
        with torch.random.fork_rng(devices=numbers, device_type=kind or "cuda"):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
        if mps_state is not None:
            torch.mps.set_rng_state(mps_state)


# ------------------------------------------------------------------ formulas


def _formulas() -> dict[Any, Callable[..., int]]:
    """Operators that FlopCounterMode (torch 2.13) leaves out, from shapes to flops: two per multiply-add.

    Each takes the operator's arguments with a shape in place of every tensor.
    """
    aten = torch.ops.aten

    def recurrent(data: Sequence[int], *weights: Sequence[int]) -> int:
        return 2 * prod(data[:-1]) * sum(prod(w) for w in weights if len(w) == 2)  # the 1-d ones are biases

    def attention(query: Sequence[int], key: Sequence[int], value: Sequence[int], *args: Any, **kwargs: Any) -> int:
        return 2 * prod(query[:-1]) * (prod(key[-2:]) + prod(value[-2:]))

    return {
        aten.mv: lambda matrix, vector, **kwargs: 2 * prod(matrix),
        aten.addmv: lambda bias, matrix, vector, **kwargs: 2 * prod(matrix),
        aten.dot: lambda a, b, **kwargs: 2 * prod(a),
        aten._trilinear: lambda x, weight, *args, **kwargs: 2 * x[0] * prod(weight),  # nn.Bilinear
        aten._scaled_dot_product_flash_attention_for_cpu: attention,
        aten._scaled_dot_product_attention_math_for_mps: attention,
        aten.mkldnn_rnn_layer: lambda x, *args, **kwargs: recurrent(x, *args[:2]),
        aten._cudnn_rnn: lambda x, weights, *args, **kwargs: recurrent(x, *weights),
        aten.miopen_rnn: lambda x, weights, *args, **kwargs: recurrent(x, *weights),
        aten._lstm_mps: lambda x, hidden, weights, *args, **kwargs: recurrent(x, *weights),
    }


# ------------------------------------------------------------------ printing


def _param_column(net: nn.Module, rows: list[_Row]) -> tuple[list[str], int]:
    """The text of each row, and how many parameters no row has counted."""
    called = {row.module for row in rows}
    owned: dict[nn.Module | None, list[nn.Parameter]] = {}
    visited: set[nn.Module] = set()

    def walk(module: nn.Module, owner: nn.Module | None) -> None:
        if module in visited:
            return
        visited.add(module)
        owner = module if module in called else owner
        owned.setdefault(owner, []).extend(p for p in module.parameters(recurse=False) if not is_lazy(p))
        for child in module.children():
            walk(child, owner)

    walk(net, None)
    counted: set[nn.Parameter] = set()
    texts = []
    for row in rows:
        own = set(owned[row.module])
        new = own - counted
        counted |= new
        texts.append("(shared)" if own and not new else f"{sum(p.numel() for p in new):,}")
    outside = set(owned.get(None, [])) - counted
    return texts, sum(p.numel() for p in outside)


def _summary_footer(result: Mapping[str, int], outside: int, uninitialised: int) -> list[str]:
    def megabytes(what: str, size: int) -> str:
        return f"{what} size (MB): {size / 2**20:.2f}"

    lines = [
        f"Total params: {result['total_params']:,}",
        f"Trainable params: {result['trainable_params']:,}",
        f"Non-trainable params: {result['non_trainable_params']:,}",
    ]
    if outside:
        lines.append(f"Params outside the rows: {outside:,} (of the network itself, or of layers that did not run)")
    if uninitialised:
        lines.append(f"Uninitialised params: {uninitialised} tensors, not counted (their layers did not run)")
    if result["buffer_elements"]:
        lines.append(f"Buffer elements: {result['buffer_elements']:,}")
    lines += [
        "-",
        megabytes("Input", result["input_bytes"]),
        megabytes("Forward/backward pass", result["forward_backward_bytes"]),
        megabytes("Params", result["param_bytes"]),
    ]
    if result["buffer_elements"]:
        lines.append(megabytes("Buffers", result["buffer_bytes"]))
    return [
        *lines,
        megabytes("Estimated Total", result["total_bytes"]).replace("Total size", "Total Size"),
        "-",
    ]


def _table(headers: list[tuple[str, int]], rows: Sequence[tuple[str, ...]], footer: list[str]) -> str:
    """Centred columns of at least the given widths; a line ``"-"`` of the footer is a rule."""
    widths = [
        max(minimum, *(len(row[i]) for row in rows)) if rows else minimum for i, (_, minimum) in enumerate(headers)
    ]
    width = max(75, sum(widths) + 5)

    def line(cells: Sequence[str]) -> str:
        return " ".join(f"{cell:^{w}}" for cell, w in zip(cells, widths, strict=True))

    lines = ["-" * width, line([name for name, _ in headers]), "=" * width, *map(line, rows), "=" * width]
    return "\n".join(lines + ["-" * width if text == "-" else text for text in footer])


def _show(text: str) -> None:
    print(text)  # noqa: T201  # the table is what was asked for; verbose=False is the way to do without
