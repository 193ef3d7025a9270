"""Showing a file that another process writes, while it writes it."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import TracebackType

__all__ = ["Tail", "last_lines", "tell"]

_INTERVAL = 0.05


class Tail:
    """Copies what is appended to a file to this process's stdout, byte by byte: bars survive.

    Args:
        path: The file; it need not exist yet.

    Example:
        >>> with Tail(Path("log/workerlog.0")):  # doctest: +SKIP
        ...     wait_for_the_rank()
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._follow, name=f"tail {path.name}", daemon=True)

    def start(self) -> Tail:
        """Begin to copy."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """Copy what is there and end."""
        self._done.set()
        self._thread.join()

    def __enter__(self) -> Tail:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _follow(self) -> None:
        while not self._path.exists():
            if self._done.wait(_INTERVAL) and not self._path.exists():
                return
        with open(self._path, "rb") as file:
            while True:
                done = self._done.is_set()  # looked at before reading: what was written until then is copied
                while chunk := file.read(1 << 16):
                    if not _show(chunk):
                        return
                if done:
                    return
                self._done.wait(_INTERVAL)


def _show(chunk: bytes) -> bool:
    """Write to stdout; False when nobody reads it any more (``| head``)."""
    try:
        if hasattr(sys.stdout, "buffer"):
            sys.stdout.buffer.write(chunk)
        else:  # a notebook's stdout takes text only
            sys.stdout.write(chunk.decode(errors="replace"))
        sys.stdout.flush()
    except (BrokenPipeError, ValueError):
        return False
    return True


def tell(text: str) -> None:
    """A line for the person at the console, on stderr: stdout is rank 0's."""
    sys.stdout.flush()
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def last_lines(path: Path, count: int = 30) -> str:
    """The last ``count`` lines of a text file; empty when there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - (1 << 16)))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-count:])
    except OSError:
        return ""
