"""What a fit does, in which order, and what callbacks are told."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import hapi
from hapi.callbacks import Callback
from tests.helpers.nets import blobs, mlp, same_weights

X, Y = blobs(40)


def prepared(**options: Any) -> hapi.Model:
    net = mlp()
    options = {"optimizer": torch.optim.SGD(net.parameters(), 0.1), "loss": nn.CrossEntropyLoss(), **options}
    return hapi.Model(net).prepare(**options)


class Trace(Callback):
    """Every hook, with a copy of what it was told."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def names(self) -> list[str]:
        return [event[0] for event in self.events]

    def told(self, name: str) -> list[Any]:
        return [event[-1] for event in self.events if event[0] == name]


def _record(name: str) -> Any:
    def hook(self: Trace, *args: Any) -> None:
        self.events.append((name, *(dict(a) if isinstance(a, dict) else a for a in args)))

    return hook


for _name in [n for n in vars(Callback) if n.startswith("on_")]:
    setattr(Trace, _name, _record(_name))


def test_the_order_of_hooks() -> None:
    trace = Trace()
    prepared(metrics="acc").fit((X, Y), (X[:10], Y[:10]), batch_size=[20, 10], verbose=0, callbacks=trace)
    assert trace.names() == [
        "on_train_begin",
        "on_epoch_begin",
        "on_train_batch_begin",
        "on_before_optimizer_step",
        "on_train_batch_end",
        "on_train_batch_begin",
        "on_before_optimizer_step",
        "on_train_batch_end",
        "on_eval_begin",
        "on_eval_batch_begin",
        "on_eval_batch_end",
        "on_eval_end",
        "on_epoch_end",
        "on_train_end",
    ]
    assert trace.params["metrics"] == ["loss", "acc"]
    assert trace.params["steps"] == 2
    assert trace.params["batch_size"] == 20


def test_logs_are_fresh_per_hook_and_hold_values_at_log_points() -> None:
    trace = Trace()
    prepared(metrics="acc").fit(
        (X, Y), (X, Y), batch_size=10, epochs=2, log_freq=3, shuffle=False, verbose=0, callbacks=trace
    )
    ends = trace.told("on_train_batch_end")
    assert [set(logs) for logs in ends[:4]] == [
        {"step", "batch_size"},
        {"step", "batch_size"},
        {"step", "batch_size", "loss", "acc", "lr"},
        {"step", "batch_size", "loss", "acc", "lr"},
    ]
    assert [logs["step"] for logs in ends] == [1, 2, 3, 4, 1, 2, 3, 4]
    assert trace.told("on_epoch_begin") == [{}, {}]
    assert trace.told("on_train_batch_begin") == [{}] * 8
    assert set(trace.told("on_eval_end")[0]) == {"loss", "acc", "samples"}
    assert set(trace.told("on_epoch_end")[0]) == {"loss", "acc", "lr", "eval_loss", "eval_acc"}


def test_callbacks_may_add_keys_that_later_ones_see() -> None:
    class Adds(Callback):
        def on_train_batch_end(self, step: int, logs: Any = None) -> None:
            logs["extra"] = step

    trace = Trace()
    prepared().fit((X, Y), batch_size=20, verbose=0, callbacks=[Adds(), trace])
    assert [logs["extra"] for logs in trace.told("on_train_batch_end")] == [0, 1]


@pytest.mark.parametrize(
    ("epochs", "freq", "expected"), [(4, 2, [2, 4]), (5, 2, [2, 4, 5]), (3, 1, [1, 2, 3]), (2, 9, [2])]
)
def test_evaluation_runs_after_every_nth_epoch_and_the_last(epochs: int, freq: int, expected: list[int]) -> None:
    history = prepared().fit((X, Y), (X, Y), batch_size=20, epochs=epochs, eval_freq=freq, verbose=0)
    assert history.epochs["eval_loss"] == expected
    assert len(history.history["loss"]) == epochs


@pytest.mark.parametrize(("iters", "epochs", "steps"), [(1, 1, 1), (2, 1, 2), (4, 2, 4), (5, 3, 5)])
def test_num_iters_counts_training_steps_only(iters: int, epochs: int, steps: int) -> None:
    """Reference wart: evaluation batches were counted too, and one epoch too many was announced."""
    trace = Trace()
    model = prepared()
    model.fit((X, Y), (X, Y), batch_size=20, num_iters=iters, verbose=0, callbacks=trace)
    assert model._progress.global_step == steps
    assert trace.params["epochs"] == epochs
    assert trace.names().count("on_epoch_begin") == epochs


def test_num_iters_counts_steps_not_batches_and_works_without_a_length() -> None:
    model = prepared()
    model.fit(iter([(X, Y)] * 50), num_iters=4, accumulate_grad_batches=3, verbose=0)
    assert model._progress.global_step == 4
    assert model._progress.samples == 4 * 3 * 40


def test_stop_training_is_honoured_at_the_next_batch_and_reset_by_the_next_fit() -> None:
    class Stops(Callback):
        def on_train_batch_end(self, step: int, logs: Any = None) -> None:
            if step == 1:
                self.model.stop_training = True

    model = prepared()
    model.fit((X, Y), batch_size=10, epochs=5, verbose=0, callbacks=Stops())
    assert model.stop_training
    assert model._progress.global_step == 2
    model.fit((X, Y), batch_size=10, epochs=2, verbose=0)
    assert model._progress.global_step == 2 + 8


def test_evaluate_with_num_iters_does_not_cripple_the_next_fit() -> None:
    model = prepared()
    part = model.evaluate((X, Y), batch_size=10, num_iters=2, verbose=0)
    assert part["loss"] == pytest.approx(model.evaluate((X[:20], Y[:20]), batch_size=10, verbose=0)["loss"])
    model.fit((X, Y), batch_size=10, epochs=2, verbose=0)
    assert model._progress.global_step == 8


def test_an_evaluation_in_the_middle_of_an_epoch_disturbsnullcontext() -> None:
    class Evaluates(Callback):
        def on_train_batch_end(self, step: int, logs: Any = None) -> None:
            self.model.evaluate((X[:7], Y[:7]), batch_size=7, verbose=0)

    plain, disturbed = prepared(metrics="acc"), prepared(metrics="acc")
    a = plain.fit((X, Y), batch_size=10, shuffle=False, verbose=0)
    b = disturbed.fit((X, Y), batch_size=10, shuffle=False, verbose=0, callbacks=Evaluates())
    assert a.history == b.history
    assert same_weights(plain.network, disturbed.network)


def test_a_scheduler_steps_once_per_optimizer_step() -> None:
    """Reference wart: it stepped per micro-batch."""
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), 1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    trace = Trace()
    model = hapi.Model(net).prepare(optimizer, "cross_entropy", scheduler=scheduler)
    model.fit((X, Y), batch_size=10, accumulate_grad_batches=2, log_freq=1, verbose=0, callbacks=trace)
    assert optimizer.param_groups[0]["lr"] == 0.25
    # A callback sees the rate that its batch was trained with.
    assert [logs["lr"] for logs in trace.told("on_train_batch_end")] == [1.0, 1.0, 0.5, 0.5]


def test_the_scheduler_callback_chooses_the_interval() -> None:
    for callback, expected in (
        (hapi.callbacks.LRScheduler(), 0.5**4),
        (hapi.callbacks.LRScheduler(by_step=False, by_epoch=True), 0.5**2),
        (hapi.callbacks.LRScheduler(by_step=False, by_epoch=False), 1.0),
    ):
        net = mlp()
        optimizer = torch.optim.SGD(net.parameters(), 1.0)
        model = hapi.Model(net).prepare(
            optimizer, "cross_entropy", scheduler=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        )
        model.fit((X, Y), batch_size=20, epochs=2, verbose=0, callbacks=callback)
        assert optimizer.param_groups[0]["lr"] == expected


@pytest.mark.parametrize("name", ["cosine", "linear", "one_cycle", "polynomial", "constant"])
def test_schedulers_by_name_span_the_fit_and_start_anew(name: str) -> None:
    model = prepared(scheduler=name)
    rates = []
    for _ in range(2):
        trace = Trace()
        model.fit((X, Y), batch_size=10, epochs=2, log_freq=1, verbose=0, callbacks=trace)
        rates.append([logs["lr"] for logs in trace.told("on_train_batch_end")])
    assert rates[0] == pytest.approx(rates[1])
    if name in ("cosine", "linear", "polynomial"):
        assert rates[0][0] == 0.1
        assert rates[0][-1] < 0.02
    with pytest.raises(ValueError, match="needs to know the number of steps") if name != "constant" else nullcontext():
        model.fit(iter([(X, Y)]), verbose=0)


def test_reduce_on_plateau_looks_at_the_evaluation() -> None:
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), 0.0)  # nothing improves
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, min_lr=-1)
    optimizer.param_groups[0]["lr"] = 0.0
    model = hapi.Model(net).prepare(optimizer, "cross_entropy", scheduler=scheduler)
    model.fit((X, Y), (X, Y), batch_size=20, epochs=3, verbose=0)
    assert scheduler.last_epoch == 3
    assert scheduler.num_bad_epochs == 0


def test_early_stopping_keeps_and_restores_the_best_weights() -> None:
    stop = hapi.callbacks.EarlyStopping(patience=1, restore_best_weights=True, verbose=0)

    class Worsens(Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 2:
                for group in self.run.optimizer.param_groups:
                    group["lr"] = 50.0

    model = prepared()
    history = model.fit((X, Y), (X, Y), batch_size=10, epochs=20, verbose=0, callbacks=[stop, Worsens()])
    assert len(history.history["loss"]) == 3
    best = min(history.history["eval_loss"])
    assert model.evaluate((X, Y), batch_size=10, verbose=0)["loss"] == pytest.approx(best)


def test_nothing_leaks_between_models() -> None:
    """Reference wart: one dict of logs for all models of a process."""
    prepared(metrics="acc").fit((X, Y), batch_size=20, verbose=0)
    trace = Trace()
    prepared().fit((X, Y), batch_size=20, verbose=0, callbacks=trace)
    assert not any("acc" in event[-1] for event in trace.events if isinstance(event[-1], dict))


def test_reference_style_and_torchmetrics_metrics_agree_with_hapis() -> None:
    torchmetrics = pytest.importorskip("torchmetrics", reason="needs hapi[torchmetrics]")

    class Mine(hapi.Metric):
        def __init__(self) -> None:
            self.reset()

        def compute(self, pred: Any, label: Any) -> Any:
            return pred.argmax(1) == label

        def update(self, correct: Any) -> float:
            self.right += correct.sum()
            self.rows += len(correct)
            return correct.mean()

        def accumulate(self) -> float:
            return self.right / self.rows

        def reset(self) -> None:
            self.right = self.rows = 0

        def name(self) -> str:
            return "mine"

    metrics = [
        Mine(),
        torchmetrics.classification.MulticlassAccuracy(3, average="micro", validate_args=False),
        lambda out, y: (out.argmax(1) == y).float().mean(),
        "acc",
    ]
    model = prepared(metrics=metrics)
    model.fit((X, Y), (X, Y), batch_size=7, epochs=3, verbose=0)
    values = model.evaluate((X, Y), batch_size=9, verbose=0)
    assert len({round(v, 9) for name, v in values.items() if name != "loss"}) == 1, values


def test_prepare_again_replaces_everything() -> None:
    model = prepared(metrics="acc")
    model.fit((X, Y), batch_size=20, verbose=0)
    model.prepare("adam", nn.CrossEntropyLoss(), hapi.metrics.Accuracy(topk=(1, 2)))
    assert set(model.fit((X, Y), batch_size=20, verbose=0).history) == {"loss", "acc_top1", "acc_top2", "lr"}


def test_one_line() -> None:
    history = hapi.Model(mlp()).prepare("adam", "cross_entropy", "accuracy").fit((X, Y), verbose=0)
    assert isinstance(history, hapi.callbacks.History)
