"""Checkpoints written in the background, so that saving stops training only for a copy to host memory."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["BackgroundWriter"]


class BackgroundWriter:
    """One write in flight at most: the next one waits for it.

    Attributes:
        busy: Whether a write is in flight or its outcome has not been taken. The loop looks at it every step.
    """

    def __init__(self) -> None:
        self.busy = False
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._path = ""

    def submit(self, path: str, write: Callable[[], None]) -> list[str]:
        """Start ``write`` once the one before has ended. Returns the paths that have become whole.

        Raises:
            Exception: What the write before raised.
        """
        finished = self.take(wait=True)

        def work() -> None:
            try:
                write()
            except BaseException as exc:
                self._error = exc

        self._path, self.busy = path, True
        self._thread = threading.Thread(target=work, name="hapi-checkpoint")
        self._thread.start()
        return finished

    def take(self, *, wait: bool = False) -> list[str]:
        """The path of the write that has ended, if it has; ``wait`` for it if asked.

        Raises:
            Exception: What the write raised.
        """
        thread = self._thread
        if thread is None or (thread.is_alive() and not wait):
            return []
        thread.join()
        self._thread, self.busy = None, False
        error, self._error = self._error, None
        if error is not None:
            raise error
        return [self._path]
