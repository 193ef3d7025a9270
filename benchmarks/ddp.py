"""What data parallelism costs: hapi on two ranks against loops written by hand, Lightning and Accelerate.

LeNet on MNIST (random images, if MNIST cannot be found), two ranks on Gloo with one thread each, 64 rows per rank,
Adam, loss and accuracy, a report every 50 steps. Each contender is written as its users write it, over the same two forms of
the data: ``map`` is a map-style Dataset that makes one sample at a time, ``memory`` is tensors. ``raw/best`` is what an
expert writes. All contenders' processes live at the same time and take turns of some steps, in random order within a
round, so that the machine's noise hits all alike; what counts is the ratio within a round.

    python benchmarks/ddp.py [--rounds 7] [--steps 100] [--launches 1] [--only hapi,raw]

Lightning and Accelerate are installed into environments of their own, below ``--env-dir``, and kept there.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

RANKS, ROWS, REPORT, RATE, WARM_UP = 2, 64, 50, 1e-3, 30
REQUIREMENTS = {"lightning": "lightning==2.6.6", "accelerate": "accelerate==1.15.0"}
BASE, BEST = "raw/map", "raw/best"
START_SECONDS, TURN_SECONDS, END_SECONDS = 300.0, 600.0, 10.0

# ------------------------------------------------------------------------------------------ what all ranks share


class Collectives(TorchDispatchMode):
    """Counts collectives by kind: also those that DDP starts in C++, since all of them pass torch's dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[func._schema.name.removeprefix("c10d::").rstrip("_")] += 1
        return func(*args, **(kwargs or {}))


class Gate:
    """Where a rank waits for its turn: at the top of the net's forward, the one place that all contenders pass.

    Args:
        channel: The connection to the parent.
    """

    def __init__(self, channel: socket.socket) -> None:
        self.lines = channel.makefile("rw", encoding="utf-8")
        self.left = 0
        self.cpu = 0.0
        self.counting: Collectives | None = None

    def __call__(self) -> None:
        if self.left == 0:
            self._turn()
        self.left -= 1

    def _turn(self) -> None:
        cpu = time.process_time() - self.cpu
        if self.counting:
            self.counting.__exit__(None, None, None)
        self._send({"cpu": cpu, "collectives": self.counting.counts if self.counting else {}})
        line = self.lines.readline()
        if not line:  # the parent has no more turns, or is gone
            os._exit(0)
        order = json.loads(line)
        self.left, self.counting = order["steps"], Collectives() if order["count"] else None
        if self.counting:
            self.counting.__enter__()
        self.cpu = time.process_time()

    def _send(self, message: dict[str, Any]) -> None:
        self.lines.write(json.dumps(message) + "\n")
        self.lines.flush()


class LeNet(nn.Module):
    def __init__(self, gate: Callable[[], None]) -> None:
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


class MapImages(Dataset[tuple[Tensor, int]]):
    """Bytes in memory, one float32 image at a time: what most people write."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index].float() / 255, int(self.labels[index])


Images = tuple[Tensor, Tensor]  # uint8 [N, 1, 28, 28], int64 [N]


def dataset_of(form: str, images: Images) -> Dataset[Any]:
    return MapImages(*images) if form == "map" else TensorDataset(images[0].float() / 255, images[1])


# -------------------------------------------------------------------------------------------------- contenders


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
    BASE: raw,
    "raw/memory": raw,
    BEST: best,
    "hapi/map": with_hapi,
    "hapi/memory": with_hapi,
    "accelerate/map": with_accelerate,
    "accelerate/memory": with_accelerate,
    "lightning/map": with_lightning,
    "lightning/memory": with_lightning,
}


def be_a_rank(name: str, images: Path, channel: int) -> None:
    gate = Gate(socket.socket(fileno=channel))
    torch.manual_seed(0)
    CONTENDERS[name](name.partition("/")[2], tuple(torch.load(images, weights_only=True)), gate)


# ------------------------------------------------------------------------------------------------- the parent


class ContenderError(Exception):
    """A contender does not run; the text says why."""


class Contender:
    """One contender's processes.

    Args:
        name: Of the contender.
        python: Its interpreter.
        images: The data's file.
        folder: Where its ranks run, and write what they print.
    """

    def __init__(self, name: str, python: Path, images: Path, folder: Path) -> None:
        self.name = name
        self.folder = folder
        folder.mkdir()
        # The store is the parent's, on a socket that it has bound already: no port is chosen and lost again.
        listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        port = listener.getsockname()[1]
        self.store = TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self.processes: list[subprocess.Popen[bytes]] = []
        self.channels: list[socket.socket] = []
        self.lines: list[Any] = []
        for rank in range(RANKS):
            mine, theirs = socket.socketpair()
            env = {**os.environ, **_rank_variables(rank, port), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
            command = [str(python), __file__, "--rank-of", name, "--images", str(images)]
            with theirs, open(folder / f"rank{rank}.log", "wb") as log:
                process = subprocess.Popen(
                    [*command, "--channel", str(theirs.fileno())],
                    env=env,
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[theirs.fileno()],
                )
            self.processes.append(process)
            self.channels.append(mine)
            self.lines.append(mine.makefile("r", encoding="utf-8"))

    def wait(self, limit: float) -> list[dict[str, Any]]:
        """What the ranks say when they next reach the gate."""
        answers = []
        for rank, (channel, lines) in enumerate(zip(self.channels, self.lines, strict=True)):
            channel.settimeout(limit)
            try:
                line = lines.readline()
            except TimeoutError:
                raise ContenderError(f"rank {rank} gave no sign in {limit:.0f} s") from None
            except ConnectionError:
                line = ""
            if not line:
                raise ContenderError(f"rank {rank} ended: {self._last_words(rank)}")
            answers.append(json.loads(line))
        return answers

    def turn(self, steps: int, *, count: bool = False) -> Turn:
        """Let it train."""
        order = json.dumps({"steps": steps, "count": count}).encode() + b"\n"
        start = time.perf_counter()
        try:
            for channel in self.channels:
                channel.sendall(order)
        except OSError as exc:
            raise ContenderError(f"a rank has ended: {exc}") from exc
        answers = self.wait(TURN_SECONDS)
        wall = time.perf_counter() - start
        return Turn(wall / steps, sum(answer["cpu"] for answer in answers) / steps, answers[0]["collectives"])

    def end(self) -> None:
        """Close the gate for ever; whoever does not go is killed."""
        for stream in (*self.lines, *self.channels):
            stream.close()
        for process in self.processes:
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        del self.store

    def _last_words(self, rank: int) -> str:
        log = (self.folder / f"rank{rank}.log").read_text(errors="replace").splitlines()
        return next((line for line in reversed(log) if line.strip()), "it printed nothing")


@dataclass
class Turn:
    """Seconds per step of both clocks, CPU over all ranks; and rank 0's collectives, where they were counted."""

    wall: float
    cpu: float
    collectives: dict[str, int]


@dataclass
class Result:
    turns: list[Turn] = field(default_factory=list)
    collectives: dict[str, int] = field(default_factory=dict)
    failure: str = ""


def _rank_variables(rank: int, port: int) -> dict[str, str]:
    """What torchrun sets."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "benchmark",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def write_images(path: Path) -> tuple[str, int]:
    """Save the data for all contenders; what it is, and the steps of an epoch."""
    hapi_datasets = importlib.import_module("hapi.datasets")
    try:
        images, labels = hapi_datasets.MNIST(mode="train", download=False).tensors
        what = "MNIST"
    except hapi_datasets.DatasetNotFoundError:
        images = torch.randint(0, 256, (60_000, 1, 28, 28), dtype=torch.uint8)
        labels = torch.randint(0, 10, (60_000,))
        what = "random images of MNIST's shape"
    torch.save([images, labels], path)
    return what, -(-len(labels) // (RANKS * ROWS))


def interpreters(names: Sequence[str], env_dir: Path, results: dict[str, Result]) -> dict[str, Path]:
    """The interpreter of each contender; one that cannot be had is noted as a failure."""
    env_module = importlib.import_module("_env")
    found = {}
    for name in names:
        framework = name.partition("/")[0]
        try:
            wanted = REQUIREMENTS.get(framework)
            found[name] = env_module.python_of(env_dir, framework, [wanted]) if wanted else Path(sys.executable)
        except env_module.EnvError as exc:
            results[name].failure = f"not installed: {exc}"
    return found


@contextlib.contextmanager
def started(pythons: dict[str, Path], images: Path, folder: Path, results: dict[str, Result]) -> Iterator[Any]:
    """All contenders, warmed up."""
    contenders: dict[str, Contender] = {}
    try:
        for name, python in pythons.items():
            if results[name].failure:
                continue
            # One after the other: together they would only wait for the same cores.
            contenders[name] = Contender(name, python, images, folder / name.replace("/", "-"))
            with _noted(name, contenders, results):
                contenders[name].wait(START_SECONDS)
                contenders[name].turn(WARM_UP)
        yield contenders
    finally:
        for contender in contenders.values():
            contender.end()


@contextlib.contextmanager
def _noted(name: str, contenders: dict[str, Contender], results: dict[str, Result]) -> Iterator[None]:
    """A contender that fails is out, and the others go on."""
    try:
        yield
    except ContenderError as exc:
        results[name].failure = str(exc)
        contenders.pop(name).end()


def compete(
    pythons: dict[str, Path], images: Path, results: dict[str, Result], *, rounds: int, steps: int, epoch: int
) -> None:
    """One launch of all contenders: the rounds, then the count over the steps of an epoch."""
    with tempfile.TemporaryDirectory() as folder, started(pythons, images, Path(folder), results) as contenders:
        for _ in range(rounds):
            order = list(contenders)
            random.shuffle(order)
            for name in order:
                with _noted(name, contenders, results):
                    results[name].turns.append(contenders[name].turn(steps))
        for name in list(contenders):
            with _noted(name, contenders, results):
                results[name].collectives = contenders[name].turn(epoch, count=True).collectives


def show(results: dict[str, Result], epoch: int) -> None:
    def ratio(result: Result, base: str, clock: str) -> str:
        if base not in results or results[base].failure:
            return "-"
        pairs = zip(result.turns, results[base].turns, strict=True)
        return f"{statistics.median(getattr(a, clock) / getattr(b, clock) for a, b in pairs):.2f}"

    print(f"{'':20}{'ms/step':>16}{'/ ' + BASE:>16}{'/ ' + BEST:>16}  collectives")
    print(f"{'':20}{'wall':>8}{'CPU':>8}{'wall':>8}{'CPU':>8}{'wall':>8}{'CPU':>8}  per step")
    for name, result in results.items():
        if result.failure:
            print(f"{name:20}  {result.failure}")
            continue
        times = [statistics.median(getattr(turn, clock) for turn in result.turns) * 1e3 for clock in ("wall", "cpu")]
        ratios = [ratio(result, base, clock) for base in (BASE, BEST) for clock in ("wall", "cpu")]
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(result.collectives.items()))
        columns = "".join([f"{value:8.2f}" for value in times] + [f"{text:>8}" for text in ratios])
        print(f"{name:20}{columns}  {sum(result.collectives.values()) / epoch:.3f} ({kinds} in {epoch} steps)")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=100, help="of one turn")
    parser.add_argument("--launches", type=int, default=1, help="times to start all processes anew")
    parser.add_argument("--only", default="", help="such as hapi,raw or hapi/map; raw/map always runs")
    parser.add_argument("--env-dir", type=Path, default=Path(__file__).resolve().parent.parent / ".bench-envs")
    parser.add_argument("--rank-of", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--images", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--channel", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank_of:
        be_a_rank(given.rank_of, given.images, given.channel)
        return 0
    for option in ("rounds", "steps", "launches"):
        if getattr(given, option) < 1:
            parser.error(f"--{option} must be at least 1")
    only = {part for part in given.only.split(",") if part}
    if unknown := only - set(CONTENDERS) - {name.partition("/")[0] for name in CONTENDERS}:
        parser.error(f"--only: {', '.join(sorted(unknown))}; there are {', '.join(CONTENDERS)}")
    names = [n for n in CONTENDERS if not only or n == BASE or n in only or n.partition("/")[0] in only]
    results = {name: Result() for name in names}
    pythons = interpreters(names, given.env_dir.absolute(), results)
    with tempfile.TemporaryDirectory() as folder:
        what, epoch = write_images(Path(folder) / "images.pt")
        for _ in range(given.launches):
            compete(pythons, Path(folder) / "images.pt", results, rounds=given.rounds, steps=given.steps, epoch=epoch)
    print(
        f"LeNet on {what}, {RANKS} ranks, {ROWS} rows each, Adam, one thread per rank, torch {torch.__version__}; "
        f"medians of {given.launches} x {given.rounds} rounds of {given.steps} steps; CPU is that of all ranks"
    )
    show(results, epoch)
    return 1 if results[BASE].failure else 0


if __name__ == "__main__":
    sys.exit(main())
