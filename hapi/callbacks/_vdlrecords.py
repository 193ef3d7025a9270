"""VisualDL's record files, read and repaired without its writer.

A file is a row of records: 8 bytes of length, little-endian, then a protobuf ``visualdl.Record``. There is no
checksum, and VisualDL's reader stops the whole board at the first record that it cannot read, so a file whose writer
was killed is repaired before anything is appended to it or shown.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

__all__ = ["HEADER", "NAME", "frame", "load", "newest", "records", "repair", "whole"]

NAME = "vdlrecords"
"""What a file's name must contain to be shown."""
HEADER = 8
_FIRST_MAX = 4096  # bytes; the first record holds no more than the run's name
_KEEP = ("meta_data", "hparam")  # of the run, not of a step


def load(module: str = "visualdl") -> ModuleType:
    """Import visualdl or a module of it.

    Its import makes ``~/.visualdl``, and fails where that cannot be made. Then a temporary home is used.

    Raises:
        ImportError: It is not installed, or broken.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as exc:
        if exc.name != "visualdl":
            raise
        raise ModuleNotFoundError(
            "VisualDL needs the package visualdl, which is not installed: pip install visualdl", name="visualdl"
        ) from None
    except OSError:
        _forget()
    home = os.environ.get("HOME")
    with tempfile.TemporaryDirectory(prefix="hapi-home-") as folder:
        os.environ["HOME"] = folder
        try:
            return importlib.import_module(module)
        finally:
            if home is None:
                del os.environ["HOME"]
            else:
                os.environ["HOME"] = home


def _forget() -> None:
    """Drop modules of a failed import: they hold the path that could not be made."""
    for name in [name for name in sys.modules if name.split(".")[0] == "visualdl"]:
        del sys.modules[name]


def frame(record: bytes) -> bytes:
    """A record as it lies in the file."""
    return len(record).to_bytes(HEADER, "little") + record


def newest(folder: Path) -> Path | None:
    """The one record file of ``folder`` that the board shows: the last by name."""
    return max((path for path in folder.iterdir() if NAME in path.name), default=None)


def records(path: Path) -> Iterator[Any]:
    """The whole records of a file, each as its one ``visualdl.Record.Value``.

    Example:
        >>> [(value.tag, value.id, value.value) for value in records(path) if value.WhichOneof("one_value") == "value"]
        [('train/loss', 1, 2.302585...)]
    """
    with open(path, "rb") as file:
        for _, value in _scan(file):
            yield value


def whole(path: Path) -> bool:
    """Whether every byte of the file is part of a readable record."""
    with open(path, "rb") as file:
        return _kept(file, None) == [(0, _size(file))]


def repair(path: Path, last_step: int | None = None) -> bool:
    """Drop what cannot be read and, with ``last_step``, records of later steps.

    The file is replaced at once, and only if something must go.

    Args:
        path: A record file that nobody is writing.
        last_step: The newest step to keep. What belongs to the run (its name, hyper-parameters) stays.

    Returns:
        Whether something went.

    Raises:
        ValueError: It is not a record file.
        OSError: It cannot be read or replaced.
    """
    with open(path, "rb") as file:
        size = _size(file)
        kept = _kept(file, last_step)
        if kept == [(0, size)]:
            return False
        if kept[-1][1] == 0 and not _begun(file) and not next(_scan(file), None):
            raise ValueError(
                f"{os.fspath(path)!r} is not a record file of VisualDL, but its name says so; move it away"
            )
        _replace(path, file, kept)
    return True


def _size(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_size


def _scan(file: BinaryIO) -> Iterator[tuple[int, Any]]:
    """The whole records with their places. Ends where lengths make no sense."""
    record = load("visualdl.proto.record_pb2").Record
    unreadable = (load("google.protobuf.message").DecodeError, ValueError)
    size = _size(file)
    place = 0
    file.seek(0)
    while place + HEADER < size:
        length = int.from_bytes(file.read(HEADER), "little")
        end = place + HEADER + length
        if not length or end > size:
            return
        with contextlib.suppress(*unreadable):
            values = record.FromString(file.read(length)).values
            if values and values[0].WhichOneof("one_value"):
                yield place, values[0]
        place = end


def _kept(file: BinaryIO, last_step: int | None) -> list[tuple[int, int]]:
    """The ranges of bytes that stay, at least one."""
    kept = [(0, 0)]
    for place, value in _scan(file):
        if last_step is None or value.id <= last_step or value.WhichOneof("one_value") in _KEEP:
            end = file.tell()
            if kept[-1][1] == place:
                kept[-1] = (kept[-1][0], end)
            else:
                kept.append((place, end))
    return kept


def _begun(file: BinaryIO) -> bool:
    """Whether a file without a whole record looks like one whose first record was cut short."""
    file.seek(0)
    head = file.read(HEADER + 1)
    first_field = b"\x0a"  # of a Record: values
    return int.from_bytes(head[:HEADER], "little") <= _FIRST_MAX and head[HEADER:] in (b"", first_field)


def _replace(path: Path, file: BinaryIO, kept: list[tuple[int, int]]) -> None:
    # A name that the board does not take for a record file.
    temporary = path.with_name("." + path.name.replace(NAME, "hapi-repair") + ".tmp")
    try:
        with open(temporary, "wb") as out:
            for start, end in kept:
                file.seek(start)
                _copy(file, out, end - start)
            out.flush()
            os.fsync(out.fileno())
        shutil.copymode(path, temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _copy(source: BinaryIO, target: BinaryIO, count: int) -> None:
    while count and (chunk := source.read(min(count, 1 << 20))):
        target.write(chunk)
        count -= len(chunk)
