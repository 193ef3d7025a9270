"""Averaged weights, which a callback keeps beside the trained ones: when the network holds which."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import update_bn

from hapi.data.batch import Batch
from hapi.distributed.collectives import all_reduce
from hapi.engine import rng
from hapi.engine.shares import Feed
from hapi.engine.state import Average, Run

__all__ = ["finish", "kept", "shown"]

Cast = Callable[[], AbstractContextManager[Any]]


@contextmanager
def shown(run: Run, feed: Feed, cast: Cast) -> Iterator[None]:
    """Around an evaluation: the network holds the average, where there is one and it is to be evaluated."""
    average = run.average
    if average is None or average.network is None or not average.evaluates:
        yield
        return
    _refresh(run, average, feed, cast)
    trained = {name: value.clone() for name, value in run.network.state_dict().items()}
    # Copies into the same tensors: compiled code and DDP know their addresses.
    run.network.load_state_dict(average.network.state_dict())
    try:
        yield
    finally:
        run.network.load_state_dict(trained)


def kept(run: Run) -> dict[str, Any]:
    """The weights that the last evaluation saw."""
    average = run.average
    if average is not None and average.network is not None and average.evaluates:
        return average.network.state_dict()
    return run.strategy.full_state(run.network)


def finish(run: Run, feed: Feed, cast: Cast) -> None:
    """At the end of a fit: the network gets the average, if it is to have it."""
    average = run.average
    if average is None or average.network is None or not average.applies or run.restored:
        return
    _refresh(run, average, feed, cast)
    run.network.load_state_dict(average.network.state_dict())


def _refresh(run: Run, average: Average, feed: Feed, cast: Cast) -> None:
    """BatchNorm's running statistics are those of the trained weights: run over the training data for the average's.

    Source: Izmailov et al., Averaging Weights Leads to Wider Optima and Better Generalization (2018), section 3.2.
    """
    network, step = average.network, run.progress.global_step
    if network is None or not average.refreshes or run.refreshed == step:
        return
    frozen = {name for name, module in run.network.named_modules() if not module.training}
    layers = {name: m for name, m in network.named_modules() if isinstance(m, _BatchNorm) and name not in frozen}
    if not layers:
        return
    if not feed.loader.again:
        raise ValueError(
            f"{type(average).__name__}: BatchNorm's statistics are computed by reading the training data once more, "
            "which an iterator or generator does not allow; give a Dataset, a DataLoader or a list of batches"
        )
    untouched = {name: value.clone() for name, value in network.state_dict().items()}
    generators = rng.capture()
    # A pass over the data changes no later number: the generators are put back, and so is what the user froze.
    update_bn(_batches(run, feed), _Runs(network, cast))
    rng.restore(generators)
    fresh = {f"{name}.{part}" for name in layers for part in ("running_mean", "running_var", "num_batches_tracked")}
    state = network.state_dict()
    if run.env.world > 1:
        for name in sorted(fresh & state.keys()):
            if state[name].is_floating_point():
                all_reduce(state[name], group=run.env.group).div_(run.env.world)
    network.load_state_dict({name: state[name] if name in fresh else untouched[name] for name in state})
    run.refreshed = step


def _batches(run: Run, feed: Feed) -> Iterator[list[Batch]]:
    for raw in feed.loader.epoch(run.progress.epoch):
        if raw is not None:
            yield [feed.split(raw)]  # torch takes the first item of a list
        elif feed.empty is not None:
            yield [feed.empty(feed.loader.template())]


class _Runs(nn.Module):
    """A network that is called with a :class:`Batch`."""

    def __init__(self, network: nn.Module, cast: Cast) -> None:
        super().__init__()
        self.network = network
        self._cast = cast

    def forward(self, batch: Batch) -> None:
        """Run the batch; only the layers' statistics are of interest."""
        with torch.no_grad(), self._cast():
            self.network(*batch.args, **batch.kwargs)
