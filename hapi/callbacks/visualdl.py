"""Curves for VisualDL's board.

Records are made by visualdl, but brought to the disk here and not by its ``LogWriter``: that one waits for ever for a
disk that stalls, writes on behind a torn record when the disk was full (which kills the board), and prints.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from hapi.callbacks._vdlrecords import NAME, frame, load, newest, repair
from hapi.callbacks.board import BoardLogger, bucket_edges, utf8

__all__ = ["VisualDL"]

_QUEUE = 1000  # records
_STALL_S = 30.0  # how long training waits for the disk
_INT64 = range(-(1 << 63), 1 << 63)


class VisualDL(BoardLogger):
    """Write curves, and more if asked, for VisualDL's board. ``python -m hapi.board log_dir`` shows them, also live.

    Each run has one file ``log_dir/<name>/vdlrecords.<time>.log``, because the board shows one per folder: ``fit``,
    ``evaluate`` and a resumed ``fit`` go on in it. Values are on the disk a moment after their log point, so a
    killed run loses nothing of it. They are stored as float32. Where the disk fills up or stalls, there is one
    warning and training goes on.

    Args:
        log_dir: The folder of all runs, which the board is given.
        name: Of the run, as the board shows it. Default: the time at its start.
        log_freq: Batches between points. Default: ``fit``'s ``log_freq``.
        hparams: Write the hyper-parameters; a dict adds to them.
        grad_norm: Write ``train/grad_norm``: the gradients' norm before clipping, of the first step after each point.
        weight_histograms: Write ``weights/<parameter>`` after each epoch.
        grad_histograms: Write ``gradients/<parameter>`` of each epoch's first step.
        images: So many samples of each evaluation's first batch, with prediction and label, as one picture
            ``eval/predictions``. The inputs must be images ``[N, C, H, W]`` or ``[N, H, W]``.
        confusion_matrix: Draw ``eval/<metric>`` of each :class:`hapi.metrics.ConfusionMatrix` that was prepared.
        classes: The names of the classes, for pictures.
        text: Texts by tag, written once per run. The board shows them as they are.

    Raises:
        ImportError: visualdl is not installed, or a package that draws what was asked for.
        TypeError, ValueError: An argument of the wrong type or value.
        OSError: At the start of ``fit``: the file cannot be written.

    Example:
        >>> model.fit(train, val, epochs=5, callbacks=VisualDL("log", name="lenet"))
    """

    live: ClassVar[tuple[str, ...]] = ("_file",)

    _file: Any = None

    def _need_packages(self) -> None:
        """What is missing shows here, not after an hour of loading data."""
        super()._need_packages()
        load()

    def open_run(self, folder: Path, step: int, resumed: bool) -> None:
        """Open the folder's record file, without what a killed run left behind its checkpoint."""
        path = newest(folder)
        if path is None:
            path = folder / f"{NAME}.{int(time.time()):010d}.log"
        else:
            repair(path, step if resumed else None)
        self._file = _RecordFile(path)
        if path.stat().st_size == 0:
            self._add("meta_data", display_name=utf8(folder.name))

    def write(self, values: dict[str, float], step: int) -> None:
        """Write one scalar per value."""
        for tag, value in values.items():
            self._add("scalar", _tag(tag), float(value), int(step))

    def write_hparams(self, values: dict[str, int | float | str], metrics: list[str]) -> None:
        """Write them for the board's page of hyper-parameters."""
        plain = {utf8(name): _plain(value) for name, value in values.items()}
        self._add("hparam", self._file.path.name, plain, [_tag(tag) for tag in metrics])

    def write_histogram(self, tag: str, values: np.ndarray[Any, Any], step: int) -> None:
        """Write a histogram of 64 buckets."""
        counts, edges = np.histogram(values, bucket_edges(values))
        self._add("histogram", _tag(tag), counts, edges, int(step))

    def write_image(self, tag: str, image: np.ndarray[Any, Any], step: int) -> None:
        """Write a picture. The board keeps ten per tag."""
        image = image.copy()
        if image.max() == 1:
            image *= 2  # visualdl would take it for floats up to 1, and show white for nearly black
        self._add("image", _tag(tag), image, int(step))

    def write_text(self, tag: str, text: str, step: int) -> None:
        """Write a text."""
        self._add("text", _tag(tag), utf8(text), int(step))

    def flush(self) -> None:
        """Wait until all is written."""
        self._file.flush()

    def close_run(self) -> None:
        """Write what is left, and end the thread."""
        self._file.close()

    def _add(self, kind: str, *args: Any, **kwargs: Any) -> None:
        make = getattr(load("visualdl.component.base_component"), kind)
        record = make(*args, **kwargs, walltime=round(time.time() * 1000))
        self._file.add(record.SerializeToString())


class _RecordFile:
    """Appends records to a file in a thread, so that training does not wait for the disk.

    Errors of the thread are raised by the next call. After one, nothing more is written: a record behind a torn one
    could not be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._error: OSError | None = None
        self._queue: queue.Queue[bytes | threading.Event | None] = queue.Queue(_QUEUE)
        file = open(path, "ab", buffering=0)  # noqa: SIM115  # the thread closes it
        self._thread = threading.Thread(target=self._run, args=(file,), name="hapi-visualdl", daemon=True)
        self._thread.start()

    def add(self, record: bytes) -> None:
        """Hand over a record. OSError: an earlier one could not be written, or none for too long."""
        self._put(record)

    def flush(self) -> None:
        """Wait until all records are in the file."""
        done = threading.Event()
        self._put(done)
        if not done.wait(_STALL_S):
            raise self._stalled()
        self._check()

    def close(self) -> None:
        """Write what is left and close the file. After an error, do not wait for the disk."""
        if self._error is not None:
            self._drop()
            self._thread.join(1)
            return
        self._put(None)
        self._thread.join(_STALL_S)
        if self._thread.is_alive():
            raise self._stalled()
        self._check()

    def _put(self, item: bytes | threading.Event | None) -> None:
        self._check()
        try:
            self._queue.put(item, timeout=_STALL_S)
        except queue.Full:
            raise self._stalled() from None

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _stalled(self) -> OSError:
        self._error = TimeoutError(f"the disk has taken nothing for {_STALL_S:g} s")
        return self._error

    def _drop(self) -> None:
        """Leave nothing but the end in the queue, so that the thread ends as soon as the disk lets it."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._queue.get_nowait()
        self._queue.put_nowait(None)

    def _run(self, file: Any) -> None:
        with file:
            while (item := self._queue.get()) is not None:
                if isinstance(item, threading.Event):
                    item.set()
                elif self._error is None:
                    try:
                        _append(file, frame(item))
                    except OSError as exc:
                        self._error = exc


def _append(file: Any, data: bytes) -> None:
    """Write all of ``data``, or leave the file as it was."""
    end = os.fstat(file.fileno()).st_size
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except OSError:
        with contextlib.suppress(OSError):
            file.truncate(end)
        raise


def _plain(value: int | float | str) -> int | float | str:
    """What a record of hyper-parameters can hold."""
    if isinstance(value, float) or (type(value) is int and value in _INT64):
        return value
    return utf8(str(value))


def _tag(tag: str) -> str:
    return utf8(tag).replace("%", "_")  # the board's own sign for "/"
