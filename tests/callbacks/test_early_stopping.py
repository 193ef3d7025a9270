from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hapi.callbacks import EarlyStopping
from tests.callbacks.driver import Driver, values


def epochs_run(callback: EarlyStopping, *losses: float, **options: Any) -> int:
    driver = Driver([callback], evaluate=values(*losses), **options)
    driver.fit(10)
    return driver.run.progress.epoch


@pytest.mark.parametrize(
    ("patience", "losses", "epochs"),
    [
        (0, [3, 2, 1, 1.5], 4),  # the first that did not improve, not the first of all
        (1, [3, 2, 1, 1.5], 4),
        (2, [3, 2, 2.5, 1, 1.5, 1.2, 0.5], 6),
        (3, [1, 1, 1, 1], 4),
        (9, [1], 10),
        (2, [1, float("nan")], 3),
    ],
)
def test_patience(patience: int, losses: list[float], epochs: int) -> None:
    assert epochs_run(EarlyStopping(patience=patience), *losses) == epochs


@pytest.mark.parametrize("monitor", ["acc", "eval_acc"])
def test_larger_is_better(monitor: str) -> None:
    accuracies = [0.1, 0.5, 0.4, 0.9]
    driver = Driver([EarlyStopping(monitor)], evaluate=lambda i: {"loss": 1.0, "acc": accuracies[i]})
    driver.fit(4)
    assert driver.run.progress.epoch == 3


def test_mode_min_delta_and_baseline() -> None:
    assert epochs_run(EarlyStopping(mode="max"), 1, 2, 1) == 3
    assert epochs_run(EarlyStopping(min_delta=0.5), 3, 2, 1.9) == 3
    assert epochs_run(EarlyStopping(baseline=1.0, patience=2), 3, 2, 1.5) == 2
    assert epochs_run(EarlyStopping(baseline=1.0, patience=2), 3, 0.5, 0.6, 0.7) == 4


def test_lines_name_the_true_epoch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    driver = Driver(
        [EarlyStopping()], evaluate=values(2.0, 1.0, 1.5, 0.5), eval_freq=2, save_dir=str(tmp_path), batches=1
    )
    driver.fit(10)
    assert driver.run.progress.epoch == 6  # three evaluations, in every second epoch
    assert driver.saved == ["best_model", "best_model"]
    assert capsys.readouterr().out.splitlines() == [
        "Epoch 6: Early stopping.",
        f"Best checkpoint has been saved at {tmp_path / 'best_model'}",
    ]


def test_second_fit_begins_anew(capsys: pytest.CaptureFixture[str]) -> None:
    driver = Driver([EarlyStopping()], evaluate=values(1, 2, 5, 6))
    driver.fit(5)
    driver.fit(5)
    assert driver.run.progress.epoch == 4
    assert capsys.readouterr().out == "Epoch 2: Early stopping.\n" * 2


def test_no_line_about_a_file_that_was_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    epochs_run(EarlyStopping(baseline=0.0), 1.0, save_dir=str(tmp_path))
    epochs_run(EarlyStopping(save_best_model=False), 1.0, save_dir=str(tmp_path))
    epochs_run(EarlyStopping(), 1.0)
    assert "Best checkpoint" not in capsys.readouterr().out


@pytest.mark.parametrize(("own", "fit"), [(0, 2), (1, 0)])
def test_silent(capsys: pytest.CaptureFixture[str], own: int, fit: int) -> None:
    epochs_run(EarlyStopping(verbose=own), 1.0, verbose=fit)
    assert capsys.readouterr().out == ""


def test_reason_of_the_stop() -> None:
    driver = Driver([EarlyStopping("eval_loss")], evaluate=values(0.25, 0.5))
    driver.fit(5)
    assert driver.run.control.stop == "EarlyStopping: eval_loss has not improved on 0.25"


def test_restores_the_best(tmp_path: Path) -> None:
    driver = Driver(
        [EarlyStopping(patience=2, restore_best_weights=True)],
        evaluate=values(2.0, 1.0, 1.5, 1.6),
        save_dir=str(tmp_path),
    )
    driver.fit(10)
    assert driver.actions == ["keep", "best_model", "keep", "best_model", "restore"]


def test_restores_also_without_an_early_stop() -> None:
    driver = Driver([EarlyStopping(patience=5, restore_best_weights=True)], evaluate=values(1.0, 2.0))
    driver.fit(3)
    assert driver.actions == ["keep", "restore"]


def test_restores_nothing_when_there_is_no_best_or_training_failed() -> None:
    never = Driver([EarlyStopping(patience=5, restore_best_weights=True, baseline=0.0)], evaluate=values(1.0, 2.0))
    never.fit(2)
    failed = Driver([EarlyStopping(patience=5, restore_best_weights=True)], evaluate=values(1.0, 2.0))
    with pytest.raises(RuntimeError, match="batch failed"):
        failed.fit(3, fail_at=(2, 1))
    assert never.actions == []
    assert failed.actions == ["keep"]
    assert failed.run.control.requests == []


def test_separate_evaluation_changes_nothing() -> None:
    callback = EarlyStopping()
    driver = Driver([callback], evaluate=values(1.0, 2.0, 0.5, 3.0))
    driver.evaluate()
    assert callback.best == float("inf")
    driver.fit(1)
    driver.evaluate()
    assert callback.best == 2.0
    assert driver.run.control.stop is None


def test_without_evaluation_data() -> None:
    driver = Driver([EarlyStopping()])
    with pytest.warns(UserWarning, match="fit has no evaluation data") as caught:
        driver.fit(3)
    assert len(caught) == 1
    assert driver.run.progress.epoch == 3


def test_missing_monitor_trains_on() -> None:
    driver = Driver([EarlyStopping("acc")], evaluate=values(1.0))
    with pytest.warns(UserWarning, match="available: loss") as caught:
        driver.fit(3)
    assert len(caught) == 1
    assert driver.run.progress.epoch == 3


def resumed(first: Driver, second: Driver) -> None:
    second.callbacks[0].load_state_dict(first.callbacks[0].state_dict())
    second.run.progress, second.evaluations = first.run.progress, first.evaluations


def test_resume_counts_on() -> None:
    def new() -> Driver:
        return Driver([EarlyStopping(patience=3)], evaluate=values(1.0, 2.0))

    first, second = new(), new()
    first.fit(3)
    resumed(first, second)
    second.fit(10, resume=True)
    assert second.run.progress.epoch == 4


def test_resume_says_that_the_best_weights_are_gone(tmp_path: Path) -> None:
    def new() -> Driver:
        callback = EarlyStopping(patience=3, restore_best_weights=True)
        return Driver([callback], evaluate=values(1.0, 2.0), save_dir=str(tmp_path))

    first, second = new(), new()
    first.fit(2)
    resumed(first, second)
    with pytest.warns(UserWarning, match=r"of epoch 1, .* not restored; they are in .*best_model"):
        second.fit(10, resume=True)
    assert second.actions == []


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"monitor": ""}, ValueError),
        ({"mode": "down"}, ValueError),
        ({"patience": -1}, ValueError),
        ({"patience": 1.5}, TypeError),
        ({"verbose": 7}, ValueError),
        ({"min_delta": -0.1}, ValueError),
        ({"baseline": float("nan")}, ValueError),
        ({"baseline": "1"}, TypeError),
        ({"save_best_model": None}, TypeError),
        ({"restore_best_weights": 1}, TypeError),
    ],
)
def test_refused_arguments(arguments: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=f"EarlyStopping: {next(iter(arguments))}=.*accepted"):
        EarlyStopping(**arguments)
