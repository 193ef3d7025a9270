from __future__ import annotations

import builtins
from typing import Any

import numpy as np
import pytest
import torch

from hapi.datasets import Digits

# At the top: importing scikit-learn sets environment variables, which a test may not.
datasets = pytest.importorskip("sklearn.datasets")


def test_the_split_has_every_scan_once() -> None:
    train, test = Digits(), Digits("test")
    assert (len(train), len(test)) == (1437, 360)
    scans = datasets.load_digits()
    both = np.concatenate([data.images.numpy().reshape(-1, 64) for data in (train, test)])
    labels = np.concatenate([train.labels.numpy(), test.labels.numpy()])
    expected = np.column_stack([scans.data, scans.target])
    found = np.column_stack([both, labels])
    assert np.array_equal(np.unique(found, axis=0), np.unique(expected, axis=0))
    assert sorted(map(tuple, found.tolist())) == sorted(map(tuple, expected.tolist()))
    assert int(test.labels.bincount().min()) >= 25, "every digit is tested"


def test_the_split_never_changes() -> None:
    assert Digits("test").labels[:12].tolist() == Digits("test", size=28).labels[:12].tolist()
    assert Digits("test").labels[:12].tolist() == FIRST_TEST_LABELS


# Fixed once: numbers published for this dataset refer to this split.
FIRST_TEST_LABELS = [7, 9, 4, 7, 0, 2, 6, 1, 3, 1, 3, 7]


def test_a_sample_is_a_scan_of_17_levels() -> None:
    image, label = Digits()[0]
    assert (image.shape, image.dtype, type(label)) == ((1, 8, 8), torch.float32, int)
    everything = Digits().gather(slice(None))[0]
    assert torch.equal(everything.unique(), torch.arange(17) / 16)


def test_mnists_size() -> None:
    small, large = Digits("test"), Digits("test", size=28)
    image, scan = large[7][0], small[7][0]
    assert image.shape == (1, 28, 28)
    assert torch.equal(image[0, 2:26, 2:26], torch.kron(scan[0], torch.ones(3, 3)))
    assert float(image.sum()) == float(scan.sum()) * 9, "the margin is empty"


def test_a_transform() -> None:
    assert Digits(transform=lambda image: image.flatten())[0][0].shape == (64,)


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="Digits: mode must be 'train' or 'test', not 'eval'"):
        Digits("eval")
    with pytest.raises(ValueError, match=r"Digits: size must be None \(8 x 8\) or 28, not 32"):
        Digits(size=32)


def test_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("sklearn"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install 'hapi\[examples\]'"):
        Digits()
