from __future__ import annotations

import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hapi.callbacks import Callback, DeviceStats, device_stats
from tests.callbacks.driver import Driver


class Seen(Callback):
    def __init__(self) -> None:
        self.points: list[dict[str, Any]] = []
        self.epoch: dict[str, Any] = {}

    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        self.points.append(dict(logs))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.epoch = dict(logs)


def test_processor_and_memory_without_a_gpu() -> None:
    class Busy(Callback):
        def on_train_batch_begin(self, step: int, logs: Any = None) -> None:
            end = time.process_time() + 0.01
            while time.process_time() < end:
                pass

    seen = Seen()
    Driver([DeviceStats(), Busy(), seen], batches=4, log_freq=2).fit(1)
    assert ["cpu_percent" in point for point in seen.points] == [False, True, False, True]
    assert not any(name.startswith("gpu") for name in seen.points[1])
    assert seen.points[1]["cpu_percent"] > 1  # of one core; the machine may be shared
    assert 0.01 < seen.points[1]["cpu_mem_gib"] < 100
    assert seen.epoch["cpu_mem_gib"] >= max(point.get("cpu_mem_gib", 0) for point in seen.points)
    assert seen.epoch["cpu_percent"] > 0


def test_memory_is_what_the_process_takes() -> None:
    pages = pytest.importorskip("psutil").Process().memory_info().rss
    memory = device_stats._process_memory()
    assert memory is not None
    assert abs(memory - pages) < 50e6


@pytest.mark.parametrize(("platform", "unit"), [("darwin", 1), ("freebsd", 1024)])
def test_the_peak_where_there_is_no_proc(platform: str, unit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_file(*args: Any, **kwargs: Any) -> Any:
        raise FileNotFoundError

    usage = SimpleNamespace(RUSAGE_SELF=0, getrusage=lambda who: SimpleNamespace(ru_maxrss=7))
    monkeypatch.setattr("builtins.open", no_file)
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(device_stats, "resource", usage)
    assert device_stats._process_memory() == 7 * unit
    monkeypatch.setattr(device_stats, "resource", None)
    assert device_stats._process_memory() is None


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """torch.cuda as it answers on a machine with a GPU."""
    fake = SimpleNamespace(peak=0, held=3 << 30, load=0.0, resets=0)

    def reset(device: Any) -> None:
        fake.peak, fake.resets = 0, fake.resets + 1

    def load(device: Any) -> float:
        if fake.load is None:
            raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")
        return float(fake.load)

    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: fake.peak)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: fake.held)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    monkeypatch.setattr(torch.cuda, "utilization", load)
    return fake


def fit_on(gpu: SimpleNamespace) -> Seen:
    class Work(Callback):
        def on_train_batch_begin(self, step: int, logs: Any = None) -> None:
            gpu.peak = max(gpu.peak, (4 - step) << 30)
            if gpu.load is not None:
                gpu.load = 10.0 * (step + 1)

    seen = Seen()
    driver = Driver([Work(), DeviceStats(), seen], batches=4, log_freq=2)
    driver.run.meters.device = torch.device("cuda", 0)
    driver.fit(1)
    return seen


def test_gpu(gpu: SimpleNamespace) -> None:
    seen = fit_on(gpu)
    assert [point.get("gpu_mem_gib") for point in seen.points] == [None, 4.0, None, 2.0]
    assert [point.get("gpu_reserved_gib") for point in seen.points] == [None, 3.0, None, 3.0]
    assert [point.get("gpu_util_percent") for point in seen.points] == [None, 20.0, None, 40.0]
    assert seen.epoch["gpu_mem_gib"] == 4.0
    assert seen.epoch["gpu_util_percent"] == pytest.approx(100 / 3)  # a last report at the end of the epoch


def test_gpu_without_the_drivers_library(gpu: SimpleNamespace) -> None:
    gpu.load = None
    seen = fit_on(gpu)
    assert "gpu_util_percent" not in seen.points[1]
    assert seen.points[1]["gpu_mem_gib"] == 4.0


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="DeviceStats: log_freq=0; accepted: an int >= 1"):
        DeviceStats(0)
