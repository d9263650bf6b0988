"""--parent: a new version of a dataset has the images of the one before it, but for those of --remove.

No tar file is written again for that: the new version lists removed images by their keys.
"""

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vae.images.formats import BadImageError
from vae.prepare.removal_list import keys_to_remove
from vae.prepare.shard.members import TRAINING, VALIDATION
from vae.shards.dataset_json import ShardedDataset, read_dataset
from vae.shards.hashed_files import Keys, Removed, removed_content, write_hashed
from vae.shards.index import Shard, index_path, read_index
from vae.system import console
from vae.system.errors import DataError, UserError
from vae.system.files import atomic_path

FLAG = "--parent"


class Parent:
    """The dataset of --parent, without the images of --remove."""

    def __init__(self, dataset: ShardedDataset, remove: str | None, prefix: str = ""):
        """DataError for a damaged index, UserError for an unusable list of keys.

        `prefix`: what the names of its shards have before them in the new version.
        """
        self.dataset, self.prefix = dataset, prefix
        assert isinstance(dataset.path, Path)
        self.folder = dataset.path.parent
        self._removed = {subset: self._removed_before(subset) for subset in (TRAINING, VALIDATION)}
        if remove:
            self._remove(remove)

    def subset(self, name: str) -> ShardedDataset | None:
        """The part of it that is `name`; None if it has none."""
        if name == TRAINING:
            return self.dataset
        other = self.dataset.validation
        return read_dataset(self.folder / other, flag=FLAG) if other else None

    def samples(self, subset: str) -> int:
        """Number of images of a subset that the new version has too."""
        return sum(shard.samples - len(shard.removed) for shard in self.shards(subset))

    def shards(self, subset: str) -> Iterator[Shard]:
        """The shards of a subset, with the keys that are removed now."""
        for shard in self._before(subset):
            yield shard._replace(removed=self._removed[subset].get(shard.name, ()))

    def rows(self, subset: str) -> Iterator[np.ndarray]:
        """The indexes of a subset without removed images; DataError for one that cannot be used."""
        dataset = self.subset(subset)
        for shard in self.shards(subset):
            assert dataset is not None
            try:
                yield read_index(self.index_file(dataset, shard), shard)
            except BadImageError as error:
                raise DataError(f"{FLAG} {self.dataset.path} is damaged: {error.detail}") from None

    def index_file(self, dataset: ShardedDataset, shard: Shard) -> Path:
        """The index of one of its shards, which is in this subset."""
        return index_path(dataset.index_folder, shard._replace(name=shard.name[len(self.prefix) :]))

    def changes(self, subset: str, shards: Iterable[Shard]) -> dict[str, Any]:
        """What a subset has now and did not have before, and the reverse."""
        before = {shard.name: shard for shard in self._before(subset)}
        after = {shard.name: shard for shard in shards}
        both = before.keys() & after.keys()
        newly_removed = sum(len(after[name].removed) - len(before[name].removed) for name in both)
        return {
            "added": _list_of(after, after.keys() - both, 0),
            "removed": _list_of(before, before.keys() - both, newly_removed),
        }

    @property
    def removed(self) -> Removed:
        """The keys of all images that do not belong to the new version, by the names of their shards."""
        merged: dict[str, set[bytes]] = {}
        for removed in self._removed.values():
            for name, keys in removed.items():
                merged.setdefault(name, set()).update(keys)
        return {name: tuple(sorted(keys)) for name, keys in merged.items()}

    def removed_keys(self) -> np.ndarray:
        """The same, sorted: S32."""
        return np.unique(np.array([key for keys in self.removed.values() for key in keys], "S32"))

    def removed_from(self, shards: Iterable[Shard]) -> Removed:
        """The same by the names of these shards; "" has the keys of images that they do not have."""
        kept = {shard.name: shard.removed for shard in shards if shard.removed}
        present = np.array([key for keys in kept.values() for key in keys], "S32")
        others = np.setdiff1d(self.removed_keys(), present)
        return {**kept, **({"": tuple(others.tolist())} if len(others) else {})}

    def check_some_left(self, remove: str | None) -> None:
        """UserError if --remove has all training images."""
        if remove and not self.samples(TRAINING):
            raise UserError(f"--remove {remove} has all training images of --parent: leave some of them out")

    def _removed_before(self, subset: str) -> dict[str, Keys]:
        dataset = self.subset(subset)
        removed = dataset.removed.items() if dataset else ()
        return {name and self.prefix + name: keys for name, keys in removed}

    def _before(self, subset: str) -> Iterator[Shard]:
        dataset = self.subset(subset)
        for shard in dataset.shards if dataset else ():
            yield shard._replace(name=self.prefix + shard.name)

    def _remove(self, file: str) -> None:
        """Add the images in a file to the removed ones, by the names of their shards."""
        subsets = [subset for subset in map(self.subset, (TRAINING, VALIDATION)) if subset]
        wanted = missing = np.setdiff1d(keys_to_remove(file, subsets), self.removed_keys())
        for subset in (TRAINING, VALIDATION):
            for shard, rows in zip(self.shards(subset), self.rows(subset), strict=True):
                found = np.intersect1d(rows["key"], wanted, assume_unique=True)
                if len(found):
                    keys = [*shard.removed, *found.tolist()]
                    self._removed[subset][shard.name] = tuple(sorted(keys))
                    missing = np.setdiff1d(missing, found, assume_unique=True)
        if len(missing):
            console.warning(
                f"--remove {file}: {len(missing)} of {len(wanted)} keys are in no shard of --parent, for "
                f"example {missing[0].decode()}: later versions will not add these images"
            )
            others = self._removed[TRAINING].get("", ())
            self._removed[TRAINING][""] = tuple(sorted([*others, *missing.tolist()]))


def write_removed(path: Path, removed: Removed) -> dict[str, Any]:
    """Write removed keys, if there are any; returns what a `dataset.json` says about them."""
    return {"removed_keys": write_hashed(path, removed_content(removed))} if removed else {}


def removed_line(count: int) -> str:
    """A line of the summary about removed images."""
    return f"  removed  {count:>7}  images, which are not read"


def link_or_copy(source: Path, target: Path) -> None:
    """Make a file available under another path too: as a copy if the folders are on different disks."""
    if target.exists() and target.samefile(source):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        with atomic_path(target) as temporary:
            shutil.copyfile(source, temporary)


def _list_of(shards: Mapping[str, Shard], names: Iterable[str], more_images: int) -> dict[str, Any]:
    """The number of images and the names of some shards."""
    chosen = [shards[name] for name in sorted(names)]
    images = sum(shard.samples - len(shard.removed) for shard in chosen)
    return {"images": images + more_images, "shards": [shard.name for shard in chosen]}
