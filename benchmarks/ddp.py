"""What data parallelism costs: hapi on two ranks against loops written by hand, Lightning and Accelerate.

LeNet on MNIST (random images, if MNIST cannot be found), two ranks on Gloo with one thread each, 64 rows per rank,
Adam, loss and accuracy, a report every 50 steps. Each contender is written as its users write it (_ddp_contenders.py),
over two forms of the data: ``map`` is a Dataset that makes one sample at a time, ``memory`` is tensors. ``raw/map`` is
the loop of the tutorials, ``raw/best`` an expert's. All contenders' processes live at the same time and take turns of
some steps, in random order within a round, so that the machine's noise hits all alike; what counts is the ratio within
a round.

    python benchmarks/ddp.py [--rounds 7] [--steps 100] [--launches 1] [--only hapi,raw] [--malloc keep|default]

By default all ranks are told to keep freed memory (``--malloc keep``): whether glibc gives it back depends on how the
heap happens to lie, differs between two processes of the same program, and would hide what is compared here.

Lightning and Accelerate are installed into environments of their own, below ``--env-dir``, and kept there.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from _ddp_contenders import CONTENDERS, RANKS, ROWS
from _env import ROOT, EnvError, python_of
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from hapi.datasets import MNIST, DatasetNotFoundError

# glibc gives large buffers back to the kernel or keeps them, as the heap happens to lie: up to a fifth of a step.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(2 << 30)}
REQUIREMENTS = {"lightning": "lightning==2.6.6", "accelerate": "accelerate==1.15.0"}
SCRIPT = Path(__file__).resolve().parent / "_ddp_contenders.py"
BASE, BEST, WARM_UP = "raw/map", "raw/best", 30
START_SECONDS, TURN_SECONDS, END_SECONDS = 300.0, 600.0, 10.0


class ContenderError(Exception):
    """A contender does not run; the text says why."""


@dataclass
class Turn:
    """Seconds per step of both clocks and page faults per step, of all ranks; rank 0's collectives, where counted."""

    wall: float
    cpu: float
    faults: float
    collectives: dict[str, int]


@dataclass
class Result:
    turns: list[Turn] = field(default_factory=list)
    collectives: dict[str, int] = field(default_factory=dict)
    failure: str = ""


class Contender:
    """One contender's processes.

    Args:
        name: Of the contender.
        python: Its interpreter.
        images: The data's file.
        folder: Where its ranks run, and write what they print.
    """

    def __init__(self, name: str, python: Path, images: Path, folder: Path) -> None:
        self.name = name
        self.folder = folder
        folder.mkdir()
        # The store is the parent's, on a socket that it has bound already: no port is chosen and lost again.
        listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        port = listener.getsockname()[1]
        self.store = TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self.processes: list[subprocess.Popen[bytes]] = []
        self.channels: list[socket.socket] = []
        self.lines: list[Any] = []
        for rank in range(RANKS):
            mine, theirs = socket.socketpair()
            env = {**os.environ, **_rank_variables(rank, port)}
            command = [str(python), str(SCRIPT), name, str(images)]
            with theirs, open(folder / f"rank{rank}.log", "wb") as log:
                process = subprocess.Popen(
                    [*command, str(theirs.fileno())],
                    env=env,
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[theirs.fileno()],
                )
            self.processes.append(process)
            self.channels.append(mine)
            self.lines.append(mine.makefile("r", encoding="utf-8"))

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

    def turn(self, steps: int, *, count: bool = False) -> Turn:
        """Let it train."""
        order = json.dumps({"steps": steps, "count": count}).encode() + b"\n"
        start = time.perf_counter()
        for rank, channel in enumerate(self.channels):
            try:
                channel.sendall(order)
            except OSError:
                raise ContenderError(self._obituary(rank)) from None
        answers = self.wait(TURN_SECONDS)
        wall = time.perf_counter() - start
        cpu, faults = (sum(answer[key] for answer in answers) / steps for key in ("cpu", "faults"))
        return Turn(wall / steps, cpu, faults, answers[0]["collectives"])

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
        del self.store

    def _obituary(self, rank: int) -> str:
        try:
            code = str(self.processes[rank].wait(END_SECONDS))
        except subprocess.TimeoutExpired:
            code = "none yet"
        log = (self.folder / f"rank{rank}.log").read_text(errors="replace").splitlines()
        return f"rank {rank} ended, exit code {code}: {next((line for line in reversed(log) if line.strip()), '')}"


def _rank_variables(rank: int, port: int) -> dict[str, str]:
    """What torchrun sets, one thread, loopback."""
    return {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "benchmark",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def write_images(path: Path) -> tuple[str, int]:
    """Save the data for all contenders; what it is, and the steps of an epoch."""
    try:
        images, labels = MNIST(mode="train", download=False).tensors
        what = "MNIST"
    except DatasetNotFoundError:
        images = torch.randint(0, 256, (60_000, 1, 28, 28), dtype=torch.uint8)
        labels = torch.randint(0, 10, (60_000,))
        what = "random images of MNIST's shape"
    torch.save([images, labels], path)
    return what, -(-len(labels) // (RANKS * ROWS))


def interpreters(names: Sequence[str], env_dir: Path, results: dict[str, Result]) -> dict[str, Path]:
    """The interpreter of each contender; one that cannot be had is noted as a failure."""
    found = {}
    for framework, group in itertools.groupby(names, lambda name: name.partition("/")[0]):
        wanted, members = REQUIREMENTS.get(framework), list(group)
        try:
            python = python_of(env_dir, framework, [wanted]) if wanted else Path(sys.executable)
            found.update(dict.fromkeys(members, python))
        except EnvError as exc:
            for name in members:
                results[name].failure = f"not installed: {exc}"
    return found


@contextlib.contextmanager
def started(pythons: dict[str, Path], images: Path, folder: Path, results: dict[str, Result]) -> Iterator[Any]:
    """All contenders, warmed up."""
    contenders: dict[str, Contender] = {}
    try:
        for name, python in pythons.items():
            if results[name].failure:  # in an earlier launch
                continue
            # One after the other: together they would only wait for the same cores.
            contenders[name] = Contender(name, python, images, folder / name.replace("/", "-"))
            with _noted(name, contenders, results):
                contenders[name].wait(START_SECONDS)
                contenders[name].turn(WARM_UP)
        yield contenders
    finally:
        for contender in contenders.values():
            contender.end()


@contextlib.contextmanager
def _noted(name: str, contenders: dict[str, Contender], results: dict[str, Result]) -> Iterator[None]:
    """A contender that fails is out, and the others go on."""
    try:
        yield
    except ContenderError as exc:
        results[name].failure = str(exc)
        contenders.pop(name).end()


def compete(
    pythons: dict[str, Path], images: Path, results: dict[str, Result], *, rounds: int, steps: int, epoch: int
) -> None:
    """One launch of all contenders: the rounds, then, once, the count over the steps of an epoch."""
    with tempfile.TemporaryDirectory() as folder, started(pythons, images, Path(folder), results) as contenders:
        for _ in range(rounds):
            order = list(contenders)
            random.shuffle(order)
            for name in order:
                with _noted(name, contenders, results):
                    results[name].turns.append(contenders[name].turn(steps))
        for name in [name for name in contenders if not results[name].collectives]:
            with _noted(name, contenders, results):
                results[name].collectives = contenders[name].turn(epoch, count=True).collectives


def show(results: dict[str, Result], epoch: int) -> None:
    def ratio(result: Result, base: str, clock: str) -> str:
        if base not in results or results[base].failure:
            return "-"
        pairs = zip(result.turns, results[base].turns, strict=True)
        return f"{statistics.median(getattr(a, clock) / getattr(b, clock) for a, b in pairs):.2f}"

    print(f"{'':20}{'ms/step':>16}{'/ ' + BASE:>16}{'/ ' + BEST:>16}{'faults':>9}  collectives")
    print(f"{'':20}{'wall':>8}{'CPU':>8}{'wall':>8}{'CPU':>8}{'wall':>8}{'CPU':>8}{'/ step':>9}  per step")
    for name, result in results.items():
        if result.failure:
            print(f"{name:20}  {result.failure}")
            continue
        wall, cpu, faults = (
            statistics.median(getattr(turn, what) for turn in result.turns) for what in ("wall", "cpu", "faults")
        )
        ratios = [ratio(result, base, clock) for base in (BASE, BEST) for clock in ("wall", "cpu")]
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(result.collectives.items()))
        columns = f"{wall * 1e3:8.2f}{cpu * 1e3:8.2f}" + "".join(f"{text:>8}" for text in ratios) + f"{faults:9.0f}"
        print(f"{name:20}{columns}  {sum(result.collectives.values()) / epoch:.3f} ({kinds} in {epoch} steps)")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=100, help="of one turn")
    parser.add_argument("--launches", type=int, default=1, help="times to start all processes anew")
    parser.add_argument("--only", default="", help="such as hapi,raw or hapi/map; raw/map always runs")
    parser.add_argument(
        "--malloc", choices=("keep", "default"), default="keep", help="whether freed memory stays with the process"
    )
    parser.add_argument("--env-dir", type=Path, default=ROOT / ".bench-envs")
    given = parser.parse_args()
    for option in ("rounds", "steps", "launches"):
        if getattr(given, option) < 1:
            parser.error(f"--{option} must be at least 1")
    only = {part for part in given.only.split(",") if part}
    if unknown := only - set(CONTENDERS) - {name.partition("/")[0] for name in CONTENDERS}:
        parser.error(f"--only: {', '.join(sorted(unknown))}; there are {', '.join(CONTENDERS)}")
    names = [n for n in CONTENDERS if not only or n == BASE or n in only or n.partition("/")[0] in only]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that everything is cleaned up
    if given.malloc == "keep":
        os.environ.update(KEEP_MEMORY)  # for the ranks; this process has started without
    results = {name: Result() for name in names}
    pythons = interpreters(names, given.env_dir.absolute(), results)
    with tempfile.TemporaryDirectory() as folder:
        what, epoch = write_images(Path(folder) / "images.pt")
        for _ in range(given.launches):
            compete(pythons, Path(folder) / "images.pt", results, rounds=given.rounds, steps=given.steps, epoch=epoch)
    print(
        f"LeNet on {what}, {RANKS} ranks, {ROWS} rows each, Adam, one thread per rank, torch {torch.__version__}\n"
        f"medians of {given.launches} x {given.rounds} rounds of {given.steps} steps, malloc: {given.malloc}; "
        "CPU and page faults are those of all ranks"
    )
    show(results, epoch)
    return 1 if results[BASE].failure else 0


if __name__ == "__main__":
    sys.exit(main())
