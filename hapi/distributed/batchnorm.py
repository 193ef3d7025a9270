"""Batch normalisation over all ranks' rows, on any backend.

torch's SyncBatchNorm needs CUDA. This one reduces (sum, sum of squares, count) with an autograd-aware all-reduce, so
ranks may have different numbers of rows, also none. The statistics are those of Ioffe and Szegedy, "Batch
Normalization", ICML 2015, over the global batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["SyncBatchNorm", "convert", "has_sync_batchnorm"]


class _SumOverRanks(torch.autograd.Function):
    """An all-reduce whose gradient is the all-reduce of the gradients."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = value.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient = gradients[0].contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class SyncBatchNorm(_BatchNorm):
    """A drop-in for ``nn.BatchNorm1d/2d/3d`` whose training statistics are those of all ranks' rows.

    Its parameters and buffers have BatchNorm's names, so state dicts fit both.
    """

    group: Any = None

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: Tensor) -> Tensor:
        """Normalise ``[N, C, ...]``; N may differ between ranks and be 0."""
        self._check_input_dim(input)
        alone = not dist.is_initialized() or dist.get_world_size(self.group) == 1
        if not self.training or alone:
            return super().forward(input)
        axes = [0, *range(2, input.dim())]
        kind = torch.promote_types(input.dtype, torch.float32)
        value = input.to(kind)
        # In float64, since the variance is a difference of large numbers.
        wide = value.double()
        count = wide.new_full((1,), input.numel() / input.size(1))
        sums = torch.cat([wide.sum(axes), (wide * wide).sum(axes), count])
        sums = _SumOverRanks.apply(sums, self.group)  # type: ignore[no-untyped-call]
        size = input.size(1)
        total = sums[-1]
        mean = sums[:size] / total
        variance = (sums[size : 2 * size] / total - mean * mean).clamp_min(0)
        self._track(mean.detach(), variance.detach(), total.detach())
        shape = [1, size, *[1] * (input.dim() - 2)]
        scale = torch.rsqrt(variance + self.eps).to(kind)
        normal = (value - mean.to(kind).view(shape)) * scale.view(shape)
        if self.affine:
            normal = normal * self.weight.to(kind).view(shape) + self.bias.to(kind).view(shape)
        out: Tensor = normal.to(input.dtype)
        return out

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        momentum = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
        unbiased = variance * count / (count - 1).clamp_min(1)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)


def convert(network: nn.Module, device: torch.device, group: Any = None) -> nn.Module:
    """Replace every BatchNorm below ``network`` by one over all ranks; parameters and buffers stay the same objects.

    On CUDA that is torch's own. A network that *is* a BatchNorm is refused, since its owner holds the old object.
    """
    if isinstance(network, _BatchNorm) and not isinstance(network, (SyncBatchNorm, nn.SyncBatchNorm)):
        raise ValueError("sync_batchnorm: the network itself is a BatchNorm; put it into a Sequential")
    if device.type == "cuda":
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(network, group)  # type: ignore[no-untyped-call]
        return converted
    for name, child in network.named_children():
        if isinstance(child, _BatchNorm) and not isinstance(child, (SyncBatchNorm, nn.SyncBatchNorm)):
            synced = SyncBatchNorm(
                child.num_features, child.eps, child.momentum, child.affine, child.track_running_stats
            )
            synced._parameters, synced._buffers = child._parameters, child._buffers
            synced.training, synced.group = child.training, group
            setattr(network, name, synced)
        else:
            convert(child, device, group)
    return network


def has_sync_batchnorm(network: nn.Module) -> bool:
    """Whether forward starts collectives, so that ranks without rows must take part."""
    return any(isinstance(module, (SyncBatchNorm, nn.SyncBatchNorm)) for module in network.modules())
