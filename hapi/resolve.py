"""The user's words -> objects. Strings stop here: below this there are only types."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import lr_scheduler as schedules

from hapi.callbacks import Callback, History, LRScheduler, ModelCheckpoint, ProgBarLogger
from hapi.engine.config import check_number
from hapi.engine.loss import LossFunction, Term
from hapi.engine.meters import RoutedMetric
from hapi.errors import suggest
from hapi.metrics import as_metric, by_name

__all__ = ["as_callbacks", "as_loss", "as_metrics", "as_optimizer", "as_scheduler", "fuse"]

_OPTIMIZERS: dict[str, type[Optimizer]] = {
    "adadelta": torch.optim.Adadelta,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamax": torch.optim.Adamax,
    "adamw": torch.optim.AdamW,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rmsprop": torch.optim.RMSprop,
    "sgd": torch.optim.SGD,
}
# Optimizers with fused kernels. Subclasses may compute something else, so only the very types count.
_FUSED = (torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)

_LOSSES: dict[str, Callable[[], nn.Module]] = {
    "bce": nn.BCELoss,
    "bce_with_logits": nn.BCEWithLogitsLoss,
    "cross_entropy": nn.CrossEntropyLoss,
    "gaussian_nll": nn.GaussianNLLLoss,
    "huber": nn.HuberLoss,
    "kl_div": lambda: nn.KLDivLoss(reduction="batchmean"),
    "l1": nn.L1Loss,
    "mae": nn.L1Loss,
    "mse": nn.MSELoss,
    "nll": nn.NLLLoss,
    "poisson_nll": nn.PoissonNLLLoss,
    "smooth_l1": nn.SmoothL1Loss,
}

_KERAS = {
    "sparse_categorical_crossentropy": "cross_entropy",
    "categorical_crossentropy": "cross_entropy",
    "binary_crossentropy": "bce",
    "mean_squared_error": "mse",
    "mean_absolute_error": "mae",
}

RESERVED = frozenset({"loss", "lr", "step", "batch_size", "samples", "outputs", "epoch"})

SchedulerFactory = Callable[[Optimizer, int | None], Any]


def as_optimizer(given: Any, network: nn.Module) -> Optimizer | None:
    """An instance, a factory that takes the parameters, or a name.

    Raises:
        TypeError: None of these.
        ValueError: An unknown name, an optimizer of another network, or one that needs a closure.
    """
    if given is None:
        return None
    trainable = [p for p in network.parameters() if p.requires_grad]
    if isinstance(given, str):
        kind = _OPTIMIZERS.get(given.lower())
        if kind is None:
            raise ValueError(
                f"prepare: optimizer={given!r}; accepted names: {sorted(_OPTIMIZERS)}{suggest(given, _OPTIMIZERS)}"
            )
        if not trainable:
            raise ValueError("prepare: the network has no parameter that requires a gradient")
        options: dict[str, Any] = {"lr": 1e-2} if given.lower() == "sgd" else {}
        return kind(trainable, **options)
    optimizer = given if isinstance(given, Optimizer) else None
    if optimizer is None and callable(given) and not isinstance(given, nn.Module):
        optimizer = given(trainable)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"prepare: optimizer={given!r}; accepted: a torch.optim.Optimizer, a function of the parameters that "
            f"makes one, or a name of {sorted(_OPTIMIZERS)}"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("prepare: LBFGS evaluates the loss several times a step, which fit does not do")
    own = {id(p) for p in network.parameters()}
    if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
        raise ValueError(
            f"prepare: {type(optimizer).__name__} holds none of the parameters of {type(network).__name__}; "
            "build it from network.parameters()"
        )
    return optimizer


def fuse(optimizer: Optimizer, wanted: bool | None, network: nn.Module, *, named: bool) -> None:
    """Switch an optimizer's fused kernels on or off, before its first step or later; its state goes on.

    Args:
        optimizer: Its parameters are where they will be stepped.
        wanted: True: on. False: off. None: on where the optimizer was given by name and has such kernels (a third of
            the default's time on CPU: the caller named the optimizer, not its arithmetic); else as it is.
        network: Whose parameters it steps.
        named: Whether it was given by name.

    Raises:
        ValueError: ``wanted`` is True, and there are no fused kernels for it.
    """
    if wanted is None and not named:
        return
    why = _why_not_fused(optimizer, network) if wanted is not False else ""
    if wanted and why:
        raise ValueError(f"prepare: fused=True: {why}")
    on = wanted is not False and not why
    if on or any(group.get("fused") for group in optimizer.param_groups):
        _set_fused(optimizer, on)


def _why_not_fused(optimizer: Optimizer, network: nn.Module) -> str:
    """Why torch has no fused kernels for an optimizer; an empty string where it has."""
    kind = type(optimizer)
    if kind not in _FUSED:
        return f"{kind.__name__} has no fused kernels; accepted: {[accepted.__name__ for accepted in _FUSED]}"
    for option in ("foreach", "differentiable"):
        if any(group.get(option) for group in optimizer.param_groups):
            return f"the optimizer was built with {option}=True; accepted: one of the two"
    if any(getattr(module, "sparse", False) is True for module in network.modules()):
        return "the network has sparse gradients; accepted: dense ones (Embedding(sparse=False))"
    for device, dtype in {(p.device, p.dtype) for group in optimizer.param_groups for p in group["params"]}:
        # A trial is the only question that every torch version answers: which devices and dtypes have kernels differs.
        trial = nn.Parameter(torch.zeros(1, device=device, dtype=dtype))
        trial.grad = torch.zeros_like(trial)
        try:
            kind([trial], lr=1e-3, fused=True).step()
        except (RuntimeError, NotImplementedError) as exc:
            return f"torch has no fused {kind.__name__} for {dtype} on {device.type} ({exc})"
    return ""


def _set_fused(optimizer: Optimizer, on: bool) -> None:
    """Do what torch's constructors do with ``fused=``, and bring the state along."""
    for group in [*optimizer.param_groups, optimizer.defaults]:
        group["fused"] = on
    # Read by GradScaler, and by the step before its first use of the kernels.
    optimizer._step_supports_amp_scaling = on  # type: ignore[attr-defined]
    optimizer._need_device_dtype_check_for_fused = on  # type: ignore[attr-defined]
    for group in optimizer.param_groups:
        on_device = on or group.get("capturable")
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if isinstance(state.get("step"), Tensor):
                # Fused kernels count in float32 on the device; the others on the host, where reading is free.
                device = parameter.device if on_device else torch.device("cpu")
                state["step"] = state["step"].to(device, torch.float32 if on_device else None)


def as_scheduler(given: Any, optimizer: Optimizer | None) -> Any:
    """An instance, or a :data:`SchedulerFactory` to be called when the number of steps is known.

    Raises:
        TypeError: Not a scheduler, a factory or a name.
        ValueError: An unknown name, or a scheduler of another optimizer.
    """
    if given is None:
        return None
    if optimizer is None:
        raise ValueError("prepare: scheduler is given without an optimizer")
    if isinstance(given, str):
        if given not in _SCHEDULERS:
            raise ValueError(
                f"prepare: scheduler={given!r}; accepted names: {sorted(_SCHEDULERS)}{suggest(given, _SCHEDULERS)}"
            )
        return _SCHEDULERS[given]
    if isinstance(given, (schedules.LRScheduler, schedules.ReduceLROnPlateau)):
        if given.optimizer is not optimizer:
            raise ValueError("prepare: the scheduler was built for another optimizer than the one given")
        return given
    if callable(given):
        made = given(optimizer)
        if isinstance(made, (schedules.LRScheduler, schedules.ReduceLROnPlateau)):
            return made
    raise TypeError(
        f"prepare: scheduler={given!r}; accepted: a torch.optim.lr_scheduler instance, a function of the optimizer "
        f"that makes one, or a name of {sorted(_SCHEDULERS)}"
    )


def _over(total: int | None, name: str) -> int:
    if total is None:
        raise ValueError(f"fit: scheduler={name!r} needs to know the number of steps; give num_iters")
    return total


_SCHEDULERS: dict[str, SchedulerFactory] = {
    "constant": lambda optimizer, total: schedules.ConstantLR(optimizer, factor=1.0),
    "cosine": lambda optimizer, total: schedules.CosineAnnealingLR(optimizer, _over(total, "cosine")),
    "linear": lambda optimizer, total: schedules.LinearLR(optimizer, 1.0, 0.0, _over(total, "linear")),
    "one_cycle": lambda optimizer, total: schedules.OneCycleLR(
        optimizer, [float(g["lr"]) for g in optimizer.param_groups], _over(total, "one_cycle") + 1
    ),
    "polynomial": lambda optimizer, total: schedules.PolynomialLR(optimizer, _over(total, "polynomial"), power=2.0),
}


def as_loss(given: Any, weights: Any, class_weight: Any) -> LossFunction | None:
    """One loss, or several in a list or dict, by instance, function or name.

    Raises:
        TypeError: Something that cannot be called.
        ValueError: An unknown name, weights that do not fit, or a name that logs use already.
    """
    if given is None:
        if weights is not None or class_weight is not None:
            raise ValueError("prepare: loss_weights or class_weight is given without a loss")
        return None
    if isinstance(given, Mapping):
        named = [(str(name), _one_loss(loss)) for name, loss in given.items()]
    elif isinstance(given, (list, tuple)):
        named = [(_loss_name(loss, i), _one_loss(loss)) for i, loss in enumerate(given)]
        taken = [name for name, _ in named]
        named = [(f"{n}_{i}" if taken.count(n) > 1 else n, loss) for i, (n, loss) in enumerate(named)]
    else:
        named = [("loss", _one_loss(given))]
    if not named:
        raise ValueError("prepare: loss is empty")
    names = [name for name, _ in named]
    if len(named) > 1 and RESERVED & set(names):
        raise ValueError(f"prepare: the loss names {sorted(RESERVED & set(names))} are used by logs; choose others")
    scales = _loss_weights(weights, names)
    count = len(named)
    terms = [
        Term(name, loss, scale, (i, count)) for i, ((name, loss), scale) in enumerate(zip(named, scales, strict=True))
    ]
    return LossFunction(terms, _class_weight(class_weight))


def _one_loss(given: Any) -> Callable[..., Any]:
    if isinstance(given, str):
        if given not in _LOSSES:
            known = _KERAS.get(given)
            hint = f"; Keras's {given} is {known!r}" if known else suggest(given, _LOSSES)
            raise ValueError(f"prepare: loss={given!r}; accepted names: {sorted(_LOSSES)}{hint}")
        return _LOSSES[given]()
    if given in (F.cross_entropy, F.nll_loss):  # the same arithmetic, with labels [N, 1] and exact weights
        return nn.CrossEntropyLoss() if given is F.cross_entropy else nn.NLLLoss()
    if isinstance(given, type) and issubclass(given, nn.Module):
        return given()
    if not callable(given):
        raise TypeError(f"prepare: loss={given!r}; accepted: a function, a Module, a list or dict of them, or a name")
    function: Callable[..., Any] = given
    return function


def _loss_name(given: Any, index: int) -> str:
    if isinstance(given, str):
        return given
    name = getattr(given, "__name__", type(given).__name__)
    return f"loss_{index}" if name == "<lambda>" else name


def _loss_weights(weights: Any, names: Sequence[str]) -> list[float]:
    if weights is None:
        return [1.0] * len(names)
    if isinstance(weights, Mapping):
        if set(weights) != set(names):
            raise ValueError(f"prepare: loss_weights has the names {sorted(weights)}, the losses are {list(names)}")
        weights = [weights[name] for name in names]
    if isinstance(weights, (int, float)):
        weights = [weights]
    if len(weights) != len(names):
        raise ValueError(f"prepare: {len(weights)} loss_weights for {len(names)} losses")
    for weight in weights:
        if isinstance(weight, bool) or not isinstance(weight, (int, float)):
            raise ValueError(f"prepare: loss_weights holds {weight!r}; accepted: numbers")
    return [float(weight) for weight in weights]


def _class_weight(given: Any) -> Tensor | None:
    if given is None:
        return None
    if isinstance(given, Mapping):
        if not given or not all(isinstance(k, int) and k >= 0 for k in given):
            raise ValueError(f"prepare: class_weight={given!r}; accepted: a dict from class index to weight")
        table = torch.ones(max(given) + 1)
        for index, weight in given.items():
            table[index] = check_number(f"class_weight[{index}]", weight, where="prepare")
        return table
    table = torch.as_tensor(given, dtype=torch.float32)
    if table.ndim != 1 or not table.numel() or bool((table < 0).any()):
        raise ValueError("prepare: class_weight must be a dict, or one non-negative weight per class")
    return table


def as_metrics(given: Any, loss: LossFunction | None = None) -> list[RoutedMetric]:
    """One metric, a list, or a dict from output name (or position) to metrics.

    A metric given by name takes logits where the loss does (``bce_with_logits``), so that both mean the same.

    Raises:
        TypeError: Something that is not a metric.
        ValueError: An unknown name, or two metrics of one name.
    """
    if given is None:
        return []
    routed: list[RoutedMetric] = []
    logits = loss is not None and all(isinstance(term.function, nn.BCEWithLogitsLoss) for term in loss.terms)
    if isinstance(given, Mapping):
        for route, metrics in given.items():
            for metric in metrics if isinstance(metrics, (list, tuple)) else [metrics]:
                routed.extend(RoutedMetric(m, route) for m in _one_metric(metric, logits))
    else:
        for metric in given if isinstance(given, (list, tuple)) else [given]:
            routed.extend(RoutedMetric(m) for m in _one_metric(metric, logits))
    names = [name for metric in routed for name in metric.names]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"prepare: two metrics are named {twice}; give one another name=")
    if RESERVED & set(names):
        raise ValueError(f"prepare: the metric names {sorted(RESERVED & set(names))} are used by logs")
    return routed


def _one_metric(given: Any, logits: bool) -> list[Any]:
    if isinstance(given, type):
        given = given()
    if not isinstance(given, str):
        return list(as_metric(given))
    metric = by_name(given)
    kind: Any = type(metric)
    takes_logits = "from_logits" in inspect.signature(kind).parameters
    return [kind(from_logits=True)] if logits and takes_logits else [metric]


def as_callbacks(
    given: Any,
    *,
    verbose: int,
    log_freq: int,
    save_dir: str | None = None,
    save_freq: int = 1,
    every_n_steps: int | None = None,
    keep: int | None = None,
) -> list[Callback]:
    """The user's callbacks, with a progress printer, a checkpoint writer and a history where there is none.

    Raises:
        TypeError: Something that is not a callback.
    """
    callbacks = list(given) if isinstance(given, (list, tuple)) else [] if given is None else [given]
    for callback in callbacks:
        if not isinstance(callback, Callback):
            hint = "; give an instance" if isinstance(callback, type) else ""
            raise TypeError(f"callbacks holds {callback!r}; accepted: hapi.callbacks.Callback instances{hint}")

    def has(kind: type[Callback]) -> bool:
        return any(isinstance(callback, kind) for callback in callbacks)

    if verbose and not has(ProgBarLogger):
        # After the user's, so that values that they add to logs are printed.
        callbacks.append(ProgBarLogger(log_freq, verbose=verbose))
    options = {"save_every_n_steps": every_n_steps, "keep": keep}
    chosen = [name for name, value in options.items() if value is not None]
    if chosen and (save_dir is None or has(ModelCheckpoint)):
        why = "needs save_dir" if save_dir is None else "belongs to the ModelCheckpoint that is given in callbacks"
        raise ValueError(f"fit: {chosen[0]} {why}")
    if save_dir is not None and not has(ModelCheckpoint):
        callbacks.append(ModelCheckpoint(save_freq, save_dir, every_n_steps=every_n_steps, max_to_keep=keep))
    if not has(History):
        callbacks.append(History())
    return callbacks


def scheduler_interval(callbacks: Sequence[Callback], default: Any) -> Any:
    """When the scheduler steps: as an :class:`LRScheduler` callback says, else ``default``."""
    for callback in callbacks:
        if isinstance(callback, LRScheduler):
            return callback.interval
    return default
