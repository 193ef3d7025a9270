"""The printed lines, word for word; only times vary."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import re
import select
import struct
import sys
import termios
import threading
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from tqdm import tqdm

from hapi.callbacks import Callback, ProgBarLogger, console, progress
from tests.callbacks.driver import Driver

HEADER = "The loss and metrics of a training step are running means since its epoch began."
NAMES = ("loss", "acc_top1", "acc_top2")


def train(epoch: int, batch: int) -> dict[str, Any]:
    return {"loss": 1.5 / (epoch + 1) + batch / 1000, "acc_top1": 0.25, "acc_top2": 5e-4}


def evaluate(number: int) -> dict[str, Any]:
    return {"loss": 0.5, "acc_top1": 0.75, "acc_top2": 1.0}


def timeless(text: str) -> str:
    return re.sub(r"(?<= )(\d+us|\d+ms|\d+s|\d+:\d+)(?=/step|$)", "T", text, flags=re.MULTILINE)


def printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    captured = capsys.readouterr()
    assert captured.err == ""
    return timeless(captured.out).splitlines()


GOLDEN = [
    HEADER,
    "Epoch 1/2",
    "step 2/4 - loss: 1.5020 - acc_top1: 0.2500 - acc_top2: 5.0000e-04 - T/step",
    "step 4/4 - loss: 1.5040 - acc_top1: 0.2500 - acc_top2: 5.0000e-04 - T/step",
    "Eval begin...",
    "step 2/3 - loss: 0.5000 - acc_top1: 0.7500 - acc_top2: 1.0000 - T/step",
    "step 3/3 - loss: 0.5000 - acc_top1: 0.7500 - acc_top2: 1.0000 - T/step",
    "Eval samples: 12",
    "Epoch 1/2 done - loss: 1.5040 - acc_top1: 0.2500 - acc_top2: 5.0000e-04"
    " - eval_loss: 0.5000 - eval_acc_top1: 0.7500 - eval_acc_top2: 1.0000 - lr: 1.0000e-01 - T",
    "Epoch 2/2",
    "step 2/4 - loss: 0.7520 - acc_top1: 0.2500 - acc_top2: 5.0000e-04 - T/step",
    "step 4/4 - loss: 0.7540 - acc_top1: 0.2500 - acc_top2: 5.0000e-04 - T/step",
    "Eval begin...",
    "step 2/3 - loss: 0.5000 - acc_top1: 0.7500 - acc_top2: 1.0000 - T/step",
    "step 3/3 - loss: 0.5000 - acc_top1: 0.7500 - acc_top2: 1.0000 - T/step",
    "Eval samples: 12",
    "Epoch 2/2 done - loss: 0.7540 - acc_top1: 0.2500 - acc_top2: 5.0000e-04"
    " - eval_loss: 0.5000 - eval_acc_top1: 0.7500 - eval_acc_top2: 1.0000 - lr: 1.0000e-01 - T",
]


@pytest.mark.parametrize("verbose", [1, 2])  # captured output is no terminal: 1 prints the lines of 2
def test_fit_lines(capsys: pytest.CaptureFixture[str], verbose: int) -> None:
    Driver([ProgBarLogger()], train=train, evaluate=evaluate, metrics=NAMES, verbose=verbose).fit(2)
    assert printed(capsys) == GOLDEN


def test_own_arguments_win(capsys: pytest.CaptureFixture[str]) -> None:
    driver = Driver([ProgBarLogger(3, 2)], verbose=0, log_freq=2)
    driver.fit(1)
    assert printed(capsys) == [
        HEADER,
        "Epoch 1/1",
        "step 3/4 - loss: 0.3333 - T/step",
        "step 4/4 - loss: 0.2500 - T/step",
        "Epoch 1/1 done - loss: 0.2500 - lr: 1.0000e-01 - T",
    ]


def test_silent(capsys: pytest.CaptureFixture[str]) -> None:
    driver = Driver([ProgBarLogger()], evaluate=evaluate, verbose=0)
    driver.fit(1)
    driver.evaluate()
    driver.predict()
    driver = Driver([ProgBarLogger(verbose=0)], verbose=2)
    driver.fit(1)
    assert printed(capsys) == []


def test_wide_step_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    Driver([ProgBarLogger()], batches=100, log_freq=50).fit(1)
    assert [line[:13] for line in printed(capsys) if line.startswith("step")] == [
        "step  50/100 ",
        "step 100/100 ",
    ]


def test_unknown_length_has_last_lines(capsys: pytest.CaptureFixture[str]) -> None:
    driver = Driver([ProgBarLogger()], evaluate=evaluate, known=False, batches=3, eval_batches=3)
    driver.fit(1)
    driver.predict()
    assert printed(capsys) == [
        HEADER,
        "Epoch 1/1",
        "step   2 - loss: 0.5000 - T/step",
        "step   3 - loss: 0.3333 - T/step",
        "Eval begin...",
        "step   2 - loss: 0.5000 - acc_top1: 0.7500 - acc_top2: 1.0000 - T/step",
        "step   3 - loss: 0.5000 - acc_top1: 0.7500 - acc_top2: 1.0000 - T/step",
        "Eval samples: 12",
        "Epoch 1/1 done - loss: 0.3333 - eval_loss: 0.5000 - eval_acc_top1: 0.7500 - eval_acc_top2: 1.0000"
        " - lr: 1.0000e-01 - T",
        "Predict begin...",
        "step   2 - T/step",
        "step   3 - T/step",
        "Predict samples: 12",
    ]


def test_last_line_is_not_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    driver = Driver([ProgBarLogger()], evaluate=evaluate, known=False, batches=4, eval_batches=2)
    driver.fit(1)
    driver.predict()
    lines = [line for line in printed(capsys) if line.startswith("step")]
    assert [line[:8] for line in lines] == ["step   2", "step   4", "step   2", "step   2"]


@pytest.mark.parametrize(("batches", "steps"), [(1, ["1/1"]), (2, ["2/2"]), (4, ["2/4", "4/4"])])
def test_predict_prints_its_last_line(capsys: pytest.CaptureFixture[str], batches: int, steps: list[str]) -> None:
    Driver([ProgBarLogger()], eval_batches=batches).predict()
    lines = [f"step {step} - T/step" for step in steps]
    assert printed(capsys) == ["Predict begin...", *lines, f"Predict samples: {4 * batches}"]


def test_standalone_evaluate(capsys: pytest.CaptureFixture[str]) -> None:
    Driver([ProgBarLogger()], evaluate=evaluate, metrics=NAMES).evaluate()
    assert printed(capsys) == GOLDEN[4:8]


def test_without_epoch_count_and_stopped_within_an_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    Driver([ProgBarLogger()]).fit(None, num_iters=3)
    assert printed(capsys) == [
        HEADER,
        "Epoch 1",
        "step 2/4 - loss: 0.5000 - T/step",
        "step 3/4 - loss: 0.3333 - T/step",
        "Epoch 1 done - loss: 0.3333 - lr: 1.0000e-01 - T",
    ]


def test_resumed_within_an_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    driver = Driver([ProgBarLogger()])
    driver.run.progress.epoch, driver.run.progress.batch_in_epoch = 1, 3
    driver.fit(2, resume=True)
    assert printed(capsys)[:3] == [HEADER, "Epoch 2/2", "step 4/4 - loss: 0.0714 - T/step"]


def test_verbose_3(capsys: pytest.CaptureFixture[str]) -> None:
    Driver([ProgBarLogger()], verbose=3, evaluate=evaluate).fit(1)
    lines = [line for line in printed(capsys) if line.startswith("step")]
    pattern = re.compile(
        r"step \d/\d( - [a-z0-9_]+: [\d.]+)+ - avg_reader_cost: (\d\.\d{5}) sec"
        r" - avg_batch_cost: (\d\.\d{5}) sec - ips: (\d+\.\d{5}) samples/sec - T/step"
    )
    assert len(lines) == 4
    for line in lines:
        match = pattern.fullmatch(line)
        assert match, line
        assert float(match[2]) <= float(match[3])


def test_verbose_3_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([10.0, 10.0, 10.5, 11.0, 11.1, 12.0])
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(now))
    phase = progress._Phase(2, 0, None, start=next(now), last=next(now))
    for step in (1, 2):
        phase.mark_read()
        phase.mark_end({"step": step, "batch_size": 8})
    # Reading 0.5 and 0.1 s, computing the rest of 2 s, 16 rows.
    assert phase.costs() == (" - avg_reader_cost: 0.30000 sec - avg_batch_cost: 1.00000 sec - ips: 8.00000 samples/sec")
    assert phase.seconds_per_batch() == 1.0


class Added(Callback):
    def on_train_batch_end(self, step: int, logs: dict[str, Any] | None = None) -> None:
        assert logs is not None
        logs.update(ppl=3, curve=np.ones(3), parts=[0.5, 2.0], half=torch.tensor(0.5), note="ok", outputs=[1.0])

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        assert logs is not None
        logs.update(ppl=4.0, curve=np.ones(3))


def test_values_added_by_callbacks(capsys: pytest.CaptureFixture[str]) -> None:
    Driver([Added(), ProgBarLogger()]).fit(1)
    lines = printed(capsys)
    assert lines[2] == "step 2/4 - loss: 0.5000 - ppl: 3 - parts: 0.5000 2.0000 - half: 0.5000 - note: ok - T/step"
    assert lines[4] == "Epoch 1/1 done - loss: 0.2500 - ppl: 4.0000 - lr: 1.0000e-01 - T"


class Chosen(ProgBarLogger):
    """In the reference's style: positional arguments, names chosen at the start, values added in the hook."""

    def __init__(self) -> None:
        super().__init__(2, 2)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        self.train_metrics = ["ppl", "acc_top1"]

    def on_train_batch_end(self, step: int, logs: dict[str, Any] | None = None) -> None:
        assert logs is not None
        if "loss" in logs:
            logs["ppl"] = float(np.exp(logs["loss"]))
        super().on_train_batch_end(step, logs)


def test_subclass_chooses_names(capsys: pytest.CaptureFixture[str]) -> None:
    Driver([Chosen()], train=train, metrics=NAMES).fit(1)
    assert printed(capsys)[2:4] == [
        "step 2/4 - ppl: 4.4907 - acc_top1: 0.2500 - T/step",
        "step 4/4 - ppl: 4.4997 - acc_top1: 0.2500 - T/step",
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0555, "0.0555"),
        (np.float32(2.5), "2.5000"),
        (0.0, "0.0000e+00"),
        (1e-3, "1.0000e-03"),
        (-0.5, "-0.5000"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (7, "7"),
        ([2.096, 2.1433], "2.0960 2.1433"),
        (np.array(0.25), "0.2500"),
        (np.zeros(2), None),
        ([], None),
        ([1.0, "x"], None),
        ({}, None),
        (None, None),
    ],
)
def test_number_format(value: Any, text: str | None) -> None:
    assert progress._value(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(698e-6, "698us"), (0.05, "50ms"), (12.4, "12s"), (900, "15:00"), (45000, "12:30:00")],
)
def test_duration(seconds: float, text: str) -> None:
    assert progress._duration(seconds) == text


@pytest.mark.parametrize("phase", ["fit", "fit_in_eval", "evaluate", "predict"])
def test_failure_prints_no_summary(capsys: pytest.CaptureFixture[str], phase: str) -> None:
    logger = ProgBarLogger()
    driver = Driver([logger], evaluate=evaluate)
    runs = {
        "fit": lambda: driver.fit(1, fail_at=(1, 3)),
        "fit_in_eval": lambda: driver.fit(1, fail_at=(1, 0)),
        "evaluate": lambda: driver.evaluate(fail=True),
        "predict": lambda: driver.predict(fail=True),
    }
    with pytest.raises(RuntimeError, match="failed"):
        runs[phase]()
    text = capsys.readouterr().out
    assert "samples" not in text
    assert "done" not in text
    driver.evaluate()
    assert "Eval samples: 12" in capsys.readouterr().out  # the same logger goes on afterwards


# ---------------------------------------------------------------- live bars


class Terminal:
    """A pseudo-terminal as ``sys.stdout``; ``text`` is all that was written to it."""

    def __init__(self, columns: int, lines: int) -> None:
        self._reader, writer = pty.openpty()
        fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.stream = os.fdopen(writer, "w", encoding="utf-8")

    def close(self) -> str:
        self.stream.flush()
        parts = []
        while select.select([self._reader], [], [], 0.2)[0]:
            part = os.read(self._reader, 65536)
            if not part:
                break
            parts.append(part)
        self.stream.close()
        os.close(self._reader)
        return b"".join(parts).decode()


def on_terminal(action: Any, monkeypatch: pytest.MonkeyPatch, columns: int = 160, lines: int = 24) -> str:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal(columns, lines)
    with contextlib.redirect_stdout(terminal.stream):
        action()
    return terminal.close()


def screen(text: str) -> list[str]:
    """The lines that stay on a screen: what follows a carriage return overwrites."""
    lines = []
    for raw in text.replace("\r\n", "\n").split("\n"):
        line: list[str] = []
        for part in raw.split("\r"):
            line[: len(part)] = part
        lines.append("".join(line).rstrip())
    return lines


def test_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set(threading.enumerate())
    driver = Driver([ProgBarLogger()], train=train, evaluate=evaluate, metrics=NAMES, verbose=1)

    def action() -> None:
        driver.fit(1)
        driver.predict()

    text = on_terminal(action, monkeypatch)
    assert set(threading.enumerate()) == threads
    assert not list(console.Bar._instances)
    lines = [timeless(re.sub(r"\d+:\d\d<(\d+:\d\d|\?)", "E<R", line)) for line in screen(text)]
    assert "\r" in text
    assert [re.sub(r"\[=+\]", "[=]", line) for line in lines] == [
        HEADER,
        "Epoch 1/1",
        "step 4/4 [=] - loss: 1.5040 - acc_top1: 0.2500 - acc_top2: 5.0000e-04 - T/step - E<R",
        "Eval begin...",
        "step 3/3 [=] - loss: 0.5000 - acc_top1: 0.7500 - acc_top2: 1.0000 - T/step - E<R",
        "Eval samples: 12",
        GOLDEN[8].replace("1/2", "1/1"),
        "Predict begin...",
        "step 3/3 [=] - T/step - E<R",
        "Predict samples: 12",
        "",
    ]


@pytest.mark.parametrize(
    ("columns", "lines", "width"), [(40, 24, 39), (0, 0, 79), (40, 0, 39), (0, 24, 79)]
)  # 0: the terminal does not say
def test_bar_fits_the_terminal(monkeypatch: pytest.MonkeyPatch, columns: int, lines: int, width: int) -> None:
    driver = Driver([ProgBarLogger()], train=train, metrics=NAMES, verbose=1)
    shown = screen(on_terminal(lambda: driver.fit(1), monkeypatch, columns, lines))
    assert shown[2].startswith("step 4/4 [=")
    assert len(shown[2]) == width


def test_bar_without_length(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver([ProgBarLogger()], known=False, batches=5, verbose=1)
    lines = screen(on_terminal(lambda: driver.fit(1), monkeypatch))
    assert lines[2].startswith("step   5 - loss: 0.2000 - ")


def test_bar_survives_other_lines_and_braces(monkeypatch: pytest.MonkeyPatch) -> None:
    class Talker(Callback):
        def on_train_batch_end(self, step: int, logs: dict[str, Any] | None = None) -> None:
            assert logs is not None
            logs["note"] = "{x}"
            if step == 1:
                console.say("save checkpoint at somewhere")

    driver = Driver([Talker(), ProgBarLogger()], verbose=1)
    lines = screen(on_terminal(lambda: driver.fit(1), monkeypatch))
    assert lines[2] == "save checkpoint at somewhere"
    assert lines[3].startswith("step 4/4 [")
    assert "note: {x}" in lines[3]


def test_bar_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver([ProgBarLogger()], verbose=1)

    def action() -> None:
        with pytest.raises(RuntimeError, match="batch failed"):
            driver.fit(1, fail_at=(1, 4))
        print("Traceback ...")

    lines = screen(on_terminal(action, monkeypatch))
    assert lines[2].startswith("step 3/4 [")
    assert lines[3:] == ["Traceback ...", ""]
    assert not list(console.Bar._instances)


def test_bar_redraws_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver([ProgBarLogger()], batches=3000, log_freq=100, verbose=1)
    text = on_terminal(lambda: driver.fit(1), monkeypatch)
    assert text.count("\r") < 300  # 10 a second, and the first and last


def test_file_gets_no_control_characters(tmp_path: Any) -> None:
    with open(tmp_path / "log", "w") as file, contextlib.redirect_stdout(file):
        Driver([ProgBarLogger()], evaluate=evaluate, verbose=1).fit(2)
    text = (tmp_path / "log").read_bytes()
    assert len(text.splitlines()) == 17
    assert all(byte == 10 or 32 <= byte < 127 for byte in text)


def test_bar_class_by_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    assert console.bar_class(Screen()) is console.Bar
    assert console.bar_class(io.StringIO()) is None
    assert console.bar_class(None) is None
    monkeypatch.setenv("TERM", "dumb")
    assert console.bar_class(Screen()) is None


def test_bar_class_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    class OutStream(io.StringIO):
        pass

    class Widget(tqdm):  # type: ignore[type-arg]
        pass

    kernel, chooser = ModuleType("ipykernel.iostream"), ModuleType("tqdm.autonotebook")
    kernel.OutStream = OutStream  # type: ignore[attr-defined]
    chooser.tqdm = Widget  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ipykernel.iostream", kernel)
    monkeypatch.setitem(sys.modules, "tqdm.autonotebook", chooser)
    chosen = console.bar_class(OutStream())
    assert chosen is not None
    assert issubclass(chosen, Widget)
    assert chosen.monitor_interval == 0
    assert console.bar_class(io.StringIO()) is None  # output redirected to a file from a notebook
    chooser.tqdm = tqdm  # type: ignore[attr-defined]  # ipywidgets is missing
    assert console.bar_class(OutStream()) is console.Bar


def test_tqdms_own_settings_stay() -> None:
    assert tqdm.monitor_interval == 10


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"log_freq": 0}, ValueError),
        ({"log_freq": 1.5}, TypeError),
        ({"log_freq": True}, TypeError),
        ({"verbose": 4}, ValueError),
        ({"verbose": -1}, ValueError),
        ({"verbose": "2"}, TypeError),
    ],
)
def test_refused_arguments(arguments: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=f"ProgBarLogger: {next(iter(arguments))}=.*accepted"):
        ProgBarLogger(**arguments)


def test_a_value_per_layer_has_no_place_on_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    class Adds(Callback):
        def on_train_batch_end(self, step: int, logs: Any = None) -> None:
            logs |= {"grad_norm": 1.5, "grad_norm/0.weight": 2.5}

    Driver([Adds(), ProgBarLogger(2, verbose=2)]).fit(1)
    out = capsys.readouterr().out
    assert "grad_norm: 1.5000" in out
    assert "0.weight" not in out
