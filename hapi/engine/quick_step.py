"""``optimizer.step()`` without what torch wraps around it for profilers, while none is on: a third of a small step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as module

__all__ = ["quick_step"]


def quick_step(optimizer: Optimizer) -> Callable[[], Any]:
    """A function that does what ``optimizer.step()`` does.

    torch wraps each optimizer's ``step`` in a record for its profiler and in calls of the hooks that were registered.
    The function calls the step inside the wrapper where there is no profiler and no hook; where there is one, or where
    the wrapper is not torch's, it calls ``optimizer.step()``. The bits are the same.
    """
    whole: Any = type(optimizer).step
    inner: Any = getattr(whole, "__wrapped__", None)
    # A scheduler puts a function on the instance that notes the call; anything else there is the user's.
    own = vars(optimizer).get("step")
    scheduled = own is not None and hasattr(own, "_wrapped_by_lr_sched")
    profiling: Any = getattr(torch.autograd, "_profiler_enabled", None)
    names = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
    hooks = [getattr(module, name, None) for name in names]
    hooks += [vars(optimizer).get(name) for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")]
    known = getattr(whole, "hooked", False) and inner is not None and profiling is not None and None not in hooks
    if not known or (own is not None and not scheduled) or getattr(own, "__wrapped__", whole) is not whole:
        return lambda: optimizer.step()
    before, after, mine_before, mine_after = hooks
    attributes, marked = vars(optimizer), optimizer if scheduled else None

    def step() -> None:
        if before or after or mine_before or mine_after or profiling() or attributes.get("step") is not own:
            optimizer.step()
            return
        if marked is not None:
            marked._opt_called = True  # type: ignore[attr-defined]
        inner(optimizer)

    return step
