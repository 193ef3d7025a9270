from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import hapi
from hapi.callbacks import Callback, Wandb, WandbCallback
from tests.callbacks.fakes import FakeWandb, fake_wandb
from tests.helpers.launching import sandbox
from tests.helpers.nets import blobs, mlp
from tests.helpers.ranks import run_ranks

X, Y = blobs(50)


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    return fake_wandb(monkeypatch)


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


def test_a_run(service: FakeWandb, tmp_path: Path) -> None:
    writer = Wandb("mnist", "team", "a/b", tmp_path, "offline", "train", tags=["x"], config={"note": 1, "lr": 7})
    assert service.runs == []  # begins with the fit
    history = fit(prepared(), writer).history
    (run,) = service.runs
    assert run.options == {
        "project": "mnist", "entity": "team", "name": "a/b", "dir": tmp_path, "mode": "offline", "job_type": "train",
        "tags": ["x"], "resume": "allow", "id": run.id,
    }  # fmt: skip
    assert {"lr": 7, "note": 1, "optimizer": "SGD", "batch_size": 8}.items() <= run.settings.items()
    assert run.axes == dict.fromkeys(("train/*", "eval/*", "perf/*"), "global_step")
    assert [p["global_step"] for p in run.points if "train/loss" in p] == [3, 6, 7, 10, 13, 14]
    assert [p["eval/loss"] for p in run.points if "eval/loss" in p] == history["eval_loss"]
    assert (run.ended, service.run) == (0, None)
    assert os.listdir(tmp_path) == []


def test_fit_evaluate_fit_is_one_run_and_another_model_another(service: FakeWandb, tmp_path: Path) -> None:
    writer, model = Wandb(dir=tmp_path), prepared()
    fit(model, writer)
    model.evaluate((X, Y), batch_size=50, verbose=0, callbacks=writer)
    fit(model, writer)
    fit(prepared(), writer)
    ids = [run.id for run in service.runs]
    assert ids[0] == ids[1] == ids[2] != ids[3]
    assert [bool(run.settings) for run in service.runs] == [True, False, False, True]
    assert [run.ended for run in service.runs] == [0, 0, 0, 0]


def test_a_resumed_fit_goes_on_in_its_run(service: FakeWandb, tmp_path: Path) -> None:
    options: dict[str, Any] = {"save_dir": tmp_path / "saved", "save_every_n_steps": 4, "resume": "auto"}
    with pytest.raises(KeyError):
        fit(prepared(), Wandb(dir=tmp_path), Dies(KeyError("killed")), **options)
    assert service.runs[0].ended == 1
    fit(prepared(), Wandb(dir=tmp_path), **options)
    first, second = service.runs
    assert (second.id, second.options["resume"]) == (first.id, "allow")
    assert [p["global_step"] for p in second.points if "train/loss" in p] == [10, 13, 14]


def test_the_users_own_id_and_run(service: FakeWandb, tmp_path: Path) -> None:
    fit(prepared(), Wandb(dir=tmp_path, id="mine"))
    assert service.runs[0].id == "mine"
    own = service.init()
    fit(prepared(), Wandb(dir=tmp_path))
    assert len(service.runs) == 2
    assert own.points
    assert own.settings["optimizer"] == "SGD"
    assert (own.ended, service.run) == (None, own)


def test_without_a_network_the_run_is_kept_here(service: FakeWandb, tmp_path: Path) -> None:
    service.offline = True
    with pytest.warns(RuntimeWarning, match=r"Wandb: CommError: connection refused\. .*wandb sync"):
        fit(prepared(), Wandb(dir=tmp_path))
    assert service.runs[0].options["mode"] == "offline"
    assert service.runs[0].points


def test_a_service_that_fails_does_not_stop_the_training(service: FakeWandb, tmp_path: Path) -> None:
    service.broken = True
    with pytest.warns(RuntimeWarning, match=r"the service is gone and more\. Training goes on without Wandb"):
        history = fit(prepared(), Wandb(dir=tmp_path))
    assert len(history.history["loss"]) == 2
    assert (service.runs[0].points, service.run) == ([], None)


def test_wrong_arguments_are_named(service: FakeWandb) -> None:
    with pytest.raises(TypeError, match="Wandb: project=3; accepted: a text, or None"):
        Wandb(3)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match="Wandb: mode='of'; accepted: 'online', 'offline', 'disabled', 'shared', or None"
    ):
        Wandb(mode="of")
    with pytest.raises(TypeError, match=r"Wandb: projct='x'; wandb\.init accepts: .*project"):
        Wandb(projct="x")
    with pytest.raises(TypeError, match="Wandb: config='x'; accepted: a dict"):
        Wandb(config="x")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match="pip install wandb"):
        Wandb()


def test_the_references_name() -> None:
    assert WandbCallback is Wandb


def _on_a_rank() -> int:
    with pytest.MonkeyPatch.context() as monkeypatch:
        service = fake_wandb(monkeypatch)
        fit(prepared(), Wandb())
        return len(service.runs)


@pytest.mark.ranks
def test_one_run_for_all_ranks() -> None:
    assert run_ranks(_on_a_rank, 2) == [1, 0]


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="needs wandb")
def test_wandb_itself(tmp_path: Path) -> None:
    code = """
        import json, warnings
        import wandb
        from hapi.callbacks import Wandb
        from tests.callbacks.test_wandb import X, Y, fit, prepared
        sent = []
        log = wandb.Run.log
        wandb.Run.log = lambda self, data, *args, **kwargs: (sent.append(data), log(self, data, *args, **kwargs))
        writer, model = Wandb("p", dir=".", mode="offline", name="run"), prepared()
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            fit(model, writer)
            first = writer.run_id
            model.evaluate((X, Y), batch_size=50, verbose=0, callbacks=writer)
            assert (writer.run_id, wandb.run) == (first, None)
            with wandb.init(mode="offline", dir=".") as own:
                fit(model, Wandb())
                assert wandb.run is own and own.config["optimizer"] == "SGD" and own.summary["global_step"] == 28
        print(json.dumps([first, [point["global_step"] for point in sent]]))
    """
    with sandbox(tmp_path) as box:
        ended = box.run(
            [sys.executable, box.script("train.py", code)],
            {"WANDB_SILENT": "true", "HOME": str(tmp_path), "WANDB_ERROR_REPORTING": "false"},
        )
    assert ended.code == 0, ended.err
    identity, steps = json.loads(ended.out)
    assert steps[:8] == [3, 6, 7, 7, 10, 13, 14, 14]
    assert len(list((tmp_path / "wandb").glob(f"offline-run-*-{identity}/run-{identity}.wandb"))) >= 1
