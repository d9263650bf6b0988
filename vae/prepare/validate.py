"""`--mode validate`: decode every image as the trainer does, and report those that cannot be used."""

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vae.config.prepare_flags import ReadingConfig, ValidateConfig
from vae.data.manifest import MANIFEST_NAME, read_rows
from vae.images.decoding import parse_background
from vae.prepare.blocks import FileBlock, Source, open_source
from vae.prepare.check import Check, image_limits, utf8_text, warn_without_simplejpeg
from vae.prepare.folders import check_apart, check_output_file, output_folder, write_error
from vae.prepare.quarantine import move_rejected, undo
from vae.prepare.reasons import NOT_REJECTED, duplicates_text, reason_lines, remedy, skip_lines
from vae.prepare.rows import RowFolder, parse_part
from vae.prepare.selection import drop_exact
from vae.prepare.table import Table
from vae.prepare.verify import run_verify
from vae.shards.dataset_json import is_dataset
from vae.system import console
from vae.system.addresses import is_remote
from vae.system.console import printable
from vae.system.errors import EXIT_DATA, UserError
from vae.system.files import replace_text, write_csv_rows

EXAMPLES = 6  # files named per reason in the report
COLUMNS = ("path", "status", "reason", "detail", "flags", "format", "width", "height", "bytes", "sha256")
RULES = ("image_column", "background", "min_size", "max_aspect", "max_pixels", "first_frame")
_STATUS = (
    "CASE WHEN reason = '' THEN 'accepted' WHEN reason = 'exact_duplicate' THEN 'duplicate' "
    "ELSE 'rejected' END"
)


def rules_of(config: ReadingConfig, source: Source, *names: str) -> dict[str, Any]:
    """The settings that decide the rows of a job."""
    rules = {name: getattr(config, name) for name in (*RULES, *names)}
    return {"input_dir": source.text, **rules}


def run_validate(config: ValidateConfig) -> int:
    """Validate images or empty a quarantine, and print a summary; returns the exit code.

    DataError if there are no images, and UserError for unusable folders or flags.
    """
    if config.undo_quarantine:
        assert config.quarantine_dir is not None, "the flags were checked together"
        moved, left = undo(config.quarantine_dir, config.input_dir)
        console.info(f"{config.quarantine_dir}: {moved} files moved back, {left} left")
        return EXIT_DATA if left else 0
    warn_without_simplejpeg()
    check_output_file(config.output_file, "--output_file", overwrite=config.overwrite)
    if config.csv_file:
        check_output_file(config.csv_file, "--csv_file", overwrite=config.overwrite)
    if is_dataset(config.input_dir) and config.input_dir.lower().partition("?")[0].endswith(".json"):
        return run_verify(config)
    if config.val_path:
        raise UserError(
            f"--val_path {config.val_path} is compared with a dataset of shards: give its dataset.json as "
            "--input_dir, or leave the flag out"
        )
    parse_background(config.background)
    return _validate_images(config)


def _validate_images(config: ValidateConfig) -> int:
    began, part = time.monotonic(), parse_part(config.part)
    source = open_source(config.input_dir, "--input_dir", config.limit, config.image_column)
    if config.quarantine_dir:
        if source.folder is None:
            raise UserError(
                f"--quarantine_dir {config.quarantine_dir} needs a folder of image files as --input_dir: "
                "leave it out"
            )
        check_apart(config.input_dir, config.quarantine_dir, "--quarantine_dir")
    list(manifest_rows(source))  # a damaged manifest is an error now, not after hours
    with ExitStack() as stack:
        if config.rows_dir:
            check_apart(config.input_dir, config.rows_dir, "--rows_dir")
            root = stack.enter_context(output_folder(config.rows_dir, "validate", "--rows_dir"))
        else:
            root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vae-trainer-")))
        owner = f"--rows_dir {config.rows_dir}"
        folder = stack.enter_context(RowFolder(root, owner, rules_of(config, source), part).claimed())
        check = Check(config)
        folder.run(
            source,
            check,
            config.num_workers,
            image_limits(config),
            seconds=config.time_limit,
            title="validate",
        )
        if config.part:
            console.info(part_line(config.part, source, folder))
            return 0
        table = Table(folder, source.blocks, folder.scratch)
        has_manifest = compare_with_manifest(table, source, config.limit is None)
        drop_exact(table)
        report = Report(table, source, has_manifest, time.monotonic() - began)
        try:
            replace_text(Path(config.output_file), report.json_parts())
            if config.csv_file:
                write_csv_rows(Path(config.csv_file), report.csv_rows())
        except OSError as error:
            raise write_error(error, config.output_file, "--output_file") from error
        moved = None
        if config.quarantine_dir:
            moved = move_rejected(_files_to_move(table), config.input_dir, config.quarantine_dir)
        console.info("\n".join(_summary_lines(report, config, moved)))
        return EXIT_DATA if config.strict and report.rejected else 0


def part_line(part: str, source: Source, folder: RowFolder) -> str:
    """The summary of a part."""
    done, total = sum(map(folder.has, source.blocks)), len(source.blocks)
    return (
        f"part {part} is complete: {done} of {total} blocks are done\n"
        "  when all parts are complete: the same command without --part"
    )


def manifest_rows(source: Source) -> Iterator[dict[str, Any]]:
    """The rows of the manifest in a folder of image files; none without one."""
    if source.folder is None or is_remote(source.folder):
        return
    path = Path(source.folder) / MANIFEST_NAME
    if path.is_file():
        yield from read_rows(path, flag="--input_dir")


def compare_with_manifest(table: Table, source: Source, is_whole: bool) -> bool:
    """Reject what differs from the folder's manifest; returns whether it has one."""
    rows = (
        {"path": utf8_text(row["path"]), "sha256": utf8_text(row["sha256"])} for row in manifest_rows(source)
    )
    table.lines("listed", rows, {"path": "VARCHAR", "sha256": "VARCHAR"})
    table.run(
        "UPDATE images SET reason = 'changed_since_manifest', detail = 'its bytes differ from those in the "
        "manifest' FROM listed l WHERE images.reason = '' AND images.name = l.path AND images.sha256 <> "
        "l.sha256"
    )
    if is_whole and source.folder is not None:
        names = [
            n for (n,) in table.all("SELECT path FROM listed ANTI JOIN images ON name = path ORDER BY path")
        ]
        for name in names:
            if not os.path.lexists(os.path.join(source.folder, name)):
                table.run(
                    "INSERT INTO images (n, block, number, name, reason, detail, flags) "
                    "SELECT max(n) + 1, -1, 0, ?, 'missing', 'the manifest lists it, the folder lacks it', "
                    "[] "
                    "FROM images",
                    name,
                )
    return source.folder is not None and (Path(source.folder) / MANIFEST_NAME).is_file()


def _files_to_move(table: Table) -> Iterator[tuple[str, str, str]]:
    """Rejected files, with the names that the folder has them under."""
    rejected = f"reason NOT IN {('', *NOT_REJECTED)!r}"
    query = f"SELECT block, number, reason, detail FROM images WHERE {rejected} ORDER BY n"
    for block, at, reason, detail in table.all(query):
        if block >= 0:
            slice_of = table.blocks[block]
            assert isinstance(slice_of, FileBlock)
            yield slice_of.names[at], reason, detail


@dataclass
class Report:
    """The result of a validation: `accepted`, `rejected` and `duplicates` sum to the checked images."""

    table: Table
    source: Source
    has_manifest: bool
    seconds: float

    def __post_init__(self) -> None:
        counts = dict(self.table.all(f"SELECT {_STATUS}, count(*) FROM images GROUP BY ALL"))
        self.accepted = int(counts.get("accepted", 0))
        self.rejected = int(counts.get("rejected", 0))
        self.duplicates = int(counts.get("duplicate", 0))
        self.checked = self.accepted + self.rejected + self.duplicates
        self.files_per_minute = round(self.checked / max(self.seconds, 1e-9) * 60)
        self.flags: list[tuple[str, int, list[str]]] = self.table.all(
            f"SELECT flag, count(*) AS c, list(name ORDER BY n)[1:{EXAMPLES}] FROM "
            "(SELECT n, name, unnest(flags) AS flag FROM images WHERE reason = '') GROUP BY flag ORDER BY c "
            "DESC, flag"
        )

    def json_parts(self) -> Iterator[str]:
        """The text of the JSON file."""
        yield json.dumps(self._counts(), indent=1)[:-2]  # the lists follow before the closing brace
        for key, what, describe in (
            ("rejected_files", "reason NOT IN ('', 'exact_duplicate')", _describe_rejected),
            ("duplicate_files", "reason = 'exact_duplicate'", _describe_duplicate),
            ("flagged_files", "reason = '' AND len(flags) > 0", _describe_flagged),
        ):
            yield from self._json_list(key, what, describe)
        yield "\n}\n"

    def _json_list(self, key: str, what: str, describe: Callable[..., dict[str, Any]]) -> Iterator[str]:
        yield f',\n "{key}": ['
        query = f"SELECT name, reason, detail, flags FROM images WHERE {what} ORDER BY n"
        for number, row in enumerate(self.table.stream(query)):
            yield (",\n  " if number else "\n  ") + json.dumps(describe(*row))
        yield "\n ]"

    def _counts(self) -> dict[str, Any]:
        table, skips = self.table, self.source.skips
        broken = [
            {"path": str(self.source.blocks[n].listing[0]), "reason": reason, "detail": detail}
            for n, reason, detail in table.broken_blocks()
        ]
        return {
            "input_dir": self.source.text,
            "manifest_checked": self.has_manifest,
            "files_found": max(self.source.listed, self.checked),
            "files_checked": self.checked,
            "accepted": self.accepted,
            "rejected": self.rejected,
            "exact_duplicates": self.duplicates,
            "seconds": round(self.seconds, 2),
            "files_per_minute": self.files_per_minute,
            "broken_files": broken,
            "reasons": {
                reason: {
                    "count": count,
                    "remedy": remedy(reason),
                    "examples": [name for name, _ in table.examples(reason, EXAMPLES)],
                }
                for reason, count in table.counts()
                if reason != "exact_duplicate"
            },
            "flags": {flag: {"count": count, "examples": names} for flag, count, names in self.flags},
            "skipped": {
                code: {"count": count, "examples": [utf8_text(name) for name in skips.examples[code]]}
                for code, count in skips.counts.items()
            },
        }

    def csv_rows(self) -> Iterator[tuple[object, ...]]:
        """The rows of the CSV file."""
        yield COLUMNS
        query = (
            f"SELECT name, {_STATUS}, reason, detail, array_to_string(flags, ' '), format, width, height, "
            "bytes, "
            "sha256 FROM images ORDER BY n"
        )
        for name, status, reason, detail, *values in self.table.stream(query):
            shown = ["" if value is None else value for value in values]
            yield (printable(name), status, reason, printable(detail or ""), *shown)


def _describe_rejected(name: str, reason: str, detail: str, _flags: list[str]) -> dict[str, Any]:
    return {"path": name, "reason": reason, "detail": detail or ""}


def _describe_duplicate(name: str, _reason: str, detail: str, _flags: list[str]) -> dict[str, Any]:
    return {"path": name, "detail": detail}


def _describe_flagged(name: str, _reason: str, _detail: str, flags: list[str]) -> dict[str, Any]:
    return {"path": name, "flags": flags}


def broken_lines(table: Table) -> list[str]:
    """A line for each file of many images that cannot be read to its end."""
    lines = []
    for number, reason, detail in table.broken_blocks():
        listing: Any = table.blocks[number].listing
        lines.append(f"  broken  {printable(str(listing[0]))}: {reason}: {printable(detail)}")
    return lines


def _summary_lines(report: Report, config: ValidateConfig, moved: int | None) -> list[str]:
    lines = [
        f"{printable(config.input_dir)}: {report.checked} files in {report.seconds:.1f} s "
        f"({report.files_per_minute}/minute): {report.accepted} accepted, {report.rejected} rejected, "
        f"{duplicates_text(report.table)}",
        *reason_lines(report.table),
        *broken_lines(report.table),
    ]
    for flag, count, names in report.flags:
        lines.append(f"  flagged  {count:>7}  {flag}: {printable(names[0])}")
    lines += skip_lines(report.source.skips)
    if moved is not None:
        lines.append(f"  moved    {moved:>7}  to quarantine; --undo_quarantine moves them back")
    table = f", table: {printable(config.csv_file)}" if config.csv_file else ""
    return [*lines, f"  report: {printable(config.output_file)}{table}"]
