"""Checks of callback arguments: a wrong one fails in the constructor, which says what is accepted."""

from __future__ import annotations

import math
import numbers
from typing import Any

__all__ = ["flag", "number", "verbosity", "whole"]


def whole(owner: str, name: str, value: Any, minimum: int) -> int:
    """Return ``value`` as an int that is at least ``minimum``."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{owner}: {name}={value!r}; accepted: an int >= {minimum}")
    if value < minimum:
        raise ValueError(f"{owner}: {name}={value!r}; accepted: an int >= {minimum}")
    return int(value)


def number(owner: str, name: str, value: Any, minimum: float | None = None) -> float:
    """Return ``value`` as a finite float, at least ``minimum`` where that is given."""
    accepted = "a finite number" + ("" if minimum is None else f" >= {minimum:g}")
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{owner}: {name}={value!r}; accepted: {accepted}")
    if not math.isfinite(value) or (minimum is not None and value < minimum):
        raise ValueError(f"{owner}: {name}={value!r}; accepted: {accepted}")
    return float(value)


def flag(owner: str, name: str, value: Any) -> bool:
    """Return ``value`` if it is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{owner}: {name}={value!r}; accepted: True or False")
    return value


def verbosity(owner: str, value: Any) -> int:
    """Return ``value`` as an int from 0 (silent) to 3."""
    if not isinstance(value, numbers.Integral):
        raise TypeError(f"{owner}: verbose={value!r}; accepted: 0, 1, 2 or 3")
    if not 0 <= int(value) <= 3:
        raise ValueError(f"{owner}: verbose={value!r}; accepted: 0, 1, 2 or 3")
    return int(value)
