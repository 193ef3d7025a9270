"""Random generators: seed them all."""

from __future__ import annotations

import random

import numpy as np
import torch

__all__ = ["draw_seed", "seed_everything"]


def seed_everything(seed: int, *, deterministic: bool = False) -> int:
    """Seed Python's, numpy's and torch's global generators, on all devices.

    Args:
        seed: 0 to 2**32 - 1 (numpy's range).
        deterministic: Also ask torch for deterministic kernels (``torch.use_deterministic_algorithms``), which can
            be slower and raises where there is none.

    Returns:
        The seed.

    Raises:
        ValueError: The seed is out of range.

    Example:
        >>> seed_everything(0)
        0
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise ValueError(f"seed_everything: seed must be an int from 0 to 2**32 - 1, not {seed!r}")
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002  # users' datasets draw from the legacy global generator
    torch.manual_seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    return seed


def draw_seed() -> int:
    """The seed of the order of samples where the user gave none.

    It follows ``torch.manual_seed`` and, without that, differs from run to run, but draws nothing: a script that
    seeds torch gets the same order each time, and its own draws are not disturbed.
    """
    return torch.initial_seed() & ((1 << 63) - 1)
