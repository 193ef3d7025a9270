"""Curves of a training that runs, as a user sees them: ``hapi.launch``, ``hapi.board``, a browser."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hapi.callbacks._vdlrecords import newest, records
from tests.helpers.browser import Board, Browser, Point, board, browser, missing
from tests.helpers.launching import Sandbox, launch_command, sandbox, wait_until

ROWS, BATCH, EVERY = 500, 16, 3  # rows, over both ranks per batch, batches per point
BATCHES = -(-ROWS // BATCH)

TRAINING = f"""
    import json, os, time
    import hapi
    from hapi.callbacks import Callback, VisualDL
    from tests.helpers.nets import blobs, mlp

    class Pace(Callback):
        def on_train_batch_end(self, step, logs=None):
            time.sleep(0.05)

        def on_epoch_end(self, epoch, logs=None):
            if os.path.exists("enough"):
                self.run.control.request_stop("the test has seen enough")

    model = hapi.Model(mlp()).prepare("sgd", "cross_entropy", ["acc"])
    curves = VisualDL("log", "run", log_freq={EVERY}, hparams=True)
    history = model.fit(
        blobs({ROWS}), blobs(100, seed=1), global_batch_size={BATCH}, epochs=50, verbose=0, seed=0,
        callbacks=[curves, Pace()],
    )
    if int(os.environ["RANK"]) == 0:
        with open("history.json", "w") as file:
            json.dump(history.history, file)
"""


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Sandbox]:
    with sandbox(tmp_path) as made:
        yield made


def steps_of(points: list[Point]) -> list[int]:
    return [step for step, _ in points]


def rows_of_points() -> list[int]:
    """The rows that each training point of an epoch is a mean over."""
    rows = [min(BATCH, ROWS - start) for start in range(0, ROWS, BATCH)]
    return [sum(rows[start : start + EVERY]) for start in range(0, BATCHES, EVERY)]


@contextlib.contextmanager
def running(box: Sandbox, command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A training, ended at exit if it still runs."""
    process = box.start(command, {"HOME": str(box.folder)})
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            box.finish(process)


@pytest.mark.ranks
def test_curves_grow_on_the_board_and_in_the_page_while_two_ranks_train(box: Sandbox) -> None:
    (box.folder / "log").mkdir()
    command = launch_command("--nproc", "2", box.script("train.py", TRAINING))
    with contextlib.ExitStack() as stack:
        shown = stack.enter_context(board(box, "log"))
        training = stack.enter_context(running(box, command))
        # The page is opened when all groups of curves are there: a new one would change which are unfolded.
        wait_until(lambda: bool(shown.points("run", "eval/acc")), 30)
        seen = shown.points("run", "train/loss")
        for _ in range(2):
            longer = _grown(shown, len(seen) + 1)
            assert longer[: len(seen)] == seen
            seen = longer
        assert training.poll() is None

        page = None if missing() else stack.enter_context(browser(box.folder / "profile"))
        if page is not None:
            page.open(f"{shown.url}/app/scalar")
            page.click("train")
            for _ in range(2):
                longer = _received(page, len(seen) + 1)
                assert longer[: len(seen)] == seen
                seen = longer
            assert training.poll() is None

        _finish(box, training)
        _assert_equal_history(shown, json.loads((box.folder / "history.json").read_text()))
        if page is not None:
            final = shown.points("run", "train/loss")
            assert _received(page, len(final)) == final
            assert page.hosts() == {"127.0.0.1"}
    if missing():
        pytest.skip(f"all but the page was tested: it {missing()}")


def _finish(box: Sandbox, training: subprocess.Popen[str]) -> None:
    (box.folder / "enough").touch()
    out, err = box.finish(training)
    assert training.returncode == 0, out + err


def _grown(shown: Board, length: int) -> list[Point]:
    """The training loss as the board serves it, once it has ``length`` points."""
    wait_until(lambda: len(shown.points("run", "train/loss")) >= length)
    return shown.points("run", "train/loss")


def _received(page: Browser, length: int) -> list[Point]:
    """The training loss as the page itself received it, refreshed until it has ``length`` points."""
    found: list[list[Point]] = []
    pressed = time.monotonic()

    def arrived() -> bool:
        nonlocal pressed
        found[:] = [points for tag, points in page.curves() if tag == "train/loss" and len(points) >= length]
        if not found and time.monotonic() > pressed + 1.5:
            page.press("refresh")
            pressed = time.monotonic()
        return bool(found)

    wait_until(arrived, 30, lambda: f"received: {[(tag, len(points)) for tag, points in page.received]}")
    return found[-1]


def _assert_equal_history(shown: Board, history: dict[str, list[float]]) -> None:
    epochs = len(history["loss"])
    ends = [BATCHES * (epoch + 1) for epoch in range(epochs)]
    for name in ("loss", "acc"):
        expected = [float(np.float32(value)) for value in history[f"eval_{name}"]]
        assert shown.points("run", f"eval/{name}") == list(zip(ends, expected, strict=True))
        train = shown.points("run", f"train/{name}")
        weights = rows_of_points()
        assert steps_of(train) == [
            end - BATCHES + min((i + 1) * EVERY, BATCHES) for end in ends for i in range(len(weights))
        ]
        values = np.array([value for _, value in train]).reshape(epochs, len(weights))
        np.testing.assert_allclose(values @ weights / ROWS, history[name], rtol=1e-6)


RESUMING = """
    import os, time
    import hapi
    from hapi.callbacks import Callback, VisualDL
    from tests.helpers.nets import blobs, mlp

    class Pace(Callback):
        def on_train_batch_end(self, step, logs=None):
            os.write(steps, f"{self.run.progress.global_step} {time.time()}\\n".encode())
            time.sleep(0.02)

    steps = os.open("steps", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    model = hapi.Model(mlp()).prepare("sgd", "cross_entropy", ["acc"])
    model.fit(
        blobs(320), blobs(64), batch_size=8, epochs=4, verbose=0, seed=0, save_dir="out", save_every_n_steps=7,
        resume="auto", callbacks=[VisualDL("log", "run", log_freq=1), Pace()],
    )
"""
STEPS = 160


def told(box: Sandbox) -> list[tuple[int, float]]:
    """The steps that the training says it has done, and when. Perhaps without the last."""
    path = box.folder / "steps"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(step), float(when)) for step, when in (line.split() for line in lines)]


def steps_in_file(box: Sandbox, tag: str) -> list[int]:
    path = newest(box.folder / "log" / "run")
    assert path is not None
    return [value.id for value in records(path) if value.tag == tag]


def test_a_killed_run_loses_nothing_and_goes_on_in_its_file(box: Sandbox) -> None:
    command = [sys.executable, box.script("train.py", RESUMING)]
    delay = random.SystemRandom().uniform(0, 0.3)
    with running(box, command) as training:
        wait_until(lambda: len(told(box)) > 50, 30)
        time.sleep(delay)
        killed = time.time()
        training.send_signal(signal.SIGKILL)
        box.finish(training)
    done = [step for step, when in told(box) if when < killed - 1]
    written = steps_in_file(box, "train/loss")
    assert written == list(range(1, len(written) + 1)), delay
    assert len(written) >= max(done, default=1), delay
    assert len(written) >= len(told(box)) - 2, delay

    with board(box, "log") as shown:
        assert steps_of(shown.points("run", "train/loss")) == written
        with running(box, command) as training:
            _, err = box.finish(training)
            assert training.returncode == 0, err

        def caught_up() -> bool:
            with contextlib.suppress(OSError):  # the board starts anew when points go
                return steps_of(shown.points("run", "train/loss")) == list(range(1, STEPS + 1))
            return False

        wait_until(caught_up)
        assert steps_of(shown.points("run", "eval/loss")) == [40, 80, 120, 160]
    assert len(os.listdir(box.folder / "log")) == len(os.listdir(box.folder / "log" / "run")) == 1
    for tag in ("train/loss", "train/acc", "train/lr"):
        assert steps_in_file(box, tag) == list(range(1, STEPS + 1))


DIGITS = """
    import torch
    from sklearn.datasets import load_digits
    from torch import nn
    import hapi
    from hapi.callbacks import VisualDL

    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    train, test = (images[:1400], torch.tensor(labels[:1400])), (images[1400:], torch.tensor(labels[1400:]))
    for name, rate in (("adam", 2e-3), ("sgd", 0.1)):
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 64), nn.ReLU(),
            nn.Linear(64, 10),
        )
        optimizer = getattr(torch.optim, {"adam": "Adam", "sgd": "SGD"}[name])(net.parameters(), rate)
        model = hapi.Model(net).prepare(optimizer, "cross_entropy", ["acc"])
        curves = VisualDL("log", name, log_freq=2, hparams=True)
        model.fit(train, test, batch_size=32, epochs=8, verbose=0, seed=0, callbacks=curves)
"""


@pytest.mark.skipif("HAPI_SCREENSHOT" not in os.environ, reason="HAPI_SCREENSHOT names no file for the picture")
def test_screenshot(box: Sandbox) -> None:
    """Makes docs/images/visualdl.png."""
    target = Path(os.environ["HAPI_SCREENSHOT"]).absolute()
    with running(box, [sys.executable, box.script("digits.py", DIGITS)]) as training:
        _, err = box.finish(training)
        assert training.returncode == 0, err
    with board(box, "log") as shown, browser(box.folder / "profile") as page:
        assert [len(shown.points(run, "eval/acc")) for run in ("adam", "sgd")] == [8, 8]
        page.open(f"{shown.url}/app/scalar")
        page.click("train")
        page.screenshot(str(target), width=1270, height=1002)
    assert target.stat().st_size < 200_000
