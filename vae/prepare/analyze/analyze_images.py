"""`--mode analyze`: measure a folder of images; write the statistics as JSON and as an HTML page."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from vae.config.prepare_flags import AnalyzeConfig
from vae.data.manifest import MANIFEST_NAME
from vae.images.decoding import parse_background
from vae.images.folder import list_images
from vae.prepare.analyze.dataset_stats import Measured, near_groups, summarize
from vae.prepare.analyze.measure_file import Measurement, measure_file, thumbnail_file
from vae.prepare.analyze.page import write_analysis_page
from vae.prepare.check_file import decode_each
from vae.prepare.fingerprints import fingerprints_to_add, read_fingerprints
from vae.prepare.near_duplicate_groups import group_lines
from vae.prepare.output_dir import check_output_file
from vae.prepare.pool import Failure
from vae.progress import Progress
from vae.system import console
from vae.system.errors import DataError, UserError
from vae.system.files import write_csv_rows, write_json

Answer = TypeVar("Answer")


def run_analyze(config: AnalyzeConfig) -> int:
    """Analyze a folder and print a summary; returns the exit code."""
    stats, near = analyze(config)
    console.info("\n".join(_summary_lines(stats, near, Path(config.output_file))))
    return 0


def analyze(config: AnalyzeConfig) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Measure every image; write the JSON file, and the page and the list of near duplicates beside it.

    Returns the contents of the JSON file, and the near duplicates by group, the largest image first.

    Raises DataError if no image can be read, and UserError for unusable flags.
    """
    output = Path(config.output_file)
    _check_config(config, output)
    names = list(islice(list_images(config.input_dir, flag="--input_dir"), config.limit))
    measured, rejected = _measure(config, names)
    if not measured:
        reason, examples = max(rejected.items(), key=lambda item: len(item[1]))
        raise DataError(
            f"--input_dir {config.input_dir}: none of {len(names)} images can be read, for example "
            f"{examples[0]} ({reason}): --mode validate reports every file"
        )
    near = near_groups(measured)
    stats, sections = summarize(measured, rejected, near, config.input_dir)
    shown = sorted({name for rows in sections.values() for row in rows for name, _ in row})
    thumbnails = dict(_run(partial(thumbnail_file, config), shown, config, "thumbnails"))
    write_json(output, stats, indent=1)
    write_csv_rows(_list_path(output), _near_duplicate_rows(measured, near))
    write_analysis_page(_page_path(output), stats, sections, thumbnails)
    return stats, near


def _near_duplicate_rows(measured: Measured, near: dict[str, list[str]]) -> Iterator[tuple[Any, ...]]:
    """The rows of the list of near duplicates; --drop_duplicates keeps the first image of each group."""
    yield "group", "path", "width", "height", "keep"
    for group, names in near.items():
        for name in names:
            yield group, name, measured[name].width, measured[name].height, int(name == names[0])


def _summary_lines(stats: dict[str, Any], near: dict[str, list[str]], output: Path) -> list[str]:
    rejected = sum(one["count"] for one in stats["rejected"].values())
    sizes = [
        f"{one['image_size']}: {one['images']} ({100 * one['share']:.0f} %)" for one in stats["resolutions"]
    ]
    return [
        f"{stats['input_dir']}: {stats['images']} images, {rejected} rejected",
        f"  at least as large as --image_size  {', '.join(sizes)}",
        f"  exact copies: {stats['exact_duplicates']['superfluous']}",
        *group_lines(near, f"all listed in {_list_path(output)}"),
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


def _run(
    function: Callable[[str], Answer], names: list[str], config: AnalyzeConfig, title: str
) -> Iterator[tuple[str, Answer | Failure]]:
    """Yield (name, result) of `function` in the order of completion, with a progress bar."""
    bad = 0
    results = decode_each(function, names, config)
    with Progress(title, len(names), "image") as bar, closing(results):
        for name, result in results:
            bad += isinstance(result, Failure)
            bar.update(note=f"{bad} bad")
            yield name, result


def _measure(config: AnalyzeConfig, names: list[str]) -> tuple[Measured, dict[str, list[str]]]:
    """The measurements of the named images, and the rejected ones by reason, each sorted by name."""
    measured: Measured = {}
    rejected: dict[str, list[str]] = defaultdict(list)
    with _fingerprint_keeper(config.input_dir) as keep:
        for name, result in _run(partial(measure_file, config), names, config, "analyze"):
            if isinstance(result, Failure):
                rejected[result.reason].append(name)
            else:
                measured[name] = result
                keep(result)
    return dict(sorted(measured.items())), {reason: sorted(some) for reason, some in rejected.items()}


@contextmanager
def _fingerprint_keeper(input_dir: str) -> Iterator[Callable[[Measurement], None]]:
    """A function that stores a fingerprint for `--mode split`, in folders with a manifest only."""
    folder = Path(input_dir)
    if not (folder / MANIFEST_NAME).is_file():
        yield lambda _: None
        return
    known = set(read_fingerprints(folder))
    with fingerprints_to_add(folder) as add:

        def keep(result: Measurement) -> None:
            if result.sha256 not in known:
                known.add(result.sha256)
                add(result.sha256, result.fingerprint)

        yield keep
