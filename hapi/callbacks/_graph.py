"""The graph of a network, as TensorBoard shows it."""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["graph_of"]


def graph_of(network: nn.Module, args: Sequence[Tensor], kwargs: Mapping[str, Tensor]) -> bytes:
    """Trace a network's forward pass in evaluation mode; what is traced is a copy.

    Args:
        network: Left as it is, like the generators of random numbers.
        args: Positional arguments of ``forward``.
        kwargs: Arguments of ``forward`` by name. They must not be keyword-only: the tracer knows positions.

    Returns:
        A serialized ``GraphDef``.

    Raises:
        Exception: Whatever the copy, ``forward`` or the tracer raises: not every network can be traced.
    """
    from torch.utils.tensorboard._pytorch_graph import graph

    bound = inspect.signature(network.forward).bind(*args, **kwargs)
    if bound.kwargs:
        raise TypeError(f"forward takes {', '.join(bound.kwargs)} by name only")
    inputs = tuple(value.detach() for value in bound.args)
    # The tracer warns of its own age and of what it cannot follow, and prints what it then raises.
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        _generators_kept(inputs),
        _disable_current_modes(),  # the guard of callbacks on several ranks hides operators from the tracer
        torch.no_grad(),
    ):
        warnings.simplefilter("ignore")
        # Traced here, since `graph` would compare two passes, and refuse networks that draw random numbers.
        frozen = copy.deepcopy(network).eval()
        traced = torch.jit.trace(frozen, inputs, check_trace=False, strict=False)  # type: ignore[no-untyped-call]
        definition, _ = graph(traced, inputs)  # type: ignore[no-untyped-call]
    return bytes(definition.SerializeToString())


@contextlib.contextmanager
def _generators_kept(inputs: Sequence[Tensor]) -> Iterator[None]:
    legacy: Any = np.random.get_state()  # noqa: NPY002  # the generator that a forward pass may draw from
    python = random.getstate()
    try:
        with torch.random.fork_rng(sorted({value.device.index for value in inputs if value.is_cuda})):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)  # noqa: NPY002
