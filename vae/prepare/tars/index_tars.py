"""`--mode index`: tar files that others wrote become a dataset of shards, where they are.

Each tar file is one task. Its result is noted in the output folder, so that the same command continues.
"""

import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vae.config.prepare_flags import IndexConfig
from vae.images.formats import EXTENSIONS_OF
from vae.prepare.engine import run_tasks
from vae.prepare.output_dir import check_new, write_error
from vae.prepare.pool import Failure, Limits
from vae.prepare.rejections import remedy
from vae.prepare.shard.members import TRAINING, VALIDATION
from vae.prepare.shard.write import HIDDEN, SHARD_SECONDS
from vae.prepare.tars.parent import TarsParent
from vae.prepare.tars.read_tar import BrokenTarError, read_tar
from vae.prepare.tars.sources import Sources, find_sources
from vae.prepare.tars.where import parse_where
from vae.prepare.tars.write import FOLDERS, SUBSETS, Written, claim, rules_of, write_datasets, write_index
from vae.prepare.versions import removed_line
from vae.progress import Progress
from vae.shards.dataset_json import shard_content
from vae.shards.index import Shard, index_path
from vae.shards.store import StoreFile, stamp
from vae.system import console
from vae.system.console import printable
from vae.system.errors import EXIT_DATA, DataError, UserError
from vae.system.files import (
    read_json,
    remove_temporary,
    replace_text,
    sha256_of_file,
    write_json,
)

MEMORY_GIB = 6.0  # for one tar file: the largest image file has 2 GiB
REJECTED_NAME = "rejected.jsonl"
BROKEN = "broken_tar"
MAX_LINES = 20  # of broken tar files that are printed


def run_index(config: IndexConfig) -> int:
    """Index the tar files and print a summary; returns the exit code.

    Raises DataError if there are none, and UserError for unusable rules or folders.
    """
    began, root = time.monotonic(), Path(config.output_dir)
    _check_rules(config)
    parent = TarsParent(config, rules_of(config)) if config.parent else None
    sources = parent.sources if parent else find_sources(config.input)
    new = sources._replace(names=parent.new_names()) if parent else sources
    if not (root / HIDDEN).is_dir():
        check_new(root)
    try:
        for folder, _, _ in os.walk(root):
            remove_temporary(Path(folder))  # of killed processes: no other run uses the folder
        more = parent.claim() if parent else {}
        claim(root, {"tars": sources.names, "policy": rules_of(config), **more})
        notes = list(_index_all(root, new, config))
        written = _write(root, new, notes, config, parent)
    except OSError as error:
        raise write_error(error, config.output_dir) from error
    _print_summary(notes, written, config, parent, time.monotonic() - began)
    return 0 if written else EXIT_DATA


def _check_rules(config: IndexConfig) -> None:
    if config.where:
        parse_where(config.where)
    known = [name.lower() for name in EXTENSIONS_OF]
    for name in config.formats or ():
        if name not in known:
            raise UserError(f"--formats {name} is no format: give some of {' '.join(known)}")


def _index_all(root: Path, sources: Sources, config: IndexConfig) -> Iterator[dict[str, Any]]:
    """What is noted of each tar file, in the order of completion."""
    task = partial(index_tar, root, sources.base, config)
    results = run_tasks(task, sources.names, config, Limits(SHARD_SECONDS, MEMORY_GIB))
    with Progress("index", len(sources.names), "tar") as bar, closing(results):
        for name, note in results:
            if isinstance(note, Failure):
                note = {"name": name, "error": f"{note.reason}: {note.detail}"}
            bar.update()
            yield note


def index_tar(root: Path, base: str, config: IndexConfig, name: str) -> dict[str, Any]:
    """Write the indexes of a tar file, unless it has its note; returns what is noted.

    OSError if they cannot be written. A tar file that cannot be read has an `error`.
    """
    file, policy = Sources(base, []).file(name), rules_of(config)
    noted = root / HIDDEN / f"{name}.json"
    try:
        now = _stamp(file)
        if old := _note_of(root, noted, now, policy):
            return old
        content = read_tar(file, config)
    except BrokenTarError as error:
        return {"name": name, "error": str(error)}
    except OSError as error:
        return {"name": name, "error": error.strerror or str(error)}
    except DataError as error:  # of the store
        return {"name": name, "error": str(error)}
    tar, subsets = Shard(name, 0, content.bytes, content.sha256), _subsets(content.rows, config.val_split)
    shards = {subset: write_index(root, subset, tar, rows) for subset, rows in subsets.items()}
    note = {
        "name": name,
        "stamp": now,
        "policy": policy,
        "shards": {subset: shard_content(shard) for subset, shard in shards.items() if shard},
        "counts": dict(content.counts),
        "listed": [list(one) for one in content.listed],
    }
    write_json(noted, note)
    return note


def _stamp(file: Path | StoreFile) -> list[Any]:
    """What changes if the tar file does."""
    if isinstance(file, StoreFile):
        return list(stamp(file))
    status = file.stat()
    return [status.st_size, status.st_mtime_ns]


def _note_of(root: Path, noted: Path, now: list[Any], policy: dict[str, Any]) -> dict[str, Any] | None:
    """What was noted of a tar file, if it has not changed, and its indexes are complete."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        note = read_json(noted)
        indexes = ((index_path(root / FOLDERS[s], Shard(**v)), v) for s, v in note["shards"].items())
        is_complete = all(sha256_of_file(path) == values["index_sha256"] for path, values in indexes)
        if is_complete and (note["stamp"], note["policy"]) == (now, policy):
            return dict(note)
    return None


def _subsets(rows: np.ndarray, share: float) -> dict[str, np.ndarray]:
    """The rows of each subset: equal image files have equal keys, and are in one subset everywhere."""
    limit = int(share * 16**8)
    held_out = np.array([int(key[:8], 16) < limit for key in rows["key"].tolist()], bool)
    return {TRAINING: rows[~held_out], VALIDATION: rows[held_out]}


def _write(
    root: Path, new: Sources, notes: list[dict[str, Any]], config: IndexConfig, parent: TarsParent | None
) -> Written | None:
    """Write what was left out, and the files of the datasets, unless tar files are broken."""
    places = {name: number for number, name in enumerate(new.names)}
    notes.sort(key=lambda note: places[note["name"]])
    replace_text(root / REJECTED_NAME, _rejected(notes))
    if any("error" in note for note in notes) and not config.skip_broken_tars:
        return None
    shards: Written = {}
    for subset in SUBSETS:
        shards[subset] = [
            Shard(**note["shards"][subset]) for note in notes if subset in note.get("shards", {})
        ]
        if parent:
            others = parent.without_removed(root, subset, shards[subset])
            shards[subset] = [*parent.link_all(root, subset), *others]
    if not shards[TRAINING]:
        return None
    policy = parent.dataset.policy if parent else rules_of(config)
    write_datasets(root, new.base, shards, policy, parent, is_version=parent is not None)
    return shards


def _rejected(notes: list[dict[str, Any]]) -> Iterator[str]:
    for note in notes:
        if "error" in note:
            yield json.dumps({"tar": note["name"], "reason": BROKEN, "detail": note["error"]}) + "\n"
        for name, reason, detail in note.get("listed", ()):
            yield json.dumps({"tar": note["name"], "name": name, "reason": reason, "detail": detail}) + "\n"


def _print_summary(
    notes: list[dict[str, Any]],
    written: Written | None,
    config: IndexConfig,
    parent: TarsParent | None,
    seconds: float,
) -> None:
    counts: Counter[str] = Counter()
    for note in notes:
        counts.update(note.get("counts", {}))
    broken, root = [note for note in notes if "error" in note], Path(config.output_dir)
    train, val = (_counted(notes, written, subset, parent) for subset in (TRAINING, VALIDATION))
    num_read = len(notes) - len(broken)
    tars = f"{num_read}{' new' if parent else ''} tar file{'s' * (num_read != 1)}"
    lines = [
        f"{printable(str(root))}: {train} images for training and {val} for validation, {tars} read "
        f"({seconds:.1f} s), {counts.total()} left out",
        *(f"  left out {count:>7}  {reason}: {remedy(reason)}" for reason, count in counts.most_common()),
        *([removed_line(len(parent.removed_keys()))] if parent and parent.removed else []),
        *(f"  broken  {printable(note['name'])}: {printable(note['error'])}" for note in broken[:MAX_LINES]),
    ]
    if broken or any(note["listed"] for note in notes if "listed" in note):
        lines.append(f"  all of them: {printable(str(root / REJECTED_NAME))}")
    if written:
        lines.append(f"  train: python train_vae.py --data_path {root / TRAINING}")
    elif broken and not config.skip_broken_tars:
        lines.append(
            f"  {len(broken)} of {len(notes)} tar files are broken: copy them again and repeat the command, "
            "which continues, or add --skip_broken_tars"
        )
    else:
        lines.append("  no image is left: change the rules")
    console.info("\n".join(lines))


def _counted(
    notes: list[dict[str, Any]], written: Written | None, subset: str, parent: TarsParent | None
) -> str:
    """The images of a subset: those of the parent, and new ones."""
    if written is None:
        return str(
            sum(note["shards"][subset]["samples"] for note in notes if subset in note.get("shards", ()))
        )
    images = sum(shard.samples - len(shard.removed) for shard in written[subset])
    old = parent.samples(subset) if parent else 0
    return f"{images} ({old} of --parent and {images - old} new)" if parent else str(images)
