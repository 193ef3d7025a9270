"""Data parallelism: every rank has the whole net, gradients are averaged in backward."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hapi.distributed.collectives import all_gather_objects, is_distributed
from hapi.distributed.environment import Environment
from hapi.distributed.strategy import Strategy

__all__ = ["DataParallel", "DataParallelStrategy"]


# Buffers are shared before evaluations instead of in every forward. torch 2.13 renamed the option.
_RENAMED = "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
_NO_BUFFERS: dict[str, Any] = {"forward_sync_buffers" if _RENAMED else "broadcast_buffers": False}


class DataParallelStrategy(Strategy):
    """torch's DistributedDataParallel.

    Args:
        env: This process's place in the group.
        find_unused_parameters: For nets whose forward leaves parameters out; slower.
        bucket_cap_mb: Size of the buckets in which gradients are exchanged.
        gradient_as_bucket_view: Let gradients be views of the buckets: one copy and its memory less.
        static_graph: The same parameters are used in the same order in every step.
    """

    def __init__(
        self,
        env: Environment | None = None,
        *,
        find_unused_parameters: bool = False,
        bucket_cap_mb: float = 25,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
    ) -> None:
        super().__init__(env or Environment())
        self.options: dict[str, Any] = {
            "find_unused_parameters": find_unused_parameters,
            "bucket_cap_mb": bucket_cap_mb,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "static_graph": static_graph,
        }

    def setup(self, network: nn.Module, optimizer: Optimizer | None) -> tuple[nn.Module, Optimizer | None]:
        """Wrap the network; rank 0's weights and buffers reach all ranks."""
        if self.env.world == 1 or not any(p.requires_grad for p in network.parameters()):
            return network, optimizer
        device = self.env.device
        ids = [device.index] if device is not None and device.type == "cuda" else None
        module = DistributedDataParallel(
            network, device_ids=ids, process_group=self.env.group, **_NO_BUFFERS, **self.options
        )
        return module, optimizer

    def check_gradients(self, network: nn.Module) -> None:
        """Name the parameters that the first step did not use, which DDP would report by number, a step later.

        Raises:
            ValueError: On every rank, if there are any on some rank.
        """
        if self.options["find_unused_parameters"] or self.env.world == 1:
            return
        mine = [name for name, p in network.named_parameters() if p.requires_grad and p.grad is None]
        unused = sorted({name for names in all_gather_objects(mine, group=self.env.group) for name in names})
        if unused:
            more = " ..." if len(unused) > 8 else ""
            raise ValueError(
                f"the loss does not depend on the parameters {', '.join(unused[:8])}{more}. Freeze them "
                "(requires_grad_(False)), or let data parallelism look for unused ones in every step, which is slower: "
                "prepare(strategy=hapi.distributed.DataParallelStrategy(find_unused_parameters=True))"
            )

    def share_buffers(self, network: nn.Module) -> None:
        """Broadcast running statistics and the like, which each rank has kept for its own rows."""
        if self.env.world > 1:
            for buffer in network.buffers():
                dist.broadcast(buffer, 0, group=self.env.group)

    def no_sync(self, module: nn.Module) -> AbstractContextManager[Any]:
        """DDP's: gradients stay on the rank."""
        inner: Any = getattr(module, "_orig_mod", module)
        context: AbstractContextManager[Any] = inner.no_sync()
        return context

    def reduce_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Average one flat buffer over the ranks; a rank without gradients adds zeros."""
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in parameters])
        dist.all_reduce(flat, group=self.env.group)
        flat /= self.env.world
        start = 0
        for parameter in parameters:
            size = parameter.numel()
            parameter.grad = flat[start : start + size].view_as(parameter).clone()
            start += size


def DataParallel(network: nn.Module, **options: Any) -> nn.Module:  # noqa: N802  # the reference's name, as a class
    """Wrap a network for a hand-written loop: gradients are averaged over the ranks in backward.

    ``Model`` does this by itself. On one process the network comes back as it is, so the script needs no branch.

    Args:
        network: On its device, the same on every rank; rank 0's weights are taken.
        **options: Of ``torch.nn.parallel.DistributedDataParallel``.

    Example:
        >>> net = nn.Linear(2, 2)
        >>> DataParallel(net) is net  # one process
        True
    """
    if not is_distributed():
        return network
    device = next((p.device for p in network.parameters()), torch.device("cpu"))
    ids = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(network, device_ids=ids, **options)
