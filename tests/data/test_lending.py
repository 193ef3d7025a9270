"""Evaluation reads arrays where they lie, and no network can change them unnoticed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hapi
from tests.helpers.nets import blobs


class Watched(nn.Module):
    """A linear net that keeps what it is given, after ``write`` has had it."""

    def __init__(self, write: Callable[[Tensor, int], object] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 3)
        self.write = write
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.write is not None:
            self.write(x, len(self.seen))
        self.seen.append(x)
        return self.linear(x)


def evaluated(net: nn.Module, data: Any, batch_size: int = 16, **options: Any) -> dict[str, Any]:
    model = hapi.Model(net, device="cpu").prepare(None, nn.CrossEntropyLoss(), "accuracy")
    return model.evaluate(data, batch_size, verbose=0, **options)


def lent(net: Watched, x: Tensor) -> list[bool]:
    """For each batch whether it is a part of ``x``."""
    return [seen.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for seen in net.seen]


@pytest.mark.parametrize("rows", [72, 64, 16, 10])
@pytest.mark.parametrize("form", [lambda x, y: (x, y), TensorDataset, lambda x, y: (x.numpy(), y.numpy())])
def test_all_but_the_first_batch_are_parts_of_the_data(rows: int, form: Any) -> None:
    x, y = blobs(rows)
    net, other = Watched(), Watched()
    expected = evaluated(other, DataLoader(TensorDataset(x, y), batch_size=16))
    assert evaluated(net, form(x, y)) == expected
    assert lent(net, x) == [False] + [True] * (-(-rows // 16) - 1)
    assert torch.equal(torch.cat(net.seen), x)
    assert not any(lent(other, x))


def test_evaluation_in_fit_reads_in_place_and_training_does_not() -> None:
    x, y = blobs(64)
    net = Watched()
    model = hapi.Model(net, device="cpu").prepare(torch.optim.SGD(net.parameters(), 0.1), nn.CrossEntropyLoss())
    model.fit((x, y), (x, y), batch_size=16, epochs=2, shuffle=False, verbose=0)
    assert lent(net, x) == [False] * 4 + [False, True, True, True] + [False] * 4 + [True] * 4


def test_tensors_that_do_not_count_their_changes_are_copied() -> None:
    with torch.inference_mode():
        x, y = blobs(64)
    net = Watched()
    assert evaluated(net, (x, y)) == evaluated(Watched(), (x.clone(), y.clone()))
    assert not any(lent(net, x))


def test_batches_that_begin_at_odd_places_are_copies() -> None:
    x, y = blobs(30)
    net = Watched()
    evaluated(net, (x, y), batch_size=3)  # 96 bytes
    assert not any(lent(net, x))


def in_numpy(x: Tensor, index: int) -> None:
    values = x.numpy()
    values -= 1


WRITES: dict[str, Callable[[Tensor, int], object]] = {
    "sub_": lambda x, index: x.sub_(1),
    "part": lambda x, index: x[:, 2:3].relu_(),
    "mask": lambda x, index: x.masked_fill_(x > 1e9, 0.0),  # changes nothing here
    "data": lambda x, index: x.data.mul_(2),
    "numpy": in_numpy,
}


@pytest.mark.parametrize("how", WRITES)
def test_a_network_that_writes_into_its_input_gets_copies(how: str) -> None:
    x, y = blobs(64)
    before, net, other = x.clone(), Watched(WRITES[how]), Watched(WRITES[how])
    expected = evaluated(other, DataLoader(TensorDataset(x, y), batch_size=16))
    assert torch.equal(x, before)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = hapi.Model(net, device="cpu").prepare(None, nn.CrossEntropyLoss(), "accuracy")
        assert [model.evaluate((x, y), 16, verbose=0) for _ in range(2)] == [expected, expected]
    assert torch.equal(x, before)
    assert not any(lent(net, x))


def test_a_network_that_begins_to_write_later_is_told_of() -> None:
    x, y = blobs(64)
    before = x.clone()
    net = Watched(lambda x, index: x.sub_(1) if index == 2 else None)
    model = hapi.Model(net, device="cpu").prepare(torch.optim.SGD(net.parameters(), 0.1), nn.CrossEntropyLoss())
    x_train = x.clone()
    with pytest.warns(RuntimeWarning, match="fit: eval_data: arrays were written into while they were evaluated"):
        model.fit((x_train[:16], y[:16]), (x, y), batch_size=16, epochs=1, verbose=0)
    assert torch.equal(x[:16], before[:16])
    assert torch.equal(x_train, before)


def test_after_the_warning_batches_are_copies() -> None:
    x, y = blobs(64)
    writing: list[int] = []
    net = Watched(lambda x, index: x.sub_(1) if index in writing else None)
    optimizer = torch.optim.SGD(net.parameters(), 0.0)
    model = hapi.Model(net, device="cpu").prepare(optimizer, nn.CrossEntropyLoss())
    writing.append(4 + 1)  # the second batch of the first evaluation
    with pytest.warns(RuntimeWarning, match="From here on it gets copies"):
        model.fit((x.clone(), y), (x, y), batch_size=16, epochs=2, verbose=0)
    parts = lent(net, x)
    assert parts[4:8] == [False, True, True, True]
    assert parts[12:] == [False] * 4


def test_what_predict_gives_may_be_written_into() -> None:
    x = torch.randn(64, 8)
    before = x.clone()
    net = nn.Identity()
    model = hapi.Model(net, device="cpu").prepare()
    for batch in model.predict(x, 16, verbose=0)[0]:
        batch += 1
    assert torch.equal(x, before)


def test_an_evaluation_that_ends_early_lends_too() -> None:
    x, y = blobs(64)
    net = Watched(lambda x, index: x.sub_(1) if index == 1 else None)
    with pytest.warns(RuntimeWarning, match="evaluate: data: arrays were written into"):
        evaluated(net, (x, y), num_iters=2)
    assert lent(net, x) == [False, True]
