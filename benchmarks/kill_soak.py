"""Kill a random rank at a random moment, many times: every launch must end soon, name the rank and leave nothing.

    python benchmarks/kill_soak.py --runs 50 --nproc 2 examples/train.py [arguments of the script]

The script must run longer than ``--latest`` seconds. Exits with 1 if a run broke a promise.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

MARK = "HAPI_SOAK_RUN"
LIMIT = 15.0  # seconds from the kill to the end of the launcher


@dataclass
class Round:
    """What one launch did."""

    rank: int
    after: float
    ended_in: float
    code: int | None
    problems: list[str] = field(default_factory=list)


def soak(
    command: Sequence[str],
    *,
    runs: int,
    nproc: int,
    seed: int = 0,
    latest: float = 5.0,
    env: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> list[Round]:
    """Launch ``command`` ``runs`` times and kill one rank of each.

    Args:
        command: Script and arguments, as after ``python -m hapi.launch``.
        runs: Number of launches.
        nproc: Ranks of each.
        seed: Of the choice of ranks and moments.
        latest: Latest moment of the kill, in seconds after the rank has started.
        env: Variables of the launcher; None for this process's.
        folder: Where it runs; None for a temporary one.
    """
    choose = random.Random(seed)
    rounds = []
    with tempfile.TemporaryDirectory() as temporary:
        for _ in range(runs):
            rank, after = choose.randrange(nproc), choose.uniform(0.0, latest)
            rounds.append(_once(command, nproc, rank, after, env or os.environ, folder or Path(temporary)))
    return rounds


def _once(command: Sequence[str], nproc: int, rank: int, after: float, env: Mapping[str, str], folder: Path) -> Round:
    mark = uuid.uuid4().hex
    launch = [sys.executable, "-m", "hapi.launch", "--nproc", str(nproc), "--log_dir", str(folder / "log"), *command]
    with open(folder / "console", "w+") as console:
        process = subprocess.Popen(launch, env={**env, MARK: mark}, cwd=folder, stdout=console, stderr=console)
        deadline = time.monotonic() + 60
        while (pid := _rank_pid(mark, rank)) is None and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.02)
        time.sleep(after)
        ports = _listening(_marked(mark))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid or 0, signal.SIGKILL) if pid else None
        killed = time.monotonic()
        try:
            process.wait(LIMIT * 4)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        done = Round(rank, after, time.monotonic() - killed, process.returncode)
        console.seek(0)
        text = console.read()
    if pid is None:
        done.problems.append(f"rank {rank} never started")
    if done.ended_in > LIMIT:
        done.problems.append(f"took {done.ended_in:.1f} s to end")
    if done.code != 137:
        done.problems.append(f"exit code {done.code}, not 137")
    if f"rank {rank} on host" not in text or "killed by SIGKILL" not in text:
        done.problems.append(f"rank {rank} is not named: ...{text[-300:]!r}")
    if left := _marked(mark):
        done.problems.append(f"processes left: {left}")
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    if still := ports & _listening(None):
        done.problems.append(f"ports left: {sorted(still)}")
    return done


def _variables(pid: int) -> dict[str, str]:
    try:
        items = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(item.split("=", 1) for item in items if "=" in item)


def _marked(mark: str) -> list[int]:
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    return [pid for pid in pids if _variables(pid).get(MARK) == mark]


def _rank_pid(mark: str, rank: int) -> int | None:
    """The rank's own process: not its children, which have its variables too, but another parent's."""
    ranks = [pid for pid in _marked(mark) if _variables(pid).get("RANK") == str(rank)]
    own = [pid for pid in ranks if os.path.exists(f"/proc/{pid}") and _parent(pid) not in ranks]
    return own[0] if own else None


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return -1


def _listening(pids: list[int] | None) -> set[int]:
    """TCP ports in state LISTEN: of these processes, or of the whole machine."""
    inodes = None if pids is None else {inode for pid in pids for inode in _socket_inodes(pid)}
    ports = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == "0A" and (inodes is None or columns[9] in inodes):
                ports.add(int(columns[1].rpartition(":")[2], 16))
    return ports


def _socket_inodes(pid: int) -> set[str]:
    found = set()
    with contextlib.suppress(OSError):
        for entry in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{entry}")
                if target.startswith("socket:["):
                    found.add(target[8:-1])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--latest", type=float, default=5.0, help="latest moment of the kill, seconds after the start")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="script and its arguments")
    given = parser.parse_args()
    if not given.command:
        parser.error("name a training script")
    script = [os.path.abspath(given.command[0]), *given.command[1:]]
    rounds = soak(script, runs=given.runs, nproc=given.nproc, seed=given.seed, latest=given.latest)
    for number, done in enumerate(rounds):
        verdict = "; ".join(done.problems) or "ok"
        print(f"{number:3d}  rank {done.rank} at {done.after:4.1f} s  ended in {done.ended_in:4.1f} s  {verdict}")
    bad = sum(bool(done.problems) for done in rounds)
    slowest = max(done.ended_in for done in rounds)
    print(f"{len(rounds) - bad} of {len(rounds)} runs kept every promise; the slowest end took {slowest:.1f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
