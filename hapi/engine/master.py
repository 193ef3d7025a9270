"""Level O2: the network in half precision, the optimizer on float32 copies.

The scheme is that of Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.1: updates smaller than
half precision can hold add up in the float32 master weights. Normalisation layers stay in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

__all__ = ["MasterWeights"]

_KEPT = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


class MasterWeights:
    """The float32 copies that an optimizer steps, and the network parameters they belong to.

    Args:
        optimizer: Its parameter groups are pointed at the copies.
        network: Cast to ``dtype`` except normalisation layers.
        dtype: bfloat16 or float16.
    """

    def __init__(self, optimizer: Optimizer, network: nn.Module, dtype: torch.dtype) -> None:
        if any(optimizer.state.values()):
            raise ValueError("prepare: amp='O2' needs an optimizer that has not stepped yet")
        self.optimizer = optimizer
        masters: dict[nn.Parameter, nn.Parameter] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.dtype == torch.float32:
                    masters[parameter] = nn.Parameter(parameter.detach().clone())
        for module in network.modules():
            if isinstance(module, _KEPT):
                continue
            for parameter in module.parameters(recurse=False):
                if parameter.dtype == torch.float32:
                    parameter.data = parameter.data.to(dtype)
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.dtype == torch.float32:
                    module._buffers[name] = buffer.to(dtype)
        # Only what was cast needs a copy; norm layers' parameters are stepped themselves.
        self.pairs = [(p, m) for p, m in masters.items() if p.dtype == dtype]
        self._swap(dict(self.pairs))

    def _swap(self, replacement: dict[Any, Any]) -> None:
        for group in self.optimizer.param_groups:
            group["params"] = [replacement.get(p, p) for p in group["params"]]

    def take_gradients(self) -> None:
        """Move the network's gradients to the copies, in float32."""
        for parameter, master in self.pairs:
            gradient = parameter.grad
            master.grad = None if gradient is None else gradient.to(torch.float32)
            parameter.grad = None

    @torch.no_grad()
    def give_weights(self) -> None:
        """Round the copies to the network."""
        for parameter, master in self.pairs:
            parameter.copy_(master)

    @torch.no_grad()
    def refresh(self) -> None:
        """Take the network's weights, after they were loaded from a file without copies."""
        for parameter, master in self.pairs:
            master.copy_(parameter)

    def names(self, names: dict[nn.Parameter, str]) -> dict[nn.Parameter, str]:
        """The copies' names: those of their parameters."""
        return {master: names[parameter] for parameter, master in self.pairs}

    def state_dict(self) -> dict[str, Any]:
        """The copies, in order."""
        return {"masters": [master.detach() for _, master in self.pairs]}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the copies back, and round them to the network."""
        saved: list[Tensor] = state_dict["masters"]
        for (_, master), value in zip(self.pairs, saved, strict=True):
            master.copy_(value)
        self.give_weights()

    def undo(self) -> None:
        """Give the network its float32 weights and the optimizer its parameters back."""
        for parameter, master in self.pairs:
            parameter.data = master.data
            parameter.grad = None
        self._swap({master: parameter for parameter, master in self.pairs})
