from __future__ import annotations

import io
from datetime import datetime, timedelta
from typing import Any

import pytest
import torch

import hapi
from hapi.callbacks import Callback, Timer, timer
from tests.callbacks.driver import Driver, values
from tests.helpers.nets import blobs, mlp
from tests.helpers.ranks import run_ranks


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timer._Watch, "clock", clock)
    return clock


class Work(Callback):
    """Takes 10 s per training batch, 5 s per evaluation, 3 s per prediction."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_train_batch_begin(self, step: int, logs: Any = None) -> None:
        self.clock.now += 10

    def on_eval_batch_begin(self, step: int, logs: Any = None) -> None:
        self.clock.now += 5 if step == 0 else 0

    def on_predict_batch_begin(self, step: int, logs: Any = None) -> None:
        self.clock.now += 3 if step == 0 else 0


@pytest.mark.parametrize("duration", [35, 35.0, timedelta(seconds=35), "00:00:00:35"])
def test_stops_at_the_batch_after_the_time(duration: Any, clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    limit = Timer(duration)
    driver = Driver([Work(clock), limit], evaluate=values(1.0), batches=3)
    driver.fit(100)
    assert driver.run.progress.global_step == 3  # 30 s and 5 s of evaluation; then the epoch's end
    assert driver.run.control.stop == "Timer: the training time of 0:00:35 is over"
    assert limit.time_elapsed() == 35
    assert limit.time_remaining() == 0
    assert capsys.readouterr().out == "Timer: the training time of 0:00:35 is over; training stops.\n"


def test_stops_within_an_epoch_or_at_its_end(clock: Clock) -> None:
    by_batch, by_epoch = Timer(15, verbose=0), Timer(15, "epoch")
    first = Driver([Work(clock), by_batch], batches=5)
    first.fit(100)
    assert first.run.progress.global_step == 2
    second = Driver([Work(clock), by_epoch], batches=5, verbose=0)
    second.fit(100)
    assert second.run.progress.global_step == 5


def test_a_second_fit_begins_at_zero(clock: Clock) -> None:
    limit = Timer(100)
    driver = Driver([Work(clock), limit], batches=3)
    for _ in range(3):
        driver.fit(2)
        assert driver.run.control.stop is None
        assert limit.time_elapsed() == 60
        assert limit.time_remaining() == 40


def test_a_resumed_run_counts_on(clock: Clock) -> None:
    first = Driver([Work(clock), Timer(100)], batches=3)
    first.fit(2)
    file = io.BytesIO()
    torch.save(first.callbacks[1].state_dict(), file)
    file.seek(0)
    clock.now += 1000  # in between
    limit = Timer(100)
    second = Driver([Work(clock), limit], batches=3, verbose=0)
    limit.load_state_dict(torch.load(file, weights_only=True))
    assert limit.time_elapsed() == 60
    second.run.progress = first.run.progress
    second.fit(100, resume=True)
    assert limit.time_elapsed() == 100
    assert second.run.progress.global_step == 10


def test_a_resumed_run_whose_time_is_over_trains_no_batch(clock: Clock) -> None:
    limit = Timer(50)
    limit.load_state_dict({"elapsed": 50.0})
    driver = Driver([Work(clock), limit], verbose=0)
    driver.fit(2, resume=True)
    assert driver.run.progress.global_step == 0
    driver.fit(2)  # a fit of its own has its own time
    assert driver.run.progress.global_step == 5


def test_phases(clock: Clock) -> None:
    watch = Timer()
    driver = Driver([Work(clock), watch], evaluate=values(1.0), batches=2)
    assert watch.time_elapsed("eval") == 0
    assert watch.start_time() is None
    assert watch.time_remaining() is None
    before = datetime.now().astimezone()
    driver.fit(2)
    driver.evaluate()
    driver.predict()
    assert [watch.time_elapsed(phase) for phase in ("train", "eval", "predict")] == [50, 5, 3]
    start, end = watch.start_time("predict"), watch.end_time("predict")
    assert start is not None and end is not None
    assert before <= start <= end <= datetime.now().astimezone()
    assert driver.run.control.stop is None


def test_a_failure_stops_the_clocks(clock: Clock) -> None:
    watch = Timer()
    driver = Driver([Work(clock), watch], evaluate=values(1.0), batches=2)
    with pytest.raises(RuntimeError, match="evaluation failed"):
        driver.fit(2, fail_at=(1, 0))
    clock.now += 1000
    assert watch.time_elapsed("train") == 20
    assert watch.time_elapsed("eval") == 0  # failed before its first batch


def _steps() -> int:
    net = mlp()
    model = hapi.Model(net).prepare(torch.optim.SGD(net.parameters(), 0.1), torch.nn.CrossEntropyLoss())
    limit = Timer(0.05)
    model.fit(blobs(64), batch_size=2, epochs=10**6, log_freq=4, verbose=0, callbacks=limit)
    return model._progress.global_step


@pytest.mark.ranks
def test_several_ranks_stop_together() -> None:
    first, second = run_ranks(_steps, 2)
    assert first == second > 0
    assert first % 4 == 0  # at a log point


@pytest.mark.parametrize("bad", ["1:00", "00:00:61", "a", "-1:00:00:00", -1, float("nan"), timedelta(seconds=-1)])
def test_durations_are_checked(bad: Any) -> None:
    with pytest.raises(ValueError, match="Timer: duration="):
        Timer(bad)


def test_arguments_are_checked() -> None:
    assert Timer("01:02:03:04").duration == 86400 + 2 * 3600 + 3 * 60 + 4
    with pytest.raises(TypeError, match=r"duration=\[1\]; accepted: seconds, a datetime.timedelta, or 'DD:HH:MM:SS'"):
        Timer([1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="interval='step'; accepted: 'batch', 'epoch'"):
        Timer(interval="step")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"phase='trian'; did you mean 'train'\?; accepted: 'train', 'eval'"):
        Timer().time_elapsed("trian")  # type: ignore[arg-type]
