"""`--mode validate` of a dataset of shards: sizes, checksums, indexes, and every image decoded, in place."""

import tarfile
import time
import zlib
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vae.config.prepare_flags import ValidateConfig
from vae.images.decoding import decode_bytes
from vae.images.formats import BadImageError
from vae.prepare.blocks import warn_without_simplejpeg
from vae.prepare.folders import write_error
from vae.prepare.inputs import local_file
from vae.prepare.near_duplicates import find_shared
from vae.prepare.pool import Failure, Limits, count_workers, run_tasks
from vae.progress import Progress
from vae.shards.dataset_json import ShardedDataset, read_dataset
from vae.shards.index import Shard, row_name
from vae.shards.shard_cache import ShardCache, open_cache
from vae.shards.shard_images import ShardImages
from vae.shards.store import MissingError
from vae.system import console
from vae.system.errors import EXIT_DATA, UserError
from vae.system.files import open_regular, sha256_of_file, write_json

SHARD_SECONDS = 7200.0  # to read one shard, on a slow disk too
EXAMPLES = 10  # problems that are printed
SHARED = ("is_in_training", "looks_alike")  # problems of the images, not of their files


class Problem(NamedTuple):
    """What is wrong with a shard or with one of its images."""

    name: str
    reason: str
    detail: str


def run_verify(config: ValidateConfig) -> int:
    """Verify a dataset, write the report and print a summary; returns the exit code.

    Raises DataError if the file is no dataset, and UserError for flags that only fit a folder.
    """
    if config.part:
        raise UserError(f"--part {config.part} divides images, not a dataset of shards: leave it out")
    if config.quarantine_dir:
        raise UserError(
            "--quarantine_dir does not fit a dataset of shards, which never changes: leave it out"
        )
    warn_without_simplejpeg()
    began = time.monotonic()
    dataset = read_dataset(config.input_dir, flag="--input_dir")
    other = config.val_path or (dataset.validation and dataset.beside(dataset.validation))
    validation = read_dataset(other, flag="--val_path") if other else None
    cache = open_cache((config.input_dir, config.val_path), config.cache_dir, config.cache_gib)
    problems = _verify_all(dataset, config)
    problems += _shared(dataset, validation, cache) if validation else []
    report = {
        "dataset": str(dataset.path),
        "version": dataset.version,
        "shards": len(dataset.shards),
        "samples": dataset.samples,
        "problems": [problem._asdict() for problem in problems],
    }
    try:
        write_json(Path(config.output_file), report, indent=1)
    except OSError as error:
        raise write_error(error, config.output_file, "--output_file") from error
    lines = [
        f"{console.printable(str(dataset.path))}: {dataset.samples} images in {len(dataset.shards)} shards, "
        f"{len(problems)} problems ({time.monotonic() - began:.1f} s)",
        *(console.printable(f"  {p.name}: {p.reason} ({p.detail})") for p in problems[:EXAMPLES]),
        f"  report: {console.printable(config.output_file)}",
    ]
    if any(problem.reason in SHARED for problem in problems):
        lines.append("  leave the named images out of one subset, and write the datasets again")
    if any(problem.reason not in SHARED for problem in problems):
        lines.append("  copy the named shards again from their source, or write the dataset again")
    console.info("\n".join(lines))
    return EXIT_DATA if problems else 0


def _shared(dataset: ShardedDataset, validation: ShardedDataset, cache: ShardCache | None) -> list[Problem]:
    """The images of the validation set that the dataset has too, or that look like one of its images."""
    subsets = ShardImages([dataset], 1, cache), ShardImages([validation], 1, cache)
    try:
        shared = find_shared(*subsets)
    except BadImageError as error:
        return [Problem(str(validation.path), "not_compared", error.detail)]
    return [
        Problem(f"validation image {one.key}", "is_in_training", "the same bytes")
        if one.is_equal
        else Problem(f"validation image {one.key}", "looks_alike", f"training image {one.training_key}")
        for one in shared
    ]


def _verify_all(dataset: ShardedDataset, config: ValidateConfig) -> list[Problem]:
    problems: list[Problem] = []
    verify = partial(verify_shard, dataset, config.max_pixels)
    workers = max(1, min(count_workers(config.num_workers), len(dataset.shards)))
    results = run_tasks(verify, dataset.shards, workers, Limits(SHARD_SECONDS))
    with Progress("validate", len(dataset.shards), "shard") as bar, closing(results):
        for shard, result in results:
            problems += [Problem(shard.name, *result)] if isinstance(result, Failure) else result
            bar.update(note=f"{len(problems)} bad")
    return sorted(problems)


def verify_shard(dataset: ShardedDataset, max_pixels: int, shard: Shard) -> list[Problem]:
    """The problems of one shard: none if its bytes, its index and its images are as written.

    A remote shard is downloaded into a temporary folder.
    """
    try:
        rows = dataset.fetch_index(shard)
        with local_file(dataset.shard_file(shard)) as path:
            if sha256_of_file(path) != shard.sha256:
                return [Problem(shard.name, "checksum", "its bytes are not those that were written")]
            return _verify_members(dataset, max_pixels, shard, path, rows)
    except BadImageError as error:
        return [Problem(shard.name, error.reason, error.detail)]
    except MissingError:
        return [Problem(shard.name, "missing", "the store has no such shard, or no index of it")]
    except tarfile.TarError as error:
        return [Problem(shard.name, "damaged", str(error))]
    except OSError as error:
        return [Problem(shard.name, "unreadable", error.strerror or str(error))]


def _verify_members(
    dataset: ShardedDataset, max_pixels: int, shard: Shard, path: Path, rows: np.ndarray
) -> list[Problem]:
    problems = _verify_own(path, rows, shard) if dataset.tars is None else []
    if problems:
        return problems
    first_frame = bool(dataset.policy.get("first_frame"))
    with open_regular(path) as file:
        for row in rows:
            file.seek(row["offset"])
            data = file.read(row["size"])
            name = f"{shard.name}/{row_name(row)}"
            if zlib.crc32(data) != row["crc32"]:
                problems.append(Problem(name, "checksum", "its crc32 is not that of the index"))
                continue
            try:
                height, width = decode_bytes(data, max_pixels=max_pixels, first_frame=first_frame).shape[:2]
            except BadImageError as error:
                problems.append(Problem(name, error.reason, error.detail))
                continue
            if (width, height) != (row["width"], row["height"]):
                problems.append(Problem(name, "bad_index", f"it has {width}x{height} pixels"))
    return problems


def _verify_own(path: Path, rows: np.ndarray, shard: Shard) -> list[Problem]:
    """Problems of the members of a tar file that --mode shard wrote."""
    with open_regular(path) as file, tarfile.open(fileobj=file, mode="r:") as tar:
        images = [member for member in tar if not member.name.endswith(".json")]
    entries = [(m.name.split(".")[0].encode(), m.offset_data, m.size) for m in images]
    if entries != [(row["key"], row["offset"], row["size"]) for row in rows]:
        return [Problem(shard.name, "bad_index", "the index does not describe this tar file")]
    return []
