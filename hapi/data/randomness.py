"""Randomness inside ``__getitem__`` as a function of (seed, epoch, index).

Users draw from torch's, numpy's and Python's global generators. So that what they draw does not depend on the number of
workers, on ranks, or on where a run was resumed, the generators are seeded before each sample, and put back after the
batch. Seeding costs about as much as reading a small sample, so it is done only for datasets that draw: a batch is read
without it first, and again with it if a generator has moved.
"""

from __future__ import annotations

import ctypes
import random
from typing import Any

import numpy as np
import torch

from hapi.data.sampler import fold

__all__ = ["GeneratorsState", "seed_sample"]

_MT19937_BYTES = 624 * 4 + 4  # the key and the position in it


class _NumpyView:
    """Whether numpy's global generator moves, seen in its memory: a copy of its state by its own API costs 40 us."""

    def __init__(self) -> None:
        self._known = b""  # the newest bytes with which no normal number lay in wait

    def bytes(self) -> bytes | None:
        """What changes with every draw; None where that cannot be told from the memory alone."""
        generator = _bit_generator()
        if type(generator) is not np.random.MT19937:
            return None
        now = ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
        if now != self._known:
            # numpy makes normal numbers in pairs and keeps the second elsewhere: taking it moves nothing here.
            state: Any = np.random.get_state(legacy=True)  # noqa: NPY002
            if state[3]:
                return None
            self._known = now
        return now


_numpy_view = _NumpyView()


class GeneratorsState:
    """The state of the three global generators of this process, on the host."""

    def __init__(self) -> None:
        self.torch = torch.default_generator.get_state()
        self.python = random.getstate()
        self._numpy_bytes = _numpy_view.bytes()
        self._numpy: Any = None if self._numpy_bytes is not None else _numpy_state()

    def moved(self) -> bool:
        """Whether anybody has drawn since."""
        if not torch.equal(torch.default_generator.get_state(), self.torch) or random.getstate() != self.python:
            return True
        if self._numpy_bytes is not None:
            return _numpy_view.bytes() != self._numpy_bytes
        if self._numpy is None:
            return False
        now = _numpy_state()
        return now is None or now[2:] != self._numpy[2:] or not np.array_equal(now[1], self._numpy[1])

    def restore(self) -> None:
        """Put the generators back."""
        torch.default_generator.set_state(self.torch)
        random.setstate(self.python)
        if self._numpy_bytes is not None:
            key = np.frombuffer(self._numpy_bytes, np.uint32, 624)
            position = int(np.frombuffer(self._numpy_bytes, np.int32, 1, 624 * 4)[0])
            np.random.set_state(("MT19937", key, position, 0, 0.0))  # noqa: NPY002
        elif self._numpy is not None:
            np.random.set_state(self._numpy)  # noqa: NPY002


def _bit_generator() -> Any:
    return np.random.get_bit_generator()  # type: ignore[attr-defined]


def _legacy() -> bool:
    """Whether numpy's global generator is its own: one that the user put there cannot be seeded."""
    return type(_bit_generator()) is np.random.MT19937


def _numpy_state() -> Any:
    return np.random.get_state(legacy=True) if _legacy() else None  # noqa: NPY002


def seed_sample(seed: int, epoch: int, index: int) -> None:
    """Seed the three generators for a sample."""
    mixed = fold(seed, epoch, index)
    torch.default_generator.manual_seed(mixed)
    if _legacy():
        np.random.seed(mixed & 0xFFFFFFFF)  # noqa: NPY002
    random.seed(mixed)
