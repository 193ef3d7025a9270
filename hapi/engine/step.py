"""Options in, closures out: everything that can be decided is decided here, once, before the first batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hapi.data.batch import Batch
from hapi.engine.compile import Compiled
from hapi.engine.config import FitConfig, Precision
from hapi.engine.forward import Compute, Parts, computing
from hapi.engine.loss import Count, LossFunction, normalize_outputs
from hapi.engine.master import MasterWeights
from hapi.engine.meters import Meters
from hapi.engine.quick_step import quick_step
from hapi.errors import add_note

__all__ = ["EvalStep", "PredictStep", "TrainStep", "autocast", "build_eval_step", "build_train_step"]

EvalStep = Callable[[Batch], tuple[Any, Parts]]
PredictStep = Callable[[Batch], Any]
Micro = Callable[[Batch, Sequence[Count] | None, bool], tuple[Any, Parts]]


@dataclass(frozen=True)
class TrainStep:
    """The two halves of training.

    Attributes:
        micro: Forward, loss and backward of one batch; adds to the meters. Arguments: the batch; the weight of
            each loss term over the whole optimizer step (None: this batch is the whole step); whether this is
            the batch at which gradients are exchanged. Returns the outputs and the loss parts.
        lone: The same by this rank alone: through the bare network, without any collective of the strategy's.
        update: Clip, step, clear. Returns whether parameters changed (False: a skipped fp16 step).
        clear: Drop gradients.
        join: Forward and backward of a batch without rows, for the collectives inside the network.
    """

    micro: Micro
    lone: Micro
    update: Callable[[], bool]
    clear: Callable[[], None]
    join: Callable[[Batch], None]


def autocast(device: torch.device, precision: Precision) -> Callable[[], AbstractContextManager[Any]]:
    """A factory of the context that forward and loss run in."""
    if precision.dtype is None:
        return nullcontext
    kind, dtype = device.type, precision.dtype
    return lambda: torch.autocast(kind, dtype)


def build_train_step(
    module: nn.Module,
    optimizer: Optimizer,
    loss: LossFunction,
    meters: Meters,
    config: FitConfig,
    device: torch.device,
    *,
    world: int = 1,
    scaler: torch.amp.GradScaler | None = None,
    masters: MasterWeights | None = None,
    no_sync: Callable[[nn.Module], AbstractContextManager[Any]] | None = None,
    network: nn.Module | None = None,
    inspect: Callable[[], None] | None = None,
    compiled: Compiled | None = None,
) -> TrainStep:
    """Build the training step.

    Args:
        module: What to call.
        optimizer: What to step.
        loss: What to minimise.
        meters: What to add to.
        config: Clipping and precision.
        device: Where the module is.
        world: Ranks over which the strategy averages gradients.
        scaler: For fp16.
        masters: For level O2.
        no_sync: The strategy's, where there are several ranks.
        network: The bare network, where there are several ranks.
        inspect: Called before each optimizer step, with unscaled gradients; the same on every rank.
        compiled: Compiled forward, loss and optimizer step, as far as wanted.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    every_parameter = list({id(p): p for p in [*parameters, *module.parameters()]}.values())
    cast = autocast(device, config.precision)
    casts = config.precision.dtype is not None
    scales = loss.scales
    compute_means, compute_totals = computing(module, loss.means), computing(module, loss.totals)
    if compiled is not None:
        compute_means = compiled.training(compute_means, means=True)
        compute_totals = compiled.training(compute_totals, means=False)
    sums = [term.is_sum for term in loss.terms]
    plain = len(sums) == 1 and scales[0] == 1.0
    add_losses, add_metrics = meters.add_losses, meters.add_metrics
    watched = bool(meters.metrics)

    def whole(parts: Parts) -> Tensor:
        """The objective of a batch that is the whole step: the loss as the user defined it."""
        return _add([value if scale == 1.0 else value * scale for (value, _), scale in zip(parts, scales, strict=True)])

    def share(parts: Parts, totals: Sequence[Count], as_means: bool) -> Tensor:
        """This batch's share of the objective of the step, times ``world``, since gradients are averaged."""
        shares = []
        for (value, count), total, scale, is_sum in zip(parts, totals, scales, sums, strict=True):
            if is_sum:
                factored = value * world if world > 1 else value
            elif as_means:
                # A division, so that the bits are those of the usual `loss / k`.
                ratio = total / (count * world)
                factored = value if ratio == 1.0 else value / ratio
            else:
                factored = value * (world / total)
            shares.append(factored if scale == 1.0 else factored * scale)
        return _add(shares)

    def building(compute_means: Compute, compute_totals: Compute) -> Micro:
        def forward(batch: Batch, totals: Sequence[Count] | None) -> tuple[Any, Parts, Tensor, bool]:
            if totals is None:
                outputs, parts = compute_means(batch)
                return outputs, parts, parts[0][0] if plain else whole(parts), True
            as_means = all(isinstance(total, int) for total in totals)
            outputs, parts = compute_means(batch) if as_means else compute_totals(batch)
            return outputs, parts, share(parts, totals, as_means), as_means

        def micro(batch: Batch, totals: Sequence[Count] | None, exchange: bool) -> tuple[Any, Parts]:
            if casts:
                with cast():
                    outputs, parts, objective, as_means = forward(batch, totals)
            else:
                outputs, parts, objective, as_means = forward(batch, totals)
            try:
                (objective if scaler is None else scaler.scale(objective)).backward()  # type: ignore[no-untyped-call]
            except RuntimeError as exc:
                if not objective.requires_grad:
                    add_note(exc, "the loss does not depend on any parameter that requires a gradient")
                raise
            add_losses(parts, means=as_means)
            if watched:
                outputs = outputs.detach() if type(outputs) is Tensor else detached(outputs)
            add_metrics(outputs, batch)
            return outputs, parts

        return micro

    micro = building(compute_means, compute_totals)
    run_micro, lone, bare = micro, micro, module
    if no_sync is not None:
        assert network is not None
        bare = network
        lone = building(computing(network, loss.means), computing(network, loss.totals))

    def micro_without_exchange(batch: Batch, totals: Sequence[Count] | None, exchange: bool) -> tuple[Any, Parts]:
        assert no_sync is not None
        if exchange:
            return micro(batch, totals, exchange)
        with no_sync(module):
            return micro(batch, totals, exchange)

    if no_sync is not None:
        run_micro = micro_without_exchange

    def join(batch: Batch) -> None:
        with cast():
            outputs = normalize_outputs(bare(*batch.args, **batch.kwargs))
            values = outputs.values() if isinstance(outputs, Mapping) else outputs
            tensors = (values,) if isinstance(values, Tensor) else tuple(values)
            _add([value.sum() for value in tensors]).backward()  # type: ignore[no-untyped-call]

    def clear() -> None:
        for parameter in every_parameter:
            parameter.grad = None

    compiled_step = None if compiled is None else compiled.step
    update = _build_update(optimizer, compiled_step, parameters, every_parameter, config, scaler, inspect)
    if masters is not None:
        update = _through_masters(update, masters)
    if compiled is not None and compiled.trains:
        run_micro, update = _timed(compiled, run_micro, update, every_parameter)
    return TrainStep(run_micro, lone, update, clear, join)


def _timed(
    compiled: Compiled,
    micro: Callable[..., tuple[Any, Parts]],
    update: Callable[[], bool],
    parameters: Sequence[nn.Parameter],
) -> tuple[Callable[..., tuple[Any, Parts]], Callable[[], bool]]:
    timed = compiled.timed("training step", micro)

    def checked(batch: Batch, totals: Sequence[Count] | None, exchange: bool) -> tuple[Any, Parts]:
        compiled.check_gradients(parameters)
        return timed(batch, totals, exchange)

    return checked, update if compiled.step is None else compiled.timed("optimizer step", update)


def _build_update(
    optimizer: Optimizer,
    compiled_step: Callable[[], None] | None,
    parameters: list[nn.Parameter],
    every_parameter: list[nn.Parameter],
    config: FitConfig,
    scaler: torch.amp.GradScaler | None,
    inspect: Callable[[], None] | None,
) -> Callable[[], bool]:
    clip_norm, clip_value = config.clip_norm, config.clip_value

    def clip() -> None:
        if inspect is not None:
            inspect()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, clip_norm)
        elif clip_value is not None:
            nn.utils.clip_grad_value_(parameters, clip_value)

    clips = clip_norm is not None or clip_value is not None or inspect is not None
    take_step = quick_step(optimizer) if compiled_step is None else compiled_step

    def update() -> bool:
        if clips:
            clip()
        take_step()
        for parameter in every_parameter:
            parameter.grad = None
        return True

    if scaler is None:
        return update

    fixed_scale = None if config.precision.dynamic else scaler.get_scale()
    # The scaler does not say whether it stepped; the optimizer's own hook does, without another wait for the
    # device. Kernels that take the overflow flag themselves always step: there the scale tells.
    stepped: list[bool] = []
    optimizer.register_step_post_hook(lambda *_: stepped.append(True))
    in_kernel = bool(getattr(optimizer, "_step_supports_amp_scaling", False))

    def update_scaled() -> bool:
        if clips:
            scaler.unscale_(optimizer)
            clip()
        stepped.clear()
        before = scaler.get_scale() if in_kernel else 0.0
        scaler.step(optimizer)
        scaler.update(fixed_scale)
        for parameter in every_parameter:
            parameter.grad = None
        return scaler.get_scale() >= before if in_kernel else bool(stepped)

    return update_scaled


def _through_masters(update: Callable[[], bool], masters: MasterWeights) -> Callable[[], bool]:
    def update_masters() -> bool:
        masters.take_gradients()
        stepped = update()
        if stepped:
            masters.give_weights()
        return stepped

    return update_masters


def build_eval_step(
    network: nn.Module,
    loss: LossFunction | None,
    meters: Meters,
    precision: Precision,
    device: torch.device,
    compiled: Compiled | None = None,
) -> EvalStep:
    """Build the evaluation step: forward, loss and metrics of one batch, without gradients."""
    compute = computing(network, _no_parts if loss is None else loss.means)
    if compiled is not None:
        compute = compiled.evaluation(compute, loss=True)
    cast = autocast(device, precision)
    add_losses, add_metrics = meters.add_losses, meters.add_metrics

    def step(batch: Batch) -> tuple[Any, Parts]:
        with cast():
            outputs, parts = compute(batch)
        add_losses(parts, means=True)
        add_metrics(outputs, batch)
        return outputs, parts

    return step


def build_predict_step(
    network: nn.Module, precision: Precision, device: torch.device, compiled: Compiled | None = None
) -> PredictStep:
    """Build the prediction step: forward of one batch, without gradients."""
    compute = computing(network, _no_parts)
    if compiled is not None:
        compute = compiled.evaluation(compute, loss=False)
    cast = autocast(device, precision)

    def step(batch: Batch) -> Any:
        with cast():
            return compute(batch)[0]

    return step


def _no_parts(outputs: Any, batch: Batch) -> Parts:
    return ()


def detached(outputs: Any) -> Any:
    """Outputs without their graph, in the same container."""
    if isinstance(outputs, Tensor):
        return outputs.detach()
    if isinstance(outputs, Mapping):
        return {key: detached(value) for key, value in outputs.items()}
    if isinstance(outputs, (tuple, list)):
        return tuple(detached(value) for value in outputs)
    return outputs


def _add(values: list[Tensor]) -> Tensor:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total
