"""--parent: a new version of a dataset has the unchanged shards of the one before it, as links to its files.

A shard is unchanged if all of its images are accepted, in the same subset, with the same JSON files.
"""

import os
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vae.images.formats import BadImageError
from vae.prepare.shard.engines import SUFFIXES
from vae.prepare.shard.members import TRAINING, VALIDATION, Members
from vae.prepare.shard.write import Member, Plan, read_mark, write_mark
from vae.shards.index import Shard, ShardedDataset, read_dataset, read_index
from vae.system import console

FILES = (".tar", ".npy", *SUFFIXES)  # of a shard


class Kept(NamedTuple):
    """The shards of a subset that are those of the parent."""

    shards: list[Shard]
    keys: np.ndarray  # of their images, sorted: S32

    def contains(self, member: Member) -> bool:
        """Whether one of them has this image."""
        key = np.bytes_(member.key.encode())
        at = int(np.searchsorted(self.keys, key))
        return at < len(self.keys) and self.keys[at] == key


class Parent:
    """The dataset of --parent."""

    def __init__(self, path: str):
        """DataError if it is no dataset, or is on a remote store."""
        self.dataset = read_dataset(path, flag="--parent")
        self.folder = self.dataset.folder

    def subset(self, name: str) -> ShardedDataset | None:
        """The part of it that is `name`; None if it has none."""
        if name == TRAINING:
            return self.dataset
        other = self.dataset.validation
        return read_dataset(self.folder / other, flag="--parent") if other else None

    def link_unchanged(self, root: Path, subset: str, members: Members, min_bytes: float) -> Kept:
        """Link the unchanged shards of a subset into `root`; smaller ones than this are packed again."""
        kept, keys, dataset = [], [np.zeros(0, "S32")], self.subset(subset)
        for shard in dataset.shards if dataset else ():
            plan = self._plan(shard, subset, members) if shard.bytes >= min_bytes else None
            if plan is not None and self._link(shard, root):
                write_mark(root, plan, shard)
                kept.append(shard)
                keys.append(np.array([member.key.encode() for member in plan.members], "S32"))
        return Kept(kept, np.sort(np.concatenate(keys)))

    def _plan(self, shard: Shard, subset: str, members: Members) -> Plan | None:
        """The plan that this shard would have now, if it is the one that it was written from."""
        try:
            rows = read_index(self.folder, shard)
        except BadImageError:
            return None
        matches = [members.find(key.decode("ascii", "replace")) for key in rows["key"]]
        if any(match is None or match[0] != subset for match in matches):
            return None
        plan = Plan(shard.name, [match[1] for match in matches if match is not None])
        return plan if read_mark(self.folder, plan) == shard else None

    def _link(self, shard: Shard, root: Path) -> bool:
        """Whether the files of a shard are now in `root` too; not if the folders are on different disks."""
        stem = shard.name.removesuffix(".tar")
        try:
            for suffix in FILES:
                source, target = self.folder / f"{stem}{suffix}", root / f"{stem}{suffix}"
                if not (target.exists() and target.samefile(source)):
                    target.unlink(missing_ok=True)
                    os.link(source, target)
        except OSError as error:
            console.info(f"{shard.name} is written again: it cannot be linked ({error.strerror})")
            return False
        return True

    def next_number(self, stem: str) -> int:
        """The first number that no shard of it has: a name never means two shards."""
        pattern = re.compile(rf"{stem}-(\d+)\.tar")
        shards = [
            shard for subset in map(self.subset, (TRAINING, VALIDATION)) if subset for shard in subset.shards
        ]
        numbers = [int(match[1]) for shard in shards if (match := pattern.fullmatch(shard.name))]
        return max(numbers, default=-1) + 1
