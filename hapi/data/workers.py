"""``num_workers="auto"``: reader processes where reading is worth them."""

from __future__ import annotations

import copy
import multiprocessing
import os
import sys
import time
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
        positions = [len(dataset) * i // PROBES for i in range(PROBES)]
        _read(probed, positions[:1])  # the first opens files and imports
        taken, started = [], time.perf_counter()
        for position in dict.fromkeys(positions):
            begun = time.perf_counter()
            _read(probed, [position])
            taken.append(time.perf_counter() - begun)
            if time.perf_counter() - started > PROBE_SECONDS:
                break
        return sorted(taken)[len(taken) // 2]
    except Exception:
        return 0.0
    finally:
        if before.moved():
            before.restore()


def _read(dataset: Any, positions: list[int]) -> None:
    if callable(getattr(dataset, "__getitems__", None)):
        dataset.__getitems__(positions)
    else:
        for position in positions:
            dataset[position]


def _shallow(dataset: Any) -> Any:
    """A copy, down through wrappers: a file that the first read opens must not be inherited by forked readers."""
    copied = copy.copy(dataset)
    if hasattr(getattr(copied, "dataset", None), "__getitem__"):
        copied.dataset = _shallow(copied.dataset)
    return copied
