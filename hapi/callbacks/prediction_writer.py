"""The outputs of ``predict`` on disk, batch by batch."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import warnings
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hapi.callbacks.base import Callback
from hapi.engine.state import Logs
from hapi.errors import suggest

__all__ = ["PredictionWriter"]

Array = np.ndarray[Any, Any]

_NOT_GATHERED = (
    "on several ranks, a stream whose batches have unknown sizes is not gathered while it is read; predict on one "
    "rank, or write what predict returns"
)


class PredictionWriter(Callback):
    """Write the outputs of ``predict`` to a file as they come.

    Only a batch is in memory. The file appears under its name when it is whole, and replaces an older one then;
    a prediction that fails leaves the older one as it was. On several ranks rank 0 writes all samples, in the
    data's order.

    ========== ============================================================================================
    ``.npy``   one array of all samples, ``(samples, ...)``; for networks with one output
    ``.npz``   an array per output: ``output_0``, ``output_1`` ...
    ``.csv``   a row per sample, after a header. The column of an output with one value is ``output``, with
               several values ``output_0``, ``output_1`` ...; of several outputs ``output_0`` or
               ``output_0_0``, ``output_0_1`` ... Arrays of more axes are written flat
    ``.jsonl`` a JSON object per sample and line: ``{"output": [0.1, 0.9]}``, or ``{"output_0": ...,
               "output_1": ...}``. NaN and infinity are ``null``. Samples may differ in shape between batches
    ========== ============================================================================================

    Args:
        path: The file; its folder is created.
        format: ``"npy"``, ``"npz"``, ``"csv"`` or ``"jsonl"``. Default: by the file's suffix.

    Raises:
        ValueError: An unknown format. While predicting: several outputs in an ``.npy``, an output that is not
            one value or array per sample, samples of different shapes where the format cannot hold them, or
            streamed data of unknown length on several ranks.
        OSError: The file cannot be written.

    Example:
        >>> model.predict(test, batch_size=256, callbacks=PredictionWriter("out.npy"), keep_outputs=False)
        >>> np.load("out.npy", mmap_mode="r").shape
        (10000, 10)
    """

    def __init__(self, path: str | os.PathLike[str], *, format: str | None = None) -> None:
        name = os.path.basename(os.fspath(path))
        if not name:
            raise ValueError(f"PredictionWriter: path={os.fspath(path)!r}; accepted: the path of a file")
        given = os.path.splitext(name)[1][1:].lower() if format is None else format
        if given not in _FORMATS:
            what = f"path={os.fspath(path)!r}, format=None" if format is None else f"format={format!r}"
            accepted = ", ".join(map(repr, _FORMATS))
            raise ValueError(f"PredictionWriter: {what}{suggest(str(given), _FORMATS)}; accepted formats: {accepted}")
        self.path = Path(path)
        self.format = given
        self._file: _File | None = None
        self._rows = 0
        self._predicting = False

    def on_predict_begin(self, logs: Logs | None = None) -> None:
        """See that the file can be written."""
        self._drop()
        if (logs or {}).get("steps") is None and self.run.env.world > 1:
            raise ValueError(f"PredictionWriter: {_NOT_GATHERED}")
        if self.path.is_dir():
            raise IsADirectoryError(f"PredictionWriter: {str(self.path)!r} is a folder; give the path of a file")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._rows, self._predicting = 0, True

    def on_predict_batch_end(self, step: int, logs: Logs | None = None) -> None:
        """Write the batch."""
        assert logs is not None
        outputs: list[Array] | None = logs["outputs"]
        rows: int = logs["batch_size"]
        if not outputs:
            why = _NOT_GATHERED if outputs is None else "the network has no outputs that are tensors"
            raise ValueError(f"PredictionWriter: nothing to write in batch {step + 1}: {why}")
        for array in outputs:
            if array.ndim == 0 or len(array) != rows:
                raise ValueError(
                    f"PredictionWriter: batch {step + 1} has {rows} samples, but an output of shape {array.shape}; "
                    "accepted: outputs whose first axis is that of the samples"
                )
        if self._file is None:
            self._file = _FORMATS[self.format](self._temporary, outputs)
        try:
            self._file.write(outputs)
        except _MismatchError as exc:
            raise ValueError(f"PredictionWriter: batch {step + 1}, {str(self.path)!r}: {exc}") from None
        self._rows += rows

    def on_predict_end(self, logs: Logs | None = None) -> None:
        """Give the file its name."""
        if not self._predicting:
            return
        self._predicting = False
        file, self._file = self._file, None
        if file is None:
            warnings.warn(f"PredictionWriter: there were no outputs, so {str(self.path)!r} is not written", UserWarning)
            return
        try:
            samples = (logs or {}).get("samples", self._rows)
            if samples != self._rows:
                raise RuntimeError(f"PredictionWriter: got {self._rows} of {samples} samples: {_NOT_GATHERED}")
            file.finish()
            with open(self._temporary, "rb") as whole:
                os.fsync(whole.fileno())
            os.replace(self._temporary, self.path)
        except BaseException:
            try:
                file.abort()
            finally:
                self._temporary.unlink(missing_ok=True)
            raise

    def on_exception(self, exception: BaseException) -> None:
        """Leave no part of a file."""
        self._drop()

    @property
    def _temporary(self) -> Path:
        return self.path.with_name(f".{self.path.name}.tmp")

    def _drop(self) -> None:
        file, self._file = self._file, None
        self._predicting = False
        if file is not None:
            try:
                file.abort()
            finally:
                self._temporary.unlink(missing_ok=True)

    def __getstate__(self) -> dict[str, Any]:
        """Without the open file: a copy is one that has not begun."""
        return {**vars(self), "_file": None, "_predicting": False}


class _MismatchError(Exception):
    """Outputs that the format cannot hold."""


class _File(Protocol):
    """A file in the making, opened with the first batch's outputs."""

    def write(self, outputs: Sequence[Array]) -> None:
        """Append a batch."""

    def finish(self) -> None:
        """Make it whole, and close it."""

    def abort(self) -> None:
        """Close it, and remove what lies beside it. After ``finish`` too."""


class _Npy:
    """One array whose length is known at the end: the header is of a fixed size, and written again then."""

    # Enough for any shape and dtype that fits in one line; a multiple of 64, as the format wants it.
    _HEADER = 256

    def __init__(self, path: Path, outputs: Sequence[Array]) -> None:
        if len(outputs) != 1:
            raise ValueError(
                f"PredictionWriter: the network has {len(outputs)} outputs, and an .npy file holds one array; "
                "accepted: a path that ends in .npz, .csv or .jsonl"
            )
        self._dtype = outputs[0].dtype.newbyteorder("<")
        self._shape = outputs[0].shape[1:]
        self._rows = 0
        self._file = open(path, "wb")  # noqa: SIM115  # closed by finish or abort
        self._file.write(self._header())

    def _header(self) -> bytes:
        described = {"descr": self._dtype.str, "fortran_order": False, "shape": (self._rows, *self._shape)}
        text = repr(described).encode("latin1")
        start = b"\x93NUMPY\x01\x00" + (self._HEADER - 10).to_bytes(2, "little")
        return start + text.ljust(self._HEADER - 11) + b"\n"

    def write(self, outputs: Sequence[Array]) -> None:
        array = outputs[0]
        if len(outputs) != 1 or array.shape[1:] != self._shape or not np.can_cast(array.dtype, self._dtype):
            given = ", ".join(f"{a.dtype}{list(a.shape[1:])}" for a in outputs)
            raise _MismatchError(
                f"samples of {given}, but {self._dtype}{list(self._shape)} in the batches before; a .jsonl file holds "
                "samples of different shapes"
            )
        self._file.write(np.ascontiguousarray(array, self._dtype).data)
        self._rows += len(array)

    def finish(self) -> None:
        self._file.seek(0)
        self._file.write(self._header())
        self._file.close()

    def abort(self) -> None:
        self._file.close()


class _Npz:
    """An array file per output, packed into one at the end."""

    def __init__(self, path: Path, outputs: Sequence[Array]) -> None:
        self._path = path
        self._parts: list[tuple[Path, _Npy]] = []
        for index, output in enumerate(outputs):
            part = path.with_name(f"{path.name}{index}")
            self._parts.append((part, _Npy(part, [output])))

    def write(self, outputs: Sequence[Array]) -> None:
        if len(outputs) != len(self._parts):
            raise _MismatchError(f"{len(outputs)} outputs, but {len(self._parts)} in the batches before")
        for (_, file), output in zip(self._parts, outputs, strict=True):
            file.write([output])

    def finish(self) -> None:
        with zipfile.ZipFile(self._path, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
            for index, (part, file) in enumerate(self._parts):
                file.finish()
                with open(part, "rb") as source, archive.open(f"output_{index}.npy", "w", force_zip64=True) as target:
                    shutil.copyfileobj(source, target, 1 << 20)
                part.unlink()

    def abort(self) -> None:
        for part, file in self._parts:
            file.abort()
            part.unlink(missing_ok=True)


class _Csv:
    """A row per sample."""

    def __init__(self, path: Path, outputs: Sequence[Array]) -> None:
        self._shapes = [output.shape[1:] for output in outputs]
        self._file = open(path, "w", newline="", encoding="utf-8")  # noqa: SIM115  # closed by finish or abort
        self._writer = csv.writer(self._file, lineterminator="\n")
        columns = []
        for name, shape in zip(_output_names(outputs), self._shapes, strict=True):
            columns += ["_".join([name, *map(str, index)]) for index in np.ndindex(shape)]
        self._writer.writerow(columns)

    def write(self, outputs: Sequence[Array]) -> None:
        shapes = [output.shape[1:] for output in outputs]
        if shapes != self._shapes:
            raise _MismatchError(
                f"samples of shape {shapes}, but {self._shapes} in the batches before; a .jsonl file holds samples of "
                "different shapes"
            )
        # As text: the shortest that gives the same float32, where Python's float would print 0.10000000149011612.
        flat = [output.reshape(len(output), int(np.prod(output.shape[1:]))).astype(str) for output in outputs]
        self._writer.writerows(np.concatenate(flat, axis=1).tolist())

    def finish(self) -> None:
        self._file.close()

    abort = finish


class _Jsonl:
    """A JSON object per sample."""

    def __init__(self, path: Path, outputs: Sequence[Array]) -> None:
        self._names = _output_names(outputs)
        self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115  # closed by finish or abort

    def write(self, outputs: Sequence[Array]) -> None:
        if len(outputs) != len(self._names):
            raise _MismatchError(f"{len(outputs)} outputs, but {len(self._names)} in the batches before")
        lines = io.StringIO()
        for sample in zip(*map(_plain, outputs), strict=True):
            lines.write(json.dumps(dict(zip(self._names, sample, strict=True)), allow_nan=False) + "\n")
        self._file.write(lines.getvalue())

    def finish(self) -> None:
        self._file.close()

    abort = finish


_FORMATS: dict[str, Any] = {"npy": _Npy, "npz": _Npz, "csv": _Csv, "jsonl": _Jsonl}


def _output_names(outputs: Sequence[Array]) -> list[str]:
    return ["output"] if len(outputs) == 1 else [f"output_{index}" for index in range(len(outputs))]


def _plain(array: Array) -> list[Any]:
    """Nested lists that JSON can hold, with the shortest digits of the array's own type."""
    if array.dtype.kind == "c":
        raise _MismatchError(f"JSON has no {array.dtype} numbers; write an .npy or .npz file")
    if array.dtype.kind != "f":
        return list(array.tolist())
    values = array.astype(str).astype(np.float64).astype(object)
    values[~np.isfinite(array)] = None
    return list(values.tolist())
