"""A mixture of datasets: shares as given, every dataset in its own epochs, and any number of processes."""

from collections import Counter
from itertools import chain

import numpy as np
import pytest

from vae.sampling.mixture import BLOCK, MixtureOrder, block_counts
from vae.sampling.streams import StreamOrder

STREAMS = 4


def mixture(weights=(0.7, 0.3), seed=0):
    orders = [StreamOrder([40] * 10, STREAMS, seed), StreamOrder([25] * 8, STREAMS, seed)]
    return MixtureOrder(orders, weights, seed)


def test_shares_are_those_of_the_weights_and_never_zero():
    assert block_counts([0.7, 0.3]).tolist() == [700, 300]
    assert block_counts([7, 3]).tolist() == [700, 300]
    assert block_counts([1, 1, 1]).sum() == BLOCK
    assert min(block_counts([1, 1, 1])) == 333
    assert block_counts([1000, 1]).min() == 1


def test_each_dataset_goes_through_its_own_epochs():
    """An epoch has as many samples as both datasets: the smaller one is repeated, and none is favoured."""
    order = mixture((0.5, 0.5))
    assert len(order) == 600
    seen = Counter(sample for epoch in range(20) for sample in order.samples(epoch, 0, 600))
    per_dataset = [sum(seen[n] for n in range(400)), sum(seen[n] for n in range(400, 600))]
    assert sum(per_dataset) == 12_000
    assert per_dataset[0] == pytest.approx(6000, rel=0.05)
    for first, last in ((0, 400), (400, 600)):
        times = [seen[n] for n in range(first, last)]
        assert max(times) - min(times) <= 2 * STREAMS
        assert min(times) > 0


def test_position_is_all_that_the_order_needs():
    whole, fresh = mixture().samples(3, 0, 600), mixture()
    for first in (0, 17, 350, 599):
        assert fresh.samples(3, first, 600 - first) == whole[first:]
    assert mixture(seed=1).samples(3, 0, 600) != whole


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_processes_share_a_batch(world_size):
    order = mixture()
    batch = [order.samples(1, rank + 96, 48 // world_size, world_size) for rank in range(world_size)]
    assert sorted(chain(*batch)) == sorted(order.samples(1, 96, 48))


def test_batch_has_samples_of_all_datasets():
    """Streams mix in different orders, so no step sees a single dataset."""
    shares = [sum(n < 400 for n in mixture().samples(0, 100 * step, 100)) for step in range(6)]
    assert 50 < min(shares) <= max(shares) < 90


def test_next_place_of_each_dataset_is_where_its_next_sample_is():
    order = mixture()
    for position in (0, 1, 250, 598):
        number, epoch, own = order.place(2, position)
        assert order.next_places(2, position)[number] == (epoch, own)


def test_windows_are_the_samples_of_a_stream_in_their_order():
    order, fresh = mixture(), mixture()
    assert 1 < order.window_length <= order.length
    for stream in range(STREAMS):
        windows = range(-(-order.length // order.window_length))
        found = np.concatenate([order.window_samples(3, stream, window) for window in windows])
        assert found.tolist() == fresh.samples(3, stream, order.length, STREAMS)
