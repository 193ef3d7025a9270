from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hapi.callbacks import Callback, ReduceLROnPlateau
from tests.callbacks.driver import Driver, values


class Rates(Callback):
    def __init__(self) -> None:
        self.seen: list[list[float]] = []

    def on_eval_end(self, logs: dict[str, Any] | None = None) -> None:
        assert self.run.optimizer is not None
        self.seen.append([float(group["lr"]) for group in self.run.optimizer.param_groups])


def rates(callback: ReduceLROnPlateau, *losses: float, epochs: int, **options: Any) -> list[float]:
    seen = Rates()
    driver = Driver([callback, seen], evaluate=values(*losses), batches=1, **options)
    driver.fit(epochs)
    return [round(row[0], 10) for row in seen.seen]


def test_reference_trace(capsys: pytest.CaptureFixture[str]) -> None:
    callback = ReduceLROnPlateau(factor=0.5, patience=2, cooldown=1, min_lr=0.02)
    assert rates(callback, 1, 0.9, epochs=10) == [0.1] * 3 + [0.05] * 2 + [0.025] * 2 + [0.02] * 3
    assert capsys.readouterr().out.splitlines() == [
        "Epoch 4: ReduceLROnPlateau reducing learning rate to 0.05.",
        "Epoch 6: ReduceLROnPlateau reducing learning rate to 0.025.",
        "Epoch 8: ReduceLROnPlateau reducing learning rate to 0.02.",
    ]


def test_line_names_the_true_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    rates(ReduceLROnPlateau(factor=0.5, patience=1), 1, epochs=4, eval_freq=2)
    assert capsys.readouterr().out == "Epoch 4: ReduceLROnPlateau reducing learning rate to 0.05.\n"


def test_min_delta_and_mode() -> None:
    assert rates(ReduceLROnPlateau(factor=0.5, patience=1), 1, 0.99995, epochs=2) == [0.1, 0.05]
    assert rates(ReduceLROnPlateau(factor=0.5, patience=1, min_delta=0), 1, 0.99995, epochs=2) == [0.1, 0.1]
    assert rates(ReduceLROnPlateau(factor=0.5, patience=1, mode="max"), 1, 2, epochs=3) == [0.1, 0.1, 0.05]


def test_every_group_and_tensor_rates() -> None:
    callback = ReduceLROnPlateau(factor=0.5, patience=1, min_lr=0.01, verbose=0)
    driver = Driver([callback], evaluate=values(1), batches=1, groups=3)
    groups = driver.run.optimizer.param_groups
    tensor = torch.tensor(0.5)
    groups[1]["lr"], groups[2]["lr"] = tensor, 0.01
    driver.fit(2)
    assert [float(group["lr"]) for group in groups] == pytest.approx([0.05, 0.25, 0.01])
    assert groups[1]["lr"] is tensor


@pytest.mark.parametrize(("own", "fit"), [(0, 2), (1, 0)])
def test_silent(capsys: pytest.CaptureFixture[str], own: int, fit: int) -> None:
    assert rates(ReduceLROnPlateau(patience=1, verbose=own), 1, epochs=2, verbose=fit) == [0.1, 0.01]
    assert capsys.readouterr().out == ""


def test_refuses_a_scheduler() -> None:
    driver = Driver([ReduceLROnPlateau()], evaluate=values(1), scheduler=SimpleNamespace())
    with pytest.raises(ValueError, match=r"the run has the scheduler SimpleNamespace.*remove one of them"):
        driver.fit(1)


def test_separate_evaluation_changes_nothing() -> None:
    callback = ReduceLROnPlateau(patience=1)
    driver = Driver([callback], evaluate=values(1))
    driver.evaluate()
    driver.fit(1)
    for _ in range(3):
        driver.evaluate()
    assert driver.lr == 0.1


def test_second_fit_begins_anew_and_resume_counts_on() -> None:
    driver = Driver([ReduceLROnPlateau(patience=2, factor=0.5)], evaluate=values(1))
    driver.fit(2)
    driver.fit(2)
    assert driver.lr == 0.1
    second = Driver([ReduceLROnPlateau(patience=2, factor=0.5)], evaluate=values(1))
    second.callbacks[0].load_state_dict(driver.callbacks[0].state_dict())
    second.fit(1)
    assert second.lr == 0.05


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"factor": 1.0}, ValueError),
        ({"factor": 0}, ValueError),
        ({"factor": "half"}, TypeError),
        ({"patience": -1}, ValueError),
        ({"verbose": 5}, ValueError),
        ({"mode": "down"}, ValueError),
        ({"min_delta": float("inf")}, ValueError),
        ({"cooldown": 1.5}, TypeError),
        ({"min_lr": -1}, ValueError),
    ],
)
def test_refused_arguments(arguments: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=f"ReduceLROnPlateau: {next(iter(arguments))}=.*accepted"):
        ReduceLROnPlateau(**arguments)
