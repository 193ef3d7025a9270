"""``num_workers="auto"``: reader processes where reading is worth them."""

from __future__ import annotations

import copy
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from hapi.data.randomness import GeneratorsState

__all__ = ["check_workers", "choose_workers"]

MOST = 8
PROBES = 8
PROBE_SECONDS = 0.05
# A batch from a reader process costs the main process some 0.3 ms, and starting readers a tenth of a second: they have
# to save several times that.
LEAST_BATCH_SECONDS = 2e-3
LEAST_EPOCH_SECONDS = 1.0


def check_workers(given: object, where: str) -> None:
    """ValueError unless it is a number of processes or ``"auto"``."""
    if given != "auto" and (isinstance(given, bool) or not isinstance(given, int) or given < 0):
        raise ValueError(f"{where}: num_workers must be an int of at least 0 or 'auto', not {given!r}")


def choose_workers(dataset: Any, batch: int, samples: int, local_world: int) -> int:
    """How many processes should read a map-style dataset; 0: this one.

    Args:
        dataset: The dataset. A few samples are read from a shallow copy, and no generator moves.
        batch: Rows that this rank reads per batch.
        samples: Rows that this rank reads per epoch.
        local_world: Ranks on this machine, which share its cores.
    """
    available = min(cores() // local_world - 1, MOST)
    if available < 1 or not _forks():
        return 0
    cost = sample_seconds(dataset)
    if cost * batch < LEAST_BATCH_SECONDS or cost * samples < LEAST_EPOCH_SECONDS:
        return 0
    return min(available, -(-samples // batch))


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _forks() -> bool:
    # Other ways of starting import the user's script again, which has to be written for that.
    method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    return method == "fork" and sys.platform == "linux"


def sample_seconds(dataset: Any) -> float:
    """What a sample costs; 0 where reading fails, so that the error comes up in its place."""
    before = GeneratorsState()
    try:
        probed = _shallow(dataset)
        positions = list(dict.fromkeys(len(dataset) * i // PROBES for i in range(PROBES)))
        if callable(getattr(probed, "__getitems__", None)):
            return _seconds_at_once(probed.__getitems__, positions)
        return _seconds_each(probed.__getitem__, positions)
    except Exception:
        return 0.0
    finally:
        if before.moved():
            before.restore()


def _seconds_each(read: Callable[[int], Any], positions: list[int]) -> float:
    read(positions[0])  # the first opens files and imports
    taken: list[float] = []
    for position in positions:
        begun = time.perf_counter()
        read(position)
        taken.append(time.perf_counter() - begun)
        if sum(taken) > PROBE_SECONDS:
            break
    return sorted(taken)[len(taken) // 2]


def _seconds_at_once(read: Callable[[list[int]], Any], positions: list[int]) -> float:
    read(positions[:1])
    begun = time.perf_counter()
    read(positions)
    return (time.perf_counter() - begun) / len(positions)


def _shallow(dataset: Any) -> Any:
    """A copy, down through wrappers: a file that the first read opens must not be inherited by forked readers."""
    copied = copy.copy(dataset)
    if hasattr(getattr(copied, "dataset", None), "__getitem__"):
        copied.dataset = _shallow(copied.dataset)
    return copied
