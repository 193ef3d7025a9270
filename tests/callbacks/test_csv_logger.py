from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hapi.callbacks import Callback, CSVLogger
from tests.callbacks.driver import Driver, values


def rows(path: Path) -> list[list[str]]:
    with open(path, newline="") as file:
        return list(csv.reader(file))


def test_one_row_per_epoch(tmp_path: Path) -> None:
    path = tmp_path / "new" / "log.csv"
    Driver([CSVLogger(path)], evaluate=values(5.0, 4.0), eval_freq=2, batches=2).fit(3)
    assert path.read_bytes() == (
        b"epoch,global_step,loss,eval_loss,lr\n"
        b"1,2,0.5,,0.1\n"
        b"2,4,0.08333333333333333,5.0,0.1\n"
        b"3,6,0.045454545454545456,4.0,0.1\n"
    )
    assert os.listdir(path.parent) == ["log.csv"]


def test_rows_are_on_disk_at_once(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    driver = Driver([CSVLogger(path)])
    with pytest.raises(RuntimeError, match="batch failed"):
        driver.fit(3, fail_at=(2, 1))
    assert [row[0] for row in rows(path)] == ["epoch", "1"]


class Late(Callback):
    """A value that is there from the second epoch, and things that no table holds."""

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        assert logs is not None
        logs["curve"] = np.ones(3)
        if epoch:
            logs["a;b"] = np.float32(0.5)


def test_late_column_and_separator(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    Driver([Late(), CSVLogger(path, separator=";")], batches=1).fit(3)
    assert path.read_text().splitlines() == [
        'epoch;global_step;loss;lr;"a;b"',
        "1;1;1.0;0.1;",
        "2;2;0.09090909090909091;0.1;0.5",
        "3;3;0.047619047619047616;0.1;0.5",
    ]


def test_second_fit_replaces_or_appends(tmp_path: Path) -> None:
    for append, epochs in ((False, ["3"]), (True, ["1", "2", "3"])):
        path = tmp_path / f"{append}.csv"
        driver = Driver([CSVLogger(path, append=append)])
        driver.fit(2)
        driver.fit(1)
        assert [row[0] for row in rows(path)[1:]] == epochs


def test_append_adds_columns_to_an_older_file(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    Driver([CSVLogger(path)], batches=1).fit(1)
    Driver([CSVLogger(path, append=True)], evaluate=values(5.0), batches=1).fit(1)
    assert rows(path) == [
        ["epoch", "global_step", "loss", "lr", "eval_loss"],
        ["1", "1", "1.0", "0.1", ""],
        ["1", "1", "1.0", "0.1", "5.0"],
    ]


@pytest.mark.parametrize("append", [False, True])
def test_resume_drops_epochs_after_the_checkpoint(tmp_path: Path, append: bool) -> None:
    path = tmp_path / "log.csv"
    first, second = (Driver([CSVLogger(path, append=append)]) for _ in range(2))
    first.fit(4)
    with open(path, "a") as file:
        file.write("5,20,0.1")  # cut off within a line
    # The newest checkpoint is of epoch 2.
    second.callbacks[0].load_state_dict(first.callbacks[0].state_dict())
    second.run.progress.epoch, second.run.progress.global_step = 2, 8
    second.fit(3, resume=True)
    assert [row[:2] for row in rows(path)[1:]] == [["1", "4"], ["2", "8"], ["3", "12"]]
    second.fit(1)  # is no resumed run
    assert [row[0] for row in rows(path)[1:]] == (["1", "2", "3", "4"] if append else ["4"])


def test_resume_without_the_file(tmp_path: Path) -> None:
    callback = CSVLogger(tmp_path / "log.csv")
    callback.load_state_dict({"columns": ["epoch", "global_step", "extra"]})
    Driver([callback], batches=1).fit(1)
    assert rows(tmp_path / "log.csv")[0] == ["epoch", "global_step", "extra", "loss", "lr"]


def test_unwritable_path(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(OSError, match="file"):
        Driver([CSVLogger(blocked / "log.csv")]).fit(1)
    with pytest.raises(IsADirectoryError, match="is a folder; give the path of a file"):
        Driver([CSVLogger(tmp_path)]).fit(1)


@pytest.mark.parametrize("text", ["a,b\n1,2\n", "epoch,global_step\nx,2\n", "epoch,global_step\n1,2,3\n"])
def test_file_of_another_kind_is_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "log.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match="was not written by a CSVLogger with separator=','"):
        Driver([CSVLogger(path, append=True)]).fit(1)
    assert path.read_text() == text


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"filename": ""}, ValueError),
        ({"filename": "x", "separator": ""}, ValueError),
        ({"filename": "x", "separator": ", "}, ValueError),
        ({"filename": "x", "separator": '"'}, ValueError),
        ({"filename": "x", "append": "yes"}, TypeError),
    ],
)
def test_refused_arguments(arguments: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=f"CSVLogger: {list(arguments)[-1]}=.*accepted"):
        CSVLogger(**arguments)
