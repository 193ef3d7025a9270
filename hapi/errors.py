"""Helpers that make a failure say where it happened. A leaf: every other module may import this one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["add_note", "suggest"]


def add_note(exc: BaseException, text: str) -> None:
    """Attach ``text`` to ``exc`` so that it is printed under the exception's own message.

    The exception keeps its type, so ``except FileNotFoundError`` around ``fit`` still works. Python 3.10
    has no ``BaseException.add_note`` (PEP 678); there the text is appended to a string first argument.
    """
    if hasattr(exc, "add_note"):
        exc.add_note(text)
    elif exc.args and isinstance(exc.args[0], str):
        exc.args = (f"{exc.args[0]}\n{text}", *exc.args[1:])
    else:
        exc.args = (*exc.args, text)


def suggest(word: str, options: Iterable[str]) -> str:
    """Return ``"; did you mean 'adam'?"`` for the closest of ``options``, or an empty string."""
    close = difflib.get_close_matches(word.lower(), list(options), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""
