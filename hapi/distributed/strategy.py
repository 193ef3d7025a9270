"""How a net is run in parallel: the interface, the one-device case, and the choice."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.optim import Optimizer

from hapi.distributed.environment import Environment

__all__ = ["SingleDevice", "Strategy"]


class Strategy(ABC):
    """One way of running in parallel. The loop is the same for all of them.

    Args:
        env: This process's place in the group.
    """

    def __init__(self, env: Environment) -> None:
        self.env = env

    @abstractmethod
    def setup(self, network: nn.Module, optimizer: Optimizer | None) -> tuple[nn.Module, Optimizer | None]:
        """Wrap the network, and point the optimizer at the wrapped parameters."""

    def no_sync(self, module: nn.Module) -> AbstractContextManager[Any]:
        """In this context ``backward`` leaves gradients on the rank."""
        return nullcontext()

    def reduce_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Average gradients over the ranks by hand, after a backward under :meth:`no_sync`."""

    def check_gradients(self, network: nn.Module) -> None:
        """After the first exchange of gradients: raise where some could not take part."""

    def share_buffers(self, network: nn.Module) -> None:
        """Give every rank rank 0's buffers, before an evaluation or a save."""

    def full_state(self, network: nn.Module) -> dict[str, Any]:
        """The whole network's state dict, on every rank."""
        return network.state_dict()

    def serve(self) -> None:
        """For server roles: answer workers until they are done. Returns at once for workers."""

    def close(self) -> None:
        """Give back what :meth:`setup` took."""


class SingleDevice(Strategy):
    """One process, one device: nothing to wrap."""

    def setup(self, network: nn.Module, optimizer: Optimizer | None) -> tuple[nn.Module, Optimizer | None]:
        """Return both as they are."""
        return network, optimizer
