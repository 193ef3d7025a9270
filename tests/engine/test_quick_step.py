"""The optimizer's own step, without torch's wrapper only where nobody could tell."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile

from hapi.engine.quick_step import quick_step


def net_and(kind: Any = torch.optim.SGD, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    return net, kind(net.parameters(), lr=0.1, **options)


def backward(net: nn.Module) -> None:
    net.zero_grad()
    net(torch.ones(2, 3)).sum().backward()


def entered(optimizer: torch.optim.Optimizer, net: nn.Module) -> bool:
    """Whether a step goes through torch's wrapper, which the profiler would see."""
    calls: list[str] = []
    code = optimizer._optimizer_step_code
    optimizer._optimizer_step_code = lambda: calls.append("step")  # type: ignore[method-assign]
    try:
        backward(net)
        quick_step(optimizer)()
    finally:
        optimizer._optimizer_step_code = code  # type: ignore[method-assign]
    return bool(calls)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop])
def test_the_same_bits_without_the_wrapper(kind: Any) -> None:
    net, optimizer = net_and(kind)
    other = copy.deepcopy(net)
    reference = kind(other.parameters(), lr=0.1)
    step = quick_step(optimizer)
    for _ in range(3):
        backward(net)
        step()
        backward(other)
        reference.step()
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))
    assert not entered(optimizer, net)


def test_hooks_are_called() -> None:
    net, optimizer = net_and()
    step, calls = quick_step(optimizer), []
    handles = [
        optimizer.register_step_pre_hook(lambda *_: calls.append("before")),
        optimizer.register_step_post_hook(lambda *_: calls.append("after")),
    ]
    backward(net)
    step()
    assert calls == ["before", "after"]
    for handle in handles:
        handle.remove()
    step()
    assert len(calls) == 2
    handle = register_optimizer_step_post_hook(lambda *_: calls.append("everywhere"))
    try:
        step()
    finally:
        handle.remove()
    assert calls[2:] == ["everywhere"]


def test_a_profiler_sees_the_step() -> None:
    net, optimizer = net_and()
    step = quick_step(optimizer)
    backward(net)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        step()
    assert any(event.key == "Optimizer.step#SGD.step" for event in seen.key_averages())


def test_schedulers_hear_of_the_step() -> None:
    net, optimizer = net_and()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert not entered(optimizer, net)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "lr_scheduler.step() before optimizer.step()"
        scheduler.step()


def test_what_somebody_put_in_its_place_is_called() -> None:
    _, optimizer = net_and()
    step, calls = quick_step(optimizer), []
    optimizer.step = lambda: calls.append("mine")  # type: ignore[method-assign, assignment]
    step()
    quick_step(optimizer)()
    assert calls == ["mine", "mine"]


def test_an_optimizer_of_the_users() -> None:
    class Mine(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            self.calls = getattr(self, "calls", 0) + 1
            return super().step(closure)

    net, optimizer = net_and(Mine)
    before = net.weight.clone()
    backward(net)
    quick_step(optimizer)()
    assert optimizer.calls == 1
    assert not torch.equal(net.weight, before)
