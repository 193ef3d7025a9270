"""Curves as a table on disk."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hapi.callbacks._table import read_table, replace_file, table_text, write_all
from hapi.callbacks.logger import Logger

__all__ = ["CSV"]

_FIXED = ["step", "time"]


class CSV(Logger):
    """Write every point of every curve to ``<log_dir>/<name>/metrics.csv``.

    A row per global step: ``step``, ``time`` (seconds since 1970), and a column per tag (``train/loss``,
    ``eval/acc`` ...; see :class:`Logger`). What a step does not have is an empty field. A point is on disk at
    once: a killed process loses none. A tag that is new rewrites the file, at once too. :class:`CSVLogger` writes
    a row per epoch instead.

    Args:
        log_dir: The folder of all runs.
        name: Of the run. Default: the time at its start.
        log_freq: Batches between points. Default: ``fit``'s ``log_freq``.

    Raises:
        TypeError, ValueError: An argument of the wrong type or value.
        ValueError: At the start of ``fit``: the ``metrics.csv`` of a run that is resumed is another's.

    Example:
        >>> model.fit(train, val, epochs=5, callbacks=hapi.callbacks.CSV("log", "lr-0.1"))
        >>> pandas.read_csv("log/lr-0.1/metrics.csv").plot("step", ["train/loss", "eval/loss"])
    """

    live = ("_file",)

    def __init__(
        self, log_dir: str | os.PathLike[str], name: str | None = None, *, log_freq: int | None = None
    ) -> None:
        super().__init__(log_dir, name, log_freq=log_freq)
        self._file: io.FileIO | None = None
        self._columns: list[str] = []
        self._row: dict[str, str] = {}  # the last one, which begins at _start in the file
        self._start = 0

    def open_run(self, folder: Path, step: int, resumed: bool) -> None:
        """Open ``metrics.csv``, without a line that was cut short or that comes after ``step``."""
        path = folder / "metrics.csv"
        rows: list[dict[str, str]] = []
        self._columns = list(_FIXED)
        if path.exists():
            header, rows = read_table(path)
            if header[: len(_FIXED)] != _FIXED or any(None in row or not row["step"].isdigit() for row in rows):
                raise ValueError(f"CSV: {str(path)!r} was not written by CSV; give another name")
            self._columns = header
            rows = [row for row in rows if int(row["step"]) <= step]
        self._rewrite(path, rows)

    def write(self, values: dict[str, float], step: int) -> None:
        """Write a row; the values of a step that has one are added to it."""
        assert self._file is not None
        row = {tag: repr(value) for tag, value in values.items()}
        if self._row.get("step") == str(step):
            row = {**self._row, **row}
        else:
            self._start = self._file.seek(0, os.SEEK_END)
            row = {"step": str(step), "time": f"{time.time():.3f}", **row}
        new = [tag for tag in values if tag not in self._columns]
        if new:
            path = Path(os.fsdecode(self._file.name))
            rows = [old for old in read_table(path)[1] if old["step"] != row["step"]]
            self._columns += new
            self._rewrite(path, [*rows, row])
        else:
            # A row that grows is written over: the file has no moment without it.
            self._file.seek(self._start)
            write_all(self._file, self._line(row))
            self._file.truncate()
            self._row = row

    def close_run(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _line(self, row: Mapping[str, Any]) -> bytes:
        return table_text(self._columns, [row], header=False).encode()

    def _rewrite(self, path: Path, rows: list[dict[str, str]]) -> None:
        self.close_run()
        replace_file(path, table_text(self._columns, rows))
        self._file = open(path, "r+b", buffering=0)  # noqa: SIM115  # close_run closes it
        self._row = rows[-1] if rows else {}
        self._start = self._file.seek(0, os.SEEK_END) - (len(self._line(self._row)) if rows else 0)
