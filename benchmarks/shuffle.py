#!/usr/bin/env python3
"""How well the order of a dataset of shards mixes, beside that of mosaicml-streaming if it is installed.

    python benchmarks/shuffle.py

Of batches spread over an epoch: the share of pairs of images that come from the same shard, and the share of
images whose shard is in the batch before. mosaicml-streaming's are those of one device.
"""

import argparse
import importlib
import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from vae.sampling.order import StreamOrder, permutation  # noqa: E402

Order = Callable[[int, int], np.ndarray]  # first position, count -> images


def mixing(order: Order, images: int, shard: int, batch: int, pairs: int = 200) -> tuple[float, float]:
    """The share of same-shard pairs in a batch, and of images whose shard is in the batch before."""
    same, before = [], []
    for first in np.linspace(0, images - 2 * batch, pairs).astype(int) // batch * batch:
        last, found = (order(first + offset, batch) // shard for offset in (0, batch))
        counts = np.bincount(found)
        same.append((counts * (counts - 1)).sum() / (batch * (batch - 1)))
        before.append(np.isin(found, last).mean())
    return float(np.mean(same)), float(np.mean(before))


def orders(shards: int, shard: int) -> Iterator[tuple[str, Order]]:
    """The names of orders, and their images from a position on."""
    images = shards * shard
    uniform = permutation(images, [0])
    yield "all images permuted", lambda first, count: uniform[first : first + count]
    for shuffle, streams in itertools.product((256, 1024), (64, 8, 1)):
        order = StreamOrder([shard] * shards, streams, 0, shuffle)
        name = f"`--data_streams {streams} --shuffle_shards {shuffle}`"
        yield name, lambda first, count, order=order: np.array(order.samples(0, first, count))
    for streams in (8, 1):
        order = StreamOrder([shard] * shards, streams, 0, 4 * streams)
        name = f"four shards per stream, {streams} stream{'s' if streams > 1 else ''}"
        yield name, lambda first, count, order=order: np.array(order.samples(0, first, count))
    if (get_shuffle := mosaicml_shuffle()) is None:
        return
    # Defaults of StreamingDataset on one node: canonical nodes, and the block, if the shuffle has one
    for algorithm, nodes, block in (("py1e", 1, 4_000_000), ("py1e", 1, 256 * shard), ("py2s", 64, 1 << 18)):
        found = get_shuffle(algorithm, np.full(shards, shard), nodes, 9176, 0, block)
        taken = found.reshape(nodes, -1).T.ravel()  # for one device: of the canonical nodes in turn
        size = f", blocks of {block:,} images" if algorithm == "py1e" else ""
        yield f"mosaicml-streaming {algorithm}{size}", partial(_part, taken)


def mosaicml_shuffle() -> Callable[..., np.ndarray] | None:
    """get_shuffle of mosaicml-streaming, without the rest of the package, which needs others; or None."""
    spec = importlib.util.find_spec("streaming")
    if spec is None or not spec.submodule_search_locations:
        print("without mosaicml-streaming, which is not installed", file=sys.stderr)
        return None
    folder = Path(next(iter(spec.submodule_search_locations)))
    for name, path in (("streaming", folder), ("streaming.base", folder / "base")):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [str(path)]
    return importlib.import_module("streaming.base.shuffle").get_shuffle


def _part(found: np.ndarray, first: int, count: int) -> np.ndarray:
    return found[first : first + count]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shards", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=1000, help="of a shard")
    parser.add_argument("--batch", type=int, default=256)
    given = parser.parse_args()
    print("| order | pairs of one shard | shard in the batch before |\n|---|---|---|")
    for name, order in orders(given.shards, given.samples):
        same, before = mixing(order, given.shards * given.samples, given.samples, given.batch)
        print(f"| {name} | {same:.4f} | {before:.0%} |", flush=True)


if __name__ == "__main__":
    main()
