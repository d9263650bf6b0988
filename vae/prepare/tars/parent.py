"""--parent of --mode index: a new version shares the indexes of its parent, and reads only new tar files."""

import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from vae.config.flags import command_words
from vae.config.prepare_flags import IndexConfig
from vae.prepare.shard.write import HIDDEN
from vae.prepare.tars.sources import Sources, find_sources
from vae.prepare.tars.write import CLAIM, FOLDERS, MAX_CLAIM_BYTES
from vae.prepare.versions import FLAG, Parent, link_or_copy
from vae.shards.dataset_json import ShardedDataset, read_dataset
from vae.shards.hashed_files import removed_content
from vae.shards.index import Shard, index_path, read_index
from vae.system.errors import DataError, UserError
from vae.system.files import read_json


class TarsParent(Parent):
    """A dataset of --mode index. `sources`: its tar files, then those of --input."""

    def __init__(self, config: IndexConfig, own_rules: dict[str, Any]):
        """DataError if it is no dataset, or on a remote store; UserError if it has other rules."""
        assert config.parent is not None
        dataset = read_dataset(config.parent, flag=FLAG)
        if dataset.tars is None:
            raise UserError(f"{FLAG} {config.parent} was made with --mode shard: use that mode")
        if not isinstance(dataset.path, Path):
            raise UserError(f"{FLAG} {config.parent}: copy the folder of dataset.json, without the tar files")
        _check_rules(dataset, config, own_rules)
        known = names_read(dataset)
        self.sources = find_sources(config.input, Sources(dataset.tars.rstrip("/"), known))
        self.known = self.sources.names[: len(known)]
        super().__init__(dataset, config.remove, self.known[0].removesuffix(known[0]))
        if not config.input:
            self.check_some_left(config.remove)

    def new_names(self) -> list[str]:
        """The tar files that were not read for it."""
        return self.sources.names[len(self.known) :]

    def claim(self) -> dict[str, Any]:
        """What a folder notes about the new version, besides its tar files and rules."""
        return {
            "parent": self.dataset.version,
            "known": self.known,
            "removed": removed_content(self.removed),
        }

    def link_all(self, root: Path, subset: str) -> Iterator[Shard]:
        """Link the indexes of a subset into `root`, but for those whose images are all removed."""
        dataset = self.subset(subset)
        for shard in self.shards(subset):
            assert dataset is not None
            if len(shard.removed) < shard.samples:
                self._check_tar(shard)
                link_or_copy(self.index_file(dataset, shard), index_path(root / FOLDERS[subset], shard))
                yield shard

    def _check_tar(self, shard: Shard) -> None:
        """DataError if a tar file on this machine is not the one that was read."""
        file = self.sources.file(shard.name)
        if isinstance(file, Path) and not (file.is_file() and file.stat().st_size == shard.bytes):
            raise DataError(
                f"{FLAG} {self.dataset.path}: {file} is missing or has changed: copy it again, or change "
                '"tars" in dataset.json and validation.json to where the tar files are'
            )

    def without_removed(self, root: Path, subset: str, shards: Sequence[Shard]) -> Iterator[Shard]:
        """New shards with the keys of their images that were removed before; none without other images."""
        gone = self.removed_keys()
        for shard in shards:
            if len(gone):
                rows = read_index(index_path(root / FOLDERS[subset], shard), shard)
                shard = shard._replace(removed=tuple(np.intersect1d(rows["key"], gone).tolist()))
            if len(shard.removed) < shard.samples:
                yield shard


def _check_rules(dataset: ShardedDataset, config: IndexConfig, own: dict[str, Any]) -> None:
    """UserError if the command has other rules than the dataset."""
    theirs, unset = dataset.policy, IndexConfig(input="", output_dir="")
    for name in own if not config.input else ():
        if name != "near_duplicates" and getattr(config, name) != getattr(unset, name):
            raise UserError(
                f"--{name} has no effect with --remove and without --input, the new tar files: leave it out"
            )
    different = {name: theirs.get(name) for name in own if theirs.get(name) != own[name]}
    if different and config.input:
        words = [word for name, value in different.items() if value is None for word in ("no", f"--{name}")]
        words += command_words({name: value for name, value in different.items() if value is not None})
        raise UserError(
            f"{FLAG} {config.parent} has images by other rules ({shlex.join(words)}): use those for all tar "
            "files, or give all of them as --input in a new folder, without --parent"
        )


def names_read(dataset: ShardedDataset) -> list[str]:
    """The tar files that were read for a dataset, also those without an allowed image."""
    assert isinstance(dataset.path, Path)
    folder = dataset.path.parent
    parts = [dataset]
    if dataset.validation:
        parts.append(read_dataset(folder / dataset.validation, flag=FLAG))
    names = dict.fromkeys(shard.name for part in parts for shard in part.shards)
    with suppress(OSError, ValueError, KeyError, TypeError):  # the note is no longer there
        noted = read_json(folder / HIDDEN / CLAIM, max_bytes=MAX_CLAIM_BYTES)
        known = set(noted.get("known", ()))
        for name in noted["tars"]:
            if name in known or (folder / HIDDEN / f"{name}.json").exists():
                names[name] = None
    return list(names)
