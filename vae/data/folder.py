"""The list of pictures below a folder, and which of them are held out for validation."""

import hashlib
import os
from collections.abc import Iterator

from vae.config.errors import DataError, UserError

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".avif")
# Below this many pictures a threshold would miss the asked share by much (5 % of 1000: sd 0.7 %).
SMALL_SET = 1000


def list_images(root: str | os.PathLike, *, flag: str = "--data_path") -> list[str]:
    """Names of the pictures below `root`, any depth: relative, with forward slashes, sorted.

    Hidden files and folders, `._*` and what is no regular file are passed over; linked folders are followed
    once. Raises DataError, naming `flag`, when there is no folder or no picture in it.
    """
    root = os.fspath(root)
    if not os.path.lexists(root):
        raise DataError(f"{flag} {root} does not exist: give the folder that holds your pictures")
    if not os.path.isdir(root):
        raise DataError(f"{flag} {root} is not a folder: give the folder that holds your pictures")
    names = sorted(_walk(root, flag))
    if not names:
        kinds = " ".join(extension[1:] for extension in EXTENSIONS)
        raise DataError(f"{flag} {root} holds no pictures ({kinds}): put some there or give another folder")
    return names


def _walk(root: str, flag: str) -> Iterator[str]:
    visited: set[tuple[int, int]] = set()
    folders = [""]
    while folders:
        folder = folders.pop()
        path = os.path.join(root, folder) if folder else root
        status = os.stat(path)
        if (status.st_dev, status.st_ino) in visited:
            continue
        visited.add((status.st_dev, status.st_ino))
        try:
            entries = list(os.scandir(path))
        except OSError as error:
            raise DataError(
                f"{flag}: folder {path} cannot be read ({error.strerror}): mend its permissions"
            ) from error
        for entry in sorted(entries, key=lambda item: item.name, reverse=True):
            name = f"{folder}/{entry.name}" if folder else entry.name
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                folders.append(name)
            elif entry.name.lower().endswith(EXTENSIONS) and (entry.is_file() or entry.is_symlink()):
                yield name  # a broken link too: the decoder will name it


def split_names(names: list[str], val_split: float, seed: int) -> tuple[list[str], list[str]]:
    """Part names into (train, validation) by a hash of name and seed, keeping their order.

    From 1000 pictures on, a picture keeps its side whatever is added later. Smaller sets hold out the
    pictures with the lowest hashes: at least one, never all.
    """
    if not 0 <= val_split < 1:
        raise UserError(
            f"--val_split {val_split} is not a share: give a number from 0 to below 1, such as 0.1"
        )
    if val_split == 0 or len(names) < 2:
        return list(names), []
    hashes = {name: _hash(name, seed) for name in names}
    if len(hashes) < SMALL_SET:
        count = min(max(1, round(len(hashes) * val_split)), len(hashes) - 1)
        held_out = set(sorted(hashes, key=lambda name: (hashes[name], name))[:count])
    else:
        threshold = int(val_split * 2**64)
        held_out = {name for name, value in hashes.items() if value < threshold}
    train = [name for name in names if name not in held_out]
    return train, [name for name in names if name in held_out]


def _hash(name: str, seed: int) -> int:
    text = f"{seed}/{name}".encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8, person=b"val_split").digest(), "big")
