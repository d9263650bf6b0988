"""The modes whose result is a report: in one command, or in parts that --mode merge joins."""

import os
import shutil
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

from vae.prepare.check_file import Measure, is_current, no_measures, record_checks
from vae.prepare.disk_blocks import scratch_folder
from vae.prepare.ledger import Ledger
from vae.prepare.output_dir import write_error
from vae.prepare.parts import (
    Part,
    ReportConfig,
    complete_part,
    join_parts,
    merge_line,
    open_part,
    part_of,
    parts_folder,
)
from vae.progress import Progress
from vae.system import console

Check = Callable[[Ledger, Part | None], None]  # lists the files, or those of a part, and gives each a result
Report = Callable[[Ledger, Path], int]  # writes the report from all results, and more files into a folder


def run_report(config: ReportConfig, check: Check, report: Report) -> int:
    """Check all files and report, or check those of a part; returns the exit code."""
    try:
        if part := part_of(config):
            with closing(open_part(config)) as ledger:
                check(ledger, part)
                complete_part(ledger)
                name, count = console.printable(config.output_file), ledger.count_files()
                console.info(f"{name}: part {part}: {count} files are checked\n{merge_line(config)}")
            return 0
        with (
            scratch_folder(Path(f"{config.output_file}.tmp")) as scratch,
            closing(Ledger(scratch / "ledger.sqlite")) as ledger,
        ):
            check(ledger, None)
            return report(ledger, scratch)
    except (OSError, sqlite3.OperationalError) as error:
        raise write_error(error, config.output_file, flag="--output_file") from error


def check_listed(ledger: Ledger, config: ReportConfig, title: str, measure: Measure = no_measures) -> None:
    """Check the files that have no result, or have changed since; those of a killed run are done."""
    total = min(ledger.count_files(), config.limit or sys.maxsize)

    def to_check() -> Iterator[str]:
        for name, _ in ledger.files(config.limit):
            if is_current(ledger.result(name), os.path.join(config.input_dir, name)):
                bar.update()
            else:
                yield name

    with Progress(title, total, "image") as bar:
        record_checks(to_check(), ledger, config, measure, bar)


def merge_report(config: ReportConfig, count: int, report: Report) -> int:
    """Report on the files of all parts; returns the exit code."""

    def join(ledger: Ledger, _: Part | None) -> None:
        join_parts(ledger, parts_folder(config), count)

    code = run_report(config, join, report)
    shutil.rmtree(parts_folder(config))
    return code
