from __future__ import annotations

import csv
import json
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hapi
from hapi.callbacks import PredictionWriter
from tests.helpers.ranks import run_ranks


class Two(nn.Module):
    """Two outputs: a matrix row and a truth value per sample."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x[:, 0] > 0


def predict(net: nn.Module, writer: PredictionWriter, rows: int = 10, **options: Any) -> Any:
    data = torch.randn(rows, 3)
    hapi.Model(net).predict(data, batch_size=4, verbose=0, callbacks=writer, keep_outputs=False, **options)
    return data.numpy()


def write(path: Path, *batches: list[Any], samples: int | None = None) -> PredictionWriter:
    """Plays a prediction to a writer."""
    writer = PredictionWriter(path)
    writer.run = SimpleNamespace(env=SimpleNamespace(world=1))  # type: ignore[assignment]
    writer.on_predict_begin({"steps": len(batches)})
    try:
        for index, outputs in enumerate(batches):
            rows = len(outputs[0]) if outputs else 1
            logs = {"step": index + 1, "batch_size": rows, "outputs": [np.asarray(output) for output in outputs]}
            writer.on_predict_batch_end(index, logs)
    except BaseException as exc:
        writer.on_exception(exc)
        writer.on_predict_end({})
        raise
    writer.on_predict_end({"samples": sum(len(b[0]) for b in batches) if samples is None else samples})
    return writer


def test_npy(tmp_path: Path) -> None:
    path = tmp_path / "new" / "out.npy"
    data = predict(nn.Identity(), PredictionWriter(path))
    np.testing.assert_array_equal(np.load(path), data)
    np.testing.assert_array_equal(np.load(path, mmap_mode="r"), data)
    assert [entry.name for entry in path.parent.iterdir()] == ["out.npy"]


@pytest.mark.parametrize("dtype", ["bool", "int8", "int64", "float16", "float64", "complex64", ">f4"])
@pytest.mark.parametrize("shape", [(), (1,), (0,), (2, 3), (1, 2, 1, 2)])
def test_npy_of_any_type_and_shape(dtype: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    batches = [
        np.arange(rows * max(1, int(np.prod(shape)))).astype(dtype)[: rows * int(np.prod(shape))] for rows in (3, 2)
    ]
    batches = [batch.reshape(rows, *shape) for batch, rows in zip(batches, (3, 2), strict=True)]
    # A transposed view is no contiguous memory.
    batches = [np.asfortranarray(batch) for batch in batches]
    write(tmp_path / "out.npy", *[[batch] for batch in batches])
    found = np.load(tmp_path / "out.npy")
    np.testing.assert_array_equal(found, np.concatenate(batches))
    assert found.dtype == batches[0].dtype.newbyteorder("<")


def test_npz_holds_several_outputs(tmp_path: Path) -> None:
    data = predict(Two(), PredictionWriter(tmp_path / "out.npz"))
    with np.load(tmp_path / "out.npz") as found:
        assert list(found) == ["output_0", "output_1"]
        np.testing.assert_array_equal(found["output_0"], data * 2)
        np.testing.assert_array_equal(found["output_1"], data[:, 0] > 0)
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.npz"]


def test_csv(tmp_path: Path) -> None:
    data = predict(Two(), PredictionWriter(tmp_path / "out.CSV"))
    with open(tmp_path / "out.CSV", newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["output_0_0", "output_0_1", "output_0_2", "output_1"]
    np.testing.assert_array_equal(np.array([row[:3] for row in rows]).astype(np.float32), data * 2)
    assert [row[3] for row in rows] == [str(value) for value in data[:, 0] > 0]


def test_csv_columns_and_digits(tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    write(path, [np.array([0.1, np.nan, -np.inf], np.float32)])
    assert path.read_text() == "output\n0.1\nnan\n-inf\n"
    write(path, [np.array([[1, 2]])], [np.array([[3, 4]])])
    assert path.read_text() == "output_0,output_1\n1,2\n3,4\n"
    write(path, [np.zeros((1, 2, 2), np.int32)])
    assert path.read_text() == "output_0_0,output_0_1,output_1_0,output_1_1\n0,0,0,0\n"


def test_jsonl(tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    data = predict(Two(), PredictionWriter(path, format="jsonl"))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    np.testing.assert_array_equal(np.array([row["output_0"] for row in rows], np.float32), data * 2)
    assert [row["output_1"] for row in rows] == list(data[:, 0] > 0)


def test_jsonl_of_what_others_cannot_hold(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    write(path, [np.array([[0.1, np.nan]], np.float32)], [np.array([[1.5, np.inf, 2]], np.float16)], [np.array([7])])
    assert path.read_text() == '{"output": [0.1, null]}\n{"output": [1.5, null, 2.0]}\n{"output": 7}\n'
    with pytest.raises(ValueError, match=r"batch 1, .*: JSON has no complex64 numbers; write an .npy or .npz file"):
        write(path, [np.ones(2, np.complex64)])


def test_bfloat16(tmp_path: Path) -> None:
    net = nn.Linear(3, 2)
    model = hapi.Model(nn.Sequential(net.to(torch.bfloat16)))
    data = torch.randn(5, 3, dtype=torch.bfloat16)
    model.predict(data, batch_size=4, verbose=0, callbacks=PredictionWriter(tmp_path / "out.npy"))
    assert np.load(tmp_path / "out.npy").dtype == np.float32


@pytest.mark.parametrize("suffix", ["npy", "npz", "csv", "jsonl"])
def test_a_failure_leaves_the_older_file(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"out.{suffix}"
    writer = PredictionWriter(path)
    predict(nn.Identity(), writer)
    before = path.read_bytes()

    class Fails(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls == 2:
                raise RuntimeError("no more")
            return x

    with pytest.raises(RuntimeError, match="no more"):
        predict(Fails(), writer)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    predict(nn.Identity(), writer)
    assert path.read_bytes() != before


def test_the_file_has_its_name_only_when_whole(tmp_path: Path) -> None:
    path = tmp_path / "out.npy"

    class Looks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert not path.exists()
            return x

    predict(Looks(), PredictionWriter(path))
    assert path.exists()


def test_memory_is_flat(tmp_path: Path) -> None:
    batch = np.zeros((1000, 125))  # 1 MB

    def peak(batches: int, suffix: str) -> int:
        tracemalloc.start()
        try:
            write(tmp_path / f"out.{suffix}", *[[batch]] * batches)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    for suffix in ("npy", "npz"):
        peak(1, suffix)
        assert peak(40, suffix) < peak(4, suffix) + 1e6


@pytest.mark.parametrize(
    ("suffix", "batches", "message"),
    [
        ("npy", [[np.ones(2), np.ones(2)]], "the network has 2 outputs, and an .npy file holds one array; accepted: "),
        ("npy", [[np.ones((2, 3))], [np.ones((2, 4))]], r"batch 2, .*: samples of float64\[4\], but float64\[3\] in"),
        ("npy", [[np.ones(2, np.float32)], [np.ones(2)]], r"batch 2, .*: samples of float64\[\], but float32\[\] in"),
        ("npz", [[np.ones(2)], [np.ones(2), np.ones(2)]], "batch 2, .*: 2 outputs, but 1 in the batches before"),
        ("csv", [[np.ones((2, 3))], [np.ones((2, 4))]], r"batch 2, .*: samples of shape \[\(4,\)\], but \[\(3,\)\] in"),
        ("jsonl", [[np.ones(2)], [np.ones(2), np.ones(2)]], "batch 2, .*: 2 outputs, but 1 in the batches before"),
        ("csv", [[np.ones(2), np.ones(3)]], r"batch 1 has 2 samples, but an output of shape \(3,\); accepted: outputs"),
        ("csv", [[]], "nothing to write in batch 1: the network has no outputs that are tensors"),
    ],
)
def test_outputs_that_do_not_fit(suffix: str, batches: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        write(tmp_path / f"out.{suffix}", *batches)
    assert not list(tmp_path.iterdir())


def test_no_outputs_and_missing_outputs(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="there were no outputs, so '.*out.npy' is not written"):
        write(tmp_path / "out.npy")
    with pytest.raises(RuntimeError, match="got 2 of 3 samples: on several ranks"):
        write(tmp_path / "out.npy", [np.ones(2)], samples=3)
    assert not list(tmp_path.iterdir())


def test_streams_that_ranks_do_not_gather_are_refused(tmp_path: Path) -> None:
    writer = PredictionWriter(tmp_path / "out.npy")
    writer.run = SimpleNamespace(env=SimpleNamespace(world=2))  # type: ignore[assignment]
    with pytest.raises(ValueError, match="on several ranks, a stream whose batches have unknown sizes is not gathered"):
        writer.on_predict_begin({"steps": None})
    writer.on_predict_begin({"steps": 3})
    with pytest.raises(ValueError, match="nothing to write in batch 1: on several ranks, a stream whose batches"):
        writer.on_predict_batch_end(0, {"step": 1, "batch_size": 0, "outputs": None})


def test_arguments_are_checked(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"path='out.jsonlines', format=None; did you mean 'jsonl'\?; accepted formats: 'npy',"
    ):
        PredictionWriter("out.jsonlines")
    with pytest.raises(ValueError, match="format='parquet'; accepted formats: 'npy', 'npz', 'csv', 'jsonl'"):
        PredictionWriter("out.npy", format="parquet")
    with pytest.raises(ValueError, match="path=''; accepted: the path of a file"):
        PredictionWriter("")
    (tmp_path / "out.npy").mkdir()
    with pytest.raises(IsADirectoryError, match=r"out.npy' is a folder; give the path of a file"):
        predict(nn.Identity(), PredictionWriter(tmp_path / "out.npy"))


def _on_ranks(folder: str) -> None:
    torch.manual_seed(0)
    data = torch.arange(30.0).reshape(10, 3)
    writer = PredictionWriter(f"{folder}/out.npy")
    hapi.Model(nn.Identity()).predict(data, batch_size=2, verbose=0, callbacks=writer, keep_outputs=False)


@pytest.mark.ranks
def test_several_ranks_write_all_samples_in_order(tmp_path: Path) -> None:
    run_ranks(_on_ranks, 2, str(tmp_path))
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), np.arange(30.0).reshape(10, 3))
