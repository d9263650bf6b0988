"""`--mode analyze`: measure a folder of images; write the statistics as JSON and as an HTML page."""

from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from vae.config.prepare_flags import AnalyzeConfig
from vae.data.manifest import MANIFEST_NAME
from vae.images.decoding import parse_background
from vae.images.folder import list_images
from vae.prepare.analyze.dataset_stats import Groups, fingerprints_of, near_groups, summarize
from vae.prepare.analyze.measure_file import measure_image, thumbnail_file
from vae.prepare.analyze.page import write_analysis_page
from vae.prepare.check_file import decode_each
from vae.prepare.fingerprints import fingerprints_to_add, read_fingerprints
from vae.prepare.ledger import ACCEPTED, REJECTED, Ledger
from vae.prepare.near_duplicate_groups import group_lines
from vae.prepare.output_dir import check_output_file
from vae.prepare.parts import Part
from vae.prepare.report_parts import check_listed, merge_report, run_report
from vae.progress import Progress
from vae.system import console
from vae.system.errors import DataError, UserError
from vae.system.files import write_csv_rows, write_json


def run_analyze(config: AnalyzeConfig) -> int:
    """Analyze a folder, or a part of it, and print a summary; returns the exit code.

    Raises DataError if no image can be read, and UserError for unusable flags.
    """
    _check_config(config, Path(config.output_file))
    return run_report(config, partial(_check, config), partial(_report, config))


def merge_analyze(config: AnalyzeConfig, count: int) -> int:
    """Report on the files that so many parts have measured; returns the exit code."""
    return merge_report(config, count, partial(_report, config))


def _check(config: AnalyzeConfig, ledger: Ledger, part: Part | None) -> None:
    names = list_images(config.input_dir, flag="--input_dir")
    ledger.list_files(filter(part.has, names) if part else names)
    check_listed(ledger, config, "analyze", measure_image)


def _report(config: AnalyzeConfig, ledger: Ledger, folder: Path) -> int:
    """Write the JSON file, and the page and the list of near duplicates beside it."""
    output = Path(config.output_file)
    if not ledger.counts(ACCEPTED):
        (reason, _), *_ = ledger.counts(REJECTED)
        count = sum(count for _, count in ledger.counts(REJECTED))
        raise DataError(
            f"--input_dir {config.input_dir}: none of {count} images can be read, for example "
            f"{ledger.rejected_examples(reason)[0].name} ({reason}): --mode validate reports every file"
        )
    ledger.settle_duplicates()
    _keep_fingerprints(ledger, Path(config.input_dir))
    near = near_groups(ledger, folder)
    stats, sections = summarize(ledger, near, config.input_dir)
    shown = sorted({name for rows in sections.values() for row in rows for name, _ in row})
    results = decode_each(partial(thumbnail_file, config), shown, config)
    with Progress("thumbnails", len(shown), "image") as bar, closing(results):
        thumbnails = {}
        for name, thumbnail in results:
            thumbnails[name] = thumbnail
            bar.update()
    write_json(output, stats, indent=1)
    write_csv_rows(_list_path(output), _near_duplicate_rows(near))
    write_analysis_page(_page_path(output), stats, sections, thumbnails)
    console.info("\n".join(_summary_lines(stats, near, output)))
    return 0


def _near_duplicate_rows(near: Groups) -> Iterator[tuple[Any, ...]]:
    """The rows of the list of near duplicates; --drop_duplicates keeps the first image of each group."""
    yield "group", "path", "width", "height", "keep"
    for group, images in near.items():
        for image in images:
            yield group, image.name, image.width, image.height, int(image == images[0])


def _summary_lines(stats: dict[str, Any], near: Groups, output: Path) -> list[str]:
    rejected = sum(one["count"] for one in stats["rejected"].values())
    sizes = [
        f"{one['image_size']}: {one['images']} ({100 * one['share']:.0f} %)" for one in stats["resolutions"]
    ]
    return [
        f"{stats['input_dir']}: {stats['images']} images, {rejected} rejected",
        f"  at least as large as --image_size  {', '.join(sizes)}",
        f"  exact copies: {stats['exact_duplicates']['superfluous']}",
        *group_lines(
            {group: [image.name for image in images] for group, images in near.items()},
            f"all listed in {_list_path(output)}",
        ),
        f"  statistics: {output}, page: {_page_path(output)}",
    ]


def _page_path(output: Path) -> Path:
    return output.with_suffix(".html")


def _list_path(output: Path) -> Path:
    return output.with_name(f"{output.stem}_near_duplicates.csv")


def _check_config(config: AnalyzeConfig, output: Path) -> None:
    parse_background(config.background)
    check_output_file(config.output_file)
    if output.suffix.lower() != ".json":
        raise UserError(
            f"--output_file {output}: give a name that ends in .json; the page is written beside it"
        )


def _keep_fingerprints(ledger: Ledger, folder: Path) -> None:
    """Store the fingerprints for `--mode split`, in folders with a manifest only."""
    if not (folder / MANIFEST_NAME).is_file():
        return
    known = {content for content, _ in read_fingerprints(folder)}
    with fingerprints_to_add(folder) as add:
        for content, fingerprint in fingerprints_of(ledger):
            if content not in known:
                add(content, fingerprint)
