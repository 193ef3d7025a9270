"""What counts as a metric, and metrics in the reference's style."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics

from hapi import metrics as hm
from hapi.metrics.adapters import is_reference_style
from hapi.metrics.base import Metric


class Duck:
    """No base class, no compute."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.seen: list[Any] = []

    def update(self, *states: Any) -> int:
        self.seen.append(states)
        return len(self.seen)

    def accumulate(self) -> int:
        return len(self.seen)

    def name(self) -> str:
        return "duck"


class ReferenceAccuracy(hm.Metric):
    """As in the reference's own sources: a subclass that does not call super().__init__()."""

    def __init__(self) -> None:
        self.reset()

    def compute(self, output: Any, label: Any, *rest: Any) -> Any:  # type: ignore[override]
        return output.argmax(1) == label.reshape(-1)

    def update(self, hits: Any) -> float:  # type: ignore[override]
        assert isinstance(hits, np.ndarray)
        self.hits += int(hits.sum())
        self.count += len(hits)
        return float(hits.mean())

    def accumulate(self) -> list[float]:
        return [self.hits / self.count, self.count]

    def reset(self) -> None:
        self.hits = self.count = 0

    def name(self) -> list[str]:
        return ["hit", "rows"]


class DefaultCompute(hm.Metric):
    """A subclass in the reference's style that relies on the default compute."""

    def __init__(self) -> None:
        super().__init__("default")
        self.total = 0.0

    def update(self, output: Any, label: Any) -> None:  # type: ignore[override]
        assert isinstance(output, np.ndarray)
        assert isinstance(label, np.ndarray)
        self.total += float(np.abs(output - label).sum())

    def accumulate(self) -> float:
        return self.total

    def reset(self) -> None:
        self.total = 0.0


class Native(Metric):
    """A hapi metric with an accumulate of its own is still one: it declares states."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total")

    def update(self, output: torch.Tensor) -> None:
        self.state["total"].add_(output.sum())

    def compute(self, totals: Any) -> float:
        return float(totals["total"])

    def accumulate(self) -> Any:
        return super().accumulate()


class Forgetful(hm.Metric):
    def __init__(self) -> None:
        pass


def test_reference_subclass() -> None:
    (metric,) = hm.as_metric(ReferenceAccuracy())
    assert isinstance(metric, hm.ReferenceMetric)
    states = metric.collect(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([[1], [1]]))
    assert [type(state) for state in states] == [torch.Tensor]
    assert metric.consume(states) == 0.5
    metric.consume(metric.collect(torch.tensor([[0.1, 0.9]]), torch.tensor([1])))
    assert metric.name() == ["hit", "rows"]
    assert metric.accumulate() == [2 / 3, 3]
    metric.reset()
    metric.consume(states)
    assert metric.accumulate() == [0.5, 2]


def test_default_compute_passes_its_arguments() -> None:
    (metric,) = hm.as_metric(DefaultCompute())
    assert isinstance(metric, hm.ReferenceMetric)
    metric.consume(metric.collect(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 3.0])))
    assert metric.accumulate() == 3.0
    assert metric.name() == "default"


def test_duck() -> None:
    duck = Duck()
    (metric,) = hm.as_metric(duck)
    assert isinstance(metric, hm.ReferenceMetric)
    assert metric.inner is duck
    output, label = torch.ones(2, 3, requires_grad=True), torch.zeros(2, dtype=torch.bfloat16)
    assert metric.consume(metric.collect(output, label)) == 1
    (seen,) = duck.seen
    assert [array.dtype for array in seen] == [np.float32, np.float32]
    seen[0][:] = 7
    assert output.sum() == 6  # an update that writes to its arguments writes to copies


def test_gathered_states_equal_local_ones() -> None:
    """The engine collects on every rank, exchanges, and consumes everything on each: no metric may notice."""
    rng = np.random.default_rng(0)
    batches = [(torch.tensor(rng.random((n, 3))), torch.tensor(rng.integers(0, 3, n))) for n in (4, 1, 7)]
    (one,) = hm.as_metric(ReferenceAccuracy())
    (other,) = hm.as_metric(ReferenceAccuracy())
    assert isinstance(one, hm.ReferenceMetric)
    assert isinstance(other, hm.ReferenceMetric)
    for batch in batches:
        one.consume(one.collect(*batch))
    for states in [other.collect(*batch) for batch in batches]:
        other.consume(tuple(state.cpu() for state in states))
    assert one.accumulate() == other.accumulate()
    assert copy.deepcopy(one).accumulate() == one.accumulate()


def test_states_may_be_numbers_and_arrays_but_nothing_else() -> None:
    duck: Any = Duck()
    duck.compute = lambda output: (3, np.ones(2), output, [1.0, 2.0])
    metric = hm.ReferenceMetric(duck)
    assert [state.tolist() for state in metric.collect(torch.ones(1))] == [3, [1.0, 1.0], [1.0], [1.0, 2.0]]
    duck.compute = lambda output: "high"
    with pytest.raises(TypeError, match=r"Duck.compute gave a str; accepted"):
        metric.collect(torch.ones(1))


def test_a_name_must_be_a_name() -> None:
    duck: Any = Duck()
    for name in (3, [], [1], None):
        duck.name = lambda name=name: name
        with pytest.raises(TypeError, match=r"Duck.name\(\) gave"):
            hm.ReferenceMetric(duck).name()


def test_a_missing_method_is_named() -> None:
    class Half:
        def update(self) -> None: ...

        def reset(self) -> None: ...

    with pytest.raises(TypeError, match=r"Half is no metric: it has no accumulate, name; accepted"):
        hm.ReferenceMetric(Half())


@pytest.mark.parametrize(
    ("obj", "expected"),
    [
        (ReferenceAccuracy(), True),
        (DefaultCompute(), True),
        (Duck(), True),
        (Duck, False),
        (Native(), False),
        (hm.Accuracy(), False),
        (torchmetrics.MeanSquaredError(), False),
        (hm.TorchMetric(torchmetrics.MeanSquaredError()), False),
        (len, False),
        (3, False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_is_reference_style(obj: Any, expected: bool) -> None:
    assert is_reference_style(obj) is expected


@pytest.mark.parametrize(
    ("obj", "kind"),
    [
        (hm.Accuracy(), hm.Accuracy),
        (Native(), Native),
        (hm.ReferenceMetric(Duck()), hm.ReferenceMetric),
        (torchmetrics.MeanSquaredError(), hm.TorchMetric),
        (torch.nn.functional.l1_loss, hm.FunctionMetric),
        (torch.nn.L1Loss(), hm.FunctionMetric),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_as_metric(obj: Any, kind: type) -> None:
    (metric,) = hm.as_metric(obj)
    assert type(metric) is kind
    assert (metric is obj) == isinstance(obj, (hm.Metric, hm.ReferenceMetric))


@pytest.mark.parametrize("obj", [3, "acc", None, [], {"a": 1}])
def test_what_is_no_metric(obj: Any) -> None:
    with pytest.raises(TypeError, match=r"is no metric; accepted: a hapi metric.*torchmetrics.*function"):
        hm.as_metric(obj)


@pytest.mark.parametrize("cls", [hm.Accuracy, Duck, torchmetrics.MeanSquaredError])
def test_a_class_is_no_instance(cls: type) -> None:
    with pytest.raises(TypeError, match=rf"give an instance: {cls.__name__}\("):
        hm.as_metric(cls)


def test_a_metric_without_init_is_told_so() -> None:
    with pytest.raises(TypeError, match=r"Forgetful.__init__ must call super\(\).__init__\(\)"):
        hm.as_metric(Forgetful())


@pytest.mark.parametrize(
    ("word", "kind"),
    [
        ("accuracy", hm.Accuracy),
        ("acc", hm.Accuracy),
        ("Precision", hm.Precision),
        ("recall", hm.Recall),
        ("f1", hm.F1),
        ("AUC", hm.Auc),
        ("mse", hm.MSE),
        ("mae", hm.MAE),
        ("r2", hm.R2),
        ("perplexity", hm.Perplexity),
        ("mean", hm.Mean),
    ],
)
def test_by_name(word: str, kind: type) -> None:
    assert type(hm.by_name(word)) is kind
    assert hm.by_name(word) is not hm.by_name(word)


def test_a_typo_is_guessed() -> None:
    with pytest.raises(ValueError, match=r"'acuracy'; accepted: acc, .*did you mean 'accuracy'\?"):
        hm.by_name("acuracy")


def test_import_is_light() -> None:
    code = (
        "import sys, hapi.metrics as m, torch; m.as_metric(torch.nn.L1Loss()); "
        "print([n for n in ('torchmetrics', 'sklearn', 'scipy', 'pandas', 'matplotlib') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "[]", done.stderr
