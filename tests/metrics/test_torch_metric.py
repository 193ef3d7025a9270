"""torchmetrics under hapi's reduction."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torchmetrics
import torchmetrics.classification as tc
from torch import Tensor

from hapi.metrics import Accuracy, TorchMetric, as_metric
from hapi.metrics.adapters import expand
from tests.metrics.contract import bind, merge, rows


class Extremes(torchmetrics.Metric):
    """States that no metric of torchmetrics has together."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("low", torch.tensor(100), dist_reduce_fx="min")
        self.add_state("high", torch.tensor(-100), dist_reduce_fx="max")
        self.add_state("count", torch.tensor(10), dist_reduce_fx="sum")
        self.add_state("any", torch.tensor(False), dist_reduce_fx=lambda ranks: ranks.any(0))
        self.add_state("first", torch.zeros(2), dist_reduce_fx="mean")
        self.add_state("parts", [], dist_reduce_fx=None)

    def update(self, values: Tensor) -> None:
        self.low = torch.minimum(self.low, values.min())
        self.high = torch.maximum(self.high, values.max())
        self.count = self.count + values.numel()
        self.any = self.any | (values == 7).any()
        self.first = self.first + values[:2].float()
        self.parts.append(values.reshape(-1, 1))
        self.parts.append(values.sum())

    def compute(self) -> Any:
        kinds = [self.low.dtype, self.high.dtype, self.count.dtype, self.any.dtype, self.first.dtype]
        assert kinds == [torch.int64, torch.int64, torch.int64, torch.bool, torch.float32]
        shapes = [list(part.shape) for part in self.parts]
        return self.low, self.high, self.count, self.any, self.first, torch.tensor(shapes and [len(shapes)] * 2)


def test_every_kind_of_state_over_ranks() -> None:
    ranks = [bind(TorchMetric(Extremes())) for _ in range(3)]
    ranks[0].update(torch.tensor([3, 5]))
    ranks[2].update(torch.tensor([7, 1, 2]))
    low, high, count, seen, first, parts = ranks[1].compute(merge(ranks))
    # The start of a sum counts once; a rank without data does not pull a mean to its start.
    assert (low, high, count, seen, first.tolist(), parts.tolist()) == (1, 7, 15, True, [5.0, 3.0], [4, 4])


def test_rows_of_lists_keep_their_shapes_and_types() -> None:
    ranks = [TorchMetric(Extremes()) for _ in range(2)]
    ranks[1].update(torch.tensor([7, 1, 2]))
    ranks[0].update(torch.tensor([4, 4]))
    seen: list[Any] = []
    ranks[0].metric.compute = lambda: seen.extend(ranks[0].metric.parts) or torch.tensor(0)
    ranks[0].compute(merge(ranks))
    assert [part.tolist() for part in seen] == [[[4], [4]], 8, [[7], [1], [2]], 10]
    assert {part.dtype for part in seen} == {torch.int64}
    assert len(ranks[0].metric.parts) == 2  # lent for the length of compute only


@pytest.mark.filterwarnings("ignore:The variance of predictions")  # about what was computed, not when
def test_no_data_gives_torchmetrics_own_result_without_a_warning() -> None:
    for make in (torchmetrics.MeanSquaredError, lambda: tc.MulticlassAccuracy(3), torchmetrics.PearsonCorrCoef):
        plain = make()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = plain.compute().numpy()
        ranks = [bind(TorchMetric(make())) for _ in range(2)]
        np.testing.assert_equal(np.float32(ranks[0].compute(merge(ranks))), expected)
        np.testing.assert_equal(np.float32(ranks[0].accumulate()), expected)


@pytest.fixture
def group(tmp_path: Any) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("options", [{}, {"dist_sync_on_step": True}], ids=str)
def test_torchmetrics_starts_no_collective(options: dict[str, bool]) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("torchmetrics synchronised by itself")

    def make() -> Any:
        return torchmetrics.MeanSquaredError(dist_sync_fn=refuse, distributed_available_fn=lambda: True, **options)

    data = torch.tensor([1.0, 3.0]), torch.tensor([1.0, 1.0])
    plain = make()
    plain.update(*data)
    with pytest.raises(AssertionError, match=r"synchronised"):
        plain.compute()
    for inner in (make(), make() + make(), torchmetrics.wrappers.Running(make())):
        metric = TorchMetric(inner)
        metric.update(*data)
        assert metric.accumulate() > 0


def test_reading_does_not_disturb() -> None:
    inner = torchmetrics.MeanSquaredError()
    metric = TorchMetric(inner)
    metric.update(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 1.0]))
    other = TorchMetric(torchmetrics.MeanSquaredError())
    other.update(torch.tensor([9.0]), torch.tensor([1.0]))
    assert metric.compute(merge([metric, other])) == pytest.approx(68 / 3)
    assert metric.accumulate() == 2.0
    assert inner.compute().item() == 2.0  # nor is another result cached
    assert inner.update_count == 1


def test_a_compute_that_fails_leaves_the_states() -> None:
    metric = TorchMetric(tc.BinaryAUROC(thresholds=None))
    with pytest.raises(ValueError, match=r"No samples"):
        metric.accumulate()
    metric.update(torch.tensor([0.9, 0.1]), torch.tensor([1, 0]))
    assert metric.accumulate() == 1.0


def test_restore() -> None:
    data = torch.tensor([0.9, 0.1, 0.3]), torch.tensor([1, 0, 1])
    for make in (lambda: tc.BinaryAUROC(thresholds=None), torchmetrics.PearsonCorrCoef):
        metric = bind(TorchMetric(make()))
        metric.update(data[0], data[1].float() if metric.name() == "pearson_corr_coef" else data[1])
        before, saved = metric.accumulate(), copy.deepcopy(metric)
        metric.reset()
        metric.update(data[0].roll(1), data[1].float() if metric.name() == "pearson_corr_coef" else data[1])
        assert metric.accumulate() != before
        metric.reset()
        metric.restore(saved)
        assert metric.accumulate() == before


def test_names() -> None:
    assert TorchMetric(torchmetrics.MeanSquaredError()).name() == "mean_squared_error"
    assert TorchMetric(torchmetrics.Accuracy("multiclass", num_classes=3)).name() == "multiclass_accuracy"
    assert TorchMetric(torchmetrics.R2Score(), "r2").name() == "r2"


def test_a_dict_has_a_name_per_key() -> None:
    def make() -> Any:
        inner = tc.MulticlassRecall(2, average=None)
        return torchmetrics.wrappers.ClasswiseWrapper(inner, labels=["cat", "dog"])

    metric = TorchMetric(make())
    assert metric.name() == ["multiclassrecall_cat", "multiclassrecall_dog"]
    assert TorchMetric(make(), "r").name() == ["r_multiclassrecall_cat", "r_multiclassrecall_dog"]
    metric.update(torch.eye(2), torch.tensor([0, 0]))
    assert metric.accumulate() == [0.5, 0.0]


@pytest.mark.parametrize("fix", [{}, {"prefix": "val_"}, {"postfix": "_x"}], ids=str)
@pytest.mark.parametrize("warm", [False, True], ids=["new", "used"])
def test_collections(fix: dict[str, str], warm: bool) -> None:
    def make() -> Any:
        members = {"f1": tc.MulticlassF1Score(3), "auroc": tc.MulticlassAUROC(3, thresholds=None)}
        members |= {"accuracy": tc.MulticlassAccuracy(3), "ap": tc.MulticlassAveragePrecision(3, thresholds=None)}
        return torchmetrics.MetricCollection(members, **fix)

    rng = np.random.default_rng(0)
    data = torch.tensor(rng.random((60, 3)), dtype=torch.float32), torch.tensor(rng.integers(0, 3, 60))
    plain, mine = make(), make()
    plain.update(*data)
    expected = {name: value.item() for name, value in plain.compute().items()}
    if warm:  # the collection's members share their states from now on
        mine.update(*data)
    ranks = [list(expand(mine)), list(expand(make()))]
    assert [metric.name() for metric in ranks[0]] == list(expected)
    for metrics, (start, stop) in zip(ranks, ((0, 23), (23, 60)), strict=True):
        for metric in metrics:
            metric.update(*rows(data, start, stop))
    for one, other in zip(*ranks, strict=True):
        assert one.compute(merge([one, other])) == pytest.approx(expected[str(one.name())])
    assert [metric.name() for metric in as_metric(make())] == list(expected)


def test_a_sum_that_changes_its_shape_is_refused() -> None:
    class Growing(torchmetrics.Metric):
        def __init__(self) -> None:
            super().__init__()
            self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")

        def update(self, values: Tensor) -> None:
            self.total = self.total + values.sum(0)

        def compute(self) -> Tensor:
            return self.total

    metric = TorchMetric(Growing())
    metric.update(torch.ones(3, 2))
    with pytest.raises(ValueError, match=r"'growing' \(Growing\): its state 'total'.*\[\] to \[2\]"):
        metric.flush()


def test_what_is_not_made_of_tensors_is_refused() -> None:
    class Words(torchmetrics.Metric):
        def __init__(self) -> None:
            super().__init__()
            self.add_state("words", [], dist_reduce_fx=None)

        def update(self, word: str) -> None:
            self.words.append(word)

        def compute(self) -> dict[str, Tensor]:
            if not self.words:
                raise RuntimeError("nothing yet")
            return {word: torch.tensor(1.0) for word in self.words}

    metric = TorchMetric(Words())
    metric.update("a")
    with pytest.raises(TypeError, match=r"state 'words' holds a str; accepted: tensors"):
        metric.flush()
    metric.metric.words = [torch.tensor(1)]
    with pytest.raises(TypeError, match=r"result is a dict"):
        metric.accumulate()


@pytest.mark.parametrize("given", [Accuracy(), torchmetrics.MeanSquaredError, 3], ids=str)
def test_only_torchmetrics(given: Any) -> None:
    with pytest.raises(TypeError, match=r"torchmetrics.Metric instance"):
        TorchMetric(given)
