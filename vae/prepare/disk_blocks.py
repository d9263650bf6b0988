"""Rows that are too many for memory, put on disk in blocks in the order of one byte.

Shapes: R rows of C words; B rows of a block.
"""

import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

MAX_AT_ONCE = 2**22  # rows of a block, unless one value of the byte has more: about 300 MB while it is sorted
CHUNK = 2**20  # rows that are read at once


@contextmanager
def scratch_folder(path: Path) -> Iterator[Path]:
    """A new folder, removed at the end; a killed run has left it. No file in it may be mapped at the end."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def in_blocks(
    rows: Callable[[], Iterable[np.ndarray]], octets: Callable[[np.ndarray], np.ndarray], folder: Path
) -> Iterator[np.ndarray]:
    """The rows uint64 (B, C) of each block; rows with the same byte are in one block, in their order.

    `rows` gives all rows, some at a time, (R, C); it is called twice. `octets` gives a byte of each. Blocks
    come in the order of this byte. They are in `folder` until then.
    """
    counts, columns = np.zeros(256, np.int64), 0
    for chunk in rows():
        counts += np.bincount(octets(chunk).astype(np.intp), minlength=256)
        columns = chunk.shape[1]
    _, block_of = np.unique((np.cumsum(counts) - 1) // MAX_AT_ONCE, return_inverse=True)  # (256,)
    with scratch_folder(folder / "blocks") as scratch:
        paths = [scratch / str(block) for block in range(block_of[-1] + 1)]
        for chunk in rows():
            for block, part in split_rows(chunk, block_of[octets(chunk).astype(np.intp)]):
                append_rows(paths[block], part)
        for path in paths:
            if path.exists():
                yield take_rows(path, columns)


def split_rows(rows: np.ndarray, blocks: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Each block that occurs in `blocks` (R,), and its rows in their order."""
    order = np.argsort(blocks, kind="stable")
    found, first = np.unique(blocks[order], return_index=True)
    for block, part in zip(found.tolist(), np.split(order, first)[1:], strict=True):
        yield block, rows[part]


def append_rows(path: Path, rows: np.ndarray) -> None:
    """Add rows to a file."""
    with path.open("ab") as file:
        file.write(np.ascontiguousarray(rows, np.uint64).data)


def take_rows(path: Path, columns: int) -> np.ndarray:
    """The rows of a file, uint64 (B, columns), which is removed; none without a file."""
    if not path.exists():
        return np.zeros((0, columns), np.uint64)
    rows = np.fromfile(path, np.uint64).reshape(-1, columns)
    path.unlink()
    return rows


def map_file(path: Path, dtype: str, columns: int) -> np.ndarray:
    """The rows in a file as a memory map, (R, columns)."""
    if not path.stat().st_size:  # numpy cannot map an empty file
        return np.zeros((0, columns), dtype)
    return np.memmap(path, dtype, mode="r").reshape(-1, columns)


def differ_from_last(rows: np.ndarray) -> np.ndarray:
    """Whether each row (R, C) differs from the one before it: bool (R,)."""
    return np.append(np.ones(min(1, len(rows)), bool), (rows[1:] != rows[:-1]).any(axis=1))
