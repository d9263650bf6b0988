"""Several datasets of shards as one, for training with weights: `a.json:0.7 b.json:0.3`."""

import os
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from vae.sampling.mixture import BLOCK, MixtureOrder
from vae.sampling.order import Order
from vae.sampling.streams import StreamOrder, count_streams
from vae.shards.shard_images import ShardImages
from vae.system.errors import UserError

# The weight follows .json, so the colon of a drive (C:\a.json) or of a port is none.
_PART = re.compile(r"(\S.*?\.json(?:\?\S*)?):([0-9.eE+-]+)(?:\s+|$)")


def parse_mixture(text: str | os.PathLike[str]) -> list[tuple[str, float]]:
    """Datasets and weights of --data_path; empty if it is a single path. UserError for a wrong weight."""
    parts, position, text = [], 0, os.fspath(text)
    while found := _PART.match(text, position):
        parts.append((found[1], found[2]))
        position = found.end()
    if not parts:
        return []
    if position < len(text):
        raise UserError(
            f"--data_path {text[position:]} has no weight: give each dataset one, as in a.json:0.7"
        )
    weights = [(path, _weight(path, word)) for path, word in parts]
    total = sum(weight for _, weight in weights)
    for path, weight in weights:
        if weight * BLOCK < total:
            raise UserError(f"--data_path {path}:{weight:g} is below 1/{BLOCK} of all weights: leave it out")
    if len({os.path.normpath(path) for path, _ in weights}) < len(weights):
        raise UserError(f"--data_path {text} names a dataset twice: give it once, with both weights together")
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
    """The images of several datasets, one after another (vae.data.dataset.Images)."""

    def __init__(
        self, parts: Sequence[ShardImages], weights: Sequence[float], location: str, max_images: int = 0
    ):
        """`max_images`: use the first images of each dataset, by its weight; 0: all."""
        self.parts, self.weights, self.location = list(parts), list(weights), location
        shares = [max_images * weight / sum(weights) if max_images else np.inf for weight in weights]
        self._used = [int(min(len(part), max(1, share))) for part, share in zip(parts, shares, strict=True)]
        self._ends = np.cumsum(self._used)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def locate(self, index: int) -> tuple[ShardImages, int]:
        """The dataset of an image, and its number there."""
        number = int(np.searchsorted(self._ends, index, side="right"))
        return self.parts[number], index - int(self._ends[number] - self._used[number])

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
        shares = np.array(self.weights) / sum(self.weights)
        total = min(least, int(max(self._used / shares)))
        found = []
        for part, used, end, share in zip(self.parts, self._used, self._ends, shares, strict=True):
            count = -int(-total * share // 1)
            images = part.spread(count)
            found.append(end - used + images[np.arange(count) * len(images) // count])
        return np.concatenate(found)

    def order(self, seed: int) -> MixtureOrder:
        """Samples of each dataset by its weight; all datasets have the streams that the smallest can have."""
        streams = min(count_streams(len(part), part.num_streams) for part in self.parts)
        orders = [StreamOrder(part.dataset.shards.samples, streams, seed) for part in self.parts]
        return MixtureOrder(orders, self.weights, seed)

    def fingerprint(self) -> str:
        """Those of the datasets, with their weights."""
        parts = zip(self.parts, self.weights, strict=True)
        return " ".join(f"{part.fingerprint()} {weight!r}" for part, weight in parts)

    def record(self) -> dict[str, Any]:
        """Those of the datasets, with their weights."""
        parts = zip(self.parts, self.weights, strict=True)
        datasets = [{**part.record(), "weight": weight} for part, weight in parts]
        return {"datasets": datasets, "samples": len(self)}

    def counts(self) -> dict[str, int]:
        """Those of the datasets together."""
        total: Counter[str] = Counter()
        for part in self.parts:
            total.update(part.counts())
        return dict(total)

    def expect(self, order: Order, epoch: int, position: int, world_size: int) -> None:
        """Training continues from this position on: the shards of each dataset are fetched."""
        assert isinstance(order, MixtureOrder)
        places = order.next_places(epoch, position)
        for part, own, (its_epoch, its_position) in zip(self.parts, order.orders, places, strict=True):
            part.expect(own, its_epoch, its_position, world_size)

    def scattered(self) -> "MixtureImages":
        """The same images, for reading a few of them."""
        return MixtureImages([part.scattered() for part in self.parts], self.weights, self.location)

    def close(self) -> None:
        """Close all files."""
        for part in self.parts:
            part.close()
