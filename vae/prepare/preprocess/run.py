"""`--mode preprocess`: raw images in, a training set of one or several sizes out.

An image's result is on record before its files appear under their names. So what is there is finished, a
run that was killed goes on behind it, and its output does not tell that it was ever interrupted.
"""

import errno
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial

from tqdm import tqdm

from vae.config.errors import DataError, UserError
from vae.console import printable
from vae.data.folder import OTHER_EXTENSIONS, walk_images
from vae.prepare.check_file import PASSING, REMEDIES, limits_for
from vae.prepare.ledger import ACCEPTED, DUPLICATE, REJECTED, Ledger, Result, Skips, first_names
from vae.prepare.pool import Failure, count_workers, run_each
from vae.prepare.preprocess.convert import Recipe, convert_file
from vae.prepare.preprocess.naming import assign_outputs
from vae.prepare.preprocess.output_folder import OutputFolder

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class PreprocessOptions:
    """Flags of `--mode preprocess`."""

    input_dir: str
    output_dir: str
    recipe: Recipe
    limit: int | None = None
    num_workers: str = "auto"
    time_limit: float = 60.0
    memory_gib: float | None = None


@dataclass
class Outcome:
    """What a run has done."""

    written: int = 0  # images, of any number of sizes
    unchanged: int = 0
    accepted: int = 0
    duplicates: int = 0
    rejected: int = 0
    orphans: int = 0  # images of earlier runs whose source is gone
    seconds: float = 0.0
    reasons: list[tuple[str, int]] = field(default_factory=list)
    examples: dict[str, list[Result]] = field(default_factory=dict)
    skips: Skips = field(default_factory=Skips)


def preprocess(options: PreprocessOptions) -> Outcome:
    """Convert what is missing or changed and write the manifest; see Recipe for what is made of an image.

    Raises DataError when there are no images, UserError for folders that cannot be used or a full disk.
    """
    began = time.monotonic()
    folder = OutputFolder(options.output_dir, options.recipe)
    folder.check(options.input_dir)
    outcome = Outcome()
    names = walk_images(
        options.input_dir,
        flag="--input_dir",
        extensions=OTHER_EXTENSIONS,
        on_skip=outcome.skips.add,
    )
    first = next(names, None)
    if first is None:
        raise DataError(f"--input_dir {options.input_dir} holds no images: give another folder")
    try:
        folder.claim(options.input_dir)
        ledger = folder.open_ledger()
        try:
            _fill(ledger, folder, options, outcome, [first], names)
            folder.finish(ledger)
            _count(ledger, outcome)
        finally:
            ledger.close()
            folder.clear_scratch()
        folder.drop_ledger()
    except (OSError, sqlite3.OperationalError) as error:
        raise _explain(error, options.output_dir) from error
    outcome.seconds = time.monotonic() - began
    return outcome


def _explain(error: Exception, output_dir: str) -> UserError:
    full = getattr(error, "errno", None) in FULL_DISK or "full" in str(error)
    if full:
        return UserError(
            f"--output_dir {output_dir}: the disk is full: make room, then the same command goes on from here"
        )
    return UserError(
        f"--output_dir {output_dir} cannot be written: {getattr(error, 'strerror', None) or error}"
    )


def _fill(
    ledger: Ledger,
    folder: OutputFolder,
    options: PreprocessOptions,
    outcome: Outcome,
    first: list[str],
    others: Iterator[str],
) -> None:
    """Bring all results up to date."""

    def chain() -> Iterator[str]:
        yield from first
        yield from others

    found = ledger.list_files(chain())
    assign_outputs(ledger, options.recipe.extension)
    outcome.orphans = ledger.drop_unlisted()
    total = min(found, options.limit or found)
    with tqdm(total=total, unit="image", desc="preprocess", smoothing=0.05) as bar:
        while True:
            _convert_all(ledger, folder, options, outcome, bar)
            if not ledger.settle_duplicates():
                break
            bar.reset(total)  # a duplicate has lost its first: it is made after all
    for duplicate in ledger.results(DUPLICATE):
        folder.remove_files(ledger, duplicate)


def _convert_all(
    ledger: Ledger, folder: OutputFolder, options: PreprocessOptions, outcome: Outcome, bar: tqdm
) -> None:
    bad = 0

    def todo() -> Iterator[tuple[str, str]]:
        nonlocal bad
        outcome.unchanged = 0
        for name, output in first_names(ledger, options.limit):
            result = ledger.result(name)
            if result is not None and _is_current(result, output, folder, options.input_dir):
                outcome.unchanged += 1
                bad += result.status == REJECTED
                bar.update()
            else:
                yield name, output

    results = run_each(
        partial(convert_file, options.input_dir, folder.scratch, options.recipe),
        todo(),
        num_workers=count_workers(options.num_workers),
        limits=limits_for(options.recipe.rules, options.time_limit, options.memory_gib),
    )
    with closing(results):
        for (name, output), result in results:
            if isinstance(result, Failure):
                result = Result(name, REJECTED, *result, record={"output": output, "sizes": {}, "flags": []})
            folder.accept(ledger, result)
            bad += result.status == REJECTED
            outcome.written += result.status == ACCEPTED
            bar.set_postfix(bad=bad, refresh=False)
            bar.update()


def _is_current(result: Result, output: str, folder: OutputFolder, input_dir: str) -> bool:
    """Whether a file's result still holds: its source, its output's name, and the files that were made."""
    if result.record.get("output") != output or result.reason in PASSING:
        return False
    try:
        status = os.stat(os.path.join(input_dir, result.name))
    except OSError:
        return False
    if (status.st_size, status.st_mtime_ns) != (result.size, result.mtime_ns):
        return False
    return result.status != ACCEPTED or folder.has_files(result)


def _count(ledger: Ledger, outcome: Outcome) -> None:
    for status in (ACCEPTED, DUPLICATE, REJECTED):
        number = sum(count for _, count in ledger.counts(status))
        setattr(
            outcome, {ACCEPTED: "accepted", DUPLICATE: "duplicates", REJECTED: "rejected"}[status], number
        )
    outcome.reasons = ledger.counts(REJECTED)
    outcome.examples = {reason: ledger.examples(REJECTED, reason) for reason, _ in outcome.reasons}


def summarize(outcome: Outcome, output_dir: str) -> None:
    """Print what was done, grouped by reason with examples."""
    rate = (outcome.written + outcome.unchanged + outcome.rejected) / max(outcome.seconds, 1e-9)
    print(
        f"{printable(output_dir)}: {outcome.accepted} images, {outcome.written} converted now, "
        f"{outcome.rejected} rejected, {outcome.duplicates} exact duplicate{'s' * (outcome.duplicates != 1)} "
        f"({outcome.seconds:.1f} s, {rate:.1f} images/s)"
    )
    for reason, count in outcome.reasons:
        print(f"  rejected {count:>7}  {reason}: {REMEDIES.get(reason, 'copy it again or leave it out')}")
        for result in outcome.examples[reason][:3]:
            print(f"                    {printable(result.name)}: {printable(result.detail)}")
    for code, count in outcome.skips.counts.most_common():
        print(f"  skipped  {count:>7}  {code}: {printable(outcome.skips.examples[code][0])}")
    if outcome.orphans:
        print(f"  {outcome.orphans} sources are gone: their images stay, but not in the manifest")
    if not outcome.accepted:
        print("no image was accepted: mend what is listed above")
