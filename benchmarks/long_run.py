"""A long run of tiny steps: memory, open files and the time per step must not grow.

    python benchmarks/long_run.py [--steps 200000]

Trains Linear(8, 2) with loss, accuracy, an evaluation per 20,000 steps, lines every 10 batches (thrown away), VisualDL
and JSON lines, and looks at the process ten times on the way. Exits with 1 if the last third needs more memory, more
files, more threads or more time per step than the first by more than noise. Needs Linux's /proc.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import hapi
from hapi.callbacks import Callback, JSONLines, VisualDL

BATCH, LOOKS = 4, 10
MORE_MEMORY, MORE_TIME = 4.0, 1.25  # MiB; a ratio


class Look(NamedTuple):
    step: int
    rss: float  # MiB
    files: int
    threads: int
    objects: int
    micros: float  # per step since the last look


class Looks(Callback):
    """Looks at the process every so many steps."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.looks: list[Look] = []
        self.clock = time.process_time()

    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        if (step + 1) % self.every:
            return
        now = time.process_time()
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        rss = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
        files = len(os.listdir("/proc/self/fd"))
        done = self.run.progress.global_step
        micros = (now - self.clock) / self.every * 1e6
        self.looks.append(Look(done, rss, files, threading.active_count(), len(gc.get_objects()), micros))
        self.clock = time.process_time()


def run(steps: int, folder: Path) -> list[Look]:
    """Train, and look."""
    torch.manual_seed(0)
    net = nn.Linear(8, 2)
    model = hapi.Model(net).prepare(torch.optim.Adam(net.parameters()), nn.CrossEntropyLoss(), "accuracy")
    per_epoch = steps // LOOKS
    x, y = torch.randn(per_epoch * BATCH, 8), torch.randint(0, 2, (per_epoch * BATCH,))
    looks = Looks(per_epoch)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        writers = [VisualDL(folder), JSONLines(folder)]
        clear = hapi.callbacks.LambdaCallback(on_epoch_end=lambda *_: (out.seek(0), out.truncate()))
        model.fit((x, y), (x[:400], y[:400]), BATCH, LOOKS, callbacks=[looks, *writers, clear])
    return looks.looks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200_000)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        looks = run(steps, Path(folder))
    print(f"{'step':>8}{'RSS, MiB':>10}{'files':>7}{'threads':>9}{'objects':>9}{'us/step':>9}")
    for look in looks:
        print(f"{look.step:8}{look.rss:10.1f}{look.files:7}{look.threads:9}{look.objects:9}{look.micros:9.1f}")
    # The first look is the warm-up's.
    third = max(1, (len(looks) - 1) // 3)
    first, last = looks[1 : 1 + third], looks[-third:]

    def grown(name: str) -> float:
        middle = [statistics.median(getattr(look, name) for look in part) for part in (first, last)]
        return middle[1] / middle[0] if name == "micros" else middle[1] - middle[0]

    wrong = [name for name in ("files", "threads") if grown(name) > 0]
    wrong += ["rss"] if grown("rss") > MORE_MEMORY else []
    wrong += ["micros"] if grown("micros") > MORE_TIME else []
    print(
        f"grown: RSS {grown('rss'):+.1f} MiB, time per step x{grown('micros'):.2f}, wrong: {', '.join(wrong) or 'no'}"
    )
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
