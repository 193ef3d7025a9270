"""The contract itself, on metrics with every kind of state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hapi.metrics import Metric
from tests.metrics.contract import bind, merge


class Everything(Metric):
    """A sum, a sum that starts at 10, extremes, rows, and a product over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", [2])
        self.add_state("low", reduce="min")
        self.add_state("high", reduce="max")
        self.add_state("rows", reduce="cat")
        self.add_state("product", reduce=lambda ranks: ranks.prod(0), start=torch.ones((), dtype=torch.int64))

    def update(self, output: Tensor) -> None:
        self._to(output.device)
        self.state["total"].add_(output.sum())
        torch.minimum(self.state["low"], output.min(), out=self.state["low"])
        torch.maximum(self.state["high"], output.max(), out=self.state["high"])
        self.state["product"].mul_(output.prod())
        self.lists["rows"].append(output)

    def compute(self, totals: Any) -> list[Any]:
        return [
            totals["total"].tolist(),
            totals["low"].item(),
            totals["high"].item(),
            totals["product"].item(),
            totals["rows"].tolist(),
        ]


def test_every_kind_of_state_over_ranks() -> None:
    ranks = [bind(Everything()) for _ in range(3)]
    ranks[0].update(torch.tensor([2, 5]))
    ranks[2].update(torch.tensor([-1, 3, 4]))
    expected = [[13.0, 13.0], -1.0, 5.0, -120, [2, 5, -1, 3, 4]]
    assert ranks[1].compute(merge(ranks)) == expected
    alone = Everything()
    alone.update(torch.tensor([2, 5]))
    alone.update(torch.tensor([-1, 3, 4]))
    # accumulate applies a function of the ranks to the one rank that there is.
    assert alone.accumulate() == expected
    alone.reset()
    alone.update(torch.tensor([7]))
    assert alone.accumulate() == [[7.0, 7.0], 7.0, 7.0, 7, [7]]


def test_the_name_is_the_class_in_snake_case() -> None:
    assert Everything().name() == "everything"
    assert Metric("x").name() == "x"
    assert repr(Everything()) == "Everything(name='everything')"


def test_a_state_is_declared_once_and_with_a_known_reduction() -> None:
    metric = Everything()
    with pytest.raises(ValueError, match=r"'total' is declared twice"):
        metric.add_state("total")
    with pytest.raises(ValueError, match=r"reduce='mean'.*'cat' or a function"):
        metric.add_state("new", reduce="mean")  # type: ignore[arg-type]


def test_what_is_not_written_says_so() -> None:
    with pytest.raises(NotImplementedError, match=r"Metric has no update"):
        Metric().update()
    with pytest.raises(NotImplementedError, match=r"Metric has no compute"):
        Metric().compute({})


def test_scalars_count_as_rows() -> None:
    metric = Everything()
    metric.lists["rows"] += [torch.tensor(1), torch.tensor([2, 3])]
    assert merge([metric])["rows"].tolist() == [1, 2, 3]
