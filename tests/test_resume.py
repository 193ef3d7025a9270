"""A killed run resumes bit for bit: the same weights and the same History as the run that nobody stopped."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import hapi
from hapi.engine import checkpoint
from tests.helpers.nets import blobs, mlp, same_weights, weight_gap
from tests.helpers.ranks import run_ranks

ROWS = 52  # 7 batches of 8, the last of 4


class Interrupted(BaseException):
    pass


class InterruptAt(hapi.callbacks.Callback):
    """Ends the process's work as a crash would: no hook after it may tidy up what resume relies on."""

    def __init__(self, step: int) -> None:
        self.at = step

    def on_train_batch_begin(self, step: int, logs: Any = None) -> None:
        if self.run.progress.global_step == self.at:
            raise Interrupted


class Noisy(Dataset[Any]):
    """Draws from all three generators, as users' augmentations do."""

    def __init__(self) -> None:
        self.x, self.y = blobs(ROWS)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        noise = torch.rand(8) + float(np.random.rand()) + random.random()
        return self.x[index] + 0.1 * noise, self.y[index]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return (Noisy()[index] for index in range(ROWS))


class HostMetric:
    def __init__(self) -> None:
        self.reset()

    def update(self, output: Any, label: Any) -> None:
        self.right += int((output.argmax(1) == label).sum())
        self.rows += len(label)

    def accumulate(self) -> float:
        return self.right / max(1, self.rows)

    def reset(self) -> None:
        self.right = self.rows = 0

    def name(self) -> str:
        return "host"


def data_of(kind: str) -> Any:
    if kind == "arrays":
        return blobs(ROWS)
    if kind == "noisy dataset":
        return Noisy()
    if kind == "noisy DataLoader":
        return DataLoader(Noisy(), batch_size=8, shuffle=True, num_workers=2)
    if kind == "stream":
        return Stream()
    if kind == "DataLoader":
        return DataLoader(TensorDataset(*blobs(ROWS)), batch_size=8, shuffle=True)
    return [tuple(part) for part in zip(*(t.split(8) for t in blobs(ROWS)), strict=True)]


def run(
    folder: Path | None,
    *,
    kind: str = "arrays",
    stop_at: int | None = None,
    resume: Any = "auto",
    every: int = 1,
    epochs: int = 3,
    accumulate: int = 1,
    seed: int | None = 5,
    workers: int = 0,
    more: Any = None,
    **prepare: Any,
) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    net = mlp(dropout=0.3)
    torch.manual_seed(4)
    prepare = {"metrics": ["acc", HostMetric()], "scheduler": "cosine", "clip_grad_norm": 1.0, **prepare}
    model = hapi.Model(net).prepare(torch.optim.Adam(net.parameters(), 1e-2), nn.CrossEntropyLoss(), **prepare)
    options: dict[str, Any] = {}
    if folder is not None:
        options = {"save_dir": folder, "save_every_n_steps": every, "resume": resume}
    callbacks = [hapi.callbacks.EarlyStopping(patience=10, verbose=0, save_best_model=False)]
    if more is not None:
        callbacks.append(more)
    if stop_at is not None:
        callbacks.append(InterruptAt(stop_at))  # type: ignore[arg-type]
    history = model.fit(
        data_of(kind),
        blobs(20, seed=7),
        batch_size=8,
        epochs=epochs,
        verbose=0,
        seed=seed,
        accumulate_grad_batches=accumulate,
        num_workers=workers,
        callbacks=callbacks,
        **options,
    )
    return net, {**history.history, "after": [float(torch.rand(1)), random.random(), float(np.random.rand())]}


@pytest.mark.parametrize("kind", ["arrays", "noisy dataset", "DataLoader", "list of batches"])
@pytest.mark.parametrize("stop_at", [0, 1, 5, 7, 9, 20])
def test_resuming_at_any_step_gives_the_same_bits(tmp_path: Path, kind: str, stop_at: int) -> None:
    expected, history = run(None, kind=kind)
    with pytest.raises(Interrupted):
        run(tmp_path, kind=kind, stop_at=stop_at)
    got, other = run(tmp_path, kind=kind)
    assert same_weights(expected, got)
    assert other == history


@pytest.mark.parametrize("scheduler", ["cosine", lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3)])
def test_resuming_after_an_epochs_last_step(tmp_path: Path, scheduler: Any) -> None:
    """Nothing of the epoch is left but its values, and the rate among them is that of the last step."""

    class InEvaluation(hapi.callbacks.Callback):
        def on_eval_begin(self, logs: Any = None) -> None:
            if self.run.progress.epoch == 1:
                self.run.writer.take(wait=True)
                raise Interrupted

    expected, history = run(None, scheduler=scheduler)
    with pytest.raises(Interrupted):
        run(tmp_path, scheduler=scheduler, more=InEvaluation())
    assert not (tmp_path / "2.json").exists()
    got, other = run(tmp_path, scheduler=scheduler)
    assert same_weights(expected, got)
    assert other == history


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "workers"), [("noisy DataLoader", 0), ("stream", 2)])
def test_workers_of_loaders_and_streams_resume_bit_for_bit(tmp_path: Path, kind: str, workers: int) -> None:
    how: dict[str, Any] = {"kind": kind, "workers": workers, "scheduler": "constant"}  # a stream has no length
    expected, history = run(None, **how)
    for stop_at in (5, 12):
        with pytest.raises(Interrupted):
            run(tmp_path, stop_at=stop_at, **how)
    got, other = run(tmp_path, **how)
    assert same_weights(expected, got)
    assert other == history


def test_best_weights_that_are_kept_survive_a_crash(tmp_path: Path) -> None:
    def best(folder: Path | None, stop_at: int | None = None) -> nn.Module:
        net = mlp()
        model = hapi.Model(net).prepare(torch.optim.SGD(net.parameters(), 5.0), "cross_entropy")
        keeps = hapi.callbacks.EarlyStopping(patience=99, restore_best_weights=True, verbose=0, save_best_model=False)
        callbacks: list[Any] = [keeps, *([InterruptAt(stop_at)] if stop_at else [])]
        options: dict[str, Any] = {"save_dir": folder, "save_every_n_steps": 1, "resume": "auto"} if folder else {}
        model.fit(blobs(ROWS), blobs(20), batch_size=8, epochs=6, verbose=0, seed=2, callbacks=callbacks, **options)
        return net

    expected = best(None)
    with pytest.raises(Interrupted):
        best(tmp_path, stop_at=37)
    assert same_weights(expected, best(tmp_path))


@pytest.mark.slow
def test_random_augmentation_does_not_depend_on_workers(tmp_path: Path) -> None:
    expected, history = run(None, kind="noisy dataset")
    got, other = run(None, kind="noisy dataset", workers=2)
    assert same_weights(expected, got)
    assert other == history
    with pytest.raises(Interrupted):
        run(tmp_path, kind="noisy dataset", workers=2, stop_at=9)
    got, other = run(tmp_path, kind="noisy dataset", workers=2)
    assert same_weights(expected, got)
    assert other == history


def test_what_a_sample_draws_is_new_in_every_epoch_and_leaves_the_generators_alone() -> None:
    seen: list[list[float]] = []

    class Draws(Noisy):
        def __getitem__(self, index: int) -> Any:
            drawn = [float(torch.rand(1)), random.random(), float(np.random.rand())]
            if index == 3:
                seen.append(drawn)
            return super().__getitem__(index)

    model = hapi.Model(mlp()).prepare("sgd", "cross_entropy")
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model.fit(Draws(), batch_size=52, epochs=3, verbose=0, seed=1)
    after = [float(torch.rand(1)), random.random(), float(np.random.rand())]
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    assert after == [float(torch.rand(1)), random.random(), float(np.random.rand())]
    # The first batch was read twice: once to find out that the dataset draws.
    assert len({tuple(drawn) for drawn in seen[1:]}) == 3


@pytest.mark.parametrize("every", [2, 3, 5])
def test_steps_between_checkpoints_are_done_again(tmp_path: Path, every: int) -> None:
    expected, history = run(None, accumulate=2)
    for stop_at in (3, 7, 10):  # crash after crash
        with pytest.raises(Interrupted):
            run(tmp_path, stop_at=stop_at, every=every, accumulate=2)
    got, other = run(tmp_path, every=every, accumulate=2)
    assert same_weights(expected, got)
    assert other == history


def test_running_a_finished_command_again_changes_nothing(tmp_path: Path) -> None:
    expected, history = run(tmp_path)
    got, other = run(tmp_path)
    assert same_weights(expected, got)
    history.pop("after")
    other.pop("after")
    assert other == history


@pytest.mark.parametrize("amp", ["fp16", "O2", "bf16"])
def test_mixed_precision_resumes_bit_for_bit(tmp_path: Path, amp: str) -> None:
    expected, history = run(None, amp=amp)
    with pytest.raises(Interrupted):
        run(tmp_path, stop_at=9, amp=amp)
    got, other = run(tmp_path, amp=amp)
    assert same_weights(expected, got)
    assert other == history


def test_torchmetrics_and_list_states_resume_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    torchmetrics = pytest.importorskip("torchmetrics", reason="needs hapi[torchmetrics]")

    def metrics() -> list[Any]:
        return [
            torchmetrics.classification.MulticlassF1Score(3, validate_args=False),
            torchmetrics.classification.MulticlassAUROC(3, validate_args=False),
            hapi.metrics.ConfusionMatrix(3),
        ]

    def plain(history: dict[str, Any]) -> Any:
        return {name: np.asarray(values).tolist() for name, values in history.items()}

    _, history = run(None, metrics=metrics())
    with pytest.raises(Interrupted):
        run(tmp_path, stop_at=10, metrics=metrics())
    assert plain(run(tmp_path, metrics=metrics())[1]) == plain(history)


def test_a_seed_that_nobody_chose_is_kept(tmp_path: Path) -> None:
    expected, _ = run(None, seed=None)
    with pytest.raises(Interrupted):
        run(tmp_path, seed=None, stop_at=9)
    torch.manual_seed(99)
    got, _ = run(tmp_path, seed=None)
    assert same_weights(expected, got)
    with pytest.raises(ValueError, match="seed=77, but the run to resume has the seed"):
        run(tmp_path, seed=77)


@pytest.mark.parametrize("suffix", [".pt", ".state.pt", ".json"])
@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "missing", "foreign"])
def test_auto_falls_back_to_the_newest_whole_checkpoint_and_says_so(tmp_path: Path, suffix: str, damage: str) -> None:
    expected, history = run(None)
    with pytest.raises(Interrupted):
        run(tmp_path, stop_at=9)
    newest, second = checkpoint.newest_first(tmp_path)[:2]
    path = tmp_path / f"{newest.name}{suffix}"
    whole = path.read_bytes()
    middle = len(whole) // 2
    contents = {
        "truncated": whole[:middle],
        "flipped": whole[:middle] + bytes([whole[middle] ^ 255]) + whole[middle + 1 :],
        "empty": b"",
        "foreign": b"epoch,loss",
    }
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(contents[damage])
    if (suffix, damage) == (".json", "missing"):
        got, other = run(tmp_path)  # without its manifest there is no checkpoint, so nothing to warn of
    else:
        message = rf"resuming from .*{second.name}, since .*{newest.name}{suffix} is damaged"
        with pytest.warns(UserWarning, match=message):
            got, other = run(tmp_path)
    assert same_weights(expected, got)
    assert other == history


def test_what_cannot_be_resumed_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        run(tmp_path, stop_at=9)
    newest = checkpoint.newest_first(tmp_path)[0]
    with pytest.raises(ValueError, match="with other accumulate_grad_batches"):
        run(tmp_path, accumulate=2)
    (tmp_path / f"{newest.name}.pt").unlink()
    with pytest.raises(hapi.CheckpointError, match=rf"{newest.name}.pt is damaged: it is missing"):
        run(tmp_path, resume=tmp_path / newest.name)
    model = hapi.Model(mlp()).prepare("adam", "cross_entropy")
    model.save(tmp_path / "mine")
    with pytest.raises(ValueError, match="was not written by fit"):
        run(tmp_path, resume=tmp_path / "mine")
    with pytest.raises(ValueError, match="resume='auto' needs save_dir"):
        model.fit(blobs(8), resume="auto", verbose=0)
    with pytest.raises(ValueError, match="save_every_n_steps needs save_dir"):
        model.fit(blobs(8), save_every_n_steps=2, verbose=0)


def test_keep_deletes_older_ones_and_never_the_newest(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = hapi.Model(mlp()).prepare("adam", "cross_entropy")
    model.fit(blobs(ROWS), batch_size=8, epochs=2, verbose=0, save_dir=tmp_path, save_every_n_steps=2, keep=2)
    left = checkpoint.newest_first(tmp_path)
    assert len(left) <= 4
    assert model._progress.global_step == json.loads((tmp_path / f"{left[0].name}.json").read_text())["step"]


def on_ranks(folder: str, stop_at: int | None, batch: int) -> Any:
    net = mlp(dropout=0.0)
    model = hapi.Model(net).prepare(torch.optim.Adam(net.parameters(), 1e-2), nn.CrossEntropyLoss(), "acc")
    options = {"save_dir": folder, "save_every_n_steps": 1, "resume": "auto", "log_freq": 1} if folder else {}
    callbacks = []
    if stop_at is not None:
        everywhere = InterruptAt(stop_at)
        everywhere.all_ranks = True  # type: ignore[misc]
        callbacks.append(everywhere)
    try:
        history = model.fit(
            blobs(ROWS), global_batch_size=batch, epochs=3, verbose=0, seed=5, callbacks=callbacks, **options
        )
    except Interrupted:
        return None
    return net.state_dict(), getattr(history, "history", None), model._progress.state_dict()


@pytest.mark.ranks
def test_two_ranks_resume_bit_for_bit(tmp_path: Path) -> None:
    expected = run_ranks(on_ranks, 2, "", None, 8)
    assert run_ranks(on_ranks, 2, str(tmp_path), 9, 8) == [None, None]
    got = run_ranks(on_ranks, 2, str(tmp_path), None, 8)
    assert weight_gap(expected[0][0], got[0][0]) == 0
    assert expected[0][1] == got[0][1]


@pytest.mark.ranks
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 3), (3, 2)])
def test_another_number_of_ranks_goes_on_at_the_exact_sample(tmp_path: Path, before: int, after: int) -> None:
    weights, history, progress = run_ranks(on_ranks, 1, "", None, 8)[0]
    assert run_ranks(on_ranks, before, str(tmp_path), 9, 8)[0] is None
    other_weights, other_history, other_progress = run_ranks(on_ranks, after, str(tmp_path), None, 8)[0]
    assert weight_gap(weights, other_weights) < 1e-5
    assert other_progress == progress
    assert other_history["loss"] == pytest.approx(history["loss"], abs=1e-6)
    assert other_history["acc"] == history["acc"]


SCRIPT = """
    import hashlib, sys, torch, hapi
    from torch import nn
    from tests.helpers.nets import blobs
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 3))
    adam = torch.optim.Adam(net.parameters(), 1e-3)
    model = hapi.Model(net).prepare(adam, "cross_entropy", "acc", scheduler="cosine")
    history = model.fit(blobs(400), blobs(100), batch_size=8, epochs=4, verbose=0, seed=1, save_dir=sys.argv[1],
                        save_every_n_steps=7, keep=3, resume="auto")
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in net.parameters())).hexdigest()
    print(digest, history.history)
"""


def start(script: Path, folder: Path) -> subprocess.Popen[str]:
    root = str(Path(hapi.__file__).parent.parent)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    return subprocess.Popen(
        [sys.executable, str(script), str(folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    )


@pytest.mark.slow
def test_sigkill_at_random_moments(tmp_path: Path) -> None:
    """Real kills of a real process; every start goes on where the last whole checkpoint was."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    process = start(script, tmp_path / "whole")
    expected, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    generator = random.Random(0)
    folder, kills = tmp_path / "killed", 0
    for _ in range(30):
        process = start(script, folder)
        delay = generator.uniform(0.05, 0.6)
        begun = time.monotonic()
        while kills < 6 and process.poll() is None:
            # Import takes a while that varies; count from the first file.
            if folder.exists() and any(folder.iterdir()) and time.monotonic() - begun > 0:
                time.sleep(delay)
                process.send_signal(signal.SIGKILL)
                kills += 1
                break
            time.sleep(0.01)
        out, errors = process.communicate(timeout=120)
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, errors
    assert out == expected
    assert kills >= 3
    assert not [path.name for path in folder.iterdir() if path.name.endswith(".tmp")]
