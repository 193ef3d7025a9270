"""One batch ahead: when a copy begins, when an error shows, and CUDA's streams."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from hapi.data.ahead import DeviceLoader, _Copies, _SideCopies, one_ahead
from hapi.data.loader import NOTHING_SEEN, GatherLoader, Loader, Start, StreamLoader
from hapi.data.memory import InMemory, Rows
from hapi.data.sampler import BatchPlan

CPU = torch.device("cpu")
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Recorded(_Copies):
    def __init__(self, events: list[str]) -> None:
        super().__init__(CPU)
        self.events = events

    def begin(self, raw: Any) -> Any:
        self.events.append(f"copy {raw}")
        return super().begin(raw)

    def arrived(self, batch: Any) -> Any:
        self.events.append(f"wait {batch}")
        return super().arrived(batch)


def test_a_copy_begins_before_the_batch_ahead_of_it_is_used() -> None:
    events: list[str] = []
    for batch in one_ahead(iter([0, 1, 2]), Recorded(events)):
        events.append(f"step {batch}")
    assert events == [
        *["copy 0", "copy 1", "wait 0", "step 0"],
        *["copy 2", "wait 1", "step 1"],
        *["wait 2", "step 2"],
    ]


def test_no_batches_and_parts_without_rows() -> None:
    assert list(one_ahead(iter([]), _Copies(CPU))) == []
    assert list(one_ahead(iter([None, 1, None]), _Copies(CPU))) == [None, 1, None]


def test_an_error_waits_for_its_turn() -> None:
    def raws() -> Iterator[int]:
        yield 0
        yield 1
        raise OSError("a broken file")

    batches = one_ahead(raws(), _Copies(CPU))
    assert [next(batches), next(batches)] == [0, 1]
    with pytest.raises(OSError, match="a broken file"):
        next(batches)


def test_what_is_no_tensor_goes_through() -> None:
    raw = {"x": torch.ones(2), "names": ["a", "b"], "count": 3}
    (batch,) = one_ahead(iter([raw]), _Copies(CPU))
    assert batch["names"] == ["a", "b"]
    assert batch["count"] == 3
    assert torch.equal(batch["x"], torch.ones(2))


def halved(x: Any) -> tuple[Any]:
    return (x / 2,)


def far_loader(early: bool, device: torch.device = CPU) -> DeviceLoader:
    lying = InMemory((torch.arange(7, dtype=torch.uint8),), halved)
    far = lying.pinned if device.type == "cuda" else lying.unfinished
    inner = GatherLoader(far, BatchPlan(7, 3), shuffle=False, seed=0, early=early)
    return DeviceLoader(inner, device)


@pytest.mark.parametrize("early", [False, True])
def test_batches_and_the_template_are_finished(early: bool) -> None:
    loader = far_loader(early)
    assert [batch[0].tolist() for batch in loader.epoch(0)] == [[0, 0.5, 1], [1.5, 2, 2.5], [3]]
    assert [batch[0].tolist() for batch in loader.epoch(0, Start(2, 6))] == [[3]]
    assert loader.template()[0].tolist() == [0]


def test_it_says_of_itself_what_its_loader_says() -> None:
    loader = far_loader(True)
    inner = loader.inner
    for name in ("batches", "samples", "again", "cuts", "early"):
        assert getattr(loader, name) == getattr(inner, name)
    assert [loader.rows(i, 3) for i in range(2)] == [3, 1]
    assert loader.left(Start(1, 3)) == 2


class Counted(Loader):
    """Counts what has been read, and whether it was closed."""

    read = 0
    closed = False

    def epoch(self, epoch: int, start: Start = NOTHING_SEEN) -> Iterator[Any]:
        for index in range(4):
            self.read += 1
            yield Rows((torch.full((1,), index),), halved)

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("early", [False, True])
def test_only_what_may_be_read_early_is(early: bool) -> None:
    inner = Counted()
    inner.early = early
    loader = DeviceLoader(inner, CPU)
    batches = loader.epoch(0)
    assert inner.read == 0
    assert next(batches)[0].tolist() == [0]
    assert inner.read == 1 + early
    loader.close()
    assert inner.closed


def test_batches_of_others_that_may_not_be_read_early_are_left_alone() -> None:
    raw = [torch.ones(1), "text"]
    (batch,) = DeviceLoader(StreamLoader([raw], "the list"), CPU).epoch(0)
    assert batch is raw


class Stream:
    """Stands for a CUDA stream: says what was asked of it."""

    def __init__(self, name: str, events: list[str]) -> None:
        self.name, self.events = name, events

    def record_event(self) -> str:
        self.events.append(f"event on {self.name}")
        return f"event of {self.name}"

    def wait_event(self, event: str) -> None:
        self.events.append(f"{self.name} waits for {event}")


class Moved(torch.Tensor):
    def record_stream(self, stream: Any) -> None:
        stream.events.append(f"memory is used by {stream.name}")


def test_the_side_streams_copy_is_waited_for_by_the_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    side, step = Stream("side", events), Stream("step", events)
    inside: list[Any] = []

    @contextmanager
    def stream(chosen: Stream) -> Iterator[None]:
        inside.append(chosen)
        yield
        inside.pop()

    def moved(leaf: torch.Tensor, device: torch.device) -> torch.Tensor:
        events.append(f"copy on {inside[-1].name}")
        return leaf.as_subclass(Moved)

    def halved_on_the_step(x: Any) -> Any:
        assert not inside
        events.append("finish")
        return (x,)

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: side)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: inside[-1] if inside else step)
    monkeypatch.setattr("hapi.data.ahead.to_device", moved)
    raws = iter([Rows((torch.ones(2),), halved_on_the_step) for _ in range(2)])
    for _ in one_ahead(raws, _SideCopies(torch.device("cuda", 0))):
        events.append("step")
    used = ["step waits for event of side", "memory is used by step", "finish", "step"]
    assert events == ["copy on side", "event on side"] * 2 + used * 2


# --------------------------------------------------------------------------------------------------- on a GPU


@gpu
def test_many_batches_through_the_side_stream_keep_their_values() -> None:
    """Page-locked and device memory is used over and over while the device is behind the host."""
    device = torch.device("cuda", 0)
    rows, width, size = 4096, 4096, 64
    data = torch.arange(rows, dtype=torch.int32)[:, None].expand(rows, width).contiguous()
    loader = DeviceLoader(
        GatherLoader(InMemory((data,)).pinned, BatchPlan(rows, size), shuffle=True, seed=1, early=True), device
    )
    order = loader.inner.order(0)  # type: ignore[attr-defined]
    busy = torch.rand(2000, 2000, device=device)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    expected = order.to(device).split(size)
    torch.cuda.synchronize()
    for (x,), index in zip(loader.epoch(0), expected, strict=True):
        busy = (busy @ busy).clamp_(0, 1)
        wrong += (x != index[:, None]).sum()
        x.zero_()  # memory that was given out too early would show this
    assert int(wrong) == 0


@gpu
@pytest.mark.parametrize("early", [False, True])
def test_nothing_makes_the_host_wait(early: bool) -> None:
    loader = far_loader(early, torch.device("cuda", 0))
    assert len(list(loader.epoch(0))) == 3  # the divisor, the stream and the first blocks are made once
    torch.cuda.set_sync_debug_mode("error")
    try:
        batches = list(loader.epoch(0))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [batch[0].tolist() for batch in batches] == [[0, 0.5, 1], [1.5, 2, 2.5], [3]]
