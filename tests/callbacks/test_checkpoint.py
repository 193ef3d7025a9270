from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hapi.callbacks import ModelCheckpoint
from tests.callbacks.driver import Driver, values


def names(paths: tuple[str, ...]) -> list[str]:
    return [Path(path).name for path in paths]


def removed(driver: Driver) -> dict[str, list[str]]:
    return {Path(r.path).name: names(r.remove) for r in driver.done if r.remove}


def test_epochs_count_from_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    driver = Driver([ModelCheckpoint(2, tmp_path)])
    driver.fit(5)
    assert driver.saved == ["2", "4", "final"]
    assert capsys.readouterr().out.splitlines() == [
        f"save checkpoint at {tmp_path / name}" for name in ("2", "4", "final")
    ]


def test_inherits_save_dir_of_fit_and_own_wins(tmp_path: Path) -> None:
    driver = Driver([ModelCheckpoint()], save_dir=str(tmp_path / "fit"))
    driver.fit(1)
    own = Driver([ModelCheckpoint(save_dir=tmp_path / "own")], save_dir=str(tmp_path / "fit"))
    own.fit(1)
    assert driver.done[0].path == str(tmp_path / "fit" / "1")
    assert own.done[0].path == str(tmp_path / "own" / "1")


def test_relative_folder_is_printed_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Driver([ModelCheckpoint(save_dir="out")]).fit(1)
    assert f"save checkpoint at {tmp_path / 'out' / '1'}" in capsys.readouterr().out


def test_nowhere_to_save() -> None:
    with pytest.raises(ValueError, match=r"nowhere to save; give ModelCheckpoint\(save_dir=...\) or fit"):
        Driver([ModelCheckpoint()]).fit(1)


@pytest.mark.parametrize(("own", "fit"), [(0, 2), (1, 0)])
def test_silent(tmp_path: Path, capsys: pytest.CaptureFixture[str], own: int, fit: int) -> None:
    Driver([ModelCheckpoint(save_dir=tmp_path, verbose=own)], verbose=fit).fit(1)
    assert capsys.readouterr().out == ""


def test_says_nothing_about_files_of_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    callback = ModelCheckpoint(save_dir=tmp_path)
    driver = Driver([callback])
    driver.fit(1)
    capsys.readouterr()
    callback.on_save(str(tmp_path / "1"))  # by another callback, after the own one is reported
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("monitor", ["loss", "eval_loss"])
def test_best(tmp_path: Path, monitor: str) -> None:
    # The training loss falls in every epoch; the evaluation's does not.
    driver = Driver([ModelCheckpoint(3, tmp_path, monitor=monitor)], evaluate=values(3.0, 2.0, 2.5, float("nan"), 1.0))
    driver.fit(5)
    assert driver.saved == ["best", "best", "3", "best", "final"]


def test_best_skips_epochs_without_evaluation(tmp_path: Path) -> None:
    driver = Driver(
        [ModelCheckpoint(save_dir=tmp_path, monitor="loss", save_best_only=True)],
        evaluate=values(3.0, 2.0),
        eval_freq=2,
        train=lambda epoch, batch: {"loss": 0.1},
    )
    driver.fit(4)
    assert driver.saved == ["best", "best"]


def test_best_of_training_without_evaluation_data(tmp_path: Path) -> None:
    losses = [3.0, 4.0, 2.0]
    driver = Driver(
        [ModelCheckpoint(save_dir=tmp_path, monitor="loss", save_best_only=True)],
        train=lambda epoch, batch: {"loss": losses[epoch]},
    )
    driver.fit(3)
    assert driver.saved == ["best", "best"]


def test_best_by_mode(tmp_path: Path) -> None:
    def saved(mode: str) -> int:
        callback = ModelCheckpoint(save_dir=tmp_path, monitor="score", mode=mode, save_best_only=True)
        driver = Driver([callback], evaluate=lambda i: {"score": i})
        driver.fit(3)
        return len(driver.saved)

    assert (saved("max"), saved("min"), saved("auto")) == (3, 1, 1)


def test_keep_last(tmp_path: Path) -> None:
    driver = Driver([ModelCheckpoint(save_dir=tmp_path, monitor="loss", max_to_keep=2)], evaluate=values(2.0, 1.0))
    driver.fit(4)
    assert driver.saved == ["1", "best", "2", "best", "3", "4", "final"]
    assert removed(driver) == {"3": ["1"], "4": ["2"]}


def test_keep_one_never_removes_the_newest(tmp_path: Path) -> None:
    driver = Driver([ModelCheckpoint(save_dir=tmp_path, max_to_keep=1, every_n_steps=3)])
    driver.fit(2)  # 4 steps each
    assert driver.saved == ["step-3", "1", "step-6", "2", "final"]
    assert removed(driver) == {"1": ["step-3"], "step-6": ["1"], "2": ["step-6"]}


def test_second_fit_in_the_same_folder(tmp_path: Path) -> None:
    driver = Driver([ModelCheckpoint(save_dir=tmp_path, max_to_keep=2)])
    driver.fit(3)
    driver.done.clear()
    driver.fit(3)
    # 2 and 3 are there when 1 is written again; no file is removed by its own second writing.
    assert removed(driver) == {"1": ["2"], "2": ["3"], "3": ["1"]}


def test_second_fit_in_another_folder_leaves_the_first_alone(tmp_path: Path) -> None:
    driver = Driver([ModelCheckpoint(max_to_keep=1)], save_dir=str(tmp_path / "a"))
    driver.fit(1)
    driver.done.clear()
    driver.save_dir = str(tmp_path / "b")
    driver.fit(2)
    assert [r.remove for r in driver.done if r.remove] == [(str(tmp_path / "b" / "1"),)]


def test_second_fit_begins_a_new_best(tmp_path: Path) -> None:
    driver = Driver([ModelCheckpoint(save_dir=tmp_path, monitor="loss", save_best_only=True)], evaluate=values(1, 2, 3))
    driver.fit(1)
    driver.fit(1)
    assert driver.saved == ["best", "best"]


def test_every_n_steps_counts_updates(tmp_path: Path) -> None:
    driver = Driver([ModelCheckpoint(9, tmp_path, every_n_steps=2)], accumulate=2, batches=5)
    driver.fit(2)  # 3 updates per epoch: after batches 2, 4 and 5
    assert driver.saved == ["step-2", "step-4", "step-6", "final"]


def test_every_n_steps_on_several_ranks_bears_the_step_that_is_saved(tmp_path: Path) -> None:
    driver = Driver([ModelCheckpoint(9, tmp_path, every_n_steps=4)], batches=9, log_freq=3, world=2)
    driver.fit(2)
    # Multiples of 4 are passed at 4, 8, 12 and 16; log points are 3, 6, 9 | 12, 15, 18.
    assert driver.saved == ["step-6", "step-9", "step-12", "step-18", "final"]


def test_failed_run_has_no_final(tmp_path: Path) -> None:
    driver = Driver([ModelCheckpoint(save_dir=tmp_path)])
    with pytest.raises(RuntimeError, match="batch failed"):
        driver.fit(2, fail_at=(2, 1))
    assert driver.saved == ["1"]
    assert driver.run.control.requests == []
    driver.fit(1)
    assert driver.saved == ["1", "1", "final"]


def test_resume_keeps_the_best_and_the_files(tmp_path: Path) -> None:
    def new() -> Driver:
        callback = ModelCheckpoint(save_dir=tmp_path, monitor="loss", max_to_keep=2)
        return Driver([callback], evaluate=values(1.0, 2.0, 0.5))

    first, second = new(), new()
    first.fit(2)
    second.callbacks[0].load_state_dict(first.callbacks[0].state_dict())
    second.run.progress, second.evaluations = first.run.progress, 1
    second.fit(4, resume=True)
    assert second.saved == ["3", "4", "best", "final"]
    assert removed(second) == {"3": ["1"], "4": ["2"]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"save_freq": 0}, "save_freq=0; accepted: an int >= 1"),
        ({"save_dir": ""}, "save_dir=''"),
        ({"max_to_keep": 0}, "max_to_keep=0"),
        ({"every_n_steps": 0}, "every_n_steps=0"),
        ({"verbose": 9}, "verbose=9"),
        ({"mode": "max"}, "mode='max' without monitor"),
        ({"monitor": "loss", "mode": "best"}, "mode='best'"),
        ({"save_best_only": True}, "needs monitor"),
        ({"monitor": "loss", "save_best_only": True, "every_n_steps": 5}, "excludes every_n_steps"),
        (
            {"monitor": "loss", "save_best_only": True, "max_to_keep": 5},
            "excludes every_n_steps and max_to_keep",
        ),
    ],
)
def test_refused_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelCheckpoint(**arguments)


def test_refused_types() -> None:
    with pytest.raises(TypeError, match="save_best_only=1; accepted: True or False"):
        ModelCheckpoint(monitor="loss", save_best_only=1)  # type: ignore[arg-type]
