"""In-memory data: what a batch is gathered from, and what is kept on a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

import hapi
from hapi.data import memory
from hapi.data.memory import InMemory, Resident, Rows, dataset_gather
from hapi.datasets import InMemoryImages

CPU = torch.device("cpu")
FAR = torch.device("meta")  # a device that is not the host; it holds no values
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def images(transform: Any = None) -> InMemoryImages:
    pixels = torch.randint(0, 256, (20, 1, 4, 5), dtype=torch.uint8)
    return InMemoryImages(pixels, torch.arange(20) % 3, ["a", "b", "c"], transform)


def found(dataset: Any) -> InMemory:
    lying = InMemory.of(dataset)
    assert lying is not None
    return lying


INDICES = [torch.tensor([3, 3, 0, 19]), slice(4, 9), slice(None)]


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_a_batch_is_what_the_dataset_gathers(index: Any) -> None:
    data = images()
    for dataset in (data, Subset(data, list(range(20))), TensorDataset(*data.gather(slice(None)))):
        gather = dataset_gather(dataset)
        assert gather is not None
        for got, expected in zip(found(dataset).batch(index), data.gather(index), strict=True):
            assert got.dtype == expected.dtype
            assert torch.equal(got, expected)
        assert all(map(torch.equal, gather(index), data.gather(index)))


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_bytes_stay_bytes_until_they_are_finished(index: Any) -> None:
    data = images()
    rows = found(data).unfinished(index)
    assert isinstance(rows, Rows)
    assert rows.fields[0].dtype == torch.uint8
    assert torch.equal(rows.fields[0], data.images[index])
    assert all(map(torch.equal, rows.finish(*rows.fields), data.gather(index)))
    assert type(found(TensorDataset(data.images)).unfinished(index)) is tuple


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_rows_for_cuda_are_gathered_into_memory_that_was_asked_for_page_locked(
    index: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    empty = torch.empty

    def without_a_gpu(*args: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        asked.append(pin_memory)
        return empty(*args, **options)

    monkeypatch.setattr(torch, "empty", without_a_gpu)
    data = images()
    rows = found(data).pinned(index)
    assert asked == [True, True]
    assert all(map(torch.equal, rows.fields, (data.images[index], data.labels[index])))
    rows.fields[0].zero_()
    assert bool(data.images.any())


def test_a_subset_of_a_subset_and_one_that_is_read_backwards() -> None:
    data = images()
    inner = Subset(data, [9, 4, 7, 1, 1])
    outer = Subset(inner, np.arange(5)[::-1])  # type: ignore[arg-type]
    expected = data.gather(torch.tensor([1, 1, 7, 4, 9]))
    assert all(map(torch.equal, found(outer).batch(slice(None)), expected))
    copied = found(outer).to(CPU)
    assert copied.chosen is None
    assert copied.tree[0].dtype == torch.uint8
    assert all(map(torch.equal, copied.batch(slice(None)), expected))
    assert found(outer).bytes == copied.bytes == 5 * (20 + 8)


def test_batches_share_no_memory_with_the_data() -> None:
    x = torch.rand(6, 2)
    (batch,) = InMemory((x,)).batch(slice(0, 3))
    batch.zero_()
    assert bool((x > 0).all())


def test_nested_data() -> None:
    tree = {"a": torch.rand(6, 2), "b": [torch.arange(6)]}
    batch = InMemory(tree).batch(torch.tensor([5, 0]))
    assert torch.equal(batch["a"], tree["a"][[5, 0]])  # type: ignore[index]
    assert batch["b"][0].tolist() == [5, 0]


class OwnSample(InMemoryImages):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)[0], -1


class OwnGather(InMemoryImages):
    def gather(self, index: Any) -> Any:
        pixels, labels = super().gather(index)
        return -pixels, labels


class Gathers(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        return index

    def gather(self, index: Any) -> Any:
        return torch.arange(4)[index]


class Finishes(Gathers):
    """Names its methods and attributes as hapi does, and means something else."""

    tensors: Any = "none"

    def finish(self) -> None: ...


class HandsOn(Dataset[Any]):
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)

    def __getitem__(self, index: int) -> Any:
        return self.inner[index][0]


def test_a_method_that_a_subclass_overrode_is_the_truth() -> None:
    data = images()
    parts = data.images, data.labels, data.classes
    assert dataset_gather(OwnSample(*parts)) is None
    assert InMemory.of(OwnSample(*parts)) is None
    assert InMemory.of(OwnGather(*parts)) is None
    gather = dataset_gather(OwnGather(*parts))
    assert gather is not None
    assert torch.equal(gather(slice(0, 2))[0], -data.gather(slice(0, 2))[0])
    assert dataset_gather(HandsOn(data)) is None
    assert InMemory.of(HandsOn(data)) is None
    assert dataset_gather(Gathers()) is not None
    for other in (Gathers(), Finishes(), [1, 2], "text"):
        assert InMemory.of(other) is None


def test_a_transform_runs_sample_by_sample() -> None:
    assert dataset_gather(images(torch.neg)) is None
    assert InMemory.of(images(torch.neg)) is None
    assert InMemory.of(Subset(images(torch.neg), [1])) is None


# ------------------------------------------------------------------------------------------ kept on the device


@pytest.mark.parametrize("wanted", [None, 1, "yes", "Auto"])
def test_what_keep_on_device_can_be(wanted: Any) -> None:
    with pytest.raises(ValueError, match=r"fit: keep_on_device=.*accepted: False, True, 'auto'"):
        Resident(wanted, CPU, "fit")


def test_on_a_host_nothing_is_moved() -> None:
    for wanted in (True, "auto"):
        resident = Resident(wanted, CPU, "fit")
        assert resident(images(), found(images()), "data") is None
        assert resident([1], None, "data") is None


def test_data_is_moved_once() -> None:
    data, resident = images(), Resident(True, FAR, "fit")
    kept = resident(data, found(data), "data")
    assert kept is not None
    assert kept.device == FAR
    assert kept.tree[0].dtype == torch.uint8
    assert resident(data, found(data), "data") is kept
    assert resident(images(), found(images()), "data") is not kept


@pytest.mark.parametrize(("free", "fits", "half"), [(10**6, True, True), (1000, True, False), (500, False, False)])
def test_it_has_to_fit(monkeypatch: pytest.MonkeyPatch, free: int, fits: bool, half: bool) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda device: free)
    data = images()
    assert found(data).bytes == 20 * (20 + 8)
    assert (Resident("auto", FAR, "fit")(data, found(data), "data") is not None) == half
    if fits:
        assert Resident(True, FAR, "fit")(data, found(data), "data") is not None
    else:
        with pytest.raises(ValueError, match=r"keep_on_device=True: fit: train_data takes .* GiB, but meta has .* GiB"):
            Resident(True, FAR, "fit")(data, found(data), "fit: train_data")


def test_auto_keeps_nothing_where_free_memory_is_unknown() -> None:
    assert Resident("auto", FAR, "fit")(images(), found(images()), "data") is None


def test_what_does_not_lie_in_memory_cannot_be_kept() -> None:
    assert Resident("auto", FAR, "fit")([1], None, "data") is None
    with pytest.raises(ValueError, match=r"fit: train_data is InMemoryImages, which does not lie in memory"):
        Resident(True, FAR, "fit")(images(torch.neg), None, "fit: train_data")


# --------------------------------------------------------------------------------------------------- on a GPU


@gpu
def test_the_quotient_has_the_same_bits_on_a_gpu() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    for divisor in (255, 16, 7):
        data = InMemoryImages(every, torch.zeros(1).long(), ["a"], divisor=divisor)
        got = data.finish(every.cuda(), data.labels.cuda())[0]
        assert torch.equal(got.cpu(), data.gather(slice(None))[0])


@gpu
@pytest.mark.parametrize("index", INDICES, ids=str)
def test_rows_are_gathered_into_page_locked_memory(index: Any) -> None:
    data = images()
    rows = found(Subset(data, list(range(20)))).pinned(index)
    assert all(field.is_pinned() for field in rows.fields)
    assert all(map(torch.equal, rows.fields, (data.images[index], data.labels[index])))


@gpu
def test_kept_on_a_gpu() -> None:
    data, device = images(), torch.device("cuda", 0)
    kept = Resident("auto", device, "fit")(data, found(data), "data")
    assert kept is not None
    index = torch.tensor([4, 2, 2])
    got: tuple[Tensor, ...] = kept.batch(index.to(device))
    assert all(field.device == device for field in got)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(got, data.gather(index), strict=True))


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_network_that_writes_into_its_input_leaves_the_data_alone(shuffle: bool) -> None:
    class Writes(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.mul_(0.5))

    x, y = torch.ones(8, 4), torch.zeros(8, dtype=torch.int64)
    model = hapi.Model(Writes()).prepare("sgd", "cross_entropy")
    model.fit((x, y), (x, y), batch_size=4, verbose=0, shuffle=shuffle)
    model.predict(x, batch_size=4, verbose=0)
    assert bool((x == 1).all())
