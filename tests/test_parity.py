"""``fit`` equals the ten-line loop that a user would write by hand, bit for bit.

So it also draws nothing from the global generators that such a loop would not draw.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hapi
from tests.helpers.nets import blobs, mlp, same_weights

ROWS, BATCH, EPOCHS = 103, 16, 3  # 7 batches, the last of 7 rows


def raw_loop(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Any,
    *,
    accumulate: int = 1,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    scheduler: Any = None,
    by_epoch: bool = False,
    loss_fn: Any = None,
) -> list[float]:
    """The reference: what people write, with accumulation divided by the rows of the group."""
    loss_fn = loss_fn or nn.CrossEntropyLoss()
    losses = []
    net.train()
    for _ in range(EPOCHS):
        epoch = list(batches) if accumulate > 1 else batches
        groups = [epoch[i : i + accumulate] for i in range(0, len(epoch), accumulate)] if accumulate > 1 else None
        for group in groups if groups is not None else ([batch] for batch in epoch):
            rows = sum(len(y) for _, y in group)
            for x, y in group:
                loss = loss_fn(net(x), y)
                losses.append(loss.item())
                (loss / (rows / len(y)) if accumulate > 1 else loss).backward()
            if clip_norm:
                nn.utils.clip_grad_norm_(net.parameters(), clip_norm)
            if clip_value:
                nn.utils.clip_grad_value_(net.parameters(), clip_value)
            optimizer.step()
            optimizer.zero_grad()
            if scheduler is not None and not by_epoch:
                scheduler.step()
        if scheduler is not None and by_epoch:
            scheduler.step()
    return losses


def slices(x: torch.Tensor, y: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, len(x), BATCH)]


def pair(**kwargs: Any) -> tuple[nn.Module, nn.Module]:
    net = mlp(**kwargs)
    return net, copy.deepcopy(net)


class LossRecorder(hapi.callbacks.Callback):
    log_freq = 1

    def __init__(self) -> None:
        self.sums: list[tuple[float, int]] = []

    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        self.sums.append((logs["loss"], logs["batch_size"]))


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dropout": {"dropout": 0.3},
    "accumulation with a short last group": {"accumulate": 3},
    "accumulation and dropout": {"accumulate": 2, "dropout": 0.2},
    "clipping by norm": {"clip_norm": 0.1},
    "clipping by value": {"clip_value": 0.01},
    "scheduler by step": {"schedule": "step"},
    "scheduler by epoch": {"schedule": "epoch"},
    "everything": {"accumulate": 2, "dropout": 0.2, "clip_norm": 0.5, "schedule": "step"},
}


@pytest.mark.parametrize("case", OPTIONS)
def test_fit_equals_the_hand_written_loop_bit_for_bit(case: str) -> None:
    options = OPTIONS[case]
    accumulate = options.get("accumulate", 1)
    x, y = blobs(ROWS)
    mine, theirs = pair(dropout=options.get("dropout", 0.0))
    optimizers = [torch.optim.Adam(net.parameters(), 1e-2) for net in (mine, theirs)]
    schedules = [None, None]
    if "schedule" in options:
        schedules = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in optimizers]

    torch.manual_seed(7)
    raw_loop(
        theirs,
        optimizers[1],
        slices(x, y),
        accumulate=accumulate,
        clip_norm=options.get("clip_norm"),
        clip_value=options.get("clip_value"),
        scheduler=schedules[1],
        by_epoch=options.get("schedule") == "epoch",
    )
    after_theirs = torch.rand(1)

    torch.manual_seed(7)
    model = hapi.Model(mine).prepare(
        optimizers[0],
        nn.CrossEntropyLoss(),
        hapi.metrics.Accuracy(),
        scheduler=schedules[0],
        scheduler_interval=options.get("schedule"),
        clip_grad_norm=options.get("clip_norm"),
        clip_grad_value=options.get("clip_value"),
    )
    # Evaluation and callbacks in between must not disturb training.
    model.fit(
        (x, y),
        (x, y),
        batch_size=BATCH,
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
        accumulate_grad_batches=accumulate,
        callbacks=[LossRecorder()],
    )
    assert same_weights(mine, theirs)
    assert torch.equal(torch.rand(1), after_theirs), "fit drew from the global generator"
    if schedules[0] is not None:
        assert schedules[0].state_dict() == schedules[1].state_dict()


def test_a_shuffling_dataloader_gives_the_same_order_and_draws() -> None:
    x, y = blobs(ROWS)
    mine, theirs = pair(dropout=0.3)
    torch.manual_seed(3)
    loader = DataLoader(TensorDataset(x, y), batch_size=BATCH, shuffle=True)
    raw_loop(theirs, torch.optim.Adam(theirs.parameters()), loader)
    torch.manual_seed(3)
    model = hapi.Model(mine).prepare(torch.optim.Adam(mine.parameters()), nn.CrossEntropyLoss())
    model.fit(DataLoader(TensorDataset(x, y), batch_size=BATCH, shuffle=True), epochs=EPOCHS, verbose=0)
    assert same_weights(mine, theirs)


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_mixed_precision_equals_the_hand_written_loop(kind: str) -> None:
    x, y = blobs(ROWS)
    mine, theirs = pair()
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[kind]
    optimizer, loss_fn = torch.optim.Adam(theirs.parameters(), 1e-2), nn.CrossEntropyLoss()
    scaler = torch.amp.GradScaler("cpu", enabled=kind == "fp16")
    for _ in range(EPOCHS):
        for bx, by in slices(x, y):
            with torch.autocast("cpu", dtype):
                loss = loss_fn(theirs(bx), by)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    model = hapi.Model(mine).prepare(
        torch.optim.Adam(mine.parameters(), 1e-2), nn.CrossEntropyLoss(), amp=kind, clip_grad_norm=0.5
    )
    model.fit((x, y), batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0)
    assert same_weights(mine, theirs)


def test_batchnorm_statistics_are_those_of_the_hand_written_loop() -> None:
    x, y = blobs(96)
    torch.manual_seed(1)
    theirs = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    mine = copy.deepcopy(theirs)
    raw_loop(theirs, torch.optim.SGD(theirs.parameters(), 0.1), slices(x, y))
    model = hapi.Model(mine).prepare(torch.optim.SGD(mine.parameters(), 0.1), nn.CrossEntropyLoss())
    model.fit((x, y), (x, y), batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0)
    assert same_weights(mine, theirs)


def test_train_batch_equals_the_hand_written_loop() -> None:
    x, y = blobs(ROWS)
    mine, theirs = pair()
    losses = raw_loop(theirs, torch.optim.Adam(theirs.parameters()), slices(x, y))
    model = hapi.Model(mine).prepare(torch.optim.Adam(mine.parameters()), nn.CrossEntropyLoss())
    got = [model.train_batch(bx, by)[0] for _ in range(EPOCHS) for bx, by in slices(x, y)]
    assert same_weights(mine, theirs)
    assert [float(v) for v in got] == pytest.approx(losses, abs=1e-7)


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(ignore_index=1),
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5])),
        nn.CrossEntropyLoss(reduction="sum"),
        nn.CrossEntropyLoss(reduction="none"),
        nn.CrossEntropyLoss(label_smoothing=0.1, weight=torch.tensor([1.0, 2.0, 0.5])),
    ],
    ids=["ignore_index", "class weights", "sum", "none", "label smoothing"],
)
def test_accumulation_equals_one_large_batch(loss: nn.Module) -> None:
    """The gradient of a group is that of its samples in one batch, whatever the loss is a mean of."""
    x, y = blobs(60)
    mine, theirs = pair()
    optimizer = torch.optim.SGD(theirs.parameters(), 1e-3)
    for i in range(0, 60, 24):
        value = loss(theirs(x[i : i + 24]), y[i : i + 24])
        (value.mean() if value.ndim else value).backward()
        optimizer.step()
        optimizer.zero_grad()
    model = hapi.Model(mine).prepare(torch.optim.SGD(mine.parameters(), 1e-3), loss)
    model.fit((x, y), batch_size=8, accumulate_grad_batches=3, shuffle=False, verbose=0)
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_accumulation_over_an_iterable_of_unknown_length_is_exact() -> None:
    x, y = blobs(50)
    mine, theirs = pair()
    optimizer = torch.optim.SGD(theirs.parameters(), 0.1)
    for part in (slice(0, 32), slice(32, 50)):
        nn.CrossEntropyLoss()(theirs(x[part]), y[part]).backward()
        optimizer.step()
        optimizer.zero_grad()

    class Stream:
        def __iter__(self) -> Any:
            return iter((x[i : i + 8], y[i : i + 8]) for i in range(0, 50, 8))

    model = hapi.Model(mine).prepare(torch.optim.SGD(mine.parameters(), 0.1), nn.CrossEntropyLoss())
    model.fit(Stream(), accumulate_grad_batches=4, verbose=0)
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_sample_weights_give_the_weighted_mean() -> None:
    x, y = blobs(40)
    weights = torch.rand(40)
    mine, theirs = pair()
    optimizer = torch.optim.SGD(theirs.parameters(), 0.1)
    for i in range(0, 40, 20):
        each = nn.functional.cross_entropy(theirs(x[i : i + 20]), y[i : i + 20], reduction="none")
        ((each * weights[i : i + 20]).sum() / weights[i : i + 20].sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    model = hapi.Model(mine).prepare(torch.optim.SGD(mine.parameters(), 0.1), "cross_entropy")
    model.fit((x, y), batch_size=10, accumulate_grad_batches=2, shuffle=False, verbose=0, sample_weight=weights)
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_class_weight_is_torchs_weight() -> None:
    x, y = blobs(40)
    mine, theirs = pair()
    weighted = hapi.Model(theirs).prepare(
        torch.optim.SGD(theirs.parameters(), 0.1), nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0, 1.0]))
    )
    weighted.fit((x, y), batch_size=10, shuffle=False, verbose=0)
    model = hapi.Model(mine).prepare(
        torch.optim.SGD(mine.parameters(), 0.1), "cross_entropy", class_weight={0: 1.0, 1: 3.0, 2: 1.0}
    )
    history = model.fit((x, y), batch_size=10, shuffle=False, verbose=0)
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert history.history["loss"][0] > 0


def test_the_logged_losses_are_exact_sample_weighted_means() -> None:
    x, y = blobs(ROWS)
    net = mlp()
    model = hapi.Model(net).prepare(None, nn.CrossEntropyLoss())
    with torch.no_grad():
        expected = float(nn.functional.cross_entropy(net(x).double(), y))
    assert model.evaluate((x, y), batch_size=BATCH, verbose=0)["loss"] == pytest.approx(expected, abs=1e-6)

    recorder = LossRecorder()
    trained = hapi.Model(net).prepare(torch.optim.SGD(net.parameters(), 0.0), nn.CrossEntropyLoss())
    trained.fit((x, y), batch_size=BATCH, shuffle=False, verbose=0, callbacks=recorder)
    assert len(recorder.sums) == 7
    assert recorder.sums[-1][0] == pytest.approx(expected, abs=1e-6)
    assert sum(rows for _, rows in recorder.sums) == ROWS
