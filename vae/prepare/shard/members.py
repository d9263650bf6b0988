"""Which images a dataset has, in which subset each of them is, and what its JSON file says about it."""

import json
import os
from array import array
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from vae.config.prepare_flags import ShardConfig
from vae.images.folder import count_lowest
from vae.images.formats import EXTENSIONS_OF
from vae.prepare.ledger import REJECTED, Ledger, Result
from vae.prepare.shard.groups import Groups, hash_number, split_groups
from vae.prepare.shard.write import KEY_DIGITS, Member
from vae.system import console
from vae.system.errors import UserError
from vae.system.files import parse_json

TRAINING, VALIDATION = "dataset.json", "validation.json"  # the subsets, as the files of their datasets
OWN_COLUMNS = {"path", "sha256", "width", "height", "source", "flags", "split", "fold"}  # of a manifest
ROW = "row "  # key of a note: the manifest's columns of a path

Rule = Callable[[Result], bool]  # whether an image is for validation
Hashes = Callable[[str], Iterator[np.ndarray]]  # perceptual hashes of a subset, in parts of (N, 2)


class Members:
    """The accepted images of a ledger as members of shards, read as they are needed."""

    def __init__(self, ledger: Ledger, config: ShardConfig, scratch: Path, old: Hashes | None = None):
        """UserError if a manifest separates images that look alike. `scratch`: a file for hashes.

        `old`: of images that the dataset has besides. Those that look like them are in their subset.
        """
        self._ledger, self._config, self._old = ledger, config, old
        self._is_held_out = self._rule(scratch)

    def __iter__(self) -> Iterator[tuple[str, Member]]:
        """All images with the subset of each, in the order of their hashes."""
        return map(self._with_subset, self._ledger.accepted_by_hash())

    def find(self, key: str) -> tuple[str, Member] | None:
        """The image with a key, and its subset; None if it is not accepted."""
        result = self._ledger.accepted_with_hash(key)
        return None if result is None else self._with_subset(result)

    def survey(self) -> tuple[str, dict[str, int]]:
        """A hash of the content that all shards will have, and the number of images of each subset."""
        digest, samples = sha256(), {TRAINING: 0, VALIDATION: 0}
        for subset, member in self:
            digest.update(f"{subset} {member.describe()}\n".encode())
            samples[subset] += 1
        return digest.hexdigest(), samples

    def _with_subset(self, result: Result) -> tuple[str, Member]:
        subset = VALIDATION if self._is_held_out(result) else TRAINING
        return subset, _member(result, self._row(result), self._config)

    def _row(self, result: Result) -> dict[str, Any]:
        """The row of the manifest; empty without one."""
        return parse_json(self._ledger.noted(ROW + result.name) or "{}")

    def _rule(self, scratch: Path) -> Rule:
        """The subsets that the manifest assigns, if it was split; else a share by hash.

        Images that look alike are in one subset.
        """

        def in_manifest(result: Result) -> bool:
            return self._row(result).get("split") == "val"

        if next(self._ledger.accepted_by_hash(), None) is None:
            return in_manifest
        by_manifest = any(self._row(result).get("split") for result in self._ledger.accepted_by_hash())
        if not (by_manifest or self._config.val_split or self._old):
            return lambda _result: False
        groups = Groups(self._ledger, scratch) if self._config.near_duplicates else None
        if groups and self._old:
            return self._rule_beside(groups, self._old, in_manifest if by_manifest else None)
        if by_manifest:
            if groups:
                self._refuse_split_groups(groups, in_manifest)
            return in_manifest
        if groups:
            chosen = groups.held_out(self._config.val_split)
            return lambda result: bool(chosen[groups.group(result)])
        numbers = array("Q", map(hash_number, self._ledger.accepted_by_hash()))  # 8 bytes per image
        lowest = count_lowest(numbers, self._config.val_split)
        limit = numbers[lowest - 1] if lowest else -1
        return lambda result: hash_number(result) <= limit

    def _rule_beside(self, groups: Groups, old: Hashes, by_manifest: Rule | None) -> Rule:
        """As `_rule`: a group that looks like old images is in their subset.

        Of a group that looks like both subsets, the images that look like validation images are left out.
        """
        near = {subset: groups.near(old(subset)) for subset in (TRAINING, VALIDATION)}
        trains, validates = groups.touched(near[TRAINING]), groups.touched(near[VALIDATION])
        chosen = ~trains & (validates | groups.held_out(self._config.val_split))
        for result in self._ledger.accepted_by_hash():
            group = groups.group(result)
            if trains[group] and validates[group] and near[VALIDATION][groups.position(result)]:
                self._ledger.record(result._replace(status=REJECTED, reason="looks_like_both"))
        if by_manifest is None:
            return lambda result: bool(chosen[groups.group(result)])
        self._refuse_split_groups(groups, by_manifest, (trains, validates))
        return by_manifest

    def _refuse_split_groups(
        self, groups: Groups, rule: Rule, old: tuple[np.ndarray, np.ndarray] | None = None
    ) -> None:
        """`old`: which groups look like old images for training, and for validation."""
        results = self._ledger.accepted_by_hash
        names = split_groups(groups, lambda: ((one, rule(one)) for one in results()), old)
        if names:
            raise UserError(
                "--input_dir: its manifest has images that look alike in training and in validation, for "
                f"example {', '.join(names)}: run prepare_data.py --mode split --group_by "
                "near_duplicates, or allow it with --no-near_duplicates"
            )


def _member(result: Result, row: dict[str, Any], config: ShardConfig) -> Member:
    assert result.sha256 is not None, "accepted files have a hash"
    kind, size = result.record["format"], (result.record["width"], result.record["height"])
    metadata = {
        "key": result.sha256[:KEY_DIGITS],
        "width": size[0],
        "height": size[1],
        "type": f"image/{kind.lower()}",
        "flags": result.record["flags"],
        "source": console.printable(result.name),
        **{key: value for key, value in row.items() if key not in OWN_COLUMNS},
    }
    path = os.path.join(config.input_dir, result.name)
    extension = EXTENSIONS_OF[kind][0].lstrip(".")
    phash = result.record["phash"]
    return Member(path, result.sha256, extension, result.size, size, phash, json.dumps(metadata))
