"""Stand-ins for the packages of tracking services, which note what they are told."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


class FakeWandbRun:
    def __init__(self, module: FakeWandb, options: dict[str, Any]) -> None:
        self.module, self.options, self.id = module, options, options.get("id", "given")
        self.points: list[dict[str, float]] = []
        self.axes: dict[str, str] = {}
        self.settings: dict[str, Any] = {}
        self.ended: int | None = None
        self.config = SimpleNamespace(update=self._update)

    def _update(self, values: dict[str, Any], allow_val_change: bool = False) -> None:
        assert allow_val_change
        self.settings.update(values)

    def define_metric(self, name: str, step_metric: str) -> None:
        self.axes[name] = step_metric

    def log(self, values: dict[str, float]) -> None:
        if self.module.broken:
            raise self.module.errors.Error("the service is gone\nand more")
        self.points.append(values)

    def finish(self, exit_code: int) -> None:
        self.ended = exit_code
        self.module.run = None


class FakeWandb(ModuleType):
    """``wandb``. ``broken``: its runs raise; ``offline``: it cannot connect."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.run: FakeWandbRun | None = None
        self.runs: list[FakeWandbRun] = []
        self.broken = self.offline = False
        error = type("Error", (Exception,), {})
        self.errors = SimpleNamespace(Error=error, CommError=type("CommError", (error,), {}))

    def init(
        self,
        entity: Any = None,
        project: Any = None,
        dir: Any = None,
        id: Any = None,
        name: Any = None,
        tags: Any = None,
        config: Any = None,
        job_type: Any = None,
        mode: Any = None,
        resume: Any = None,
    ) -> FakeWandbRun:
        options = {key: value for key, value in locals().items() if value is not None and key != "self"}
        if self.offline and mode != "offline":
            raise self.errors.CommError("connection refused")
        assert self.run is None
        self.run = FakeWandbRun(self, options)
        self.runs.append(self.run)
        return self.run


class FakeMLflow(ModuleType):
    """``mlflow``. ``error``: what every call to the server raises, if any."""

    def __init__(self) -> None:
        super().__init__("mlflow")
        self.stack: list[Any] = []
        self.runs: dict[str, Any] = {}
        self.calls: list[tuple[Any, ...]] = []
        self.error: Exception | None = None

    def _reach(self, *call: Any) -> None:
        self.calls.append(call)
        if self.error is not None:
            raise self.error

    def MlflowClient(self) -> FakeMLflow:
        return self

    def set_tracking_uri(self, uri: str) -> None:
        self.calls.append(("uri", uri))

    def set_experiment(self, name: str) -> Any:
        self._reach("experiment", name)
        return SimpleNamespace(experiment_id=f"id of {name}")

    def active_run(self) -> Any:
        return self.stack[-1] if self.stack else None

    def start_run(self, run_id: Any = None, experiment_id: Any = None, run_name: Any = None, tags: Any = None) -> Any:
        self._reach("start", run_id, experiment_id, run_name, tags)
        assert not self.stack
        identity = run_id or f"run{len(self.runs)}"
        new = SimpleNamespace(
            info=SimpleNamespace(run_id=identity, status="RUNNING"), data=SimpleNamespace(params={}), points=[]
        )
        run = self.runs.setdefault(identity, new)
        run.info.status = "RUNNING"
        self.stack.append(run)
        return run

    def end_run(self, status: str) -> None:
        run = self.stack.pop()
        self._reach("end", status)
        run.info.status = status

    def set_terminated(self, run_id: str, status: str) -> None:
        self._reach("terminate", run_id, status)
        self.runs[run_id].info.status = status

    def get_run(self, run_id: str) -> Any:
        return self.runs[run_id]

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        self._reach("batch", len(metrics), len(params))
        run = self.runs[run_id]
        run.points += [(metric.key, metric.value, metric.step) for metric in metrics]
        for param in params:
            assert param.key not in run.data.params, "MLflow lets nobody change a parameter"
            run.data.params[param.key] = param.value


def fake_wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    """Put the stand-in into ``sys.modules``."""
    module = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def fake_mlflow(monkeypatch: pytest.MonkeyPatch) -> FakeMLflow:
    """Put the stand-in into ``sys.modules``."""
    module = FakeMLflow()
    entities = ModuleType("mlflow.entities")
    entities.Metric = lambda key, value, timestamp, step: SimpleNamespace(key=key, value=value, step=step)  # type: ignore[attr-defined]
    entities.Param = lambda key, value: SimpleNamespace(key=key, value=value)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    return module
