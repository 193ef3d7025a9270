"""LambdaCallback, LRScheduler, TerminateOnNaN."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hapi.callbacks import Callback, LambdaCallback, LRScheduler, TerminateOnNaN
from tests.callbacks.driver import Driver, values

HOOKS = [name for name in vars(Callback) if name.startswith("on_")]


def test_lambda_gets_every_hook_it_asked_for(tmp_path: Any) -> None:
    calls: list[str] = []
    hooks = {name: (lambda *args, name=name: calls.append(f"{name}{len(args)}")) for name in HOOKS}
    driver = Driver([LambdaCallback(**hooks)], evaluate=values(1.0), batches=1, eval_batches=1)
    driver.fit(1)
    assert calls == [
        "on_train_begin1",
        "on_epoch_begin2",
        "on_train_batch_begin2",
        "on_before_optimizer_step2",
        "on_train_batch_end2",
        "on_eval_begin1",
        "on_eval_batch_begin2",
        "on_eval_batch_end2",
        "on_eval_end1",
        "on_epoch_end2",
        "on_train_end1",
    ]
    calls.clear()
    with pytest.raises(RuntimeError, match="prediction failed"):
        driver.predict(fail=True)
    assert calls == ["on_predict_begin1", "on_predict_batch_begin2", "on_exception1", "on_predict_end1"]


def test_lambda_leaves_other_hooks_to_the_base() -> None:
    callback = LambdaCallback(on_epoch_end=print)
    assert callback.on_epoch_end is print
    assert callback.on_train_batch_end.__func__ is Callback.on_train_batch_end  # type: ignore[attr-defined]


def test_lambda_refuses_typos() -> None:
    with pytest.raises(TypeError, match=r"unknown hook 'on_epoch_ends'; did you mean 'on_epoch_end'\?; accepted: "):
        LambdaCallback(on_epoch_ends=print)
    with pytest.raises(TypeError, match="on_epoch_end=3 cannot be called"):
        LambdaCallback(on_epoch_end=3)  # type: ignore[arg-type]


def test_scheduler_interval() -> None:
    assert LRScheduler().interval == "step"
    assert LRScheduler(by_step=False, by_epoch=True).interval == "epoch"
    assert LRScheduler(by_step=False).interval is None
    with pytest.raises(ValueError, match=r"by_step=True and by_epoch=True; accepted: one of them"):
        LRScheduler(by_epoch=True)
    with pytest.raises(TypeError, match="by_step=1; accepted: True or False"):
        LRScheduler(by_step=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_stops_at_the_next_log_point(bad: float) -> None:
    def loss(epoch: int, batch: int) -> dict[str, Any]:
        return {"loss": bad if epoch and batch >= 3 else 1.0}

    driver = Driver([TerminateOnNaN()], train=loss, batches=9, log_freq=4)
    with pytest.warns(RuntimeWarning, match=r"loss is -?(nan|inf) in epoch 2, batch 4 \(global step 13\)") as seen:
        driver.fit(5)
    assert len(seen) == 1
    assert driver.run.progress.global_step == 13
    assert str(driver.run.control.stop).startswith("TerminateOnNaN: the loss is")


def test_check_every_asks_for_more_log_points() -> None:
    driver = Driver([TerminateOnNaN(check_every=1)], train=lambda e, b: {"loss": math.nan}, log_freq=100)
    with pytest.warns(RuntimeWarning, match="epoch 1, batch 1 "):
        driver.fit(1)
    assert driver.run.progress.global_step == 1


def test_nan_after_the_last_log_point_of_an_unknown_length() -> None:
    driver = Driver([TerminateOnNaN()], train=lambda e, b: {"loss": math.nan}, log_freq=100, known=False)
    with pytest.warns(RuntimeWarning, match="epoch 1, batch 4 "):
        driver.fit(3)
    assert driver.run.progress.epoch == 1


def test_finite_losses_go_on_and_arguments_are_checked() -> None:
    driver = Driver([TerminateOnNaN()])
    driver.fit(2)
    assert driver.run.control.stop is None
    with pytest.raises(ValueError, match="TerminateOnNaN: check_every=0; accepted: an int >= 1"):
        TerminateOnNaN(check_every=0)
