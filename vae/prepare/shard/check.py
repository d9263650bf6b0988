"""Checking of the files of a dataset of shards: which are good, and which --parent has already."""

import json
import os
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np

from vae.config.prepare_flags import ShardConfig
from vae.data.manifest import MANIFEST_NAME, read_rows
from vae.images.folder import OTHER_EXTENSIONS, walk_images
from vae.prepare.check_file import decode_each, hash_file, is_current, phash_of, record_checks
from vae.prepare.ledger import INPUT_DIR, KNOWN, REJECTED, Ledger, Result, Skips
from vae.prepare.output_dir import check_apart
from vae.prepare.pool import Failure
from vae.prepare.shard.members import ROW
from vae.prepare.shard.parent import ShardParent, contains
from vae.prepare.shard.write import HIDDEN, KEY_DIGITS
from vae.progress import Progress
from vae.system.errors import DataError


def check_listed(ledger: Ledger, config: ShardConfig, parent: ShardParent | None) -> None:
    """Bring the results of all listed files up to date."""
    note_listed(ledger, config, parent)
    known = parent.known_keys() if parent else np.zeros(0, "S32")
    _find_known(ledger, config, known)
    _check_all(ledger, config, known)


def image_names(config: ShardConfig, skips: Skips) -> Iterator[str]:
    """The names of all image files; DataError if there are none, although there is a folder."""
    if not config.input_dir:
        return iter(())
    check_apart(config.input_dir, config.output_dir)
    names = walk_images(config.input_dir, flag="--input_dir", extensions=OTHER_EXTENSIONS, on_skip=skips.add)
    first = next(names, None)
    if first is None:
        raise DataError(f"--input_dir {config.input_dir} contains no images: give another folder")
    return chain([first], names)


def note_listed(ledger: Ledger, config: ShardConfig, parent: ShardParent | None) -> None:
    """Note the rows of the manifest, drop results of files that are gone, and take over those of --parent."""
    manifest = Path(config.input_dir) / MANIFEST_NAME
    ledger.forget_notes(ROW)  # of a manifest that has changed, or is gone
    if manifest.is_file():
        for row in read_rows(manifest, flag="--input_dir"):
            ledger.note(ROW + row["path"], json.dumps(row))
    if config.limit is not None:
        ledger.list_files([name for name, _ in ledger.files(config.limit)])
    ledger.drop_unlisted()
    ledger.note(INPUT_DIR, os.path.realpath(config.input_dir))
    if parent and parent.is_whole:  # then its rules are the same
        ledger.inherit(parent.folder / HIDDEN / "ledger.sqlite")


def _find_known(ledger: Ledger, config: ShardConfig, known: np.ndarray) -> None:
    """Record which files are images of the parent, by their hashes: they are not decoded."""

    def unhashed() -> Iterator[str]:
        for name, _ in ledger.files():
            result = ledger.result(name)
            if not (result and is_current(result, os.path.join(config.input_dir, name))):
                yield name
            elif _is_known(result, known):
                ledger.record(result._replace(status=KNOWN, reason="", detail=""))

    if not len(known):
        return
    with (
        Progress("compare", None, "image") as bar,
        closing(decode_each(partial(hash_file, config), unhashed(), config)) as results,
    ):
        for _, result in results:
            bar.update()
            if not isinstance(result, Failure) and _is_known(result, known):
                ledger.record(result)


def _is_known(result: Result, known: np.ndarray) -> bool:
    return result.sha256 is not None and contains(known, result.sha256[:KEY_DIGITS])


def _check_all(ledger: Ledger, config: ShardConfig, known: np.ndarray) -> None:
    """Check the files that have no result, or have changed since."""
    while True:
        with Progress("check", ledger.count_files(), "image") as bar:
            record_checks(_to_check(ledger, config, known, bar), ledger, config, phash_of, bar)
        if not ledger.settle_duplicates():
            return  # else: the first of some duplicates no longer exists


def _to_check(ledger: Ledger, config: ShardConfig, known: np.ndarray, bar: Progress) -> Iterator[str]:
    """Names of the files whose result is missing or old; the others count as done."""
    for name, _ in ledger.files():
        result = ledger.result(name)
        is_complete = result is not None and (
            _is_known(result, known)
            if result.status == KNOWN
            else result.status == REJECTED or "phash" in result.record
        )
        if is_complete and is_current(result, os.path.join(config.input_dir, name)):
            bar.update()
        else:
            yield name
