"""Randomness inside ``__getitem__`` as a function of (seed, epoch, index).

Users draw from torch's, numpy's and Python's global generators. So that what they draw does not depend on the number of
workers, on ranks, or on where a run was resumed, the generators are seeded before each sample, and put back after the
batch. Seeding costs about as much as reading a small sample, so it is done only for datasets that draw: a batch is read
without it first, and again with it if a generator has moved.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from hapi.data.sampler import fold

__all__ = ["GeneratorsState", "seed_sample"]


class GeneratorsState:
    """The state of the three global generators of this process, on the host."""

    def __init__(self) -> None:
        self.torch = torch.get_rng_state()
        self.numpy: Any = np.random.get_state(legacy=True)  # noqa: NPY002  # the generator that users draw from
        self.python = random.getstate()

    def moved(self) -> bool:
        """Whether anybody has drawn since."""
        keys: Any = np.random.get_state(legacy=True)  # noqa: NPY002
        return (
            keys[2:] != self.numpy[2:]
            or not torch.equal(torch.get_rng_state(), self.torch)
            or random.getstate() != self.python
            or not np.array_equal(keys[1], self.numpy[1])
        )

    def restore(self) -> None:
        """Put the generators back."""
        torch.set_rng_state(self.torch)
        np.random.set_state(self.numpy)  # noqa: NPY002
        random.setstate(self.python)


def seed_sample(seed: int, epoch: int, index: int) -> None:
    """Seed the three generators for a sample."""
    mixed = fold(seed, epoch, index)
    torch.default_generator.manual_seed(mixed)
    np.random.seed(mixed & 0xFFFFFFFF)  # noqa: NPY002
    random.seed(mixed)
