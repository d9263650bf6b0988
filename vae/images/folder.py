"""The image files below a folder, and their split into training and validation."""

import hashlib
import os
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec

from vae.images.formats import EXTENSIONS_OF, HEAD_BYTES, PLUGINS, BadImageError, sniff_format
from vae.system import console
from vae.system.addresses import address_problem, is_remote
from vae.system.errors import DataError, UserError
from vae.system.files import open_regular

EXTENSIONS = (
    ".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".png", ".apng", ".webp", ".bmp", ".tif", ".tiff", ".avif",
    ".gif",
)  # fmt: skip
# Image formats that training does not read; prepare_data.py --mode validate reports why for each file.
OTHER_EXTENSIONS = (
    ".heic", ".heif", ".jxl", ".jp2", ".svg", ".pdf", ".psd", ".ico", ".exr", ".hdr",
)  # fmt: skip
SYSTEM_FILES = ("thumbs.db", "desktop.ini", ".ds_store")
# With fewer images a hash threshold would miss the requested share by too much (5 % of 1000: sd 0.7 %).
SMALL_SET = 1000


class UnreadFiles:
    """Image files that cannot be read here, such as HEIC without its package; pipes; links to themselves."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.special: list[str] = []

    def add(self, name: str, code: str) -> None:
        """Note a skipped entry if it is such a file: `on_skip` of walk_images."""
        if code == "other_file" and name.lower().endswith(OTHER_EXTENSIONS):
            self.names.append(name)
        elif code == "special_file" or (code == "link_loop" and name.lower().endswith(EXTENSIONS)):
            self.special.append(name)

    def __str__(self) -> str:
        """Their number, an example and the remedy; empty without such files."""
        if not self.names:
            return ""
        name, extension = self.names[0], os.path.splitext(self.names[0])[1].lower()
        packages = [package for kind, (_, package) in PLUGINS.items() if extension in EXTENSIONS_OF[kind]]
        remedy = "".join(f"run pip install {package}, or " for package in packages)
        files = "1 file" if len(self.names) == 1 else f"{len(self.names)} files"
        return f"{files} of other formats, for example {name}: {remedy}convert them to PNG or JPEG"


def list_images(root: str | os.PathLike[str], *, flag: str = "--data_path") -> list[str]:
    """Names of the image files below `root` at any depth: relative, with forward slashes, sorted.

    Skips hidden files and folders, `._*` and special files; follows each linked folder once. Prints a warning
    about image files that cannot be read here. Raises DataError, with `flag` in its message, if the folder
    does not exist or contains no images.
    """
    unread = UnreadFiles()
    names = sorted(walk_images(root, flag=flag, on_skip=unread.add))
    if not names:
        raise DataError(_no_images(root, flag, unread))
    if unread.names:
        console.warning(f"{flag} {os.fspath(root)}: skips {unread}")
    if unread.special:
        example = f"pipes, devices, sockets or links to themselves, for example {unread.special[0]}"
        console.warning(f"{flag} {os.fspath(root)}: skips {len(unread.special)} {example}")
    return names


def check_images(root: str | os.PathLike[str], *, flag: str = "--data_path") -> None:
    """Raise the DataError of list_images, if any; stops at the first image."""
    unread = UnreadFiles()
    if next(walk_images(root, flag=flag, on_skip=unread.add), None) is None:
        raise DataError(_no_images(root, flag, unread))


def _no_images(root: str | os.PathLike[str], flag: str, unread: UnreadFiles) -> str:
    kinds = " ".join(extension[1:] for extension in readable_extensions())
    remedy = f", but {unread}" if unread.names else ": add some or give another folder"
    return f"{flag} {os.fspath(root)} contains no images ({kinds}){remedy}"


def walk_images(
    root: str | os.PathLike[str],
    *,
    flag: str = "--data_path",
    extensions: tuple[str, ...] = (),
    on_skip: Callable[[str, str], None] = lambda name, code: None,
) -> Iterator[str]:
    """Yield the names of list_images one by one, folder by folder, unsorted within a folder.

    Keeps only the pending folders in memory, never a list of files. Also yields files with one of
    `extensions`, which training does not read. A file without an extension counts as an image if its first
    bytes are those of one. Calls `on_skip(name, code)` for every skipped entry.
    """
    _check_folder(root, flag)
    return _walk(os.fspath(root), flag, readable_extensions() + extensions, on_skip)


def _check_folder(root: str | os.PathLike[str], flag: str) -> None:
    root = os.fspath(root)
    if problem := address_problem(root):
        raise DataError(f"{flag} {root} {problem}")
    if is_remote(root) or (root.lower().endswith(".json") and os.path.isfile(root)):
        raise DataError(
            f"{flag} {root} is no folder: datasets of shards are read by train_vae.py, "
            "evaluate_vae.py and prepare_data.py --mode validate; give a folder that contains your images"
        )
    if not os.path.lexists(root):
        raise DataError(f"{flag} {root} does not exist: give the folder that contains your images")
    if not os.path.isdir(root) and root.lower().endswith(".jsonl"):
        raise DataError(
            f"{flag} {root} is a manifest, not a folder: give its folder; evaluate_vae.py reads its "
            "validation images from the validation.json that prepare_data.py --mode shard writes"
        )
    if not os.path.isdir(root):
        raise DataError(f"{flag} {root} is not a folder: give the folder that contains your images")


def readable_extensions() -> tuple[str, ...]:
    """Extensions of the formats that can be decoded here: some need an additional package."""
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
            subfolders = []
            with os.scandir(path) as entries:
                for entry in entries:
                    name = f"{folder}/{entry.name}" if folder else entry.name
                    code = _classify(entry, extensions)
                    if code == "folder":
                        subfolders.append(name)
                        if entry.name.lower().endswith(extensions):
                            on_skip(name, "folder_named_like_image")
                    elif code is None:
                        yield name
                    else:
                        on_skip(name, code)
        except OSError as error:
            raise DataError(
                f"{flag}: folder {path} cannot be read ({error.strerror}): fix its permissions"
            ) from error
        folders += sorted(subfolders, reverse=True)


def _classify(entry: os.DirEntry[str], extensions: tuple[str, ...]) -> str | None:
    """None for an image file, `folder`, or the code of the reason for skipping the entry."""
    name = entry.name.lower()
    if name.startswith("._") or name in SYSTEM_FILES:
        return "system_file"
    if name.startswith("."):
        return "hidden"
    try:
        if entry.is_dir():
            return "folder"
        is_file = entry.is_file()
    except OSError:  # a link that leads to itself
        return "link_loop"
    if (
        not is_file and not entry.is_symlink()
    ):  # a broken link counts as a file: decoding it reports the reason
        return "special_file"
    if name.endswith(extensions):
        return None if is_file or not os.path.exists(entry.path) else "special_file"
    if "." not in name and is_file and _has_image_signature(entry.path):
        return None
    return "other_file"


def _has_image_signature(path: str) -> bool:
    try:
        with open_regular(path) as file:
            sniff_format(file.read(HEAD_BYTES), max_pixels=2**62)
    except (OSError, BadImageError):
        return False
    return True


def split_names(names: list[str], val_split: float, seed: int) -> tuple[list[str], list[str]]:
    """Split names into (train, validation) by a hash of name and seed, keeping their order.

    With 1000 images or more, an image stays in its part when others are added later. From smaller sets the
    images with the lowest hashes are used for validation: at least one, never all.
    """
    if not 0 <= val_split < 1:
        raise UserError(
            f"--val_split {val_split} is not a fraction: give a number from 0 to below 1, such as 0.1"
        )
    if val_split == 0:  # nothing to hash
        return list(names), []
    hashes = sorted({(_hash(name, seed), name) for name in names})
    count = count_lowest([value for value, _ in hashes], val_split)
    validation = {name for _, name in hashes[:count]}
    train = [name for name in names if name not in validation]
    return train, [name for name in names if name in validation]


def count_lowest(hashes: Sequence[int], share: float) -> int:
    """How many of these sorted 64-bit hashes are a `share` of them: the rule of split_names."""
    if share == 0 or len(hashes) < 2:
        return 0
    if len(hashes) < SMALL_SET:
        return min(max(1, round(len(hashes) * share)), len(hashes) - 1)
    return bisect_left(hashes, int(share * 2**64))


def _hash(name: str, seed: int) -> int:
    text = f"{seed}/{name}".encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8, person=b"val_split").digest(), "big")
