from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from torch import nn, optim

import hapi
from hapi.callbacks import Callback, CSVLogger, Throughput
from hapi.callbacks._clock import StepClock
from tests.callbacks.driver import Driver, values
from tests.helpers.nets import blobs


class Clock:
    def __init__(self) -> None:
        self.now = 100.0
        self.read = 0.0  # seconds of reading

    def __call__(self) -> float:
        return self.now


def batch(steps: StepClock, clock: Clock, waiting: float, computing: float, rows: int = 4) -> None:
    clock.now += waiting
    clock.read += waiting
    steps.data_ready(clock.read)
    clock.now += computing
    steps.batch_done(rows)


def test_the_clock_adds_up_what_lies_between_readings() -> None:
    clock = Clock()
    steps = StepClock(clock)
    steps.start()
    batch(steps, clock, 1, 3)
    batch(steps, clock, 0, 4)
    assert steps.read(2) == {"samples_per_sec": 1.0, "step_time_ms": 4000.0, "data_time_ms": 500.0}
    batch(steps, clock, 0.5, 0.5, rows=10)
    assert steps.read(1) == {"samples_per_sec": 10.0, "step_time_ms": 1000.0, "data_time_ms": 500.0}


def test_a_reading_without_a_step_leaves_its_time_to_the_next() -> None:
    clock = Clock()
    steps = StepClock(clock)
    steps.start()
    assert steps.read(1) is None  # no time has passed
    batch(steps, clock, 0, 2)
    assert steps.read(0) is None
    batch(steps, clock, 0, 2)
    assert steps.read(1) == {"samples_per_sec": 2.0, "step_time_ms": 4000.0, "data_time_ms": 0.0}


def test_pauses_do_not_count() -> None:
    clock = Clock()
    steps = StepClock(clock)
    steps.start()
    batch(steps, clock, 0, 1)
    clock.now += 1  # waiting for the device before the evaluation
    steps.pause()
    clock.now += 100
    steps.pause()
    clock.now += 100
    steps.resume()
    steps.resume()
    batch(steps, clock, 1, 1)
    steps.pause()
    clock.now += 100
    batch(steps, clock, 100, 1)  # the next batch ends a pause
    assert steps.seconds == 5
    assert steps.waiting == 1
    assert steps.read(3) == {"samples_per_sec": 12 / 5, "step_time_ms": 5000 / 3, "data_time_ms": 1000 / 3}
    steps.start()
    assert steps.rows == steps.seconds == steps.waiting == 0


def test_the_clock_can_be_copied() -> None:
    for steps in (copy.deepcopy(StepClock()), pickle.loads(pickle.dumps(StepClock()))):
        steps.start()
        steps.data_ready(0.0)
        steps.batch_done(1)
        assert steps.rows == 1


class Work(Callback):
    """2 s of reading, 6 s of computing, 50 s of evaluation, 70 s after an epoch."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_train_batch_begin(self, step: int, logs: Any = None) -> None:
        self.clock.now += 2
        self.run.read_seconds += 2

    def on_eval_batch_begin(self, step: int, logs: Any = None) -> None:
        self.clock.now += 50


class Computing(Callback):
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_train_batch_begin(self, step: int, logs: Any = None) -> None:
        self.clock.now += 6


class Seen(Callback):
    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.points: list[dict[str, Any]] = []
        self.epochs: list[dict[str, Any]] = []

    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        self.points.append({k: v for k, v in logs.items() if k not in ("step", "batch_size", "loss", "lr")})

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.epochs.append(logs)
        self.clock.now += 70


def fit(throughput: Throughput, **options: Any) -> Seen:
    clock = Clock()
    throughput._clock = StepClock(clock)
    seen = Seen(clock)
    driver = Driver([Work(clock), throughput, Computing(clock), seen], evaluate=values(1.0), **options)
    driver.fit(2)
    return seen


def test_values_at_log_points_and_of_epochs() -> None:
    seen = fit(Throughput(), batches=4, log_freq=2, rows=4)
    expected = {"samples_per_sec": 0.5, "step_time_ms": 8000.0, "data_time_ms": 2000.0}
    assert seen.points == [{}, expected, {}, expected] * 2
    for logs in seen.epochs:
        assert {name: logs[name] for name in expected} == expected


def test_operations_and_their_part_of_the_peak() -> None:
    speed = Throughput(flops_per_sample=4e12, peak_tflops=2)
    seen = fit(speed, batches=2, log_freq=2, rows=4, world=2)
    assert seen.points[1]["tflops"] == 2.0
    assert seen.points[1]["mfu"] == 0.5  # of two devices


def test_steps_of_several_batches() -> None:
    seen = fit(Throughput(), batches=4, log_freq=1, rows=4, accumulate=2)
    assert [set(point) for point in seen.points[:4]] == [set(), set(seen.points[1]), set(), set(seen.points[1])]
    assert seen.points[1]["step_time_ms"] == 16000.0
    assert seen.points[1]["samples_per_sec"] == 0.5


def test_window_is_a_mean_over_log_points() -> None:
    clock = Clock()
    speed = Throughput(window=2)
    speed._clock = StepClock(clock)
    seen = Seen(clock)

    class Slower(Callback):
        def on_train_batch_begin(self, step: int, logs: Any = None) -> None:
            clock.now += step + 1

    Driver([speed, Slower(), seen], batches=4, log_freq=1, rows=4).fit(1)
    assert [point["step_time_ms"] for point in seen.points] == [1000.0, 1500.0, 2500.0, 3500.0]


def test_log_freq_asks_for_log_points(tmp_path: Any) -> None:
    net = nn.Linear(8, 3)
    model = hapi.Model(net).prepare(optim.SGD(net.parameters(), 0.1), nn.CrossEntropyLoss())
    seen = Seen(Clock())
    callbacks = [Throughput(3), CSVLogger(tmp_path / "log.csv"), seen]
    model.fit(blobs(64), batch_size=8, epochs=2, log_freq=100, verbose=0, callbacks=callbacks)
    assert [bool(point) for point in seen.points[:8]] == [False, False, True, False, False, True, False, True]
    assert all(0 <= point["data_time_ms"] < point["step_time_ms"] for point in seen.points if point)
    assert "samples_per_sec" in (tmp_path / "log.csv").read_text().splitlines()[0]


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="Throughput: window=0; accepted: an int >= 1"):
        Throughput(window=0)
    with pytest.raises(ValueError, match="Throughput: log_freq=0; accepted: an int >= 1"):
        Throughput(0)
    with pytest.raises(ValueError, match="peak_tflops=100 needs flops_per_sample"):
        Throughput(peak_tflops=100)
    with pytest.raises(ValueError, match="flops_per_sample=0; accepted: a finite number > 0"):
        Throughput(flops_per_sample=0)
