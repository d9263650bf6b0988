"""`--mode validate`: every file of a folder decoded as the trainer would, and a report of what was found."""

import os
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tqdm import tqdm

from vae.config.errors import DataError, UserError
from vae.data.decoding import parse_background
from vae.data.folder import OTHER_EXTENSIONS, walk_images
from vae.data.formats import BadImageError
from vae.data.manifest import MANIFEST_NAME, read_rows
from vae.files import sha256_of_file
from vae.prepare.check_file import Rules, check_image, limits_for
from vae.prepare.ledger import ACCEPTED, REJECTED, Ledger, Result, Skips, first_names
from vae.prepare.pool import Failure, count_workers, run_each
from vae.prepare.validate.quarantine import move_rejected
from vae.prepare.validate.report import Report, write_reports

PROMISE = "sha256 of "  # key of a note: what the manifest says of a path


@dataclass(frozen=True)
class ValidateOptions:
    """Flags of `--mode validate`."""

    input_dir: str
    output_file: str = "validation_report.json"
    csv: bool = True
    quarantine_dir: str | None = None
    limit: int | None = None
    rules: Rules = Rules()  # noqa: RUF009 - frozen
    num_workers: str = "auto"
    time_limit: float = 60.0
    memory_gib: float | None = None


def validate(options: ValidateOptions) -> Report:
    """Decode every image, write the reports and, where asked, move what was rejected.

    Raises DataError when there is no image, UserError for folders or flags that cannot be used.
    """
    _check_options(options)
    began = time.monotonic()
    skips = Skips()
    with tempfile.TemporaryDirectory(prefix="validate_") as scratch:
        ledger = Ledger(Path(scratch) / "ledger.sqlite")
        try:
            names = walk_images(
                options.input_dir,
                flag="--input_dir",
                extensions=OTHER_EXTENSIONS,
                on_skip=skips.add,
            )
            found = ledger.list_files(names)
            if not found:
                raise DataError(f"--input_dir {options.input_dir} holds no images: give another folder")
            promised = _read_manifest(ledger, options)
            _check_all(ledger, options, min(found, options.limit or found))
            ledger.settle_duplicates()
            report = Report(ledger, skips, options.input_dir, found, promised, time.monotonic() - began)
            write_reports(report, options.output_file, options.csv)
            if options.quarantine_dir:
                moved = move_rejected(ledger.results(REJECTED), options.input_dir, options.quarantine_dir)
                report.moved = moved
            report.summarize()
            return report
        finally:
            ledger.close()


def _check_options(options: ValidateOptions) -> None:
    parse_background(options.rules.background)
    folder = Path(options.output_file).absolute().parent
    if not folder.is_dir():
        raise UserError(f"--output_file {options.output_file}: there is no folder {folder}: make it first")
    if options.quarantine_dir:
        here, there = (os.path.realpath(path) for path in (options.input_dir, options.quarantine_dir))
        if os.path.commonpath([here, there]) in (here, there):
            raise UserError(
                f"--quarantine_dir {options.quarantine_dir} and --input_dir lie in one another: "
                "give a folder beside it"
            )


def _read_manifest(ledger: Ledger, options: ValidateOptions) -> bool:
    """Note what the folder's manifest says of each file; returns whether there is one."""
    path = Path(options.input_dir) / MANIFEST_NAME
    if not path.is_file():
        return False
    for row in read_rows(path, flag="--input_dir"):
        ledger.note(PROMISE + row["path"], row["sha256"])
        if options.limit is None and not os.path.lexists(os.path.join(options.input_dir, row["path"])):
            ledger.add_file(row["path"])
            gone = Result(row["path"], REJECTED, "missing", "the manifest lists it, the folder lacks it")
            ledger.record(gone)
    return True


def _check_all(ledger: Ledger, options: ValidateOptions, total: int) -> None:
    check = partial(check_file, options.input_dir, options.rules)
    bad = 0
    todo = (name for name, _ in first_names(ledger, options.limit) if ledger.result(name) is None)
    results = run_each(
        check,
        todo,
        num_workers=count_workers(options.num_workers),
        limits=limits_for(options.rules, options.time_limit, options.memory_gib),
    )
    with tqdm(total=total, unit="image", desc="validate", smoothing=0.05) as bar, closing(results):
        for name, result in results:
            if isinstance(result, Failure):
                result = Result(name, REJECTED, *result)
            promise = ledger.noted(PROMISE + name)
            if promise is not None and result.status == ACCEPTED and promise != result.sha256:
                changed = "its bytes are not those of the manifest"
                result = result._replace(status=REJECTED, reason="changed_since_manifest", detail=changed)
            ledger.record(result)
            bad += result.status == REJECTED
            bar.set_postfix(bad=bad, refresh=False)
            bar.update()


def check_file(input_dir: str, rules: Rules, name: str) -> Result:
    """The result of one file: accepted with what it is, or rejected with the reason."""
    path = os.path.join(input_dir, name)
    size = 0
    try:
        image = check_image(path, rules)
        size, digest = os.path.getsize(path), sha256_of_file(path)
    except BadImageError as error:
        return Result(name, REJECTED, error.reason, error.detail, size=_size_of(path))
    except OSError as error:  # it went away between two looks
        return Result(name, REJECTED, "unreadable", error.strerror or str(error))
    height, width = image.pixels.shape[:2]
    record = {"format": image.format, "width": width, "height": height, "flags": list(image.flags)}
    return Result(name, ACCEPTED, size=size, sha256=digest, record=record)


def _size_of(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError:
        return 0
