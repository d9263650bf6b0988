"""The list of images below a folder, and which of them are held out for validation."""

import hashlib
import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec

from vae.config.errors import DataError, UserError
from vae.data.formats import EXTENSIONS_OF, PLUGINS, BadImageError, sniff_format

EXTENSIONS = (
    ".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".png", ".apng", ".webp", ".bmp", ".tif", ".tiff", ".avif",
)  # fmt: skip
# What people take for images and training does not read: validation tells why, file by file.
OTHER_EXTENSIONS = (
    ".gif", ".heic", ".heif", ".jxl", ".jp2", ".svg", ".pdf", ".psd", ".ico", ".exr", ".hdr",
)  # fmt: skip
SYSTEM_FILES = ("thumbs.db", "desktop.ini", ".ds_store")
# Below this many images a threshold would miss the asked share by much (5 % of 1000: sd 0.7 %).
SMALL_SET = 1000


def list_images(root: str | os.PathLike, *, flag: str = "--data_path") -> list[str]:
    """Names of the images below `root`, any depth: relative, with forward slashes, sorted.

    Hidden files and folders, `._*` and what is no regular file are passed over; linked folders are followed
    once. Raises DataError, naming `flag`, when there is no folder or no image in it.
    """
    names = sorted(walk_images(root, flag=flag))
    if not names:
        kinds = " ".join(extension[1:] for extension in EXTENSIONS)
        raise DataError(f"{flag} {root} holds no images ({kinds}): put some there or give another folder")
    return names


def walk_images(
    root: str | os.PathLike,
    *,
    flag: str = "--data_path",
    extensions: tuple[str, ...] = (),
    on_skip: Callable[[str, str], None] = lambda name, code: None,
) -> Iterator[str]:
    """The names of list_images one by one, folder by folder, in no order within a folder.

    `extensions`: also of files with these, though training reads none of them.

    Holds one folder's sub-folders in memory, never a list of files. `on_skip(name, code)` hears of what is
    passed over. A file without an extension counts where its first bytes are an image's.
    """
    root = os.fspath(root)
    if not os.path.lexists(root):
        raise DataError(f"{flag} {root} does not exist: give the folder that holds your images")
    if not os.path.isdir(root):
        raise DataError(f"{flag} {root} is not a folder: give the folder that holds your images")
    return _walk(root, flag, readable_extensions() + extensions, on_skip)


def readable_extensions() -> tuple[str, ...]:
    """Extensions of what can be decoded here: some formats need a package of their own."""
    plugins = (kind for kind, (module, _) in PLUGINS.items() if find_spec(module))
    return EXTENSIONS + tuple(extension for kind in plugins for extension in EXTENSIONS_OF[kind])


def _walk(
    root: str, flag: str, extensions: tuple[str, ...], on_skip: Callable[[str, str], None]
) -> Iterator[str]:
    visited: set[tuple[int, int]] = set()
    folders = [""]
    while folders:
        folder = folders.pop()
        path = os.path.join(root, folder) if folder else root
        try:
            status = os.stat(path)
            if (status.st_dev, status.st_ino) in visited:
                on_skip(folder, "link_loop")
                continue
            visited.add((status.st_dev, status.st_ino))
            inner = []
            with os.scandir(path) as entries:
                for entry in entries:
                    name = f"{folder}/{entry.name}" if folder else entry.name
                    code = _judge(entry, extensions)
                    if code == "folder":
                        inner.append(name)
                        if entry.name.lower().endswith(extensions):
                            on_skip(name, "folder_named_like_image")
                    elif code is None:
                        yield name
                    else:
                        on_skip(name, code)
        except OSError as error:
            raise DataError(
                f"{flag}: folder {path} cannot be read ({error.strerror}): mend its permissions"
            ) from error
        folders += sorted(inner, reverse=True)


def _judge(entry: os.DirEntry, extensions: tuple[str, ...]) -> str | None:
    """None for an image's file, `folder`, or the code of why an entry is passed over."""
    name = entry.name.lower()
    if name.startswith("._") or name in SYSTEM_FILES:
        return "system_file"
    if name.startswith("."):
        return "hidden"
    if entry.is_dir():
        return "folder"
    is_file = entry.is_file()
    if not is_file and not entry.is_symlink():  # a broken link is a file: the decoder will name it
        return "special_file"
    if name.endswith(extensions):
        return None if is_file or not os.path.exists(entry.path) else "special_file"
    if "." not in name and is_file and _begins_like_an_image(entry.path):
        return None
    return "other_file"


def _begins_like_an_image(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            sniff_format(file, max_pixels=2**62)
    except (OSError, BadImageError):
        return False
    return True


def split_names(names: list[str], val_split: float, seed: int) -> tuple[list[str], list[str]]:
    """Part names into (train, validation) by a hash of name and seed, keeping their order.

    From 1000 images on, an image keeps its side whatever is added later. Smaller sets hold out the
    images with the lowest hashes: at least one, never all.
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
