"""Names, shapes that are refused, and values that are easy to get wrong."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import sklearn.metrics as sk
import torch

import hapi
from hapi.metrics import F1, Accuracy, Auc, ConfusionMatrix, Metric, Precision, Recall, accuracy


@pytest.mark.parametrize(
    ("metric", "names"),
    [
        (Accuracy(), "acc"),
        (Accuracy(1), "acc"),
        (Accuracy(name="hit"), "hit"),
        (Accuracy((1, 2)), ["acc_top1", "acc_top2"]),
        (Accuracy((2,)), "acc_top2"),
        (Accuracy([1, 5], "hit"), ["hit_top1", "hit_top5"]),
        (Precision(), "precision"),
        (Recall("macro", num_classes=3), "recall"),
        (F1(name="f"), "f"),
        (Auc(), "auc"),
        (ConfusionMatrix(3), "confusion_matrix"),
    ],
    ids=repr,
)
def test_names(metric: Metric, names: str | list[str]) -> None:
    assert metric.name() == names


@pytest.mark.parametrize(
    "metric",
    [Accuracy(), Accuracy((1, 2)), Precision(), Recall(), F1("macro", num_classes=3), Auc(), Auc("PR", exact=True)],
    ids=repr,
)
def test_no_data_is_0(metric: Metric) -> None:
    result = metric.accumulate()
    assert (result if isinstance(result, list) else [result]) == [0.0] * np.size(result)


def test_no_data_gives_a_matrix_of_0() -> None:
    for normalize in (None, "true", "pred", "all"):
        assert (ConfusionMatrix(3, normalize).accumulate() == np.zeros((3, 3))).all()


def test_a_label_with_an_own_axis_is_not_taken_as_one_hot() -> None:
    # The reference takes labels [N, d] of an output [N, d, C] as one-hot rows.
    output = torch.tensor([[[0.0, 1, 0], [1, 0, 0]], [[0, 0, 1], [0, 1, 0]]])
    metric = Accuracy()
    metric.update(output, torch.tensor([[1, 0], [2, 2]]))
    assert metric.accumulate() == 0.75


def test_a_single_column_is_two_classes() -> None:
    # The reference takes the argmax of one column, which is always class 0.
    metric = Accuracy()
    metric.update(torch.tensor([[0.9], [0.2], [0.7], [0.4]]), torch.tensor([[1], [0], [0], [1]]))
    assert metric.accumulate() == 0.5


def test_at_the_threshold_precision_and_recall_agree() -> None:
    # The reference rounds 0.5 up in one and down in the other.
    half, label = torch.tensor([0.5, 0.5]), torch.tensor([1, 1])
    for metric in (Precision(), Recall(), F1()):
        metric.update(half, label)
        assert metric.accumulate() == 0.0


def test_boolean_one_hot_and_float_labels() -> None:
    output = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]])
    for label in (torch.tensor([[False, True], [True, False], [True, False]]), torch.tensor([1.0, 0.0, 0.0])):
        metric = Accuracy()
        metric.update(output, label)
        assert metric.accumulate() == pytest.approx(2 / 3)
    metric = Accuracy()
    metric.update(output[:, 1], torch.tensor([True, False, False]))
    assert metric.accumulate() == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("metric", "output", "label"),
    [
        (Accuracy(), (4, 3), (5,)),
        (Accuracy(), (4, 3), (4, 2)),
        (Accuracy(), (4, 3), ()),
        (Accuracy(), (), (4,)),
        (Accuracy(), (4,), (4, 3)),
        (Accuracy(), (4, 3, 2), (4, 5)),
        (Accuracy(), (4, 3, 3), (4, 3)),
        (Accuracy((1, 2)), (4, 1), (4,)),
        (Accuracy(task="multiclass"), (4,), (4,)),
        (Accuracy(task="binary"), (4, 3), (4, 3)),
        (Accuracy(task="binary"), (4, 2), (4, 2)),
        (Accuracy(task="multilabel"), (4, 3), (4,)),
        (Accuracy(class_axis=1), (4, 2, 3), (4, 2)),
        (Precision(), (4, 3), (4,)),
        (Precision(), (4,), (5,)),
        (Precision(), (4, 1), (1, 4)),
        (Recall("micro", num_classes=3), (4, 2), (4,)),
        (F1("micro", num_classes=3), (4,), (4,)),
        (ConfusionMatrix(3), (4, 4), (4,)),
        (Auc(), (4, 3), (4,)),
        (Auc(exact=True), (4,), (3,)),
    ],
    ids=str,
)
def test_shapes_that_do_not_fit(metric: Metric, output: tuple[int, ...], label: tuple[int, ...]) -> None:
    with pytest.raises(ValueError) as caught:
        metric.update(torch.zeros(output), torch.zeros(label, dtype=torch.long))
    text = str(caught.value)
    assert str(list(output)) in text
    assert str(list(label)) in text
    assert "accepted" in text
    assert type(metric).__name__ in text


def test_the_way_out_of_square_shapes_is_named() -> None:
    with pytest.raises(ValueError, match=r"class_axis=1 or class_axis=-1"):
        Accuracy().update(torch.zeros(4, 3, 3), torch.zeros(4, 3, dtype=torch.long))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Accuracy(()), "topk"),
        (lambda: Accuracy(0), "topk"),
        (lambda: Accuracy((1, 1)), "topk"),
        (lambda: Accuracy((1, 2.5)), "topk"),
        (lambda: Accuracy(True), "topk"),
        (lambda: Accuracy(5, task="binary"), "topk"),
        (lambda: Accuracy(task="regression"), "multilabel"),
        (lambda: Accuracy(threshold=1.5), "threshold"),
        (lambda: Accuracy(class_axis=2), "class_axis"),
        (lambda: Precision("mean"), "weighted"),
        (lambda: Precision("macro"), "num_classes"),
        (lambda: Recall("micro", num_classes=1), "num_classes"),
        (lambda: F1(num_classes=3), "macro"),
        (lambda: ConfusionMatrix(1), "num_classes"),
        (lambda: ConfusionMatrix(3, "rows"), "normalize"),
        (lambda: Auc("roc"), "ROC"),
        (lambda: Auc(num_thresholds=0), "num_thresholds"),
    ],
)
def test_options_that_are_not_accepted(make: object, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()  # type: ignore[operator]


@pytest.mark.parametrize("metric", [Recall("macro", num_classes=3), ConfusionMatrix(3)], ids=repr)
@pytest.mark.parametrize("wrong", [3, -1, 10**6])
def test_labels_that_are_no_class_are_reported_when_read(metric: Metric, wrong: int) -> None:
    metric.reset()
    metric.update(torch.eye(3), torch.tensor([0, wrong, 2]))
    with pytest.raises(ValueError, match=rf"{type(metric).__name__}.*1 labels.*0 to 2"):
        metric.accumulate()


@pytest.mark.parametrize("values", [[-3.0, 0.5], [1.2, 0.5], [math.nan, 0.5], [math.inf, 0.5]])
def test_auc_of_what_is_no_probability(values: list[float]) -> None:
    metric = Auc()
    metric.update(torch.tensor(values), torch.tensor([1, 0]))
    with pytest.raises(ValueError, match=r"'auc'.*1 scores.*from_logits=True"):
        metric.accumulate()


def test_auc_takes_rounding_for_rounding() -> None:
    metric = Auc()
    metric.update(torch.tensor([1.0 + 1e-6, -1e-6]), torch.tensor([1, 0]))
    assert metric.accumulate() == 1.0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_exact_auc_needs_finite_scores(value: float) -> None:
    metric = Auc(exact=True)
    metric.update(torch.tensor([value, 0.5]), torch.tensor([1, 0]))
    with pytest.raises(ValueError, match=r"finite"):
        metric.accumulate()


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("label", [0, 1])
def test_auc_of_one_class_is_0(label: int, exact: bool) -> None:
    metric = Auc(exact=exact)
    metric.update(torch.tensor([0.2, 0.9]), torch.tensor([label, label]))
    assert metric.accumulate() == 0.0


@pytest.mark.parametrize("curve", ["ROC", "PR"])
def test_auc_buckets_approximate(curve: str) -> None:
    rng = np.random.default_rng(0)
    label = rng.integers(0, 2, 4000)
    score = np.clip(0.5 + 0.2 * (label - 0.5) + 0.2 * rng.normal(size=4000), 0, 1).astype(np.float32)
    metric = Auc(curve)
    metric.update(torch.tensor(score), torch.tensor(label))
    expected = (sk.roc_auc_score if curve == "ROC" else sk.average_precision_score)(label, score)
    assert metric.accumulate() == pytest.approx(expected, abs=2e-4)
    assert metric.accumulate() != pytest.approx(0.5, abs=0.1)


def test_exact_auc_keeps_copies() -> None:
    metric = Auc(exact=True)
    score, label = torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 0])
    metric.update(score, label)
    score.zero_()
    label.zero_()
    assert metric.accumulate() == 1.0


@pytest.mark.parametrize("k", [1, 3, 99])
def test_accuracy_function(k: int) -> None:
    rng = np.random.default_rng(1)
    output, label = torch.tensor(rng.permuted(np.tile(np.arange(6.0), (50, 1)), axis=1)), rng.integers(0, 6, 50)
    expected = 1.0 if k > 6 else sk.top_k_accuracy_score(label, output, k=k, labels=range(6))
    for shape in ((50,), (50, 1)):
        found = accuracy(output, torch.tensor(label).reshape(shape), k=k)
        assert found.shape == ()
        assert found.item() == pytest.approx(expected)


@pytest.mark.parametrize(("shape", "k"), [((3,), 1), ((4, 2), 1), ((4,), 0)])
def test_accuracy_function_refuses(shape: tuple[int, ...], k: int) -> None:
    with pytest.raises(ValueError, match=r"accuracy: .*accepted"):
        accuracy(torch.zeros(4, 3), torch.zeros(shape, dtype=torch.long), k)


def test_metrics_of_one_batch_share_the_best_class(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = torch.randn(20, 8), torch.randint(0, 3, (20,))
    net = torch.nn.Linear(8, 3)
    metrics = [Accuracy(), ConfusionMatrix(3), F1("macro", num_classes=3)]
    model = hapi.Model(net).prepare(loss="cross_entropy", metrics=metrics)
    calls = 0

    class Counts(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal calls
            calls += getattr(func, "__name__", "") == "argmax"
            return func(*args, **(kwargs or {}))

    with Counts():
        values = model.evaluate((x, y), batch_size=5, verbose=0)
    assert calls == 4  # one per batch
    right = (net(x).argmax(1) == y).float().mean()
    assert values["acc"] == pytest.approx(float(right))
    assert values["confusion_matrix"].trace() == pytest.approx(20 * float(right))
    # By itself, a metric looks at the scores as they are now.
    metric, scores = Accuracy(), torch.tensor([[1.0, 0.0]])
    metric.update(scores, torch.tensor([0]))
    scores.copy_(torch.tensor([[0.0, 1.0]]))
    metric.update(scores, torch.tensor([0]))
    assert metric.accumulate() == 0.5
