"""`--mode preprocess`: convert raw image files to a training set of one or several sizes.

A result is recorded before its files get their final names. Every file with a final name is therefore
complete. A killed run continues after the recorded results, and its output does not show the interruption.
"""

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

from vae.config.prepare_flags import PreprocessConfig
from vae.images.folder import OTHER_EXTENSIONS, walk_images
from vae.prepare.check_file import decode_each, is_current, warn_without_simplejpeg
from vae.prepare.encode import EXTENSIONS
from vae.prepare.ledger import (
    ACCEPTED,
    DUPLICATE,
    EXACT_DUPLICATE,
    NEAR_DUPLICATE,
    REJECTED,
    Ledger,
    Result,
    Skips,
)
from vae.prepare.output_dir import check_apart, write_error
from vae.prepare.parts import Part, complete_part, join_parts, merge_line, part_of, parts_folder
from vae.prepare.pool import Failure
from vae.prepare.preprocess.convert import convert_file, record_without_images
from vae.prepare.preprocess.duplicates import (
    drop_near_duplicates,
    find_contents,
    find_fingerprints,
    is_first,
    join_fingerprints,
    result_of_first,
)
from vae.prepare.preprocess.naming import assign_outputs
from vae.prepare.preprocess.output_folder import REJECTED_NAME, OutputFolder
from vae.prepare.preprocess.resize import engine
from vae.prepare.rejections import duplicates_text, rejection_lines, skip_lines
from vae.progress import Progress
from vae.system import console
from vae.system.errors import EXIT_DATA, DataError


@dataclass
class FileCounts:
    """What a run has done."""

    written: int = 0  # images, each in one or several sizes
    unchanged: int = 0
    accepted: int = 0
    duplicates: int = 0  # exact ones
    near_duplicates: int = 0
    rejected: int = 0
    orphans: int = 0  # images of earlier runs whose source no longer exists
    seconds: float = 0.0
    rejections: list[str] = field(default_factory=list)  # lines of the summary
    skips: Skips = field(default_factory=Skips)


def run_preprocess(config: PreprocessConfig) -> int:
    """Convert the missing and changed images and print a summary; returns the exit code.

    Raises DataError if there are no images, and UserError for unusable folders or a full disk.
    """
    warn_without_simplejpeg()
    if engine() == "Pillow":
        console.warning(
            "pyvips is not installed: Pillow resizes instead, with the same quality, in 7x the time; "
            "python -m pip install pyvips-binary pyvips"
        )
    return _preprocess(config, part_of(config))


def merge_preprocess(config: PreprocessConfig, count: int) -> int:
    """Join the results of all parts, write the manifest and print a summary; returns the exit code."""
    return _preprocess(config, None, parts=count)


def _preprocess(config: PreprocessConfig, part: Part | None, *, parts: int = 0) -> int:
    """All images, those of a part, or those that so many parts have converted."""
    began = time.monotonic()
    folder = OutputFolder(config, part)
    check_apart(config.input_dir, config.output_dir)
    outcome = FileCounts()
    names = iter(()) if parts else _image_names(config, outcome)
    try:
        folder.claim()
        ledger = folder.open_ledger()
        try:
            if parts:
                join_parts(ledger, parts_folder(config), parts)
                if config.drop_duplicates:
                    join_fingerprints(folder, parts)
            else:
                ledger.list_files(filter(part.has, names) if part else names)
            _update(ledger, folder, config, outcome, is_part=part is not None)
            if part:
                complete_part(ledger)
            else:
                folder.finish(ledger)
            _count(ledger, outcome)
        finally:
            ledger.close()
            folder.clear_scratch()
        if not part:
            folder.drop_ledger()
    except (OSError, sqlite3.OperationalError) as error:
        raise write_error(error, config.output_dir) from error
    outcome.seconds = time.monotonic() - began
    _print_summary(outcome, config, part)
    return 0 if part or outcome.accepted else EXIT_DATA


def _image_names(config: PreprocessConfig, outcome: FileCounts) -> Iterator[str]:
    """The names of all image files; DataError if there are none."""
    names = walk_images(
        config.input_dir, flag="--input_dir", extensions=OTHER_EXTENSIONS, on_skip=outcome.skips.add
    )
    first = next(names, None)
    if first is None:
        raise DataError(f"--input_dir {config.input_dir} contains no images: give another folder")
    return chain([first], names)


def _update(
    ledger: Ledger, folder: OutputFolder, config: PreprocessConfig, outcome: FileCounts, *, is_part: bool
) -> None:
    """Bring the results of all listed files up to date."""
    count = ledger.count_files()
    assign_outputs(ledger, EXTENSIONS[config.format])
    unlisted = ledger.drop_unlisted()
    outcome.orphans = 0 if is_part else unlisted
    total = min(count, config.limit or count)
    while True:
        find_contents(ledger, config, partial(_is_current, folder, config))
        outcome.unchanged = total - ledger.count_pending()
        with Progress("preprocess", total, "image", done=outcome.unchanged) as bar:
            for firsts in (True, False):
                _convert_all(ledger, folder, config, outcome, bar, firsts)
        lost = ledger.settle_duplicates()
        if config.drop_duplicates and not lost:
            folder.fingerprints.mkdir(exist_ok=True)
            if is_part:  # the groups are known when all parts are
                find_fingerprints(ledger, config, folder)
            else:
                lost = drop_near_duplicates(ledger, config, folder)
        if not lost:
            break  # else: what a duplicate was a duplicate of no longer exists, so it is converted itself
    for duplicate in ledger.results(DUPLICATE):
        if duplicate.record["sizes"]:  # it was converted before its first file existed
            folder.remove_files(duplicate)
            ledger.record(duplicate._replace(record=record_without_images(duplicate.record["output"])))


def _convert_all(
    ledger: Ledger,
    folder: OutputFolder,
    config: PreprocessConfig,
    outcome: FileCounts,
    bar: Progress,
    firsts: bool,
) -> None:
    """Convert the pending files that are the first of their content, or give the others the same result."""

    def finish(result: Result) -> None:
        folder.accept(ledger, result)
        outcome.written += result.status == ACCEPTED
        outcome.rejected += result.status == REJECTED
        bar.update(note=f"{outcome.rejected} bad")

    def to_convert() -> Iterator[tuple[str, str]]:
        for content in ledger.pending():
            if is_first(ledger, content) is not firsts:
                continue
            output = ledger.output_of(content.name)
            result = None if firsts else result_of_first(ledger, content, output)
            if result is None:
                yield content.name, output
            else:
                finish(result)

    results = decode_each(partial(convert_file, config, folder.scratch), to_convert(), config)
    with closing(results):
        for (name, output), result in results:
            if isinstance(result, Failure):
                result = Result(name, REJECTED, *result, record=record_without_images(output))
            finish(result)


def _is_current(folder: OutputFolder, config: PreprocessConfig, result: Result, output: str) -> bool:
    """Whether a result is still valid: its source, its output name, and the files that were written."""
    source = os.path.join(config.input_dir, result.name)
    if result.record.get("output") != output or not is_current(result, source):
        return False
    if result.reason == NEAR_DUPLICATE and not config.drop_duplicates:
        return False
    return result.status != ACCEPTED or folder.has_files(result)


def _count(ledger: Ledger, outcome: FileCounts) -> None:
    outcome.accepted = sum(count for _, count in ledger.counts(ACCEPTED))
    outcome.rejected = sum(count for _, count in ledger.counts(REJECTED))
    duplicates = dict(ledger.counts(DUPLICATE))
    outcome.duplicates = duplicates.get(EXACT_DUPLICATE, 0)
    outcome.near_duplicates = duplicates.get(NEAR_DUPLICATE, 0)
    outcome.rejections = list(rejection_lines(ledger))


def _print_summary(outcome: FileCounts, config: PreprocessConfig, part: Part | None) -> None:
    title = f"part {part}: " if part else ""
    rate = (outcome.written + outcome.unchanged + outcome.rejected) / max(outcome.seconds, 1e-9)
    lines = [
        f"{console.printable(config.output_dir)}: {title}{outcome.accepted} images, {outcome.written} "
        f"converted now, {outcome.rejected} rejected, {duplicates_text(outcome.duplicates)} "
        f"({outcome.seconds:.1f} s, {rate:.1f} images/s)",
        *outcome.rejections,
        *skip_lines(outcome.skips),
    ]
    if outcome.near_duplicates:
        lines.append(f"  dropped  {outcome.near_duplicates:>7}  near_duplicate: listed in {REJECTED_NAME}")
    if outcome.orphans:
        lines.append(
            f"  {outcome.orphans} sources no longer exist: their images stay, but are not in the manifest"
        )
    if part:
        lines.append(merge_line(config))
    elif not outcome.accepted:
        lines.append("no image was accepted: fix the problems listed above")
    console.info("\n".join(lines))
