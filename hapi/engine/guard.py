"""On several ranks: a callback that only rank 0 calls cannot start a collective, nor move rank 0 away alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from hapi.distributed.hang import Place

__all__ = ["GuardedHook", "NoCollectives"]

_BETWEEN_LOG_POINTS = ("on_train_batch_begin", "on_train_batch_end", "on_before_optimizer_step")


class NoCollectives(TorchDispatchMode):
    """While it is active, torch's collectives raise instead of waiting for ranks that will never come."""

    def __init__(self, who: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.who = who

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run everything but the operators of torch's c10d library."""
        if func.namespace in ("c10d", "_c10d_functional"):
            raise RuntimeError(
                f"{self.who} started the collective {func._opname!r}, but only rank 0 calls this callback, so the "
                "others would never answer. Give the callback all_ranks = True"
            )
        return func(*args, **(kwargs or {}))


class GuardedHook:
    """A hook of a callback, on several ranks.

    Args:
        hook: The bound method.
        alone: Whether only rank 0 calls it, so that it must not start a collective or change the rate by itself.
        optimizer: Whose learning rates must not change where ranks do not agree on them; None for no check.
        place: Where the loop stands: in this callback, while it runs.
    """

    def __init__(self, hook: Callable[..., None], alone: bool, optimizer: Optimizer | None, place: Place) -> None:
        self.hook = hook
        self.__self__ = getattr(hook, "__self__", None)
        self.__name__ = getattr(hook, "__name__", "hook")
        self.optimizer = optimizer if alone and self.__name__ in _BETWEEN_LOG_POINTS else None
        self.place = place
        self.who = f"{type(self.__self__).__name__}.{self.__name__}"
        self.mode = NoCollectives(self.who) if alone else nullcontext()

    def __call__(self, *args: Any) -> None:
        before, place = self._rates(), self.place
        came_from, place.now = place.now, ("in callback", self.who)
        with self.mode:
            self.hook(*args)
        place.now = came_from
        # At a log point ("lr" is in the logs) rank 0's rates are passed on right after the hooks.
        if before != self._rates() and "lr" not in args[-1]:
            raise RuntimeError(
                f"{self.who} changed the learning rate from {before} to {self._rates()} on rank 0 only, between "
                "log points, where ranks do not talk. Give the callback all_ranks = True, so that every rank does the "
                "same, or log_freq = 1 and do it in on_train_batch_end, so that rank 0's choice reaches all at once"
            )

    def _rates(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups] if self.optimizer else []
