"""--mode index --input dataset.json: stricter rules for a dataset, by its indexes; no tar file is read.

The result is that of indexing its tar files with all these rules.
"""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vae.config.prepare_flags import IndexConfig
from vae.images.formats import BadImageError
from vae.prepare.check_file import check_size
from vae.prepare.engine import run_tasks
from vae.prepare.output_dir import check_new, write_error
from vae.prepare.pool import Failure, Limits
from vae.prepare.rejections import remedy
from vae.prepare.shard.members import TRAINING, VALIDATION
from vae.prepare.shard.write import HIDDEN, SHARD_SECONDS
from vae.prepare.tars.parent import names_read
from vae.prepare.tars.where import Condition, parse_where
from vae.prepare.tars.write import SUBSETS, Written, claim, rules_of, write_datasets, write_index
from vae.prepare.versions import Parent
from vae.progress import Progress
from vae.shards.dataset_json import ShardedDataset, read_dataset
from vae.shards.index import Shard, read_index
from vae.system import console
from vae.system.console import printable
from vae.system.errors import EXIT_DATA, DataError, UserError

FLAG = "--input"
COLUMNS = ("width", "height")  # of an index, that --where may compare
OTHER_RULES = ("formats", "image_key", "first_frame", "val_split", "parent", "remove", "skip_broken_tars")


class Task(NamedTuple):
    """An index to filter."""

    subset: str
    path: Path
    shard: Shard


def run_filter(config: IndexConfig) -> int:
    """Write a dataset with some of the images of another one, and print a summary; returns the exit code.

    DataError if the other one is damaged; UserError for rules that its indexes cannot answer.
    """
    began, root = time.monotonic(), Path(config.output_dir)
    conditions = _conditions(config)
    source = Parent(_read(config.input), None)
    policy = _stricter(source.dataset.policy, config)
    if not (root / HIDDEN).is_dir():
        check_new(root)
    written: Written = {subset: [] for subset in SUBSETS}
    left_out: Counter[str] = Counter()
    names = names_read(source.dataset)
    try:
        claim(root, {"tars": names, "known": names, "policy": policy, "of": source.dataset.version})
        for subset, shard, counts in _filter_all(root, source, conditions, config):
            left_out += counts
            written[subset] += [shard] if shard else []
        if written[TRAINING]:
            assert source.dataset.tars is not None
            write_datasets(root, source.dataset.tars, written, policy, source)
    except OSError as error:
        raise write_error(error, config.output_dir) from error
    images = {subset: sum(shard.samples for shard in written[subset]) for subset in SUBSETS}
    old = {subset: source.samples(subset) for subset in SUBSETS}
    lines = [
        f"{printable(str(root))}: {images[TRAINING]} of {old[TRAINING]} images for training and "
        f"{images[VALIDATION]} of {old[VALIDATION]} for validation; no tar file was read "
        f"({time.monotonic() - began:.1f} s)",
        *(f"  left out {count:>7}  {reason}: {remedy(reason)}" for reason, count in left_out.most_common()),
        f"  train: python train_vae.py --data_path {root / TRAINING}"
        if written[TRAINING]
        else "  no image is left: change the rules",
    ]
    console.info("\n".join(lines))
    return 0 if written[TRAINING] else EXIT_DATA


def _conditions(config: IndexConfig) -> list[Condition]:
    """The conditions of --where; UserError for a rule that needs the tar files."""
    unset = IndexConfig(input="", output_dir="")
    other = next((name for name in OTHER_RULES if getattr(config, name) != getattr(unset, name)), None)
    if other:
        raise UserError(
            f"--{other} does not fit {FLAG} {config.input}, whose indexes have only {' and '.join(COLUMNS)}: "
            "leave it out, or give the tar files"
        )
    conditions = parse_where(config.where) if config.where else []
    for condition in conditions:
        if condition.column not in COLUMNS:
            raise UserError(
                f"--where {config.where}: the indexes of {FLAG} {config.input} have only the columns "
                f"{' and '.join(COLUMNS)}, not {condition.column}: give the tar files, which are read again"
            )
    return conditions


def _read(path: str) -> ShardedDataset:
    dataset = read_dataset(path, flag=FLAG)
    if dataset.tars is None:
        raise UserError(f"{FLAG} {path} was made with --mode shard: give one that --mode index made")
    if not isinstance(dataset.path, Path):
        raise UserError(
            f"{FLAG} {path}: copy the folder of dataset.json, without the tar files, to this machine"
        )
    return dataset


def _stricter(theirs: dict[str, Any], config: IndexConfig) -> dict[str, Any]:
    """The rules of the dataset and those of the command."""
    own = rules_of(config)
    aspects = [rules["max_aspect"] for rules in (theirs, own) if rules["max_aspect"]]
    return {
        **theirs,
        "min_size": max(theirs["min_size"], own["min_size"]),
        "max_pixels": min(theirs["max_pixels"], own["max_pixels"]),
        "max_aspect": min(aspects, default=0.0),
        "where": " and ".join(rules["where"] for rules in (theirs, own) if rules["where"]) or None,
    }


def _filter_all(
    root: Path, source: Parent, conditions: list[Condition], config: IndexConfig
) -> Iterator[tuple[str, Shard | None, Counter[str]]]:
    """Subset, new shard, and what was left out, of each shard in the order of the dataset."""
    tasks = []
    for subset in SUBSETS:
        dataset = source.subset(subset)
        for shard in source.shards(subset):
            assert dataset is not None
            tasks.append(Task(subset, source.index_file(dataset, shard), shard))
    done: dict[tuple[str, str], Any] = {}
    results = run_tasks(partial(filter_index, root, conditions, config), tasks, config, Limits(SHARD_SECONDS))
    with Progress("filter", len(tasks), "shard") as bar, closing(results):
        for task, answer in results:
            if isinstance(answer, Failure):
                raise DataError(f"{FLAG} {config.input}: {task.path}: {answer.reason} ({answer.detail})")
            done[task.subset, task.shard.name] = answer
            bar.update()
    for task in tasks:
        yield task.subset, *done[task.subset, task.shard.name]


def filter_index(
    root: Path, conditions: list[Condition], config: IndexConfig, task: Task
) -> tuple[Shard | None, Counter[str]]:
    """Write an index with the images that the rules allow; None if there are none."""
    try:
        rows = read_index(task.path, task.shard)
    except BadImageError as error:
        raise DataError(f"{FLAG} {config.input} is damaged: {error.detail}") from None
    sizes = zip(rows["width"].tolist(), rows["height"].tolist(), strict=True)
    reasons = [_why_not(width, height, conditions, config) for width, height in sizes]
    counts = Counter(reason for reason in reasons if reason)
    allowed = np.array([reason is None for reason in reasons], bool)
    return write_index(root, task.subset, task.shard, rows[allowed]), counts


def _why_not(width: int, height: int, conditions: list[Condition], config: IndexConfig) -> str | None:
    """Why the rules leave out an image of this size; None if they do not."""
    try:
        check_size(width, height, config)
    except BadImageError as error:
        return error.reason
    if width * height > config.max_pixels:
        return "too_many_pixels"
    columns = {"width": width, "height": height}
    return None if all(condition.holds(columns) for condition in conditions) else "where"
