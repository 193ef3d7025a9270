"""``prepare(fused=...)``: torch's fused kernels for an optimizer, switched on and off with its state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

import hapi
from tests.helpers.nets import blobs, mlp, weight_gap

X, Y = blobs(64)
# After 16 steps of float32; the kernels round in another order.
TOLERANCE = 1e-5

KINDS: dict[str, Callable[[Any], Optimizer]] = {
    "adam": lambda p: Adam(p, 1e-2, amsgrad=True),
    "adamw": lambda p: AdamW(p, 1e-2),
    "sgd": lambda p: SGD(p, 0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda p: Adagrad(p, 0.1),
}


def prepared(net: nn.Module, optimizer: Any, **options: Any) -> hapi.Model:
    return hapi.Model(net, device="cpu").prepare(optimizer, nn.CrossEntropyLoss(), **options)


def train(model: hapi.Model, epochs: int = 1) -> None:
    model.fit((X, Y), batch_size=8, epochs=epochs, shuffle=False, verbose=0)


def flags(optimizer: Optimizer) -> set[bool]:
    return {bool(group.get("fused")) for group in optimizer.param_groups}


def calls_of_fused_kernels(model: hapi.Model) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model.train_batch(X[:8], Y[:8])
    return sum("_fused" in event.key for event in profile.key_averages())


@pytest.mark.parametrize("kind", KINDS)
def test_a_given_instance_takes_the_fused_kernels_and_stays_within_tolerance(kind: str) -> None:
    plain, fused = mlp(), mlp()
    ordinary, mine = KINDS[kind](plain.parameters()), KINDS[kind](fused.parameters())
    train(prepared(plain, ordinary), 2)
    model = prepared(fused, mine, fused=True)
    train(model, 2)
    assert weight_gap(plain.state_dict(), fused.state_dict()) < TOLERANCE
    assert flags(mine) == {True}
    assert calls_of_fused_kernels(model) > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("back", [False, True])
def test_it_can_be_switched_after_steps_and_the_state_goes_on(kind: str, back: bool) -> None:
    plain, changed = mlp(), mlp()
    ordinary, mine = KINDS[kind](plain.parameters()), KINDS[kind](changed.parameters())
    train(prepared(plain, ordinary), 2)
    train(prepared(changed, mine, fused=back))
    model = prepared(changed, mine, fused=not back)
    train(model)
    assert weight_gap(plain.state_dict(), changed.state_dict()) < TOLERANCE
    assert (calls_of_fused_kernels(model) > 0) is not back


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_fits_either_way(kind: str, first: bool, tmp_path: Path) -> None:
    whole, net = mlp(), mlp()
    train(prepared(whole, KINDS[kind](whole.parameters())), 2)
    begun = prepared(net, KINDS[kind](net.parameters()), fused=first)
    train(begun)
    begun.save(tmp_path / "half")

    other = mlp(seed=5)
    optimizer = KINDS[kind](other.parameters())
    model = prepared(other, optimizer, fused=not first)
    model.load(tmp_path / "half")
    assert flags(optimizer) == {not first}, "how it computes is the optimizer's choice, not the file's"
    train(model)
    assert weight_gap(whole.state_dict(), other.state_dict()) < TOLERANCE
    assert (calls_of_fused_kernels(model) > 0) is not first


def test_instances_are_left_alone_and_names_are_fused_unless_told() -> None:
    net = mlp()
    optimizer = Adam(net.parameters())
    assert calls_of_fused_kernels(prepared(net, optimizer)) == 0
    assert flags(optimizer) == {False}
    for name in ("adam", "adamw", "sgd", "adagrad"):
        assert calls_of_fused_kernels(prepared(mlp(), name)) > 0, name
        assert calls_of_fused_kernels(prepared(mlp(), name, fused=False)) == 0, name
    prepared(mlp(), "rmsprop")  # a name without fused kernels is no error


def test_names_without_fused_kernels_for_the_network_are_not_fused() -> None:
    sparse = nn.Sequential(nn.Embedding(9, 8, sparse=True), nn.Flatten(), nn.Linear(16, 3))
    model = prepared(sparse, "sgd")
    model.train_batch(torch.randint(0, 9, (4, 2)), Y[:4])


def test_a_gradient_scaler_knows_of_the_kernels() -> None:
    net = mlp()
    model = prepared(net, Adam(net.parameters()), amp={"init_loss_scaling": 8.0, "dtype": "bf16"}, fused=True)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    train(model)
    assert weight_gap(before, net.state_dict()) > 0


COMPLEX = nn.Parameter(torch.zeros(2, dtype=torch.complex64))


class Mine(Adam):
    """Somebody's own variant."""


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda net: RMSprop(net.parameters()), "RMSprop has no fused kernels; accepted: .*'Adam', 'AdamW', 'SGD'"),
        (lambda net: "rmsprop", "RMSprop has no fused kernels"),
        (lambda net: Mine(net.parameters()), "Mine has no fused kernels"),
        (lambda net: Adam(net.parameters(), foreach=True), "built with foreach=True"),
        (lambda net: SGD(net.parameters(), 0.1, differentiable=True), "built with differentiable=True"),
        (lambda net: Adam([*net.parameters(), COMPLEX]), "no fused Adam for torch.complex64 on cpu"),
    ],
)
def test_what_has_no_fused_kernels_is_refused(make: Any, words: str) -> None:
    net = mlp()
    with pytest.raises(ValueError, match=words):
        prepared(net, make(net), fused=True)


def test_wrong_words_are_refused() -> None:
    with pytest.raises(TypeError, match="accepted: True, False or None"):
        prepared(mlp(), "adam", fused="yes")
    with pytest.raises(ValueError, match="without an optimizer"):
        hapi.Model(mlp()).prepare(fused=True)
    sparse = nn.Sequential(nn.Embedding(9, 8, sparse=True))
    with pytest.raises(ValueError, match="sparse gradients"):
        prepared(sparse, "adam", fused=True)
