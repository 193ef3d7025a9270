"""What writers cost: training with one that writes every 10 steps against training with none.

Contenders take turns within a round, each round in random order; what counts is the ratio of times within a round, and
the median over rounds. Each turn opens and closes the run, which its times include. The CPU time is that of the whole
process, threads included. LeNet shows what it means for a training, the tiny net the microseconds.

    python benchmarks/loggers.py [--rounds 7] [--threads 1] [--folder DIR]
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import hapi
from hapi.callbacks import CSV, Callback, CSVLogger, JSONLines, Logger, TensorBoard, VisualDL

LOG_FREQ = 10
WRITERS: dict[str, Callable[[Path], list[Callback]]] = {
    "none": lambda folder: [],
    "Logger that writes nothing": lambda folder: [Logger(folder, "nothing")],
    "VisualDL": lambda folder: [VisualDL(folder, "visualdl")],
    "TensorBoard": lambda folder: [TensorBoard(folder, "tensorboard")],
    "CSV": lambda folder: [CSV(folder, "csv")],
    "JSONLines": lambda folder: [JSONLines(folder, "jsonlines")],
    "CSVLogger (per epoch)": lambda folder: [CSVLogger(folder / "log.csv", append=True)],
}


def lenet() -> nn.Module:
    convolutions = [nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU()]
    dense = [nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)]
    return nn.Sequential(*convolutions, nn.MaxPool2d(2), nn.Flatten(), *dense)


def tiny() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(8, 10))


def contender(net: nn.Module, shape: tuple[int, ...], steps: int, writers: list[Callback]) -> Callable[[], None]:
    batch = 64 if len(shape) == 3 else 4
    data = torch.randn(batch * steps, *shape), torch.randint(0, 10, (batch * steps,))
    model = hapi.Model(net).prepare(torch.optim.SGD(net.parameters(), 1e-3), nn.CrossEntropyLoss(), "accuracy")

    def run() -> None:
        model.fit(data, batch_size=batch, verbose=0, log_freq=LOG_FREQ, callbacks=writers)

    return run


def measure(
    name: str, make: Callable[[], nn.Module], shape: tuple[int, ...], steps: int, rounds: int, parent: Path | None
) -> None:
    """Prints the table of one net."""
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        turns = {}
        for writer, build in WRITERS.items():
            torch.manual_seed(0)
            turns[writer] = contender(make(), shape, steps, build(Path(folder)))
        wall: dict[str, list[float]] = {writer: [] for writer in turns}
        cpu: dict[str, list[float]] = {writer: [] for writer in turns}
        for run in turns.values():
            run()
        for _ in range(rounds):
            for writer in random.sample(list(turns), len(turns)):
                begun = time.perf_counter(), time.process_time()
                turns[writer]()
                wall[writer].append((time.perf_counter() - begun[0]) / steps)
                cpu[writer].append((time.process_time() - begun[1]) / steps)
    print(f"{name}, {steps} steps per turn")
    print(f"{'':28}{'us/step':>10}{'ratio':>8}{'more, us':>10}{'CPU ratio':>11}{'more, us':>10}")
    for writer in turns:
        line = f"{writer:28}{statistics.median(wall[writer]) * 1e6:10.1f}"
        for times, width in ((wall, 8), (cpu, 11)):
            pairs = list(zip(times[writer], times["none"], strict=True))
            ratio = statistics.median(mine / base for mine, base in pairs)
            more = statistics.median(mine - base for mine, base in pairs) * 1e6
            line += f"{ratio:{width}.3f}{more:10.1f}"
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: the one for temporary files")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"a point every {LOG_FREQ} steps, {args.threads} thread(s), {args.rounds} rounds; medians")
    measure("LeNet, batch 64", lenet, (1, 28, 28), 200, args.rounds, args.folder)
    measure("Linear(8, 10), batch 4", tiny, (8,), 2000, args.rounds, args.folder)


if __name__ == "__main__":
    main()
