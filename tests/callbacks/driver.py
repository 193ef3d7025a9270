"""Plays the engine's order of events to callbacks, without an engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from hapi.callbacks import Callback
from hapi.engine.config import FitConfig
from hapi.engine.state import Control, Progress, Request


class FakeWindow:
    """Values since the last reading: here, the running ones."""

    def __init__(self, run: Any) -> None:
        self.run = run

    def reset(self) -> None: ...

    def read(self) -> dict[str, Any]:
        return {name: value for name, value in self.run.logs.items() if name != "lr"}

    def state_dict(self) -> dict[str, Any]:
        return {"before": None}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class Driver:
    """A run whose values are given.

    Args:
        callbacks: In calling order.
        train: ``train(epoch, batch)`` -> the running values at that batch (from 1), without ``lr``.
        evaluate: ``evaluate(epoch)`` -> the evaluation's values; None where there is no evaluation data.
    """

    def __init__(
        self,
        callbacks: Iterable[Callback],
        *,
        train: Callable[[int, int], dict[str, Any]] = lambda epoch, batch: {"loss": 1.0 / (epoch * 10 + batch)},
        evaluate: Callable[[int], dict[str, Any]] | None = None,
        metrics: Sequence[str] = ("loss",),
        batches: int = 4,
        eval_batches: int = 3,
        known: bool = True,
        eval_freq: int = 1,
        log_freq: int = 2,
        verbose: int = 2,
        rows: int = 4,
        save_dir: str | None = None,
        accumulate: int = 1,
        world: int = 1,
        scheduler: Any = None,
        lr: float = 0.1,
        groups: int = 1,
    ) -> None:
        self.callbacks = list(callbacks)
        self.train, self.evaluate_values = train, evaluate
        self.metrics = list(metrics)
        self.batches, self.eval_batches, self.known = batches, eval_batches, known
        self.eval_freq, self.log_freq, self.verbose, self.rows = eval_freq, log_freq, verbose, rows
        self.save_dir, self.accumulate = save_dir, accumulate
        parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(groups)]
        network = torch.nn.Module()
        for index, parameter in enumerate(parameters):
            network.register_parameter(f"weight{index}", parameter)
            parameter.grad = torch.ones(1)
        self.run = SimpleNamespace(
            network=network,
            config=FitConfig(),
            meters=SimpleNamespace(device=torch.device("cpu"), metrics=[]),
            window=lambda: FakeWindow(self.run),
            gradients=lambda: [(name, p.grad) for name, p in network.named_parameters()],
            example=lambda: None,
            evaluated=None,
            notes=[],
            read_seconds=0.0,
            folders={},
            average=None,
            trials=SimpleNamespace(
                losses=self._try,
                fits=lambda size, steps: size <= 8,
                use_batch_size=lambda size: None,
                feed=SimpleNamespace(loader=SimpleNamespace(samples=self.batches * rows)),
            ),
            progress=Progress(),
            control=Control(),
            optimizer=torch.optim.SGD([{"params": [p]} for p in parameters], lr=lr),
            scheduler=scheduler,
            env=SimpleNamespace(world=world, rank=0),
            logs={},
            kept=None,
        )
        self.done: list[Request] = []
        self.evaluations = 0

    def _try(self, count: int, before: Callable[[int], None]) -> Iterator[float]:
        for index in range(count):
            before(index)
            yield 1.0 / (1 + index)

    @property
    def lr(self) -> float:
        return float(self.run.optimizer.param_groups[0]["lr"])

    @property
    def saved(self) -> list[str]:
        return [os.path.basename(r.path) for r in self.done if r.action == "save"]

    @property
    def actions(self) -> list[str]:
        return [r.action if r.action != "save" else os.path.basename(r.path) for r in self.done]

    def fit(
        self,
        epochs: int | None = 2,
        *,
        num_iters: int | None = None,
        fail_at: tuple[int, int] | None = None,
        resume: bool = False,
    ) -> None:
        """``fail_at``: (epoch, batch) from 1; batch 0 is in the evaluation. ``resume``: from ``progress``."""
        run = self.run
        progress = run.progress
        run.control = Control()
        logs: dict[str, Any] = {}
        if not resume:
            progress.first_epoch = progress.epoch
            progress.batch_in_epoch = 0
        self._prepare(epochs, self.batches if self.known else None)
        try:
            self._call("on_train_begin", {})
            for epoch in range(progress.epoch - progress.first_epoch, 10**6):
                if run.control.stop or (epochs is not None and epoch >= epochs):
                    break
                logs = self._epoch(epoch, epochs, num_iters, fail_at)
            self._call("on_train_end", logs)
            self._carry_out()
        except RuntimeError as exc:
            self._call("on_exception", exc)
            self._call("on_train_end", {})
            raise

    def _epoch(
        self, epoch: int, epochs: int | None, num_iters: int | None, fail_at: tuple[int, int] | None
    ) -> dict[str, Any]:
        run, progress = self.run, self.run.progress
        self._call("on_epoch_begin", epoch, {})
        run.logs = {}
        batch = progress.batch_in_epoch
        while batch < self.batches:
            self._call("on_train_batch_begin", batch, {})
            batch += 1
            if fail_at == (epoch + 1, batch):
                raise RuntimeError("batch failed")
            progress.batch_in_epoch = batch
            progress.samples += self.rows
            if batch % self.accumulate == 0 or batch == self.batches:
                self._call("on_before_optimizer_step", batch - 1, {})
                run.optimizer.step()
                progress.global_step += 1
            logs: dict[str, Any] = {"step": batch, "batch_size": self.rows}
            values = {**self.train(epoch, batch), "lr": self.lr}
            freqs = [self.log_freq, *(c.log_freq for c in self.callbacks if c.log_freq)]
            point = (self.known and batch == self.batches) or any(batch % freq == 0 for freq in freqs)
            if point:
                run.logs = values
                logs.update(values)
            self._call("on_train_batch_end", batch - 1, logs)
            if point or run.env.world == 1:
                self._carry_out()
            if progress.global_step == num_iters:
                run.control.request_stop("num_iters")
            if run.control.stop:
                break
        run.logs = {**self.train(epoch, batch), "lr": self.lr}
        logs = dict(run.logs)
        if run.average is not None:
            run.average.end_epoch()
        ending = bool(run.control.stop) or epoch + 1 == epochs
        if self.evaluate_values and (ending or (epoch + 1) % self.eval_freq == 0):
            if fail_at == (epoch + 1, 0):
                self._call("on_eval_begin", {"steps": self.eval_batches, "metrics": self.metrics})
                raise RuntimeError("evaluation failed")
            values = self._evaluate()
            logs.update({f"eval_{name}": value for name, value in values.items() if name != "samples"})
        self._call("on_epoch_end", epoch, logs)
        progress.epoch += 1
        progress.batch_in_epoch = 0
        self._carry_out()
        return logs

    def evaluate(self, *, fail: bool = False) -> None:
        """A standalone evaluation."""
        self._prepare(None, self.eval_batches if self.known else None, evaluates=False)
        self._standalone(lambda: self._evaluate(fail), "on_eval_end")

    def predict(self, *, fail: bool = False) -> None:
        self._prepare(None, self.eval_batches if self.known else None, evaluates=False)
        self._standalone(lambda: self._predict(fail), "on_predict_end")

    def _standalone(self, phase: Callable[[], Any], end: str) -> None:
        self.run.control = Control()
        try:
            phase()
        except RuntimeError as exc:
            self._call("on_exception", exc)
            self._call(end, {})
            raise

    def _evaluate(self, fail: bool = False) -> dict[str, Any]:
        assert self.evaluate_values is not None
        steps = self.eval_batches if self.known else None
        values = self.evaluate_values(self.evaluations)
        self.evaluations += 1
        self._call("on_eval_begin", {"steps": steps, "metrics": self.metrics})
        for batch in range(1, self.eval_batches + 1):
            self._call("on_eval_batch_begin", batch - 1, {})
            if fail:
                raise RuntimeError("evaluation failed")
            logs: dict[str, Any] = {"step": batch, "batch_size": self.rows}
            if batch % self.log_freq == 0 and batch != steps:
                logs.update(values)
            self._call("on_eval_batch_end", batch - 1, logs)
        values = {**values, "samples": self.eval_batches * self.rows}
        self._call("on_eval_end", values)
        return values

    def _predict(self, fail: bool) -> None:
        steps = self.eval_batches if self.known else None
        self._call("on_predict_begin", {"steps": steps})
        for batch in range(1, self.eval_batches + 1):
            self._call("on_predict_batch_begin", batch - 1, {})
            if fail:
                raise RuntimeError("prediction failed")
            outputs = [torch.zeros(self.rows).numpy()]
            self._call(
                "on_predict_batch_end",
                batch - 1,
                {"step": batch, "batch_size": self.rows, "outputs": outputs},
            )
        self._call("on_predict_end", {"samples": self.eval_batches * self.rows})

    def _prepare(self, epochs: int | None, steps: int | None, evaluates: bool | None = None) -> None:
        params = {
            "epochs": epochs,
            "steps": steps,
            "batch_size": self.rows,
            "verbose": self.verbose,
            "metrics": self.metrics,
            "log_freq": self.log_freq,
            "save_dir": self.save_dir,
            "evaluates": self.evaluate_values is not None if evaluates is None else evaluates,
        }
        for callback in self.callbacks:
            callback.set_model(self)
            callback.set_params(dict(params))
            callback.set_run(self.run)  # type: ignore[arg-type]

    def _call(self, hook: str, *args: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, hook)(*args)

    def _carry_out(self) -> None:
        requests, self.run.control.requests = self.run.control.requests, []
        for request in requests:
            self.done.append(request)
            if request.action == "save":
                self._call("on_save", request.path, {})
            elif request.action == "keep":
                self.run.kept = {"weight": self.run.progress.epoch}


def values(*numbers: float) -> Callable[[int], dict[str, Any]]:
    """Evaluations whose ``loss`` takes these values, the last one for ever."""
    return lambda evaluation: {"loss": numbers[min(evaluation, len(numbers) - 1)]}
