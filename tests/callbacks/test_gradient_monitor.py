from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import hapi
from hapi.callbacks import Callback, GradientMonitor, History
from tests.callbacks.driver import Driver
from tests.helpers.nets import blobs, mlp
from tests.helpers.ranks import run_ranks


class Seen(Callback):
    """The logs of every batch and epoch, and what torch says of every step's gradients."""

    def __init__(self, norm_type: float = 2.0) -> None:
        self.norm_type = norm_type
        self.batches: list[dict[str, Any]] = []
        self.epochs: list[dict[str, Any]] = []
        self.norms: list[float] = []

    def on_before_optimizer_step(self, step: int, logs: Any = None) -> None:
        gradients = [gradient for _, gradient in self.run.gradients()]
        self.norms.append(float(nn.utils.get_total_norm(gradients, self.norm_type)))

    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        self.batches.append(dict(logs))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.epochs.append(dict(logs))


def fit(monitor: GradientMonitor, seen: Seen, *, epochs: int = 1, prepare: Any = None, **options: Any) -> hapi.Model:
    net = mlp()
    model = hapi.Model(net)
    model.prepare(optim.SGD(net.parameters(), 0.1), nn.CrossEntropyLoss(), **(prepare or {}))
    options = {"batch_size": 8, "log_freq": 3, "verbose": 0, "shuffle": False} | options
    model.fit(blobs(64), epochs=epochs, callbacks=[monitor, seen], **options)
    return model


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf, 3.0])
def test_the_norm_of_the_first_step_of_each_interval(norm_type: float) -> None:
    seen = Seen(norm_type)
    fit(GradientMonitor(norm_type=norm_type), seen, epochs=2)
    found = [logs.get("grad_norm") for logs in seen.batches[:8]]
    assert [value is not None for value in found] == [False, False, True, False, False, True, False, True]
    assert [found[2], found[5], found[7]] == pytest.approx([seen.norms[0], seen.norms[3], seen.norms[6]], rel=1e-5)
    assert seen.epochs[0]["grad_norm"] == pytest.approx((seen.norms[0] + seen.norms[3] + seen.norms[6]) / 3, rel=1e-5)
    assert seen.epochs[1]["grad_norm"] == pytest.approx((seen.norms[8] + seen.norms[11] + seen.norms[14]) / 3, rel=1e-5)


def test_per_layer() -> None:
    seen = Seen()
    model = fit(GradientMonitor(per_layer=True), seen)
    names = [f"grad_norm/{name}" for name, _ in model.network.named_parameters()]
    point = seen.batches[2]
    assert [name for name in point if name.startswith("grad_norm/")] == names
    assert math.sqrt(sum(point[name] ** 2 for name in names)) == pytest.approx(point["grad_norm"])
    assert set(names) <= set(seen.epochs[0])


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_whole_steps_before_clipping(norm_type: float) -> None:
    seen, whole = Seen(norm_type), Seen(norm_type)
    monitor = GradientMonitor(norm_type=norm_type)
    fit(monitor, seen, batch_size=4, log_freq=2, accumulate_grad_batches=2, prepare={"clip_grad_norm": 1e-4})
    fit(monitor, whole, batch_size=8, log_freq=1, prepare={"clip_grad_norm": 1e-4})
    assert len(seen.norms) == 8
    assert seen.norms[0] > 1e-3
    assert [logs["grad_norm"] for logs in seen.batches[1::2]] == pytest.approx(
        [logs["grad_norm"] for logs in whole.batches], rel=1e-4
    )


def test_an_interval_without_a_step_has_no_value() -> None:
    seen = Seen()
    fit(GradientMonitor(), seen, log_freq=1, accumulate_grad_batches=4)
    assert ["grad_norm" in logs for logs in seen.batches] == [False, False, False, True] * 2


def test_master_weights() -> None:
    seen = Seen()
    model = fit(GradientMonitor(per_layer=True), seen, prepare={"amp": {"level": "O2", "dtype": "bfloat16"}})
    assert f"grad_norm/{next(iter(model.network.state_dict()))}" in seen.batches[2]
    assert seen.batches[2]["grad_norm"] == pytest.approx(seen.norms[0], rel=1e-5)


def test_unused_frozen_and_sparse_parameters() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(10, 4, sparse=True)
            self.frozen = nn.Linear(4, 4).requires_grad_(False)
            self.unused = nn.Linear(4, 4)
            self.head = nn.Linear(4, 3)

        def forward(self, words: Tensor) -> Tensor:
            return self.head(self.frozen(self.embedding(words).mean(1)))

    class Dense(Callback):
        def on_before_optimizer_step(self, step: int, logs: Any = None) -> None:
            self.norm = {name: float(gradient.to_dense().norm()) for name, gradient in self.run.gradients()}

    net, dense, seen = Net(), Dense(), []
    monitor = GradientMonitor(1, per_layer=True)
    words = torch.randint(0, 10, (4, 5))  # words come twice, so that rows of the gradient add up

    class Look(Callback):
        def on_train_batch_end(self, step: int, logs: Any = None) -> None:
            seen.append({name[10:]: v for name, v in logs.items() if name.startswith("grad_norm/")})

    model = hapi.Model(net).prepare(optim.SGD(net.parameters(), 0.1), nn.CrossEntropyLoss())
    model.fit((words, torch.tensor([0, 1, 2, 0])), batch_size=4, verbose=0, callbacks=[monitor, dense, Look()])
    assert set(seen[0]) == {"embedding.weight", "head.weight", "head.bias"}
    assert seen[0] == pytest.approx(dense.norm, rel=1e-5)


def set_gradients(driver: Driver, *values: float, dtype: torch.dtype = torch.float32) -> None:
    names = [f"layer{index}" for index in range(len(values))]
    tensors = [torch.full((4,), value, dtype=dtype) for value in values]
    driver.run.gradients = lambda: list(zip(names, tensors, strict=True))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (math.nan, r"gradients are not finite in epoch 1, batch 1 \(global step 1\): layer1 \(nan\)"),
        (math.inf, r"gradients are not finite in epoch 1, batch 1 \(global step 1\): layer1 \(inf\)"),
        (1e-9, r"gradients vanish \(norm below 1e-07\) in epoch 1, batch 1 .*: layer1 \(2e-09\)"),
        (0.0, r"gradients vanish \(norm below 1e-07\) in epoch 1, batch 1 .*: layer1 \(0\)"),
        (1e5, r"gradients explode \(norm above 1000\) in epoch 1, batch 1 .*: layer1 \(2e\+05\)"),
    ],
)
def test_warnings_come_once_per_fit(value: float, message: str) -> None:
    driver = Driver([GradientMonitor(1, vanishing=1e-7, exploding=1e3)])
    set_gradients(driver, 1.0, value)
    for _ in range(2):
        driver.run.progress.global_step = 0
        driver.run.progress.epoch = 0
        with pytest.warns(RuntimeWarning, match=message) as seen:
            driver.fit(2)
        assert len(seen) == 1


def test_many_parameters_are_not_all_named() -> None:
    driver = Driver([GradientMonitor(1, exploding=1e3)])
    set_gradients(driver, *[1e6] * 8)
    with pytest.warns(RuntimeWarning, match=r"layer4 \(2e\+06\) and 3 more$"):
        driver.fit(1)


def test_without_thresholds_only_what_is_not_finite_is_said() -> None:
    seen = Seen()
    driver = Driver([GradientMonitor(1), seen])
    set_gradients(driver, 1e15, 0.0)
    driver.fit(1)  # warnings are errors here
    assert seen.batches[0]["grad_norm"] == pytest.approx(2e15)


def test_half_precision_does_not_overflow() -> None:
    seen = Seen()
    driver = Driver([GradientMonitor(1), seen])
    set_gradients(driver, 6e4, 6e4, dtype=torch.float16)
    seen.on_before_optimizer_step = lambda *args: None  # type: ignore[method-assign]  # overflows
    driver.fit(1)
    assert seen.batches[0]["grad_norm"] == pytest.approx(6e4 * math.sqrt(8), rel=1e-3)


def test_nothing_is_read_between_log_points(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    driver = Driver([GradientMonitor()], batches=8, log_freq=4)
    measure = torch._foreach_norm
    monkeypatch.setattr(torch, "_foreach_norm", lambda *a, **k: (steps.append(len(reads)), measure(*a, **k))[1])
    steps: list[int] = []
    read = Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda tensor: (reads.append(1), read(tensor))[1])
    for name in ("item", "cpu", "__bool__", "__float__"):
        monkeypatch.setattr(Tensor, name, lambda *args: pytest.fail("the host waits for the device"))
    driver.fit(1)
    assert len(reads) == 2
    assert steps == [0, 1]


def test_history_and_a_fit_that_follows() -> None:
    net = mlp()
    model = hapi.Model(net).prepare(optim.SGD(net.parameters(), 0.1), nn.CrossEntropyLoss())
    monitor = GradientMonitor()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            history = model.fit(blobs(32), batch_size=8, epochs=2, verbose=0, callbacks=monitor)
            assert isinstance(history, History)
            assert len(history.history["grad_norm"]) == 2


def _norms(batch_size: int) -> list[float]:
    seen = Seen()
    fit(GradientMonitor(per_layer=True, exploding=1e6), seen, batch_size=batch_size)
    return [logs["grad_norm"] for logs in seen.batches if "grad_norm" in logs]


@pytest.mark.ranks
def test_several_ranks_measure_what_one_does() -> None:
    norms, others = run_ranks(_norms, 2, 4)
    assert norms == pytest.approx(_norms(8), rel=1e-4)
    assert len(norms) == 3
    assert others == []  # rank 0 only


def test_arguments_are_checked() -> None:
    for bad in (0, -1, math.nan):
        with pytest.raises(ValueError, match="GradientMonitor: norm_type="):
            GradientMonitor(norm_type=bad)
    with pytest.raises(TypeError, match="per_layer=1; accepted: True or False"):
        GradientMonitor(per_layer=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="vanishing=-1; accepted: a finite number >= 0"):
        GradientMonitor(vanishing=-1)
