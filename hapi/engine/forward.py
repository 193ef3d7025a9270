"""Forward and loss of one batch, and what is said when they fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hapi.data.batch import Batch
from hapi.data.trees import describe
from hapi.engine.loss import Count, normalize_outputs
from hapi.errors import add_note

__all__ = ["Compute", "Parts", "PartsOf", "computing"]

Parts = Sequence[tuple[Tensor, Count]]
PartsOf = Callable[[Any, Batch], Parts]
Compute = Callable[[Batch], tuple[Any, Parts]]


def computing(module: nn.Module, parts_of: PartsOf) -> Compute:
    """A function of a batch that gives the outputs of ``module`` and the loss parts that ``parts_of`` makes of them."""

    def compute(batch: Batch) -> tuple[Any, Parts]:
        args, kwargs = batch.args, batch.kwargs
        try:
            outputs = module(*args, **kwargs) if kwargs else module(*args)
        except Exception as exc:
            explain_forward(exc, module, batch)
            raise
        if type(outputs) is not Tensor:
            outputs = normalize_outputs(outputs)
        return outputs, parts_of(outputs, batch)

    return compute


def explain_forward(exc: Exception, module: nn.Module, batch: Batch) -> None:
    """Say which network failed, and on what."""
    inner = getattr(module, "_orig_mod", module)
    inner = getattr(inner, "module", inner) if isinstance(inner, nn.parallel.DistributedDataParallel) else inner
    given = [describe(value) for value in batch.args] + [f"{k}={describe(v)}" for k, v in batch.kwargs.items()]
    hint = ""
    kinds = {value.dtype for value in [*batch.args, *batch.kwargs.values()]} & {torch.float64, torch.int64, torch.int32}
    if kinds:
        kind = str(next(iter(kinds))).removeprefix("torch.")
        hint = f". The input is {kind}; most networks want float32: use .float() on it"
    add_note(exc, f"while running {type(inner).__name__}.forward({', '.join(given)}){hint}")
