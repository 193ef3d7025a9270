"""What every writer is given: which values, at which step, in which folder."""

from __future__ import annotations

import copy
import math
import os
import pickle
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hapi
from hapi.callbacks import BoardLogger, Callback, Logger
from hapi.metrics import Accuracy, Auc, ConfusionMatrix
from tests.helpers.nets import blobs, mlp
from tests.helpers.ranks import run_ranks

X, Y = blobs(50)


class Notes(Logger):
    """Keeps what it is given."""

    live = ("opened",)

    def __init__(self, *args: Any, fails: bool = False, **options: Any) -> None:
        super().__init__(*args, **options)
        self.points: list[tuple[int, dict[str, float]]] = []
        self.events: list[Any] = []
        self.fails = fails
        self.opened: Any = None

    def open_run(self, folder: Path, step: int, resumed: bool) -> None:
        self.events.append(("open", folder.name, step, resumed))
        self.opened = lambda: None  # cannot be pickled

    def write(self, values: dict[str, float], step: int) -> None:
        if self.fails:
            raise OSError(28, "No space left on device")
        self.points.append((step, values))

    def write_hparams(self, values: dict[str, int | float | str], metrics: list[str]) -> None:
        self.events.append(("hparams", values, metrics))

    def flush(self) -> None:
        self.events.append("flush")

    def close_run(self) -> None:
        self.opened = None
        self.events.append("close")

    def curve(self, tag: str) -> list[tuple[int, float]]:
        return [(step, values[tag]) for step, values in self.points if tag in values]


def prepared(metrics: Any = "acc", **options: Any) -> hapi.Model:
    net = mlp()
    return hapi.Model(net).prepare(torch.optim.SGD(net.parameters(), 0.1), "cross_entropy", metrics, **options)


def fit(model: hapi.Model, *callbacks: Callback, **options: Any) -> hapi.callbacks.History:
    how: dict[str, Any] = {"batch_size": 8, "epochs": 2, "verbose": 0, "log_freq": 3, "seed": 1}
    return model.fit((X, Y), callbacks=list(callbacks), **{**how, **options})


class EveryBatch(Callback):
    """The loss and accuracy of each batch alone, from the running means."""

    log_freq = 1

    def __init__(self) -> None:
        self.batches: list[tuple[float, float, int]] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.rows, self.loss, self.right = 0, 0.0, 0.0

    def on_train_batch_end(self, step: int, logs: Any = None) -> None:
        rows = self.rows + logs["batch_size"]
        loss, right = logs["loss"] * rows, logs["acc"] * rows
        self.batches.append((loss - self.loss, right - self.right, logs["batch_size"]))
        self.rows, self.loss, self.right = rows, loss, right


def test_points_are_means_over_the_steps_since_the_last_one(tmp_path: Path) -> None:
    notes, each = Notes(tmp_path), EveryBatch()
    history = fit(prepared(), notes, each)
    # 50 rows: 7 batches an epoch, points every 3 and at the last.
    assert [step for step, _ in notes.points] == [3, 6, 7, 10, 13, 14]
    begin = 0
    for (step, loss), (_, acc) in zip(notes.curve("train/loss"), notes.curve("train/acc"), strict=True):
        rows = sum(b[2] for b in each.batches[begin:step])
        assert loss == pytest.approx(sum(b[0] for b in each.batches[begin:step]) / rows, rel=1e-9)
        assert acc == pytest.approx(sum(b[1] for b in each.batches[begin:step]) / rows, rel=1e-9)
        begin = step
    weights = [24, 24, 2]
    first = [loss for _, loss in notes.curve("train/loss")][:3]
    assert sum(w * v for w, v in zip(weights, first, strict=True)) / 50 == pytest.approx(history.history["loss"][0])


def test_tags_and_rates(tmp_path: Path) -> None:
    net = mlp()
    optimizer = torch.optim.SGD([{"params": net[0].parameters()}, {"params": net[3].parameters(), "lr": 0.01}], 0.1)
    model = hapi.Model(net).prepare(optimizer, "cross_entropy", "acc", scheduler="linear")
    notes = Notes(tmp_path)
    history = model.fit((X, Y), (X, Y), batch_size=8, epochs=2, verbose=0, log_freq=3, callbacks=notes)
    train = {tag for _, values in notes.points for tag in values if not tag.startswith("eval/")}
    assert train == {
        "train/loss",
        "train/acc",
        "train/lr",
        "train/lr_group1",
        "perf/samples_per_sec",
        "perf/step_time_ms",
        "perf/data_time_ms",
    }
    # The rate of the step that was just done.
    assert [v for _, v in notes.curve("train/lr")] == pytest.approx(
        [0.1 * (1 - (s - 1) / 14) for s in (3, 6, 7, 10, 13, 14)]
    )
    assert notes.curve("eval/loss") == list(zip((7, 14), history.history["eval_loss"], strict=True))
    assert notes.curve("eval/acc") == list(zip((7, 14), history.history["eval_acc"], strict=True))
    for tag in ("perf/samples_per_sec", "perf/step_time_ms"):
        assert all(value > 0 for _, value in notes.curve(tag))


def test_its_own_log_freq(tmp_path: Path) -> None:
    notes, fine = Notes(tmp_path, log_freq=5), Notes(tmp_path, log_freq=1)
    fit(prepared(), notes, fine, epochs=1)
    assert [step for step, _ in notes.points] == [5, 7]
    assert [step for step, _ in fine.points] == [1, 2, 3, 4, 5, 6, 7]


def test_what_callbacks_add_is_written(tmp_path: Path) -> None:
    class Adds(Callback):
        def on_train_batch_end(self, step: int, logs: Any = None) -> None:
            logs |= {"temperature": 3, "gpu_heat": 4.5, "vector": np.array([1.0, 2.0]), "words": "none"}

    notes = Notes(tmp_path)
    fit(prepared(), Adds(), notes, epochs=1)
    values = notes.points[0][1]
    assert (values["train/temperature"], values["perf/gpu_heat"]) == (3.0, 4.5)
    assert (values["train/vector/0"], values["train/vector/1"]) == (1.0, 2.0)
    assert not any("words" in tag for tag in values)


def test_metrics_that_are_not_sums_have_their_running_value(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Linear(8, 1)
    model = hapi.Model(net).prepare(torch.optim.SGD(net.parameters(), 0.1), "bce_with_logits", [Auc(from_logits=True)])
    notes = Notes(tmp_path)
    history = model.fit((X, (Y[:, None] > 1).float()), batch_size=8, verbose=0, log_freq=100, callbacks=notes)
    assert notes.curve("train/auc")[-1][1] == pytest.approx(history.history["auc"][0])


def test_accumulation_gives_one_point_per_step(tmp_path: Path) -> None:
    notes = Notes(tmp_path)
    fit(prepared(), notes, epochs=1, log_freq=1, accumulate_grad_batches=3)
    assert [step for step, _ in notes.points] == [1, 2, 3]


def test_a_fit_that_ends_in_the_middle_writes_its_rest(tmp_path: Path) -> None:
    notes = Notes(tmp_path)
    history = fit(prepared(), notes, num_iters=5)
    assert [step for step, _ in notes.points] == [3, 5]
    loss = [v for _, v in notes.curve("train/loss")]
    assert (24 * loss[0] + 16 * loss[1]) / 40 == pytest.approx(history.history["loss"][0])


def test_batches_of_unknown_number(tmp_path: Path) -> None:
    notes = Notes(tmp_path)
    model = prepared()
    batches = [(X[i : i + 8], Y[i : i + 8]) for i in range(0, 40, 8)]
    model.fit((b for b in batches), verbose=0, log_freq=3, callbacks=notes)
    assert [step for step, _ in notes.points] == [3, 5]


def test_non_finite_values_are_written(tmp_path: Path) -> None:
    notes = Notes(tmp_path)
    net = mlp()
    model = hapi.Model(net).prepare(torch.optim.SGD(net.parameters(), 0.0), lambda out, y: out.sum() * math.inf)
    model.fit((X, Y), batch_size=50, verbose=0, callbacks=notes)
    assert not math.isfinite(notes.points[0][1]["train/loss"])


# ------------------------------------------------------------------------ runs and folders


def test_fit_evaluate_fit_is_one_run(tmp_path: Path) -> None:
    notes, model = Notes(tmp_path, "run"), prepared()
    fit(model, notes, epochs=1)
    model.evaluate((X, Y), batch_size=50, verbose=0, callbacks=notes)
    fit(model, notes, epochs=1)
    opened = [event for event in notes.events if event[0] == "open"]
    assert opened == [("open", "run", 0, False), ("open", "run", 7, False), ("open", "run", 7, False)]
    assert [step for step, values in notes.points if "train/loss" in values] == [3, 6, 7, 10, 13, 14]
    assert [step for step, _ in notes.curve("eval/loss")] == [7]
    assert notes.events.count("close") == 3
    assert os.listdir(tmp_path) == ["run"]


def test_runs_never_share_a_folder(tmp_path: Path) -> None:
    first, second = Notes(tmp_path, "run"), Notes(tmp_path, "run")
    fit(prepared(), first, epochs=1)
    assert first.folder is not None
    (first.folder / "data").touch()
    fit(prepared(), second, epochs=1)
    fit(prepared(), second, epochs=1)  # another model: another run
    assert first.folder == tmp_path / "run"
    assert [event[1] for event in second.events if event[0] == "open"] == ["run-2", "run-2"]  # the first was left empty
    assert second.folder == tmp_path / "run-2"
    (second.folder / "data").touch()
    fit(prepared(), second, epochs=1)
    assert second.folder == tmp_path / "run-3"


def test_the_default_name_is_the_time(tmp_path: Path) -> None:
    notes = Notes(tmp_path)
    fit(prepared(), notes, epochs=1)
    assert notes.folder is not None
    assert len(notes.folder.name) == len("20261121-103000")


def test_a_resumed_run_goes_on_where_it_was(tmp_path: Path) -> None:
    whole, model = Notes(tmp_path / "a", "run"), prepared()
    fit(model, whole)

    class Dies(Callback):
        def on_train_batch_end(self, step: int, logs: Any = None) -> None:
            if self.run.progress.global_step == 12:
                raise KeyError("killed")

    first = Notes(tmp_path / "b", "run")
    options: dict[str, Any] = {"save_dir": tmp_path / "saved", "save_every_n_steps": 4, "resume": "auto"}
    with pytest.raises(KeyError):
        fit(prepared(), first, Dies(), **options)
    second = Notes(tmp_path / "b", "run")
    fit(prepared(), second, **options)
    assert next(e for e in second.events if e[0] == "open") == ("open", "run", 8, True)
    # Step 8 lies between two points: the next one is over the same steps as without the kill.
    merged = dict(p for p in first.points if p[0] <= 8) | dict(second.points)
    assert sorted(merged) == [step for step, _ in whole.points]
    for step, values in whole.points:
        assert merged[step]["train/loss"] == values["train/loss"]
        assert merged[step]["train/acc"] == values["train/acc"]


def test_hyper_parameters(tmp_path: Path) -> None:
    notes = Notes(tmp_path, hparams={"note": True, "decay": torch.tensor(0.5)})
    model = prepared(amp="bf16")
    fit(model, notes, epochs=1)
    fit(model, notes, epochs=1)
    told = [event for event in notes.events if event[0] == "hparams"]
    assert len(told) == 1
    _, values, metrics = told[0]
    assert metrics == ["train/loss", "train/acc"]
    wanted = {
        "optimizer": "SGD",
        "lr": 0.1,
        "batch_size": 8,
        "epochs": 1,
        "seed": 1,
        "ranks": 1,
        "precision": "bfloat16",
    }
    assert wanted.items() <= values.items()
    assert (values["note"], values["decay"], values["nesterov"]) == ("True", 0.5, "False")
    assert all(type(value) in (int, float, str) for value in values.values())


# -------------------------------------------------------------------- what goes wrong


def test_a_full_disk_costs_the_curves_not_the_training(tmp_path: Path) -> None:
    notes = Notes(tmp_path, fails=True)
    with pytest.warns(RuntimeWarning, match=r"Notes: cannot write to .*No space left on device.*without Notes"):
        history = fit(prepared(), notes)
    assert len(history.history["loss"]) == 2
    assert notes.events.count("close") == 1


def test_a_folder_that_vanishes_costs_the_curves_not_the_training(tmp_path: Path) -> None:
    class Removes(Callback):
        def on_train_batch_end(self, step: int, logs: Any = None) -> None:
            if self.run.progress.global_step == 4:
                shutil.rmtree(tmp_path / "run")

    notes = Notes(tmp_path, "run")
    with pytest.warns(RuntimeWarning, match=r"Notes: cannot write to .*the folder is gone.*without Notes"):
        history = fit(prepared(), notes, Removes())
    assert len(history.epoch) == 2
    assert [step for step, _ in notes.points] == [3]


def test_a_log_dir_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"Notes: log_dir='.*file' is a file; accepted: a folder's path"):
        Notes(tmp_path / "file")
    notes = Notes(tmp_path / "later")
    (tmp_path / "later").touch()
    with pytest.raises(FileExistsError, match="Notes: no folder can be made in log_dir: File exists"):
        fit(prepared(), notes)


def test_writers_of_other_kinds_share_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Others(Notes):
        pass

    first, other, second = Notes(tmp_path, "run"), Others(tmp_path, "run"), Notes(tmp_path, "run")

    class Marks(Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            assert first.folder is not None
            (first.folder / "data").touch()

    fit(prepared(), first, Marks(), other, second)
    assert first.folder == other.folder == tmp_path / "run"
    assert second.folder == tmp_path / "run-2"
    assert capsys.readouterr().out == f"Notes: another run has the name 'run'; this one is in {tmp_path / 'run-2'}\n"


def test_other_callbacks_are_not_taken_for_waiting_for_data(tmp_path: Path) -> None:
    class Slow(Callback):
        def on_train_batch_end(self, step: int, logs: Any = None) -> None:
            time.sleep(0.02)

    notes = Notes(tmp_path)
    fit(prepared(), notes, Slow(), epochs=1)
    assert all(value > 20 for _, value in notes.curve("perf/step_time_ms")[1:])
    # Reading takes microseconds; a busy machine may hold up one of the three points.
    assert sorted(value for _, value in notes.curve("perf/data_time_ms"))[1] < 10


def test_an_error_closes_the_writer(tmp_path: Path) -> None:
    class Fails(Callback):
        def on_train_batch_end(self, step: int, logs: Any = None) -> None:
            raise RuntimeError("no")

    notes = Notes(tmp_path)
    with pytest.raises(RuntimeError, match="no"):
        fit(prepared(), notes, Fails())
    assert notes.events[-1] == "close"


def test_a_forked_child_leaves_the_writer_alone(tmp_path: Path) -> None:
    class Forks(Callback):
        def on_train_batch_end(self, step: int, logs: Any = None) -> None:
            if step == 1:
                child = os.fork()
                if child == 0:
                    before = len(notes.events), len(notes.points)
                    notes.on_epoch_end(0, {})
                    notes.on_train_end({})
                    os._exit(int(before != (len(notes.events), len(notes.points))))
                assert os.waitpid(child, 0)[1] == 0

    notes = Notes(tmp_path)
    fit(prepared(), notes, Forks(), epochs=1)
    assert notes.events[-1] == "close"


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_a_copy_of_an_open_writer_has_not_begun(tmp_path: Path, copied: Any) -> None:
    copies: list[Notes] = []

    class Copies(Callback):
        def on_train_batch_end(self, step: int, logs: Any = None) -> None:
            copies.append(copied(notes))

    notes = Notes(tmp_path, "run")
    fit(prepared(), notes, Copies(), epochs=1)
    other = copies[0]
    assert other.opened is None
    assert notes.folder is not None
    (notes.folder / "data").touch()
    fit(prepared(), other, epochs=1)
    assert other.folder == tmp_path / "run-2"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"log_dir": ""}, "log_dir=''; accepted: a folder's path"),
        ({"log_dir": 3}, "log_dir=3"),
        ({"log_dir": "x", "name": "a/b"}, "name='a/b'; accepted: a folder's name"),
        ({"log_dir": "x", "log_freq": 0}, "log_freq=0; accepted: an int >= 1"),
        ({"log_dir": "x", "hparams": [1]}, r"hparams=\[1\]"),
    ],
)
def test_wrong_arguments(arguments: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Logger(**arguments)


def _rank_curves(folder: str) -> tuple[list[Any], list[Any], Any]:
    notes = Notes(folder, "run")
    history = fit(prepared(), notes, batch_size=1, global_batch_size=8)
    return notes.points, notes.events, history.history


def test_two_ranks_write_what_one_would(tmp_path: Path) -> None:
    single = Notes(tmp_path / "one", "run")
    history = fit(prepared(), single)
    (points, events, _), (other_points, other_events, _) = run_ranks(_rank_curves, 2, str(tmp_path / "two"))
    assert not other_points
    assert not other_events
    assert events[-1] == "close"
    assert [step for step, _ in points] == [step for step, _ in single.points]
    for (_, mine), (_, theirs) in zip(points, single.points, strict=True):
        assert mine["train/loss"] == pytest.approx(theirs["train/loss"], rel=1e-5)
        assert mine["train/acc"] == theirs["train/acc"]
    assert history.epoch == [1, 2]


# ----------------------------------------------------------------------------- boards


class Board(BoardLogger):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: list[tuple[str, str, Any, int]] = []

    def write(self, values: dict[str, float], step: int) -> None:
        self.seen += [("scalar", tag, value, step) for tag, value in values.items()]

    def write_histogram(self, tag: str, values: Any, step: int) -> None:
        self.seen.append(("histogram", tag, values, step))

    def write_image(self, tag: str, image: Any, step: int) -> None:
        self.seen.append(("image", tag, image, step))

    def write_text(self, tag: str, text: str, step: int) -> None:
        self.seen.append(("text", tag, text, step))

    def of(self, kind: str, tag: str) -> list[tuple[Any, int]]:
        return [(value, step) for k, t, value, step in self.seen if (k, t) == (kind, tag)]


def test_the_gradient_norm_is_that_before_clipping(tmp_path: Path) -> None:
    norms: list[float] = []

    class Looks(Callback):
        def on_before_optimizer_step(self, step: int, logs: Any = None) -> None:
            norms.append(float(torch.cat([g.reshape(-1) for _, g in self.run.gradients()]).norm()))

    board = Board(tmp_path, grad_norm=True)
    fit(prepared(clip_grad_norm=1e-3), board, Looks(), epochs=1)
    assert len(norms) == 7
    assert min(norms) > 1e-2
    # The first step after each point: 1, 4 and 7.
    assert [v for v, _ in board.of("scalar", "train/grad_norm")] == pytest.approx([norms[0], norms[3], norms[6]])


def test_histograms(tmp_path: Path) -> None:
    board, model = Board(tmp_path, weight_histograms=True, grad_histograms=True), prepared()
    fit(model, board)
    names = [name for name, _ in model.network.named_parameters()]
    for name in names:
        assert [step for _, step in board.of("histogram", f"weights/{name}")] == [7, 14]
        assert [step for _, step in board.of("histogram", f"gradients/{name}")] == [1, 8]
    last = board.of("histogram", "weights/0.weight")[-1][0]
    np.testing.assert_array_equal(last, model.network.get_parameter("0.weight").detach().double().reshape(-1))


def test_texts_are_written_once(tmp_path: Path) -> None:
    board, model = Board(tmp_path, text={"note": "try 1"}), prepared()
    fit(model, board, epochs=1)
    fit(model, board, epochs=1)
    assert board.of("text", "note") == [("try 1", 0)]


def test_predictions_and_the_confusion_matrix_are_pictures(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    model = hapi.Model(net).prepare("adam", "cross_entropy", [Accuracy(), ConfusionMatrix(3)])
    images, labels = torch.rand(20, 1, 8, 8), torch.randint(0, 3, (20,))
    board = Board(tmp_path, images=5, confusion_matrix=True, classes=["cat", "dog", "cow"])
    model.fit((images, labels), (images, labels), batch_size=10, epochs=2, verbose=0, callbacks=board)
    for tag in ("eval/predictions", "eval/confusion_matrix"):
        pictures = board.of("image", tag)
        assert [step for _, step in pictures] == [2, 4], tag
        for picture, _ in pictures:
            assert (picture.dtype, picture.ndim, picture.shape[2]) == (np.uint8, 3, 3)
            assert len(np.unique(picture)) > 50


def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"confusion_matrix=True draws hapi.metrics.ConfusionMatrix; add one"):
        fit(prepared(), Board(tmp_path, confusion_matrix=True))
    with pytest.raises(ValueError, match=r"images=4 needs one input of images"):
        prepared().evaluate((X, Y), verbose=0, callbacks=Board(tmp_path, images=4))
    with pytest.raises(TypeError, match="classes='ab'"):
        Board(tmp_path, classes="ab")
    with pytest.raises(TypeError, match="text=3"):
        Board(tmp_path, text=3)
