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
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from _contest import KEEP_MEMORY, START_SECONDS, Contender, Result, noted, ratio, take_turns
from _ddp_contenders import CONTENDERS, RANKS, ROWS
from _env import ROOT, interpreters
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from hapi.datasets import MNIST, DatasetNotFoundError

SCRIPT = Path(__file__).resolve().parent / "_ddp_contenders.py"
BASE, BEST, WARM_UP = "raw/map", "raw/best", 30


class Ranks(Contender):
    """One contender's processes.

    Args:
        name: Of the contender.
        python: Its interpreter.
        images: The data's file.
        folder: Where its ranks run, and write what they print.
    """

    def __init__(self, name: str, python: Path, images: Path, folder: Path) -> None:
        # The store is the parent's, on a socket that it has bound already: no port is chosen and lost again.
        listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        port = listener.getsockname()[1]
        self.store = TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        command = [str(python), str(SCRIPT), name, str(images)]
        super().__init__(command, [_rank_variables(rank, port) for rank in range(RANKS)], folder)

    def end(self) -> None:
        super().end()
        del self.store


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


@contextlib.contextmanager
def started(pythons: dict[str, Path], images: Path, folder: Path, results: dict[str, Result]) -> Iterator[Any]:
    """All contenders, warmed up."""
    contenders: dict[str, Ranks] = {}
    try:
        for name, python in pythons.items():
            if results[name].failure:  # in an earlier launch
                continue
            # One after the other: together they would only wait for the same cores.
            contenders[name] = Ranks(name, python, images, folder / name.replace("/", "-"))
            with noted(name, contenders, results):
                contenders[name].wait(START_SECONDS)
                contenders[name].turn(WARM_UP)
        yield contenders
    finally:
        for contender in contenders.values():
            contender.end()


def compete(
    pythons: dict[str, Path], images: Path, results: dict[str, Result], *, rounds: int, steps: int, epoch: int
) -> None:
    """One launch of all contenders: the rounds, then, once, the count over the steps of an epoch."""
    with tempfile.TemporaryDirectory() as folder, started(pythons, images, Path(folder), results) as contenders:
        take_turns(contenders, results, rounds=rounds, steps=steps)
        for name in [name for name in contenders if not results[name].reported.get("collectives")]:
            with noted(name, contenders, results):
                results[name].reported |= contenders[name].turn(epoch, count=True)[1]


def show(results: dict[str, Result], epoch: int) -> None:
    print(f"{'':20}{'ms/step':>16}{'/ ' + BASE:>16}{'/ ' + BEST:>16}{'faults':>9}  collectives")
    print(f"{'':20}{'wall':>8}{'CPU':>8}{'wall':>8}{'CPU':>8}{'wall':>8}{'CPU':>8}{'/ step':>9}  per step")
    for name, result in results.items():
        if result.failure:
            print(f"{name:20}  {result.failure}")
            continue
        wall, cpu, faults = (result.median(what) for what in ("wall", "cpu", "faults"))
        ratios = [ratio(results, name, base, clock) for base in (BASE, BEST) for clock in ("wall", "cpu")]
        counts = result.reported.get("collectives", {})
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
        columns = f"{wall * 1e3:8.2f}{cpu * 1e3:8.2f}" + "".join(f"{text:>8}" for text in ratios) + f"{faults:9.0f}"
        print(f"{name:20}{columns}  {sum(counts.values()) / epoch:.3f} ({kinds} in {epoch} steps)")


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
    pythons, failures = interpreters(names, given.env_dir.absolute())
    results = {name: Result(failure=failures.get(name, "")) for name in names}
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
