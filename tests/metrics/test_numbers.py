"""MSE, MAE, R2, Mean, functions and perplexity: edges and refusals."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest
import torch

from hapi.metrics import MAE, MSE, R2, FunctionMetric, Mean, Metric, Perplexity


@pytest.mark.parametrize("metric", [MSE(), MAE(), R2(), Mean(), Perplexity()], ids=repr)
def test_no_data_is_nan(metric: Metric) -> None:
    assert math.isnan(metric.accumulate())


@pytest.mark.parametrize(
    ("metric", "output", "label"),
    [
        (MSE(), (4, 1), (1, 4)),
        (MSE(), (4,), ()),
        (MAE(), (4, 3), (4,)),
        (MAE(), (1, 4), (4,)),
        (R2(), (4, 2), (4, 2)),
        (R2(num_outputs=2), (4,), (4,)),
        (R2(num_outputs=2), (4, 2, 2), (4, 2, 2)),
        (Perplexity(), (4, 3, 3), (4, 3)),
        (Perplexity(), (4, 3, 2), (4, 5)),
        (Perplexity(), (4,), (4,)),
    ],
    ids=str,
)
def test_nothing_is_broadcast(metric: Metric, output: tuple[int, ...], label: tuple[int, ...]) -> None:
    with pytest.raises(ValueError) as caught:
        metric.update(torch.zeros(output), torch.zeros(label))
    for part in (str(list(output)), str(list(label)), "accepted", type(metric).__name__):
        assert part in str(caught.value)


def test_integers_are_not_rounded() -> None:
    metric = MAE()
    metric.update(torch.tensor([2**25 + 1]), torch.tensor([2**25]))
    assert metric.accumulate() == 1.0


def test_sums_are_kept_in_float64() -> None:
    metric = Mean()
    for _ in range(3):
        metric.update(torch.tensor([2.0**24, 1.0]))
    assert metric.accumulate() == (2**24 + 1) / 2


@pytest.mark.parametrize(("shift", "expected"), [(0.0, 1.0), (0.5, 0.0)])
@pytest.mark.parametrize("value", [0.0, 0.1, 1e5 / 3])
def test_r2_of_equal_labels(value: float, shift: float, expected: float) -> None:
    label = torch.full((7,), value, dtype=torch.float64)
    metric = R2()
    metric.update(label + shift, label)
    assert metric.accumulate() == expected


def test_r2_of_one_row_is_nan() -> None:
    metric = R2()
    metric.update(torch.ones(1), torch.zeros(1))
    assert math.isnan(metric.accumulate())


def test_r2_refuses_columns() -> None:
    with pytest.raises(ValueError, match=r"num_outputs"):
        R2(num_outputs=0)


def test_perplexity_of_a_guess_is_the_number_of_classes() -> None:
    metric = Perplexity()
    metric.update(torch.zeros(2, 5, 10), torch.ones(2, 5, dtype=torch.long))
    assert metric.accumulate() == pytest.approx(10)


def test_perplexity_beyond_float64() -> None:
    metric = Perplexity()
    metric.update(torch.tensor([[0.0, 2000.0]]), torch.tensor([0]))
    assert metric.accumulate() == math.inf


def test_perplexity_takes_half_precision_and_small_labels() -> None:
    metric = Perplexity()
    metric.update(torch.zeros(3, 4, dtype=torch.bfloat16), torch.tensor([[0], [1], [2]], dtype=torch.int32))
    assert metric.accumulate() == pytest.approx(4)


def test_a_scalar_is_weighted_by_its_rows() -> None:
    for metric in (Mean(lambda o, y: (o - y).mean()), FunctionMetric(lambda o, y: (o - y).mean().item())):
        metric.update(torch.ones(3, 2), torch.zeros(3, 2))
        metric.update(torch.full((1, 2), 5.0), torch.zeros(1, 2))
        assert metric.accumulate() == 2.0


def test_a_scalar_without_rows_counts_once() -> None:
    metric = Mean()
    metric.update(torch.tensor(1.0))
    metric.update(torch.tensor(4.0))
    assert metric.accumulate() == 2.5


def test_rows_are_found_in_nested_outputs() -> None:
    metric = FunctionMetric(lambda o: o["x"].mean())
    metric.update({"scale": torch.tensor(2.0), "x": torch.ones(3)})
    metric.update({"scale": torch.tensor(2.0), "x": torch.full((1,), 5.0)})
    assert metric.accumulate() == 2.0


def test_numpy_numbers_are_numbers() -> None:
    metric = Mean(lambda o: np.float32(3))
    metric.update(torch.ones(2))
    assert metric.accumulate() == 3.0


class Gap:
    def __call__(self, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return output - label


def named(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return output - label


@pytest.mark.parametrize(
    ("fn", "name"),
    [
        (named, "named"),
        (functools.partial(named), "named"),
        (Gap(), "gap"),
        (torch.nn.L1Loss(), "l1_loss"),
        (lambda o, y: o, "metric"),
    ],
    ids=str,
)
def test_names_of_functions(fn: Any, name: str) -> None:
    assert FunctionMetric(fn).name() == name
    assert FunctionMetric(fn, "other").name() == "other"


def test_a_loss_module_is_a_function() -> None:
    metric = FunctionMetric(torch.nn.L1Loss())
    metric.update(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 1.0]))
    assert metric.accumulate() == 1.0


@pytest.mark.parametrize(
    ("fn", "error"),
    [
        (lambda o: o.reshape(2, 2), ValueError),
        (lambda o: o[:3], ValueError),
        (lambda o: "high", TypeError),
        (lambda o: None, TypeError),
        (lambda o: True, TypeError),
    ],
)
def test_values_that_are_not_accepted(fn: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"FunctionMetric 'mine'.*accepted"):
        FunctionMetric(fn, "mine").update(torch.ones(4))


@pytest.mark.parametrize("fn", [3, "mse", None, dict])
def test_what_is_no_function(fn: Any) -> None:
    with pytest.raises(TypeError, match=r"function of outputs and labels"):
        FunctionMetric(fn)
