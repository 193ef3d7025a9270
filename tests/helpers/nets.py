"""Small nets and data that many tests share."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class LeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, 10))

    def forward(self, image: Tensor) -> Tensor:
        return self.classifier(self.features(image))


def mlp(features: int = 8, classes: int = 3, dropout: float = 0.0, seed: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(features, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, classes))


def blobs(rows: int, features: int = 8, classes: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Points around one centre per class: learnable, so losses go down."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (rows,), generator=generator)
    centres = torch.randn(classes, features, generator=torch.Generator().manual_seed(99)) * 2
    return centres[labels] + torch.randn(rows, features, generator=generator), labels


def same_weights(a: nn.Module, b: nn.Module) -> bool:
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def weight_gap(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)
