"""Batches that wait until several can be counted at once: on few rows, calling an operator costs more than its work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Size, Tensor

__all__ = ["Joining"]

_AT_ONCE = 16
_LARGEST = 1 << 16  # bytes of a batch's outputs: joining larger ones gains nothing


class Joining:
    """Collects the outputs and the label of batches on the host, and gives their rows to ``update`` together.

    Only for metrics to which it makes no difference, to the bit, how rows come (``Metric._counts_rows``). Nothing waits
    that could change meanwhile: for as many batches as can wait, it is watched whether the network and the loader
    give each batch memory of its own, as they nearly always do, and not the same buffers again.

    Args:
        update: Takes outputs and labels, as one batch has them.
    """

    def __init__(self, update: Callable[[Any, tuple[Tensor, ...]], None]) -> None:
        self._update = update
        self.reset()

    def reset(self) -> None:
        """Forget what waits, and watch anew: at the start of a phase."""
        self._shapes: tuple[Size, Size] | None = None
        self._reuse = False
        self._begin()

    def _begin(self) -> None:
        self._outputs: list[Tensor] = []
        self._labels: list[Tensor] = []
        self._addresses: set[int] = set()
        self._watching = True

    def add(self, outputs: Any, labels: Any) -> bool:
        """Let a batch wait. False: the caller has to count it now."""
        if self._reuse or type(outputs) is not Tensor or type(labels) is not tuple or len(labels) != 1:
            return False
        label = labels[0]
        shapes = outputs.shape, label.shape
        if shapes != self._shapes:
            self.settle()
            self._begin()
            fits = len(shapes[0]) == 2 and shapes[0][:1] == shapes[1][:1] and outputs.nbytes <= _LARGEST
            self._shapes = shapes if fits else None
            return False
        self._outputs.append(outputs)
        self._labels.append(label)
        if self._watching:
            self._watch(outputs.data_ptr(), label.data_ptr())
            return False
        if len(self._outputs) == _AT_ONCE:
            self.settle()
        return True

    def settle(self) -> None:
        """Count what waits."""
        if self._watching or not self._outputs:
            return
        outputs, labels = self._outputs, self._labels
        self._outputs, self._labels = [], []
        self._update(torch.cat(outputs), (torch.cat(labels),))

    def _watch(self, *addresses: int) -> None:
        # What is kept keeps its memory, so the same address means the same buffer.
        if not self._addresses.isdisjoint(addresses):
            self._reuse = True
            self._begin()
            return
        self._addresses.update(addresses)
        if len(self._outputs) == _AT_ONCE:
            self._begin()
            self._watching = False
