"""Batches and samples as trees: tensors and arrays in nested tuples, lists and dicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor

__all__ = ["describe", "is_arrays", "leaves", "map_tree", "tree_rows"]


def describe(tree: Any) -> str:
    """Types and shapes of a sample or batch, for messages: ``(float32[3, 4], int64[3])``."""
    if isinstance(tree, Tensor):
        return f"{str(tree.dtype).removeprefix('torch.')}{list(tree.shape)}"
    if isinstance(tree, np.ndarray):
        return f"{tree.dtype}{list(tree.shape)}"
    if isinstance(tree, Mapping):
        return "{" + ", ".join(f"{key!r}: {describe(value)}" for key, value in tree.items()) + "}"
    if isinstance(tree, (tuple, list)):
        shown = ", ".join(describe(value) for value in tree[:6]) + (", ..." if len(tree) > 6 else "")
        return f"({shown})" if isinstance(tree, tuple) else f"[{shown}]"
    return type(tree).__name__


def is_arrays(data: Any) -> bool:
    """Whether this is in-memory data: a tensor or array, or a tuple or dict of them (nested as you like).

    A *list* at the top is a list of batches, not arrays.
    """
    return not isinstance(data, list) and _all_arrays(data)


def _all_arrays(tree: Any) -> bool:
    if isinstance(tree, (Tensor, np.ndarray)):
        return True
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    return isinstance(tree, (tuple, list)) and bool(tree) and all(map(_all_arrays, tree))


def map_tree(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply to every leaf of nested tuples, lists and dicts."""
    if isinstance(tree, Mapping):
        return {key: map_tree(function, value) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tree(function, value) for value in tree))
    if isinstance(tree, (tuple, list)):
        return type(tree)(map_tree(function, value) for value in tree)
    return function(tree)


def leaves(tree: Any) -> Iterator[Any]:
    """The leaves of nested tuples, lists and dicts, depth first."""
    if isinstance(tree, Mapping):
        for value in tree.values():
            yield from leaves(value)
    elif isinstance(tree, (tuple, list)):
        for value in tree:
            yield from leaves(value)
    else:
        yield tree


def tree_rows(tree: Any, what: str) -> int:
    """The common first dimension of all arrays; ValueError where they differ."""
    lengths = [len(leaf) if leaf.ndim else None for leaf in leaves(tree)]
    if None in lengths:
        raise ValueError(f"{what} holds an array without dimensions: {describe(tree)}")
    if len(set(lengths)) != 1:
        raise ValueError(f"the arrays of {what} have different lengths: {describe(tree)}")
    return int(lengths[0])  # type: ignore[arg-type]
