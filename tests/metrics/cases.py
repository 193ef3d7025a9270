"""One table: every metric, what to feed it, and what another library makes of that."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import sklearn.metrics as sk
import torch
import torchmetrics
import torchmetrics.classification as tc
from torch import Tensor

from hapi import metrics as hm

N = 101
Data = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    """``expected(*data())`` is what ``make()`` should say.

    ``waits``: update looks at values (not ours).
    """

    make: Callable[[], hm.Metric]
    data: Callable[[], Data]
    expected: Callable[..., Any]
    note: str = ""
    waits: bool = False
    tolerance: float = 1e-6

    def __str__(self) -> str:
        made = self.make()
        return f"{type(made).__name__}-{self.note or made.name()}"


def _rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def scores(shape: tuple[int, ...], axis: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    """Different small integers along ``axis``, exact in every dtype: no ties."""
    classes = shape[axis]
    ordered = np.broadcast_to(np.arange(classes).reshape([-1 if i == axis else 1 for i in range(len(shape))]), shape)
    return torch.tensor(_rng(len(shape)).permuted(ordered, axis=axis)).to(dtype)


def classes(shape: tuple[int, ...], count: int, seed: int = 5) -> Tensor:
    return torch.tensor(_rng(seed).integers(0, count, shape))


def many(
    shape: tuple[int, ...] = (N, 5), axis: int = 1, label_shape: tuple[int, ...] | None = None, used: int = 0, **kw: Any
) -> Callable[[], Data]:
    rest = tuple(size for i, size in enumerate(shape) if i != axis)
    return lambda: (
        scores(shape, axis, **kw),
        classes(rest, used or shape[axis]).reshape(label_shape or rest),
    )


def sparse() -> Data:
    """Seven classes, of which 5 and 6 are in neither labels nor predictions, and 4 is never predicted."""
    output, label = scores((N, 7)), classes((N,), 5)
    output[:, 4:] = -1 - output[:, 4:]
    return output, label


def two(columns: int = 0, label_columns: int = 0, steps: int = 64, logits: bool = False) -> Callable[[], Data]:
    """Probabilities k/64 (exact, with ties, none at 1/2), and labels that depend on them."""

    def make() -> Data:
        rng = _rng(1)
        p = (rng.integers(0, steps, N) + 0.25) / steps
        y = (rng.random(N) < p).astype(np.int64)
        x = np.log(p / (1 - p)) if logits else p
        if columns == 2:
            other = rng.random(N)
            output = np.stack([other, other + x] if logits else [1 - x, x], 1)
        else:
            output = x.reshape(-1, 1) if columns else x
        return torch.tensor(output, dtype=torch.float32), torch.tensor(y.reshape(-1, 1) if label_columns else y)

    return make


def numbers(shape: tuple[int, ...] = (N,), label_shape: tuple[int, ...] = (), shift: float = 0.0) -> Callable[[], Data]:
    def make() -> Data:
        truth = _rng(2).normal(size=shape) + shift
        found = truth + 0.3 * _rng(3).normal(size=shape)
        # float32 first: the expected value must see the numbers that the metric sees.
        return torch.tensor(found).float(), torch.tensor(truth).float().reshape(label_shape or shape)

    return make


def with_ignored(data: Callable[[], Data], index: int) -> Callable[[], Data]:
    def make() -> Data:
        output, label = data()
        label.view(-1)[::3] = index
        return output, label

    return make


def one_hot(data: Callable[[], Data]) -> Callable[[], Data]:
    def make() -> Data:
        output, label = data()
        return output, torch.nn.functional.one_hot(label, output.shape[1]).float()

    return make


def multi_hot() -> Data:
    rng = _rng(4)
    return torch.tensor(rng.random((N, 4)), dtype=torch.float32), torch.tensor(rng.integers(0, 2, (N, 4)))


# ------------------------------------------------------------------- expected


def np_(tensor: Tensor) -> np.ndarray:
    return tensor.double().numpy()


def kept(output: Tensor, label: Tensor, axis: int = 1, ignore: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Predicted and true classes as sklearn takes them."""
    predicted = output.float().argmax(axis).flatten().numpy()
    truth = (label.argmax(axis) if label.shape == output.shape else label).flatten().numpy()
    return (truth, predicted) if ignore is None else (truth[truth != ignore], predicted[truth != ignore])


def accuracy(axis: int = 1, ignore: int | None = None) -> Callable[..., float]:
    return lambda o, y: sk.accuracy_score(*kept(o, y, axis, ignore))


def top(*ks: int) -> Callable[..., Any]:
    def expected(o: Tensor, y: Tensor) -> Any:
        return [sk.top_k_accuracy_score(y.flatten(), o, k=k, labels=range(o.shape[1])) for k in ks]

    return expected


def yes(output: Tensor, threshold: float = 0.5) -> np.ndarray:
    return (output.flatten() > threshold).numpy().astype(int)


def by_sklearn(function: Callable[..., float], average: str) -> Callable[..., float]:
    if average == "binary":
        return lambda o, y: function(y.flatten(), yes(o), zero_division=0)
    return lambda o, y: function(*kept(o, y), average=average, zero_division=0)


def area(function: Callable[..., float]) -> Callable[..., float]:
    return lambda o, y: function(y.flatten(), o.flatten() if o.ndim == 1 or o.shape[1] == 1 else o[:, 1])


def area_of_logits(function: Callable[..., float]) -> Callable[..., float]:
    return lambda o, y: function(y.flatten(), (o[:, 1] - o[:, 0] if o.ndim == 2 else o).double().sigmoid())


def perplexity(axis: int = -1, ignore: int = -100) -> Callable[..., float]:
    def expected(o: Tensor, y: Tensor) -> float:
        metric = torchmetrics.text.Perplexity(ignore_index=ignore)
        o = o.movedim(axis, -1)
        metric.update(o.reshape(1, -1, o.shape[-1]), y.reshape(1, -1))
        return float(metric.compute())

    return expected


def _quiet(make: Callable[[], Any]) -> Any:
    """torchmetrics warns that some of its metrics keep all data."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


def by_torchmetrics(make: Callable[[], Any]) -> Callable[..., Any]:
    """torchmetrics' own result on all the data, in one update."""

    def expected(o: Tensor, y: Tensor) -> Any:
        metric = _quiet(make)
        metric.update(o, y)
        result = metric.compute()
        if isinstance(result, dict):
            return [float(value) for value in result.values()]
        return result.numpy()

    return expected


def wrapped(make: Callable[[], Any], data: Callable[[], Data], note: str) -> Case:
    return Case(lambda: hm.TorchMetric(_quiet(make)), data, by_torchmetrics(make), note, waits=True, tolerance=1e-5)


def thresholded(curve: str, **kw: Any) -> Callable[[], hm.Metric]:
    return lambda: hm.Auc(curve, num_thresholds=64, **kw)  # type: ignore[arg-type]


_ACC = hm.Accuracy
_AVERAGES = ("macro", "micro", "weighted")
_SCORES = ((hm.Precision, sk.precision_score), (hm.Recall, sk.recall_score), (hm.F1, sk.f1_score))

CASES: list[Case] = [
    Case(_ACC, many(), accuracy(), "classes"),
    Case(_ACC, many(label_shape=(N, 1)), accuracy(), "label column"),
    Case(_ACC, one_hot(many()), accuracy(), "one-hot"),
    Case(_ACC, many(dtype=torch.bfloat16), accuracy(), "bfloat16"),
    Case(_ACC, many(dtype=torch.float16), accuracy(), "float16"),
    Case(_ACC, many((N, 5, 4, 3)), accuracy(), "pixels"),
    Case(_ACC, many((N, 5, 4, 3), label_shape=(N, 1, 4, 3)), accuracy(), "pixels with channel"),
    Case(_ACC, many((N, 4, 5), axis=2), accuracy(2), "tokens, classes last"),
    Case(lambda: _ACC(class_axis=-1), many((N, 4, 4), axis=2), accuracy(2), "square, classes last"),
    Case(lambda: _ACC(class_axis=1), many((N, 4, 4)), accuracy(), "square, classes on 1"),
    Case(lambda: _ACC((1, 3)), many(), top(1, 3), "top 1 and 3"),
    Case(lambda: _ACC((2, 9)), many(label_shape=(N, 1)), lambda o, y: [*top(2)(o, y), 1.0], "more than there are"),
    Case(lambda: _ACC(3), many(), lambda o, y: top(3)(o, y)[0], "top 3"),
    Case(lambda: _ACC(ignore_index=2), with_ignored(many(), 2), accuracy(ignore=2), "ignored class"),
    Case(
        lambda: _ACC((1, 2), ignore_index=-1),
        with_ignored(many(), -1),
        lambda o, y: top(1, 2)(o[y != -1], y[y != -1]),
        "ignored, top 1 and 2",
    ),
    Case(_ACC, two(), lambda o, y: sk.accuracy_score(y, yes(o)), "probabilities"),
    Case(_ACC, two(1, 1), lambda o, y: sk.accuracy_score(y.flatten(), yes(o)), "column"),
    Case(lambda: _ACC(task="binary", threshold=0.8), two(2), lambda o, y: sk.accuracy_score(y, yes(o[:, 1], 0.8))),
    Case(
        lambda: _ACC(threshold=0.8, from_logits=True),
        two(1, logits=True),
        lambda o, y: sk.accuracy_score(y, yes(o.sigmoid(), 0.8)),
        "logits",
    ),
    Case(
        lambda: _ACC(task="multilabel"),
        multi_hot,
        by_torchmetrics(lambda: tc.MultilabelAccuracy(4, average="micro")),
        "multilabel",
    ),
    Case(
        lambda: _ACC(task="multilabel", ignore_index=-1),
        with_ignored(multi_hot, -1),
        by_torchmetrics(lambda: tc.MultilabelAccuracy(4, average="micro", ignore_index=-1)),
        "multilabel ignored",
    ),
    *(Case(kind, two(1), by_sklearn(function, "binary"), "binary") for kind, function in _SCORES),
    *(
        Case(
            lambda kind=kind: kind(from_logits=True, ignore_index=-1),
            with_ignored(two(2, logits=True), -1),
            lambda o, y, f=function: f(y[y >= 0], yes((o[:, 1] - o[:, 0])[y >= 0], 0.0)),
            "binary logits ignored",
        )
        for kind, function in _SCORES
    ),
    *(
        Case(
            lambda kind=kind, average=average: kind(average, num_classes=7),
            sparse,
            by_sklearn(function, average),
            average,
        )
        for kind, function in _SCORES
        for average in _AVERAGES
    ),
    Case(
        lambda: hm.F1("macro", num_classes=5, ignore_index=0),
        with_ignored(many((N, 5, 4)), 0),
        by_torchmetrics(lambda: tc.MulticlassF1Score(5, average="macro", ignore_index=0)),
        "macro ignored",
    ),
    Case(thresholded("ROC"), two(), area(sk.roc_auc_score), "ROC"),
    Case(thresholded("ROC"), two(2, 1), area(sk.roc_auc_score), "ROC two columns"),
    Case(thresholded("PR"), two(1), area(sk.average_precision_score), "PR"),
    Case(lambda: hm.Auc(from_logits=True), two(2, logits=True), area_of_logits(sk.roc_auc_score), tolerance=1e-3),
    Case(
        lambda: hm.Auc("PR", from_logits=True),
        two(logits=True),
        area_of_logits(sk.average_precision_score),
        "PR logits",
        tolerance=1e-3,
    ),
    Case(lambda: hm.Auc(exact=True), two(1), area(sk.roc_auc_score), "ROC exact"),
    Case(lambda: hm.Auc("PR", exact=True), two(2), area(sk.average_precision_score), "PR exact"),
    Case(lambda: hm.Auc(exact=True), two(steps=8), area(sk.roc_auc_score), "ROC exact ties"),
    Case(lambda: hm.Auc(exact=True), two(logits=True), area(sk.roc_auc_score), "ROC exact logits"),
    Case(hm.MSE, numbers(), lambda o, y: sk.mean_squared_error(np_(y), np_(o))),
    Case(hm.MSE, numbers((N, 3, 2)), lambda o, y: sk.mean_squared_error(np_(y).ravel(), np_(o).ravel()), "[N, 3, 2]"),
    Case(hm.MAE, numbers((N, 1), (N,)), lambda o, y: sk.mean_absolute_error(np_(y), np_(o).ravel()), "column"),
    Case(hm.MAE, lambda: (scores((N, 5)).half(), scores((N, 5)) + 1), lambda o, y: 1.0, "float16 and float32"),
    Case(hm.R2, numbers(), lambda o, y: sk.r2_score(np_(y), np_(o))),
    Case(hm.R2, numbers((N, 1), (N,), shift=1e4), lambda o, y: sk.r2_score(np_(y), np_(o).ravel()), "far from 0"),
    Case(lambda: hm.R2(num_outputs=3), numbers((N, 3)), lambda o, y: sk.r2_score(np_(y), np_(o)), "three columns"),
    Case(hm.Mean, numbers((N, 3)), lambda o, y: np_(o).mean()),
    Case(lambda: hm.Mean(lambda o, y: (o - y).abs().mean(), "gap"), numbers(), lambda o, y: np.abs(np_(o - y)).mean()),
    Case(
        lambda: hm.FunctionMetric(torch.nn.functional.mse_loss),
        numbers(),
        lambda o, y: sk.mean_squared_error(np_(y), np_(o)),
        "scalar",
    ),
    Case(
        lambda: hm.FunctionMetric(lambda o, y: (o - y).abs().amax(1), "worst"),
        numbers((N, 3)),
        lambda o, y: np.abs(np_(o - y)).max(1).mean(),
        "per row",
    ),
    Case(hm.Perplexity, many((N, 6)), perplexity(1), "[N, C]"),
    Case(hm.Perplexity, many((N, 4, 6), axis=2), perplexity(2), "classes last"),
    Case(hm.Perplexity, with_ignored(many((N, 6, 4)), -100), perplexity(1), "classes on 1, padding"),
    Case(
        lambda: hm.Perplexity(0, class_axis=-1),
        with_ignored(many((N, 4, 4), axis=2), 0),
        perplexity(2, 0),
        "square",
    ),
    *(
        Case(
            lambda normalize=normalize: hm.ConfusionMatrix(7, normalize),
            sparse,
            lambda o, y, normalize=normalize: sk.confusion_matrix(*kept(o, y), labels=range(7), normalize=normalize),
            str(normalize),
        )
        for normalize in (None, "true", "pred", "all")
    ),
    Case(
        lambda: hm.ConfusionMatrix(5, ignore_index=-1),
        with_ignored(many((N, 5, 4)), -1),
        lambda o, y: sk.confusion_matrix(*kept(o, y, 1, -1), labels=range(5)),
        "ignored",
    ),
    wrapped(lambda: tc.MulticlassAccuracy(5), many(), "long sums"),
    wrapped(lambda: tc.MulticlassConfusionMatrix(5), many(), "array result"),
    wrapped(lambda: tc.BinaryAUROC(thresholds=None), two(), "lists"),
    wrapped(lambda: tc.BinaryAveragePrecision(thresholds=20), two(), "binned"),
    wrapped(torchmetrics.MeanSquaredError, numbers(), "float sums"),
    wrapped(torchmetrics.R2Score, numbers(), "r2"),
    wrapped(torchmetrics.PearsonCorrCoef, numbers(), "not reduced"),
    wrapped(lambda: torchmetrics.PearsonCorrCoef(num_outputs=2), numbers((N, 2)), "not reduced, two columns"),
    wrapped(torchmetrics.SpearmanCorrCoef, numbers(), "lists of rows"),
    wrapped(lambda: torchmetrics.image.PeakSignalNoiseRatio(5.0), numbers((N, 3, 4, 4)), "mean over ranks"),
    wrapped(
        lambda: torchmetrics.wrappers.ClasswiseWrapper(tc.MulticlassAccuracy(3, average=None)), many((N, 3)), "dict"
    ),
    wrapped(lambda: torchmetrics.MeanSquaredError() + 2 * torchmetrics.MeanAbsoluteError(), numbers(), "sum of two"),
]


def close(found: Any, expected: Any, tolerance: float) -> None:
    """Fail unless the numbers agree."""
    found, expected = np.asarray(found, dtype=float), np.asarray(expected, dtype=float)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance * 1e-3)
    assert not math.isnan(float(np.sum(found)))
