"""LeNet on MNIST: `python examples/mnist_lenet.py`, unchanged on many cards with `python -m hapi.launch`."""

import argparse

import torch
from torch import nn

import hapi
from hapi.datasets import MNIST, DatasetNotFoundError, Digits, InMemoryImages


class LeNet(nn.Module):
    """LeCun et al., "Gradient-based learning applied to document recognition", 1998."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(), nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, num_classes)
        )

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        centred = image * 2 - 1  # from [0, 1] to [-1, 1]
        logits: torch.Tensor = self.classifier(self.features(centred))
        return logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--data-dir", default=None, help="folder of the MNIST files (default: $HAPI_DATA_HOME)")
    parser.add_argument("--log-dir", default=None, help="write a table of every epoch's values to this folder")
    parser.add_argument("--save-dir", default=None, help="write checkpoints to this folder")
    args = parser.parse_args()

    hapi.seed_everything(42)
    train: InMemoryImages
    test: InMemoryImages
    try:
        train, test = (MNIST(mode=mode, data_dir=args.data_dir) for mode in ("train", "test"))
    except DatasetNotFoundError as error:
        reason = " ".join(str(error).split()[:24])
        print(f"MNIST cannot be had, so this run trains on scikit-learn's Digits ({reason} ...)")
        train, test = (Digits(mode=mode, size=28) for mode in ("train", "test"))

    network = LeNet()
    model = hapi.Model(network)
    model.prepare(
        torch.optim.Adam(network.parameters(), lr=args.lr),
        nn.CrossEntropyLoss(),
        hapi.metrics.Accuracy(topk=(1, 2)),
    )
    callbacks = [hapi.callbacks.CSVLogger(f"{args.log_dir}/epochs.csv")] if args.log_dir else []
    model.fit(
        train,
        batch_size=args.batch_size,
        epochs=args.epochs,
        log_freq=100,
        save_dir=args.save_dir,
        callbacks=callbacks,
    )
    model.evaluate(test, batch_size=256, log_freq=20)


if __name__ == "__main__":
    main()
