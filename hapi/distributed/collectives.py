"""Collectives that are the identity on one rank, for the engine and for hand-written loops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch import distributed as dist

__all__ = [
    "all_gather",
    "all_gather_objects",
    "all_reduce",
    "barrier",
    "broadcast",
    "broadcast_object",
    "gather_rows",
    "is_distributed",
]

Operation = Literal["sum", "max", "min", "mean"]


def is_distributed() -> bool:
    """Whether a process group of more than one rank has been started."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def all_reduce(tensor: Tensor, op: Operation = "sum", *, group: Any = None) -> Tensor:
    """Reduce ``tensor`` over all ranks, in place, and return it.

    Args:
        tensor: The same shape and dtype on every rank.
        op: ``"sum"``, ``"max"``, ``"min"`` or ``"mean"``.
        group: The process group; None for the default one.

    Example:
        >>> all_reduce(torch.ones(2))  # one rank: unchanged
        tensor([1., 1.])
    """
    if op not in ("sum", "max", "min", "mean"):
        raise ValueError(f"all_reduce: op={op!r}; accepted: 'sum', 'max', 'min', 'mean'")
    if is_distributed():
        operations = {"max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
        dist.all_reduce(tensor, operations.get(op, dist.ReduceOp.SUM), group=group)
        if op == "mean":
            tensor /= dist.get_world_size(group)
    return tensor


def broadcast(tensor: Tensor, src: int = 0, *, group: Any = None) -> Tensor:
    """Give every rank the ``tensor`` of rank ``src``, in place, and return it."""
    if is_distributed():
        dist.broadcast(tensor, src, group=group)
    return tensor


def all_gather(tensor: Tensor, *, group: Any = None) -> list[Tensor]:
    """The tensors of all ranks, in rank order. The first dimension may differ between ranks, also be 0."""
    if not is_distributed():
        return [tensor]
    parts = all_gather_objects(tensor.detach().cpu(), group=group)
    return [part.to(tensor.device) for part in parts]


def barrier(*, group: Any = None) -> None:
    """Wait until every rank is here."""
    if is_distributed():
        dist.barrier(group=group)


def all_gather_objects(value: Any, *, group: Any = None) -> list[Any]:
    """The values of all ranks, in rank order. Pickled, so only between the processes of one run."""
    if not is_distributed():
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def broadcast_object(value: Any, src: int = 0, *, group: Any = None) -> Any:
    """The value of rank ``src``, on every rank. Pickled, so only between the processes of one run."""
    if not is_distributed():
        return value
    box = [value]
    dist.broadcast_object_list(box, src, group=group)
    return box[0]


def gather_rows(rows: Sequence[Tensor], *, group: Any = None) -> list[Tensor]:
    """All ranks' lists of tensors as one list, in rank order, on the host. Empty ranks add nothing."""
    local = [row.detach().cpu() for row in rows]
    return [row for part in all_gather_objects(local, group=group) for row in part]


def stack_over_ranks(tensor: Tensor, *, group: Any = None) -> Tensor:
    """The ranks' tensors of equal shape on a new first axis, on the host."""
    return torch.stack(all_gather_objects(tensor.detach().cpu(), group=group))
