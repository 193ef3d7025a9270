"""The values of every epoch in a table on disk."""

from __future__ import annotations

import numbers
import os
from pathlib import Path
from typing import Any

from hapi.callbacks._table import read_table, replace_file, table_text
from hapi.callbacks.base import Callback
from hapi.callbacks.checks import flag
from hapi.engine.state import Logs

__all__ = ["CSVLogger"]

_FIXED = ["epoch", "global_step"]


class CSVLogger(Callback):
    """Write one row per epoch: ``epoch``, ``global_step``, training means, ``eval_*`` values and ``lr``.

    ``epoch`` counts from 1 over the model's whole life, so that it goes on in a second ``fit``. A value that
    an epoch does not have (no evaluation) is an empty field; arrays are left out. A row is on disk when its
    epoch ends; a new column, added by a callback, rewrites the file at once.

    Args:
        filename: The file; its folder is created.
        separator: One character between the fields.
        append: Add to the rows of an existing file; False begins a new one at each ``fit``. A run that
            resumes a checkpoint always goes on in its file, without the rows of epochs after that checkpoint.

    Raises:
        OSError: At the start of ``fit``: the file cannot be written.
        ValueError: ``separator`` is not one character; at the start of ``fit``: the rows of an existing file
            are of another kind.

    Example:
        >>> model.fit(train, val, epochs=5, callbacks=CSVLogger("out/log.csv"))
    """

    def __init__(self, filename: str | os.PathLike[str], separator: str = ",", append: bool = False) -> None:
        if not os.fspath(filename):
            raise ValueError("CSVLogger: filename=''; accepted: the path of a file")
        if not isinstance(separator, str) or len(separator) != 1 or separator in '"\r\n':
            raise ValueError(f"CSVLogger: separator={separator!r}; accepted: one character such as ',' or ';'")
        self.filename = os.fspath(filename)
        self.separator = separator
        self.append = flag("CSVLogger", "append", append)
        self._columns: list[str] = []
        self._resumed = False

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Write the header, after the rows that are to stay."""
        path = Path(self.filename)
        path.parent.mkdir(parents=True, exist_ok=True)
        rows: list[dict[str, str]] = []
        old = self._columns if self._resumed else []
        if (self.append or self._resumed) and path.exists():
            old, rows = self._read()
            if self._resumed:
                rows = [row for row in rows if int(row["epoch"]) <= self.run.progress.epoch]
        self._resumed = False
        names = list(self.params.get("metrics") or [])
        evaluated = [f"eval_{name}" for name in names] if self.params.get("evaluates") else []
        self._columns = list(dict.fromkeys([*_FIXED, *old, *names, *evaluated, "lr"]))
        self._rewrite(rows)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Write the epoch's row."""
        progress = self.run.progress
        row = {"epoch": str(progress.epoch + 1), "global_step": str(progress.global_step)}
        for name, value in (logs or {}).items():
            if name not in _FIXED and isinstance(value, numbers.Real):
                row[name] = repr(float(value))
        new = [name for name in row if name not in self._columns]
        if new:
            rows = self._read()[1]
            self._columns += new
            self._rewrite([*rows, row])
        else:
            with open(self.filename, "a", newline="", encoding="utf-8") as file:
                file.write(table_text(self._columns, [row], self.separator, header=False))

    def state_dict(self) -> dict[str, Any]:
        """The columns; the rows are on disk."""
        return {"columns": list(self._columns)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on in the file of the run that is resumed."""
        self._columns = list(state_dict["columns"])
        self._resumed = True

    def _read(self) -> tuple[list[str], list[dict[str, str]]]:
        """Header and rows of the file. A last line that a crash cut short is left out."""
        header, rows = read_table(Path(self.filename), self.separator)
        own = not header or header[: len(_FIXED)] == _FIXED
        # A field beyond the header is under None.
        if not own or any(None in row or not row["epoch"].isdigit() for row in rows):
            raise ValueError(
                f"CSVLogger: {self.filename!r} was not written by a CSVLogger with "
                f"separator={self.separator!r}; give another filename, or append=False to replace it"
            )
        return header, rows

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        path = Path(self.filename)
        if path.is_dir():
            raise IsADirectoryError(f"CSVLogger: {self.filename!r} is a folder; give the path of a file")
        replace_file(path, table_text(self._columns, rows, self.separator))
