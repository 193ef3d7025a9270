"""A recognised DataLoader gives what torch's own iteration gives, and draws what it draws, when it draws it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    random_split,
)
from torch.utils.data.distributed import DistributedSampler

from hapi.data.gathered import GatheredLoader, draws_at_the_start, recognised, served
from hapi.data.loader import StreamLoader
from hapi.datasets import InMemoryImages

ROWS = 29


def tensors() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.rand(ROWS, 3, 2, generator=generator), torch.arange(ROWS), torch.rand(ROWS, generator=generator) > 0.5
    )


def images(transform: Any = None, rows: int = ROWS) -> InMemoryImages:
    pixels = torch.randint(0, 256, (rows, 1, 4, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    return InMemoryImages(pixels, torch.arange(rows) % 3, ["a", "b", "c"], transform)


class Lazy(Sampler[int]):
    """Draws each index when it is asked for."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(ROWS):
            yield int(torch.randint(ROWS, ()))

    def __len__(self) -> int:
        return ROWS


class Eager(Sampler[list[int]]):
    """Batches of drawn sizes, drawn in ``iter``, and as many of them as epochs have begun."""

    begun = 0

    def __iter__(self) -> Iterator[list[int]]:
        self.begun += 1
        return iter(torch.randperm(ROWS).split(int(torch.randint(4, 9, ())))[: 3 + self.begun])  # type: ignore[arg-type]

    def __len__(self) -> int:
        return 5


class EagerLists(Eager):
    def __iter__(self) -> Iterator[list[int]]:
        return iter([part.tolist() for part in super().__iter__()])  # type: ignore[attr-defined]


class Epochs(SequentialSampler):
    """Begins where its epoch says."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([(i + self.epoch) % ROWS for i in range(ROWS)])


class Numbers(Sampler[Any]):
    """numpy's integers, and negative ones."""

    def __iter__(self) -> Iterator[Any]:
        yield from (np.int64(3), -1, 5, -ROWS, np.int32(2), 4, 7)

    def __len__(self) -> int:
        return 7


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


Make = Callable[[], DataLoader[Any]]
LOADERS: dict[str, Make] = {
    "in order": lambda: DataLoader(tensors(), 8),
    "batches of one": lambda: DataLoader(tensors()),
    "shuffled": lambda: DataLoader(tensors(), 8, shuffle=True),
    "shuffled, drop_last": lambda: DataLoader(tensors(), 8, shuffle=True, drop_last=True),
    "own generator": lambda: DataLoader(tensors(), 8, shuffle=True, generator=seeded(3)),
    "sampler's own generator": lambda: DataLoader(tensors(), 8, sampler=RandomSampler(tensors(), generator=seeded(3))),
    "with replacement": lambda: DataLoader(tensors(), 8, sampler=RandomSampler(tensors(), True, 70)),
    "longer than the data": lambda: DataLoader(tensors(), 8, sampler=RandomSampler(tensors(), num_samples=70)),
    "weighted": lambda: DataLoader(tensors(), 8, sampler=WeightedRandomSampler(range(1, ROWS + 1), 40)),
    "subset sampler": lambda: DataLoader(tensors(), 8, sampler=SubsetRandomSampler(range(5, 20))),
    "distributed sampler": lambda: DataLoader(tensors(), 8, sampler=DistributedSampler(tensors(), 2, 1)),
    "set_epoch": lambda: DataLoader(tensors(), 8, sampler=Epochs(tensors())),
    "a list": lambda: DataLoader(tensors(), 8, sampler=[4, 2, 9, 9]),  # type: ignore[arg-type]
    "lazy draws": lambda: DataLoader(tensors(), 8, sampler=Lazy()),
    "tensors as batches": lambda: DataLoader(tensors(), batch_sampler=Eager()),
    "odd integers": lambda: DataLoader(tensors(), 2, sampler=Numbers()),
    "images": lambda: DataLoader(images(), 8, shuffle=True),
    "odd integers of images": lambda: DataLoader(images(), 2, sampler=Numbers()),
    "Subset": lambda: DataLoader(Subset(images(), [7, 1, 1, 20, 3]), 2, shuffle=True),
    "Subset of a Subset": lambda: DataLoader(Subset(Subset(tensors(), range(3, 23)), np.arange(9)[::-1]), 4),
    "random_split": lambda: DataLoader(random_split(tensors(), [19, 10], seeded(5))[1], 4, shuffle=True),
    "workers": lambda: DataLoader(tensors(), 4, shuffle=True, num_workers=2),
    "workers, lazy draws": lambda: DataLoader(tensors(), 4, sampler=Lazy(), num_workers=1, prefetch_factor=3),
    "workers, eager draws": lambda: DataLoader(tensors(), batch_sampler=EagerLists(), num_workers=1),
    "persistent workers": lambda: DataLoader(
        images(), 4, sampler=Lazy(), num_workers=1, prefetch_factor=1, persistent_workers=True
    ),
}


def seen(loader: StreamLoader, *, stop: int | None = None) -> list[Any]:
    """Three epochs of batches; after each the step draws. Then what the generator gives next."""
    torch.manual_seed(7)
    found: list[Any] = []
    for epoch in range(3):
        batches = loader.epoch(epoch)
        for count, batch in enumerate(batches, 1):
            found.append((batch, float(torch.rand(()))))
            if count == stop:
                break
        del batches
    return [*found, float(torch.rand(()))]


def assert_same(expected: list[Any], got: list[Any]) -> None:
    assert len(expected) == len(got)
    assert expected[-1] == got[-1]
    for (batch, drawn), (other, other_drawn) in zip(expected[:-1], got[:-1], strict=True):
        assert drawn == other_drawn
        assert type(batch) is type(other)
        assert len(batch) == len(other)
        for field, same in zip(batch, other, strict=True):
            assert field.dtype == same.dtype
            assert field.stride() == same.stride()
            assert torch.equal(field, same)


@pytest.mark.parametrize("stop", [None, 2], ids=["to the end", "left early"])
@pytest.mark.parametrize("kind", LOADERS)
def test_the_same_batches_and_the_same_draws(kind: str, stop: int | None) -> None:
    make = LOADERS[kind]
    data = make()
    assert recognised(data) is not None
    expected = seen(StreamLoader(make(), "the DataLoader"), stop=stop)
    got = seen(StreamLoader(GatheredLoader(data), "the DataLoader"), stop=stop)
    assert len(expected) > 3
    assert_same(expected, got)


def test_persistent_workers_draw_their_seed_once_in_the_loaders_life() -> None:
    def twice(wrap: Callable[[DataLoader[Any]], Any]) -> list[float]:
        data = DataLoader(tensors(), 8, num_workers=1, persistent_workers=True)
        drawn = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            assert len(list(wrap(data))) == 4
            drawn.append(float(torch.rand(())))
        return drawn

    assert twice(GatheredLoader) == twice(lambda data: data)


def test_a_worker_is_not_started() -> None:
    data = DataLoader(tensors(), 8, num_workers=2, persistent_workers=True)
    assert len(list(served(data))) == 4
    assert data._iterator is None


def test_batches_share_no_memory_with_the_data() -> None:
    dataset = tensors()
    before = [leaf.clone() for leaf in dataset.tensors]
    for x, y, z in served(DataLoader(dataset, 8)):
        for field in (x, y, z):
            field.zero_()
    assert all(map(torch.equal, before, dataset.tensors))


class Shifted(TensorDataset):
    def __getitem__(self, index: Any) -> Any:
        return tuple(leaf[(index + 1) % ROWS] for leaf in self.tensors)


class Reversed(InMemoryImages):
    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index)
        return image.flip(-1), label

    def __getitems__(self, indices: Any) -> Any:
        return [self[index] for index in indices]


class Wrapper(Dataset[Any]):
    """Hands on what it does not have, its sample excepted."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        return self.inner[index][1]


class MyLoader(DataLoader[Any]):
    pass


class MyTensor(Tensor):
    pass


def swapped(samples: Any) -> Any:
    return default_collate(samples)[::-1]


def odd_images() -> InMemoryImages:
    data = images()
    return Reversed(data.images, data.labels, data.classes)


OTHERS: dict[str, Make] = {
    "a subclass": lambda: MyLoader(tensors(), 8),
    "collate_fn": lambda: DataLoader(tensors(), 8, collate_fn=swapped),
    "no batches": lambda: DataLoader(tensors(), batch_size=None),
    "worker_init_fn": lambda: DataLoader(tensors(), 8, num_workers=1, worker_init_fn=print),
    "in_order=False": lambda: DataLoader(tensors(), 8, num_workers=1, in_order=False),
    "timeout": lambda: DataLoader(tensors(), 8, num_workers=1, timeout=100),
    "a transform": lambda: DataLoader(images(torch.neg), 8),
    "a subset with a transform": lambda: DataLoader(Subset(images(torch.neg), [1, 2]), 8),
    "another dataset": lambda: DataLoader(ConcatDataset([tensors(), tensors()]), 8),
    "a TensorDataset's subclass": lambda: DataLoader(Shifted(*tensors().tensors), 8),
    "images with samples of their own": lambda: DataLoader(odd_images(), 8),
    "a wrapper": lambda: DataLoader(Wrapper(images()), 8),
    "a tensor's subclass": lambda: DataLoader(TensorDataset(torch.rand(9, 2).as_subclass(MyTensor)), 8),
    "gradients": lambda: DataLoader(TensorDataset(torch.rand(9, 2, requires_grad=True)), 8),
    "channels last": lambda: DataLoader(TensorDataset(torch.rand(9, 2, 3, 3).to(memory_format=torch.channels_last)), 8),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_what_is_special_is_left_to_torch(kind: str) -> None:
    data = OTHERS[kind]()
    assert recognised(data) is None
    assert served(data) is data


def test_pinned_batches_without_an_accelerator_are_left_to_torch_which_warns() -> None:
    lying = recognised(DataLoader(tensors(), 8, pin_memory=True))
    assert (lying is not None) == torch.accelerator.is_available()


def test_a_transform_that_is_set_later_counts_from_the_next_epoch() -> None:
    data = images()
    loader = served(DataLoader(data, 8))
    plain = torch.cat([x for x, _ in loader])
    data.transform = torch.neg
    assert torch.equal(torch.cat([x for x, _ in loader]), -plain)
    data.transform = None
    assert torch.equal(torch.cat([x for x, _ in loader]), plain)


def test_a_wrong_index_fails_as_with_torch() -> None:
    for dataset in (tensors(), images()):
        data = DataLoader(dataset, 2, sampler=[0, 1, 2, ROWS])  # type: ignore[arg-type]
        assert recognised(data) is not None
        loader = StreamLoader(served(data), "the DataLoader")
        batches = loader.epoch(0)
        next(batches)
        with pytest.raises(IndexError, match=r"out of (range|bounds)"):
            next(batches)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: DataLoader(tensors(), 8), True),
        (lambda: DataLoader(tensors(), 8, shuffle=True), True),
        (lambda: DataLoader(tensors(), 8, sampler=WeightedRandomSampler([1.0] * ROWS, 9)), True),
        (lambda: DataLoader(tensors(), 8, shuffle=True, generator=seeded(1)), False),
        (lambda: DataLoader(tensors(), 8, sampler=Lazy()), False),
        (lambda: DataLoader(tensors(), batch_sampler=Eager()), False),
        (lambda: DataLoader(tensors(), batch_sampler=BatchSampler(Lazy(), 4, False)), False),
    ],
)
def test_what_may_be_read_early(make: Make, expected: bool) -> None:
    assert draws_at_the_start(make()) is expected
