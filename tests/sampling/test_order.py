"""The order of images: complete, split exactly among ranks, the same after any resume."""

import pytest

from vae.sampling.order import ShuffledOrder, StepSampler, permutation, steps_per_epoch


def orders(images: int, seed: int, epoch: int) -> list[int]:
    return ShuffledOrder(images, seed).samples(epoch, 0, images)


def test_order_is_a_different_permutation_for_each_seed_and_epoch():
    found = [orders(101, seed, epoch) for seed in (0, 1) for epoch in (0, 1, 2)]
    for order in found:
        assert sorted(order) == list(range(101))
    assert len({tuple(order) for order in found}) == 6
    assert orders(101, 1, 2) == found[-1]


def test_order_is_the_same_on_every_machine():
    assert orders(10, seed=0, epoch=0) == [3, 2, 1, 8, 6, 0, 7, 4, 5, 9]
    assert permutation(5, [1, 2, 3]).tolist() == [1, 3, 2, 0, 4]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_partition_the_global_batch(world_size):
    order = ShuffledOrder(50, seed=7)
    ranks = [StepSampler(order, 4, rank, world_size) for rank in range(world_size)]
    for sampler in ranks:
        sampler.start_at(4)
        assert len(sampler) == steps_per_epoch(50, 4, world_size) == 50 // (4 * world_size)
    for step, parts in enumerate(zip(*ranks, strict=True)):
        joined = [key for turn in zip(*parts, strict=True) for key in turn]  # each rank in turn
        size = 4 * world_size
        assert joined == [(4, index, None) for index in order.samples(4, step * size, size)]


def test_resuming_within_an_epoch_gives_its_remaining_batches():
    sampler = StepSampler(ShuffledOrder(40, 5), 3, rank=1, world_size=2)
    sampler.start_at(2)
    whole = list(sampler)
    for step in range(len(whole) + 1):
        resumed = StepSampler(ShuffledOrder(40, 5), 3, rank=1, world_size=2)
        resumed.start_at(2, step)
        assert list(resumed) == whole[step:]
        assert len(resumed) == len(whole) - step


def test_world_size_does_not_change_the_global_batches():
    alone = StepSampler(ShuffledOrder(48, 1), 8)
    pair = [StepSampler(ShuffledOrder(48, 1), 4, rank, 2) for rank in range(2)]
    assert list(map(set, alone)) == [{*left, *right} for left, right in zip(*pair, strict=True)]
