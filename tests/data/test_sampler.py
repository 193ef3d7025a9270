"""The cut of an epoch: every row once, whatever the number of ranks; and the reference's padded sampler."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from hapi.data.sampler import BatchPlan, DistributedBatchSampler, OrderedBatches, epoch_order, fold


@pytest.mark.parametrize(("samples", "batch", "world"), list(product([1, 2, 7, 10, 64, 129], [1, 3, 8], [1, 2, 3, 4])))
@pytest.mark.parametrize("drop_last", [False, True])
def test_every_row_once_and_global_batches_independent_of_the_world(
    samples: int, batch: int, world: int, drop_last: bool
) -> None:
    alone = BatchPlan(samples, batch, drop_last=drop_last)
    plans = [BatchPlan(samples, batch, rank, world, drop_last) for rank in range(world)]
    seen: list[int] = []
    for index in range(alone.batches):
        parts = [list(range(*plan.local(index))) for plan in plans]
        whole = [row for part in parts for row in part]
        assert whole == list(range(*alone.local(index)))
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= 1
        assert sum(sizes) == alone.rows(index)
        assert plans[0].some_rank_empty(index) == (0 in sizes)
        seen += whole
    assert seen == list(range(alone.served))
    assert {plan.batches for plan in plans} == {alone.batches}


def test_ordered_batches_leave_out_empty_parts_and_start_anywhere() -> None:
    plan = BatchPlan(9, 4, rank=2, world=3)
    batches = OrderedBatches(plan)
    batches.order = torch.arange(9) + 100
    assert list(batches) == [[103], [107]]
    assert len(batches) == 2
    batches.skip = 4
    assert list(batches) == [[107]]
    batches.skip = 1
    assert list(batches) == [[104], [108]], "on another cut the order goes on at the exact row"


def test_the_order_is_a_function_of_seed_and_epoch_and_draws_nothing() -> None:
    before = torch.get_rng_state()
    a, b = epoch_order(100, seed=1, epoch=0), epoch_order(100, seed=1, epoch=0)
    assert torch.equal(a, b)
    assert sorted(a.tolist()) == list(range(100))
    assert not torch.equal(a, epoch_order(100, seed=1, epoch=1))
    assert not torch.equal(a, epoch_order(100, seed=2, epoch=0))
    assert torch.equal(before, torch.get_rng_state())


def test_fold_is_fixed_and_spreads() -> None:
    # SplitMix64's published first output for the seed 0, halved.
    assert fold(0) == 0xE220A8397B1DCDAF >> 1
    values = {fold(seed, epoch) for seed in range(50) for epoch in range(50)}
    assert len(values) == 2500
    assert fold(1, 2) != fold(2, 1)


@pytest.mark.parametrize(
    ("samples", "batch", "world", "expected"),
    [
        (10, 2, 2, [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7], [9]]]),
        (10, 3, 2, [[[0, 1, 2], [6, 7]], [[3, 4, 5], [8, 9]]]),
        (7, 2, 2, [[[0, 1], [4, 5]], [[2, 3], [6, 0]]]),
        (11, 2, 4, [[[0, 1], [8]], [[2, 3], [9]], [[4, 5], [10]], [[6, 7], [0]]]),
        (1, 3, 4, [[[0]]] * 4),
    ],
)
def test_the_padded_sampler_is_the_references(
    samples: int, batch: int, world: int, expected: list[list[list[int]]]
) -> None:
    got = [list(DistributedBatchSampler(range(samples), batch, world, rank)) for rank in range(world)]
    assert got == expected
    assert [len(DistributedBatchSampler(range(samples), batch, world, r)) for r in range(world)] == list(
        map(len, expected)
    )


def test_the_padded_sampler_shuffles_by_seed_and_epoch() -> None:
    def epoch_of(seed: int, epoch: int | None = None) -> list[list[int]]:
        sampler = DistributedBatchSampler(range(20), 4, 1, 0, shuffle=True, seed=seed)
        if epoch is not None:
            sampler.set_epoch(epoch)
        return list(sampler)

    assert epoch_of(1) == epoch_of(1, 0)
    assert epoch_of(1) != epoch_of(2)
    sampler = DistributedBatchSampler(range(20), 4, 1, 0, shuffle=True, seed=1)
    assert [list(sampler), list(sampler)] == [epoch_of(1, 0), epoch_of(1, 1)]
    state = sampler.state_dict()
    other = DistributedBatchSampler(range(20), 4, 1, 0, shuffle=True)
    other.load_state_dict(state)
    assert list(other) == epoch_of(1, 2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": 2.0}, "batch_size"),
        ({"batch_size": 2, "num_replicas": 0}, "num_replicas"),
        ({"batch_size": 2, "num_replicas": 2, "rank": 2}, "rank=2 is not below"),
        ({"batch_size": 2, "shuffle": 1}, "shuffle"),
        ({"batch_size": 2, "drop_last": None}, "drop_last"),
    ],
)
def test_wrong_arguments(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DistributedBatchSampler(range(4), **arguments)  # type: ignore[arg-type]
