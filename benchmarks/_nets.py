"""What the contenders train, in torch: nets, datasets, and the task that ties them together.

Every net passes the gate at the top of its forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from _gate import Evaluate
from _workloads import CLASSES, RATES, SEQUENCE, VOCABULARY, WIDTH
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

Pass = Callable[[], None]

MEAN, STD = 0.1307, 0.3081  # of MNIST, as everybody has them


class LeNet(nn.Module):
    """For ``[B, 1, 28, 28]``."""

    def __init__(self, gate: Pass) -> None:
        super().__init__()
        self.gate = gate
        self.features = nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, 10))

    def forward(self, image: Tensor) -> Tensor:
        self.gate()
        logits: Tensor = self.classifier(self.features(image))
        return logits


class Block(nn.Module):
    """ResNet-18's block of two convolutions."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, image: Tensor) -> Tensor:
        out = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(image)))))
        activated: Tensor = self.relu(out + self.shortcut(image))
        return activated


class ResNet18(nn.Module):
    """The one of torchvision and of Paddle, stride-2 stem included, for ``[B, 3, 32, 32]``."""

    def __init__(self, gate: Pass) -> None:
        super().__init__()
        self.gate = gate
        stem = [nn.Conv2d(3, 64, 7, 2, padding=3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
        blocks, inputs = [], 64
        for outputs, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            blocks += [Block(inputs, outputs, stride), Block(outputs, outputs, 1)]
            inputs = outputs
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, CLASSES)]
        self.layers = nn.Sequential(*stem, nn.MaxPool2d(3, 2, padding=1), *blocks, *head)

    def forward(self, image: Tensor) -> Tensor:
        self.gate()
        logits: Tensor = self.layers(image)
        return logits


class Tagger(nn.Module):
    """Token classification, ``[B, S]`` -> ``[B, classes, S]``: two encoder layers of width 128."""

    def __init__(self, gate: Pass) -> None:
        super().__init__()
        self.gate = gate
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(SEQUENCE, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        self.gate()
        logits: Tensor = self.head(self.encoder(self.tokens(tokens) + self.places.weight))
        return logits.transpose(1, 2)


class Perceptron(nn.Module):
    """For ``[B, 32]``."""

    def __init__(self, gate: Pass) -> None:
        super().__init__()
        self.gate = gate
        self.layers = nn.Sequential(
            nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, CLASSES)
        )

    def forward(self, features: Tensor) -> Tensor:
        self.gate()
        logits: Tensor = self.layers(features)
        return logits


class Tiny(nn.Module):
    """So small that nothing but the loop shows."""

    def __init__(self, gate: Pass) -> None:
        super().__init__()
        self.gate = gate
        self.linear = nn.Linear(8, 2)

    def forward(self, features: Tensor) -> Tensor:
        self.gate()
        logits: Tensor = self.linear(features)
        return logits


NETS: dict[str, Callable[[Pass], nn.Module]] = {
    "lenet": LeNet,
    "resnet": ResNet18,
    "transformer": Tagger,
    "mlp": Perceptron,
    "tiny": Tiny,
}


class MapImages(Dataset[tuple[Tensor, int]]):
    """Bytes in memory, one float32 image at a time, normalised: what most people write."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return (self.images[index].float() / 255 - MEAN) / STD, int(self.labels[index])


class MapRows(Dataset[tuple[Tensor, Any]]):
    """Arrays in memory, one row at a time."""

    def __init__(self, rows: Tensor, labels: Tensor) -> None:
        self.rows, self.labels = rows, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        return self.rows[index], self.labels[index]


def map_style(inputs: Tensor, labels: Tensor) -> Dataset[Any]:
    """The dataset that most people would write over these tensors."""
    return MapImages(inputs, labels) if inputs.dtype == torch.uint8 else MapRows(inputs, labels)


def as_floats(inputs: Tensor) -> Tensor:
    """Images as float32, normalised; other inputs as they are."""
    return (inputs.float() / 255 - MEAN) / STD if inputs.dtype == torch.uint8 else inputs


@dataclass(frozen=True)
class Task:
    """What to train or evaluate.

    Attributes:
        form: Of the contender, such as ``map`` or ``memory``.
        net: It passes the gate; in evaluation there is none.
        inputs: ``[N, ...]``: images as bytes, tokens, or rows of floats.
        labels: int64 ``[N]``, or ``[N, S]`` for tokens.
        rows: Of a batch.
        shuffle: Whether an epoch's order is shuffled.
        kind: Of the optimizer, as torch calls it.
    """

    form: str
    net: nn.Module
    inputs: Tensor
    labels: Tensor
    rows: int
    shuffle: bool
    kind: str

    @property
    def dataset(self) -> Dataset[Any]:
        """Sample by sample, or tensors."""
        if self.form == "map":
            return map_style(self.inputs, self.labels)
        return TensorDataset(as_floats(self.inputs), self.labels)

    @property
    def loader(self) -> DataLoader[Any]:
        return DataLoader(self.dataset, batch_size=self.rows, shuffle=self.shuffle)

    @property
    def arrays(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        return as_floats(self.inputs).numpy(), self.labels.numpy()

    def optimizer(self, **options: Any) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = getattr(torch.optim, self.kind)(
            self.net.parameters(), lr=RATES[self.kind], **options
        )
        return made


Fit = Callable[[Task], None]
Evaluation = Callable[[Task], Evaluate]
