from __future__ import annotations

import io
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hapi
from hapi.callbacks import VisualDL, visualdl
from hapi.callbacks._vdlrecords import frame, load, newest, records, whole
from tests.callbacks.driver import Driver
from tests.helpers.launching import sandbox
from tests.helpers.nets import blobs, mlp


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[VisualDL]:
    callback = VisualDL(tmp_path)
    callback.open_run(tmp_path, 0, False)
    yield callback
    callback.close_run()


def written(folder: Path) -> list[Any]:
    path = newest(folder)
    assert path is not None
    assert whole(path)
    return list(records(path))


def curve(folder: Path, tag: str) -> list[tuple[int, float]]:
    return [(value.id, value.value) for value in written(folder) if value.tag == tag]


def model() -> hapi.Model:
    return hapi.Model(mlp()).prepare("adam", "cross_entropy", ["acc"])


def test_curves_of_a_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    callback = VisualDL(tmp_path, "run", hparams=True)
    driver = Driver([callback], evaluate=lambda i: {"loss": 5.0 + i}, batches=4, log_freq=2)
    driver.fit(2)
    assert os.listdir(tmp_path) == ["run"]
    assert len(os.listdir(tmp_path / "run")) == 1
    first, second = written(tmp_path / "run")[:2]
    assert first.tag == "meta_data_tag"
    assert first.meta_data.display_name == "run"
    assert second.WhichOneof("one_value") == "hparam"
    assert [step for step, _ in curve(tmp_path / "run", "train/loss")] == [2, 4, 6, 8]
    assert curve(tmp_path / "run", "eval/loss") == [(4, 5.0), (8, 6.0)]
    assert [step for step, _ in curve(tmp_path / "run", "train/lr")] == [2, 4, 6, 8]
    assert capfd.readouterr() == ("", "")


def test_fit_evaluate_fit_is_one_file_with_all_curves(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data, trained, callback = blobs(64), model(), VisualDL(tmp_path, "run", log_freq=1)
    quiet: dict[str, Any] = {"batch_size": 8, "verbose": 0, "callbacks": callback}
    history = trained.fit(data, data, epochs=2, **quiet).history
    result = trained.evaluate(data, **quiet)
    again = trained.fit(data, data, epochs=1, **quiet).history
    assert os.listdir(tmp_path) == ["run"]
    assert len(os.listdir(tmp_path / "run")) == 1
    assert [step for step, _ in curve(tmp_path / "run", "train/loss")] == list(range(1, 25))
    expected = [history["eval_loss"][0], history["eval_loss"][1], result["loss"], again["eval_loss"][0]]
    assert curve(tmp_path / "run", "eval/loss") == [
        (step, np.float32(value)) for step, value in zip([8, 16, 16, 24], expected, strict=True)
    ]
    reader = load().LogReader(file_path=str(newest(tmp_path / "run")))
    assert [v.id for v in reader.get_data("scalar", "train/loss")] == list(range(1, 25))
    assert "VisualDL" not in capfd.readouterr().out


def test_what_was_written_is_on_the_disk_at_once(opened: VisualDL, tmp_path: Path) -> None:
    for step in range(1, 51):
        opened.write({"train/loss": 1.0}, step)
    opened.flush()
    assert [step for step, _ in curve(tmp_path, "train/loss")] == list(range(1, 51))


def test_values_of_any_kind(opened: VisualDL, tmp_path: Path) -> None:
    values = {"nan": np.nan, "inf": -np.inf, "huge": 1e300, "tenth": 0.1, "np": np.float32(0.5), "int": 3}
    opened.write(values, np.int64(7))  # type: ignore[arg-type]
    opened.flush()
    found = {value.tag: (value.id, value.value) for value in written(tmp_path)[1:]}
    assert np.isnan(found.pop("nan")[1])
    assert found == {k: (7, v) for k, v in zip(found, [-np.inf, np.inf, np.float32(0.1), 0.5, 3.0], strict=True)}


def test_tags_and_texts_that_visualdl_refuses(opened: VisualDL, tmp_path: Path) -> None:
    opened.write({"train/top5%": 1.0, "train/\ud800 ü": 2.0}, 1)
    opened.write_text("note%", "half a pair: \udc00, ü", 1)
    opened.flush()
    tags = [value.tag for value in written(tmp_path)[1:]]
    assert tags == ["train/top5_", "train/? ü", "note_"]
    assert written(tmp_path)[-1].text.encoded_text_string == "half a pair: ?, ü"


def test_hyperparameters_of_any_kind(opened: VisualDL, tmp_path: Path) -> None:
    given: dict[str, Any] = {"amp": True, "lr": 0.1, "big": 1 << 70, "epochs": 3, "name": "a\ud800", "none": None}
    opened.write_hparams(given, ["eval/acc%"])
    opened.flush()
    found = written(tmp_path)[-1].hparam
    values = {info.name: getattr(info, info.WhichOneof("type")) for info in found.hparamInfos}
    assert values == {
        "amp": "True", "lr": 0.1, "big": str(1 << 70), "epochs": 3, "name": "a?", "none": "None"
    }  # fmt: skip
    assert [info.name for info in found.metricInfos] == ["eval/acc_"]


@pytest.mark.parametrize(
    "values",
    [
        np.random.default_rng(0).normal(size=1000),
        np.array([3.0]),
        np.array([1e20, 1e20]),
        np.array([-1.7e308, 1.7e308]),
        np.nextafter(np.full(9, 1e8), np.linspace(0, 2e8, 9)),
        np.array([0.0, 5e-324 * 4]),
    ],
    ids=["normal", "one", "equal", "widest", "nearly equal", "tiny"],
)
def test_a_histogram_counts_every_value(opened: VisualDL, tmp_path: Path, values: np.ndarray[Any, Any]) -> None:
    opened.write_histogram("weights/w", values, 3)
    opened.flush()
    found = written(tmp_path)[-1]
    assert (found.id, len(found.histogram.hist), len(found.histogram.bin_edges)) == (3, 64, 65)
    assert sum(found.histogram.hist) == len(values)
    edges = np.array(found.histogram.bin_edges)
    assert np.isfinite(edges).all()
    assert (edges[:-1] <= edges[1:]).all()
    assert edges[0] < edges[-1]


@pytest.mark.parametrize("top", [0, 1, 2, 255])
def test_an_image_keeps_its_colours_and_the_callers_array(opened: VisualDL, tmp_path: Path, top: int) -> None:
    from PIL import Image

    image = np.zeros((4, 5, 3), np.uint8)
    image[1, 2] = top, 0, top
    before = image.copy()
    opened.write_image("eval/predictions", image, 4)
    opened.flush()
    assert (image == before).all()
    with Image.open(io.BytesIO(written(tmp_path)[-1].image.encoded_image_string)) as shown:
        assert np.abs(np.asarray(shown).astype(int) - before).max() <= (top == 1)


def test_an_open_file_that_was_closed_is_gone_on_with(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    callback = VisualDL(tmp_path)
    for step in (1, 2, 3):
        callback.open_run(tmp_path, step, False)
        callback.write({"a": 0.0}, step)
        callback.close_run()
        assert not [thread for thread in threading.enumerate() if "visualdl" in thread.name]
        path = newest(tmp_path)
        assert path is not None
        with open(path, "ab") as file:
            file.write(b"torn")
    path.write_bytes(path.read_bytes()[:-4])
    assert [value.tag for value in written(tmp_path)] == ["meta_data_tag", "a", "a", "a"]
    assert os.listdir(tmp_path) == [path.name]
    assert capfd.readouterr() == ("", "")


def test_a_resumed_run_drops_what_a_killed_one_wrote_after_its_checkpoint(tmp_path: Path) -> None:
    callback = VisualDL(tmp_path)
    callback.open_run(tmp_path, 0, False)
    for step in range(1, 8):
        callback.write({"train/loss": float(step)}, step)
    callback.close_run()
    other = VisualDL(tmp_path)
    other.open_run(tmp_path, 4, True)
    other.write({"train/loss": 50.0}, 5)
    other.close_run()
    assert curve(tmp_path, "train/loss") == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, 50.0)]


def test_the_file_that_the_board_shows_is_gone_on_with(tmp_path: Path) -> None:
    (tmp_path / "vdlrecords.0000000001.log").touch()
    (tmp_path / "vdlrecords.9999999999.log").touch()
    callback = VisualDL(tmp_path)
    callback.open_run(tmp_path, 0, False)
    callback.close_run()
    assert (tmp_path / "vdlrecords.0000000001.log").stat().st_size == 0
    assert len(written(tmp_path)) == 1
    assert len(os.listdir(tmp_path)) == 2


def test_a_file_of_another_kind_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    other = tmp_path / "run" / "vdlrecords.1.log"
    other.write_text("mine")
    with pytest.raises(ValueError, match="move it away"):
        VisualDL(tmp_path).open_run(tmp_path / "run", 0, False)
    assert other.read_text() == "mine"


def test_without_visualdl_the_constructor_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "visualdl", None)
    with pytest.raises(ImportError, match="pip install visualdl"):
        VisualDL(tmp_path)


def test_visualdl_is_imported_when_it_is_asked_for(tmp_path: Path) -> None:
    code = """
        import sys, hapi, hapi.callbacks, hapi.board
        assert not {name for name in sys.modules if name.startswith("visualdl")}
        hapi.callbacks.VisualDL("log")
        assert "visualdl" in sys.modules
    """
    with sandbox(tmp_path) as box:
        ended = box.run([sys.executable, box.script("lazy.py", code)], env={"HOME": str(tmp_path)})
    assert ended.code == 0, ended.err


class Disk:
    """A disk whose writes wait until it is released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.released = threading.Event()
        append = visualdl._append

        def wait_and_append(file: Any, data: bytes) -> None:
            self.released.wait()
            append(file, data)

        monkeypatch.setattr(visualdl, "_append", wait_and_append)
        monkeypatch.setattr(visualdl, "_STALL_S", 0.1)
        monkeypatch.setattr(visualdl, "_QUEUE", 3)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    stalled = Disk(monkeypatch)
    yield stalled
    stalled.released.set()


def test_a_disk_that_stalls_does_not_hold_the_training(tmp_path: Path, disk: Disk) -> None:
    driver = Driver([VisualDL(tmp_path, "run")], evaluate=lambda i: {"loss": 1.0}, log_freq=1)
    begun = time.monotonic()
    with pytest.warns(RuntimeWarning, match="taken nothing for 0.1 s. Training goes on") as caught:
        driver.fit(5)
    assert len(caught) == 1
    assert driver.run.progress.epoch == 5
    assert time.monotonic() - begun < 5
    disk.released.set()  # the thread ends as soon as it can: leak_check


@pytest.mark.parametrize("call", ["flush", "close"])
def test_neither_do_flush_and_close(tmp_path: Path, disk: Disk, call: str) -> None:
    file = visualdl._RecordFile(tmp_path / "vdlrecords.1.log")
    file.add(b"record")
    begun = time.monotonic()
    with pytest.raises(TimeoutError, match="taken nothing"):
        getattr(file, call)()
    file.close()
    assert time.monotonic() - begun < 5
    with pytest.raises(OSError, match="taken nothing"):
        file.add(b"record")


def test_after_an_error_nothing_is_written_and_the_next_call_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[bytes] = []
    handed_over = threading.Event()

    def full(file: Any, data: bytes) -> None:
        handed_over.wait()
        tried.append(data)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(visualdl, "_append", full)
    file = visualdl._RecordFile(tmp_path / "vdlrecords.1.log")
    for record in (b"first", b"second", b"third"):
        file.add(record)
    handed_over.set()
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            file.flush()
    file.close()
    assert tried == [frame(b"first")]


def test_a_record_that_does_not_fit_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    class Full(io.FileIO):
        def write(self, data: Any) -> int:
            if len(data) < 4:
                raise OSError(28, "No space left on device")
            return super().write(data[:5])

    path = tmp_path / "file"
    path.write_bytes(b"whole")
    with Full(path, "ab") as file:
        with pytest.raises(OSError, match="No space"):
            visualdl._append(file, b"1234567")
        visualdl._append(file, b"12345")
    assert path.read_bytes() == b"whole12345"


def test_a_full_disk_does_not_stop_the_training(tmp_path: Path) -> None:
    code = """
        import resource, warnings
        import hapi
        from hapi.callbacks import VisualDL
        from tests.helpers.nets import blobs, mlp
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
        data = blobs(64)
        model = hapi.Model(mlp()).prepare("adam", "cross_entropy", ["acc"])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            writer = VisualDL("log", "run", log_freq=1)
            history = model.fit(data, data, epochs=3, batch_size=8, verbose=0, callbacks=writer)
        texts = [str(warning.message) for warning in caught]
        assert len(texts) == 1 and "File too large" in texts[0] and "Training goes on" in texts[0], texts
        assert len(history.history["loss"]) == 3
    """
    with sandbox(tmp_path) as box:
        ended = box.run([sys.executable, box.script("full.py", code)])
    assert ended.code == 0, ended.err
    assert ended.out == ""
    path = newest(tmp_path / "log" / "run")
    assert path is not None
    assert 1900 < path.stat().st_size <= 2000
    assert whole(path)


def test_a_folder_that_cannot_be_written_to_is_told_before_training(tmp_path: Path) -> None:
    driver = Driver([VisualDL(tmp_path / "log", "run")])
    (tmp_path / "log").write_text("a file")
    with pytest.raises(OSError, match="log"):
        driver.fit(1)
    assert driver.run.progress.global_step == 0


def test_wrong_arguments_are_named(tmp_path: Path) -> None:
    for wrong in ({"log_freq": 0}, {"name": "a/b"}, {"images": -1}, {"grad_norm": 1}, {"text": "note"}):
        with pytest.raises((TypeError, ValueError), match=f"VisualDL: {next(iter(wrong))}="):
            VisualDL(tmp_path, **wrong)  # type: ignore[arg-type]
