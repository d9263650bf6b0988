#!/usr/bin/env python3
"""What a very large dataset of shards costs: memory, seconds, and bytes that each node reads.

Writes a `dataset.json` of as many shards as asked for, opens it, and orders an epoch, with the code of the
trainer. No image exists. The cache of a node is simulated: its processes pass through the windows of their
streams, with the shards of the current and the next window in use, and the shards that were used longest ago
are removed.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from vae.data.shard_images import ShardImages  # noqa: E402
from vae.data.shards import INDEX, Shard, dataset_content, read_dataset  # noqa: E402
from vae.data.streams import StreamOrder  # noqa: E402

GB = 10**9


def write_dataset(path: Path, shards: int, samples: int) -> None:
    """A dataset of `shards` shards of 1 GB, with `samples` images together."""
    each, rest = divmod(samples, shards)
    listed = [
        Shard(f"images-{n:07}.tar", each + (n < rest), GB - n % 1000, hashlib.sha256(b"%d" % n).hexdigest())
        for n in range(shards)
    ]
    path.write_text(json.dumps(dataset_content(listed, {}, None), indent=1))


def resident_mib(name: str) -> float:
    """VmRSS or VmHWM of this process (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


def measure_open(path: Path, processes: int, streams: int) -> dict[str, float]:
    """Seconds and memory of one of `processes` processes: open, find the first batch, pass a window."""
    before, began = resident_mib("VmRSS"), time.process_time()
    images = ShardImages(read_dataset(path), streams)
    opened = time.process_time()
    held = resident_mib("VmRSS") - before
    order = images.order(0)
    assert isinstance(order, StreamOrder)
    order.samples(0, 0, 32, processes)
    first = time.process_time()
    middle = len(order) // 2 // processes * processes
    order.samples(3, middle, 32, processes)  # another epoch, as after a resume
    resumed = time.process_time()
    own_streams = streams // processes
    shards = order.shards_ahead(3, middle, processes)
    counts = images.dataset.shards.samples[shards]
    return {
        "json_mb": path.stat().st_size / 1e6,
        "open_s": opened - began,
        "open_mib": held,
        "peak_mib": resident_mib("VmHWM") - before,
        "first_batch_s": first - opened,
        "resume_s": resumed - first,
        "order_mib": resident_mib("VmRSS") - before - held,
        "streams": own_streams,
        "shards_open": len(shards),
        "index_mib": int(counts.sum()) * INDEX.itemsize / 2**20,
    }


Window = tuple[dict[int, float], list[int]]  # part of each shard that is read now; shards of the next window


def node_windows(order: StreamOrder, epoch: int, node: int, nodes: int, processes: int) -> list[Window]:
    """The windows of an epoch through which the streams of a node pass together."""
    ranks = range(node * processes // nodes, (node + 1) * processes // nodes)
    streams = [stream for rank in ranks for stream in range(rank, order.num_streams, processes)]
    found = []
    for window in range(-(-order.length // order._window)):
        parts: dict[int, float] = {}
        for stream in streams:
            shards = order._window_shards(epoch, window, stream)
            first = stream * order.length + window * order._window
            last = min(first + order._window, (stream + 1) * order.length)
            ends = np.cumsum(order._counts[shards]) + _start(order, epoch, first)
            read = np.minimum(ends, last) - np.maximum(ends - order._counts[shards], first)
            for shard, part in zip(shards.tolist(), read / order._counts[shards], strict=True):
                parts[shard] = parts.get(shard, 0.0) + part
        found.append(parts)
    return list(zip(found, [*(list(parts) for parts in found[1:]), []], strict=True))


def _start(order: StreamOrder, epoch: int, place: int) -> int:
    """The first place of the shard that contains a place of an epoch."""
    shards, ends = order._shards(epoch)
    rank = int(np.searchsorted(ends, place, side="right"))
    return int(ends[rank] - order._counts[shards[rank]])


def simulate_cache(epochs: list[list[Window]], cache_gb: float) -> list[dict[str, float]]:
    """For each epoch: GB that a node fetches, images found in its cache, and images read one by one.

    As in vae/data/shard_cache.py: shards of the current and the next window are never removed, of the others
    the one that was used longest ago; without room, the images of a shard are read one by one.
    """
    cache: OrderedDict[int, None] = OrderedDict()
    results = []
    for windows in epochs:
        fetched = single = hits = total = 0.0
        for parts, following in windows:
            in_use = parts.keys() | set(following)
            total += sum(parts.values())
            hits += sum(part for shard, part in parts.items() if shard in cache)
            for shard in [*parts, *(one for one in following if one not in parts)]:
                if shard in cache:
                    cache.move_to_end(shard)
                    continue
                if len(cache) >= cache_gb and next(iter(cache), shard) not in in_use:
                    cache.popitem(last=False)
                if len(cache) < cache_gb:
                    cache[shard] = None
                    fetched += 1
                else:
                    single += parts.get(shard, 0.0)
            for shard in parts.keys() & cache.keys():  # used after the read-ahead of the next window
                cache.move_to_end(shard)
        results.append({"gb": fetched + single, "hits": hits / total, "single": single / total})
    return results


def print_cache_table(path: Path, nodes: int, processes: int, streams: int, sizes: list[float]) -> None:
    """Bytes per node and epoch, and hit rates, by size of the cache."""
    images = ShardImages(read_dataset(path), streams)
    order = images.order(0)
    assert isinstance(order, StreamOrder)
    share = len(images.dataset.shards) / nodes
    began = time.process_time()
    epochs = [node_windows(order, epoch, 0, nodes, processes) for epoch in (0, 1)]
    in_use = max(len(parts.keys() | set(following)) for windows in epochs for parts, following in windows)
    print(
        f"\n{nodes} nodes, {streams} streams: 1/{nodes} of the dataset is {share / 1000:.2f} TB; at most "
        f"{in_use} shards are in use on a node ({time.process_time() - began:.1f} s)\n"
    )
    print("| cache, GB | TB per node, 1st epoch | 2nd epoch | found in the cache | read one by one |")
    print("|---|---|---|---|---|")
    for size in sizes:
        first, second = simulate_cache(epochs, size)
        print(
            f"| {size:g} | {first['gb'] / 1000:.2f} | {second['gb'] / 1000:.2f} | {second['hits']:.1%} | "
            f"{second['single']:.1%} |"
        )


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, default=1_400_000)
    parser.add_argument("--samples", type=int, default=9_500_000_000)
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--processes", type=int, default=512, help="of all nodes")
    parser.add_argument("--streams", type=int, default=1024, help="--data_streams")
    parser.add_argument("--cache_gb", type=float, nargs="+", default=[80, 160, 200, 250, 1000, 4000, 20_000])
    parser.add_argument("--open_only", metavar="FILE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.open_only:
        print(json.dumps(measure_open(Path(options.open_only), options.processes, options.streams)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "dataset.json"
        write_dataset(path, options.shards, options.samples)
        words = [sys.executable, __file__, "--open_only", str(path), "--streams", str(options.streams)]
        done = subprocess.run(
            [*words, "--processes", str(options.processes)], stdout=subprocess.PIPE, check=True
        )
        print("| one process | |\n|---|---|")
        for name, value in json.loads(done.stdout).items():
            print(f"| {name} | {value:.4g} |")
        print_cache_table(path, options.nodes, options.processes, options.streams, options.cache_gb)


if __name__ == "__main__":
    main()
