"""The parent's side of a contest: contenders are processes that stay alive and take turns."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import statistics
import subprocess
import time
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# glibc gives large buffers back to the kernel or keeps them, as the heap happens to lie: up to a fifth of a step.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(2 << 30)}
START_SECONDS, TURN_SECONDS, END_SECONDS = 300.0, 600.0, 10.0


class ContenderError(Exception):
    """A contender does not run; the text says why."""


@dataclass
class Turn:
    """Seconds per step of both clocks and page faults per step, of all ranks."""

    wall: float
    cpu: float
    faults: float


@dataclass
class Result:
    """What is known of a contender.

    Attributes:
        turns: In order; the same number for all contenders that have not failed.
        reported: What rank 0 has reported, by name; the newest of each.
        failure: Why it does not run; empty if it does.
    """

    turns: list[Turn] = field(default_factory=list)
    reported: dict[str, Any] = field(default_factory=dict)
    failure: str = ""

    def median(self, what: str) -> float:
        return float(statistics.median(getattr(turn, what) for turn in self.turns))


class Contender:
    """One contender's processes.

    Args:
        command: What each rank runs; the number of its connection is added as the last argument.
        env: The environment variables of each rank, beside this process's.
        folder: Where the ranks run, and write what they print; made here.
    """

    def __init__(self, command: Sequence[str], env: Sequence[Mapping[str, str]], folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.processes: list[subprocess.Popen[bytes]] = []
        self.channels: list[socket.socket] = []
        self.lines: list[Any] = []
        for rank, variables in enumerate(env):
            mine, theirs = socket.socketpair()
            with theirs, open(folder / f"rank{rank}.log", "wb") as log:
                process = subprocess.Popen(
                    [*command, str(theirs.fileno())],
                    env={**os.environ, **variables},
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[theirs.fileno()],
                )
            self.processes.append(process)
            self.channels.append(mine)
            self.lines.append(mine.makefile("r", encoding="utf-8"))

    def send(self, order: Mapping[str, Any]) -> None:
        """Tell all ranks."""
        for rank, channel in enumerate(self.channels):
            try:
                channel.sendall(json.dumps(order).encode() + b"\n")
            except OSError:
                raise ContenderError(self._obituary(rank)) from None

    def wait(self, limit: float) -> list[dict[str, Any]]:
        """What the ranks say when they next reach the gate."""
        answers = []
        for rank, (channel, lines) in enumerate(zip(self.channels, self.lines, strict=True)):
            channel.settimeout(limit)
            try:
                line = lines.readline()
            except TimeoutError:
                raise ContenderError(f"rank {rank} gave no sign in {limit:.0f} s") from None
            except ConnectionError:
                line = ""
            if not line:
                raise ContenderError(self._obituary(rank))
            answers.append(json.loads(line))
        return answers

    def turn(self, steps: int, **order: Any) -> tuple[Turn, dict[str, Any]]:
        """Let it work: the time per step, and all that rank 0 reports."""
        start = time.perf_counter()
        self.send({"steps": steps, **order})
        answers = self.wait(TURN_SECONDS)
        wall = time.perf_counter() - start
        cpu, faults = (sum(answer[key] for answer in answers) / steps for key in ("cpu", "faults"))
        return Turn(wall / steps, cpu, faults), answers[0]

    def end(self) -> None:
        """Close the gate for ever; whoever does not go is killed."""
        for stream in (*self.lines, *self.channels):
            stream.close()
        for process in self.processes:
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _obituary(self, rank: int) -> str:
        try:
            code = str(self.processes[rank].wait(END_SECONDS))
        except subprocess.TimeoutExpired:
            code = "none yet"
        log = (self.folder / f"rank{rank}.log").read_text(errors="replace").splitlines()
        return f"rank {rank} ended, exit code {code}: {next((line for line in reversed(log) if line.strip()), '')}"


@contextlib.contextmanager
def noted(name: str, contenders: MutableMapping[str, Any], results: Mapping[str, Result]) -> Iterator[None]:
    """A contender that fails is out, and the others go on."""
    try:
        yield
    except ContenderError as exc:
        results[name].failure = str(exc)
        contenders.pop(name).end()


def take_turns(contenders: MutableMapping[str, Any], results: Mapping[str, Result], *, rounds: int, steps: int) -> None:
    """Each contender once a round, in random order, so that the machine's noise hits all alike."""
    for _ in range(rounds):
        for name in random.sample(list(contenders), len(contenders)):
            with noted(name, contenders, results):
                turn, report = contenders[name].turn(steps)
                results[name].turns.append(turn)
                results[name].reported |= report


def ratio(results: Mapping[str, Result], name: str, base: str, clock: str) -> str:
    """The median over rounds of a contender's time by another's, for the table."""
    if base not in results or results[base].failure:
        return "-"
    pairs = zip(results[name].turns, results[base].turns, strict=True)
    return f"{statistics.median(getattr(a, clock) / getattr(b, clock) for a, b in pairs):.2f}"
