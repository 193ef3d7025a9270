"""Overhead per step as a number that does not depend on the weather: Python calls made by hapi."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import hapi

ROOT = str(Path(hapi.__file__).parent)


def calls_of_fit(batches: int, **options: Any) -> tuple[Counter[str], int]:
    """Python functions of hapi entered by one epoch of ``batches`` steps."""
    net = nn.Linear(8, 2)
    model = hapi.Model(net).prepare(torch.optim.SGD(net.parameters(), 0.1), nn.CrossEntropyLoss(), **options)
    data = torch.randn(4 * batches, 8), torch.randint(0, 2, (4 * batches,))
    counter: Counter[str] = Counter()

    def count(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            counter[f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}"] += 1

    sys.setprofile(count)
    try:
        model.fit(data, batch_size=4, verbose=0, log_freq=10**6, callbacks=hapi.callbacks.Callback())
    finally:
        sys.setprofile(None)
    return counter, batches


def per_step(**options: Any) -> tuple[float, Counter[str]]:
    few, many = calls_of_fit(10, **options), calls_of_fit(110, **options)
    difference = many[0] - few[0]
    return sum(difference.values()) / 100, difference


def test_frames_per_step_with_a_callback_that_does_nothing() -> None:
    frames, where = per_step()
    assert frames <= 20, where.most_common()


def test_frames_per_step_with_a_metric() -> None:
    plain, _ = per_step()
    frames, where = per_step(metrics=hapi.metrics.Accuracy())
    assert frames - plain <= 3, where.most_common()


def test_a_step_reads_nothing_from_the_device() -> None:
    """Between log points the step calls nothing that makes the host wait: no .item(), no .cpu(), no bool()."""
    net = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    model = hapi.Model(net).prepare(
        torch.optim.SGD(net.parameters(), 0.1), nn.CrossEntropyLoss(), hapi.metrics.Accuracy(), clip_grad_norm=1.0
    )
    data = torch.randn(400, 8), torch.randint(0, 2, (400,))
    waits: list[str] = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = getattr(func, "__name__", "")
            if name in {"item", "cpu", "numpy", "tolist", "__bool__", "__float__", "__int__", "nonzero"}:
                waits.append(name)
            return func(*args, **(kwargs or {}))

    with Watch():
        model.fit(data, batch_size=4, verbose=0, log_freq=10**6)
    few = len(waits)
    waits.clear()
    with Watch():
        model.fit((data[0].repeat(3, 1), data[1].repeat(3)), batch_size=4, verbose=0, log_freq=10**6)
    assert len(waits) == few, "waits grow with the number of steps"
