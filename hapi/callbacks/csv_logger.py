"""The values of every epoch in a table on disk."""

from __future__ import annotations

import csv
import io
import numbers
import os
from pathlib import Path
from typing import Any

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
                self._writer(file).writerow(row)

    def state_dict(self) -> dict[str, Any]:
        """The columns; the rows are on disk."""
        return {"columns": list(self._columns)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on in the file of the run that is resumed."""
        self._columns = list(state_dict["columns"])
        self._resumed = True

    def _writer(self, file: Any) -> csv.DictWriter[str]:
        return csv.DictWriter(file, self._columns, delimiter=self.separator, lineterminator="\n")

    def _read(self) -> tuple[list[str], list[dict[str, str]]]:
        """Header and rows of the file. A last line that a crash cut short is left out."""
        text = Path(self.filename).read_text(encoding="utf-8")
        reader = csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1]), delimiter=self.separator)
        header = list(reader.fieldnames or [])
        rows = list(reader)
        own = not header or header[: len(_FIXED)] == _FIXED
        # A field beyond the header is under None.
        if not own or any(None in row or not row["epoch"].isdigit() for row in rows):
            raise ValueError(
                f"CSVLogger: {self.filename!r} was not written by a CSVLogger with "
                f"separator={self.separator!r}; give another filename, or append=False to replace it"
            )
        return header, rows

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        """Replace the file at once, so that a crash leaves the old rows or the new."""
        path = Path(self.filename)
        if path.is_dir():
            raise IsADirectoryError(f"CSVLogger: {self.filename!r} is a folder; give the path of a file")
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            with open(temporary, "w", newline="", encoding="utf-8") as file:
                writer = self._writer(file)
                writer.writeheader()
                writer.writerows(rows)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
