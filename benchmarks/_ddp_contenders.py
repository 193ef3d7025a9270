"""The contenders of ddp.py, each as its users write it, and how their collectives are counted.

Runs in the environment of the contender's framework: imports torch, and the framework in the function that needs it.

    python _ddp_contenders.py NAME IMAGES CHANNEL
"""

from __future__ import annotations

import importlib
import itertools
import socket
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from _gate import Gate, Order, Report
from _nets import LeNet, MapImages
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

RANKS, ROWS, REPORT, RATE = 2, 64, 50, 1e-3


class Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts collectives by kind: also those that DDP starts in C++, since all of them pass torch's dispatcher."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[func._schema.name.removeprefix("c10d::").rstrip("_")] += 1
        return func(*args, **(kwargs or {}))


class CountingGate(Gate):
    """A gate that can count a turn's collectives."""

    def __init__(self, channel: socket.socket) -> None:
        super().__init__(channel)
        self.counting: Collectives | None = None

    def begin(self, order: Order) -> None:
        if order.get("count"):
            self.counting = Collectives()
            self.counting.__enter__()  # type: ignore[no-untyped-call]

    def end(self, order: Order) -> Report:
        counting, self.counting = self.counting, None
        if counting is None:
            return super().end(order)
        counting.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        return {**super().end(order), "collectives": counting.counts}


Images = tuple[Tensor, Tensor]  # uint8 [N, 1, 28, 28], int64 [N]


def dataset_of(form: str, images: Images) -> Dataset[Any]:
    return MapImages(*images) if form == "map" else TensorDataset(images[0].float() / 255, images[1])


def raw(form: str, images: Images, gate: Gate) -> None:
    """The loop of torch's tutorials."""
    dist.init_process_group("gloo")
    net = DistributedDataParallel(LeNet(gate))
    optimizer, loss_fn = torch.optim.Adam(net.parameters(), lr=RATE), nn.CrossEntropyLoss()
    dataset = dataset_of(form, images)
    sampler: DistributedSampler[Any] = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=ROWS, sampler=sampler)
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        total, correct, seen = 0.0, 0, 0
        for step, (image, label) in enumerate(loader, 1):
            optimizer.zero_grad()
            logits = net(image)
            loss = loss_fn(logits, label)
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                total += loss.item() * len(label)
                correct += (logits.argmax(1) == label).sum().item()
                seen += len(label)
            if step % REPORT == 0 and dist.get_rank() == 0:
                print(f"epoch {epoch} step {step} loss {total / seen:.4f} acc {correct / seen:.4f}")


def best(form: str, images: Images, gate: Gate) -> None:
    """What an expert writes: a gather per batch, sums kept as tensors, gradients that live in DDP's buckets."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    pixels, labels = images
    net = DistributedDataParallel(LeNet(gate), gradient_as_bucket_view=True)
    parameters = list(net.parameters())
    optimizer, loss_fn = torch.optim.Adam(parameters, lr=RATE), nn.CrossEntropyLoss()
    scale = torch.tensor(255.0)
    rows = len(labels) // RANKS
    for epoch in itertools.count():
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))[rank::RANKS]
        total, correct, seen = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.int64), 0
        for step, first in enumerate(range(0, rows, ROWS), 1):
            index = order[first : first + ROWS]
            image, label = pixels.index_select(0, index) / scale, labels.index_select(0, index)
            logits = net(image)
            loss = loss_fn(logits, label)
            loss.backward()
            optimizer.step()
            for parameter in parameters:
                parameter.grad = None
            total.add_(loss.detach(), alpha=len(label))
            correct.add_((logits.detach().argmax(1) == label).sum())
            seen += len(label)
            if step % REPORT == 0 and rank == 0:
                print(f"epoch {epoch} step {step} loss {total / seen:.4f} acc {correct / seen:.4f}")


def with_hapi(form: str, images: Images, gate: Gate) -> None:
    hapi = importlib.import_module("hapi")
    net = LeNet(gate)
    model = hapi.Model(net).prepare(
        torch.optim.Adam(net.parameters(), lr=RATE), nn.CrossEntropyLoss(), hapi.metrics.Accuracy()
    )
    # What hapi.datasets.MNIST is, but for the files.
    data = MapImages(*images) if form == "map" else hapi.datasets.InMemoryImages(*images, [str(i) for i in range(10)])
    model.fit(data, batch_size=ROWS, epochs=sys.maxsize, log_freq=REPORT)


def with_lightning(form: str, images: Images, gate: Gate) -> None:
    lightning = importlib.import_module("lightning")
    torchmetrics = importlib.import_module("torchmetrics")

    class Lit(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net, self.loss_fn = LeNet(gate), nn.CrossEntropyLoss()
            self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=10)

        def training_step(self, batch: Any, index: int) -> Tensor:
            image, label = batch
            logits = self.net(image)
            loss: Tensor = self.loss_fn(logits, label)
            self.accuracy(logits, label)
            self.log("loss", loss, on_step=True, on_epoch=True)
            self.log("acc", self.accuracy, on_step=True, on_epoch=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=RATE)

    # Neither bar nor checkpoints, which the others do not have either: its quietest useful form.
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=RANKS,
        max_epochs=-1,
        log_every_n_steps=REPORT,
        logger=importlib.import_module("lightning.pytorch.loggers").CSVLogger("."),
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(Lit(), DataLoader(dataset_of(form, images), batch_size=ROWS, shuffle=True))


def with_accelerate(form: str, images: Images, gate: Gate) -> None:
    accelerator = importlib.import_module("accelerate").Accelerator(cpu=True)
    net = LeNet(gate)
    optimizer: Any = torch.optim.Adam(net.parameters(), lr=RATE)
    loader: Any = DataLoader(dataset_of(form, images), batch_size=ROWS, shuffle=True)
    wrapped, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    loss_fn = nn.CrossEntropyLoss()
    for epoch in itertools.count():
        total, correct, seen = 0.0, 0, 0
        for step, (image, label) in enumerate(loader, 1):
            optimizer.zero_grad()
            logits = wrapped(image)
            loss = loss_fn(logits, label)
            accelerator.backward(loss)
            optimizer.step()
            with torch.no_grad():
                total += loss.item() * len(label)
                correct += (logits.argmax(1) == label).sum().item()
                seen += len(label)
            if step % REPORT == 0:
                accelerator.print(f"epoch {epoch} step {step} loss {total / seen:.4f} acc {correct / seen:.4f}")


CONTENDERS: dict[str, Callable[[str, Images, Gate], None]] = {
    "raw/map": raw,
    "raw/memory": raw,
    "raw/best": best,
    "hapi/map": with_hapi,
    "hapi/memory": with_hapi,
    "accelerate/map": with_accelerate,
    "accelerate/memory": with_accelerate,
    "lightning/map": with_lightning,
    "lightning/memory": with_lightning,
}


def main(name: str, images: str, channel: str) -> None:
    gate = CountingGate(socket.socket(fileno=int(channel)))
    torch.manual_seed(0)
    CONTENDERS[name](name.partition("/")[2], tuple(torch.load(images, weights_only=True)), gate)


if __name__ == "__main__":
    main(*sys.argv[1:])
