"""Whether a sample has drawn: seen for every generator, also where numpy has a normal number in wait."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hapi.data.randomness import GeneratorsState, seed_sample

DRAWS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.rand(()),
    "torch.randint": lambda: torch.randint(0, 2, ()),
    "numpy": np.random.rand,
    "numpy.normal": np.random.randn,
    "numpy.seed": lambda: np.random.seed(3),
    "random": random.random,
    "random.gauss": lambda: random.gauss(0, 1),
}


@pytest.mark.parametrize("waiting", [False, True], ids=["fresh", "a normal number waits"])
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_every_draw_is_seen_and_taken_back(draw: Callable[[], Any], waiting: bool) -> None:
    if waiting:
        np.random.randn()
        random.gauss(0, 1)
    before = GeneratorsState()
    assert not before.moved()
    expected = draw()
    assert before.moved()
    before.restore()
    assert not before.moved()
    again = draw()
    if expected is not None:
        assert again == expected
    assert before.moved()


def test_the_waiting_number_comes_back() -> None:
    np.random.seed(1)
    expected = [np.random.randn() for _ in range(3)]
    np.random.seed(1)
    assert np.random.randn() == expected[0]
    before = GeneratorsState()
    assert np.random.randn() == expected[1]  # moves nothing but the number in wait
    assert before.moved()
    before.restore()
    assert [np.random.randn(), np.random.randn()] == expected[1:]


def test_another_generator_of_numpys_is_left_alone() -> None:
    old = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        before = GeneratorsState()
        assert not before.moved()
        seed_sample(1, 2, 3)
        assert before.moved()
        before.restore()
        assert not before.moved()
    finally:
        np.random.set_bit_generator(old)
    np.random.rand()


def test_samples_are_seeded_by_seed_epoch_and_index() -> None:
    def drawn(*key: int) -> tuple[float, float, float]:
        seed_sample(*key)
        return float(torch.rand(())), float(np.random.rand()), random.random()

    assert drawn(1, 2, 3) == drawn(1, 2, 3)
    assert len({drawn(1, 2, 3), drawn(2, 2, 3), drawn(1, 3, 3), drawn(1, 2, 4)}) == 4
