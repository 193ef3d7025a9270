from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hapi
from hapi.callbacks import Callback, MLflow
from tests.callbacks.fakes import FakeMLflow, fake_mlflow
from tests.helpers.launching import free_port, sandbox
from tests.helpers.nets import blobs, mlp

X, Y = blobs(50)
NEEDED = pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="needs mlflow")


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> FakeMLflow:
    return fake_mlflow(monkeypatch)


def prepared() -> hapi.Model:
    net = mlp()
    return hapi.Model(net).prepare(torch.optim.SGD(net.parameters(), 0.1), "cross_entropy", "acc")


def fit(model: hapi.Model, *callbacks: Callback, **options: Any) -> hapi.callbacks.History:
    how: dict[str, Any] = {"batch_size": 8, "epochs": 2, "verbose": 0, "log_freq": 3, "seed": 1}
    return model.fit((X, Y), (X, Y), callbacks=list(callbacks), **{**how, **options})


class Dies(Callback):
    def __init__(self, exception: BaseException) -> None:
        self.exception = exception

    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        if self.run.progress.global_step == 11:
            raise self.exception


def test_a_run(service: FakeMLflow) -> None:
    before = os.listdir()
    writer = MLflow("http://127.0.0.1:5000", "mnist", "a/b", {"team": "x"})
    assert service.calls == []  # begins with the fit
    history = fit(prepared(), writer).history
    assert service.calls[:3] == [
        ("uri", "http://127.0.0.1:5000"),
        ("experiment", "mnist"),
        ("start", None, "id of mnist", "a/b", {"team": "x"}),
    ]
    (run,) = service.runs.values()
    assert {"optimizer": "SGD", "lr": "0.1", "batch_size": "8"}.items() <= run.data.params.items()
    assert [step for key, _, step in run.points if key == "train/loss"] == [3, 6, 7, 10, 13, 14]
    assert [value for key, value, _ in run.points if key == "eval/loss"] == history["eval_loss"]
    batches = [call for call in service.calls if call[0] == "batch"]
    assert len(batches) == 1 + 6 + 2  # the parameters, and a call per point
    assert (run.info.status, service.stack) == ("FINISHED", [])
    assert os.listdir() == before


def test_names_that_mlflow_refuses(service: FakeMLflow) -> None:
    net = mlp()
    model = hapi.Model(net).prepare("sgd", "cross_entropy", [hapi.metrics.Accuracy(name="top 1 %(a)")])
    fit(model, MLflow())
    (run,) = service.runs.values()
    assert {key for key, _, _ in run.points if "top" in key} == {"train/top 1 __a_", "eval/top 1 __a_"}


def test_fit_evaluate_fit_is_one_run_and_another_model_another(service: FakeMLflow) -> None:
    writer, model = MLflow(), prepared()
    fit(model, writer)
    model.evaluate((X, Y), batch_size=50, verbose=0, callbacks=writer)
    fit(model, writer)
    fit(prepared(), writer)
    assert [call[1] for call in service.calls if call[0] == "start"] == [None, "run0", "run0", None]
    assert sorted(service.runs) == ["run0", "run1"]


@pytest.mark.parametrize(
    ("exception", "status"),
    [(KeyError("killed"), "FAILED"), (KeyboardInterrupt(), "KILLED"), (SystemExit(143), "KILLED")],
)
def test_a_fit_that_fails_and_is_resumed(
    service: FakeMLflow, tmp_path: Path, exception: BaseException, status: str
) -> None:
    options: dict[str, Any] = {"save_dir": tmp_path / "saved", "save_every_n_steps": 4, "resume": "auto"}
    with pytest.raises(type(exception)):
        fit(prepared(), MLflow(), Dies(exception), **options)
    (run,) = service.runs.values()
    assert run.info.status == status
    fit(prepared(), MLflow(), **options)
    (run,) = service.runs.values()
    assert run.info.status == "FINISHED"
    assert [step for key, _, step in run.points if key == "train/loss"] == [3, 6, 7, 10, 10, 13, 14]


def test_an_active_run_is_used_and_not_ended(service: FakeMLflow) -> None:
    own = service.start_run()
    own.data.params["lr"] = "the user's"
    fit(prepared(), MLflow(experiment="not this one"))
    assert own.points
    assert (own.data.params["lr"], own.data.params["optimizer"]) == ("the user's", "SGD")
    assert (own.info.status, service.stack) == ("RUNNING", [own])


def test_a_run_that_the_user_began_on_top_is_left_alone(service: FakeMLflow) -> None:
    nested = SimpleNamespace(info=SimpleNamespace(run_id="nested", status="RUNNING"))

    class Nests(Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            service.stack.append(nested)

    fit(prepared(), MLflow(), Nests())
    assert service.stack[-1] is nested
    assert (nested.info.status, service.runs["run0"].info.status) == ("RUNNING", "FINISHED")


def test_a_server_that_goes_away_does_not_stop_the_training(service: FakeMLflow) -> None:
    class Cuts(Callback):
        def on_train_batch_end(self, step: int, logs: Any = None) -> None:
            service.error = RuntimeError("no\nanswer")

    with pytest.warns(RuntimeWarning, match="RuntimeError: no answer. Training goes on without MLflow") as caught:
        history = fit(prepared(), Cuts(), MLflow())
    assert len(caught) == 1
    assert len(history.history["loss"]) == 2
    assert service.stack == []


def test_a_server_that_is_not_there_does_not_stop_the_training(service: FakeMLflow) -> None:
    service.error = RuntimeError("request failed")
    service.error.__cause__ = ConnectionError("refused")
    with pytest.warns(RuntimeWarning, match="MLflow: RuntimeError: request failed. Training goes on") as caught:
        fit(prepared(), MLflow())
    assert len(caught) == 1
    assert len(service.calls) == 1


def test_what_the_server_refuses_is_told_before_training(service: FakeMLflow) -> None:
    service.error = RuntimeError("no such experiment")
    with pytest.raises(RuntimeError, match="no such experiment"):
        fit(prepared(), MLflow())


def test_wrong_arguments_are_named(service: FakeMLflow) -> None:
    with pytest.raises(TypeError, match="MLflow: experiment=3; accepted: a text, or None"):
        MLflow(experiment=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="MLflow: tags='x'; accepted: a dict, or None"):
        MLflow(tags="x")  # type: ignore[arg-type]


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ImportError, match="pip install mlflow"):
        MLflow()


@NEEDED
def test_mlflow_itself(tmp_path: Path) -> None:
    code = """
        import math, warnings
        import mlflow
        from hapi.callbacks import MLflow
        from tests.callbacks.test_mlflow import Dies, fit, prepared
        warnings.simplefilter("error", RuntimeWarning)

        options = {"save_dir": "saved", "save_every_n_steps": 4, "resume": "auto"}
        arguments = {"tracking_uri": "file:runs", "experiment": "mnist", "name": "run", "tags": {"team": "x"}}
        try:
            fit(prepared(), MLflow(**arguments), Dies(KeyboardInterrupt()), **options)
        except KeyboardInterrupt:
            pass
        client = mlflow.MlflowClient()
        (run,) = client.search_runs([client.get_experiment_by_name("mnist").experiment_id])
        assert run.info.status == "KILLED" and mlflow.active_run() is None
        history = fit(prepared(), MLflow(**arguments), **options).history
        run = client.get_run(run.info.run_id)
        assert (run.info.status, run.info.run_name, run.data.tags["team"]) == ("FINISHED", "run", "x")
        assert run.data.params["optimizer"] == "SGD" and run.data.params["lr"] == "0.1"
        points = client.get_metric_history(run.info.run_id, "eval/loss")
        assert [(p.step, p.value) for p in points] == list(zip((7, 14), history["eval_loss"]))
        steps = [p.step for p in client.get_metric_history(run.info.run_id, "train/loss")]
        assert sorted(set(steps)) == [3, 6, 7, 10, 13, 14], steps
        assert len(client.search_runs([run.info.experiment_id])) == 1

        with mlflow.start_run() as own:
            mlflow.log_param("lr", "mine")
            writer = MLflow()
            fit(prepared(), writer)
            writer.open_run(writer.log_dir, 0, False)
            writer.write({"odd %": math.nan, "inf": math.inf}, 15)
            assert mlflow.active_run().info.run_id == own.info.run_id
        data = client.get_run(own.info.run_id).data
        assert data.params["lr"] == "mine" and data.params["optimizer"] == "SGD" and math.isnan(data.metrics["odd _"])
    """
    with sandbox(tmp_path) as box:
        ended = box.run(
            [sys.executable, box.script("train.py", code)], {"MLFLOW_ALLOW_FILE_STORE": "true", "HOME": str(tmp_path)}
        )
    assert ended.code == 0, ended.err


@NEEDED
def test_mlflow_itself_without_a_server(tmp_path: Path) -> None:
    code = """
        import sys, warnings
        from hapi.callbacks import MLflow
        from tests.callbacks.test_mlflow import fit, prepared
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(prepared(), MLflow("http://127.0.0.1:" + sys.argv[1], "mnist"))
        texts = [str(w.message) for w in caught if issubclass(w.category, RuntimeWarning)]
        assert len(texts) == 1 and "Training goes on without MLflow" in texts[0], texts
    """
    with sandbox(tmp_path) as box:
        ended = box.run(
            [sys.executable, box.script("train.py", code), str(free_port())],
            {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "HOME": str(tmp_path)},
        )
    assert ended.code == 0, ended.err
