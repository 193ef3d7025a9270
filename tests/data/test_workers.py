"""`num_workers="auto"`: how many, and that looking leaves no trace."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset

from hapi.data import workers
from hapi.data.workers import PROBES, check_workers, choose_workers, cores, sample_seconds


class Costly(Dataset[Any]):
    """Draws, opens something at its first read, and takes its time, by a clock of its own."""

    opened = False

    def __init__(self, seconds: float, clock: list[float], rows: int = 1000) -> None:
        self.seconds, self.clock, self.rows = seconds, clock, rows
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> Any:
        self.clock[0] += self.seconds if self.opened else 5.0
        self.opened = True
        self.read.append(index)
        return torch.rand(2), random.random(), np.random.rand()


class Batches(Costly):
    def __getitems__(self, indices: list[int]) -> Any:
        return [super(Batches, self).__getitem__(index) for index in indices]

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("it is asked for batches")


class Broken(Costly):
    def __getitem__(self, index: int) -> Any:
        raise OSError("gone")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(workers, "cores", lambda: 6)
    monkeypatch.setattr(workers, "_forks", lambda: True)
    return now


@pytest.mark.parametrize("given", [0, 3, "auto"])
def test_what_is_accepted(given: Any) -> None:
    check_workers(given, "fit")


@pytest.mark.parametrize("given", [-1, True, 1.0, "many", None])
def test_what_is_not(given: Any) -> None:
    with pytest.raises(ValueError, match=r"fit: num_workers must be an int of at least 0 or 'auto', not"):
        check_workers(given, "fit")


@pytest.mark.parametrize("kind", [Costly, Batches])
@pytest.mark.parametrize(
    ("seconds", "batch", "samples", "ranks", "expected"),
    [
        (1e-3, 64, 10_000, 1, 5),  # a core for the step
        (1e-3, 64, 10_000, 2, 2),
        (1e-3, 64, 10_000, 6, 0),
        (1e-3, 64, 10_000, 100, 0),
        (1e-5, 64, 10**6, 1, 0),  # cheap samples
        (1e-3, 64, 500, 1, 0),  # over in half a second
        (1e-3, 1000, 2000, 1, 2),  # two batches
        (1e-3, 1, 10_000, 1, 0),  # handing a batch over costs as much
    ],
)
def test_how_many(
    clock: list[float], kind: Any, seconds: float, batch: int, samples: int, ranks: int, expected: int
) -> None:
    assert choose_workers(kind(seconds, clock), batch, samples, ranks) == expected


def test_many_cores(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "cores", lambda: 128)
    assert choose_workers(Costly(1e-3, clock), 64, 10_000, 1) == workers.MOST


def test_readers_that_would_import_the_script_again_are_not_started(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "_forks", lambda: False)
    assert choose_workers(Costly(1e-3, clock), 64, 10_000, 1) == 0


def test_looking_leaves_no_trace(clock: list[float]) -> None:
    dataset = Costly(1e-3, clock)
    wrapped = Subset(Subset(dataset, range(500)), range(100))
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    expected = torch.rand(()), np.random.randn(), random.gauss(0, 1), np.random.randn()
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    got_torch, got_numpy = torch.rand(()), np.random.randn()
    assert sample_seconds(wrapped) == pytest.approx(1e-3)
    assert (got_torch, got_numpy, random.gauss(0, 1), np.random.randn()) == expected
    assert not dataset.opened, "a file that is opened here would be shared by all readers"


def test_samples_are_taken_from_everywhere_and_few_of_slow_ones(clock: list[float]) -> None:
    dataset = Costly(1e-3, clock)
    sample_seconds(dataset)
    assert sorted(set(dataset.read)) == [1000 * i // PROBES for i in range(PROBES)]
    slow = Costly(1.0, clock)
    assert sample_seconds(slow) == 1.0
    assert len(slow.read) == 2
    assert sample_seconds(Batches(1e-3, clock)) == pytest.approx(1e-3)
    assert sample_seconds(Costly(1e-3, clock, rows=1)) == pytest.approx(1e-3)


def test_what_cannot_be_read_fails_in_its_place(clock: list[float]) -> None:
    assert sample_seconds(Broken(1e-3, clock)) == 0


def test_cores_are_those_of_this_process() -> None:
    assert cores() >= 1
