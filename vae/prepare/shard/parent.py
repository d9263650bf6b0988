"""--parent of --mode shard: a new version has the shards of the one before it, as links to its files.

With --drop, only the unchanged ones: all of their images are still accepted, in the same subset, and with the
same JSON files. With --remove, some images no longer belong to the dataset, although its shards have them.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vae.config.flags import command_words
from vae.config.prepare_flags import ShardConfig
from vae.images.formats import BadImageError
from vae.prepare.shard.engines import SUFFIXES
from vae.prepare.shard.members import TRAINING, VALIDATION, Members
from vae.prepare.shard.shared import MIN_ROWS, parts, phashes_of
from vae.prepare.shard.write import Member, Plan, copy_mark, read_mark, write_mark
from vae.prepare.versions import Parent, link_or_copy
from vae.shards.dataset_json import read_dataset
from vae.shards.index import Shard, index_path, read_index
from vae.system.errors import DataError, UserError
from vae.system.files import sha256_of_file

RULES = ("min_size", "max_aspect", "max_pixels", "background", "first_frame", "near_duplicates")


class Kept(NamedTuple):
    """The shards of a subset that are those of the parent."""

    shards: list[Shard]
    keys: np.ndarray  # of their images, sorted: S32

    def contains(self, member: Member) -> bool:
        """Whether one of them has this image."""
        return contains(self.keys, member.key)


class ShardParent(Parent):
    """A dataset of --mode shard."""

    def __init__(self, config: ShardConfig):
        """DataError if it is no dataset, or is on a remote store; UserError if it has other rules."""
        assert config.parent is not None
        dataset = read_dataset(config.parent, flag="--parent")
        self.is_whole = not config.drop
        if dataset.tars is not None:
            raise UserError(f"--parent {config.parent} was made with --mode index: use that mode")
        _ = dataset.folder  # not on a remote store
        self.policy = theirs = dataset.policy
        own = {name: getattr(config, name) for name in RULES}
        different = {name: theirs[name] for name in RULES if theirs.get(name) not in (None, own[name])}
        if self.is_whole and different and config.input_dir:
            raise UserError(
                f"--parent {config.parent} has images by other rules ({' '.join(command_words(different))}): "
                "use those, or leave out its images that --input_dir does not have with --drop"
            )
        super().__init__(dataset, config.remove)
        if self.is_whole:
            self.check_some_left(config.remove)

    def known_keys(self) -> np.ndarray:
        """The keys of images that are not added: those that it has or has removed, sorted: S32."""
        keys = [self.removed_keys()]
        if self.is_whole:
            keys += [rows["key"] for subset in (TRAINING, VALIDATION) for rows in self.rows(subset)]
        return np.sort(np.concatenate(keys))

    def phashes(self, subset: str) -> Iterator[np.ndarray]:
        """The perceptual hashes of a subset's images, in parts of (N, 2)."""
        return map(phashes_of, parts(self.rows(subset), MIN_ROWS))

    def link_all(self, root: Path, subset: str) -> list[Shard]:
        """Link the shards of a subset into `root`, but for those whose images are all removed."""
        shards = []
        for shard in self.shards(subset):
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
            link_or_copy(source, target)
        return shard._replace(index_sha256=shard.index_sha256 or sha256_of_file(index_path(root, shard)))

    def next_number(self, stem: str) -> int:
        """The first number that no shard of it has: a name never means two shards."""
        pattern = re.compile(rf"{stem}-(\d+)\.tar")
        shards = [
            shard for subset in map(self.subset, (TRAINING, VALIDATION)) if subset for shard in subset.shards
        ]
        numbers = [int(match[1]) for shard in shards if (match := pattern.fullmatch(shard.name))]
        return max(numbers, default=-1) + 1


def contains(keys: np.ndarray, key: str) -> bool:
    """Whether sorted keys have this one."""
    wanted = np.bytes_(key.encode())
    at = int(np.searchsorted(keys, wanted))
    return at < len(keys) and keys[at] == wanted
