"""`--mode analyze`: what a folder of images holds, as numbers (JSON) and as a page to look at (HTML)."""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from vae.config.errors import DataError, UserError
from vae.console import printable
from vae.data.decoding import parse_background
from vae.data.folder import list_images
from vae.data.manifest import MANIFEST_NAME, replace_text
from vae.prepare.analyze.dataset_stats import Collected, summarize
from vae.prepare.analyze.measure_file import Measurement, measure_file, thumbnail_file
from vae.prepare.analyze.page import page_parts
from vae.prepare.check_file import Rules, limits_for
from vae.prepare.pool import Failure, count_workers, run_each
from vae.prepare.split.grouping import hashes_to_add, read_hashes

SCALARS = ("brightness", "contrast", "colorfulness", "sharpness", "clipped", "jpeg_quality")


@dataclass(frozen=True)
class AnalyzeOptions:
    """Flags of `--mode analyze`."""

    input_dir: str
    output_file: str = "dataset_stats.json"
    limit: int | None = None
    rules: Rules = Rules()  # noqa: RUF009 - frozen
    num_workers: str = "auto"
    time_limit: float = 60.0
    memory_gib: float | None = None


def analyze(options: AnalyzeOptions) -> dict[str, Any]:
    """Measure every image and write the JSON file and, beside it, the page; returns what the file holds.

    Raises DataError when no image can be read, UserError for flags that cannot be used.
    """
    output = Path(options.output_file)
    _check_options(options, output)
    names = list(islice(list_images(options.input_dir, flag="--input_dir"), options.limit))
    collected = collect(names, options)
    if not collected.names:
        reason, examples = max(collected.rejected.items(), key=lambda item: len(item[1]))
        raise DataError(
            f"--input_dir {options.input_dir}: none of {len(names)} images can be read, for example "
            f"{printable(examples[0])} ({reason}): --mode validate says more"
        )
    stats, sheets = summarize(collected, options.input_dir)
    wanted = sorted({name for sheet in sheets.values() for row in sheet for name, _ in row})
    thumbnails = dict(_run(thumbnail_file, wanted, options, "sheets"))
    replace_text(output, [json.dumps(stats, indent=1, allow_nan=False) + "\n"])
    replace_text(page_path(output), page_parts(stats, sheets, thumbnails))
    return stats


def summary_lines(stats: dict[str, Any], output: Path) -> list[str]:
    """The summary for a terminal."""
    rejected = sum(one["count"] for one in stats["rejected"].values())
    exact, near = stats["exact_duplicates"], stats["near_duplicates"]
    sizes = [
        f"{one['image_size']}: {one['images']} ({100 * one['share']:.0f} %)" for one in stats["resolutions"]
    ]
    return [
        f"{stats['input_dir']}: {stats['images']} images, {rejected} rejected",
        f"  as large as --image_size  {', '.join(sizes)}",
        f"  exact copies: {exact['superfluous']}; near duplicates: {near['images']} in {near['clusters']} "
        "clusters",
        f"  {output} holds the numbers, {page_path(output)} shows them",
    ]


def page_path(output: Path) -> Path:
    """Where the page of a JSON file lies."""
    return output.with_suffix(".html")


def _check_options(options: AnalyzeOptions, output: Path) -> None:
    parse_background(options.rules.background)
    if not output.absolute().parent.is_dir():
        raise UserError(f"--output_file {output}: its folder {output.absolute().parent} is missing: make it")
    if output.suffix.lower() != ".json":
        raise UserError(f"--output_file {output}: give a name ending in .json; the page lies beside it")


def _run(function: Callable, names: Iterable[str], options: AnalyzeOptions, title: str):
    """Yield (name, result) of `function` in the order of completion, behind a progress bar."""
    results = run_each(
        partial(function, options.input_dir, options.rules),
        names,
        num_workers=count_workers(options.num_workers),
        limits=limits_for(options.rules, options.time_limit, options.memory_gib),
    )
    bad = 0
    with tqdm(total=len(names), unit="image", desc=title, smoothing=0.05) as bar, closing(results):
        for name, result in results:
            bad += isinstance(result, Failure)
            bar.set_postfix(bad=bad, refresh=False)
            bar.update()
            yield name, result


def collect(names: list[str], options: AnalyzeOptions) -> Collected:
    """Measure the named images; the outcome does not depend on the order in which they were finished."""
    positions = {name: position for position, name in enumerate(names)}
    count = len(names)
    floats = {name: np.full(count, np.nan, np.float32) for name in (*SCALARS, "width", "height")}
    sizes, seen, blank = np.zeros(count, np.int64), np.zeros(count, bool), np.zeros(count, bool)
    contents, perceptual = np.zeros(count, np.uint64), np.zeros((count, 2), np.uint64)
    channels = np.zeros((count, 6), np.float32)
    formats, flags, rejected = Counter(), Counter(), defaultdict(list)
    results = _run(measure_file, names, options, "analyze")
    with _hash_keeper(options.input_dir) as keep, closing(results):
        for name, result in results:
            if isinstance(result, Failure):
                rejected[result.reason].append(name)
                continue
            at = positions[name]
            seen[at], sizes[at] = True, result.file_bytes
            blank[at] = bool({"constant", "near_blank"} & set(result.flags))
            contents[at], perceptual[at] = int(result.sha256[:16], 16), result.perceptual
            channels[at] = (*result.channel_means, *result.channel_squares)
            for column, values in floats.items():
                values[at] = getattr(result, column)
            formats[result.format] += 1
            flags.update(result.flags)
            keep(result)
    for examples in rejected.values():
        examples.sort()
    means = channels[seen].mean(axis=0, dtype=np.float64) if seen.any() else np.zeros(6)
    return Collected(
        names=[name for name, there in zip(names, seen, strict=True) if there],
        columns={column: values[seen] for column, values in floats.items()} | {"bytes": sizes[seen]},
        contents=contents[seen],
        perceptual=perceptual[seen],
        blank=blank[seen],
        channel_means=means[:3],
        channel_squares=means[3:],
        formats=formats,
        flags=flags,
        rejected=dict(rejected),
    )


@contextmanager
def _hash_keeper(input_dir: str) -> Iterator[Callable[[Measurement], None]]:
    """In a prepared set hashes are kept for `--mode split`; into other folders nothing is written."""
    folder = Path(input_dir)
    if not (folder / MANIFEST_NAME).is_file():
        yield lambda _: None
        return
    known = set(read_hashes(folder))
    with hashes_to_add(folder) as add:

        def keep(result: Measurement) -> None:
            if result.sha256 not in known:
                known.add(result.sha256)
                add(result.sha256, result.perceptual)

        yield keep
