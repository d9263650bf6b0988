"""`--mode validate`: decode every file of a folder as the trainer does, and report the result."""

import json
import os
import time
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from vae.config.prepare_flags import ValidateConfig
from vae.data.manifest import MANIFEST_NAME, read_rows
from vae.images.decoding import parse_background
from vae.images.folder import OTHER_EXTENSIONS, walk_images
from vae.prepare.check_file import warn_without_simplejpeg
from vae.prepare.ledger import ACCEPTED, OF_PART, REJECTED, Ledger, Result, Skips
from vae.prepare.output_dir import check_output_file
from vae.prepare.parts import Part
from vae.prepare.report_parts import check_listed, merge_report, run_report
from vae.prepare.shard.verify import run_verify
from vae.prepare.validate.quarantine import move_rejected, undo
from vae.prepare.validate.report import Report, print_summary, write_reports
from vae.shards.dataset_json import is_dataset
from vae.system import console
from vae.system.errors import EXIT_DATA, DataError, UserError
from vae.system.files import parse_json

SKIPS, SECONDS = f"{OF_PART}skips", f"{OF_PART}seconds "  # keys of notes


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
        if config.part:
            raise UserError(
                f"--part {config.part} divides a folder of image files, not a dataset of shards: leave it out"
            )
        return run_verify(config)
    if config.val_path:
        raise UserError(
            f"--val_path {config.val_path} is compared with a dataset of shards: give its dataset.json as "
            "--input_dir, or leave the flag out"
        )
    _check_paths(config)
    return run_report(config, partial(_check, config), partial(_report, config))


def merge_validate(config: ValidateConfig, count: int) -> int:
    """Report on the files that so many parts have checked; returns the exit code."""
    return merge_report(config, count, partial(_report, config))


def _check(config: ValidateConfig, ledger: Ledger, part: Part | None) -> None:
    """Check all files, or those of a part, and note what was skipped and the time."""
    began, skips = time.monotonic(), Skips()
    names = walk_images(config.input_dir, flag="--input_dir", extensions=OTHER_EXTENSIONS, on_skip=skips.add)
    first = next(names, None)
    if first is None:
        raise DataError(f"--input_dir {config.input_dir} contains no images: give another folder")
    for _ in _manifest_rows(config):
        pass  # a damaged manifest is an error now, not after hours
    every = chain([first], names)
    ledger.list_files(filter(part.has, every) if part else every)
    ledger.note(SKIPS, json.dumps([skips.counts, skips.examples]))
    check_listed(ledger, config, "validate")
    key = f"{SECONDS}{part}"
    ledger.note(key, str(float(ledger.noted(key) or 0) + time.monotonic() - began))


def _report(config: ValidateConfig, ledger: Ledger, _folder: Path) -> int:
    count, skips = ledger.count_files(), Skips()
    counts, examples = parse_json(ledger.noted(SKIPS) or "")
    skips.counts.update(counts)
    skips.examples.update(examples)
    has_manifest = _compare_with_manifest(ledger, config)
    ledger.settle_duplicates()
    seconds = sum(map(float, ledger.notes(SECONDS)))
    report = Report(ledger, skips, config.input_dir, count, has_manifest, seconds)
    write_reports(report, config.output_file, config.csv)
    if config.quarantine_dir:
        report.moved = move_rejected(ledger.results(REJECTED), config.input_dir, config.quarantine_dir)
    print_summary(report, config.output_file, config.csv)
    return EXIT_DATA if config.strict and report.rejected else 0


def _check_paths(config: ValidateConfig) -> None:
    parse_background(config.background)
    if config.quarantine_dir:
        here, there = (os.path.realpath(path) for path in (config.input_dir, config.quarantine_dir))
        if os.path.commonpath([here, there]) in (here, there):
            raise UserError(
                f"--quarantine_dir {config.quarantine_dir} and --input_dir {config.input_dir}: one is inside "
                "the other: give a folder outside"
            )


def _manifest_rows(config: ValidateConfig) -> Iterator[dict[str, Any]]:
    """The rows of the folder's manifest; none without one."""
    path = Path(config.input_dir) / MANIFEST_NAME
    return read_rows(path, flag="--input_dir") if path.is_file() else iter(())


def _compare_with_manifest(ledger: Ledger, config: ValidateConfig) -> bool:
    """Reject what differs from the folder's manifest; returns whether it has one."""
    for row in _manifest_rows(config):
        result, name = ledger.result(row["path"]), row["path"]
        if (
            result is None
            and config.limit is None
            and not os.path.lexists(os.path.join(config.input_dir, name))
        ):
            ledger.add_file(name)
            ledger.record(Result(name, REJECTED, "missing", "the manifest lists it, the folder lacks it"))
        elif result is not None and result.status == ACCEPTED and result.sha256 != row["sha256"]:
            changed = "its bytes differ from those in the manifest"
            ledger.record(result._replace(status=REJECTED, reason="changed_since_manifest", detail=changed))
    return (Path(config.input_dir) / MANIFEST_NAME).is_file()
