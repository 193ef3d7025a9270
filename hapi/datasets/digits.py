"""Digits: 1,797 real scans that come with scikit-learn, for examples that need no download."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from hapi.datasets._files import check_mode
from hapi.datasets.memory import InMemoryImages, Transform

__all__ = ["Digits"]

TEST_SAMPLES = 360


class Digits(InMemoryImages):
    """Handwritten digits, 8 x 8, from scikit-learn's ``load_digits``: 1,437 for training and 360 for testing.

    A sample is ``(float32 [1, 8, 8] in [0, 1], int)``; the scans have 17 grey levels. They are the test part
    of "Optical Recognition of Handwritten Digits" (Alpaydin and Kaynak, UCI, 1998). The split is fixed: a
    shuffle that never changes, of which the last 360 are for testing.

    Args:
        mode: ``"train"`` or ``"test"``.
        transform: Called with each float32 image; see :class:`InMemoryImages`.
        size: None for 8 x 8. 28 for MNIST's size: each pixel becomes 3 x 3 pixels, with a margin of 2.

    Raises:
        ImportError: scikit-learn is not installed.
        ValueError: An argument is wrong.

    Example:
        >>> train, test = Digits(size=28), Digits("test", size=28)
    """

    def __init__(self, mode: str = "train", transform: Transform | None = None, size: int | None = None) -> None:
        check_mode(mode, "Digits")
        if size not in (None, 28):
            raise ValueError(f"Digits: size must be None (8 x 8) or 28, not {size!r}")
        images, labels = _load()
        # A legacy generator on purpose: numpy promises that its numbers never change.
        order = torch.from_numpy(np.random.RandomState(0).permutation(len(labels)))
        chosen = order[-TEST_SAMPLES:] if mode == "test" else order[:-TEST_SAMPLES]
        images, labels = images[chosen], labels[chosen]
        if size == 28:
            images = pad(images.repeat_interleave(3, dim=2).repeat_interleave(3, dim=3), (2, 2, 2, 2))
        super().__init__(images, labels, [str(digit) for digit in range(10)], transform, divisor=16)
        self.mode = mode


def _load() -> tuple[Tensor, Tensor]:
    """All scans, uint8 ``[1797, 1, 8, 8]`` in 0 .. 16, and labels."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as exc:
        raise ImportError("Digits reads scikit-learn's scans: pip install 'hapi[examples]'") from exc
    scans = load_digits()
    images = torch.from_numpy(scans.images.astype(np.uint8)).unsqueeze(1)
    return images, torch.from_numpy(scans.target.astype(np.int64))
