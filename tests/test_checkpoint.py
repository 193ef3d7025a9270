"""save and load: what is in the files, what is refused, and what a crash or a full disk leaves."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import resource
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hapi
from hapi import CheckpointError
from hapi.engine import checkpoint
from tests.helpers.nets import blobs, mlp, same_weights

X, Y = blobs(60)


def trained(optimizer: Any = "adam", epochs: int = 1, net: nn.Module | None = None, **options: Any) -> hapi.Model:
    model = hapi.Model(net or mlp()).prepare(optimizer, "cross_entropy", **options)
    model.fit((X, Y), batch_size=16, epochs=epochs, shuffle=False, verbose=0)
    return model


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_weights_file_is_a_plain_state_dict(tmp_path: Path) -> None:
    model = trained()
    model.save(tmp_path / "sub" / "net.v1.2")
    assert names(tmp_path / "sub") == ["net.v1.2.json", "net.v1.2.pt", "net.v1.2.state.pt"]
    net = mlp(seed=9)
    net.load_state_dict(torch.load(tmp_path / "sub" / "net.v1.2.pt", weights_only=True))
    assert same_weights(net, model.network)


@pytest.mark.parametrize("order", ["load first", "prepare first"])
@pytest.mark.parametrize("path", ["ckpt", "ckpt.pt", "ckpt.state.pt"])
def test_training_goes_on_where_it_was(tmp_path: Path, order: str, path: str) -> None:
    through = trained(epochs=4, scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 3, 0.5))
    first = trained(epochs=2, scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 3, 0.5))
    first.save(tmp_path / "ckpt")
    second = hapi.Model(mlp(seed=5))

    def prepare() -> None:
        second.prepare("adam", "cross_entropy", scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 3, 0.5))

    if order == "load first":
        second.load(tmp_path / path)
        prepare()
    else:
        prepare()
        second.load(tmp_path / path)
    second.fit((X, Y), batch_size=16, epochs=2, shuffle=False, verbose=0)
    assert same_weights(through.network, second.network)


def test_the_fp16_scaler_is_restored(tmp_path: Path) -> None:
    model = trained(amp={"init_loss_scaling": 64.0, "incr_every_n_steps": 2})
    scale = model._scaler.get_scale()
    assert scale > 64.0
    model.save(tmp_path / "a")
    fresh = hapi.Model(mlp()).prepare("adam", "cross_entropy", amp={"init_loss_scaling": 64.0})
    fresh.load(tmp_path / "a")
    assert fresh._scaler.get_scale() == scale


def test_master_weights_are_restored(tmp_path: Path) -> None:
    through, first = trained(epochs=2, amp="O2"), trained(epochs=1, amp="O2")
    first.save(tmp_path / "a")
    second = hapi.Model(mlp(seed=4)).prepare("adam", "cross_entropy", amp="O2").load(tmp_path / "a")
    second.fit((X, Y), batch_size=16, epochs=1, shuffle=False, verbose=0)
    assert same_weights(through.network, second.network)


def test_optimizer_state_is_keyed_by_name_not_by_order(tmp_path: Path) -> None:
    model = trained()
    model.save(tmp_path / "a")
    net = mlp(seed=3)
    backwards = hapi.Model(net).prepare(torch.optim.Adam(list(net.parameters())[::-1]), "cross_entropy")
    backwards.load(tmp_path / "a")
    for name, parameter in net.named_parameters():
        theirs = dict(model.network.named_parameters())[name]
        mine = backwards._optimizer.state[parameter]["exp_avg"]
        assert torch.equal(mine, model._optimizer.state[theirs]["exp_avg"])


def test_sgd_without_state_and_evaluation_only(tmp_path: Path) -> None:
    trained("sgd").save(tmp_path / "a")
    hapi.Model(mlp()).prepare("sgd", "mse").load(tmp_path / "a")
    only = hapi.Model(mlp()).prepare(None, "cross_entropy").load(tmp_path / "a")
    only.save(tmp_path / "b")
    assert names(tmp_path) == ["a.json", "a.pt", "a.state.pt", "b.json", "b.pt"]
    only.save(tmp_path / "a")
    assert names(tmp_path) == ["a.json", "a.pt", "b.json", "b.pt"], "a stale training state is removed"


def test_mismatches_are_reported(tmp_path: Path) -> None:
    trained().save(tmp_path / "a")
    other = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0), nn.Linear(16, 5), nn.Linear(5, 2))
    before = [p.detach().clone() for p in other.parameters()]
    with pytest.raises(ValueError, match=r"missing: 4.weight, 4.bias; other shape: 3.weight: file \(3, 16\)"):
        hapi.Model(other).load(tmp_path / "a")
    assert all(torch.equal(a, b) for a, b in zip(before, other.parameters(), strict=True)), "nothing was changed"
    with pytest.warns(UserWarning, match="skip loading for") as caught:
        hapi.Model(other).load(tmp_path / "a", skip_mismatch=True)
    assert sorted(str(w.message).split()[-1] for w in caught) == ["3.bias", "3.weight", "4.bias", "4.weight"]
    assert not torch.equal(before[0], next(other.parameters()))
    small = nn.Sequential(nn.Linear(8, 16))
    with pytest.warns(UserWarning, match=r"unexpected weights: \['3.weight', '3.bias'\]"):
        hapi.Model(small).load(tmp_path / "a")


def test_another_optimizer_is_refused_unless_reset(tmp_path: Path) -> None:
    trained("adam").save(tmp_path / "a")
    model = hapi.Model(mlp(seed=2)).prepare("sgd", "cross_entropy")
    with pytest.raises(ValueError, match="the state of Adam, the model has SGD"):
        model.load(tmp_path / "a")
    assert model._progress.global_step == 0
    assert not same_weights(model.network, trained("adam").network), "nothing was changed"
    model.load(tmp_path / "a", reset_optimizer=True)
    assert model._progress.global_step == 0


def test_a_plain_state_dict_under_any_name(tmp_path: Path) -> None:
    net = mlp(seed=8)
    torch.save(net.state_dict(), tmp_path / "weights.bin")
    model = hapi.Model(mlp()).load(tmp_path / "weights.bin")
    assert same_weights(net, model.network)


def test_a_malicious_manifest_is_refused_and_not_executed(tmp_path: Path) -> None:
    trained().save(tmp_path / "a")
    marker = tmp_path / "executed"

    class Marker:
        def __reduce__(self) -> Any:
            return Path.touch, (marker,)

    (tmp_path / "a.json").write_bytes(pickle.dumps(Marker()))
    with pytest.raises(CheckpointError, match=r"a.json is damaged: not a manifest of hapi"):
        hapi.Model(mlp()).prepare("adam", "cross_entropy").load(tmp_path / "a")
    assert not marker.exists()


@pytest.mark.parametrize("file", ["a.pt", "a.state.pt"])
@pytest.mark.parametrize("kind", ["torch", "pickle"])
def test_a_malicious_file_is_refused_and_not_executed(tmp_path: Path, file: str, kind: str) -> None:
    trained().save(tmp_path / "a")
    marker = tmp_path / "executed"

    class Marker:
        def __reduce__(self) -> Any:
            return Path.touch, (marker,)

    if kind == "torch":
        torch.save({"weight": Marker()}, tmp_path / file)
    else:
        (tmp_path / file).write_bytes(pickle.dumps(Marker()))
    # Whoever plants a file forges the checksum too.
    manifest = json.loads((tmp_path / "a.json").read_text())
    content = (tmp_path / file).read_bytes()
    manifest["files"][file] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (tmp_path / "a.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="nothing of it was executed") as caught:
        hapi.Model(mlp()).prepare("adam", "cross_entropy").load(tmp_path / "a")
    assert file in str(caught.value)
    assert not marker.exists()


@pytest.mark.parametrize("file", ["a.pt", "a.state.pt"])
@pytest.mark.parametrize("damage", ["truncated", "empty", "flipped", "foreign"])
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, file: str, damage: str) -> None:
    trained().save(tmp_path / "a")
    path = tmp_path / file
    whole = path.read_bytes()
    if damage == "truncated":
        path.write_bytes(whole[: len(whole) // 2])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "flipped":
        path.write_bytes(whole[:700] + bytes([whole[700] ^ 255]) + whole[701:])
    else:
        path.write_text("epoch,loss\n1,0.5\n")
    with pytest.raises(CheckpointError) as caught:
        hapi.Model(mlp()).prepare("adam", "cross_entropy").load(tmp_path / "a")
    assert str(tmp_path / "a") in str(caught.value)


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    trained().save(tmp_path / "a")
    manifest = json.loads((tmp_path / "a.json").read_text())
    (tmp_path / "a.json").write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(CheckpointError, match="format 99; this hapi reads up to 1"):
        hapi.Model(mlp()).load(tmp_path / "a")


def test_a_state_of_other_weights_is_refused(tmp_path: Path) -> None:
    trained().save(tmp_path / "a")
    trained("sgd").save(tmp_path / "b")
    (tmp_path / "b.pt").replace(tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"a.pt is damaged or was replaced"):
        hapi.Model(mlp()).load(tmp_path / "a")
    hapi.Model(mlp()).load(tmp_path / "a", reset_optimizer=True)


@pytest.mark.parametrize("dies_at", ["weights", "state", "manifest", "commit", "weights rename", "state rename"])
def test_a_crash_at_any_moment_leaves_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_at: str
) -> None:
    """The process dies inside save: what is loaded afterwards is the old pair or the new one, never a mixture."""

    class Died(BaseException):
        pass

    old = trained(epochs=1)
    old.save(tmp_path / "a")
    new = trained(epochs=2)
    calls = {"save": 0, "replace": 0}
    save, replace = checkpoint._save, os.replace

    def dying_save(value: Any, path: Path) -> None:
        calls["save"] += 1
        save(value, path)
        if (dies_at, calls["save"]) in (("weights", 1), ("state", 2), ("manifest", 3)):
            raise Died

    def dying_replace(source: Any, target: Any) -> None:
        calls["replace"] += 1
        if (dies_at, calls["replace"]) in (("commit", 1), ("weights rename", 2), ("state rename", 3)):
            raise Died
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_save", dying_save)
        patch.setattr(checkpoint.os, "replace", dying_replace)
        patch.setattr(Path, "unlink", lambda *args, **kwargs: None)  # a dead process tidies nothing up
        with pytest.raises(Died):
            new.save(tmp_path / "a")

    loaded = hapi.Model(mlp(seed=7)).prepare("adam", "cross_entropy").load(tmp_path / "a")
    expected = new if dies_at in ("weights rename", "state rename") else old
    assert same_weights(loaded.network, expected.network)
    assert loaded._progress.global_step == expected._progress.global_step
    loaded.save(tmp_path / "a")
    assert names(tmp_path) == ["a.json", "a.pt", "a.state.pt"], "the next save leaves no temporary file"


@pytest.mark.slow
def test_a_full_disk_leaves_the_previous_checkpoint_whole(tmp_path: Path) -> None:
    """A limit on the size of files plays the full disk, in a process of its own."""
    trained().save(tmp_path / "a")
    before = {name: (tmp_path / name).read_bytes() for name in names(tmp_path)}
    script = f"""
        import resource, signal, torch, hapi
        from torch import nn
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        net = nn.Linear(400, 400)
        model = hapi.Model(net).prepare("adam", "mse")
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        model.save({str(tmp_path / "a")!r})
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert "OSError" in last
    assert "is the disk full?" in last
    assert {name: (tmp_path / name).read_bytes() for name in names(tmp_path)} == before
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 100_000


def test_fit_saves_by_itself_and_keeps_the_epoch_of_the_file(tmp_path: Path) -> None:
    model = hapi.Model(mlp()).prepare("adam", "cross_entropy", "acc")
    model.fit((X, Y), (X, Y), batch_size=16, epochs=3, verbose=0, save_dir=tmp_path, save_freq=2)
    assert names(tmp_path) == ["2.json", "2.pt", "2.state.pt", "final.json", "final.pt", "final.state.pt"]
    loaded = hapi.Model(mlp()).prepare("adam", "cross_entropy").load(tmp_path / "2")
    assert loaded._progress.epoch == 2
    assert loaded._progress.global_step == 8


# ------------------------------------------------------------------------ export


@pytest.mark.slow
def test_export_has_a_dynamic_batch_and_equals_predict_batch(tmp_path: Path) -> None:
    net = mlp(dropout=0.5)
    model = hapi.Model(net, inputs=[hapi.InputSpec([None, 8], "float32", "x")])
    model.save(tmp_path / "net", training=False)
    assert names(tmp_path) == ["net.pt2"]
    program = torch.export.load(tmp_path / "net.pt2").module()
    assert net.training, "the live net's mode is unchanged"
    for rows in (1, 2, 7):
        expected = model.predict_batch(X[:rows])[0]
        np.testing.assert_allclose(program(X[:rows]).detach().numpy(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_export_after_one_batch_by_name(tmp_path: Path) -> None:
    model = trained()
    model.save(tmp_path / "net", training=False)
    program = torch.export.load(tmp_path / "net.pt2").module()
    np.testing.assert_allclose(program(X[:5]).detach().numpy(), model.predict_batch(X[:5])[0], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_onnx_export(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx", reason="needs hapi[onnx]")
    pytest.importorskip("onnxscript", reason="needs hapi[onnx]")
    reference = pytest.importorskip("onnx.reference")
    model = hapi.Model(mlp(), inputs=[hapi.InputSpec([None, 8], "float32", "x")])
    model.save(tmp_path / "net", training=False, format="onnx")
    loaded = onnx.load(tmp_path / "net.onnx")
    evaluator = reference.ReferenceEvaluator(loaded)
    name = loaded.graph.input[0].name
    for rows in (1, 5):
        (got,) = evaluator.run(None, {name: X[:rows].numpy()})
        np.testing.assert_allclose(got, model.predict_batch(X[:rows])[0], rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------ finding checkpoints


def test_the_newest_whole_checkpoint_is_found(tmp_path: Path) -> None:
    model = hapi.Model(mlp()).prepare("adam", "cross_entropy")
    for epoch in range(3):
        model.fit((X, Y), batch_size=20, verbose=0)
        model.save(tmp_path / f"e{epoch}")
    (tmp_path / "config.json").write_text("{}")  # somebody's own
    (tmp_path / "notes.json").write_text("{}")
    (tmp_path / "notes.pt").write_bytes(b"")
    (tmp_path / "weights.pt").write_bytes((tmp_path / "e0.pt").read_bytes())
    found = [path.name for path in checkpoint.newest_first(tmp_path)]
    assert found == ["notes", "e2", "e1", "e0"]
    assert [checkpoint.damage(tmp_path / name) is None for name in found] == [False, True, True, True]
    (tmp_path / "e2.state.pt").write_bytes((tmp_path / "e2.state.pt").read_bytes()[:-1])
    assert "e2.state.pt is damaged: it has" in (checkpoint.damage(tmp_path / "e2") or "")
    (tmp_path / "e1.pt").unlink()
    assert "e1.pt is damaged: it is missing" in (checkpoint.damage(tmp_path / "e1") or "")


def test_temporary_files_of_a_crash_are_cleaned(tmp_path: Path) -> None:
    trained().save(tmp_path / "a")
    (tmp_path / ".a.pt.tmp").write_bytes(b"half")
    (tmp_path / ".b.state.pt.tmp").write_bytes(b"half")
    (tmp_path / ".mine.tmp").write_bytes(b"somebody else's")
    checkpoint.clean(tmp_path)
    assert names(tmp_path) == [".mine.tmp", "a.json", "a.pt", "a.state.pt"]
    assert checkpoint.damage(tmp_path / "a") is None
