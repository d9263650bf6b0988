"""--parent: a new version of a dataset has the shards of the one before it, as links to its files.

With --drop, only the unchanged ones: all of their images are still accepted, in the same subset, and with the
same JSON files. With --remove, some images no longer belong to the dataset, although its shards have them.
"""

import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vae.config.flags import command_words
from vae.config.prepare_flags import ShardConfig
from vae.images.formats import BadImageError
from vae.prepare.shard.engines import SUFFIXES
from vae.prepare.shard.members import TRAINING, VALIDATION, Members
from vae.prepare.shard.shared import MIN_ROWS, parts, phashes_of
from vae.prepare.shard.write import KEY_DIGITS, Member, Plan, copy_mark, read_mark, write_mark
from vae.shards.hashed_files import Removed
from vae.shards.index import Shard, ShardedDataset, index_path, read_dataset, read_index
from vae.system import console
from vae.system.errors import DataError, UserError
from vae.system.files import atomic_path, bounded_lines, sha256_of_file

RULES = ("min_size", "max_aspect", "max_pixels", "background", "first_frame", "near_duplicates")


_KEY = re.compile(r"[0-9a-f]{32}([0-9a-f]{32})?")


class Kept(NamedTuple):
    """The shards of a subset that are those of the parent."""

    shards: list[Shard]
    keys: np.ndarray  # of their images, sorted: S32

    def contains(self, member: Member) -> bool:
        """Whether one of them has this image."""
        return contains(self.keys, member.key)


class Parent:
    """The dataset of --parent."""

    def __init__(self, config: ShardConfig):
        """DataError if it is no dataset, or is on a remote store; UserError if it has other rules."""
        assert config.parent is not None
        self.dataset = read_dataset(config.parent, flag="--parent")
        self.folder, self.is_whole = self.dataset.folder, not config.drop
        if self.dataset.tars is not None:
            raise UserError(
                f"--parent {config.parent} has tar files that others wrote: index them all in a new folder "
                "with --mode index"
            )
        self.policy = theirs = self.dataset.policy
        own = {name: getattr(config, name) for name in RULES}
        different = {name: theirs[name] for name in RULES if theirs.get(name) not in (None, own[name])}
        if self.is_whole and different and config.input_dir:
            raise UserError(
                f"--parent {config.parent} has images by other rules ({' '.join(command_words(different))}): "
                "use those, or leave out its images that --input_dir does not have with --drop"
            )
        self.removed = dict(self.dataset.removed)
        if config.remove:
            self._remove(config.remove)

    def subset(self, name: str) -> ShardedDataset | None:
        """The part of it that is `name`; None if it has none."""
        if name == TRAINING:
            return self.dataset
        other = self.dataset.validation
        return read_dataset(self.folder / other, flag="--parent") if other else None

    def samples(self, subset: str) -> int:
        """Number of images of a subset that the new version has too."""
        return sum(shard.samples - len(shard.removed) for shard in self._shards(subset))

    def known_keys(self) -> np.ndarray:
        """The keys of images that are not added: those that it has or has removed, sorted: S32."""
        keys = [self._removed_keys()]
        if self.is_whole:
            keys += [rows["key"] for subset in (TRAINING, VALIDATION) for rows in self._rows(subset)]
        return np.sort(np.concatenate(keys))

    def changes(self, subset: str, shards: Iterable[Shard]) -> dict[str, Any]:
        """What a subset has now and did not have before, and the reverse."""
        dataset = self.subset(subset)
        before = {shard.name: shard for shard in dataset.shards} if dataset else {}
        after = {shard.name: shard for shard in shards}
        both = before.keys() & after.keys()
        newly_removed = sum(len(after[name].removed) - len(before[name].removed) for name in both)
        return {
            "added": _list_of(after, after.keys() - both, 0),
            "removed": _list_of(before, before.keys() - both, newly_removed),
        }

    def removed_from(self, shards: Iterable[Shard]) -> Removed:
        """The removed keys by the names of these shards, which are all that the new version has."""
        kept = {shard.name: shard.removed for shard in shards if shard.removed}
        others = [key for name, keys in self.removed.items() if name not in kept for key in keys]
        return {**kept, **({"": tuple(sorted(others))} if others else {})}

    def _remove(self, file: str) -> None:
        """Add the keys in a file to the removed ones, by the names of their shards."""
        wanted = np.setdiff1d(_read_keys(file), self._removed_keys())
        listed = len(wanted)
        for subset in (TRAINING, VALIDATION):
            for shard, rows in zip(self._shards(subset), self._rows(subset), strict=True):
                found = np.intersect1d(rows["key"], wanted, assume_unique=True)
                if len(found):
                    keys = [*shard.removed, *found.tolist()]
                    self.removed[shard.name] = tuple(sorted(keys))
                    wanted = np.setdiff1d(wanted, found, assume_unique=True)
        if len(wanted):
            console.warning(
                f"--remove {file}: {len(wanted)} of {listed} keys are in no shard of --parent, for example "
                f"{wanted[0].decode()}: later versions will not add these images"
            )
            self.removed[""] = tuple(sorted([*self.removed.get("", ()), *wanted.tolist()]))
        if self.is_whole and not self.samples(TRAINING):
            raise UserError(f"--remove {file} has all training images of --parent: leave some of them out")

    def _removed_keys(self) -> np.ndarray:
        return np.array([key for keys in self.removed.values() for key in keys], "S32")

    def phashes(self, subset: str) -> Iterator[np.ndarray]:
        """The perceptual hashes of a subset's images, in parts of (N, 2)."""
        return map(phashes_of, parts(self._rows(subset), MIN_ROWS))

    def _shards(self, subset: str) -> Iterator[Shard]:
        """The shards of a subset, with the keys that are removed now."""
        dataset = self.subset(subset)
        for shard in dataset.shards if dataset else ():
            yield shard._replace(removed=self.removed.get(shard.name, ()))

    def _rows(self, subset: str) -> Iterator[np.ndarray]:
        """The indexes of a subset without removed images; DataError for one that cannot be used."""
        for shard in self._shards(subset):
            try:
                yield read_index(index_path(self.folder, shard), shard)
            except BadImageError as error:
                raise DataError(f"--parent {self.dataset.path} is damaged: {error.detail}") from None

    def link_all(self, root: Path, subset: str) -> list[Shard]:
        """Link the shards of a subset into `root`, but for those whose images are all removed."""
        shards = []
        for shard in self._shards(subset):
            if len(shard.removed) == shard.samples:
                continue
            path = self.folder / shard.name
            if not path.is_file() or path.stat().st_size != shard.bytes:
                raise DataError(f"--parent {self.dataset.path} is damaged: {shard.name} is not complete")
            shards.append(linked := self._link(shard, root))
            copy_mark(self.folder, root, linked)
        return shards

    def link_unchanged(self, root: Path, subset: str, members: Members, min_bytes: float) -> Kept:
        """Link the unchanged shards of a subset into `root`; smaller ones than this are packed again."""
        kept, keys, dataset = [], [np.zeros(0, "S32")], self.subset(subset)
        for shard in dataset.shards if dataset else ():
            plan = self._plan(shard, subset, members) if shard.bytes >= min_bytes else None
            if plan is not None:
                kept.append(linked := self._link(shard, root))
                write_mark(root, plan.digest(), linked)
                keys.append(np.array([member.key.encode() for member in plan.members], "S32"))
        return Kept(kept, np.sort(np.concatenate(keys)))

    def _plan(self, shard: Shard, subset: str, members: Members) -> Plan | None:
        """The plan that this shard would have now, if it is the one that it was written from."""
        try:
            rows = read_index(index_path(self.folder, shard), shard)
        except BadImageError:
            return None
        matches = [members.find(key.decode("ascii", "replace")) for key in rows["key"]]
        if any(match is None or match[0] != subset for match in matches):
            return None
        plan = Plan(shard.name, [match[1] for match in matches if match is not None])
        return plan if read_mark(self.folder, plan) == shard else None

    def _link(self, shard: Shard, root: Path) -> Shard:
        """The shard, with its files in `root` too: as copies if the folders are on different disks."""
        for suffix in (".tar", ".npy", *SUFFIXES):
            name = shard.name.replace(".tar", suffix)
            source, target = self.folder / name, root / name
            if suffix in SUFFIXES and not source.exists():
                continue  # another program wrote the dataset
            if target.exists() and target.samefile(source):
                continue
            target.unlink(missing_ok=True)
            try:
                os.link(source, target)
            except OSError:
                with atomic_path(target) as temporary:
                    shutil.copyfile(source, temporary)
        return shard._replace(index_sha256=shard.index_sha256 or sha256_of_file(index_path(root, shard)))

    def next_number(self, stem: str) -> int:
        """The first number that no shard of it has: a name never means two shards."""
        pattern = re.compile(rf"{stem}-(\d+)\.tar")
        shards = [
            shard for subset in map(self.subset, (TRAINING, VALIDATION)) if subset for shard in subset.shards
        ]
        numbers = [int(match[1]) for shard in shards if (match := pattern.fullmatch(shard.name))]
        return max(numbers, default=-1) + 1


def _list_of(shards: Mapping[str, Shard], names: Iterable[str], more_images: int) -> dict[str, Any]:
    """The number of images and the names of some shards."""
    chosen = [shards[name] for name in sorted(names)]
    images = sum(shard.samples - len(shard.removed) for shard in chosen)
    return {"images": images + more_images, "shards": [shard.name for shard in chosen]}


def _read_keys(file: str) -> np.ndarray:
    """The keys, or whole SHA-256 hashes, in the lines of a file, sorted and different: S32."""
    keys = set()
    try:
        with open(file, encoding="utf-8-sig") as lines:
            for number, line in enumerate(bounded_lines(lines), 1):
                if not (word := line.strip().lower()):
                    continue
                if not _KEY.fullmatch(word):
                    raise UserError(
                        f"--remove {file}: line {number} is no key: give the key of an image, or the SHA-256 "
                        "of its file, on each line"
                    )
                keys.add(word[:KEY_DIGITS].encode())
    except OSError as error:
        raise UserError(f"--remove {file} cannot be read: {error.strerror}") from None
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"--remove {file} is no list of keys ({error}): give a text file") from None
    if not keys:
        raise UserError(f"--remove {file} has no key: give the key of an image on each line")
    return np.array(sorted(keys), "S32")


def contains(keys: np.ndarray, key: str) -> bool:
    """Whether sorted keys have this one."""
    wanted = np.bytes_(key.encode())
    at = int(np.searchsorted(keys, wanted))
    return at < len(keys) and keys[at] == wanted
