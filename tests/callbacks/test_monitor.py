from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from hapi.callbacks.monitor import Monitor


@pytest.mark.parametrize(
    "name",
    [
        *("acc", "eval_acc_top1", "accuracy", "auc", "precision", "recall", "f1", "macro_f1", "r2"),
        *("r2_score", "multiclassaccuracy", "binary_auroc", "map", "MulticlassF1Score"),
    ],
)
def test_auto_is_max(name: str) -> None:
    assert Monitor(name, owner="Test").mode == "max"


@pytest.mark.parametrize("name", ["loss", "eval_loss", "mse", "mae", "mape", "perplexity", "recall_loss", "acc_error"])
def test_auto_is_min(name: str) -> None:
    assert Monitor(name, owner="Test").mode == "min"


@pytest.mark.parametrize(
    ("mode", "values", "improved"),
    [
        ("min", [1.0, 0.95, 0.8, math.nan, 0.8, 0.1], [True, False, True, False, False, True]),
        ("max", [1.0, 1.05, 1.2, math.nan, 1.2, 9.0], [True, False, True, False, False, True]),
        ("min", [math.nan, math.inf, 5.0], [False, False, True]),
    ],
)
def test_improved(mode: str, values: list[float], improved: list[bool]) -> None:
    monitor = Monitor("x", mode, 0.1, owner="Test")
    assert [monitor.improved(value) for value in values] == improved


def test_start_is_the_first_to_beat() -> None:
    monitor = Monitor("acc", owner="Test", start=0.5)
    assert not monitor.improved(0.4)
    assert monitor.improved(0.6)
    monitor.reset()
    assert monitor.best == 0.5


def test_both_forms_in_an_evaluation() -> None:
    for name in ("loss", "eval_loss"):
        assert Monitor(name, owner="Test").in_evaluation({"loss": 2.0}) == 2.0


def test_both_forms_in_an_epoch() -> None:
    logs = {"loss": 1.0, "eval_loss": 2.0, "lr": 0.1}
    for name in ("loss", "eval_loss"):
        monitor = Monitor(name, owner="Test")
        assert monitor.in_epoch(logs, evaluates=True) == 2.0
        assert monitor.in_epoch({"loss": 1.0}, evaluates=True) is None  # this epoch was not evaluated: no warning
    assert Monitor("loss", owner="Test").in_epoch({"loss": 1.0}, evaluates=False) == 1.0


def test_missing_value_warns_once_with_a_suggestion() -> None:
    monitor = Monitor("acc_top", owner="Test")
    logs = {"loss": 1.0, "acc_top1": 0.5, "samples": 10}
    expected = r"Test: monitor='acc_top' is not in the logs; did you mean 'acc_top1'\?; available: loss, acc_top1\."
    with pytest.warns(UserWarning, match=expected):
        assert monitor.in_evaluation(logs) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert monitor.in_evaluation(logs) is None


def test_evaluation_value_without_evaluation_data_warns() -> None:
    with pytest.warns(UserWarning, match="monitor='eval_loss' is not in the logs"):
        Monitor("eval_loss", owner="Test").in_epoch({"loss": 1.0}, evaluates=False)


@pytest.mark.parametrize("value", [[1.0], np.ones(2), torch.ones(1), "1", True, None])
def test_value_that_is_not_a_number(value: Any) -> None:
    with pytest.raises(TypeError, match=r"Test: monitor='eval_f1' needs one number .* logs\['f1'\] is a"):
        Monitor("eval_f1", owner="Test").in_evaluation({"f1": value})


@pytest.mark.parametrize("value", [2, np.float32(2), np.array(2.0), torch.tensor(2.0)])
def test_kinds_of_numbers(value: Any) -> None:
    assert Monitor("f1", owner="Test").in_evaluation({"f1": value}) == 2.0


def test_refused_arguments() -> None:
    with pytest.raises(ValueError, match="Test: mode='maximum'; accepted: 'auto', 'min', 'max'"):
        Monitor("loss", "maximum", owner="Test")
    with pytest.raises(ValueError, match="min_delta=-1; accepted: a finite number >= 0"):
        Monitor("loss", min_delta=-1, owner="Test")
    with pytest.raises(ValueError, match="monitor='eval_'"):
        Monitor("eval_", owner="Test")
    with pytest.raises(TypeError, match=r"monitor=\['loss'\]"):
        Monitor(["loss"], owner="Test")  # type: ignore[arg-type]
