"""Several datasets of shards as one: `a.json b.json`, or with weights, `a.json:0.7 b.json:0.3`."""

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from vae.sampling.mixture import BLOCK, MixtureOrder
from vae.sampling.order import Order
from vae.sampling.streams import StreamOrder, count_streams
from vae.shards.shard_images import ShardImages
from vae.system.errors import UserError

# The weight follows .json, so the colon of a drive (C:\\a.json) or of a port is none.
_PART = re.compile(r"(\S.*?\.json(?:\?\S*?)?)(?::([0-9.eE+-]+))?(?:\s+|$)")

Mixture = list[tuple[str, float | None]]  # datasets with their weights, or all with None


def parse_mixture(text: str | os.PathLike[str]) -> Mixture:
    """The datasets of --data_path; empty if it is a single path. UserError for a wrong weight."""
    parts, position, text = [], 0, os.fspath(text)
    while found := _PART.match(text, position):
        parts.append((found[1], found[2]))
        position = found.end()
    has_weights = any(word for _, word in parts)
    if not has_weights and (position < len(text) or len(parts) < 2):
        return []
    without = [path for path, word in parts if not word] + [text[position:]] * (position < len(text))
    if has_weights and without:
        raise UserError(
            f"--data_path {without[0]} has no weight: give each dataset one, as in a.json:0.7, or none"
        )
    if len({os.path.normpath(path) for path, _ in parts}) < len(parts):
        raise UserError(f"--data_path {text} names a dataset twice: give it once")
    weights = [(path, _weight(path, word) if word else None) for path, word in parts]
    total = sum(weight or 0 for _, weight in weights)
    for path, weight in weights:
        if weight is not None and weight * BLOCK < total:
            raise UserError(f"--data_path {path}:{weight:g} is below 1/{BLOCK} of all weights: leave it out")
    return weights


def _weight(path: str, word: str) -> float:
    try:
        weight = float(word)
    except ValueError:
        weight = 0.0
    if not 0 < weight < float("inf"):
        raise UserError(f"--data_path {path}:{word}: the weight must be a number above 0, as in a.json:0.7")
    return weight


def dataset_paths(text: str) -> list[str]:
    """The paths in --data_path: of a mixture, or the single one."""
    return [path for path, _ in parse_mixture(text)] or [text]


class MixtureImages:
    """The images of several datasets, one after another (vae.data.dataset)."""

    def __init__(
        self,
        parts: Sequence[ShardImages],
        weights: Sequence[float] | None,
        location: str,
        max_images: int = 0,
    ):
        """`weights`: None: all images count alike, and each comes once in an epoch.

        `max_images`: use the first images of each dataset, by its weight; 0: all.
        """
        self.parts = list(parts)
        self.weights = weights
        self.location = location
        shares = np.array(weights or [len(part) for part in parts], np.float64)
        self._shares = shares / shares.sum()
        most = np.maximum(1, max_images * self._shares) if max_images else np.full(len(parts), np.inf)
        self._used = np.minimum([len(part) for part in parts], most).astype(np.int64)
        self._ends = np.cumsum(self._used)
        self._expected: tuple[int, int] | None = None

    def __len__(self) -> int:
        return int(self._ends[-1])

    def locate(self, index: int) -> tuple[ShardImages, int]:
        """The dataset of an image, and its number there."""
        number = int(np.searchsorted(self._ends, index, side="right"))
        return self.parts[number], index - int(self._ends[number] - self._used[number])

    def spans(self) -> Iterator[tuple[ShardImages, int, int]]:
        """Each dataset, the number of its first image here, and how many of its images are used."""
        yield from zip(self.parts, (self._ends - self._used).tolist(), self._used.tolist(), strict=True)

    def name(self, index: int) -> str:
        """A name for messages."""
        part, own = self.locate(index)
        return f"{part.location}: {part.name(own)}"

    def metadata(self, index: int) -> dict[str, Any]:
        """As ShardImages.metadata."""
        part, own = self.locate(index)
        return part.metadata(own)

    def decode(self, index: int, *, max_pixels: int, background: str) -> np.ndarray:
        """The pixels of an image: uint8 (H, W, 3)."""
        part, own = self.locate(index)
        return part.decode(own, max_pixels=max_pixels, background=background)

    def sizes(self, indices: np.ndarray) -> np.ndarray:
        """As ShardImages.sizes."""
        numbers = np.searchsorted(self._ends, indices, side="right")
        sizes = np.empty((len(indices), 2), np.int64)
        for number, part in enumerate(self.parts):
            own = numbers == number
            sizes[own] = part.sizes(indices[own] - (self._ends[number] - self._used[number]))
        return sizes

    def spread(self, least: int) -> np.ndarray:
        """Images of all datasets by their weights, at least so many or all; those of a small one repeat."""
        total = min(least, int(max(self._used / self._shares)))
        found = []
        for part, used, end, share in zip(self.parts, self._used, self._ends, self._shares, strict=True):
            count = -int(-total * share // 1)
            images = part.spread(count)
            found.append(end - used + images[np.arange(count) * len(images) // count])
        return np.concatenate(found)

    def order(self, seed: int) -> MixtureOrder | StreamOrder:
        """Samples of each dataset by its weight; all datasets have the streams that the smallest can have.

        Without weights that of one dataset with the shards of all.
        """
        counts = [part.dataset.shards.samples for part in self.parts]
        if self.weights is None:
            streams = count_streams(len(self), self.parts[0].num_streams)
            return StreamOrder(np.concatenate(counts), streams, seed)
        streams = min(count_streams(len(part), part.num_streams) for part in self.parts)
        return MixtureOrder([StreamOrder(one, streams, seed) for one in counts], self.weights, seed)

    def fingerprint(self) -> str:
        """Those of the datasets, with their weights."""
        return " ".join(f"{part.fingerprint()} {weight!r}" for part, weight in self._weighted())

    def record(self) -> dict[str, Any]:
        """Those of the datasets, with their weights."""
        datasets = [{**part.record(), "weight": weight} for part, weight in self._weighted()]
        return {"datasets": datasets, "samples": len(self)}

    def _weighted(self) -> Iterator[tuple[ShardImages, float | None]]:
        weights: Sequence[float | None] = self.weights or [None] * len(self.parts)
        return zip(self.parts, weights, strict=True)

    def counts(self) -> dict[str, int]:
        """Those of the datasets together."""
        total: Counter[str] = Counter()
        for part in self.parts:
            total.update(part.counts())
        return dict(total)

    def expect(self, order: Order, epoch: int, position: int, world_size: int) -> None:
        """Training continues from this position on: the shards of each dataset are fetched."""
        if isinstance(order, MixtureOrder):
            places = order.next_places(epoch, position)
            for part, own, place in zip(self.parts, order.orders, places, strict=True):
                part.expect(own, *place, world_size)
            return
        assert isinstance(order, StreamOrder)
        if (window := (epoch, order.window(position))) != self._expected:
            self._expected = window
            numbers = np.array(order.shards_ahead(epoch, position, world_size))
            for part in self.parts:
                count = len(part.dataset.shards)
                part.fetch(numbers[(numbers >= 0) & (numbers < count)].tolist())
                numbers = numbers - count
