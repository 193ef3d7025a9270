"""The loops, read top to bottom. The only writer of Progress."""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from hapi.data.loader import Start
from hapi.data.trees import map_tree
from hapi.distributed.collectives import all_gather_objects, all_reduce, barrier, broadcast_object
from hapi.engine import averaging, checkpoint, rng
from hapi.engine.hooks import Hooks, fire
from hapi.engine.loss import LossFunction
from hapi.engine.shares import Feed, shares, uneven
from hapi.engine.signals import end_by_signal
from hapi.engine.state import Logs, Request, Run
from hapi.engine.step import EvalStep, PredictStep, TrainStep, autocast
from hapi.engine.trials import Trials
from hapi.engine.where import name_batch
from hapi.errors import add_note

__all__ = ["Feed", "as_arrays", "enter_training", "evaluate_loop", "evaluating", "fit_loop", "guarded", "predict_loop"]


def fit_loop(
    run: Run,
    trials: Trials,
    step: TrainStep,
    hooks: Hooks,
    loss: LossFunction,
    evaluate: Callable[[], Logs] | None,
) -> None:
    """Train on ``trials.feed``. ``evaluate`` runs one evaluation and returns its logs."""
    cast = autocast(run.meters.device, run.config.precision)
    run.trials = trials
    progress, control, config = run.progress, run.control, run.config
    last_step = None if config.num_iters is None else progress.first_step + config.num_iters
    logs: Logs = {}
    try:
        hooks.call("on_train_begin", {})
        run.trials, feed, config = None, trials.feed, run.config
        _agree(run)
        _carry_out(run, hooks)
        for epoch in itertools.count(progress.epoch - progress.first_epoch):
            if control.stop or (config.epochs is not None and epoch >= config.epochs):
                break
            step.clear()
            enter_training(run.network)
            hooks.call("on_epoch_begin", epoch, {})
            _agree(run)
            _train_epoch(run, feed, step, hooks, loss, last_step)
            _agree(run)
            if run.average is not None:
                run.average.end_epoch()
            logs = dict(run.logs)
            ending = bool(control.stop) or epoch + 1 == config.epochs
            if evaluate is not None and (ending or (epoch + 1) % config.eval_freq == 0):
                with averaging.shown(run, feed, cast):
                    values = evaluate()
                logs.update({f"eval_{name}": value for name, value in values.items() if name != "samples"})
            _step_epoch_scheduler(run, logs)
            hooks.call("on_epoch_end", epoch, logs)
            progress.epoch += 1
            progress.batch_in_epoch = progress.row_in_epoch = 0
            _agree(run)
            _carry_out(run, hooks)
    except BaseException as exc:
        _quietly(lambda: run.writer.take(wait=True), exc)
        _report(hooks, exc)
        _end_quietly(hooks, "on_train_end", exc)
        raise
    else:
        hooks.finish("on_train_end", logs)
        _agree(run)
        _carry_out(run, hooks)
        _await_saves(run, hooks)
        averaging.finish(run, feed, cast)
    finally:
        run.trials = None
        step.clear()


def _train_epoch(
    run: Run, feed: Feed, step: TrainStep, hooks: Hooks, loss: LossFunction, last_step: int | None
) -> None:
    progress, control, meters, scheduler = run.progress, run.control, run.meters, run.scheduler
    by_step = scheduler is not None and run.config.scheduler_interval == "step"
    begin, end = hooks.of("on_train_batch_begin"), hooks.of("on_train_batch_end")
    log_freqs = (run.config.log_freq, *hooks.log_freqs)
    reads, alone, note, writer = "on_train_batch_end" in hooks.listens, run.env.world == 1, run.note, run.writer
    micro, update, place = step.micro, step.update, run.place
    index = progress.batch_in_epoch
    left = feed.loader.left(Start(index, progress.row_in_epoch))
    total = None if left is None else index + left
    read_at = -1
    unchecked = run.env.world > 1
    assert run.optimizer is not None
    rates = run.optimizer.param_groups[0]
    if index == 0 or run.rate is None:
        run.rate = _copied(rates["lr"])
    if index == 0:
        meters.reset()
        run.logs = {}
    place.now = ("reading batch", index)
    clock, following = time.perf_counter, shares(run, feed, loss)
    while True:
        asked = clock()
        share = next(following, None)
        if share is None:
            break
        run.read_seconds += clock() - asked
        if begin:
            place.now = ("in callbacks before batch", index)
            fire(begin, index, {})
        place.now = ("in step", progress.global_step, "batch", index)
        seen = progress.row_in_epoch
        try:
            if share.batch is not None and share.everyone:
                micro(share.batch, share.totals, share.last)
            else:
                uneven(run, feed, share, step)
            if unchecked and share.last and share.everyone:
                run.strategy.check_gradients(run.network)
                unchecked = False
            progress.batch_in_epoch = index + 1
            progress.row_in_epoch += share.rows
            progress.samples += share.rows
            stepped = share.last and update()
        except Exception as exc:
            doing = f"in epoch {progress.epoch}, step {progress.global_step}, batch {index} (all counted from 0)"
            name_batch(exc, doing, run.env, feed.loader, epoch=progress.epoch, index=0, seen=seen)
            raise
        index += 1
        progress.global_step += stepped
        at_log_point = index == total or _due(index, log_freqs)
        if at_log_point and reads:
            run.logs = {**meters.read(), "lr": float(rates["lr"])}
            read_at = index
        if end:
            logs = {"step": index, "batch_size": share.rows}
            if read_at == index:
                logs.update(run.logs)
            place.now = ("in callbacks after batch", index - 1)
            fire(end, index - 1, logs)
        if stepped and by_step:
            run.rate = _copied(rates["lr"])  # the epoch's last batch was trained with it
            scheduler.step()
        if at_log_point:
            _agree(run)
        agreed = at_log_point or alone
        if agreed and control.requests:
            run.pending += control.requests
            control.requests = []
        if run.pending and share.last:
            _carry_out(run, hooks)
        if writer.busy:
            _tell_saved(hooks, writer.take())
        if note.number and share.last and (alone or run.ending):
            _end_by_signal(run, hooks)
        if stepped and progress.global_step == last_step:
            control.request_stop("num_iters")
        if control.stop and (agreed or control.stop == "num_iters"):
            break
        place.now = ("reading batch", index)
    place.now = ("ending an epoch after batch", index - 1)
    if index == 0:
        raise ValueError("fit: the training data has no batches")
    if read_at != index:
        run.logs = {**meters.read(), "lr": float(run.rate if by_step else rates["lr"])}


def _copied(rate: Any) -> Any:
    """A rate that a scheduler does not change: it writes into tensors."""
    return rate.clone() if isinstance(rate, Tensor) else rate


def _due(index: int, log_freqs: tuple[int, ...]) -> bool:
    return any(index % freq == 0 for freq in log_freqs) if len(log_freqs) > 1 else index % log_freqs[0] == 0


def evaluate_loop(run: Run, feed: Feed, step: EvalStep, hooks: Hooks, num_iters: int | None = None) -> Logs:
    """Evaluate on this rank's rows; the meters are reduced once, at the end. Returns the values and ``samples``."""
    meters, loader = run.meters, feed.loader
    total = loader.batches if num_iters is None or loader.batches is None else min(loader.batches, num_iters)
    begin, end = hooks.of("on_eval_batch_begin"), hooks.of("on_eval_batch_end")
    log_freqs = (run.config.log_freq, *hooks.log_freqs)
    alone = run.env.world == 1
    # An unknown length can differ between ranks, so nothing may be reduced on the way.
    reads = "on_eval_batch_end" in hooks.listens and (alone or loader.rows(0) is not None)
    meters.reset()
    run.strategy.share_buffers(run.network)
    place, split = run.place, feed.split
    with evaluating(run.network):
        hooks.call("on_eval_begin", {"steps": total, "metrics": meters.names})
        place.now = ("reading evaluation batch", 0)
        for index, raw in enumerate(itertools.islice(loader.epoch(0), num_iters), 1):
            place.now = ("evaluating batch", index - 1)
            if begin:
                fire(begin, index - 1, {})
            rows = None if alone else loader.rows(index - 1)
            if raw is not None:
                try:
                    batch = split(raw)
                    rows = batch.rows if rows is None else rows
                    outputs, _ = step(batch)
                except Exception as exc:
                    name_batch(exc, f"while evaluating batch {index - 1}", run.env, loader, epoch=0, index=index - 1)
                    raise
                if end:
                    run.evaluated = batch, outputs
            read = reads and index != total and _due(index, log_freqs)
            if read or end:
                logs: Logs = {"step": index, "batch_size": rows}
                if read:
                    logs.update(meters.read())
                if end:
                    fire(end, index - 1, logs)
        run.evaluated = None
        place.now = ("reducing the evaluation",)
        logs = meters.read()
        logs["samples"] = meters.total_rows
        if not logs["samples"]:
            raise ValueError("evaluate: the data has no batches")
        hooks.call("on_eval_end", logs)
    return logs


def predict_loop(
    run: Run, feed: Feed, step: PredictStep, hooks: Hooks, *, keep: bool, num_iters: int | None = None
) -> list[list[np.ndarray[Any, Any]]]:
    """Predict. Returns a list per batch of the arrays of its outputs, in the data's order, on every rank."""
    loader, env = feed.loader, run.env
    listens = "on_predict_batch_end" in hooks.listens
    begin, end = hooks.of("on_predict_batch_begin"), hooks.of("on_predict_batch_end")
    known = loader.rows(0) is not None
    run.strategy.share_buffers(run.network)
    kept: list[Any] = []
    samples = 0
    with evaluating(run.network):
        hooks.call("on_predict_begin", {"steps": loader.batches})
        run.place.now = ("reading prediction batch", 0)
        for index, raw in enumerate(itertools.islice(loader.epoch(0), num_iters), 1):
            run.place.now = ("predicting batch", index - 1)
            if begin:
                fire(begin, index - 1, {})
            outputs = None
            rows = 0
            if raw is not None:
                try:
                    batch = feed.split(raw)
                    outputs, rows = as_arrays(step(batch)), batch.rows
                except Exception as exc:
                    name_batch(exc, f"while predicting batch {index - 1}", run.env, loader, epoch=0, index=index - 1)
                    raise
            if listens and known and env.world > 1:
                # A callback wants the whole batch now; otherwise everything is gathered once, at the end.
                outputs = _joined(all_gather_objects(outputs, group=env.group))
                rows = loader.rows(index - 1) or 0
            samples += rows
            if keep:
                kept.append(outputs)
            if end:
                fire(end, index - 1, {"step": index, "batch_size": rows, "outputs": outputs})
        if env.world > 1 and not (listens and known):
            samples = sum(all_gather_objects(samples, group=env.group))
            if keep:
                parts = all_gather_objects(kept, group=env.group)
                if known:
                    kept = [_joined(list(batch)) for batch in zip(*parts, strict=True)]
                else:
                    # Whole batches were dealt out in turn.
                    dealt = itertools.chain.from_iterable(itertools.zip_longest(*parts))
                    kept = [outputs for outputs in dealt if outputs is not None]
        hooks.call("on_predict_end", {"samples": samples})
    return kept


def _joined(parts: Sequence[list[np.ndarray[Any, Any]] | None]) -> list[np.ndarray[Any, Any]]:
    """One batch's outputs from the ranks' parts of it."""
    present = [part for part in parts if part is not None]
    return [np.concatenate(arrays) if len(arrays) > 1 else arrays[0] for arrays in zip(*present, strict=True)]


def as_arrays(outputs: Any) -> list[np.ndarray[Any, Any]]:
    """A batch's outputs as host arrays, in order."""
    values = outputs.values() if hasattr(outputs, "values") and not isinstance(outputs, Tensor) else outputs
    if isinstance(values, Tensor):
        values = (values,)
    # numpy has no bfloat16.
    return [
        (value.float() if value.dtype == torch.bfloat16 else value).detach().cpu().numpy()
        for value in values
        if isinstance(value, Tensor)
    ]


def _step_epoch_scheduler(run: Run, logs: Logs) -> None:
    scheduler = run.scheduler
    if scheduler is None or run.config.scheduler_interval != "epoch":
        return
    if isinstance(scheduler, ReduceLROnPlateau):
        scheduler.step(logs["eval_loss"] if "eval_loss" in logs else logs["loss"])
    else:
        scheduler.step()


def _agree(run: Run) -> None:
    """Rank 0 decides, every rank obeys: stop, requests and learning rates. Every rank calls it at the same places."""
    if run.env.world == 1:
        return
    control, optimizer, group = run.control, run.optimizer, run.env.group
    rates = [float(part["lr"]) for part in optimizer.param_groups] if optimizer else []
    # One reduction: rank 0's decisions and rates (the others say nothing, -inf), and anybody's signal.
    decided = (
        [float(bool(control.stop or control.requests)), *rates] if run.env.rank == 0 else [-math.inf] * (1 + len(rates))
    )
    table = torch.tensor([float(run.note.number), *decided], dtype=torch.float64, device=run.meters.device)
    signalled, flagged, *told = all_reduce(table, "max", group=group).tolist()
    if signalled:
        run.note.number, run.ending = int(signalled), True
    if flagged:
        control.stop, requests = broadcast_object((control.stop, control.requests), group=group)
        control.requests = list(requests)
    if optimizer and told != rates:
        for part, rate in zip(optimizer.param_groups, told, strict=True):
            if isinstance(part["lr"], Tensor):
                part["lr"].fill_(rate)
            else:
                part["lr"] = rate


def _carry_out(run: Run, hooks: Hooks) -> None:
    """Do what callbacks asked for."""
    # Weights that are put back go into the files that are written at the same moment.
    order = ("keep", "restore", "save")
    requests = sorted([*run.pending, *run.control.requests], key=lambda request: order.index(request.action))
    run.pending, run.control.requests = [], []
    for request in requests:
        if request.action == "save":
            prefix = Path(request.path).absolute()
            weights, average = run.strategy.full_state(run.network), run.average
            mine = {"rng": {"now": rng.capture(), "epoch": run.epoch_rng}, "meters": run.meters.saved_states()}
            ranks = all_gather_objects(mine, group=run.env.group)
            if run.env.rank == 0:
                state: dict[str, Any] = {name: part.state_dict() for name, part in run.parts.items()}
                state["ranks"] = ranks
                if average is not None and average.saves and average.network is not None:
                    state["trained"], weights = weights, average.network.state_dict()
                # Training goes on while this is written, so it must not share memory with what is trained.
                write = _writing(prefix, map_tree(_host_copy, weights), map_tree(_host_copy, state), run, request)
                _tell_saved(hooks, run.writer.submit(str(prefix), write))
        elif request.action == "keep":
            run.kept = map_tree(_host_copy, averaging.kept(run))
        elif run.kept is not None:
            run.network.load_state_dict(run.kept)
            run.restored = True


def _writing(
    prefix: Path, weights: dict[str, Any], state: dict[str, Any], run: Run, request: Request
) -> Callable[[], None]:
    step, remove = run.progress.global_step, request.remove

    def write() -> None:
        checkpoint.write(prefix, weights, state, step=step)
        for old in remove:
            checkpoint.remove(Path(old).absolute())

    return write


def _tell_saved(hooks: Hooks, paths: Sequence[str]) -> None:
    for path in paths:
        hooks.call("on_save", path, {})


def _await_saves(run: Run, hooks: Hooks) -> None:
    """Every rank leaves once the last checkpoint is whole."""
    _tell_saved(hooks, run.writer.take(wait=True))
    barrier(group=run.env.group)


def _end_by_signal(run: Run, hooks: Hooks) -> None:
    """Write a checkpoint where the fit writes any, and leave."""
    if run.save_dir is not None:
        run.pending.append(Request("save", os.path.join(run.save_dir, f"step-{run.progress.global_step}")))
        _carry_out(run, hooks)
        _await_saves(run, hooks)
    ended = end_by_signal(run.note.number)
    if run.save_dir is not None:
        add_note(
            ended, f"step {run.progress.global_step} is saved in {run.save_dir}; fit(resume='auto') goes on from it"
        )
    raise ended


def _host_copy(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


def _report(hooks: Hooks, exc: BaseException) -> None:
    _quietly(lambda: hooks.finish("on_exception", exc), exc)


def _end_quietly(hooks: Hooks, name: str, exc: BaseException) -> None:
    _quietly(lambda: hooks.finish(name, {}), exc)


def _quietly(action: Callable[[], object], exc: BaseException) -> None:
    """Clean up after ``exc``: what fails on the way is noted on it, and does not hide it."""
    try:
        action()
    except Exception as second:
        add_note(exc, f"and, while cleaning up: {type(second).__name__}: {second}")


@contextmanager
def guarded(hooks: Hooks, end: str) -> Iterator[None]:
    """Around a standalone evaluation or prediction: callbacks hear of a failure, and end all the same."""
    try:
        yield
    except BaseException as exc:
        _report(hooks, exc)
        _end_quietly(hooks, end, exc)
        raise


def enter_training(network: nn.Module) -> None:
    """Training mode, without touching sub-modules that the user froze with ``eval()`` in a network that trains."""
    if not network.training:
        network.train()


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards every sub-module's own mode is back."""
    modes = [(module, module.training) for module in network.modules()]
    network.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        for module, training in modes:
            module.training = training
