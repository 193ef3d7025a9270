"""Run ``python -m hapi.launch`` and its like in tests, and see that nothing of a run is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import hapi

ROOT = Path(hapi.__file__).parent.parent
_MARK = "HAPI_TEST_RUN"


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str
    seconds: float


class Sandbox:
    """Starts commands in a folder, and knows every process that came from them.

    Args:
        folder: Where commands run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._id = uuid.uuid4().hex

    def script(self, name: str, text: str) -> str:
        """Write a script and return its name."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return name

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """This process's variables without any launcher's, with ours."""
        mine = {"PYTHONPATH": str(ROOT), _MARK: self._id, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        foreign = ("PADDLE_", "SLURM_", "OMPI_", "PMI", "MASTER_", "RANK", "LOCAL_", "WORLD_SIZE", "HAPI_LAUNCH")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        return {**kept, **mine, **(extra or {})}

    def start(self, command: Sequence[str], env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start a command with pipes on its output."""
        return subprocess.Popen(
            list(command),
            cwd=self.folder,
            env=self.environment(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, command: Sequence[str], env: Mapping[str, str] | None = None, timeout: float = 60) -> Ended:
        """Run a command to its end."""
        begun = time.monotonic()
        process = self.start(command, env)
        out, err = self.finish(process, timeout)
        return Ended(process.returncode, out, err, time.monotonic() - begun)

    def finish(self, process: subprocess.Popen[str], timeout: float = 60) -> tuple[str, str]:
        """Wait for a command, and return its stdout and stderr."""
        try:
            return process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            out, err = process.communicate()
            raise AssertionError(f"no end within {timeout} s\n--- stdout\n{out}\n--- stderr\n{err}") from None

    def launch(self, *arguments: str, env: Mapping[str, str] | None = None, timeout: float = 60) -> Ended:
        """Run ``python -m hapi.launch`` with these arguments."""
        return self.run(launch_command(*arguments), env, timeout)

    def processes(self) -> dict[int, str]:
        """What lives of the commands: command lines by process id. However deep, by a mark in the environment."""
        mark = f"{_MARK}={self._id}".encode()
        found = {}
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                with contextlib.suppress(OSError):
                    if mark in (folder / "environ").read_bytes().split(b"\0"):
                        found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
        return found

    def kill(self) -> None:
        """Kill them all."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def assert_empty(self, within: float = 5.0) -> None:
        """Fail, and clean up, if anything lives after ``within`` seconds."""
        try:
            wait_until(lambda: not self.processes(), within, lambda: f"left behind: {self.processes()}")
        finally:
            self.kill()


@contextlib.contextmanager
def sandbox(folder: Path) -> Iterator[Sandbox]:
    """A sandbox that checks at its end that no process is left."""
    box = Sandbox(folder)
    try:
        yield box
    except BaseException:
        box.kill()
        raise
    box.assert_empty()


def launch_command(*arguments: str) -> list[str]:
    """The command line of a launch."""
    return [sys.executable, "-m", "hapi.launch", *arguments]


def wait_until(
    condition: Callable[[], bool], within: float = 20.0, message: Callable[[], str] = lambda: "not in time"
) -> None:
    """Poll until ``condition`` holds."""
    deadline = time.monotonic() + within
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(message())
        time.sleep(0.05)


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
