from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hapi.board
from hapi.callbacks import VisualDL
from hapi.callbacks._vdlrecords import newest, repair
from tests.helpers.browser import board
from tests.helpers.launching import Sandbox, free_port, sandbox, wait_until


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Sandbox]:
    with sandbox(tmp_path) as made:
        yield made


def write(folder: Path, steps: range, *, resumed: bool = False, tag: str = "train/loss") -> Path:
    """Points whose value is the step; returns the file."""
    callback = VisualDL(folder.parent, folder.name)
    folder.mkdir(parents=True, exist_ok=True)
    callback.open_run(folder, steps.start - 1, resumed)
    for step in steps:
        callback.write({tag: float(step)}, step)
    callback.close_run()
    path = newest(folder)
    assert path is not None
    return path


def expected(stop: int) -> list[tuple[int, float]]:
    return [(step, float(step)) for step in range(1, stop + 1)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], r"LOGDIR='nowhere' is not a folder; give the log_dir"),
        ([], "LOGDIR"),
        ([".", "--port", "0"], r"--port: '0'; accepted: 1 to 65535"),
        ([".", "--port", "http"], r"--port: 'http'; accepted"),
        ([".", "--prot", "80"], "--prot"),
    ],
)
def test_a_wrong_command_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        hapi.board.main(arguments)
    assert end.value.code == 2
    assert said in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        hapi.board.main(["--help"])
    assert end.value.code == 0
    assert "LOGDIR" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGKILL, -9)]
)
def test_it_ends_with_its_server_and_leaves_nothing(box: Sandbox, number: int, code: int) -> None:
    (box.folder / "log").mkdir()
    (box.folder / "tmp").mkdir()
    port = free_port()
    with board(box, "log", "--port", str(port), env={"TMPDIR": str(box.folder / "tmp")}) as shown:
        assert shown.url == f"http://127.0.0.1:{port}"
        assert shown.get("runs") == []
        assert len(box.processes()) == 2
        os.kill(shown.process.pid, number)
        assert shown.process.wait(10) == code
        wait_until(lambda: not box.processes(), 5)
    if number != signal.SIGKILL:
        assert os.listdir(box.folder / "tmp") == []


def test_files_of_killed_runs_are_repaired_and_hidden_ones_named(box: Sandbox) -> None:
    torn = write(box.folder / "log" / "killed", range(1, 6))
    with open(torn, "ab") as file:
        file.write(b"\x22\x00\x00")
    write(box.folder / "log" / "whole" / "deep", range(1, 3))
    write(box.folder / "log" / "double", range(1, 4))
    (box.folder / "log" / "double" / "vdlrecords.0000000001.log").touch()
    # A home that cannot be written to, and a proxy that does not exist.
    env = {"HOME": "/dev/null", "http_proxy": "http://127.0.0.1:9"}
    with board(box, "log", env=env) as shown:
        assert sorted(shown.get("runs")) == ["deep", "double", "killed"]
        assert shown.points("killed", "train/loss") == expected(5)
        assert shown.points("double", "train/loss") == expected(3)
        os.kill(shown.process.pid, signal.SIGINT)
        _, err = box.finish(shown.process)
    assert "log/double holds 2 record files; the board shows only the newest, vdlrecords.1" in err
    assert "killed" not in err
    assert not repair(torn)


def test_points_that_a_resumed_run_writes_anew_are_not_shown_twice(box: Sandbox) -> None:
    folder = box.folder / "log" / "run"
    write(folder, range(1, 21))
    with board(box, "log") as shown:
        assert shown.points("run", "train/loss") == expected(20)
        write(folder, range(11, 31), resumed=True, tag="train/a longer tag")

        def both() -> bool:
            with contextlib.suppress(OSError):  # while the server starts anew
                return len(shown.points("run", "train/a longer tag")) == 20
            return False

        wait_until(both, 20)
        assert shown.points("run", "train/loss") == expected(10)
        write(folder, range(31, 41), tag="train/a longer tag")
        wait_until(lambda: len(shown.points("run", "train/a longer tag")) == 30, 10)


def test_files_that_would_end_the_board_are_named(box: Sandbox, capsys: pytest.CaptureFixture[str]) -> None:
    log = box.folder / "log"
    write(log / "fine", range(1, 3))
    (log / "vdlrecords.txt").write_text("notes on the records")
    (log / "vdlrecords.link").symlink_to("nowhere")
    (log / "other").mkdir()
    (log / "other" / "vdlrecords.1.log").write_bytes(b"\xff" * 99)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    assert hapi.board.main([str(log)]) == 1
    assert {number: signal.getsignal(number) for number in before} == before
    err = capsys.readouterr().err
    assert "cannot start with these files" in err
    assert "log/vdlrecords.txt' is not a record file" in err
    assert "log/other/vdlrecords.1.log' is not a record file" in err
    assert "fine" not in err
    (log / "vdlrecords.txt").unlink()
    assert hapi.board.main([str(log)]) == 1
    assert "vdlrecords.link" in capsys.readouterr().err


def test_a_record_that_is_being_written_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "run", range(1, 3))
    content = path.read_bytes()
    path.write_bytes(content[:-5])
    rest = [content[-5:-3], content[-3:]]

    def written_on(seconds: float) -> None:
        with open(path, "ab") as file:
            file.write(rest.pop(0))

    monkeypatch.setattr(hapi.board.time, "sleep", written_on)
    hapi.board._mend(tmp_path)
    assert path.read_bytes() == content
    assert rest == []


def test_a_port_that_is_taken(box: Sandbox, capsys: pytest.CaptureFixture[str]) -> None:
    (box.folder / "log").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert hapi.board.main([str(box.folder / "log"), "--port", str(port)]) == 1
        assert f"cannot listen on 127.0.0.1, port {port}: Address already in use" in capsys.readouterr().err
    assert hapi.board.main([str(box.folder / "log"), "--host", "192.0.2.1"]) == 1
    assert "cannot listen on 192.0.2.1, port any" in capsys.readouterr().err


def test_without_a_port_any_free_one_is_taken() -> None:
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            stack.enter_context(socket.create_server(("127.0.0.1", hapi.board._PORT)))
        assert hapi.board._free_port("127.0.0.1", None) not in (0, hapi.board._PORT)


def test_a_server_that_fails_is_told_with_its_output(box: Sandbox) -> None:
    box.script("broken/flask.py", "raise RuntimeError('no flask today')")
    (box.folder / "log").mkdir()
    path = os.pathsep.join([str(box.folder / "broken"), box.environment()["PYTHONPATH"]])
    env = {"PYTHONPATH": path, "HOME": str(box.folder)}
    ended = box.run([sys.executable, "-m", "hapi.board", "log"], env)
    assert ended.code == 1
    assert "ended by itself with code 1" in ended.err
    assert "RuntimeError: no flask today" in ended.err
    assert ended.out == ""


def test_a_server_that_is_killed(box: Sandbox) -> None:
    (box.folder / "log").mkdir()
    with board(box, "log") as shown:
        (server,) = (pid for pid, command in box.processes().items() if "visualdl.server.app" in command)
        os.kill(server, signal.SIGKILL)
        _, err = box.finish(shown.process)
    assert shown.process.returncode == 128 + 9
    assert "ended by itself with code -9" in err


def test_without_visualdl(box: Sandbox, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "visualdl", None)
    assert hapi.board.main([str(box.folder)]) == 1
    assert "pip install visualdl" in capsys.readouterr().err
