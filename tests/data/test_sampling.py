"""The order of images: complete, split exactly among ranks, the same after any resume."""

import numpy as np
import pytest

from vae.data.sampling import StepSampler, epoch_order, steps_per_epoch


def test_order_is_a_different_permutation_for_each_seed_and_epoch():
    orders = [epoch_order(101, seed, epoch) for seed in (0, 1) for epoch in (0, 1, 2)]
    for order in orders:
        assert sorted(order.tolist()) == list(range(101))
    assert len({order.tobytes() for order in orders}) == 6
    assert np.array_equal(epoch_order(101, 1, 2), orders[-1])


def test_order_is_the_same_on_every_machine():
    assert epoch_order(10, seed=0, epoch=0).tolist() == [3, 2, 1, 8, 6, 0, 7, 4, 5, 9]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_partition_the_global_batch(world_size):
    order = epoch_order(50, seed=7, epoch=4)
    ranks = [StepSampler(50, 4, rank, world_size, seed=7) for rank in range(world_size)]
    for sampler in ranks:
        sampler.start_at(4)
        assert len(sampler) == steps_per_epoch(50, 4, world_size) == 50 // (4 * world_size)
    for step, parts in enumerate(zip(*ranks, strict=True)):
        joined = [key for part in parts for key in part]
        size = 4 * world_size
        assert joined == [(4, index) for index in order[step * size : (step + 1) * size].tolist()]


def test_resuming_within_an_epoch_gives_its_remaining_batches():
    sampler = StepSampler(40, 3, rank=1, world_size=2, seed=5)
    sampler.start_at(2)
    whole = list(sampler)
    for step in range(len(whole) + 1):
        resumed = StepSampler(40, 3, rank=1, world_size=2, seed=5)
        resumed.start_at(2, step)
        assert list(resumed) == whole[step:]
        assert len(resumed) == len(whole) - step


def test_world_size_does_not_change_the_global_batches():
    alone = StepSampler(48, 8, seed=1)
    pair = [StepSampler(48, 4, rank, 2, seed=1) for rank in range(2)]
    assert list(alone) == [left + right for left, right in zip(*pair, strict=True)]
