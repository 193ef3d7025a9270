"""What train.py trains: sizes and data. Needs numpy alone; the nets are in _nets.py, Paddle's in _train_paddle.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

REPORT = 50  # batches between lines
RATES = {"Adam": 1e-3, "SGD": 1e-2}
VOCABULARY, SEQUENCE, WIDTH, CLASSES = 1000, 64, 128, 10

Arrays = dict[str, np.ndarray[Any, Any]]


def _random_images(rows: int, shape: tuple[int, ...], draw: np.random.Generator) -> list[np.ndarray[Any, Any]]:
    return [draw.integers(0, 256, (rows, *shape), dtype=np.uint8), draw.integers(0, CLASSES, rows)]


def _random_tokens(rows: int, shape: tuple[int, ...], draw: np.random.Generator) -> list[np.ndarray[Any, Any]]:
    return [draw.integers(0, VOCABULARY, (rows, *shape)), draw.integers(0, CLASSES, (rows, *shape))]


def _random_table(rows: int, shape: tuple[int, ...], draw: np.random.Generator) -> list[np.ndarray[Any, Any]]:
    classes = 2 if shape == (8,) else CLASSES
    return [draw.standard_normal((rows, *shape), dtype=np.float32), draw.integers(0, classes, rows)]


@dataclass(frozen=True)
class Workload:
    """A net, in words, and its data.

    Attributes:
        title: For the table.
        rows: Of a batch.
        steps: Of a turn: about a second of work on one core.
        shape: Of one sample.
        train: Rows to train on.
        test: Rows to evaluate.
        make: Makes inputs and labels.
        optimizer: What torch, Keras and Paddle call it.
    """

    title: str
    rows: int
    steps: int
    shape: tuple[int, ...]
    train: int
    test: int
    make: Callable[[int, tuple[int, ...], np.random.Generator], list[np.ndarray[Any, Any]]]
    optimizer: str = "Adam"

    def data(self) -> Arrays:
        """Random data, the same at every call."""
        draw = np.random.default_rng(0)
        made: Arrays = {}
        for part, rows in (("train", self.train), ("test", self.test)):
            made[f"{part}_inputs"], made[f"{part}_labels"] = self.make(rows, self.shape, draw)
        return made


WORKLOADS = {
    "lenet": Workload("LeNet", 64, 100, (1, 28, 28), 60_000, 10_000, _random_images),
    "resnet": Workload("ResNet-18 on random images 3x32x32", 64, 5, (3, 32, 32), 4096, 1024, _random_images),
    "transformer": Workload(
        "transformer (2 layers, width 128) on random tokens", 32, 10, (SEQUENCE,), 4096, 1024, _random_tokens
    ),
    "mlp": Workload("MLP (32-128-128-10) on random rows", 128, 500, (32,), 256_000, 64_000, _random_table),
    "tiny": Workload("Linear(8, 2), the cost of the loop", 4, 2000, (8,), 40_000, 8_000, _random_table, "SGD"),
}
