"""A failure says which batch it was, which samples were in it, and on which rank."""

from __future__ import annotations

from hapi.data.loader import Loader, short
from hapi.distributed.environment import Environment
from hapi.errors import add_note

__all__ = ["name_batch"]


def name_batch(
    exc: Exception, doing: str, env: Environment, loader: Loader, *, epoch: int, index: int, seen: int = 0
) -> None:
    """Note on ``exc`` what failed.

    Args:
        exc: What was raised.
        doing: What was done, and with which batch.
        env: Which rank this is.
        loader: Where the batch comes from.
        epoch: Its order is this epoch's.
        index: The global batch, counted after ``seen`` rows.
        seen: Rows of the epoch that had gone before, over all ranks.
    """
    samples = loader.samples_of(epoch, index, seen)
    text = doing
    if samples:
        text += f", samples {short(samples)}"
    if env.world > 1:
        text += f", on rank {env.rank} of {env.world}"
    add_note(exc, text)
