"""``hapi.tune``: what it tries, what it takes, what it prints, and that it leaves no trace."""

from __future__ import annotations

import copy
import math
import os
import random
import shutil
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import hapi
from hapi import tune as tune_function
from hapi.tune import Measured, Tuned
from tests.helpers.nets import blobs, mlp, same_weights
from tests.helpers.ranks import RankError, run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")

X, Y = blobs(64)


def prepared(net: nn.Module, **options: Any) -> hapi.Model:
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    return hapi.Model(net, device="cpu").prepare(optimizer, nn.CrossEntropyLoss(), "accuracy", **options)


def by_switch(result: Tuned) -> dict[str, Measured]:
    return {row.switch: row for row in result.measured}


class Heavy(nn.Module):
    """Many small parameters, so that the default optimizer's loop is most of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 3)
        self.rest = nn.ParameterList([nn.Parameter(torch.zeros(2)) for _ in range(200)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) + sum(p.sum() for p in self.rest)


@pytest.fixture
def one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither threads nor processes are tried, nor a compiler."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0}, raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)


@pytest.mark.usefixtures("one_core")
def test_it_finds_what_is_faster_and_prints_what_to_paste(capsys: pytest.CaptureFixture[str]) -> None:
    model = prepared(Heavy())
    result = tune_function(model, (X, Y), batch_size=16, tolerance=1e-3, seconds=3.0)
    assert result.arguments["prepare"] == {"fused": True}
    row = by_switch(result)["fused=True"]
    assert row.taken
    assert row.ratio <= 0.97
    assert row.after < row.before
    assert 0 <= row.difference <= 1e-3
    assert "model.prepare(..., fused=True)" in str(result)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split() == ["switch", "ms", "before", "ms", "after", "ratio", "difference"]
    assert any(line.startswith("fused=True") and line.endswith("taken") for line in printed)
    assert printed[-1].startswith("model.prepare(..., fused=True)")
    # The arguments are those of the two calls.
    model.prepare(torch.optim.Adam(model.parameters()), "cross_entropy", **result.arguments["prepare"])
    model.fit((X, Y), batch_size=16, verbose=0, **result.arguments["fit"])


def test_without_a_tolerance_only_what_keeps_every_bit_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 3))
    images = torch.randn(32, 1, 8, 8), torch.randint(0, 3, (32,))
    result = tune_function(prepared(net), images, batch_size=8, seconds=0.5, verbose=0)
    rows = by_switch(result)
    for name in ("fused=True", "channels_last=True", "compile=True", "compile='eval'"):
        assert "give tolerance" in rows[name].why
        assert math.isnan(rows[name].ratio)
    assert result.arguments["prepare"] == {}
    assert all(row.difference == 0 for row in result.measured if row.taken)
    assert capsys.readouterr().out == ""


@pytest.mark.usefixtures("one_core")
def test_nothing_is_left_behind() -> None:
    net = mlp(dropout=0.2)
    net[0].eval()  # somebody's frozen part
    model = prepared(net)
    model.fit((X, Y), batch_size=16, verbose=0, seed=0)
    torch.manual_seed(3)
    weights, modes = copy.deepcopy(net.state_dict()), [module.training for module in net.modules()]
    assert model._optimizer is not None
    state, progress = copy.deepcopy(model._optimizer.state_dict()), copy.deepcopy(model._progress)
    draws = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    generator = torch.Generator().manual_seed(1)
    loader = DataLoader(TensorDataset(X, Y), batch_size=16, shuffle=True, generator=generator)
    before, threads = generator.get_state(), torch.get_num_threads()

    result = tune_function(model, loader, tolerance=1.0, seconds=0.5, verbose=0)
    assert by_switch(result)["fused=True"].difference < 1e-3

    assert all(torch.equal(weights[name], value) for name, value in net.state_dict().items())
    assert [module.training for module in net.modules()] == modes
    after = model._optimizer.state_dict()
    assert str(after) == str(state)
    assert all(p.grad is None for p in net.parameters())
    assert model._progress == progress
    assert random.getstate() == draws[0]
    assert np.array_equal(np.random.get_state()[1], draws[1])
    assert torch.equal(torch.get_rng_state(), draws[2])
    assert torch.equal(generator.get_state(), before)
    assert torch.get_num_threads() == threads
    # And training goes on as if nothing had been.
    twin = mlp(dropout=0.2)
    twin[0].eval()
    other = prepared(twin)
    other.fit((X, Y), batch_size=16, verbose=0, seed=0)
    torch.manual_seed(3)
    other.fit((X, Y), batch_size=16, verbose=0, seed=0)
    torch.set_rng_state(draws[2])
    model.fit((X, Y), batch_size=16, verbose=0, seed=0)
    assert same_weights(twin, net)


class Samples(Dataset[Any]):
    """Read sample by sample."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return X[index], Y[index]


@pytest.mark.slow
def test_reader_processes_are_tried_for_a_dataset_and_keep_every_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    rows = by_switch(tune_function(prepared(mlp()), Samples(), batch_size=8, seconds=0.1, verbose=0))
    assert rows["num_workers=2"].difference == 0
    assert rows["num_workers=2"].after > 0


@pytest.mark.usefixtures("one_core")
def test_a_difference_above_the_tolerance_is_not_taken() -> None:
    result = tune_function(prepared(Heavy()), (X, Y), batch_size=16, tolerance=1e-30, seconds=0.5, verbose=0)
    row = by_switch(result)["fused=True"]
    assert row.difference > 1e-30
    assert row.ratio < 0.97
    assert not row.taken
    assert result.arguments["prepare"] == {}


@pytest.mark.usefixtures("one_core")
def test_what_is_not_possible_or_out_of_time_says_so() -> None:
    net = mlp()
    model = hapi.Model(net, device="cpu").prepare(torch.optim.RMSprop(net.parameters()), "cross_entropy")
    rows = by_switch(tune_function(model, (X, Y), batch_size=16, tolerance=1e-3, seconds=5.0, verbose=0))
    assert rows["fused=True"].why.startswith("not possible: prepare: fused=True: RMSprop has no fused kernels")
    assert "C++ compiler" in rows["compile=True"].why
    rows = by_switch(tune_function(model, (X, Y), batch_size=16, tolerance=1e-3, seconds=1e-9, verbose=0))
    assert all("give more seconds" in row.why for row in rows.values())


@pytest.mark.usefixtures("one_core")
def test_master_weights_and_half_precision_are_copied_too() -> None:
    net = mlp()
    model = prepared(net, amp={"level": "O2", "dtype": "bf16"})
    weights = copy.deepcopy(net.state_dict())
    rows = by_switch(tune_function(model, (X, Y), batch_size=16, tolerance=0.1, seconds=0.5, verbose=0))
    assert rows["fused=True"].difference < 0.05
    assert all(torch.equal(weights[name], value) for name, value in net.state_dict().items())


def test_mistakes() -> None:
    model = prepared(mlp())
    with pytest.raises(TypeError, match=r"accepted: a hapi\.Model"):
        tune_function(mlp(), (X, Y))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="can be read only once"):
        tune_function(model, iter([(X, Y)]))
    with pytest.raises(ValueError, match="tolerance must be a number above 0"):
        tune_function(model, (X, Y), tolerance=-1.0)
    with pytest.raises(ValueError, match="seconds must be a number above 0"):
        tune_function(model, (X, Y), seconds=0)
    with pytest.raises(RuntimeError, match="tune: call prepare"):
        tune_function(hapi.Model(mlp()), (X, Y))
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        tune_function(model, (torch.randn(8, 5), Y[:8]), verbose=0)


def _tune_on_a_rank() -> None:
    hapi.tune(prepared(mlp()), (X, Y), verbose=0)


@pytest.mark.ranks
def test_several_ranks_are_refused() -> None:
    with pytest.raises(RankError, match="tune: runs on one process"):
        run_ranks(_tune_on_a_rank, 2)
