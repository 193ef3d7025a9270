from __future__ import annotations

import csv
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import hapi
from hapi.callbacks import CSV, Callback
from tests.helpers.launching import sandbox
from tests.helpers.nets import blobs, mlp

X, Y = blobs(50)


def read(folder: Path) -> list[dict[str, str]]:
    with open(folder / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def curve(folder: Path, tag: str) -> list[tuple[int, float]]:
    return [(int(row["step"]), float(row[tag])) for row in read(folder) if row.get(tag)]


def prepared() -> hapi.Model:
    net = mlp()
    return hapi.Model(net).prepare(torch.optim.SGD(net.parameters(), 0.1), "cross_entropy", "acc")


def fit(model: hapi.Model, *callbacks: Callback, **options: Any) -> hapi.callbacks.History:
    how: dict[str, Any] = {"batch_size": 8, "epochs": 2, "verbose": 0, "log_freq": 3, "seed": 1}
    return model.fit((X, Y), (X, Y), callbacks=list(callbacks), **{**how, **options})


@pytest.fixture
def opened(tmp_path: Path) -> Any:
    writer = CSV(tmp_path)
    writer.open_run(tmp_path, 0, False)
    yield writer
    writer.close_run()


def test_a_row_per_step(tmp_path: Path) -> None:
    history = fit(prepared(), CSV(tmp_path, "run")).history
    run = tmp_path / "run"
    rows = read(run)
    assert list(rows[0])[:4] == ["step", "time", "train/loss", "train/acc"]
    assert [row["step"] for row in rows] == [
        "3",
        "6",
        "7",
        "10",
        "13",
        "14",
    ]  # the evaluation is in the row of its step
    times = [float(row["time"]) for row in rows]
    assert times == sorted(times)
    assert curve(run, "eval/loss") == list(zip((7, 14), history["eval_loss"], strict=True))
    loss = [value for _, value in curve(run, "train/loss")]
    assert (24 * loss[0] + 24 * loss[1] + 2 * loss[2]) / 50 == pytest.approx(history["loss"][0], rel=1e-9)
    assert os.listdir(run) == ["metrics.csv"]


def test_fit_evaluate_fit_is_one_table(tmp_path: Path) -> None:
    writer, model = CSV(tmp_path, "run"), prepared()
    fit(model, writer, epochs=1)
    rows = read(tmp_path / "run")
    model.evaluate((X, Y), batch_size=50, verbose=0, callbacks=writer)
    fit(model, writer, epochs=1)
    assert [step for step, _ in curve(tmp_path / "run", "train/loss")] == [3, 6, 7, 10, 13, 14]
    assert read(tmp_path / "run")[:2] == rows[:2]


def test_a_row_is_in_the_file_at_once(opened: CSV, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        opened.write({"train/loss": 0.5 * step}, step)
        assert curve(tmp_path, "train/loss")[-1] == (step, 0.5 * step)


def test_columns_that_come_late_and_odd_values(opened: CSV, tmp_path: Path) -> None:
    opened.write({"train/loss": math.nan}, 1)
    opened.write({"train/loss": math.inf}, 2)
    opened.write({'a "b", %é': 0.1}, 2)
    opened.write({"train/loss": -math.inf}, 3)
    opened.write({'a "b", %é': 1e300}, 3)
    rows = read(tmp_path)
    assert [row["train/loss"] for row in rows] == ["nan", "inf", "-inf"]
    assert [row['a "b", %é'] for row in rows] == ["", "0.1", "1e+300"]
    assert os.listdir(tmp_path) == ["metrics.csv"]


def test_a_row_that_grows_keeps_its_time(opened: CSV, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([1.0, 2.0, 3.0])
    monkeypatch.setattr("time.time", lambda: next(now))
    opened.write({"train/loss": 1.0, "eval/loss": 2.0}, 1)
    opened.write({"train/loss": 1.0}, 2)
    opened.write({"eval/loss": 2.0}, 2)
    assert [row["time"] for row in read(tmp_path)] == ["1.000", "2.000"]
    assert read(tmp_path)[1] == {"step": "2", "time": "2.000", "train/loss": "1.0", "eval/loss": "2.0"}


def test_a_run_that_was_killed_and_resumed_is_one_table(tmp_path: Path) -> None:
    class Dies(Callback):
        def on_train_batch_end(self, step: int, logs: Any = None) -> None:
            if self.run.progress.global_step == 11:
                raise KeyError("killed")

    options: dict[str, Any] = {"save_dir": tmp_path / "saved", "save_every_n_steps": 4, "resume": "auto", "log_freq": 1}
    with pytest.raises(KeyError):
        fit(prepared(), CSV(tmp_path, "run"), Dies(), **options)
    run = tmp_path / "run"
    assert [step for step, _ in curve(run, "train/loss")] == list(range(1, 12))
    with open(run / "metrics.csv", "a") as file:
        file.write("12,1700000000.000,0.")
    fit(prepared(), CSV(tmp_path, "run"), **options)
    fit(prepared(), CSV(tmp_path / "whole", "run"), log_freq=1)
    for tag in ("train/loss", "train/acc", "eval/loss"):
        assert curve(run, tag) == curve(tmp_path / "whole" / "run", tag)


@pytest.mark.parametrize("text", ["a,b\n1,2\n", "step,time,x\n1,2,3,4\n", "step,time\nx,1\n"])
def test_another_file_is_not_written_to(tmp_path: Path, text: str) -> None:
    (tmp_path / "metrics.csv").write_text(text)
    with pytest.raises(ValueError, match=r"CSV: .*metrics\.csv' was not written by CSV"):
        CSV(tmp_path).open_run(tmp_path, 5, True)
    assert (tmp_path / "metrics.csv").read_text() == text


def test_a_full_disk_does_not_stop_the_training(tmp_path: Path) -> None:
    code = """
        import resource, warnings
        import hapi
        from hapi.callbacks import CSV, JSONLines
        from tests.helpers.nets import blobs, mlp
        data = blobs(64)
        model = hapi.Model(mlp()).prepare("adam", "cross_entropy", "acc")
        writers = [CSV("log", "csv", log_freq=1), JSONLines("log", "json", log_freq=1)]
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, most))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            history = model.fit(data, data, epochs=3, batch_size=8, verbose=0, callbacks=writers)
        texts = sorted(str(warning.message) for warning in caught)
        assert ["without CSV" in texts[0], "without JSONLines" in texts[1], len(texts)] == [True, True, 2], texts
        assert len(history.history["loss"]) == 3
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        model.fit(data, data, epochs=1, batch_size=8, verbose=0, callbacks=writers)
    """
    with sandbox(tmp_path) as box:
        ended = box.run([sys.executable, box.script("full.py", code)])
    assert (ended.code, ended.out) == (0, ""), ended.err
    steps = [step for step, _ in curve(tmp_path / "log" / "csv", "train/loss")]
    assert steps[0] == 1
    assert steps[-8:] == list(range(25, 33))
    lines = (tmp_path / "log" / "json" / "metrics.jsonl").read_text().splitlines()
    assert all(line.startswith("{") and line.endswith("}") for line in lines)


def test_wrong_arguments_are_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="CSV: log_dir=3; accepted"):
        CSV(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="CSV: log_freq=0; accepted: an int >= 1"):
        CSV(tmp_path, log_freq=0)
