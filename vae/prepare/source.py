"""--input_dir as blocks: which files it names, and of what kind they are."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from vae.config.prepare_flags import ReadingConfig
from vae.data.manifest import MANIFEST_NAME, image_root, is_manifest, read_rows
from vae.images.decoding import has_simplejpeg, parse_background
from vae.images.folder import OTHER_IMAGES, Skips, code_of_file, no_images, readable_extensions, walk_images
from vae.prepare.blocks import (
    FLAG,
    Block,
    as_file,
    common_folder,
    file_blocks,
    find_files,
    read_list,
    refuse_secrets,
)
from vae.prepare.parquet_source import parquet_blocks
from vae.prepare.tar_source import tar_blocks
from vae.shards.hub_files import is_hub_dataset
from vae.shards.store import StoreFile, list_files
from vae.system import console
from vae.system.addresses import is_remote
from vae.system.errors import DataError

ARCHIVES = (".tar", ".parquet")  # files of many images


@dataclass
class Source:
    """The blocks of --input_dir."""

    text: str  # absolute path, or address: what a folder of results is made from
    blocks: list[Block]
    unit: str  # unit of the progress bar
    skips: Skips = field(default_factory=Skips)
    folder: str | None = None  # folder of image files, if it is on this machine
    listed: int = 0  # files, also those behind `limit`

    def manifest(self) -> Iterator[dict[str, Any]]:
        """The rows of the manifest in a folder of image files; none without one."""
        if self.folder is not None and (path := Path(self.folder) / MANIFEST_NAME).is_file():
            yield from read_rows(path, flag=FLAG)


def open_source(config: ReadingConfig) -> Source:
    """The blocks of a folder, tar files or Parquet files, a pattern, a list or an address.

    DataError if there are no images.
    """
    if not has_simplejpeg():
        console.warning(
            "simplejpeg is not installed: damage inside JPEG data is not detected, and reading takes 3x the "
            "time; python -m pip install simplejpeg"
        )
    parse_background(config.background)  # a mistake is an error now, not after hours
    text = config.input_dir
    refuse_secrets(text, FLAG)
    absolute = text if is_remote(text) else os.path.realpath(text)
    kind = _kind(text)
    if kind in ARCHIVES:
        archives = find_files(text, FLAG, (kind,))[: config.limit]
        is_tar = kind == ".tar"
        blocks = list(tar_blocks(archives, FLAG) if is_tar else parquet_blocks(archives, config.image_column))
        if not blocks:
            raise DataError(f"{FLAG} {text} has no rows: give other files")
        return Source(absolute, blocks, "tar" if is_tar else "row group")
    source = Source(absolute, [], "image")
    if kind == ".txt":
        files = [as_file(path, FLAG) for path in read_list(text, FLAG)]
        root, names = "", [str(file) for file in files]  # whole: another line changes no name
        if any(isinstance(file, StoreFile) for file in files):
            root, names = common_folder(files, FLAG)
    elif is_remote(text):
        root = text.rstrip("/")
        names = []
        for address in list_files(StoreFile(f"{root}/", FLAG)):
            name = address[len(root) + 1 :]
            if code := code_of_file(name, readable_extensions() + OTHER_IMAGES):
                source.skips.add(name, code)
            else:
                names.append(name)
    elif is_manifest(text) and os.path.isfile(text):
        root = str(image_root(text))
        names = [row["path"] for row in read_rows(text, flag=FLAG)]
    else:
        root = source.folder = text
        names = list(walk_images(text, flag=FLAG, extensions=OTHER_IMAGES, on_skip=source.skips.add))
    names = sorted(set(names))
    if not names:
        raise no_images(text, FLAG, source.skips)
    source.listed = len(names)
    source.blocks = list(file_blocks(root, names[: config.limit]))
    return source


def _kind(text: str) -> str:
    """The extension of the files that a text names: .tar, .parquet, .txt for a list; empty for images."""
    names: Iterable[str] = [text]
    otherwise = ""
    if is_hub_dataset(text):
        return ".parquet"
    if os.path.isdir(text):
        archives: list[str] = []

        def note(name: str, code: str) -> None:
            if code == "archive":
                archives.append(name)

        walked = walk_images(text, flag=FLAG, extensions=OTHER_IMAGES, on_skip=note)
        names = archives if next(walked, None) is None else ()
    elif text.lower().endswith(".txt"):
        names = islice(read_list(text, FLAG), 1)
        otherwise = ".txt"
    elif is_remote(text) and text.endswith("/"):
        names = list_files(StoreFile(text, FLAG))
        if any(name.lower().endswith(readable_extensions()) for name in names):
            return ""
    ends = {os.path.splitext(name.lower())[1] for name in names}
    return next((kind for kind in ARCHIVES if kind in ends), otherwise)
