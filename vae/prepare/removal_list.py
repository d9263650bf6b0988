"""--remove: the keys of the images that the lines of a text file name."""

import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from vae.images.formats import BadImageError
from vae.prepare.shard.write import KEY_DIGITS
from vae.progress import Progress
from vae.shards.dataset_json import ShardedDataset
from vae.shards.index import index_path, read_index, row_name
from vae.shards.shard_images import ShardImages
from vae.system import console
from vae.system.console import printable
from vae.system.errors import DataError, UserError
from vae.system.files import bounded_lines

_KEY = re.compile(r"[0-9a-f]{32}([0-9a-f]{32})?", re.IGNORECASE)
EXPLANATION = (
    "give the SHA-256 of an image file (sha256sum FILE), its name as training prints it "
    "(images-000000.tar/KEY, or 00000.tar/cat.jpg), or its url, or source with --mode shard, in the metadata"
)


def keys_to_remove(file: str, subsets: Sequence[ShardedDataset]) -> np.ndarray:
    """The keys that a file lists, sorted and different: S32. Names are looked up.

    UserError if it has no line, or no image has any of its names; DataError for a damaged dataset.
    """
    keys, names = _read_lines(file)
    if not keys and not names:
        raise UserError(f"--remove {file} has no line: {EXPLANATION}")
    missing = dict(names)
    for find in (_find_members, _find_in_metadata):  # the second one reads tar files
        for dataset in subsets if missing else ():
            try:
                for key, name in find(dataset, names):
                    keys.add(key)
                    missing.pop(name, None)
            except BadImageError as error:
                raise DataError(f"--parent {dataset.path} is damaged: {error.detail}") from None
    if missing:
        name, number = next(iter(missing.items()))
        text = (
            f"--remove {file}: {len(missing)} of {len(names)} names are of no image of --parent, for example "
            f"line {number} ({printable(name)})"
        )
        if len(missing) == len(names):
            raise UserError(f"{text}: {EXPLANATION}")
        console.warning(f"{text}: correct it, unless it was removed before")
    return np.array(sorted(keys), "S32")


def _find_members(dataset: ShardedDataset, names: Mapping[str, int]) -> Iterator[tuple[bytes, str]]:
    """Key and name of each image with a name such as 00000.tar/cat.jpg; only their indexes are read."""
    tars = {name.partition(".tar/")[0] + ".tar" for name in names}
    for shard in dataset.shards if tars else ():
        if shard.name in tars:
            for row in read_index(index_path(dataset.index_folder, shard), shard):
                name = f"{shard.name}/{row_name(row)}"
                if name in names:
                    yield bytes(row["key"]), name


def _find_in_metadata(dataset: ShardedDataset, names: Mapping[str, int]) -> Iterator[tuple[bytes, str]]:
    """Key and name of each image with such a `source` or `url`; of none in a remote store."""
    if dataset.store is not None:
        return
    images = ShardImages(dataset, 1)
    columns = ["url"] if dataset.tars else ["url", "source"]  # members of two tar files may have one name
    with Progress("search", len(images), "image") as bar:
        for number in range(len(images)):
            metadata = images.metadata(number)
            for value in map(metadata.get, columns):
                if isinstance(value, str) and value in names:
                    yield images.key(number).encode(), value
            bar.update()


def _read_lines(file: str) -> tuple[set[bytes], dict[str, int]]:
    """The keys in a file, and its other lines with their numbers."""
    keys, names = set[bytes](), dict[str, int]()
    try:
        with open(file, encoding="utf-8-sig") as lines:
            for number, line in enumerate(bounded_lines(lines), 1):
                word = line.strip()
                if _KEY.fullmatch(word):
                    keys.add(word[:KEY_DIGITS].lower().encode())
                elif word:
                    names.setdefault(word, number)
    except OSError as error:
        raise UserError(f"--remove {file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"--remove {file} is no list of keys ({error}): give a text file") from None
    return keys, names
