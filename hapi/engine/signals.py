"""SIGTERM and SIGINT during a fit: the batch is finished, a checkpoint written, then the process ends.

The handler only takes a note; the loop acts on it at the end of an optimizer step, on several ranks after the next log
point, where all of them hear of it. A second signal acts at once, as if there were no handler.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["SignalNote", "end_by_signal", "noting_signals"]


class SignalNote:
    """The signal that has been received; 0 before."""

    def __init__(self) -> None:
        self.number = 0


@contextmanager
def noting_signals(note: SignalNote) -> Iterator[None]:
    """Take a note of SIGTERM and SIGINT. Only the main thread can have handlers; elsewhere nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Any] = {}

    def handle(number: int, frame: FrameType | None) -> None:
        if note.number:
            for other, handler in before.items():
                signal.signal(other, handler)
            os.kill(os.getpid(), number)
            return
        note.number = number

    for number in (signal.SIGTERM, signal.SIGINT):
        # Somebody's own handler stays: it knows better what the program wants.
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            before[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        for changed, handler in before.items():
            signal.signal(changed, handler)


def end_by_signal(number: int) -> BaseException:
    """What to raise: KeyboardInterrupt, or an exit with 143 (or ``HAPI_TERM_CODE``, which a scheduler may requeue)."""
    if number == signal.SIGINT:
        return KeyboardInterrupt()
    text = os.environ.get("HAPI_TERM_CODE", "143")
    return SystemExit(int(text) if text.isdigit() else 143)
