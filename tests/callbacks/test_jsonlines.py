from __future__ import annotations

import json
import math
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import hapi
from hapi.callbacks import Callback, JSONLines
from tests.helpers.launching import sandbox
from tests.helpers.nets import blobs, mlp

X, Y = blobs(50)


def read(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def curve(folder: Path, tag: str) -> list[tuple[int, float]]:
    return [(point["step"], point[tag]) for point in read(folder) if tag in point]


def prepared() -> hapi.Model:
    net = mlp()
    return hapi.Model(net).prepare(torch.optim.SGD(net.parameters(), 0.1), "cross_entropy", "acc")


def fit(model: hapi.Model, *callbacks: Callback, **options: Any) -> hapi.callbacks.History:
    how: dict[str, Any] = {"batch_size": 8, "epochs": 2, "verbose": 0, "log_freq": 3, "seed": 1}
    return model.fit((X, Y), (X, Y), callbacks=list(callbacks), **{**how, **options})


def test_an_object_per_point(tmp_path: Path) -> None:
    history = fit(prepared(), JSONLines(tmp_path, "run", hparams={"note": "é", "decay": math.inf})).history
    run = tmp_path / "run"
    first, *points = read(run)
    assert list(first) == ["hparams"]
    assert {"optimizer": "SGD", "lr": 0.1, "note": "é", "decay": "inf"}.items() <= first["hparams"].items()
    assert [point["step"] for point in points] == [3, 6, 7, 7, 10, 13, 14, 14]
    assert list(points[0])[:3] == ["step", "time", "train/loss"]
    times = [point["time"] for point in points]
    assert times == sorted(times)
    assert curve(run, "eval/acc") == list(zip((7, 14), history["eval_acc"], strict=True))


def test_no_hyper_parameters(tmp_path: Path) -> None:
    fit(prepared(), JSONLines(tmp_path, "run", hparams=False))
    assert all("step" in point for point in read(tmp_path / "run"))


def test_fit_evaluate_fit_is_one_file(tmp_path: Path) -> None:
    writer, model = JSONLines(tmp_path, "run"), prepared()
    fit(model, writer, epochs=1)
    model.evaluate((X, Y), batch_size=50, verbose=0, callbacks=writer)
    fit(model, writer, epochs=1)
    run = tmp_path / "run"
    assert sum("hparams" in point for point in read(run)) == 1
    assert [step for step, _ in curve(run, "train/loss")] == [3, 6, 7, 10, 13, 14]
    assert [step for step, _ in curve(run, "eval/loss")] == [7, 7, 14]


def test_every_parser_reads_what_is_not_finite(tmp_path: Path) -> None:
    writer = JSONLines(tmp_path)
    writer.open_run(tmp_path, 0, False)
    writer.write({"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1e300}, 1)
    writer.close_run()

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    point = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert (point["a"], point["b"], point["c"], point["d"]) == ("nan", "inf", "-inf", 1e300)
    assert math.isnan(float(point["a"]))


def test_a_kill_loses_nothing_and_the_resumed_run_is_one_curve(tmp_path: Path) -> None:
    code = """
        import sys, time
        from hapi.callbacks import Callback, JSONLines
        from tests.callbacks.test_jsonlines import fit, prepared

        class Sleeps(Callback):
            def on_train_batch_end(self, step, logs=None):
                if self.run.progress.global_step == int(sys.argv[1]):
                    print("here", flush=True)
                    time.sleep(60)

        options = {"log_freq": 1, "save_dir": "saved", "save_every_n_steps": 4, "resume": "auto"}
        fit(prepared(), JSONLines("log", "run"), Sleeps(), **options)
    """
    with sandbox(tmp_path) as box:
        script = box.script("train.py", code)
        process = box.start([sys.executable, script, "11"])
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n", process.communicate()[1]
        process.send_signal(signal.SIGKILL)
        box.finish(process)
        run = tmp_path / "log" / "run"
        assert [step for step, _ in curve(run, "train/loss")] == list(range(1, 12))
        with open(run / "metrics.jsonl", "ab") as file:
            file.write('{"step": 12, "é'.encode()[:-1])  # cut within a character
        ended = box.run([sys.executable, script, "0"])
    assert ended.code == 0, ended.err
    fit(prepared(), JSONLines(tmp_path / "whole", "run"), log_freq=1)
    assert sum("hparams" in point for point in read(run)) == 1
    for tag in ("train/loss", "train/acc", "eval/loss"):
        assert curve(run, tag) == curve(tmp_path / "whole" / "run", tag)


@pytest.mark.parametrize("text", ["step,loss\n1,2\n", "[1]\n", '{"step": "x"}\n', '{"step": null}\n'])
def test_another_file_is_not_written_to(tmp_path: Path, text: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(ValueError, match=r"JSONLines: .*metrics\.jsonl' was not written by JSONLines"):
        JSONLines(tmp_path).open_run(tmp_path, 5, True)
    assert (tmp_path / "metrics.jsonl").read_text() == text


def test_wrong_arguments_are_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="JSONLines: hparams=3; accepted"):
        JSONLines(tmp_path, hparams=3)  # type: ignore[arg-type]
