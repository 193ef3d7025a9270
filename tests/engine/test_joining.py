"""Counting the rows of several batches at once changes no value, and counts nothing that has changed meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hapi
from hapi.callbacks import Callback
from hapi.data.batch import Batch
from hapi.distributed.environment import detect
from hapi.engine.meters import Meters, RoutedMetric
from hapi.metrics import Accuracy
from tests.helpers.nets import blobs, mlp

ROWS = 8


class Each(Accuracy):
    """The same metric, of which nothing is known: it gets every batch by itself."""


class Counted(Accuracy):
    """Notes how many rows each update has."""

    _counts_rows = True

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.updates: list[int] = []

    def update(self, output: Tensor, label: Tensor) -> None:
        self.updates.append(len(label))
        super().update(output, label)


class Seen(Callback):
    """Keeps the values of the log points."""

    def __init__(self) -> None:
        self.values: list[Any] = []

    def on_train_batch_end(self, step: int, logs: dict[str, Any] | None = None) -> None:
        self.values.append({name: value for name, value in (logs or {}).items() if name.startswith("acc")})

    on_eval_batch_end = on_train_batch_end


def values(metric: Accuracy, rows: int, net: nn.Module | None = None, **options: Any) -> Any:
    data, seen = blobs(rows), Seen()
    net = mlp() if net is None else net
    model = hapi.Model(net, device="cpu").prepare(
        torch.optim.SGD(net.parameters(), 0.05), nn.CrossEntropyLoss(), metric
    )
    history = model.fit(
        data, data, batch_size=ROWS, epochs=2, verbose=0, log_freq=7, seed=1, callbacks=[seen], **options
    )
    logs = model.evaluate(data, ROWS, verbose=0, log_freq=11, callbacks=[seen])
    return history.history, logs, seen.values


@pytest.mark.parametrize("topk", [1, (1, 2)])
@pytest.mark.parametrize("rows", [5, 64, 8 * 17, 8 * 40, 8 * 50 + 3])
def test_values_are_the_same_at_every_log_point(rows: int, topk: Any) -> None:
    found, expected = values(Accuracy(topk), rows), values(Each(topk, "acc"), rows)
    assert found == expected
    assert any(found[2])


def test_most_batches_are_counted_together() -> None:
    metric = Counted()
    data = blobs(8 * 100)
    model = hapi.Model(mlp(), device="cpu").prepare(None, nn.CrossEntropyLoss(), metric)
    model.evaluate(data, ROWS, verbose=0)
    assert sum(metric.updates) == 800
    # The first sets the form; the others come by sixteen.
    assert metric.updates == [8] + [128] * 6 + [24]


def test_a_subclass_gets_every_batch() -> None:
    calls: list[int] = []

    class Mine(Accuracy):
        def update(self, output: Tensor, label: Tensor) -> None:
            calls.append(len(label))
            super().update(output, label)

    model = hapi.Model(mlp(), device="cpu").prepare(None, nn.CrossEntropyLoss(), Mine())
    model.evaluate(blobs(800), ROWS, verbose=0)
    assert calls == [8] * 100


class Reusing(nn.Module):
    """Gives the same buffers again and again, as nets with preallocated outputs do."""

    def __init__(self, buffers: int) -> None:
        super().__init__()
        self.net = mlp()
        self.buffers = [torch.empty(ROWS, 3) for _ in range(buffers)]
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        if torch.is_grad_enabled() or len(x) != ROWS:
            return out
        self.calls += 1
        return self.buffers[self.calls % len(self.buffers)].copy_(out)


@pytest.mark.parametrize("buffers", [1, 2, 16])
def test_outputs_in_buffers_that_come_again_are_counted_in_time(buffers: int) -> None:
    assert values(Accuracy(), 8 * 60, Reusing(buffers)) == values(Each((1,), "acc"), 8 * 60, Reusing(buffers))


def test_labels_in_a_buffer_that_comes_again_are_counted_in_time() -> None:
    x, y = blobs(8 * 60)
    buffer = torch.empty(ROWS, dtype=torch.int64)

    class Reading:
        def __iter__(self) -> Any:
            for rows in range(0, len(x), ROWS):
                yield x[rows : rows + ROWS], buffer.copy_(y[rows : rows + ROWS])

    def accuracy(metric: Accuracy) -> float:
        model = hapi.Model(mlp(), device="cpu").prepare(None, nn.CrossEntropyLoss(), metric)
        return float(model.evaluate(Reading(), verbose=0)["acc"])

    assert accuracy(Accuracy()) == accuracy(Each((1,), "acc"))


def test_large_outputs_do_not_wait() -> None:
    metric = Counted()
    net = nn.Linear(8, 5000)
    model = hapi.Model(net, device="cpu").prepare(None, nn.CrossEntropyLoss(), metric)
    model.evaluate(blobs(8 * 40), ROWS, verbose=0)
    assert metric.updates == [8] * 40


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor) -> Any:
        return {"only": self.net(x)}


def test_outputs_by_name_are_counted_one_by_one() -> None:
    def found(metric: Accuracy) -> Any:
        model = hapi.Model(Named(), device="cpu").prepare(None, None, metric)
        return model.evaluate(blobs(8 * 40), ROWS, verbose=0)

    assert found(Accuracy()) == found(Each((1,), "acc"))


def meters_of(metric: Accuracy) -> Meters:
    return Meters(None, [RoutedMetric(metric)], torch.device("cpu"), detect())


@pytest.mark.parametrize("batches", [1, 2, 9, 17, 20])
def test_a_checkpoint_and_a_snapshot_hold_the_rows_that_wait(batches: int) -> None:
    x, y = blobs(ROWS * 40, features=3)
    each = [Batch((x[i : i + ROWS],), {}, (y[i : i + ROWS],), None, ROWS) for i in range(0, len(x), ROWS)]

    def add(meters: Meters, some: list[Batch]) -> None:
        for batch in some:
            meters.add_metrics(batch.args[0], batch)

    whole, first, second = meters_of(Each()), meters_of(Accuracy()), meters_of(Accuracy())
    add(whole, each)
    add(first, each[:batches])
    second.load_states([first.saved_states()])
    before = first.snapshot()
    add(first, each[:30])
    first.restore(before)
    for meters in (first, second):
        add(meters, each[batches:])
        assert meters.read() == whole.read()
