from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from hapi.datasets import InMemoryImages


def make(transform: Any = None, count: int = 13, **kwargs: Any) -> InMemoryImages:
    images = torch.randint(0, 256, (count, 3, 4, 5), dtype=torch.uint8)
    return InMemoryImages(images, torch.arange(count) % 3, ["a", "b", "c"], transform, **kwargs)


def flipped_half(image: Tensor) -> Tensor:
    return image.flip(-1)[..., :2]


def as_numpy(image: Tensor) -> np.ndarray:
    return image.numpy() * 2


def test_a_sample_is_ready_to_train_on() -> None:
    images = torch.tensor([0, 51, 255], dtype=torch.uint8).view(1, 1, 1, 3)
    image, label = InMemoryImages(images, torch.tensor([2]), list("abc"))[0]
    assert image.dtype == torch.float32
    assert image.tolist() == [[pytest.approx([0.0, 0.2, 1.0])]]
    assert type(label) is int
    assert label == 2


def test_every_byte_is_the_correctly_rounded_quotient() -> None:
    data = InMemoryImages(torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16), torch.zeros(1).long(), ["a"])
    expected = np.arange(256, dtype=np.float32) / np.float32(255)
    assert np.array_equal(data[0][0].numpy().ravel(), expected)


@pytest.mark.parametrize("transform", [None, flipped_half, as_numpy])
@pytest.mark.parametrize(
    "index", [[4], [12, 0, 3, 3], [-1, 2, -13], slice(2, 9), slice(None), slice(0, None, 4)], ids=str
)
def test_all_ways_of_reading_give_the_same_bits(transform: Any, index: Any) -> None:
    data = make(transform)
    positions = list(range(13))[index] if isinstance(index, slice) else index
    images, labels = data.gather(index if isinstance(index, slice) else torch.tensor(index))
    one_by_one = default_collate([data[i] for i in positions])
    at_once = default_collate(data.__getitems__(positions))
    for other_images, other_labels in (one_by_one, at_once):
        assert images.dtype == other_images.dtype == torch.float32
        assert torch.equal(images, other_images)
        assert labels.dtype == other_labels.dtype == torch.int64
        assert torch.equal(labels, other_labels)


def test_the_default_dtype_does_not_matter() -> None:
    data = make()
    torch.set_default_dtype(torch.float64)
    try:
        assert data[0][0].dtype == data.gather(slice(0, 2))[0].dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_indices_behave_as_a_lists_do() -> None:
    data = make()
    assert torch.equal(data[-1][0], data[12][0])
    assert torch.equal(data[-13][0], data[0][0])
    assert torch.equal(data[np.int64(2)][0], data[2][0])
    assert torch.equal(data[torch.tensor(2)][0], data[2][0])
    assert len(list(data)) == 13  # iteration ends at IndexError
    for wrong in (13, -14):
        with pytest.raises(IndexError, match="13 samples"):
            data[wrong]
        with pytest.raises(IndexError, match="13 samples"):
            data.__getitems__([0, wrong])
        with pytest.raises(IndexError, match="13 samples"):
            data.gather(torch.tensor([wrong]))
    with pytest.raises(TypeError):
        data[1.5]  # type: ignore[index]


def test_writing_into_a_batch_leaves_the_dataset_alone() -> None:
    data = make()
    before = [tensor.clone() for tensor in data.tensors]
    for index in (slice(0, 5), torch.arange(5)):
        images, labels = data.gather(index)
        images.zero_()
        labels.fill_(7)
    data[0][0].zero_()
    data.__getitems__([1])[0][0].zero_()
    assert all(torch.equal(old, new) for old, new in zip(before, data.tensors, strict=True))


def test_the_raw_bytes_are_at_hand() -> None:
    data = make()
    assert data.tensors[0] is data.images
    assert data.tensors[1] is data.labels
    assert data.images.dtype == torch.uint8


def test_the_divisor_is_the_white_level() -> None:
    images = torch.full((1, 1, 2, 2), 8, dtype=torch.uint8)
    assert InMemoryImages(images, torch.tensor([0]), ["a"], divisor=16)[0][0].eq(0.5).all()


def test_copies_and_pickles_carry_bytes_not_floats() -> None:
    data = make(flipped_half, count=2000)
    pickled = pickle.dumps(data)
    assert len(pickled) < data.images.numel() + 8 * len(data) + 4000
    for other in (pickle.loads(pickled), copy.deepcopy(data)):
        assert torch.equal(other.gather(slice(0, 3))[0], data.gather(slice(0, 3))[0])
        assert other.classes == data.classes


def test_a_data_loader_makes_batches() -> None:
    data = make()
    loader: Any = DataLoader(data, batch_size=5)
    images, labels = zip(*loader, strict=True)
    assert [tuple(batch.shape) for batch in images] == [(5, 3, 4, 5), (5, 3, 4, 5), (3, 3, 4, 5)]
    assert torch.equal(torch.cat(images), data.gather(slice(None))[0])
    assert torch.equal(torch.cat(labels), data.labels)
    assert labels[0].dtype == torch.int64


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"images": torch.zeros(2, 1, 2, 2)}, TypeError, "images must be uint8"),
        ({"labels": torch.zeros(2)}, TypeError, "labels int64, not torch.uint8 and torch.float32"),
        ({"images": torch.zeros(2, 2, 2, dtype=torch.uint8)}, ValueError, r"not \[2, 2, 2\]"),
        ({"labels": torch.zeros(3, dtype=torch.int64)}, ValueError, r"labels \[N\], not .* and \[3\]"),
        ({"labels": torch.tensor([0, 2])}, ValueError, r"labels lie in 0 \.\. 2, but there are 2 classes"),
        ({"labels": torch.tensor([-1, 0])}, ValueError, r"labels lie in -1 \.\. 0"),
        ({"transform": 3}, TypeError, "transform must be callable or None, not int"),
        ({"divisor": 0}, ValueError, "divisor must be at least 1, not 0"),
    ],
)
def test_wrong_arguments(change: dict[str, Any], error: type[Exception], message: str) -> None:
    good = {
        "images": torch.zeros(2, 1, 2, 2, dtype=torch.uint8),
        "labels": torch.tensor([0, 1]),
        "classes": ["a", "b"],
    }
    with pytest.raises(error, match=message):
        InMemoryImages(**{**good, **change})  # type: ignore[arg-type]


@pytest.mark.parametrize("divisor", [255, 16, 7])
def test_rows_are_finished_as_they_are_gathered(divisor: int) -> None:
    data = make(divisor=divisor)
    index = torch.tensor([3, 3, 12])
    images, labels = data.finish(*(leaf[index] for leaf in data.tensors))
    expected, same = data.gather(index)
    assert images.dtype == torch.float32
    assert torch.equal(images, expected)
    assert torch.equal(labels, same)


def test_rows_are_finished_as_floats_whatever_the_default_dtype() -> None:
    data = make(divisor=3)
    torch.set_default_dtype(torch.float64)
    try:
        assert data.finish(*data.tensors)[0].dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
