"""What the engine does with metrics, in a few lines: bind them, reduce them over ranks, read them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hapi.metrics.base import Metric, cat_rows

WAITS = ("item", "cpu", "numpy", "tolist", "__bool__", "__float__", "__int__", "__index__")


def bind(metric: Metric) -> Metric:
    """Place the sum states in one flat float64 buffer, with other data around them, and reset."""
    sums = {name: spec for name, spec in metric.specs.items() if spec.reduce == "sum"}
    buffer = torch.full((2 + sum(math.prod(spec.shape) for spec in sums.values()),), 7.0, dtype=torch.float64)
    views, at = {}, 1
    for name, spec in sums.items():
        size = math.prod(spec.shape)
        views[name] = buffer[at : at + size].view(spec.shape)
        at += size
    metric.bind(views)
    metric.reset()
    metric.buffer = buffer  # type: ignore[attr-defined]  # for the test to look at its ends
    return metric


def merge(metrics: Sequence[Metric]) -> dict[str, Any]:
    """Totals over metrics that each saw a shard, reduced as their states say."""
    totals: dict[str, Any] = {}
    for metric in metrics:
        if hasattr(metric, "flush"):
            metric.flush()
    for name, spec in metrics[0].specs.items():
        if spec.reduce == "cat":
            totals[name] = cat_rows([row for metric in metrics for row in metric.lists[name]])
            continue
        for metric in metrics:
            metric._settle()
        stacked = torch.stack([metric.state[name] for metric in metrics])
        if callable(spec.reduce):
            totals[name] = spec.reduce(stacked)
        else:
            totals[name] = getattr(torch, {"sum": "sum", "max": "amax", "min": "amin"}[spec.reduce])(stacked, 0)
    return totals


def rows(args: Sequence[Any], start: int, stop: int) -> list[Any]:
    """A slice of every tensor."""
    return [arg[start:stop] if isinstance(arg, Tensor) else arg for arg in args]
