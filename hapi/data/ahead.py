"""Batches on an accelerator: moved one ahead of the step where that shows nowhere, and finished there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hapi.data.loader import NOTHING_SEEN, Loader, Start, to_device
from hapi.data.memory import Rows
from hapi.data.trees import leaves, map_tree

__all__ = ["DeviceLoader"]


class DeviceLoader(Loader):
    """Another loader's batches, on the device.

    On CUDA, batches of a loader that may be read early are copied on a stream of their own while the batch before is
    computed with. Nothing here makes the host wait.

    Args:
        inner: The loader.
        device: Where to.
    """

    def __init__(self, inner: Loader, device: torch.device) -> None:
        self.inner = inner
        self.device = device
        self.batches, self.samples = inner.batches, inner.samples
        self.again, self.cuts, self.early = inner.again, inner.cuts, inner.early

    def rows(self, index: int, seen: int = 0) -> int | None:
        return self.inner.rows(index, seen)

    def samples_of(self, epoch: int, index: int, seen: int = 0) -> list[int] | None:
        return self.inner.samples_of(epoch, index, seen)

    def left(self, start: Start) -> int | None:
        return self.inner.left(start)

    def template(self) -> Any:
        return _finished(self._moved(self.inner.template()))

    def close(self) -> None:
        self.inner.close()

    def epoch(self, epoch: int, start: Start = NOTHING_SEEN) -> Iterator[Any]:
        raws = self.inner.epoch(epoch, start)
        if not self.early:
            return (_finished(self._moved(raw)) if isinstance(raw, Rows) else raw for raw in raws)
        return one_ahead(raws, self._copies())

    def _copies(self) -> _Copies:
        return _SideCopies(self.device) if self.device.type == "cuda" else _Copies(self.device)

    def _moved(self, raw: Any) -> Any:
        return _Copies(self.device).begin(raw)


def one_ahead(raws: Iterator[Any], copies: _Copies) -> Iterator[Any]:
    """The finished batches; each copy is begun before the batch ahead of it is given out."""
    coming = _begun(raws, copies)
    while coming is not None:
        following = _begun(raws, copies)
        if coming.error is not None:
            raise coming.error
        yield _finished(copies.arrived(coming.batch))
        coming = following


class _Coming(NamedTuple):
    """A batch whose copy has begun, or the error of reading it, which waits for its turn."""

    batch: Any
    error: Exception | None


def _begun(raws: Iterator[Any], copies: _Copies) -> _Coming | None:
    try:
        return _Coming(copies.begin(next(raws)), None)
    except StopIteration:
        return None
    except Exception as exc:
        return _Coming(None, exc)


class _Copies:
    """Copies to a device, in the order of its work."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def begin(self, raw: Any) -> Any:
        """The batch with its tensors on the device; what is no tensor stays."""
        device = self.device
        return map_tree(lambda leaf: to_device(leaf, device) if isinstance(leaf, Tensor) else leaf, raw)

    def arrived(self, batch: Any) -> Any:
        """What ``begin`` gave, safe to compute with."""
        return batch


class _SideCopies(_Copies):
    """CUDA copies on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def begin(self, raw: Any) -> Any:
        with torch.cuda.stream(self.stream):
            batch = super().begin(raw)
            return batch, self.stream.record_event()

    def arrived(self, batch: Any) -> Any:
        batch, copied = batch
        computing = torch.cuda.current_stream(self.device)
        computing.wait_event(copied)
        for leaf in leaves(batch):
            # Its memory is the side stream's: it must not be given out there before the step has used it.
            if isinstance(leaf, Tensor):
                leaf.record_stream(computing)
        return batch


def _finished(batch: Any) -> Any:
    return batch.finish(*batch.fields) if isinstance(batch, Rows) else batch
