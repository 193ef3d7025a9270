"""The choice of a strategy: one entry per way of running in parallel."""

from __future__ import annotations

from typing import Any

from hapi.distributed.ddp import DataParallelStrategy
from hapi.distributed.environment import Environment
from hapi.distributed.strategy import SingleDevice, Strategy
from hapi.errors import suggest

__all__ = ["STRATEGIES", "choose"]

STRATEGIES: dict[str, type[Strategy]] = {
    "ddp": DataParallelStrategy,
    "single": SingleDevice,
}


def choose(given: Any, env: Environment) -> Strategy:
    """The strategy that a name or an instance means; ``"auto"``: one device alone, data parallelism on several.

    Raises:
        ValueError: An unknown name, or ``"single"`` on several ranks.
        TypeError: Neither a name nor a strategy.
    """
    if isinstance(given, Strategy):
        given.env = env
        return given
    if given == "auto":
        given = "ddp" if env.world > 1 else "single"
    if not isinstance(given, str):
        raise TypeError(f"prepare: strategy={given!r}; accepted: 'auto', {sorted(STRATEGIES)} or a Strategy")
    if given not in STRATEGIES:
        raise ValueError(
            f"prepare: strategy={given!r}; accepted: 'auto', {sorted(STRATEGIES)}{suggest(given, STRATEGIES)}"
        )
    if given == "single" and env.world > 1:
        raise ValueError(f"prepare: strategy='single', but the launcher started {env.world} processes")
    return STRATEGIES[given](env)
