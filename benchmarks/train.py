"""What training costs: hapi against the loops that one writes by hand, and against its peers. CPU, one process each.

    python benchmarks/train.py [--workloads lenet,resnet,transformer,mlp,tiny,start] [--only hapi,raw,...] [--short]
                               [--rounds 7] [--steps N] [--launches 1] [--threads 1] [--malloc keep|default]
                               [--json PATH]

LeNet on MNIST (random images, if MNIST cannot be found), ResNet-18, a transformer, an MLP; Adam, loss and accuracy, a
report every 50 steps. ``tiny`` is a net so small, with SGD, that what shows is the cost of the loop. ``start`` is what
there is to pay before and beside training. Fit and evaluation are timed apart; a turn of evaluation is one whole call,
which prints nothing.

Each contender is written as its users write it (_train_contenders.py, _train_peers.py, _train_paddle.py), in its
quietest useful form. ``map`` is a Dataset that makes one sample at a time; ``memory`` and ``numpy`` are tensors and
arrays. ``raw/map`` is the loop of the tutorials, with ``loss.item()`` at every step; ``raw/best`` is an expert's: a
gather per batch, sums kept as tensors. These two always run. Keras runs the same torch net, wrapped; Paddle its own.

All contenders' processes live at the same time and take turns of some steps, in random order within a round, so that
the machine's noise hits all alike; what counts is the ratio within a round, and with one thread the ratio of CPU time.
Where the heap of a process happens to lie counts too: --launches starts all anew.

At the end each contender trains some steps in the data's order from the same weights; what it arrives at is compared
with raw/best. Exits with 1 if raw/map or hapi with the same arithmetic does not arrive at the same bits, or a loop does
not run.

Peers are installed into environments of their own, below ``--env-dir``, and kept there. ``--short`` builds none: the
loops and hapi in two short rounds.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _contest import KEEP_MEMORY, START_SECONDS, Contender, ContenderError, Result, noted, ratio, take_turns
from _env import ROOT, interpreters
from _workloads import WORKLOADS, Arrays, Workload

from hapi.datasets import MNIST, DatasetNotFoundError

HERE = Path(__file__).resolve().parent
BASE, BEST = "raw/map", "raw/best"
LOOPS = (BASE, BEST, "raw/best+fused+channels_last")
HAPI = ("hapi/map", "hapi/memory", "hapi/fast", "hapi/compile-eval")
PEERS = (
    *("keras/map", "keras/numpy", "lightning/map", "lightning/memory", "ignite/map", "ignite/memory"),
    *("poutyne/map", "poutyne/memory", "skorch/map", "skorch/memory", "accelerate/map", "accelerate/memory"),
    *("paddle/map", "paddle/memory"),
)
CONTENDERS = (*LOOPS, *HAPI, *PEERS)
ONLY_EVALUATION = frozenset({"hapi/compile-eval"})
SAME_BITS = (BASE, BEST, "hapi/map", "hapi/memory")
# What its users import, and the form in which its start is measured.
IMPORTS = {
    "raw/best": "",
    "hapi/memory": "hapi",
    "keras/numpy": "keras",
    "lightning/memory": "lightning",
    "ignite/memory": "ignite.engine, ignite.metrics",
    "poutyne/memory": "poutyne",
    "skorch/memory": "skorch",
    "accelerate/memory": "accelerate",
    "paddle/memory": "paddle",
}
PROBE_STEPS, WARM_UP, START_STEPS = 20, 30, 20


@dataclass
class Options:
    """What the user chose."""

    names: list[str]
    rounds: int
    steps: int | None
    short: bool
    launches: int
    threads: int
    pythons: dict[str, Path]
    failures: dict[str, str]

    def steps_of(self, workload: Workload) -> int:
        """Of one turn."""
        return self.steps or max(1, workload.steps // (2 if self.short else 1))


@dataclass
class Outcome:
    """Of one workload.

    Attributes:
        title: What it is.
        fit: By contender.
        evaluate: By contender.
        probes: By contender: what it reports after some steps in the data's order.
        probe_steps: How many.
    """

    title: str
    fit: dict[str, Result]
    evaluate: dict[str, Result]
    probes: dict[str, Result] = field(default_factory=dict)
    probe_steps: int = 0


class Trainer(Contender):
    """One contender's process.

    Args:
        name: Of the contender.
        python: Its interpreter.
        workload: Its name.
        data: The data's file.
        threads: Of its arithmetic.
        folder: Where it runs, and writes what it prints.
    """

    def __init__(self, name: str, python: Path, workload: str, data: Path, threads: int, folder: Path) -> None:
        script = HERE / ("_train_paddle.py" if name.startswith("paddle/") else "_train_contenders.py")
        command = [str(python), str(script), name, workload, str(data)]
        env = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""}
        super().__init__(command, [{**env, "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}], folder)

    def open(self, task: str, **order: Any) -> None:
        """Begin ``"fit"`` or ``"evaluate"``, up to the gate."""
        self.send({"task": task, **order})
        self.wait(START_SECONDS)

    def close(self) -> dict[str, Any]:
        """End the task. Returns what the process says of itself."""
        self.send({"close": True})
        return self.wait(START_SECONDS)[0]


# ------------------------------------------------------------ the contest


def data_of(name: str) -> tuple[str, Arrays]:
    """What it is, and the arrays."""
    workload = WORKLOADS[name]
    if name != "lenet":
        return workload.title, workload.data()
    arrays: Arrays = {}
    try:
        for part in ("train", "test"):
            images, labels = MNIST(mode=part, download=False).tensors
            arrays[f"{part}_inputs"], arrays[f"{part}_labels"] = images.numpy(), labels.numpy()
    except DatasetNotFoundError:
        return f"{workload.title} on random images of MNIST's shape", workload.data()
    return f"{workload.title} on MNIST", arrays


def compete(name: str, options: Options) -> Outcome:
    """All contenders on one workload: fit, evaluation, probe."""
    workload = WORKLOADS[name]

    def blank(names: Sequence[str]) -> dict[str, Result]:
        return {name: Result(failure=options.failures.get(name, "")) for name in names}

    with tempfile.TemporaryDirectory() as home:
        title, arrays = data_of(name)
        fitting = [name for name in options.names if name not in ONLY_EVALUATION]
        outcome = Outcome(title, blank(fitting), blank([] if name == "tiny" else options.names))
        np.savez(Path(home) / "data.npz", **arrays)
        del arrays
        for launch in range(options.launches):
            with _started(name, options, outcome, Path(home), launch) as contenders:
                _train(contenders, outcome.fit, workload, options)
                if outcome.evaluate:
                    _evaluate(contenders, outcome, workload, options)
                if launch == 0:  # after the clocks: it would change how the heap lies
                    _probe(contenders, outcome, workload, options)
    return outcome


@contextlib.contextmanager
def _started(
    workload: str, options: Options, outcome: Outcome, home: Path, launch: int
) -> Iterator[dict[str, Trainer]]:
    """All contenders that have not failed yet, waiting for what to do."""
    everyone: list[Trainer] = []
    contenders: dict[str, Trainer] = {}
    of = {name: outcome.evaluate if name in ONLY_EVALUATION else outcome.fit for name in options.names}
    names = [name for name in of if name in of[name] and not of[name][name].failure]
    try:
        at_once = os.cpu_count() or 1
        for first in range(0, len(names), at_once):
            group = names[first : first + at_once]
            for name in group:
                folder = home / f"{launch}-{name.replace('/', '-')}"
                python = options.pythons[name]
                contenders[name] = Trainer(name, python, workload, home / "data.npz", options.threads, folder)
                everyone.append(contenders[name])
            for name in group:
                with noted(name, contenders, of[name]):
                    contenders[name].wait(START_SECONDS)
        yield contenders
    finally:
        for contender in everyone:
            contender.end()


@contextlib.contextmanager
def _taking_part(contenders: dict[str, Trainer], results: Mapping[str, Result]) -> Iterator[dict[str, Trainer]]:
    """Those that are in a phase; who fails in it is out for good."""
    mine = {name: contenders[name] for name in contenders if name in results and not results[name].failure}
    before = set(mine)
    yield mine
    for name in list(mine):
        with noted(name, mine, results):
            mine[name].close()
    for name in before - set(mine):
        del contenders[name]


def _train(contenders: dict[str, Trainer], results: Mapping[str, Result], workload: Workload, options: Options) -> None:
    steps = options.steps_of(workload)
    with _taking_part(contenders, results) as mine:
        for name in list(mine):
            with noted(name, mine, results):
                mine[name].open("fit", shuffle=True)
                mine[name].turn(min(WARM_UP, steps))
        take_turns(mine, results, rounds=options.rounds, steps=steps)


def _evaluate(contenders: dict[str, Trainer], outcome: Outcome, workload: Workload, options: Options) -> None:
    results = outcome.evaluate
    for name, result in results.items():
        if name in outcome.fit and outcome.fit[name].failure:
            result.failure = result.failure or "fit has failed"
    steps = min(options.steps_of(workload), workload.test // workload.rows)
    with _taking_part(contenders, results) as mine:
        for name in list(mine):
            with noted(name, mine, results):
                mine[name].open("evaluate", steps=steps)
                mine[name].turn(steps)
        take_turns(mine, results, rounds=options.rounds, steps=steps)


def _probe(contenders: dict[str, Trainer], outcome: Outcome, workload: Workload, options: Options) -> None:
    """Some steps in the data's order, from the same weights."""
    outcome.probe_steps = min(PROBE_STEPS, options.steps_of(workload))
    outcome.probes = {name: Result() for name in outcome.fit if name in contenders}
    with _taking_part(contenders, outcome.probes) as mine:
        for name in list(mine):
            with noted(name, mine, outcome.probes):
                mine[name].open("fit", shuffle=False)
                outcome.probes[name].reported = mine[name].turn(outcome.probe_steps, probe=True)[1]


# ------------------------------------------------------------ before and beside training


@dataclass
class Start:
    """What a framework costs once.

    Attributes:
        seconds: From the start of the process to the end of the first step of LeNet, at each launch.
        memory: The most memory of that process in its first steps, in MiB, at each launch.
        imports: Seconds of the framework's import once torch is imported, at each launch.
        modules: What it imports beyond torch.
        torch: Seconds and modules of torch's import itself.
        failure: Why there is nothing; empty if there is.
    """

    seconds: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    imports: list[float] = field(default_factory=list)
    modules: int = 0
    torch: tuple[float, int] = (0.0, 0)
    failure: str = ""


def measure_starts(options: Options) -> dict[str, Start]:
    """In fresh processes, in random order, as often as there are rounds, at most 5 times; once where it is short."""
    starts = {name: Start(failure=options.failures.get(name, "")) for name in options.names if name in IMPORTS}
    # As pip has done for the others: this tree may be imported for the first time, or where Python writes no bytecode.
    compileall.compile_dir(ROOT / "hapi", quiet=1)
    with tempfile.TemporaryDirectory() as home:
        np.savez(Path(home) / "data.npz", **data_of("lenet")[1])
        for launch in range(1 if options.short else min(options.rounds, 5)):
            for name in random.sample(list(starts), len(starts)):
                if not starts[name].failure:
                    try:
                        _start(name, starts[name], options, Path(home), launch)
                    except ContenderError as exc:
                        starts[name].failure = str(exc)
    return starts


def _start(name: str, start: Start, options: Options, home: Path, launch: int) -> None:
    folder = home / f"{launch}-{name.replace('/', '-')}"
    begun = time.perf_counter()
    contender = Trainer(name, options.pythons[name], "lenet", home / "data.npz", options.threads, folder)
    try:
        contender.wait(START_SECONDS)
        contender.open("fit", shuffle=True)
        contender.turn(1)
        start.seconds.append(time.perf_counter() - begun)
        contender.turn(START_STEPS)
        start.memory.append(contender.close()["memory"])
    finally:
        contender.end()
    _import(name, start, options.pythons[name], folder)


def _import(name: str, start: Start, python: Path, folder: Path) -> None:
    base = "" if name.startswith("paddle/") else "import torch"
    lines = [
        "import sys, time",
        "begun, before = time.perf_counter(), len(sys.modules)",
        base,
        "between, there = time.perf_counter(), len(sys.modules)",
        f"import {IMPORTS[name]}" if IMPORTS[name] else "",
        "end, now = time.perf_counter(), len(sys.modules)",
        "print(between - begun, there - before, end - between, now - there)",
    ]
    env = {**os.environ, "KERAS_BACKEND": "torch", "KERAS_HOME": str(folder)}
    done = subprocess.run([str(python), "-c", "\n".join(lines)], capture_output=True, text=True, env=env, cwd=folder)
    if done.returncode:
        raise ContenderError(f"import {IMPORTS[name]}: {done.stderr.strip().splitlines()[-1]}")
    torch_seconds, torch_modules, seconds, modules = done.stdout.splitlines()[-1].split()
    start.imports.append(float(seconds))
    start.modules, start.torch = int(modules), (float(torch_seconds), int(torch_modules))


# ------------------------------------------------------------ the tables


def show(name: str, outcome: Outcome, options: Options) -> bool:
    """Print the tables of a workload. Returns whether those that must agree do."""
    workload = WORKLOADS[name]
    turns = f"{options.launches} x {options.rounds} rounds of {options.steps_of(workload)} steps"
    print(f"\n{outcome.title}, batch {workload.rows}, {workload.optimizer}: {turns}")
    if name == "tiny":
        _show_overhead(outcome.fit)
    else:
        _show_phase("fit", outcome.fit)
        _show_phase("evaluation", outcome.evaluate)
    return _show_probes(outcome)


def _show_phase(phase: str, results: Mapping[str, Result]) -> None:
    values = f"{'loss':>11}{'acc':>8}" if phase == "evaluation" else ""
    print(f"{phase:30}{'ms/step':>16}{'/ ' + BASE:>16}{'/ ' + BEST:>16}{'faults':>9}{values}")
    print(f"{'':30}{'wall':>8}{'CPU':>8}{'wall':>8}{'CPU':>8}{'wall':>8}{'CPU':>8}{'/ step':>9}")
    for name, result in results.items():
        if result.failure:
            print(f"{name:30}  {result.failure}")
            continue
        columns = f"{result.median('wall') * 1e3:8.2f}{result.median('cpu') * 1e3:8.2f}"
        for base in (BASE, BEST):
            columns += "".join(f"{ratio(results, name, base, clock):>8}" for clock in ("wall", "cpu"))
        columns += f"{result.median('faults'):9.0f}"
        if values:
            columns += f"{result.reported['loss']:11.6f}{result.reported['acc']:8.4f}"
        print(f"{name:30}{columns}")


def _show_overhead(results: Mapping[str, Result]) -> None:
    print(f"{'microseconds per step':30}{'':16}{'over ' + BEST:>16}")
    print(f"{'':30}{'wall':>8}{'CPU':>8}{'wall':>8}{'CPU':>8}")
    best = results[BEST]
    for name, result in results.items():
        if result.failure:
            print(f"{name:30}  {result.failure}")
            continue
        columns = "".join(f"{result.median(clock) * 1e6:8.1f}" for clock in ("wall", "cpu"))
        for clock in ("wall", "cpu"):
            pairs = zip(result.turns, best.turns, strict=True) if not best.failure else []
            over = [getattr(a, clock) - getattr(b, clock) for a, b in pairs]
            columns += f"{statistics.median(over) * 1e6:8.1f}" if over else f"{'-':>8}"
        print(f"{name:30}{columns}")


def _show_probes(outcome: Outcome) -> bool:
    """What each has arrived at; whether those that do the same arithmetic have the same bits."""
    found = {name: result.reported for name, result in outcome.probes.items() if "weights" in result.reported}
    if BEST not in found:
        print(f"{BEST} has failed: nothing to compare with")
        return False
    loss, weights = found[BEST]["loss"], found[BEST]["weights"]
    print(f"after {outcome.probe_steps} steps in the data's order, from the same weights:")
    print(f"  {BEST}: loss {loss!r}, SHA-256 of the weights {weights[:12]}")
    groups: dict[str, list[str]] = {}
    for name, report in found.items():
        off = abs(report["loss"] - loss)
        what = f"loss off by {off:.0e}" if off else "the same loss, not the same weights"
        if name != BEST:
            groups.setdefault("the same bits" if report["weights"] == weights else what, []).append(name)
    for what, names in groups.items():
        print(f"  {what}: {', '.join(names)}")
    for name, result in outcome.probes.items():
        if result.failure:
            print(f"  {name}: {result.failure}")
    wrong = [name for name in SAME_BITS if name in outcome.fit and found.get(name, {}).get("weights") != weights]
    if wrong:
        print(f"  WRONG: {', '.join(wrong)} must have the same bits as {BEST}")
    return not wrong


def show_starts(starts: Mapping[str, Start]) -> None:
    print(f"\n{'once':20}{'first':>9}{'peak':>9}{'import':>9}{'modules':>9}")
    print(f"{'':20}{'step, s':>9}{'RSS, MiB':>9}{'after torch':>18}")
    for name, start in starts.items():
        if start.failure:
            print(f"{name:20}  {start.failure}")
            continue
        first, memory, imports = map(statistics.median, (start.seconds, start.memory, start.imports))
        note = "  (its own import whole: it has no torch)" if name.startswith("paddle/") else ""
        print(f"{name:20}{first:9.2f}{memory:9.0f}{imports:9.2f}{start.modules:9d}{note}")
    if BEST in starts and not starts[BEST].failure:
        seconds, modules = starts[BEST].torch
        print(f"torch itself: {seconds:.2f} s, {modules} modules")


def as_json(given: argparse.Namespace, outcomes: Mapping[str, Outcome], starts: Mapping[str, Start]) -> dict[str, Any]:
    """The raw figures: seconds and page faults per step of every turn."""
    chosen = {name: str(value) if isinstance(value, Path) else value for name, value in vars(given).items()}
    machine = {"python": platform.python_version(), "torch": torch.__version__, "cpus": os.cpu_count()}
    return {
        "arguments": chosen,
        "machine": {**machine, "platform": platform.platform(), "processor": platform.processor()},
        "workloads": {name: asdict(outcome) for name, outcome in outcomes.items()},
        "start": {name: asdict(start) for name, start in starts.items()},
    }


# ------------------------------------------------------------ the command


def parse(arguments: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str], list[str]]:
    """The arguments, the workloads and the contenders."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    tables = [*WORKLOADS, "start"]
    parser.add_argument("--workloads", default=",".join(tables), help=f"of {', '.join(tables)}")
    parser.add_argument("--only", default="", help="such as hapi,keras or hapi/map; raw/map and raw/best always run")
    parser.add_argument("--rounds", type=int, help="default 7; 2 with --short")
    parser.add_argument("--steps", type=int, help="of one turn; default: about a second's, by workload")
    parser.add_argument("--launches", type=int, default=1, help="times to start all processes anew")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--malloc", choices=("keep", "default"), default="default", help="whether freed memory stays with the process"
    )
    parser.add_argument("--short", action="store_true", help="the loops and hapi, two rounds: under three minutes")
    parser.add_argument("--json", type=Path, help="where to write the raw figures")
    parser.add_argument("--env-dir", type=Path, default=ROOT / ".bench-envs")
    given = parser.parse_args(arguments)
    given.rounds = given.rounds if given.rounds is not None else 2 if given.short else 7
    for option in ("rounds", "steps", "launches", "threads"):
        value = getattr(given, option)
        if value is not None and value < 1:
            parser.error(f"--{option} must be at least 1")
    workloads = [part for part in given.workloads.split(",") if part]
    if not workloads:
        parser.error(f"--workloads is empty; there are {', '.join(tables)}")
    if given.json and not given.json.absolute().parent.is_dir():
        parser.error(f"--json {given.json}: there is no such folder")
    if unknown := [part for part in workloads if part not in tables]:
        parser.error(f"--workloads: {', '.join(unknown)}; there are {', '.join(tables)}")
    there = list(CONTENDERS)
    if given.short:  # compiling takes longer than all the rest
        there = [name for name in (*LOOPS, *HAPI) if name not in ONLY_EVALUATION]
    only = {part for part in given.only.split(",") if part}
    if missing := only - set(there) - {name.partition("/")[0] for name in there}:
        parser.error(f"--only: {', '.join(sorted(missing))}; there are {', '.join(there)}")
    names = [n for n in there if not only or n in (BASE, BEST) or n in only or n.partition("/")[0] in only]
    return given, workloads, names


def main() -> int:
    given, workloads, names = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that everything is cleaned up
    if given.malloc == "keep":
        os.environ.update(KEEP_MEMORY)  # for the contenders; this process has started without
    pythons, failures = interpreters(names, given.env_dir.absolute())
    options = Options(names, given.rounds, given.steps, given.short, given.launches, given.threads, pythons, failures)
    print(f"{given.threads} thread(s), torch {torch.__version__}, malloc: {given.malloc}; medians over rounds")
    outcomes: dict[str, Outcome] = {}
    starts: dict[str, Start] = {}
    good = True
    for name in workloads:
        if name == "start":
            starts = measure_starts(options)
            show_starts(starts)
        else:
            outcomes[name] = compete(name, options)
            good &= show(name, outcomes[name], options) and not outcomes[name].fit[BASE].failure
        sys.stdout.flush()
        if given.json:
            given.json.write_text(json.dumps(as_json(given, outcomes, starts), indent=1))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
