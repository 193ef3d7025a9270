"""What every callback of the package promises; a new one without an entry in ``EXAMPLES`` fails here."""

from __future__ import annotations

import copy
import importlib
import inspect
import io
import pickle
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hapi.callbacks
from hapi.callbacks import Callback
from tests.callbacks.driver import Driver
from tests.callbacks.fakes import fake_mlflow, fake_wandb


def _nothing(*args: Any) -> None:
    pass


Arguments = dict[str, Any]

EXAMPLES: dict[str, Callable[[Path], Arguments]] = {
    "BatchSizeFinder": lambda folder: {"max_size": 64},
    "BoardLogger": lambda folder: {"log_dir": folder, "name": "run", "grad_norm": True, "weight_histograms": True},
    "CSV": lambda folder: {"log_dir": folder, "name": "run"},
    "CSVLogger": lambda folder: {"filename": folder / "log.csv"},
    "Callback": lambda folder: {},
    "DeviceStats": lambda folder: {"log_freq": 2},
    "EMA": lambda folder: {"decay": 0.5},
    "EarlyStopping": lambda folder: {"patience": 5, "restore_best_weights": True},
    "GradientMonitor": lambda folder: {"per_layer": True},
    "History": lambda folder: {},
    "JSONLines": lambda folder: {"log_dir": folder, "name": "run"},
    "LRScheduler": lambda folder: {"by_step": False, "by_epoch": True},
    "LearningRateFinder": lambda folder: {"steps": 12},
    "LambdaCallback": lambda folder: {"on_epoch_end": _nothing},
    "Logger": lambda folder: {"log_dir": folder, "name": "run", "hparams": True},
    "MLflow": lambda folder: {"tracking_uri": "file:x", "tags": {"a": 1}},
    "ModelCheckpoint": lambda folder: {"save_dir": folder, "monitor": "eval_loss", "max_to_keep": 2},
    "PredictionWriter": lambda folder: {"path": folder / "out.npy"},
    "ProfilerCallback": lambda folder: {"log_dir": folder / "traces", "activities": ["cpu"]},
    "ProgBarLogger": lambda folder: {"log_freq": 2, "verbose": 2},
    "ReduceLROnPlateau": lambda folder: {"patience": 1},
    "TensorBoard": lambda folder: {"log_dir": folder, "name": "run", "hparams": True, "weight_histograms": True},
    "SWA": lambda folder: {"start": 1, "lr": 0.01},
    "TerminateOnNaN": lambda folder: {"check_every": 1},
    "Throughput": lambda folder: {"window": 2, "flops_per_sample": 1e6, "peak_tflops": 1.0},
    "Timer": lambda folder: {"duration": 3600},
    "VisualDL": lambda folder: {"log_dir": folder, "name": "run", "hparams": True, "weight_histograms": True},
    "Wandb": lambda folder: {"project": "p", "dir": folder, "tags": ["a"]},
    "WandbCallback": lambda folder: {"project": "p", "dir": folder},
}

HOOKS = [name for name in vars(Callback) if name.startswith("on_")]


def _found() -> dict[str, type[Callback]]:
    found = {}
    for info in pkgutil.iter_modules(hapi.callbacks.__path__, "hapi.callbacks."):
        for name, member in vars(importlib.import_module(info.name)).items():
            if inspect.isclass(member) and issubclass(member, Callback) and not name.startswith("_"):
                found[name] = member
    return found


CALLBACKS = _found()


@pytest.fixture(autouse=True)
def _services(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_wandb(monkeypatch)
    fake_mlflow(monkeypatch)


@pytest.fixture(params=sorted(CALLBACKS))
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Callback]:
    name = request.param
    assert name in EXAMPLES, f"add example arguments of {name} to EXAMPLES"
    return lambda: CALLBACKS[name](**EXAMPLES[name](tmp_path))


def run(*callbacks: Callback) -> Driver:
    """Two fits, a standalone evaluation and a prediction."""
    driver = Driver(callbacks, evaluate=lambda i: {"loss": 1.0 + i % 2}, metrics=["loss"])
    driver.fit(3)
    driver.fit(2)
    driver.evaluate()
    driver.predict()
    return driver


def test_all_are_public() -> None:
    assert set(CALLBACKS) <= set(hapi.callbacks.__all__)
    assert set(EXAMPLES) == set(CALLBACKS)


def test_all_have_documentation() -> None:
    for name, kind in CALLBACKS.items():
        assert kind.__doc__ is not None
        assert ">>>" in kind.__doc__, f"{name} has no example"


def test_every_hook_can_be_called_and_overridden_with_the_base_signature(
    make: Callable[[], Callback],
) -> None:
    callback = make()
    for name in HOOKS:
        expected = list(inspect.signature(getattr(Callback, name)).parameters)[1:]
        hook = getattr(callback, name)
        if inspect.ismethod(hook):
            assert list(inspect.signature(hook).parameters) == expected, name


def test_two_fits_in_a_row(make: Callable[[], Callback]) -> None:
    driver = run(make())
    assert driver.run.progress.epoch == 5


def test_failure_then_another_fit(make: Callable[[], Callback]) -> None:
    driver = Driver([make()], evaluate=lambda i: {"loss": 1.0})
    for fail_at in ((1, 1), (1, 3), (2, 0)):
        with pytest.raises(RuntimeError, match="failed"):
            driver.fit(3, fail_at=fail_at)
    with pytest.raises(RuntimeError, match="failed"):
        driver.evaluate(fail=True)
    with pytest.raises(RuntimeError, match="failed"):
        driver.predict(fail=True)
    run(driver.callbacks[0])


def test_state_round_trip(make: Callable[[], Callback]) -> None:
    callback, other = make(), make()
    run(callback)
    state = callback.state_dict()
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)  # tensors and plain containers only
    other.load_state_dict(loaded)
    assert_equal(other.state_dict(), state)
    before = copy.deepcopy(state)
    run(callback)
    assert_equal(state, before)  # a snapshot, not a view


def assert_equal(left: Any, right: Any) -> None:
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        for key in left:
            assert_equal(left[key], right[key])
    elif isinstance(left, list):
        assert len(left) == len(right)
        for a, b in zip(left, right, strict=True):
            assert_equal(a, b)
    elif isinstance(left, (torch.Tensor, np.ndarray)):
        assert (left == right).all()
    else:
        assert left == right


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_copies_before_use(make: Callable[[], Callback], copied: Callable[[Callback], Callback]) -> None:
    run(copied(make()))
