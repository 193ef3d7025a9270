"""EMA and SWA: the average itself, what evaluations see, what files hold, and what is left after the fit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import hapi
from hapi.callbacks import EMA, SWA, Callback, EarlyStopping
from tests.helpers.nets import blobs, mlp, same_weights
from tests.helpers.ranks import run_ranks

X, Y = blobs(50)


def norm_net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def prepared(net: nn.Module, lr: float = 0.1, **options: Any) -> hapi.Model:
    return hapi.Model(net).prepare(
        torch.optim.SGD(net.parameters(), lr, momentum=0.9), "cross_entropy", "acc", **options
    )


def fit(model: hapi.Model, *callbacks: Callback, **options: Any) -> hapi.callbacks.History:
    how: dict[str, Any] = {"batch_size": 8, "epochs": 3, "verbose": 0, "shuffle": False}
    return model.fit((X, Y), callbacks=list(callbacks), **{**how, **options})


def by_hand(net: nn.Module, average: AveragedModel, *, every_step: bool, first: int = 0, epochs: int = 3) -> None:
    """The loop of torch's own documentation."""
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    for epoch in range(epochs):
        net.train()
        for begin in range(0, 50, 8):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(X[begin : begin + 8]), Y[begin : begin + 8]).backward()
            optimizer.step()
            if every_step:
                average.update_parameters(net)
        if not every_step and epoch >= first:
            average.update_parameters(net)


def test_ema_is_torchs() -> None:
    net = norm_net()
    reference = copy.deepcopy(net)
    average = AveragedModel(reference, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    by_hand(reference, average, every_step=True)
    fit(prepared(net), EMA(0.9))
    left, right = net.state_dict(), average.module.state_dict()
    for name, value in left.items():
        if value.is_floating_point():
            torch.testing.assert_close(value, right[name], rtol=1e-6, atol=1e-7)
    assert int(left["1.num_batches_tracked"]) == 21


def test_training_itself_is_not_changed() -> None:
    plain, averaged = mlp(), mlp()
    fit(prepared(plain))
    history = fit(prepared(averaged), EMA(0.9, apply=False), eval_data=(X, Y))
    assert same_weights(plain, averaged)
    assert len(history.history["eval_loss"]) == 3


class Keeps(Callback):
    """The trained weights after each epoch's steps."""

    def on_train_begin(self, logs: Any = None) -> None:
        self.weights: list[dict[str, torch.Tensor]] = []

    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        if step == 6:
            self.weights.append(copy.deepcopy(self.run.network.state_dict()))


def test_evaluations_see_the_average() -> None:
    net, keeps = mlp(), Keeps()
    history = fit(prepared(net), EMA(0.95), keeps, eval_data=(X, Y))
    other = prepared(mlp())
    other.network.load_state_dict(net.state_dict())  # applied: the average of the end
    assert history.history["eval_loss"][-1] == other.evaluate((X, Y), batch_size=8, verbose=0)["loss"]
    other.network.load_state_dict(keeps.weights[-1])
    assert history.history["eval_loss"][-1] != other.evaluate((X, Y), batch_size=8, verbose=0)["loss"]

    history = fit(prepared(mlp()), EMA(0.95, evaluate=False), eval_data=(X, Y))
    assert history.history["eval_loss"][-1] == other.evaluate((X, Y), batch_size=8, verbose=0)["loss"]


def test_update_every_and_warmup() -> None:
    decays: list[float] = []
    original = torch._foreach_lerp_

    def spy(averages: Any, weights: Any, share: float) -> None:
        decays.append(1 - share)
        original(averages, weights, share)

    torch._foreach_lerp_ = spy  # type: ignore[assignment]
    try:
        fit(prepared(mlp()), EMA(0.3, update_every=4, warmup=True))
    finally:
        torch._foreach_lerp_ = original  # type: ignore[assignment]
    # 21 steps: 5 updates, the first of which copies.
    assert decays == pytest.approx([2 / 11, 3 / 12, 0.3, 0.3])


def test_files_hold_the_average_and_resuming_goes_on_with_the_weights(tmp_path: Path) -> None:
    class Dies(Callback):
        def on_train_batch_end(self, step: int, logs: Any = None) -> None:
            if self.run.progress.global_step == 12:
                raise KeyError("killed")

    whole = mlp()
    expected = fit(prepared(whole), EMA(0.9), eval_data=(X, Y), seed=1, shuffle=True)
    how: dict[str, Any] = {"save_dir": tmp_path, "save_every_n_steps": 5, "resume": "auto", "seed": 1, "shuffle": True}
    with pytest.raises(KeyError):
        fit(prepared(mlp()), EMA(0.9), Dies(), eval_data=(X, Y), **how)
    net = mlp()
    history = fit(prepared(net), EMA(0.9), eval_data=(X, Y), **how)
    assert same_weights(net, whole)
    assert history.history == expected.history
    # The last checkpoint's weights are the average, which the network has now, too.
    other = mlp(seed=5)
    other.load_state_dict(torch.load(tmp_path / "final.pt", weights_only=True))
    assert same_weights(other, whole)
    state = torch.load(tmp_path / "final.state.pt", weights_only=True)
    assert not torch.equal(state["trained"]["0.weight"], whole.state_dict()["0.weight"])
    # A finished run goes on with the weights that were trained, for more epochs.
    longer, more = mlp(), mlp()
    fit(prepared(longer), EMA(0.9), seed=1, shuffle=True, epochs=5)
    fit(prepared(more), EMA(0.9), epochs=5, **how)
    assert same_weights(longer, more)


def test_without_save_the_files_hold_what_is_trained(tmp_path: Path) -> None:
    plain, net = mlp(), mlp()
    fit(prepared(plain))
    fit(prepared(net), EMA(0.9, save=False), save_dir=tmp_path)
    other = mlp(seed=5)
    other.load_state_dict(torch.load(tmp_path / "final.pt", weights_only=True))
    assert same_weights(other, plain)
    assert not same_weights(net, plain)


def test_the_best_weights_are_those_that_were_evaluated() -> None:
    net, seen = mlp(), []

    class Sees(Callback):
        def on_eval_end(self, logs: Any = None) -> None:
            seen.append(logs["loss"])

    stopping = EarlyStopping("loss", patience=10, restore_best_weights=True)
    model, wrong = prepared(net), (X, (Y + 1) % 3)  # what is learnt makes these worse
    fit(model, EMA(0.9), stopping, Sees(), eval_data=wrong, epochs=4)
    assert min(seen) < seen[-1]
    assert model.evaluate(wrong, batch_size=8, verbose=0)["loss"] == min(seen)


def test_a_second_fit_goes_on_with_the_same_average() -> None:
    ema, net = EMA(0.9, apply=False), mlp()
    model = prepared(net)
    fit(model, ema, epochs=1)
    fit(model, ema, epochs=2)
    once = EMA(0.9, apply=False)
    fit(prepared(mlp()), once, epochs=3)
    assert ema.network is not None
    assert once.network is not None
    assert same_weights(ema.network, once.network)


def test_swa_is_torchs() -> None:
    net = norm_net()
    reference = copy.deepcopy(net)
    average = AveragedModel(reference)
    by_hand(reference, average, every_step=False, first=1)
    update_bn([X[begin : begin + 8] for begin in range(0, 50, 8)], average)
    history = fit(prepared(net), SWA(start=1), eval_data=(X, Y))
    assert same_weights(net, average.module)
    assert history.history["eval_loss"][-1] == prepared(net).evaluate((X, Y), batch_size=8, verbose=0)["loss"]


def test_swa_leaves_training_and_its_random_numbers_alone() -> None:
    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 3))

    plain, averaged = net(), net()
    fit(prepared(plain), shuffle=True, seed=1)
    torch.manual_seed(0)
    net()
    fit(prepared(averaged), SWA(0.0, apply=False), shuffle=True, seed=1, eval_data=(X, Y))
    assert same_weights(plain, averaged)


def test_frozen_batchnorm_keeps_its_statistics() -> None:
    net = norm_net()
    net[1].eval()
    before = net[1].running_mean.clone()
    fit(prepared(net), SWA(0.5))
    assert torch.equal(net[1].running_mean, before)


@pytest.mark.parametrize(("anneal", "rates"), [("linear", [0.1, 0.1, 0.1, 0.06, 0.02, 0.02]), ("cos", None)])
def test_swa_anneals_the_rate(anneal: str, rates: Any) -> None:
    history = fit(prepared(mlp()), SWA(start=2, lr=0.02, anneal=anneal, anneal_epochs=2), epochs=6)
    found = history.history["lr"]
    assert found[:3] == [0.1, 0.1, 0.1]
    assert found[4:] == pytest.approx([0.02, 0.02])
    if rates:
        assert found == pytest.approx(rates)


def test_swa_resumes_with_the_same_rate_and_average(tmp_path: Path) -> None:
    class Dies(Callback):
        def on_train_batch_end(self, step: int, logs: Any = None) -> None:
            if self.run.progress.global_step == 24:
                raise KeyError("killed")

    def swa() -> SWA:
        return SWA(start=1, lr=0.01, anneal_epochs=3)

    whole = norm_net()
    expected = fit(prepared(whole), swa(), eval_data=(X, Y), epochs=5, seed=1, shuffle=True)
    how: dict[str, Any] = {"save_dir": tmp_path, "save_every_n_steps": 5, "resume": "auto", "seed": 1, "shuffle": True}
    with pytest.raises(KeyError):
        fit(prepared(norm_net()), swa(), Dies(), eval_data=(X, Y), epochs=5, **how)
    net = norm_net()
    history = fit(prepared(net), swa(), eval_data=(X, Y), epochs=5, **how)
    assert same_weights(net, whole)
    assert history.history == expected.history


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EMA(1.0), r"decay=1.0; accepted: a number from 0 to below 1"),
        (lambda: EMA(0.9, update_every=0), "update_every=0"),
        (lambda: EMA(0.9, evaluate=1), "evaluate=1; accepted: True or False"),
        (lambda: SWA(1.5), r"start=1.5; accepted: an epoch \(int\), or a share"),
        (lambda: SWA(-1), "start=-1"),
        (lambda: SWA(anneal="step"), "anneal='step'; accepted: 'cos', 'linear'"),
    ],
)
def test_wrong_arguments(make: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(ValueError, match="SWA: EMA averages the weights already"):
        fit(prepared(mlp()), EMA(), SWA())
    with pytest.raises(ValueError, match=r"SWA: lr=0.1 in a run with the scheduler LinearLR"):
        fit(prepared(mlp(), scheduler="linear"), SWA(lr=0.1))
    with pytest.raises(ValueError, match="EMA: the network's weights are bfloat16"):
        fit(prepared(mlp().bfloat16()), EMA())
    generator = ((X[i : i + 8], Y[i : i + 8]) for i in range(0, 48, 8))
    with pytest.raises(ValueError, match="SWA: BatchNorm's statistics are computed by reading the training data once"):
        prepared(norm_net()).fit(generator, verbose=0, callbacks=SWA(0.0))


def _averaged_on_ranks(kind: str) -> tuple[dict[str, torch.Tensor], Any]:
    net = norm_net() if kind == "swa" else mlp()
    net = net.double()
    callback: Callback = SWA(start=1, lr=0.05) if kind == "swa" else EMA(0.9)
    model = hapi.Model(net).prepare(torch.optim.SGD(net.parameters(), 0.1), "cross_entropy", "acc", sync_batchnorm=True)
    data = (X.double(), Y)
    history = model.fit(
        data, data, global_batch_size=16, epochs=3, verbose=0, shuffle=False, callbacks=callback, eval_freq=1
    )
    return net.state_dict(), history.history


@pytest.mark.parametrize("kind", ["ema", "swa"])
def test_ranks_end_with_the_same_average_as_one_process(kind: str) -> None:
    expected, history = _averaged_on_ranks(kind)
    for weights, told in run_ranks(_averaged_on_ranks, 2, kind):
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-9, atol=1e-10)
        assert told["eval_loss"] == pytest.approx(history["eval_loss"], rel=1e-9)
