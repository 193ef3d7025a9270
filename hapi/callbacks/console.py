"""Where callbacks print: lines that do not tear a live bar, and the kind of bar that a stream can show."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

if TYPE_CHECKING:
    _Tqdm = tqdm[Any]
else:
    _Tqdm = tqdm

__all__ = ["Bar", "bar_class", "bar_size", "say"]


class Bar(_Tqdm):
    """A text bar. Unlike tqdm's own, it starts no monitor thread and no lock shared between processes."""

    monitor_interval = 0


Bar.set_lock(threading.RLock())


def say(text: str) -> None:
    """Print a line to the current ``sys.stdout``, above a bar that is live there."""
    if sys.stdout is not None:
        Bar.write(text, file=sys.stdout)
        sys.stdout.flush()


def bar_class(stream: Any) -> type[_Tqdm] | None:
    """The class of bar that ``stream`` can show, or None where only whole lines belong (files, pipes).

    The choice is that of ``tqdm.auto`` in a notebook, where it needs ipywidgets for a widget; these are
    imported here, not with hapi.
    """
    kernel = sys.modules.get("ipykernel.iostream")
    if kernel is not None and isinstance(stream, kernel.OutStream):
        return _notebook_bar()
    isatty = getattr(stream, "isatty", None)
    if isatty is not None and isatty() and os.environ.get("TERM") != "dumb":
        return Bar
    return None


def bar_size(stream: Any) -> dict[str, Any]:
    """The arguments of tqdm for the bar's size: as wide as the terminal, also when that is resized."""
    try:
        columns, lines = os.get_terminal_size(stream.fileno())
    except (AttributeError, OSError, ValueError):
        return {"dynamic_ncols": True}  # not a terminal: a widget, with a size of its own
    if columns > 0 and lines > 0:
        return {"dynamic_ncols": True}
    # Some terminals (serial lines, containers) say 0, for which tqdm draws nothing.
    return {"ncols": (columns or 80) - 1, "nrows": lines or 24}


def _notebook_bar() -> type[_Tqdm]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "notebook mode is experimental", "ipywidgets is missing"
        from tqdm.autonotebook import tqdm as notebook_tqdm

    if notebook_tqdm is tqdm:
        return Bar
    bar: type[_Tqdm] = type("NotebookBar", (notebook_tqdm,), {"monitor_interval": 0})
    bar.set_lock(threading.RLock())
    return bar
