"""Random generators: seed them all, capture them, put them back."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["capture", "draw_seed", "restore", "seed_everything"]


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


def capture() -> dict[str, Any]:
    """The state of this process's global generators, as tensors and plain containers."""
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002  # the global one
    state: dict[str, Any] = {
        "python": [version, list(numbers), gauss],
        "numpy": [kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore(state: Mapping[str, Any]) -> None:
    """Put :func:`capture` back."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
