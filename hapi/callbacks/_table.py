"""Text files that a crash may cut short: whole lines are read, and a file is replaced at once."""

from __future__ import annotations

import contextlib
import csv
import errno
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["read_table", "replace_file", "table_text", "whole_lines", "write_all"]


def whole_lines(path: Path) -> str:
    """The text of a file, without a last line that a crash cut short."""
    # Cut as bytes: a crash may cut within a character.
    data = path.read_bytes()
    return data[: data.rfind(b"\n") + 1].decode("utf-8")


def read_table(path: Path, separator: str = ",") -> tuple[list[str], list[dict[str, str]]]:
    """Header and rows of a file of separated values. A field beyond the header is under None."""
    reader = csv.DictReader(io.StringIO(whole_lines(path), newline=""), delimiter=separator)
    return list(reader.fieldnames or []), list(reader)


def table_text(
    columns: Sequence[str], rows: Iterable[Mapping[str, Any]], separator: str = ",", *, header: bool = True
) -> str:
    """Rows as separated values; a column that a row does not have is an empty field."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, delimiter=separator, lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def replace_file(path: Path, text: str) -> None:
    """Replace a file at once, so that a crash leaves the old text or the new."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "w", newline="", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_all(file: io.FileIO, data: bytes) -> None:
    """Write to an unbuffered file in one call, which a kill does not cut in two.

    Raises:
        OSError: Not all of it could be written: the disk is full. What was written of it is taken back.
    """
    begin, rest = os.fstat(file.fileno()).st_size, memoryview(data)
    try:
        while rest:  # once, unless the disk is full: then the second call says what is wrong
            written = file.write(rest)
            if not written:
                raise OSError(errno.EIO, os.strerror(errno.EIO), file.name)
            rest = rest[written:]
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(file.fileno(), begin)
        raise
