"""`--mode validate`: decode every file of a folder as the trainer does, and report the result."""

import os
import tempfile
import time
from contextlib import closing
from functools import partial
from pathlib import Path

from vae.config.prepare_flags import ValidateConfig
from vae.data.manifest import MANIFEST_NAME, read_rows
from vae.images.decoding import parse_background
from vae.images.folder import OTHER_EXTENSIONS, walk_images
from vae.prepare.check_file import check_file, decode_each, warn_without_simplejpeg
from vae.prepare.ledger import ACCEPTED, REJECTED, Ledger, Result, Skips
from vae.prepare.output_dir import check_output_file
from vae.prepare.pool import Failure
from vae.prepare.shard.verify import run_verify
from vae.prepare.validate.quarantine import move_rejected, undo
from vae.prepare.validate.report import Report, print_summary, write_reports
from vae.progress import Progress
from vae.shards.index import is_dataset
from vae.system import console
from vae.system.errors import EXIT_DATA, DataError, UserError

MANIFEST_HASH = "sha256 of "  # key of a note: the hash of a path in the manifest


def run_validate(config: ValidateConfig) -> int:
    """Validate a folder or empty a quarantine, and print a summary; returns the exit code.

    Raises DataError if there are no images, and UserError for unusable folders or flags.
    """
    if config.undo_quarantine:
        assert config.quarantine_dir is not None, "the flags were checked together"
        given = None if config.input_dir == os.devnull else config.input_dir  # see parse_prepare_flags
        moved, left = undo(config.quarantine_dir, given)
        console.info(f"{config.quarantine_dir}: {moved} files moved back, {left} left")
        return EXIT_DATA if left else 0
    warn_without_simplejpeg()
    check_output_file(config.output_file)
    if is_dataset(config.input_dir):
        return run_verify(config)
    if config.val_path:
        raise UserError(
            f"--val_path {config.val_path} is compared with a dataset of shards: give its dataset.json as "
            "--input_dir, or leave the flag out"
        )
    report = _validate(config)
    return EXIT_DATA if config.strict and report.rejected else 0


def _validate(config: ValidateConfig) -> Report:
    _check_paths(config)
    began = time.monotonic()
    skips = Skips()
    with tempfile.TemporaryDirectory(prefix="validate_") as scratch:
        ledger = Ledger(Path(scratch) / "ledger.sqlite")
        try:
            names = walk_images(
                config.input_dir, flag="--input_dir", extensions=OTHER_EXTENSIONS, on_skip=skips.add
            )
            count = ledger.list_files(names)
            if not count:
                raise DataError(f"--input_dir {config.input_dir} contains no images: give another folder")
            has_manifest = _read_manifest(ledger, config)
            _check_all(ledger, config, min(count, config.limit or count))
            ledger.settle_duplicates()
            report = Report(ledger, skips, config.input_dir, count, has_manifest, time.monotonic() - began)
            write_reports(report, config.output_file, config.csv)
            if config.quarantine_dir:
                report.moved = move_rejected(
                    ledger.results(REJECTED), config.input_dir, config.quarantine_dir
                )
            print_summary(report, config.output_file, config.csv)
            return report
        finally:
            ledger.close()


def _check_paths(config: ValidateConfig) -> None:
    parse_background(config.background)
    if config.quarantine_dir:
        here, there = (os.path.realpath(path) for path in (config.input_dir, config.quarantine_dir))
        if os.path.commonpath([here, there]) in (here, there):
            raise UserError(
                f"--quarantine_dir {config.quarantine_dir} and --input_dir {config.input_dir}: one is inside "
                "the other: give a folder outside"
            )


def _read_manifest(ledger: Ledger, config: ValidateConfig) -> bool:
    """Note the manifest's hash of each file; returns whether the folder has a manifest."""
    path = Path(config.input_dir) / MANIFEST_NAME
    if not path.is_file():
        return False
    for row in read_rows(path, flag="--input_dir"):
        ledger.note(MANIFEST_HASH + row["path"], row["sha256"])
        if config.limit is None and not os.path.lexists(os.path.join(config.input_dir, row["path"])):
            ledger.add_file(row["path"])
            ledger.record(
                Result(row["path"], REJECTED, "missing", "the manifest lists it, the folder lacks it")
            )
    return True


def _check_all(ledger: Ledger, config: ValidateConfig, total: int) -> None:
    bad = 0
    todo = (name for name, _ in ledger.files(config.limit) if ledger.result(name) is None)
    results = decode_each(partial(check_file, config), todo, config)
    with Progress("validate", total, "image") as bar, closing(results):
        for name, result in results:
            if isinstance(result, Failure):
                result = Result(name, REJECTED, *result)
            listed = ledger.noted(MANIFEST_HASH + name)
            if listed is not None and result.status == ACCEPTED and listed != result.sha256:
                changed = "its bytes differ from those in the manifest"
                result = result._replace(status=REJECTED, reason="changed_since_manifest", detail=changed)
            ledger.record(result)
            bad += result.status == REJECTED
            bar.update(note=f"{bad} bad")
