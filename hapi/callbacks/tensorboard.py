"""Curves for TensorBoard.

Records are made by tensorboardX and brought to the disk here, not by its ``SummaryWriter``: that one's queue loses what
is in it when the process is killed, blocks for ever once its thread died of a full disk, and its files overwrite each
other within a second. One record per point, of some hundred bytes, needs neither queue nor thread.
"""

from __future__ import annotations

import os
import re
import socket
import struct
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hapi.callbacks._graph import graph_of
from hapi.callbacks._table import write_all
from hapi.callbacks.board import BoardLogger, bucket_edges, utf8
from hapi.callbacks.checks import flag
from hapi.engine.state import Logs

__all__ = ["TensorBoard"]

_SUFFIX = ".hapi"  # tells the files apart from those of a user's own writer


class TensorBoard(BoardLogger):
    """Write curves for TensorBoard to ``<log_dir>/<name>``; look at them with ``tensorboard --logdir <log_dir>``.

    See :class:`Logger` for the tags and the x axis. The page "Custom scalars" shows the loss and each metric of
    training and evaluation in one chart. A point is on disk at once: a killed process loses none. A run that is
    resumed goes on in its folder; what was written after the checkpoint is taken out.

    Args:
        log_dir: The folder of all runs.
        name: Of the run. Default: the time at its start.
        log_freq: Batches between points. Default: ``fit``'s ``log_freq``.
        hparams: Write the hyper-parameters for the page of that name; a dict adds to them.
        grad_norm: Write ``train/grad_norm``: the gradients' norm before clipping, of the first step after each point.
        weight_histograms: Write ``weights/<parameter>`` after each epoch.
        grad_histograms: Write ``gradients/<parameter>`` of each epoch's first step.
        images: So many samples of each evaluation's first batch, with prediction and label, as one picture
            ``eval/predictions``. The inputs must be images ``[N, C, H, W]`` or ``[N, H, W]``.
        confusion_matrix: Draw ``eval/<metric>`` of each :class:`hapi.metrics.ConfusionMatrix` that was prepared.
        classes: The names of the classes, for pictures.
        text: Texts by tag, written once per run; Markdown.
        graph: Draw the network, traced once with the first batch. Where it cannot be traced, there is a warning.

    Raises:
        ImportError: ``tensorboardX``, or a package that draws what was asked for, is missing.
        TypeError, ValueError: An argument of the wrong type or value.

    Example:
        >>> model.fit(train, val, epochs=5, callbacks=hapi.callbacks.TensorBoard("log", "lr-0.1", hparams=True))
    """

    live = ("_file",)

    def __init__(
        self,
        log_dir: str | os.PathLike[str],
        name: str | None = None,
        *,
        log_freq: int | None = None,
        hparams: bool | Mapping[str, Any] = False,
        grad_norm: bool = False,
        weight_histograms: bool = False,
        grad_histograms: bool = False,
        images: int = 0,
        confusion_matrix: bool = False,
        classes: Sequence[str] | None = None,
        text: Mapping[str, str] | None = None,
        graph: bool = False,
    ) -> None:
        super().__init__(
            log_dir,
            name,
            log_freq=log_freq,
            hparams=hparams,
            grad_norm=grad_norm,
            weight_histograms=weight_histograms,
            grad_histograms=grad_histograms,
            images=images,
            confusion_matrix=confusion_matrix,
            classes=classes,
            text=text,
        )
        try:
            import tensorboardX  # noqa: F401
        except ImportError as exc:
            raise ImportError(f"TensorBoard writes through tensorboardX ({exc}): pip install tensorboardX") from exc
        self.graph = flag("TensorBoard", "graph", graph)
        if graph:
            try:
                import tensorboard  # noqa: F401
            except ImportError as exc:
                raise ImportError("TensorBoard: graph=True needs the board itself: pip install tensorboard") from exc
        self._file: _EventsFile | None = None
        self._path: Path | None = None

    def open_run(self, folder: Path, step: int, resumed: bool) -> None:
        """Begin an events file, or go on in the one that this callback wrote to last."""
        from tensorboardX.proto.event_pb2 import SessionLog
        from tensorboardX.summary import custom_scalars

        if self._path is not None and self._path.parent == folder and self._path.exists() and not resumed:
            self._file = _EventsFile(self._path)
            return
        if resumed:
            for path in folder.glob(f"events.out.tfevents.*{_SUFFIX}"):
                _cut(path, step)
        # A new file, since a board that is running does not look again at what it has read of the others.
        self._path = _next_path(folder)
        self._file = _EventsFile(self._path)
        self._file.add(file_version="brain.Event:2")
        # Tells such a board to forget that step and later ones. It takes the first such record of a run for the run's
        # beginning, so there is one in each file.
        self._file.add(step + 1, session_log=SessionLog(status=SessionLog.START))
        self._file.add(summary=custom_scalars(_layout(self.params["metrics"])))

    def write(self, values: dict[str, float], step: int) -> None:
        """Write one record of scalars."""
        from tensorboardX.proto.summary_pb2 import Summary

        scalars = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._add(step, summary=Summary(value=scalars))

    def write_hparams(self, values: dict[str, int | float | str], metrics: list[str]) -> None:
        """Write the run's line in the table of hyper-parameters."""
        from tensorboardX.summary import hparams

        plain = {utf8(name): _plain(value) for name, value in values.items()}
        for summary in hparams(plain, dict.fromkeys(metrics, 0.0)):
            self._add(0, summary=summary)

    def write_histogram(self, tag: str, values: np.ndarray[Any, Any], step: int) -> None:
        """Write a histogram of 64 buckets."""
        from tensorboardX.summary import histogram

        with np.errstate(over="ignore"):  # the sum of squares
            self._add(step, summary=histogram(tag, values, bucket_edges(values)))

    def write_image(self, tag: str, image: np.ndarray[Any, Any], step: int) -> None:
        """Write a picture, as PNG."""
        from tensorboardX.summary import image as png

        self._add(step, summary=png(tag, image, dataformats="HWC"))

    def write_text(self, tag: str, text: str, step: int) -> None:
        """Write a text, which TensorBoard shows as Markdown."""
        from tensorboardX.summary import text as markdown

        self._add(step, summary=markdown(utf8(tag), utf8(text)))

    def close_run(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def state_dict(self) -> dict[str, Any]:
        """The board's state, and whether the network was drawn."""
        return {**super().state_dict(), "drawn": self._drawn}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the run that is resumed."""
        super().load_state_dict(state_dict)
        self._drawn = state_dict["drawn"]

    def _begin_run(self) -> None:
        super()._begin_run()
        self._drawn = False

    def _train_point(self, logs: Logs) -> None:
        super()._train_point(logs)
        batch = self.run.example() if self.graph and not self._drawn else None
        if batch is not None:
            self._drawn = True
            self._draw(batch)

    def _draw(self, batch: Any) -> None:
        try:
            graph = graph_of(self.run.network, batch.args, batch.kwargs)
        except Exception as exc:  # the tracer runs the user's code
            reason = " ".join(f"{type(exc).__name__}: {exc}".split())[:300]
            warnings.warn(f"TensorBoard: the network cannot be drawn: {reason}", RuntimeWarning)
        else:
            self._guard(lambda: self._add(0, graph_def=graph))

    def _add(self, step: int, **content: Any) -> None:
        assert self._file is not None
        try:
            self._file.add(step, **content)
        except OSError:
            self._path = None  # its last record may be torn
            raise


class _EventsFile:
    """Appends records to a file, each in one write."""

    def __init__(self, path: Path) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.record_writer import masked_crc32c

        self._event, self._checksum = Event, masked_crc32c
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115  # close closes it

    def add(self, step: int = 0, **content: Any) -> None:
        """Append an event; ``content`` is its one field besides time and step."""
        data = self._event(wall_time=time.time(), step=step, **content).SerializeToString()
        length = struct.pack("<Q", len(data))
        checksums = [struct.pack("<I", self._checksum(part)) for part in (length, data)]
        write_all(self._file, length + checksums[0] + data + checksums[1])

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _next_path(folder: Path) -> Path:
    """A file that TensorBoard reads after all others of the folder: it goes by names, which begin with seconds."""
    found = [re.match(r"events\.out\.tfevents\.(\d+)\.", path.name) for path in folder.iterdir()]
    second = max([int(time.time()), *(int(match[1]) + 1 for match in found if match)])
    return folder / f"events.out.tfevents.{second}.{socket.gethostname()}{_SUFFIX}"


def _cut(path: Path, step: int) -> None:
    """Cut a file before the first record of a later step, or one that is torn."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    data, end = path.read_bytes(), 0
    while end + 16 <= len(data):
        (length,) = struct.unpack_from("<Q", data, end)
        content, checksum = data[end + 12 : end + 12 + length], data[end + 12 + length : end + 16 + length]
        if checksum != struct.pack("<I", masked_crc32c(content)):
            break
        event = Event.FromString(content)
        if event.HasField("summary") and event.step > step:
            break
        end += 16 + length
    if end < len(data):
        os.truncate(path, end)


def _plain(value: int | float | str) -> float | str:
    """What a record of hyper-parameters can hold."""
    if isinstance(value, str) or not -1e300 < value < 1e300:
        return utf8(str(value))
    return float(value)


def _layout(names: Sequence[str]) -> dict[str, dict[str, list[Any]]]:
    """Charts of a value in training and evaluation. TensorBoard takes tags for the beginnings of patterns."""
    charts = {name: ["Multiline", [f"{phase}/{re.escape(name)}$" for phase in ("train", "eval")]] for name in names}
    return {"training and evaluation": charts}
