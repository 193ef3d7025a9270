"""SIGTERM and Ctrl-C end a fit at a step's end, with a checkpoint; and writing in the background fails loudly."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hapi
from hapi.engine import checkpoint
from hapi.engine.writer import BackgroundWriter
from tests.helpers.launching import Sandbox, sandbox, wait_until
from tests.helpers.nets import blobs, mlp, same_weights

TRAIN = """
    import sys, time, torch, hapi
    from torch import nn

    class Slow(hapi.callbacks.Callback):
        all_ranks = True
        def on_train_batch_end(self, step, logs=None):
            open("begun", "w").close()
            time.sleep(float(sys.argv[2]))

    class Closed(hapi.callbacks.Callback):
        def on_train_end(self, logs=None):
            sys.stdout.write("writers closed\\n")

    torch.manual_seed(0)
    x, y = torch.randn(256, 8), torch.randint(0, 3, (256,))
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    model = hapi.Model(net).prepare(torch.optim.Adam(net.parameters(), 1e-2), "cross_entropy", "acc")
    history = model.fit((x, y), global_batch_size=8, epochs=3, verbose=0, log_freq=4, seed=1, save_dir=sys.argv[1],
                        resume="auto", callbacks=[Slow(), Closed()])
    if hapi.distributed.get_rank() == 0:
        sys.stdout.write(f"done {sum(p.double().sum().item() for p in net.parameters())!r} {history.history}\\n")
"""
PLAIN = [sys.executable]
LAUNCH = [sys.executable, "-m", "hapi.launch", "--nproc", "2"]


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Sandbox]:
    with sandbox(tmp_path) as made:
        made.script("train.py", TRAIN)
        yield made


def begun(box: Sandbox, command: list[str], env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """A run that has got to its second epoch: it has saved the first."""
    process = box.start([*command, "train.py", "saved", "0.02"], env)
    wait_until(lambda: (box.folder / "saved" / "1.json").exists(), 60)
    time.sleep(0.2)
    return process


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "env", "code"),
    [
        (signal.SIGTERM, {}, 143),
        (signal.SIGTERM, {"HAPI_TERM_CODE": "85"}, 85),
        (signal.SIGINT, {}, -signal.SIGINT),
    ],
)
def test_a_signal_saves_and_ends_and_the_next_start_goes_on(
    box: Sandbox, number: signal.Signals, env: dict[str, str], code: int
) -> None:
    whole = box.run([*PLAIN, "train.py", "whole", "0"])
    process = begun(box, PLAIN, env)
    process.send_signal(number)
    out, errors = box.finish(process, timeout=20)
    assert process.returncode == code, errors
    assert "writers closed" in out
    newest = checkpoint.newest_first(box.folder / "saved")[0]
    assert newest.name.startswith("step-")
    assert 32 < json.loads((box.folder / "saved" / f"{newest.name}.json").read_text())["step"] < 96
    assert box.run([*PLAIN, "train.py", "saved", "0"]).out == whole.out


@pytest.mark.slow
def test_a_second_signal_ends_at_once(box: Sandbox) -> None:
    process = box.start([*PLAIN, "train.py", "saved", "30"])
    wait_until(lambda: (box.folder / "begun").exists(), 60)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert process.poll() is None, "the batch is finished first"
    begun_at = time.monotonic()
    process.send_signal(signal.SIGTERM)
    box.finish(process, timeout=10)
    assert process.returncode == -signal.SIGTERM
    assert time.monotonic() - begun_at < 5


@pytest.mark.slow
@pytest.mark.ranks
def test_two_ranks_agree_on_the_step_and_resume_bit_for_bit(box: Sandbox) -> None:
    whole = box.run([*LAUNCH, "train.py", "whole", "0"], timeout=90)
    assert whole.code == 0, whole.err
    process = begun(box, LAUNCH)
    process.send_signal(signal.SIGTERM)
    _, errors = box.finish(process, timeout=30)
    assert process.returncode == 143, errors
    newest = checkpoint.newest_first(box.folder / "saved")[0]
    assert newest.name.startswith("step-")
    assert checkpoint.damage(newest) is None
    again = box.run([*LAUNCH, "train.py", "saved", "0"], timeout=90)
    assert [line for line in again.out.splitlines() if "done" in line] == [
        line for line in whole.out.splitlines() if "done" in line
    ]


@pytest.mark.slow
@pytest.mark.ranks
def test_max_restarts_goes_on_from_the_newest_checkpoint(box: Sandbox) -> None:
    """A rank kills itself once, in the second epoch: the launcher starts all again, and the weights are the same."""
    whole = box.run([*LAUNCH, "train.py", "whole", "0"], timeout=90)
    faulty = TRAIN.replace(
        "            time.sleep(float(sys.argv[2]))",
        "            import os\n"
        "            if step == 9 and os.environ['RANK'] == '1' and os.path.exists('saved/1.json'):\n"
        "                if not os.path.exists('died'):\n"
        "                    open('died', 'w').close()\n"
        "                    os.kill(os.getpid(), 9)",
    )
    box.script("train.py", faulty)
    ended = box.run([*LAUNCH, "--max_restarts", "2", "train.py", "saved", "0"], timeout=120)
    assert ended.code == 0, ended.err
    assert (box.folder / "died").exists()
    assert [line for line in ended.out.splitlines() if "done" in line] == [
        line for line in whole.out.splitlines() if "done" in line
    ]


def test_a_handler_of_the_users_own_stays(tmp_path: Path) -> None:
    def mine(number: int, frame: Any) -> None: ...

    before = signal.signal(signal.SIGTERM, mine)
    try:
        seen: list[Any] = []

        class Looks(hapi.callbacks.Callback):
            def on_train_batch_end(self, step: int, logs: Any = None) -> None:
                seen.append(signal.getsignal(signal.SIGTERM))

        hapi.Model(mlp()).prepare("sgd", "cross_entropy").fit(blobs(8), batch_size=8, verbose=0, callbacks=Looks())
        assert seen == [mine]
    finally:
        signal.signal(signal.SIGTERM, before)


# ------------------------------------------------------------ writing in the background


def test_one_write_in_flight_and_errors_reach_the_caller() -> None:
    writer = BackgroundWriter()
    order: list[str] = []

    def slow() -> None:
        time.sleep(0.1)
        order.append("first")

    assert writer.submit("a", slow) == []
    assert writer.busy
    assert writer.take() == []
    assert writer.submit("b", lambda: order.append("second")) == ["a"]
    assert writer.take(wait=True) == ["b"]
    assert order == ["first", "second"]
    assert not writer.busy

    def fails() -> None:
        raise OSError("disk full")

    writer.submit("c", fails)
    with pytest.raises(OSError, match="disk full"):
        writer.take(wait=True)
    assert writer.take(wait=True) == []


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is on disk is the state at the step that asked, though later steps ran before it was written."""
    write = checkpoint.write
    steps: list[int] = []

    def slow_write(*args: Any, **kwargs: Any) -> None:
        time.sleep(0.3)
        steps.append(model._progress.global_step)
        write(*args, **kwargs)

    monkeypatch.setattr(checkpoint, "write", slow_write)
    model = hapi.Model(mlp()).prepare("adam", "cross_entropy")

    class Once(hapi.callbacks.Callback):
        def on_train_batch_end(self, step: int, logs: Any = None) -> None:
            if step == 1:
                self.run.control.request_save(str(tmp_path / "at-2"))

    saved: list[str] = []

    class Told(hapi.callbacks.Callback):
        def on_save(self, path: str, logs: Any = None) -> None:
            saved.append(path)

    model.fit(blobs(400), batch_size=8, shuffle=False, verbose=0, callbacks=[Once(), Told()])
    assert steps[0] > 2
    assert saved == [str(tmp_path / "at-2")]
    monkeypatch.undo()
    loaded = hapi.Model(mlp(seed=9)).prepare("adam", "cross_entropy").load(tmp_path / "at-2")
    assert loaded._progress.global_step == 2
    reference = hapi.Model(mlp()).prepare("adam", "cross_entropy")
    x, y = blobs(400)
    reference.fit((x[:16], y[:16]), batch_size=8, shuffle=False, verbose=0)
    assert same_weights(reference.network, loaded.network)


def test_a_write_that_fails_ends_the_fit_with_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = hapi.Model(mlp()).prepare("adam", "cross_entropy")
    model.fit(blobs(64), batch_size=8, verbose=0, save_dir=tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(
        OSError, match=r"cannot write .*No space left on device.*the previous checkpoint, if any, is whole"
    ):
        model.fit(blobs(6400), batch_size=8, verbose=0, save_dir=tmp_path, save_every_n_steps=3, epochs=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert checkpoint.damage(tmp_path / "final") is None


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal")
def test_reader_processes_end_with_a_killed_run(tmp_path: Path) -> None:
    script = """
        import os, pathlib, time, torch, hapi

        class Slow(torch.utils.data.Dataset):
            def __len__(self): return 1000
            def __getitem__(self, index):
                pathlib.Path(f"reader.{os.getpid()}").touch()
                time.sleep(0.01)
                return torch.zeros(8), 0

        net = torch.nn.Linear(8, 2)
        model = hapi.Model(net).prepare("sgd", "cross_entropy")
        model.fit(Slow(), batch_size=4, num_workers=2, verbose=0)
    """
    (tmp_path / "train.py").write_text(textwrap.dedent(script))
    env = {**os.environ, "PYTHONPATH": str(Path(hapi.__file__).parents[1])}
    process = subprocess.Popen([sys.executable, "train.py"], cwd=tmp_path, env=env)

    def reading() -> list[int]:
        found = []
        for path in tmp_path.glob("reader.*"):
            try:
                stat = Path(f"/proc/{path.suffix[1:]}/stat").read_text()
            except FileNotFoundError:
                continue
            if stat.rsplit(")", 1)[1].split()[0] != "Z":  # ended, but nobody has asked how
                found.append(int(path.suffix[1:]))
        return found

    wait_until(lambda: len(reading()) == 2)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 2  # torch alone takes 5 s and more
    while reading() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not reading()
