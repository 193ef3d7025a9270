"""A failure says which batch, which samples and, on several ranks, which rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hapi
from hapi.data import memory, sources
from hapi.data.sampler import epoch_order
from tests.helpers.nets import mlp
from tests.helpers.ranks import RankError, run_ranks

ROWS, BAD = 40, 27


def data(bad: int = BAD) -> tuple[Tensor, Tensor]:
    y = torch.arange(ROWS) % 3
    y[bad] = 7  # there are three classes
    return torch.randn(ROWS, 8), y


def model(net: nn.Module | None = None) -> hapi.Model:
    net = mlp() if net is None else net
    return hapi.Model(net, device="cpu").prepare(torch.optim.SGD(net.parameters(), 0.1), nn.CrossEntropyLoss())


def told(error: BaseException) -> str:
    return "\n".join([*map(str, error.args), *getattr(error, "__notes__", ())])  # Python 3.10 has no notes


@pytest.mark.parametrize("form", [lambda x, y: (x, y), lambda x, y: _Map(x, y)], ids=["arrays", "map"])
def test_training(form: Any) -> None:
    with pytest.raises(IndexError) as caught:
        model().fit(form(*data()), batch_size=4, shuffle=False, verbose=0)
    assert "in epoch 0, step 6, batch 6 (all counted from 0), samples [24, 25, 26, 27]" in told(caught.value)


def test_a_shuffled_epoch() -> None:
    order = epoch_order(ROWS, seed=5, epoch=0).tolist()
    at = order.index(BAD) // 8
    with pytest.raises(IndexError) as caught:
        model().fit(data(), batch_size=8, seed=5, verbose=0)
    samples = ", ".join(map(str, order[at * 8 : at * 8 + 8]))
    assert f"step {at}, batch {at} (all counted from 0), samples [{samples}]" in told(caught.value)


def test_accumulation_and_a_long_batch() -> None:
    with pytest.raises(IndexError) as caught:
        model().fit(data(), batch_size=10, shuffle=False, accumulate_grad_batches=2, verbose=0)
    assert "step 1, batch 2 (all counted from 0), samples [20, 21, 22, 23, 24, 25, 26, 27, ... 10 in all]" in told(
        caught.value
    )


def test_an_optimizer_that_fails() -> None:
    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            raise ArithmeticError("no step")

    net = mlp()
    failing = hapi.Model(net, device="cpu").prepare(Failing(net.parameters(), 0.1), nn.CrossEntropyLoss())
    with pytest.raises(ArithmeticError) as caught:
        failing.fit((torch.randn(ROWS, 8), torch.zeros(ROWS).long()), batch_size=4, shuffle=False, verbose=0)
    assert "in epoch 0, step 0, batch 0 (all counted from 0), samples [0, 1, 2, 3]" in told(caught.value)


def test_evaluation_and_prediction() -> None:
    with pytest.raises(IndexError) as caught:
        model().evaluate(data(), batch_size=4, verbose=0)
    assert "while evaluating batch 6, samples [24, 25, 26, 27]" in told(caught.value)
    with pytest.raises(IndexError) as caught:
        model().fit((torch.randn(8, 8), torch.zeros(8).long()), data(), batch_size=4, verbose=0)
    assert "while evaluating batch 6, samples [24, 25, 26, 27]" in told(caught.value)

    class Picky(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if (x > 50).any():
                raise ValueError("too large")
            return x

    x = torch.zeros(ROWS, 8)
    x[13] = 99
    with pytest.raises(ValueError, match="too large") as failed:
        hapi.Model(Picky(), device="cpu").prepare().predict(x, 5, verbose=0)
    assert "while predicting batch 2, samples [10, 11, 12, 13, 14]" in told(failed.value)


def test_a_loader_of_the_users_names_the_batch() -> None:
    with pytest.raises(IndexError) as caught:
        model().fit(DataLoader(TensorDataset(*data()), batch_size=4), verbose=0)
    assert told(caught.value).endswith("in epoch 0, step 6, batch 6 (all counted from 0)")


def _train() -> None:
    model().fit(data(), batch_size=4, shuffle=False, verbose=0)


@pytest.mark.parametrize("kind", ["arrays", "map"])
def test_batches_that_are_moved_to_an_accelerator(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """The CPU by a longer name stands for it."""
    for module in (memory, sources):
        monkeypatch.setattr(module, "accelerated", lambda device: device.index is not None)
    net = mlp()
    far = hapi.Model(net, device="cpu:0").prepare(torch.optim.SGD(net.parameters(), 0.1), nn.CrossEntropyLoss())
    with pytest.raises(IndexError) as caught:
        far.fit(data() if kind == "arrays" else _Map(*data()), batch_size=4, shuffle=False, verbose=0)
    assert "batch 6 (all counted from 0), samples [24, 25, 26, 27]" in told(caught.value)


def test_on_two_ranks() -> None:
    """Of the global batch of 8, rank 0 has rows 24 to 27."""
    with pytest.raises(RankError) as caught:
        run_ranks(_train, 2)
    assert "step 3, batch 3 (all counted from 0), samples [24, 25, 26, 27], on rank 0 of 2" in str(caught.value)


class _Map(torch.utils.data.Dataset[Any]):
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index]
