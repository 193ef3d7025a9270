"""What checkpoints cost: training with one every N steps against training with none.

Contenders take turns within a round, each round in random order; what counts is the ratio of wall times within a round,
and the median over rounds. The stall is what one save holds the training up for, as callbacks see it: from the batch
that asked for it to the next batch, less what lies between two other batches. It is the copy to host memory, and the
wait for the save before where that one is still being written.

    python benchmarks/checkpoint.py [--rounds 7] [--threads 1] [--folder DIR]
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hapi

BATCH, STEPS = 64, 100
EVERY = (10, 100)


class Saves(hapi.callbacks.Callback):
    """Asks for a checkpoint every ``every`` steps, the first after half as many, so that the last one overlaps too.

    Args:
        prefixes: Where it writes, in turn.
        every: Steps between saves; None for never.
    """

    def __init__(self, prefixes: Sequence[Path], every: int | None) -> None:
        self.prefixes, self.every = prefixes, every
        self.saves, self.ended, self.asked = 0, 0.0, False
        self.gaps: dict[bool, list[float]] = {True: [], False: []}  # seconds between batches, by whether one was asked

    def on_train_batch_begin(self, step: int, logs: Any = None) -> None:
        if step:
            self.gaps[self.asked].append(time.perf_counter() - self.ended)

    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        self.asked = self.every is not None and step % self.every == self.every // 2
        if self.asked:
            self.run.control.request_save(str(self.prefixes[self.saves % len(self.prefixes)]))
            self.saves += 1
        self.ended = time.perf_counter()


def lenet() -> tuple[nn.Module, tuple[int, ...]]:
    convolutions = [nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU()]
    dense = [nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)]
    return nn.Sequential(*convolutions, nn.MaxPool2d(2), nn.Flatten(), *dense), (1, 28, 28)


def mlp() -> tuple[nn.Module, tuple[int, ...]]:
    layers = [nn.Linear(784, 1800), nn.ReLU(), nn.Linear(1800, 2000), nn.ReLU(), nn.Linear(2000, 10)]
    return nn.Sequential(*layers), (784,)


def contender(make: Callable[[], tuple[nn.Module, tuple[int, ...]]], saves: Saves) -> Callable[[], None]:
    torch.manual_seed(0)
    net, shape = make()
    data = torch.randn(BATCH * STEPS, *shape), torch.randint(0, 10, (BATCH * STEPS,))
    adam = torch.optim.Adam(net.parameters(), 1e-3, fused=True)
    model = hapi.Model(net).prepare(adam, nn.CrossEntropyLoss(), "accuracy")

    def run() -> None:
        model.fit(data, batch_size=BATCH, verbose=0, log_freq=STEPS, callbacks=saves)

    return run


def measure(name: str, make: Callable[[], tuple[nn.Module, tuple[int, ...]]], rounds: int, folder: Path) -> None:
    """Prints the lines of one net."""
    saves = {n: Saves([folder / f"{name}-{n}-{turn}" for turn in range(2)], n) for n in (None, *EVERY)}
    turns = {n: contender(make, callback) for n, callback in saves.items()}
    seconds: dict[int | None, list[float]] = {n: [] for n in turns}
    for run in turns.values():
        run()
    for callback in saves.values():
        callback.gaps = {True: [], False: []}
    for _ in range(rounds):
        for n in random.sample(list(turns), len(turns)):
            begun = time.perf_counter()
            turns[n]()
            seconds[n].append(time.perf_counter() - begun)
    base = seconds[None]
    size = sum(path.stat().st_size for path in folder.glob(f"{name}-{EVERY[0]}-0.*")) / 2**20
    millions = sum(p.numel() for p in make()[0].parameters()) / 1e6
    for n, callback in saves.items():
        step = statistics.median(seconds[n]) / STEPS * 1e3
        line = f"{name:6}{millions:10.2f}{size:10.1f}{n or 'none':>8}{step:12.2f}"
        if n is not None:
            ratio = statistics.median(t / b for t, b in zip(seconds[n], base, strict=True))
            stall = statistics.median(callback.gaps[True]) - statistics.median(callback.gaps[False])
            line += f"{ratio:9.2f}{stall * 1e3:12.2f}"
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: the one for temporary files")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(
        f"batch {BATCH}, {STEPS} steps per turn, {args.threads} thread(s), {args.rounds} rounds; medians of wall time"
    )
    print(f"{'net':6}{'M params':>10}{'MiB/save':>10}{'N':>8}{'ms/step':>12}{'ratio':>9}{'stall, ms':>12}")
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        measure("LeNet", lenet, args.rounds, Path(folder))
        measure("MLP", mlp, args.rounds, Path(folder))


if __name__ == "__main__":
    main()
