"""Download a file once, by one process, whole or not at all."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from hapi.errors import add_note

try:
    import fcntl
except ImportError:  # not POSIX
    HAVE_LOCKS = False
else:
    HAVE_LOCKS = True

__all__ = ["DatasetNotFoundError", "fetch"]

logger = logging.getLogger(__name__)

CHUNK = 1 << 18
BACKOFF_S = 0.5
"""Pause before the second attempt at a mirror; it doubles with each further one."""
TRY_AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})
"""HTTP codes of trouble that may pass."""
OTHER_PLACE = "To keep datasets elsewhere, set the environment variable HAPI_DATA_HOME to that folder."


class DatasetNotFoundError(FileNotFoundError):
    """A dataset's file is not on this machine and cannot be downloaded."""


class _AttemptError(Exception):
    """This attempt failed; another one at the same mirror may not."""


class _MirrorError(Exception):
    """This mirror cannot give the file."""


def fetch(
    filename: str,
    urls: Sequence[str],
    target_dir: Path,
    *,
    check: Callable[[Path], object],
    retries: int = 3,
    timeout: float = 10.0,
) -> Path:
    """Return ``target_dir / filename``, downloaded from the first of ``urls`` that gives it.

    The bytes go to ``<filename>.part``, and only a complete, checked file gets its name. A cut connection is
    resumed, also by a later call, where the server can. Several processes that ask for the same file download
    it once: one does, the others wait and then find it.

    Args:
        filename: The file's name.
        urls: Mirrors of the file, in order.
        target_dir: Made if missing.
        check: Raises ValueError if the file at the given path is not the right one.
        retries: Attempts per mirror. A mirror that cannot be reached at all, or has no such file, gets one.
        timeout: Seconds without an answer or a byte until an attempt has failed.

    Raises:
        DatasetNotFoundError: The folder cannot be written to (found out before any download), or no mirror
            gave the file; each mirror is listed with its reason.
        ValueError: ``retries`` is below 1.
        OSError: The disk is full, or failed.

    Example:
        >>> fetch("a.gz", ["https://example.org/a.gz"], Path("data"), check=lambda path: None)
    """
    if retries < 1:
        raise ValueError(f"fetch: retries must be at least 1, not {retries}")
    target = target_dir / filename
    with contextlib.ExitStack() as stack:
        try:
            target_dir.mkdir(parents=True, exist_ok=True)
            part = stack.enter_context(_exclusive(target_dir, filename))
        except OSError as exc:
            raise DatasetNotFoundError(
                f"cannot download {filename}: {target_dir} cannot be written to ({exc}). {OTHER_PLACE}"
            ) from exc
        if target.is_file():  # another process had it while this one waited
            return target
        reasons = []
        for url in urls:
            try:
                logger.info("downloading %s to %s", url, target)
                _download(url, part, check, retries, timeout)
                os.replace(part, target)
                _sync_folder(target_dir)
            except _MirrorError as exc:
                reasons.append(f"\n  {url}: {exc}")
            except OSError as exc:
                part.unlink(missing_ok=True)
                add_note(exc, f"while writing {part}")
                raise
            else:
                return target
    raise DatasetNotFoundError(
        f"cannot download {filename}:{''.join(reasons) or ' no mirror is given'}\n"
        f"Put it into {target_dir} by hand. {OTHER_PLACE}"
    )


def _download(url: str, part: Path, check: Callable[[Path], object], retries: int, timeout: float) -> None:
    """Leave a complete, checked file at ``part``, or raise _MirrorError."""
    for attempt in range(1, retries + 1):
        pieced = _size(part) > 0
        try:
            _transfer(url, part, timeout)
        except _AttemptError as exc:
            reason = str(exc)
            if attempt < retries:
                time.sleep(BACKOFF_S * 2 ** (attempt - 1))
            continue
        try:
            check(part)
        except ValueError as exc:
            part.unlink()
            if not pieced:
                raise _MirrorError(f"gave a wrong file: {exc}") from exc
            # The first part may come from another mirror, whose file differs: try once more in one piece.
            reason = f"gave a wrong file: {exc}"
            continue
        return
    raise _MirrorError(f"{reason} ({retries} attempts)")


def _transfer(url: str, part: Path, timeout: float) -> None:
    """Fetch what ``part`` lacks, once."""
    have = _size(part)
    response = _open(url, part, have, timeout)
    if response is None:
        return
    with response:
        start, total = _extent(response)
        if start not in (0, have):
            part.unlink()
            raise _AttemptError(f"the server resumed at byte {start} instead of {have}")
        try:
            with part.open("ab" if start else "wb") as out:
                for chunk in _chunks(response):
                    out.write(chunk)
                out.flush()
                os.fsync(out.fileno())
            if total is not None and _size(part) < total:
                raise _AttemptError("the connection was cut")
        except _AttemptError as exc:
            got = f"after {_size(part)} of {'?' if total is None else total} bytes"
            resumable = start > 0 or response.headers.get("Accept-Ranges") == "bytes"
            if not resumable or not _size(part):
                part.unlink()
            raise _AttemptError(f"{exc} {got}") from exc


def _open(url: str, part: Path, have: int, timeout: float) -> Any:
    """The response to a request for the bytes from ``have`` on; None if ``part`` has all of them."""
    headers = {"User-Agent": "hapi", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        return urlopen(Request(url, headers=headers), timeout=timeout)
    except HTTPError as exc:
        with exc:
            if exc.code == 416 and have:
                if exc.headers.get("Content-Range") == f"bytes */{have}":
                    return None
                part.unlink()
                raise _AttemptError(f"the server's file is not one of which {have} bytes are here") from exc
            kind = _AttemptError if exc.code in TRY_AGAIN else _MirrorError
            raise kind(f"HTTP {exc.code} {exc.reason}") from exc
    except (URLError, ValueError) as exc:  # urllib: no connection; or not a URL
        raise _MirrorError(f"cannot be reached: {getattr(exc, 'reason', exc)}") from exc
    except (OSError, HTTPException) as exc:
        raise _AttemptError(f"no answer: {exc!r}") from exc


def _extent(response: Any) -> tuple[int, int | None]:
    """Where in the file the body starts, and the size of the file if known."""
    if response.status == 206:
        match = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", ""))
        if match is None:
            raise _MirrorError("answered 206 without a valid Content-Range")
        return int(match[1]), None if match[2] == "*" else int(match[2])
    length = response.headers.get("Content-Length")
    return 0, None if length is None else int(length)


def _chunks(response: Any) -> Iterator[bytes]:
    """The body. Network trouble becomes _AttemptError, so that what remains an OSError is the disk's."""
    while True:
        try:
            chunk = response.read(CHUNK)
        except (OSError, HTTPException) as exc:
            raise _AttemptError(f"the connection was cut ({exc!r})") from exc
        if not chunk:
            return
        yield chunk


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


@contextlib.contextmanager
def _exclusive(folder: Path, filename: str) -> Iterator[Path]:
    """The path to download to, for this process alone.

    With file locks, one shared ``.part`` that a later call can resume; without, a name of this process's own.
    """
    lock = folder / f".{filename}.lock"
    descriptor = _lock(lock)
    if descriptor is None:
        part = folder / f"{filename}.{os.getpid()}.part"
        part.touch()
        try:
            yield part
        finally:
            part.unlink(missing_ok=True)
        return
    try:
        yield folder / f"{filename}.part"
    finally:
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def _lock(path: Path) -> int | None:
    """Wait for the lock file; None where the system or the file system has no locks."""
    if not HAVE_LOCKS:
        return None
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            # The holder removes the file before it lets go: what is locked now may no longer be at this path.
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except FileNotFoundError:
            pass
        except OSError:
            path.unlink(missing_ok=True)
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    """Make a rename survive a power cut; not every system can open a folder."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
