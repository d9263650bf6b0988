"""Images in the order of a folder or of shards: complete, divided among ranks, the same after a resume."""

import math

import numpy as np
import pytest

from vae.sampling.order import (
    MIN_SAMPLES,
    SHUFFLE_SHARDS,
    ShuffledOrder,
    StepSampler,
    StreamOrder,
    default_streams,
    fitting_shuffle,
    permutation,
    shards_at_once,
    steps_per_epoch,
    streams_of_process,
)


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


# ---- Shards ----------------------------------------------------------------------------------------------


SHARDS = [37, 50, 41, 29, 60, 45, 33, 52]  # 347 samples
STREAMS = 8


def epoch(number: int, seed: int = 3) -> list[int]:
    order = StreamOrder(SHARDS, STREAMS, seed)
    return order.samples(number, 0, len(order))


def test_epoch_has_every_sample_once_but_for_a_remainder():
    found = [epoch(number) for number in range(4)]
    for samples in found:
        assert len(set(samples)) == len(samples) == 347 // STREAMS * STREAMS
        assert set(samples) < set(range(347))
    left_out = {tuple(sorted(set(range(347)) - set(samples))) for samples in found}
    assert len(left_out) > 1  # other ones in each epoch
    assert epoch(0) == found[0] != epoch(0, seed=4)


def test_order_of_shards_is_the_same_on_every_machine():
    assert epoch(0)[:8] == [26, 173, 297, 332, 82, 238, 140, 96]


def test_stream_reads_few_shards():
    """A stream has an eighth of the samples, from neighbours in the epoch's sequence of shards."""
    ends = np.cumsum(SHARDS)
    for stream in range(STREAMS):
        shards = np.searchsorted(ends, epoch(1)[stream::STREAMS], side="right")
        assert len(set(shards.tolist())) <= 3


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 8, 12])
def test_every_number_of_processes_sees_the_same_batches(world_size):
    alone = list(StepSampler(StreamOrder(SHARDS, STREAMS, 3), 24))
    ranks = [
        StepSampler(StreamOrder(SHARDS, STREAMS, 3), 24 // world_size, r, world_size)
        for r in range(world_size)
    ]
    together = [[key for part in parts for key in part] for parts in zip(*ranks, strict=True)]
    assert list(map(sorted, together)) == list(map(sorted, alone))


@pytest.mark.parametrize("world_size", [2, 4, 6, 16])
def test_process_reads_only_its_own_streams(world_size):
    whole, order = epoch(0), StreamOrder(SHARDS, STREAMS, 3)
    apart = math.gcd(STREAMS, world_size)
    assert streams_of_process(STREAMS, world_size) == STREAMS // apart
    own = {sample for stream in range(1, STREAMS, apart) for sample in whole[stream::STREAMS]}
    read = [index for batch in StepSampler(order, 2, 1, world_size) for _, index, _ in batch]
    assert set(read) <= own
    shards = np.searchsorted(np.cumsum(SHARDS), read, side="right")
    assert set(shards.tolist()) <= set(order.shards_ahead(0, 1, world_size))  # one window is an epoch here


def test_resuming_reads_nothing_before_its_position():
    order = StreamOrder([1000] * 50, 4, seed=0)
    whole = order.samples(2, 0, len(order))
    fresh = StreamOrder([1000] * 50, 4, seed=0)
    assert fresh.samples(2, 30_000, 8) == whole[30_000:30_008]
    assert len(fresh._windows) == 4  # one of each stream


GB = 10**9
CACHE = 50 * 2**30  # the default of --cache_gib


@pytest.mark.parametrize(
    ("total", "shard", "streams"),
    [
        (48 * GB, GB, 96),  # the cache holds it whole
        (60 * GB, GB, 16),  # 3 shards of 1 GB each
        (5 * 10**12, GB, 16),
        (10**13, GB, 96),  # from here on for several machines
        (10**14, GB, 960),
        (10**15, GB, 6720),
        (10**12, 2 * GB, 8),
        (10**12, 20 * GB, 1),  # the cache holds two
        (10**12, 80 * 10**6, 192),
    ],
)
def test_streams_of_one_machine_fit_into_the_default_cache(total, shard, streams):
    shards = total // shard
    assert default_streams(total // 10**5, shards, total) == streams
    if shards < 64 * 96 and shard < 16 * GB:
        for room in (CACHE, 4 * CACHE):
            window = fitting_shuffle(streams, shard, room) // streams
            assert min(total, shards_at_once(streams, window) * shard) <= room
            assert window == SHUFFLE_SHARDS // streams or shards_at_once(streams, window + 1) * shard > room


def test_large_datasets_have_streams_that_many_processes_divide():
    assert default_streams(3, 1, 1000) == 1
    assert default_streams(24 * MIN_SAMPLES, 10, 10**6) == 24
    assert default_streams(10**10, 10**7, 10**12) == 6720
    for nodes in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 15):  # of eight cards
        assert 6720 % (8 * nodes) == 0


def same_shard_pairs(order: StreamOrder, shard: int, batch: int = 256) -> float:
    """The share of pairs of images of a batch that are of the same shard."""
    shares = []
    for first in range(0, len(order) - batch, 100 * batch):
        counts = np.bincount(np.array(order.samples(0, first, batch)) // shard)
        shares.append((counts * (counts - 1)).sum() / (batch * (batch - 1)))
    return float(np.mean(shares))


@pytest.mark.parametrize("streams", [1, 8, 64])
def test_few_streams_mix_as_well_as_many(streams):
    order = StreamOrder([250] * 1000, streams, seed=0)
    assert same_shard_pairs(order, 250) < 0.005
    assert order.window_length * streams == 256 * 250  # the memory of the windows is the same
    assert len(set(order.shards_ahead(0, 0, 1))) <= 2 * (256 + streams)
