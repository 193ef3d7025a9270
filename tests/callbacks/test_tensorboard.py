"""What TensorBoard itself reads of what was written."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hapi
from hapi.callbacks import Callback, TensorBoard
from hapi.callbacks import tensorboard as module
from hapi.callbacks._graph import graph_of
from hapi.metrics import ConfusionMatrix
from tests.callbacks.driver import Driver
from tests.helpers.launching import sandbox
from tests.helpers.nets import LeNet, blobs, mlp
from tests.helpers.ranks import run_ranks

pytest.importorskip("tensorboardX")
pytest.importorskip("tensorboard")

X, Y = blobs(50)


def read(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    everything = dict.fromkeys(("scalars", "histograms", "images", "tensors"), 0)
    return EventAccumulator(str(folder), size_guidance=everything).Reload()


def board_context(folder: Path) -> Any:
    """What TensorBoard gives its plugins."""
    from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
    from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
    from tensorboard.plugins.base_plugin import TBContext

    runs = EventMultiplexer().AddRunsFromDirectory(str(folder)).Reload()
    return TBContext(data_provider=MultiplexerDataProvider(runs, str(folder)), logdir=str(folder), multiplexer=runs)


def curve(folder: Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in read(folder).Scalars(tag)]


def events(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def prepared(**options: Any) -> hapi.Model:
    net = mlp()
    return hapi.Model(net).prepare(torch.optim.SGD(net.parameters(), 0.1), "cross_entropy", "acc", **options)


def fit(model: hapi.Model, *callbacks: Callback, **options: Any) -> hapi.callbacks.History:
    how: dict[str, Any] = {"batch_size": 8, "epochs": 2, "verbose": 0, "log_freq": 3, "seed": 1}
    return model.fit((X, Y), (X, Y), callbacks=list(callbacks), **{**how, **options})


@pytest.fixture
def opened(tmp_path: Path) -> Any:
    board = TensorBoard(tmp_path, "run")
    board.params = {"metrics": ["loss"]}
    board.open_run(tmp_path, 0, False)
    yield board
    board.close_run()


# ------------------------------------------------------------------------------- curves


def test_curves_are_those_of_the_history(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    history = fit(prepared(), TensorBoard(tmp_path, "run")).history
    run = tmp_path / "run"
    for name in ("loss", "acc"):
        assert curve(run, f"eval/{name}") == list(zip((7, 14), map(np.float32, history[f"eval_{name}"]), strict=True))
        points = curve(run, f"train/{name}")
        assert [step for step, _ in points] == [3, 6, 7, 10, 13, 14]
        for epoch in range(2):
            values = [value for _, value in points[3 * epoch : 3 * epoch + 3]]
            assert np.average(values, weights=[24, 24, 2]) == pytest.approx(history[name][epoch], rel=1e-6)
    assert {value for _, value in curve(run, "train/lr")} == {np.float32(0.1)}
    assert len(events(run)) == 1
    assert capfd.readouterr() == ("", "")


def test_fit_evaluate_fit_is_one_file_with_all_curves(tmp_path: Path) -> None:
    board, model = TensorBoard(tmp_path, "run"), prepared()
    fit(model, board, epochs=1)
    model.evaluate((X, Y), batch_size=50, verbose=0, callbacks=board)
    fit(model, board, epochs=1)
    run = tmp_path / "run"
    assert len(events(run)) == 1
    assert [step for step, _ in curve(run, "train/loss")] == [3, 6, 7, 10, 13, 14]
    assert [step for step, _ in curve(run, "eval/loss")] == [7, 7, 14]


def test_values_and_tags_of_any_kind(opened: TensorBoard, tmp_path: Path) -> None:
    values = {"top 1 %": 0.25, "bf16": float(torch.tensor(0.1, dtype=torch.bfloat16)), "inf": float("-inf"), "é": 1.0}
    opened.write({**values, "nan": float("nan"), "large": 1e300}, 3)
    found = read(tmp_path)
    for tag, value in values.items():
        assert [(e.step, e.value) for e in found.Scalars(tag)] == [(3, np.float32(value))]
    assert np.isnan(found.Scalars("nan")[0].value)
    assert found.Scalars("large")[0].value == np.inf


@pytest.mark.filterwarnings("ignore:html5lib")  # in the board's own plugins
def test_train_and_eval_are_laid_over_each_other(tmp_path: Path) -> None:
    from tensorboard.context import RequestContext
    from tensorboard.plugins.custom_scalar.custom_scalars_plugin import CustomScalarsPlugin
    from tensorboard.plugins.scalar.scalars_plugin import ScalarsPlugin

    for name in ("a", "b"):
        fit(prepared(), TensorBoard(tmp_path, name), epochs=1)
    context = board_context(tmp_path)
    context.plugin_name_to_instance = {"scalars": ScalarsPlugin(context)}
    plugin = CustomScalarsPlugin(context)
    (category,) = json.loads(plugin.layout_impl(RequestContext(), ""))["category"]
    patterns = {chart["title"]: chart["multiline"]["tag"] for chart in category["chart"]}
    assert list(patterns) == ["loss", "acc"]  # the layouts of two runs are one
    for name, tags in patterns.items():
        found = [plugin.scalars_impl(RequestContext(), "a", tag, "") for tag in tags]
        assert [list(answer["tag_to_events"]) for answer in found] == [[f"train/{name}"], [f"eval/{name}"]]


@pytest.mark.filterwarnings("ignore:html5lib")  # in the board's own plugins
def test_hyper_parameters_are_in_the_boards_own_table(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from tensorboard.context import RequestContext
    from tensorboard.plugins.hparams import api_pb2
    from tensorboard.plugins.hparams.backend_context import Context
    from tensorboard.plugins.hparams.list_session_groups import Handler

    odd = {"note": "a\ud800", "big": 1 << 2000, "none": None, "nan": float("nan")}
    history = fit(prepared(), TensorBoard(tmp_path, "run", hparams=odd)).history
    backend = Context(board_context(tmp_path))
    infos = backend.experiment_from_metadata(
        RequestContext(), "", True, backend.hparams_metadata(RequestContext(), ""), {}
    ).metric_infos
    columns = [api_pb2.ColParams(metric=info.name) for info in infos]
    request = api_pb2.ListSessionGroupsRequest(
        col_params=columns, slice_size=9, allowed_statuses=list(range(4)), include_metrics=True
    )
    group = Handler(RequestContext(), backend, "", request).run().session_groups[0]
    assert group.sessions[0].name == "run"
    values = {name: getattr(value, value.WhichOneof("kind")) for name, value in group.hparams.items()}
    assert {"lr": 0.1, "optimizer": "SGD", "batch_size": 8.0}.items() <= values.items()
    assert (values["note"], values["big"][:3], values["nan"]) == ("a?", str(1 << 2000)[:3], "nan")
    assert {m.name.tag: m.value for m in group.metric_values} == {
        tag: pytest.approx(history[tag.replace("/", "_")][-1], rel=1e-6) for tag in ("eval/loss", "eval/acc")
    }
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "values",
    [
        np.random.default_rng(0).normal(size=1000),
        np.array([3.0]),
        np.array([1e20, 1e20]),
        np.array([-3.4e38, 3.4e38]),
        np.nextafter(np.full(9, 1e8), np.linspace(0, 2e8, 9)),
        np.array([0.0, 5e-324 * 4]),
    ],
    ids=["normal", "one", "equal", "widest", "nearly equal", "tiny"],
)
def test_a_histogram_counts_every_value(opened: TensorBoard, tmp_path: Path, values: np.ndarray[Any, Any]) -> None:
    opened.write_histogram("weights/w", values, 3)
    found = read(tmp_path).Histograms("weights/w")[0]
    assert (found.step, found.histogram_value.num) == (3, len(values))
    assert sum(found.histogram_value.bucket) == len(values)


def test_images_texts_and_histograms_of_a_run(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = LeNet()
    model = hapi.Model(net).prepare("sgd", "cross_entropy", [ConfusionMatrix(10)])
    data = torch.rand(20, 1, 28, 28), torch.arange(20) % 10
    board = TensorBoard(
        tmp_path, "run", images=4, confusion_matrix=True, weight_histograms=True, grad_histograms=True, grad_norm=True,
        text={"note": "**bold**\ud800"},
    )  # fmt: skip
    model.fit(data, data, batch_size=10, epochs=2, verbose=0, callbacks=board)
    found = read(tmp_path / "run")
    tags = found.Tags()
    assert [event.step for event in found.Images("eval/predictions")] == [2, 4]
    image = found.Images(next(tag for tag in tags["images"] if "confusion" in tag))[-1]
    assert image.encoded_image_string.startswith(b"\x89PNG")
    assert image.width > 100
    names = {name for name, _ in net.named_parameters()}
    assert {f"{group}/{name}" for group in ("weights", "gradients") for name in names} == set(tags["histograms"])
    text = found.Tensors("note/text_summary")[0].tensor_proto.string_val[0]
    assert text.decode() == "**bold**?"
    assert [step for step, _ in curve(tmp_path / "run", "train/grad_norm")] == [2, 4]


# -------------------------------------------------------------------------------- graph


def test_the_network_is_drawn_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = hapi.Model(LeNet()).prepare("sgd", "cross_entropy")
    data = torch.rand(20, 1, 28, 28), torch.arange(20) % 10
    board = TensorBoard(tmp_path, "run", graph=True)
    model.fit(data, batch_size=10, verbose=0, callbacks=board)
    model.fit(data, batch_size=10, verbose=0, callbacks=board)
    nodes = [node.name for node in read(tmp_path / "run").Graph().node]
    assert any("Sequential[classifier]" in name for name in nodes)
    assert len(read(tmp_path / "run").Graph().node) == len(set(nodes))
    assert capfd.readouterr() == ("", "")


class Restless(nn.Module):
    """Whatever a forward pass may change."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.head = nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.count = 0

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        self.calls += 1
        self.count += 1
        random.random()
        noise = torch.rand(8) + float(np.random.rand())
        return self.head(self.drop(self.norm(x + noise)))


def test_drawing_leaves_no_trace() -> None:
    net = Restless()
    net.norm.eval()  # frozen by its user
    before = {name: value.clone() for name, value in net.state_dict().items()}
    state = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    assert graph_of(net, (), {"x": X, "scale": torch.ones(1)})
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert (net.count, net.training, net.norm.training, net.drop.training) == (0, True, False, True)
    assert torch.equal(torch.get_rng_state(), state[0])
    assert random.getstate() == state[1]
    assert (np.random.get_state()[1] == state[2]).all()


def test_training_is_the_same_with_a_drawing(tmp_path: Path) -> None:
    losses = []
    for graph in (False, True):
        torch.manual_seed(0)
        np.random.seed(0)
        model = hapi.Model(Restless()).prepare("sgd", "cross_entropy")
        history = model.fit(
            (X, Y), batch_size=8, epochs=2, verbose=0, seed=1, callbacks=TensorBoard(tmp_path, graph=graph)
        )
        losses.append(history.history["loss"])
    assert losses[0] == losses[1]


@pytest.mark.parametrize("fault", ["cannot be traced", "keyword"])
def test_a_network_that_cannot_be_drawn(tmp_path: Path, fault: str, capfd: pytest.CaptureFixture[str]) -> None:
    class Net(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if torch.jit.is_tracing():
                raise RuntimeError("cannot be traced")
            return super().forward(x)

    class Named(nn.Linear):
        def forward(self, *, x: Tensor) -> Tensor:
            return super().forward(x)

    net: nn.Module = Net(8, 3) if fault == "cannot be traced" else Named(8, 3)
    data = torch.utils.data.DataLoader([{"x": x, "label": y} for x, y in zip(X, Y, strict=True)], batch_size=8)
    model = hapi.Model(net, inputs=["x"], labels=["label"]).prepare("sgd", "cross_entropy")
    with pytest.warns(RuntimeWarning, match="TensorBoard: the network cannot be drawn: .*(be traced|by name only)"):
        model.fit(data, verbose=0, callbacks=TensorBoard(tmp_path, "run", graph=True))
    assert curve(tmp_path / "run", "train/loss")
    assert capfd.readouterr() == ("", "")


def _draw_on_a_rank(folder: str) -> list[str]:
    model = hapi.Model(LeNet()).prepare("sgd", "cross_entropy", amp="bf16", sync_batchnorm=True)
    data = torch.rand(20, 1, 28, 28), torch.arange(20) % 10
    model.fit(data, batch_size=5, verbose=0, callbacks=TensorBoard(folder, "run", graph=True))
    return sorted(os.listdir(folder))


@pytest.mark.ranks
def test_rank_0_draws_alone(tmp_path: Path) -> None:
    run_ranks(_draw_on_a_rank, 2, str(tmp_path))
    assert len(events(tmp_path / "run")) == 1
    assert any("Conv2d" in node.name for node in read(tmp_path / "run").Graph().node)


# ------------------------------------------------------------------- kills, forks, full disks

KILLED = """
    import sys, time
    import hapi
    from hapi.callbacks import Callback, TensorBoard
    from tests.helpers.nets import blobs, mlp

    class Slow(Callback):
        def on_train_batch_end(self, step, logs=None):
            if self.run.progress.global_step == int(sys.argv[1]):
                print("here", flush=True)
                time.sleep(60)

    X, Y = blobs(50)
    import torch
    net = mlp()
    model = hapi.Model(net).prepare(torch.optim.SGD(net.parameters(), 0.1), "cross_entropy", "acc")
    model.fit((X, Y), (X, Y), batch_size=8, epochs=2, verbose=0, log_freq=1, seed=1, save_dir="saved",
              save_every_n_steps=4, resume="auto", callbacks=[TensorBoard("log", "run", hparams=True), Slow()])
"""


def test_a_run_that_was_killed_and_resumed_is_one_growing_curve(tmp_path: Path) -> None:
    with sandbox(tmp_path) as box:
        script = box.script("train.py", KILLED)
        process = box.start([sys.executable, script, "11"])
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n", process.communicate()[1]
        process.send_signal(signal.SIGKILL)
        box.finish(process)
        run = tmp_path / "log" / "run"
        # The kill lost nothing: the callback comes before the one that slept.
        assert [step for step, _ in curve(run, "train/loss")] == list(range(1, 12))
        with open(next(run.iterdir()), "ab") as file:
            file.write(b"\x40\0\0\0\0\0\0\0torn")
        ended = box.run([sys.executable, script, "0"])
    assert ended.code == 0, ended.err
    assert len(events(run)) == 2
    history = fit(prepared(), TensorBoard(tmp_path / "whole", "run"), log_freq=1).history
    for tag in ("train/loss", "train/acc", "eval/loss"):
        assert curve(run, tag) == curve(tmp_path / "whole" / "run", tag)
    assert curve(run, "eval/loss")[-1] == (14, np.float32(history["eval_loss"][-1]))


@pytest.mark.filterwarnings("ignore:html5lib")  # in the board's own plugins
def test_a_board_that_is_running_forgets_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.context import RequestContext
    from tensorboard.plugins.scalar.scalars_plugin import ScalarsPlugin

    run = tmp_path / "run"
    run.mkdir()
    context = board_context(tmp_path)
    for begin, steps in ((0, [1, 5, 9, 11]), (8, [10, 12]), (11, [])):
        board = TensorBoard(tmp_path, "run")
        board.params = {"metrics": ["loss"]}
        board.open_run(run, begin, begin > 0)
        for step in steps:
            board.write({"train/loss": 100.0 * begin + step}, step)
        board.close_run()
        context.multiplexer.AddRunsFromDirectory(str(tmp_path)).Reload()
    points, _ = ScalarsPlugin(context).scalars_impl(RequestContext(), "train/loss", "run", "", "")
    assert [(step, value) for _, step, value in points] == [(1, 1.0), (5, 5.0), (10, 810.0)]
    # On the disk too: not every reader of such files knows of that.
    unpurged = EventAccumulator(str(run), purge_orphaned_data=False).Reload()
    left = [event.step for event in unpurged.Scalars("train/loss")]
    assert left == [1, 5, 10]


@pytest.mark.parametrize("torn", [b"", b"\x40", b"\x40\0\0\0\0\0\0\0torn", b"\x01" + b"\0" * 11 + b"\xff" * 5])
def test_only_own_files_are_cut_and_at_whole_records(tmp_path: Path, torn: bytes) -> None:
    board = TensorBoard(tmp_path, "run")
    board.params = {"metrics": ["loss"]}
    board.open_run(tmp_path, 0, False)
    board.write({"train/loss": 1.0}, 3)
    board.close_run()
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    other = tmp_path / "events.out.tfevents.1.host"
    other.write_bytes(whole + torn)
    path.write_bytes(whole + torn)
    module._cut(path, 3)
    assert path.read_bytes() == whole
    board.open_run(tmp_path, 2, True)
    board.close_run()
    assert 0 < path.stat().st_size < len(whole)
    assert other.read_bytes() == whole + torn


def test_two_files_within_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1732185000.5)
    for step in (1, 2, 3):
        board = TensorBoard(tmp_path, "run")
        board.params = {"metrics": ["loss"]}
        board.open_run(tmp_path, step - 1, True)
        board.write({"train/loss": float(step)}, step)
        board.close_run()
    assert len(events(tmp_path)) == 3
    assert curve(tmp_path, "train/loss") == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_a_forked_child_leaves_the_file_alone(tmp_path: Path) -> None:
    class Forks(Callback):
        def on_train_batch_end(self, step: int, logs: Any = None) -> None:
            if step == 1:
                child = os.fork()
                if child == 0:
                    board.on_eval_end({"loss": 1.0})
                    board.on_train_end({})
                    os._exit(0)
                assert os.waitpid(child, 0)[1] == 0

    board = TensorBoard(tmp_path, "run", log_freq=1)
    fit(prepared(), board, Forks(), epochs=1)
    assert [step for step, _ in curve(tmp_path / "run", "train/loss")] == list(range(1, 8))
    assert [step for step, _ in curve(tmp_path / "run", "eval/loss")] == [7]


def test_a_full_disk_does_not_stop_the_training(tmp_path: Path) -> None:
    code = """
        import resource, warnings
        import hapi
        from hapi.callbacks import TensorBoard
        from tests.helpers.nets import blobs, mlp
        data = blobs(64)
        model = hapi.Model(mlp()).prepare("adam", "cross_entropy", "acc")
        board = TensorBoard("log", "run", log_freq=1)
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, most))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            history = model.fit(data, data, epochs=3, batch_size=8, verbose=0, callbacks=board)
        (warning,) = caught
        assert "Training goes on without TensorBoard" in str(warning.message), warning
        assert len(history.history["loss"]) == 3
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        model.fit(data, data, epochs=1, batch_size=8, verbose=0, callbacks=board)
    """
    with sandbox(tmp_path) as box:
        ended = box.run([sys.executable, box.script("full.py", code)])
    assert (ended.code, ended.out) == (0, ""), ended.err
    run = tmp_path / "log" / "run"
    assert len(events(run)) == 2
    assert 1500 < (run / events(run)[0]).stat().st_size < 2000  # the torn record was taken back
    steps = [step for step, _ in curve(run, "train/loss")]
    assert steps[:3] == [1, 2, 3]
    assert steps[-8:] == list(range(25, 33))


# ---------------------------------------------------------------------------- arguments


def test_wrong_arguments_are_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"TensorBoard: graph=1; accepted: True or False"):
        TensorBoard(tmp_path, graph=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"TensorBoard: name='a/b'"):
        TensorBoard(tmp_path, "a/b")


@pytest.mark.parametrize(("package", "options"), [("tensorboardX", {}), ("tensorboard", {"graph": True})])
def test_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, options: dict[str, Any]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=f"pip install {package}"):
        TensorBoard(tmp_path, **options)


def test_a_folder_that_cannot_be_written_to_is_told_before_training(tmp_path: Path) -> None:
    driver = Driver([TensorBoard(tmp_path / "log", "run")])
    (tmp_path / "log").write_text("a file")
    with pytest.raises(OSError, match="log"):
        driver.fit(1)
    assert driver.run.progress.global_step == 0
