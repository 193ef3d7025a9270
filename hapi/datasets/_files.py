"""Where dataset files lie, and whether they are what they should be."""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from hapi.datasets._download import DatasetNotFoundError
from hapi.errors import suggest

__all__ = [
    "check_digest",
    "check_mode",
    "download_folder",
    "find",
    "not_found",
    "read_payload",
    "search_folders",
]

MODES = ("train", "test")
GZIP_MAGIC = b"\x1f\x8b"


def check_mode(mode: str, where: str) -> None:
    """ValueError unless ``mode`` is ``"train"`` or ``"test"``."""
    if mode not in MODES:
        raise ValueError(f"{where}: mode must be 'train' or 'test', not {mode!r}{suggest(str(mode), MODES)}")


def data_home() -> Path | None:
    """The folder that the environment variable ``HAPI_DATA_HOME`` names, or None."""
    home = os.environ.get("HAPI_DATA_HOME")
    return Path(home).expanduser() if home else None


def search_folders(name: str, data_dir: str | os.PathLike[str] | None, *, bare_home: bool) -> list[Path]:
    """The folders to look in, first one first.

    Args:
        name: The dataset's own folder below the data home and the cache.
        data_dir: The folder that the user gave.
        bare_home: Whether files that lie in the data home itself count. Not for a dataset that shares its
            file names with another one.
    """
    folders = [] if data_dir is None else [Path(data_dir).expanduser()]
    home = data_home()
    if home is not None:
        folders.append(home / name)
        if bare_home:
            folders.append(home)
    return [*folders, _cache(name)]


def download_folder(name: str, data_dir: str | os.PathLike[str] | None) -> Path:
    """Where a download goes: the user's folder, else the data home, else the cache."""
    if data_dir is not None:
        return Path(data_dir).expanduser()
    home = data_home()
    return _cache(name) if home is None else home / name


def _cache(name: str) -> Path:
    return Path.home() / ".cache" / "hapi" / name


def find(names: Iterable[str], folders: Sequence[Path]) -> Path | None:
    """The first existing file; the folders' order counts before the names'."""
    names = list(names)
    for folder in folders:
        for name in names:
            if (folder / name).is_file():
                return folder / name
    return None


def not_found(where: str, name: str, folders: Sequence[Path]) -> DatasetNotFoundError:
    """The error for a file that lies nowhere and may not be downloaded."""
    looked = ", ".join(map(str, folders))
    return DatasetNotFoundError(
        f"{where}: {name} was not found in {looked}, and download=False. Pass download=True, or put the file there."
    )


def read_payload(path: Path) -> bytes:
    """The file's content, uncompressed if it is gzip (told by its first bytes, not by its name).

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The gzip stream is damaged.
    """
    raw = path.read_bytes()
    if not raw.startswith(GZIP_MAGIC):
        return raw
    try:
        return gzip.decompress(raw)
    except (OSError, EOFError, zlib.error) as exc:
        raise ValueError(f"{path} is damaged: its gzip stream cannot be read ({exc})") from exc


def check_digest(data: bytes, expected: str, path: Path) -> None:
    """ValueError unless ``data`` has the digest ``"algorithm:hex"``."""
    algorithm, _, wanted = expected.partition(":")
    found = hashlib.new(algorithm, data, usedforsecurity=False).hexdigest()
    if found != wanted:
        raise ValueError(
            f"{path} is not the file it should be: the {algorithm} of its content is {found}, not {wanted}. "
            "Delete or replace it."
        )
