"""Kill training at random moments, start it again until it ends, and compare every bit with a run left alone.

    python benchmarks/resume_soak.py [--kills 20] [--seed 0] [--config all|1x0|1x2|2x0|2x2]

A configuration is RANKSxWORKERS: one process, or two ranks of ``python -m hapi.launch``, with 0 or 2 reader processes.
What is trained draws random numbers wherever users do: dropout, the order, and samples that draw from torch, numpy and
random; its weights are averaged (EMA), its gradients clipped, its rate follows a schedule. SIGKILL goes to the process;
of a launch, to a random rank or to the launcher. The moment is uniform over what is left of the run, counted from its
first checkpoint, so that kills fall into saves, evaluations and ends of epochs.
After at most 4 kills a run may end; then its weights (SHA-256) and its History must be those of the run left alone.

Exits with 1 if anything differs, a start fails, or a temporary file or a process is left. Needs Linux's /proc.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import hapi

CONFIGS = {"1x0": (1, 0), "1x2": (1, 2), "2x0": (2, 0), "2x2": (2, 2)}
ROWS, BATCH, EPOCHS = 800, 16, 6
STEPS = ROWS // BATCH * EPOCHS
KILLS_PER_RUN = 4
START_SECONDS, END_SECONDS = 120.0, 20.0
MARK = "HAPI_RESUME_SOAK"
LAUNCHERS = ("PADDLE_", "SLURM_", "OMPI_", "PMI", "MASTER_", "RANK", "LOCAL_", "WORLD_SIZE", "HAPI_")


# ------------------------------------------------------------ what is trained


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Samples with noise from all three global generators, as users' augmentations have."""

    def __init__(self, rows: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(rows, 16, generator=generator)
        self.y = self.x[:, :4].argmax(1)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.rand(16) + float(np.random.rand()) + random.random()  # noqa: NPY002
        return self.x[index] + 0.1 * noise, self.y[index]


class Phase(hapi.callbacks.Callback):
    """Writes what the run is doing into a file, for the line about a kill."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def _enter(self, phase: str) -> None:
        with open(self.file, "a") as file:  # appended, since a kill may fall between cutting and writing
            file.write(phase + "\n")

    def on_train_begin(self, logs: Any = None) -> None:
        self._enter("training")

    def on_eval_begin(self, logs: Any = None) -> None:
        self._enter("evaluation")

    def on_eval_end(self, logs: Any = None) -> None:
        self._enter("end of an epoch")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._enter("training")

    def on_train_end(self, logs: Any = None) -> None:
        self._enter("end of the run")


def train(folder: Path, workers: int) -> None:
    """The run: checkpoints in ``folder/saved``, its outcome in ``folder/result.json``."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 4))
    adam = torch.optim.Adam(net.parameters(), 1e-2)
    model = hapi.Model(net).prepare(adam, "cross_entropy", "acc", scheduler="cosine", clip_grad_norm=1.0)
    (folder / f"pid.{hapi.distributed.get_rank()}").write_text(str(os.getpid()))
    history = model.fit(
        Noisy(ROWS, 1),
        Noisy(96, 2),
        global_batch_size=BATCH,
        epochs=EPOCHS,
        log_freq=3,  # several ranks save where they log
        verbose=0,
        num_workers=workers,
        # Evaluated, saved and left in the network at the end: all of it must come back.
        callbacks=[hapi.callbacks.EMA(0.95), Phase(folder / "phase")],
        save_dir=folder / "saved",
        save_every_n_steps=3,
        keep=3,
        resume="auto",
    )
    if hapi.distributed.get_rank() == 0:
        digest = hashlib.sha256(b"".join(t.numpy().tobytes() for t in net.state_dict().values())).hexdigest()
        (folder / "result.json").write_text(json.dumps({"sha256": digest, "history": history.history}))


# ------------------------------------------------------------ the soak


class SoakError(Exception):
    """A promise was broken; the text says which."""


class Started:
    """One start of the command.

    Args:
        folder: Of the run.
        ranks: 1 for a plain process.
        workers: Reader processes per rank.
    """

    def __init__(self, folder: Path, ranks: int, workers: int) -> None:
        self.folder, self.ranks, self.mark = folder, ranks, uuid.uuid4().hex
        folder.mkdir(exist_ok=True)
        for name in ("pid.0", "pid.1", "phase", "result.json"):
            (folder / name).unlink(missing_ok=True)
        launch = ["-m", "hapi.launch", "--nproc", str(ranks), "--log_dir", str(folder / "log")] if ranks > 1 else []
        command = [sys.executable, *launch, os.path.abspath(__file__), "--train", str(folder), str(workers)]
        kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
        mine = {MARK: self.mark, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        with open(folder / "console", "wb") as console:
            self.process = subprocess.Popen(
                command, env={**kept, **mine}, stdin=subprocess.DEVNULL, stdout=console, stderr=console
            )

    def pid(self, target: str) -> int:
        """Process id of ``"launcher"`` or ``"rank 0"``; a plain run is its own rank 0."""
        if target == "launcher" or self.ranks == 1:
            return self.process.pid
        return int((self.folder / f"pid.{target.removeprefix('rank ')}").read_text())

    def wait_for_checkpoint(self) -> bool:
        """Until fit has begun and there is a first file of a checkpoint; False if the run has ended before."""
        pids = [self.folder / f"pid.{rank}" for rank in range(self.ranks)]
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                return False
            if all(path.exists() and path.read_text() for path in pids) and files_in(self.folder / "saved"):
                return True
            time.sleep(0.002)
        raise SoakError(f"no checkpoint within {START_SECONDS:g} s")

    def marked(self) -> list[int]:
        """All living processes of this start."""
        found, wanted = [], f"{MARK}={self.mark}".encode()
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    found.append(int(pid))
        return found

    def wait_for_end(self) -> None:
        """Until no process of it is left.

        Raises:
            SoakError: Some are left after ``END_SECONDS``.
        """
        deadline = time.monotonic() + END_SECONDS
        while True:
            self.process.poll()
            left = self.marked()
            if not left and self.process.returncode is not None:
                return
            if time.monotonic() > deadline:
                raise SoakError(f"processes left {END_SECONDS:g} s after the end: {left}")
            time.sleep(0.05)

    def stop(self) -> None:
        """Whatever happened, leave no process."""
        for pid in self.marked():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def started(folder: Path, ranks: int, workers: int) -> Iterator[Started]:
    run = Started(folder, ranks, workers)
    try:
        yield run
    finally:
        run.stop()


def files_in(folder: Path) -> list[str]:
    return os.listdir(folder) if folder.is_dir() else []


def newest_step(folder: Path) -> int:
    """Step of the newest checkpoint, by the manifests; 0 if there is none."""
    return max((int(json.loads(path.read_bytes())["step"]) for path in folder.glob("*.json")), default=0)


def outcome(run: Started) -> dict[str, Any]:
    """What an ended run left.

    Raises:
        SoakError: It failed, or left a temporary file.
    """
    run.wait_for_end()
    if run.process.returncode:
        console = (run.folder / "console").read_text(errors="replace")
        raise SoakError(f"exit code {run.process.returncode}: ...{console[-2000:]}")
    if temporary := [name for name in files_in(run.folder / "saved") if name.endswith(".tmp")]:
        raise SoakError(f"temporary files left: {temporary}")
    result: dict[str, Any] = json.loads((run.folder / "result.json").read_text())
    return result


def differences(got: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """What differs, for a person; empty if nothing does."""
    parts = [] if got["sha256"] == wanted["sha256"] else [f"weights {got['sha256'][:12]}, not {wanted['sha256'][:12]}"]
    for name in sorted({*got["history"], *wanted["history"]}):
        one, other = got["history"].get(name), wanted["history"].get(name)
        if one != other:
            parts.append(f"history[{name!r}] {one}, not {other}")
    return "; ".join(parts)


def undisturbed(folder: Path, ranks: int, workers: int) -> tuple[dict[str, Any], float]:
    """Outcome of the run left alone, and its life: seconds from its first checkpoint to the end of fit."""
    with started(folder, ranks, workers) as run:
        run.wait_for_checkpoint()
        begun = time.monotonic()
        while not (folder / "result.json").exists() and run.process.poll() is None:
            time.sleep(0.01)
        life = time.monotonic() - begun
        run.process.wait(START_SECONDS)
        return outcome(run), life


def kill(run: Started, target: str) -> str:
    """SIGKILL, and the end of what is left; returns the phase it fell into."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(run.pid(target), signal.SIGKILL)
    file = run.folder / "phase"
    phases = file.read_text().split("\n")[:-1] if file.exists() else []
    run.wait_for_end()
    if any(name.endswith(".tmp") for name in files_in(run.folder / "saved")):
        return "save"
    return phases[-1] if phases else "start or resume"


def soak(config: str, kills: int, choose: random.Random, home: Path) -> tuple[list[str], Counter[str], int]:
    """Kill ``kills`` times. Returns what went wrong, the phases that were hit, and the number of runs compared."""
    ranks, workers = CONFIGS[config]
    wanted, life = undisturbed(home / "whole", ranks, workers)
    print(f"{config}  undisturbed: {life:.1f} s of life, weights {wanted['sha256'][:12]}", flush=True)
    targets = ["process"] if ranks == 1 else ["rank 0", "rank 1", "launcher"]
    problems: list[str] = []
    phases: Counter[str] = Counter()
    done = runs = in_this_run = 0
    while done < kills or in_this_run:
        folder = home / f"run-{runs}"
        step = newest_step(folder / "saved")
        try:
            with started(folder, ranks, workers) as run:
                may_kill = done < kills and in_this_run < KILLS_PER_RUN and step < STEPS
                if may_kill and run.wait_for_checkpoint():
                    after = choose.uniform(0, life * (1 - step / STEPS))
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        run.process.wait(after)
                    if run.process.returncode is None:
                        target = choose.choice(targets)
                        phase = kill(run, target)
                        done, in_this_run = done + 1, in_this_run + 1
                        phases[phase] += 1
                        now = newest_step(folder / "saved")
                        print(
                            f"{config}  kill {done:3d}: {target:8} after {after:5.2f} s from step {step:3d}, "
                            f"newest checkpoint now {now:3d}, in: {phase}",
                            flush=True,
                        )
                        continue
                run.process.wait(START_SECONDS)
                wrong = differences(outcome(run), wanted)
        except (SoakError, subprocess.TimeoutExpired) as exc:
            wrong = str(exc)
        print(f"{config}  run {runs} ended after {in_this_run} kills: {wrong or 'the same bits'}", flush=True)
        if wrong:
            problems.append(f"{config}, run {runs}: {wrong}")
        if not in_this_run:
            done += 1  # it ended before its kill: the attempt counts, or the soak might not end
            phases["after the end"] += 1
        runs, in_this_run = runs + 1, 0
    return problems, phases, runs


def main() -> int:
    if sys.argv[1:2] == ["--train"]:
        train(Path(sys.argv[2]), int(sys.argv[3]))
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=20, help="per configuration")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of moments and targets")
    parser.add_argument("--config", choices=["all", *CONFIGS], default="all", help="RANKSxWORKERS")
    given = parser.parse_args()
    choose = random.Random(given.seed)
    problems: list[str] = []
    phases: Counter[str] = Counter()
    runs = 0
    for config in CONFIGS if given.config == "all" else [given.config]:
        with tempfile.TemporaryDirectory() as home:
            wrong, hit, compared = soak(config, given.kills, choose, Path(home))
        problems, phases, runs = problems + wrong, phases + hit, runs + compared
    where = ", ".join(f"{count} in {phase}" for phase, count in phases.most_common())
    print(f"{sum(phases.values())} kills ({where}); {runs - len(problems)} of {runs} runs ended with the same bits")
    for problem in problems:
        print(f"  {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
