"""The image files below a folder, what else is there, and their split into training and validation."""

import hashlib
import os
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec

from vae.images.formats import EXTENSIONS_OF, HEAD_BYTES, PLUGINS, BadImageError, sniff_format
from vae.system import console
from vae.system.addresses import address_problem, is_remote
from vae.system.console import counted
from vae.system.errors import DataError

# Names are in lower case. * stands for any characters, and a slash follows the name of the parent folder.
NAMES = {
    "Windows": ("$recycle.bin", "system volume information", "thumbs.db", "ehthumbs*.db", "desktop.ini"),
    "macOS": ("__macosx", "._*", ".ds_store", "icon\r", ".trashes", ".spotlight-v100", ".fseventsd"),
    "Apple Photos": ("*.photoslibrary/resources", "*.photoslibrary/private", "*.photoslibrary/database"),
    "iPhoto": ("*.photolibrary/previews", "*.photolibrary/thumbnails"),
    "Linux": ("lost+found", ".trash-*", ".thumbnails"),
    "Synology": ("@eadir", "#recycle", "#snapshot", "synophoto_*", "synofile_*"),
    "QNAP": ("@recycle", "@recently-snapshot", ".@__thumb", "@__thumb"),
    "Buffalo": ("trashbox",),
    "Lightroom": ("*.lrdata",),
    "Capture One": ("captureone", "*.cocatalog"),
    "digiKam": (".dtrash",),
    "Picasa": (".picasaoriginals", "picasa.ini"),
    "Syncthing": (".stversions",),
    "Nextcloud": ("appdata_*",),
    "Sony cameras": ("m4root/thmbnl",),
}
# Formats that training does not read; prepare_data.py --mode validate reports why for each of the first.
OTHER_IMAGES = (
    ".heic", ".heif", ".hif", ".jxl", ".jp2", ".j2k", ".jpf", ".jpx", ".jxr", ".svg", ".pdf", ".psd", ".psb",
    ".xcf", ".kra", ".ai", ".eps", ".ico", ".exr", ".hdr", ".tga", ".dds", ".qoi", ".pcx", ".ppm", ".pgm",
    ".pbm", ".pnm", ".dib", ".jps", ".insp", ".heics", ".avifs", ".dcm", ".fits",
)  # fmt: skip
RAW = (
    ".nef", ".nrw", ".cr2", ".cr3", ".crw", ".arw", ".sr2", ".dng", ".orf", ".rw2", ".raf", ".pef", ".srw",
    ".3fr", ".iiq", ".x3f", ".gpr",
)  # fmt: skip
VIDEOS = (".mov", ".mp4", ".m4v", ".avi", ".mkv", ".webm", ".mts", ".m2ts", ".3gp", ".wmv")
KINDS = {"raw_file": RAW, "video": VIDEOS, "other_image": OTHER_IMAGES}  # the codes of what is skipped

_PATTERNS = (re.escape(name).replace(r"\*", "[^/]*") for names in NAMES.values() for name in names)
_OTHERS = re.compile(f"(?:^|/)(?:{'|'.join(_PATTERNS)})(?:/|$)", re.IGNORECASE)
_HIDDEN = re.compile(r"(?:^|/)\.(?!\.?(?:/|$))")


def code_of(path: str) -> str | None:
    """`system` or `hidden` for a relative path that is not for users, or is below such a folder."""
    if _OTHERS.search(path):
        return "system"
    return "hidden" if _HIDDEN.search(path) else None


def remedy_for(name: str) -> str:
    """The remedy for a file of another format."""
    extension = os.path.splitext(name)[1].lower()
    packages = [package for kind, (_, package) in PLUGINS.items() if extension in EXTENSIONS_OF[kind]]
    return "".join(f"run pip install {package}, or " for package in packages) + "convert them to PNG or JPEG"


EXTENSIONS = (
    ".jpg", ".jpeg", ".jpe", ".jfif", ".mpo", ".png", ".apng", ".webp", ".bmp", ".tif", ".tiff", ".avif",
    ".gif",
)  # fmt: skip
# With fewer images a hash threshold would miss the requested share by too much (5 % of 1000: sd 0.7 %).
SMALL_SET = 1000
EXAMPLES = 3
# prepare_data.py writes these files beside prepared images; they are not counted.
OF_PREPARATION = (
    ".prepare", ".vae_folder.json", "manifest.jsonl", "rejected.jsonl", "preprocess_settings.json",
    "demo_settings.json", "dataset.json", "validation.json",
)  # fmt: skip
# Remedies for archives, and for a path that is not a folder, by the end of its name.
_SHARD = "prepare_data.py --mode shard --input_dir {path} --output_dir DIR makes a dataset.json of it"
ARCHIVES = {
    (".tar",): "prepare_data.py --mode index --input {path} --output_dir DIR makes a dataset.json of it",
    (".parquet",): _SHARD,
    (".zip", ".7z", ".rar", ".tgz", ".tbz", ".tbz2", ".txz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst"):
        "unpack it, and give the folder",
    (".arrow",): "write it as Parquet (Dataset.to_parquet), which prepare_data.py --mode shard reads",
}  # fmt: skip
_ARCHIVE_ENDS = tuple(end for ends in ARCHIVES for end in ends)
PATHS = {**ARCHIVES, (".txt",): _SHARD, EXTENSIONS: "give the folder that contains it"}


@dataclass
class Skips:
    """The entries of a folder that are not read: the number of each code, and a few examples."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    extensions: Counter[str] = field(default_factory=Counter)  # of images, raw files and videos

    def add(self, name: str, code: str) -> None:
        """Count an entry: `on_skip` of walk_images."""
        self.counts[code] += 1
        if len(examples := self.examples.setdefault(code, [])) < EXAMPLES:
            examples.append(name)
        if code in KINDS:
            self.extensions[os.path.splitext(name.lower())[1]] += 1

    def formats(self) -> str:
        """The files of other formats, with an example and the remedy; empty without any."""
        if not self.extensions:
            return ""
        kinds = ", ".join(f"{count} {extension}" for extension, count in self.extensions.most_common())
        name = next(self.examples[code][0] for code in reversed(KINDS) if code in self.examples)
        files = counted(self.extensions.total(), "file")
        return f"{files} of other formats ({kinds}), for example {name}: {remedy_for(name)}"

    def archives(self) -> str:
        """The files of many images, with an example and the way on; empty without any."""
        if not (count := self.counts["archive"]):
            return ""
        name = self.examples["archive"][0]
        return f"{counted(count, 'archive')}, for example {name}: {_way_on(name, name, ARCHIVES)}"

    def unreadable(self) -> str:
        """The folders that cannot be read, with an example and the remedy; empty without any."""
        if not (count := self.counts["unreadable_folder"]):
            return ""
        example = self.examples["unreadable_folder"][0]
        folders = f"{counted(count, 'folder')} that cannot be read, for example {example}"
        return f"{folders}: fix its permissions; on Windows, allow long paths"

    def others(self) -> str:
        """Folders and images that are hidden, or of other programs; empty without any."""
        codes = [code for code in ("system", "hidden") if self.counts[code]]
        if not codes:
            return ""
        count = sum(self.counts[code] for code in codes)
        return (
            f"{count} folders and images that are hidden or of other programs, for example "
            f"{self.examples[codes[0]][0]}"
        )


def list_images(root: str | os.PathLike[str], *, flag: str = "--data_path") -> list[str]:
    """Names of the image files below `root` at any depth: relative, with forward slashes, sorted.

    Skips special files and what is hidden or of other programs; follows each linked folder once. Prints what
    is skipped and may be missed. Raises DataError, with `flag` in its message, if the folder does not exist
    or contains no images.
    """
    skips = Skips()
    names = sorted(walk_images(root, flag=flag, on_skip=skips.add))
    if not names:
        raise no_images(root, flag, skips)
    print_skips(skips, f"{flag} {os.fspath(root)}")
    return names


def list_folders(roots: Sequence[str]) -> tuple[str, list[str]]:
    """The images of one or several folders: the folder that contains all, and sorted names relative to it."""
    if len(roots) == 1:
        return roots[0], list_images(roots[0])
    folders = [os.path.abspath(root) for root in roots]
    try:
        common = os.path.commonpath(folders)
    except ValueError:  # several drives of Windows
        common = ""
    names = []
    for folder in folders:
        inner = (os.path.relpath(folder, common) if common else folder).replace(os.sep, "/")
        names += [f"{inner}/{name}" for name in list_images(folder)]
    return common, sorted(names)


def print_skips(skips: Skips, where: str) -> None:
    """Print a line for each kind of skipped files that a user may miss."""
    for text in filter(None, (skips.formats(), skips.archives(), skips.unreadable())):
        console.warning(f"{where}: skips {text}")
    if text := skips.others():
        console.info(f"{where}: skips {text}")


def check_images(root: str | os.PathLike[str], *, flag: str = "--data_path") -> None:
    """Raise the DataError of list_images, if any; stops at the first image."""
    skips = Skips()
    if next(walk_images(root, flag=flag, on_skip=skips.add), None) is None:
        raise no_images(root, flag, skips)


def no_images(root: str | os.PathLike[str], flag: str, skips: Skips) -> DataError:
    """The error for a folder without images: what it has instead."""
    folder = os.fspath(root)
    for name in skips.examples.get("archive", ()):
        return DataError(f"{flag} {folder} contains no images, but {name}: {_way_on(name, folder, ARCHIVES)}")
    kinds = " ".join(extension[1:] for extension in readable_extensions())
    others = "; ".join(filter(None, (skips.formats(), skips.unreadable(), skips.others())))
    remedy = f", but {others}" if others else ": add some or give another folder"
    return DataError(f"{flag} {folder} contains no images ({kinds}){remedy}")


def _way_on(name: str, path: str, known: dict[tuple[str, ...], str]) -> str:
    """The remedy for a file, or for the folder of many; empty if unknown."""
    remedies = (text for ends, text in known.items() if name.lower().endswith(ends))
    return next(remedies, "").format(path=console.command_line(path))


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
            f"{flag} {root} is no folder: datasets of shards are read by train_vae.py and "
            "evaluate_vae.py; give a folder that contains your images"
        )
    if not os.path.isdir(root) and (remedy := _way_on(root, root, PATHS)):
        raise DataError(f"{flag} {root} is not a folder: {remedy}")
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
        subfolders: list[str] = []
        try:
            status = os.stat(path)
            if (status.st_dev, status.st_ino) in visited:
                on_skip(folder, "link_loop")
                continue
            visited.add((status.st_dev, status.st_ino))
            with os.scandir(path) as entries:
                for entry in entries:
                    name = f"{folder}/{entry.name}" if folder else entry.name
                    code = _classify(entry, name, extensions)
                    if entry.name in OF_PREPARATION:
                        continue
                    if code == "folder":
                        subfolders.append(name)
                        if entry.name.lower().endswith(extensions):
                            on_skip(name, "folder_named_like_image")
                    elif code is None:
                        yield name
                    else:
                        on_skip(name, code)
        except OSError as error:
            if not folder:
                raise DataError(
                    f"{flag} {root} cannot be read ({error.strerror}): fix its permissions"
                ) from error
            on_skip(folder, "unreadable_folder")
        folders += sorted(subfolders, reverse=True)


def _classify(entry: os.DirEntry[str], path: str, extensions: tuple[str, ...]) -> str | None:
    """None for an image file, `folder`, or the code of the reason for skipping the entry."""
    name = entry.name.lower()
    try:
        is_folder = entry.is_dir()
        is_file = entry.is_file()
    except OSError:  # a link that leads to itself
        return "special_file" if name.endswith(extensions) else "other_file"
    if is_folder:
        return code_of(path) or "folder"
    code = code_of_file(path, extensions)
    # A broken link counts as a file: decoding it reports the reason.
    if not is_file and not entry.is_symlink():
        return "special_file"
    if code is None:
        return None if is_file or not os.path.exists(entry.path) else "special_file"
    if "." not in name and is_file and _has_image_signature(entry.path):
        return None
    return code


def code_of_file(path: str, extensions: tuple[str, ...]) -> str | None:
    """The code of the reason for skipping a file with this name; None for an image of `extensions`."""
    name = path.lower()
    is_image = name.endswith(extensions)
    if code := code_of(path):  # a line about .DS_Store and Thumbs.db would be in every folder
        return code if is_image else f"{code}_file"
    if is_image:
        return None
    if name.endswith(_ARCHIVE_ENDS):
        return "archive"
    return next((code for code, ends in KINDS.items() if name.endswith(ends)), "other_file")


def _has_image_signature(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            sniff_format(file.read(HEAD_BYTES))
    except (OSError, BadImageError):
        return False
    return True


def split_names(names: list[str], val_split: float, seed: int) -> tuple[list[str], list[str]]:
    """Split names into (train, validation) by a hash of name and seed, keeping their order.

    With 1000 images or more, an image stays in its part when others are added later. From smaller sets the
    images with the lowest hashes are used for validation: at least one, never all.
    """
    if val_split == 0:  # nothing to hash
        return list(names), []
    hashes = sorted({(_hash(name, seed), name) for name in names})
    count = count_lowest([value for value, _ in hashes], val_split)
    validation = {name for _, name in hashes[:count]}
    train = [name for name in names if name not in validation]
    return train, [name for name in names if name in validation]


def count_lowest(hashes: Sequence[int], share: float) -> int:
    """The number of the lowest of these sorted 64-bit hashes that make up a `share`, as in split_names."""
    if share == 0 or len(hashes) < 2:
        return 0
    if len(hashes) < SMALL_SET:
        return min(max(1, round(len(hashes) * share)), len(hashes) - 1)
    return bisect_left(hashes, int(share * 2**64))


def _hash(name: str, seed: int) -> int:
    text = f"{seed}/{name}".encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8, person=b"val_split").digest(), "big")
