"""Every metric of the package: one process == uneven ranks == batches == another library, and no wait in update."""

from __future__ import annotations

import copy
import importlib
import inspect
import pkgutil

import numpy as np
import pytest
import torch

import hapi.metrics
from hapi.metrics import Metric
from tests.metrics.cases import CASES, Case, N, close
from tests.metrics.contract import WAITS, bind, merge, rows

each_case = pytest.mark.parametrize("case", CASES, ids=str)
ours = pytest.mark.parametrize("case", [case for case in CASES if not case.waits], ids=str)


def _metric_classes() -> set[type[Metric]]:
    found = set()
    for info in pkgutil.iter_modules(hapi.metrics.__path__, "hapi.metrics."):
        for _, value in inspect.getmembers(importlib.import_module(info.name), inspect.isclass):
            if issubclass(value, Metric) and value is not Metric and not value.__name__.startswith("_"):
                found.add(value)
    return found


def test_every_metric_has_a_case() -> None:
    assert _metric_classes() == {type(case.make()) for case in CASES}


def test_every_metric_is_exported() -> None:
    assert {cls.__name__ for cls in _metric_classes()} <= set(hapi.metrics.__all__)


@each_case
def test_one_process(case: Case) -> None:
    metric, data = case.make(), case.data()
    metric.update(*data)
    result = metric.accumulate()
    close(result, case.expected(*data), case.tolerance)
    names = metric.name()
    if isinstance(names, list):
        assert len(names) == len(result) == len(set(names))


@each_case
def test_three_uneven_ranks_one_of_them_empty(case: Case) -> None:
    data = case.data()
    shards = [bind(case.make()) for _ in range(3)]
    for start, stop in ((0, 40), (40, 62)):
        shards[0].update(*rows(data, start, stop))
    shards[2].update(*rows(data, 62, N))
    close(shards[1].compute(merge(shards)), case.expected(*data), case.tolerance)
    for shard in shards:
        assert shard.buffer[0] == shard.buffer[-1] == 7.0


@each_case
def test_bound_states_stay_in_the_engines_memory(case: Case) -> None:
    metric, data = bind(case.make()), case.data()
    begin = metric.buffer.data_ptr()
    end = begin + metric.buffer.numel() * metric.buffer.element_size()
    metric.update(*data)
    close(metric.accumulate(), case.expected(*data), case.tolerance)
    metric.reset()
    for name, spec in metric.specs.items():
        if spec.reduce == "sum":
            assert begin <= metric.state[name].data_ptr() < end


@each_case
def test_batches_do_not_matter(case: Case) -> None:
    metric, data = case.make(), case.data()
    for start in range(0, N, 17):
        metric.update(*rows(data, start, start + 17))
        metric.accumulate()  # a read in between changes nothing
    close(metric.accumulate(), case.expected(*data), case.tolerance)


@ours
def test_an_empty_batch_changes_nothing(case: Case) -> None:
    metric, data = case.make(), case.data()
    metric.update(*data)
    metric.update(*rows(data, 0, 0))
    close(metric.accumulate(), case.expected(*data), case.tolerance)


@each_case
def test_reset(case: Case) -> None:
    metric, data = case.make(), case.data()
    fresh = copy.deepcopy(merge([case.make()]))
    metric.update(*rows(data, 0, 30))
    metric.reset()
    after = merge([metric])
    assert fresh.keys() == after.keys()
    for name, value in fresh.items():
        torch.testing.assert_close(after[name], value)
    metric.update(*data)
    close(metric.accumulate(), case.expected(*data), case.tolerance)


@each_case
def test_deepcopy_is_independent(case: Case) -> None:
    metric, data = case.make(), case.data()
    metric.update(*rows(data, 0, 50))
    before = metric.accumulate()
    twin = copy.deepcopy(metric)
    twin.update(*rows(data, 50, N))
    close(twin.accumulate(), case.expected(*data), case.tolerance)
    np.testing.assert_equal(metric.accumulate(), before)


@ours
def test_update_does_not_wait_for_the_device(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(*_: object, **__: object) -> None:
        raise AssertionError("update waited for the device")

    metric, data = bind(case.make()), case.data()
    with monkeypatch.context() as patch:
        for method in WAITS:
            patch.setattr(torch.Tensor, method, wait)
        metric.update(*data)
        with pytest.raises(AssertionError, match="waited"):
            bool(data[0].sum() > 0)
    close(metric.accumulate(), case.expected(*data), case.tolerance)


@ours
def test_update_needs_no_values(case: Case) -> None:
    """A meta tensor has a shape and no values: whatever asks for one, in Python or below, fails."""
    metric = case.make()
    metric.update(*(tensor.to("meta") for tensor in case.data()))
    assert all(state.is_meta for state in metric.state.values())


@ours
def test_update_keeps_no_graph(case: Case) -> None:
    metric, (output, label) = case.make(), case.data()
    metric.update(output.clone().requires_grad_(), label)
    assert not any(state.requires_grad for state in metric.state.values())
    assert not any(row.requires_grad for part in metric.lists.values() for row in part)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@ours
def test_on_a_gpu_without_synchronisation(case: Case) -> None:
    metric, data = case.make(), case.data()
    moved = [tensor.cuda() for tensor in data]
    metric._to(moved[0].device)
    metric.update(*(tensor[:1] for tensor in moved))  # start up what starts with a wait
    metric.reset()
    torch.cuda.set_sync_debug_mode("error")
    try:
        metric.update(*moved)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    close(metric.accumulate(), case.expected(*data), case.tolerance)
