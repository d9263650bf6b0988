"""Datasets of the Hugging Face hub by name, hf://datasets/OWNER/NAME[@REVISION][/SPLIT]: their Parquet files.

The files are those of the repository or, if it has none, those into which the hub has converted its images
(refs/convert/parquet). Any other hf:// address is that of a file or, with a slash at its end, of a folder.
"""

import re
from collections.abc import Iterable

from vae.shards.store import MissingError, StoreFile, list_files
from vae.system import console
from vae.system.errors import DataError, UserError

SCHEME = "hf://datasets/"
_NAME = re.compile(r"hf://datasets/([\w.-]+/[\w.-]+)(?:@(refs/(?:convert|pr)/\w+|[^/]+))?(?:/(.+))?")
_FILE = re.compile(r"\.(?:parquet|tar|txt|jsonl?|csv)$|[/{}]$", re.IGNORECASE)
_CONVERTED = "refs/convert/parquet"
_PART = re.compile(r"(?:(?:^|[-_.])\d+(?:-of-\d+)?)+$")  # of a split, in the name of its file
_PARTIAL = "partial-"  # of a split of which the hub has converted only the beginning


def is_hub_dataset(text: str) -> bool:
    """Whether a text names a dataset of the hub, and not a file or a folder in it."""
    return text.startswith(SCHEME) and _FILE.search(text) is None


def parquet_files(text: str, flag: str) -> list[str]:
    """The addresses of the Parquet files of the split that a name of a dataset means, sorted.

    UserError for a wrong name, and if it does not say which of several splits is meant; StoreError if the
    hub does not give the dataset.
    """
    match = _NAME.fullmatch(text)
    if match is None:
        raise UserError(f"{flag} {text} is not a dataset of the hub: give {SCHEME}OWNER/NAME[/SPLIT]")
    repo, revision, wanted = match.groups()
    root = f"{SCHEME}{repo}" + (f"@{revision}" if revision else "")
    names = _parquet_below(root, flag)
    if not names and revision is None:
        root = f"{SCHEME}{repo}@{_CONVERTED}"
        try:
            names = _parquet_below(root, flag)
        except MissingError:
            names = []
    if not names:
        raise DataError(
            f"{flag} {text} has no Parquet files, nor has the hub made any of it: run hf download {repo} "
            "--repo-type dataset --local-dir DIR, and give that folder"
        )
    chosen = _of_split(names, wanted, f"{flag} {text}", f"{SCHEME}{repo}")
    if any(_PARTIAL in name for name in chosen):
        console.warning(f"{flag} {text}: reads its first 5 GB: the hub has converted no more to Parquet")
    return [f"{root}/{name}" for name in chosen]


def _parquet_below(root: str, flag: str) -> list[str]:
    """The names of the Parquet files of a repository, sorted."""
    urls = list_files(StoreFile(f"{root}/", flag))
    names = (url.split("/", root.count("/") + 1)[-1] for url in urls if url.startswith(f"{root}/"))
    return [name for name in names if name.lower().endswith(".parquet")]


def _split_of(name: str) -> str:
    """The split of a file: data/train for data/train-00000-of-00003.parquet and data/train/0000.parquet."""
    folder, _, file = name.rpartition("/")
    stem = _PART.sub("", file[: -len(".parquet")])
    parts = [part.removeprefix(_PARTIAL) for part in (*folder.split("/"), stem) if part]
    return "/".join(parts)


def _of_split(names: Iterable[str], wanted: str | None, where: str, root: str) -> list[str]:
    """The files of the only split; or of the `wanted` one: its whole name, the end of it, or a folder."""
    splits: dict[str, list[str]] = {}
    for name in names:
        splits.setdefault(_split_of(name), []).append(name)
    chosen = list(splits)
    if wanted is not None:
        chosen = [split for split in splits if f"/{split}/".endswith(f"/{wanted}/")]
        chosen = chosen or [split for split in splits if split.startswith(f"{wanted}/")]
    if len(chosen) == 1:
        return splits[chosen[0]]
    if not chosen:
        raise UserError(f"{where}: it has no such split, only {_listed(splits)}")
    example = next((split for split in sorted(chosen) if split.endswith("train")), min(chosen))
    raise UserError(f"{where} has several splits, {_listed(chosen)}: choose one, as in {root}/{example}")


def _listed(splits: Iterable[str]) -> str:
    names = sorted(splits)
    return ", ".join(names[:8]) + (f" and {len(names) - 8} others" if len(names) > 8 else "")
