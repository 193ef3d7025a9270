"""Curves as JSON lines on disk."""

from __future__ import annotations

import io
import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hapi.callbacks._table import replace_file, whole_lines, write_all
from hapi.callbacks.logger import Logger

__all__ = ["JSONLines"]


class JSONLines(Logger):
    """Write every point of every curve to ``<log_dir>/<name>/metrics.jsonl``, one JSON object per line.

    ``{"step": 10, "time": 1732185000.1, "train/loss": 0.5}``: the global step, seconds since 1970, and values by
    tag (see :class:`Logger`). Values that are not finite are the strings ``"nan"``, ``"inf"`` and ``"-inf"``, since
    JSON has no numbers for them. A line is on disk at once: a killed process loses none.

    Args:
        log_dir: The folder of all runs.
        name: Of the run. Default: the time at its start.
        log_freq: Batches between points. Default: ``fit``'s ``log_freq``.
        hparams: Write the hyper-parameters, ``{"hparams": {...}}``, before the first point; a dict adds to them.

    Raises:
        TypeError, ValueError: An argument of the wrong type or value.
        ValueError: At the start of ``fit``: the ``metrics.jsonl`` of a run that is resumed is another's.

    Example:
        >>> model.fit(train, val, epochs=5, callbacks=hapi.callbacks.JSONLines("log", "lr-0.1"))
        >>> points = [json.loads(line) for line in open("log/lr-0.1/metrics.jsonl")]
    """

    live = ("_file",)

    def __init__(
        self,
        log_dir: str | os.PathLike[str],
        name: str | None = None,
        *,
        log_freq: int | None = None,
        hparams: bool | Mapping[str, Any] = True,
    ) -> None:
        super().__init__(log_dir, name, log_freq=log_freq, hparams=hparams)
        self._file: io.FileIO | None = None

    def open_run(self, folder: Path, step: int, resumed: bool) -> None:
        """Open ``metrics.jsonl``, without a line that was cut short or that comes after ``step``."""
        path = folder / "metrics.jsonl"
        if path.exists():
            lines = whole_lines(path).splitlines(keepends=True)
            kept = "".join(line for line in lines if _step(path, line) <= step)
            if len(kept.encode()) != path.stat().st_size:
                replace_file(path, kept)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115  # close_run closes it

    def write(self, values: dict[str, float], step: int) -> None:
        """Write a line."""
        self._append({"step": step, "time": round(time.time(), 3), **values})

    def write_hparams(self, values: dict[str, int | float | str], metrics: list[str]) -> None:
        """Write the hyper-parameters' line."""
        self._append({"hparams": {name: _json(value) for name, value in values.items()}})

    def close_run(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _append(self, record: dict[str, Any]) -> None:
        assert self._file is not None
        line = json.dumps({name: _json(value) for name, value in record.items()}, allow_nan=False)
        write_all(self._file, line.encode() + b"\n")


def _json(value: Any) -> Any:
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def _step(path: Path, line: str) -> int:
    """The step of a line; -1 for the hyper-parameters."""
    try:
        return int(json.loads(line).get("step", -1))
    except (ValueError, TypeError, AttributeError) as exc:
        raise ValueError(f"JSONLines: {str(path)!r} was not written by JSONLines; give another name") from exc
