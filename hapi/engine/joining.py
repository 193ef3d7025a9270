"""Batches that wait until several can be counted at once: on few rows, calling an operator costs more than its work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["Joining"]

_AT_ONCE = 16
_LARGEST = 1 << 16  # bytes of a batch's outputs: copying larger ones costs more than it saves


class Joining:
    """Collects the outputs and the label of batches on the host, and gives their rows to ``update`` together.

    Only for metrics to which it makes no difference, to the bit, how rows come (``Metric._counts_rows``). Rows are
    copied: a network or a loader may use the same buffers again, and small tensors that stay alive between the large
    ones of a forward spread these over more memory than the cache holds.

    Args:
        update: Takes outputs and labels, as one batch has them.
    """

    def __init__(self, update: Callable[[Any, tuple[Tensor, ...]], None]) -> None:
        self._update = update
        self._form: tuple[Any, ...] | None = None
        self._outputs = self._labels = torch.empty(0)
        self._slots: list[tuple[Tensor, Tensor]] = []
        self._waiting = 0

    def reset(self) -> None:
        """Forget what waits: at the start of a phase."""
        self._waiting = 0

    def add(self, outputs: Any, labels: Any) -> bool:
        """Let a batch wait. False: the caller has to count it now."""
        if type(outputs) is not Tensor or type(labels) is not tuple or len(labels) != 1:
            return False
        label = labels[0]
        form = outputs.shape, label.shape, outputs.dtype, label.dtype
        if form != self._form:
            # Batches of a new form are counted one by one until the form comes again: the last of an epoch does not.
            self.settle()
            self._form, self._slots = form, []
            return False
        if not self._slots and not self._make_room(outputs, label):
            return False
        of_outputs, of_label = self._slots[self._waiting]
        of_outputs.copy_(outputs)
        of_label.copy_(label)
        self._waiting += 1
        if self._waiting == _AT_ONCE:
            self.settle()
        return True

    def settle(self) -> None:
        """Count what waits."""
        count, self._waiting = self._waiting, 0
        if count:
            self._update(self._outputs[:count].flatten(0, 1), (self._labels[:count].flatten(0, 1),))

    def _make_room(self, outputs: Tensor, label: Tensor) -> bool:
        same_rows = label.ndim > 0 and outputs.ndim == 2 and len(outputs) == len(label)
        if not same_rows or outputs.nbytes > _LARGEST or outputs.requires_grad:
            return False
        # What is made in inference mode cannot be written to outside of it.
        with torch.inference_mode(False):
            self._outputs = torch.empty((_AT_ONCE, *outputs.shape), dtype=outputs.dtype)
            self._labels = torch.empty((_AT_ONCE, *label.shape), dtype=label.dtype)
            self._slots = list(zip(self._outputs.unbind(), self._labels.unbind(), strict=True))
        return True
