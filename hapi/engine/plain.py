"""What a checkpoint may hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["plain"]


def plain(value: Any, what: str) -> Any:
    """``value`` as tensors and plain containers, which is all that a checkpoint may hold.

    Raises:
        TypeError: It is something else.
    """
    if value is None or isinstance(value, (bool, int, float, str, Tensor)):
        return value
    if isinstance(value, np.ndarray):
        return torch.from_numpy(np.array(value))
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {key: plain(item, what) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [plain(item, what) for item in value]
        return items if isinstance(value, list) else tuple(items)
    raise TypeError(f"the {what} holds {type(value).__name__}; a checkpoint holds tensors and plain containers only")
