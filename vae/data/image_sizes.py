"""Widths and heights of image files without decoding: from a manifest or their headers."""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from vae.data.dataset import FolderImages
from vae.data.manifest import read_rows
from vae.images.decoding import upright_size
from vae.images.formats import BadImageError
from vae.progress import track

THREADS = 16  # headers are small: the time is that of a disk or a network share

Size = tuple[int, int]  # width, height; (0, 0) if unknown


def manifest_sizes(path: str, names: Sequence[str]) -> dict[str, Size]:
    """The sizes that a manifest has for these files."""
    wanted = set(names)
    sizes = {}
    for row in read_rows(path):
        width, height = row.get("width"), row.get("height")
        if row["path"] in wanted and type(width) is int and type(height) is int and min(width, height) > 0:
            sizes[row["path"]] = width, height
    return sizes


def image_sizes(
    images: FolderImages, indices: np.ndarray, known: Mapping[str, Size] | None = None
) -> np.ndarray:
    """Width and height of the images at `indices`: int64 (n, 2). `known`: of some, by their name."""
    known = known or {}

    def size(index: int) -> Size:
        name = images.names[index]
        if name in known:
            return known[name]
        try:
            return upright_size(os.path.join(images.root, name))
        except (BadImageError, OSError):  # training names it when it is its turn
            return 0, 0

    with ThreadPoolExecutor(THREADS) as threads:
        sizes = track(threads.map(size, indices.tolist()), "reading sizes", len(indices), "image", keep=False)
        return np.array(list(sizes), dtype=np.int64).reshape(-1, 2)
