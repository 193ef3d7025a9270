"""What hapi costs per step over the loop written by hand, on a net so small that nothing else shows.

Contenders take turns within a round, each round in random order, so that the machine's noise hits all alike; the
table shows medians over rounds of process CPU time. Run: ``python benchmarks/overhead.py [--rounds 15]``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pty
import random
import statistics
import subprocess
import time
from collections.abc import Callable

import torch
from torch import nn

import hapi

BATCH, STEPS = 4, 2000


def make() -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    net = nn.Linear(8, 2)
    x, y = torch.randn(BATCH * STEPS, 8), torch.randint(0, 2, (BATCH * STEPS,))
    return net, torch.optim.SGD(net.parameters(), 0.01), x, y


def best_loop() -> Callable[[], None]:
    """What an expert writes: slices, sums kept on the device, one read at the end."""
    net, optimizer, x, y = make()
    loss_fn, parameters = nn.CrossEntropyLoss(), list(net.parameters())

    def run() -> None:
        total, correct = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        net.train()
        for first in range(0, len(x), BATCH):
            bx, by = x[first : first + BATCH], y[first : first + BATCH]
            out = net(bx)
            loss = loss_fn(out, by)
            loss.backward()
            optimizer.step()
            for parameter in parameters:
                parameter.grad = None
            total.add_(loss.detach(), alpha=len(bx))
            correct.add_((out.detach().argmax(1) == by).sum())
        float(total), float(correct)

    return run


def ordinary_loop() -> Callable[[], None]:
    """What most people write: a DataLoader and ``loss.item()``."""
    net, optimizer, x, y = make()
    loss_fn = nn.CrossEntropyLoss()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=BATCH)

    def run() -> None:
        total, correct = 0.0, 0
        for bx, by in loader:
            optimizer.zero_grad()
            out = net(bx)
            loss = loss_fn(out, by)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(bx)
            correct += int((out.argmax(1) == by).sum())

    return run


def with_hapi(verbose: int, *callbacks: hapi.callbacks.Callback) -> Callable[[], None]:
    net, optimizer, x, y = make()
    model = hapi.Model(net).prepare(optimizer, nn.CrossEntropyLoss(), "accuracy")
    return lambda: model.fit(
        (x, y), batch_size=BATCH, shuffle=False, verbose=verbose, log_freq=STEPS, callbacks=list(callbacks)
    )


def shown(verbose: int) -> Callable[[], None]:
    """hapi as a user runs it: a report every 10 batches, with a live bar (1) or lines (2), on a terminal."""
    net, optimizer, x, y = make()
    model = hapi.Model(net).prepare(optimizer, nn.CrossEntropyLoss(), "accuracy")

    def run() -> None:
        ours, theirs = pty.openpty()
        with subprocess.Popen(["cat"], stdin=ours, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as reader:
            os.close(ours)
            with open(theirs, "w") as terminal, contextlib.redirect_stdout(terminal):
                model.fit((x, y), batch_size=BATCH, shuffle=False, verbose=verbose, log_freq=10)
            reader.kill()

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    contenders = {
        "best raw loop": best_loop(),
        "ordinary raw loop": ordinary_loop(),
        "hapi": with_hapi(0),
        "hapi, a callback that does nothing": with_hapi(0, hapi.callbacks.Callback()),
        "hapi, a live bar, log_freq 10": shown(1),
        "hapi, lines, log_freq 10": shown(2),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for run in contenders.values():
        run()
    for _ in range(args.rounds):
        order = list(contenders)
        random.shuffle(order)
        for name in order:
            start = time.process_time()
            contenders[name]()
            seconds[name].append(time.process_time() - start)
    base = seconds["best raw loop"]
    print(f"Linear(8, 2), batch {BATCH}, {STEPS} steps, {args.threads} thread(s), {args.rounds} rounds; medians")
    print(f"{'':36}{'us/step':>9}{'ratio':>8}{'over best, us':>15}")
    for name, times in seconds.items():
        ratio = statistics.median(t / b for t, b in zip(times, base, strict=True))
        over = statistics.median((t - b) / STEPS * 1e6 for t, b in zip(times, base, strict=True))
        print(f"{name:36}{statistics.median(times) / STEPS * 1e6:9.1f}{ratio:8.2f}{over:15.1f}")


if __name__ == "__main__":
    main()
