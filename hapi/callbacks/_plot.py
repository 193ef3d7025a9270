"""The figure of :meth:`hapi.callbacks.History.plot`."""

from __future__ import annotations

import functools
import io
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["EVALUATION", "draw"]

Line = tuple[Sequence[int], Sequence[float]]

EVALUATION = "eval_"
# Two of the colours of Okabe and Ito, which people with any kind of colour blindness tell apart.
_COLOURS = {"training": "#0072B2", "evaluation": "#D55E00"}
_GREY = "#555555"
_COLUMNS = 3
_INCHES = (4.4, 3.1)
_PIXELS_PER_INCH = 150


def draw(groups: Mapping[str, Mapping[str, Line]], path: str | os.PathLike[str] | None) -> Any:
    """Draw one axes per group.

    Args:
        groups: Name of a value -> ``"training"`` and/or ``"evaluation"`` -> epochs from 1, and their values.
        path: Where to save the figure; the format is that of the suffix.

    Returns:
        A ``matplotlib.figure.Figure``.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as exc:
        raise ImportError("History.plot needs matplotlib: pip install matplotlib") from exc
    rows = math.ceil(len(groups) / _COLUMNS)
    columns = math.ceil(len(groups) / rows)
    # Not pyplot's: no global state, no window, and nothing to close.
    figure: Any = Figure(figsize=(_INCHES[0] * columns, _INCHES[1] * rows), layout="constrained")
    for index, (name, lines) in enumerate(groups.items(), 1):
        _draw_lines(figure.add_subplot(rows, columns, index), name, lines)
    # A notebook shows what has this method; without pyplot it does not know figures by their type.
    figure._repr_png_ = functools.partial(_png, figure)
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=_PIXELS_PER_INCH)
    return figure


def _draw_lines(axes: Any, name: str, lines: Mapping[str, Line]) -> None:
    from matplotlib.ticker import MaxNLocator

    for kind, (epochs, values) in lines.items():
        axes.plot(
            epochs,
            [value if math.isfinite(value) else math.nan for value in values],
            color=_COLOURS[kind],
            label=kind,
            linewidth=1.8,
            # A value between two gaps has no line: only its mark shows.
            marker="o" if kind == "training" else "s",
            markersize=max(1.8, min(5.5, 150 / len(epochs))),
            markeredgewidth=0,
            clip_on=False,
            zorder=3,
        )
    last = max(epochs[-1] for epochs, _ in lines.values())
    margin = 0.02 * last if last > 1 else 0.5
    axes.set_xlim(max(0.5, 1 - margin), last + margin)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, min_n_ticks=1))
    alone = len(lines) == 1
    axes.set_title(f"{EVALUATION}{name}" if alone and "evaluation" in lines else name, loc="left", fontsize=11)
    axes.set_xlabel("epoch", color=_GREY)
    axes.grid(color="#DDDDDD", linewidth=0.7)
    axes.tick_params(colors=_GREY)
    axes.margins(y=0.08)
    axes.ticklabel_format(axis="y", useOffset=False)  # 0.99871, not 0.00071 + 0.998
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color("#AAAAAA")
    if not alone:
        axes.legend(frameon=False)


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_PIXELS_PER_INCH / 1.5)
    return buffer.getvalue()
