"""The one rule for near duplicates, of `analyze`, `split` and `preprocess --drop_duplicates`.

Images that look alike or overlap are a group. Its name begins with the SHA-256 of one of them.
"""

import os
from collections.abc import Iterable, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np

from vae.config.prepare_flags import ReadingConfig
from vae.images.formats import BadImageError
from vae.prepare.check_file import decode_each
from vae.prepare.disk_blocks import scratch_folder
from vae.prepare.fingerprints import (
    Fingerprint,
    FingerprintFiles,
    fingerprint_file,
    fingerprints_to_add,
    read_fingerprints,
)
from vae.prepare.near_duplicates import find_clusters
from vae.prepare.overlaps import join_overlapping
from vae.prepare.pool import Failure
from vae.progress import Progress
from vae.system.console import counted, printable
from vae.system.errors import DataError

EXAMPLES, MAX_NAMES = 3, 4  # groups that a summary names, and images of each


def near_duplicate_groups(fingerprints: Iterable[tuple[str, Fingerprint]], folder: Path) -> dict[str, str]:
    """The name of each image's group, by the SHA-256 of its file; an image in no group is left out.

    `fingerprints` are sorted by these. Exact copies are one image here. Besides the result, memory is needed
    for 80 bytes per image, and `folder` for 3 KB per image meanwhile.
    """
    with scratch_folder(folder / ".near_duplicates") as scratch:
        return _groups(fingerprints, scratch)


def _groups(fingerprints: Iterable[tuple[str, Fingerprint]], scratch: Path) -> dict[str, str]:
    files = FingerprintFiles(fingerprints, scratch)
    clusters = join_overlapping(find_clusters(files.words, scratch), files.words, files, scratch)
    sizes = np.bincount(clusters, minlength=len(files))
    in_group = np.flatnonzero(sizes[clusters] > 1).tolist()
    return {files.content(at): f"near-{files.content(clusters[at])[:16]}" for at in in_group}


def largest_first(name: str, width: int, height: int, num_bytes: int) -> tuple[int, int, bytes]:
    """Key that sorts the images of a group: most pixels first, then most bytes, then by name.

    The first image is the one that --drop_duplicates keeps.
    """
    return -width * height, -num_bytes, os.fsencode(name)


def fingerprint_all(folder: Path, paths: Mapping[str, str], config: ReadingConfig) -> dict[str, Fingerprint]:
    """The fingerprint of each image file of `paths`, by its SHA-256; missing ones are stored in `folder`.

    Raises DataError for an image that cannot be read.
    """
    known = dict(read_fingerprints(folder))
    missing = [(content, path) for content, path in paths.items() if content not in known]
    if missing:
        results = decode_each(partial(_fingerprint, config), missing, config)
        bar = Progress("near duplicates", len(missing), "image")
        with bar, fingerprints_to_add(folder) as add, closing(results):
            for (content, path), result in results:
                if isinstance(result, Failure):
                    raise DataError(
                        f"--input_dir: {path} cannot be compared with the other images "
                        f"({result.reason}: {result.detail}): validate and preprocess the images first"
                    )
                known[content] = result
                add(content, result)
                bar.update()
    return {content: known[content] for content in paths}


def _fingerprint(config: ReadingConfig, job: tuple[str, str]) -> Fingerprint | Failure:
    """The fingerprint of the image of a (content, path) job, or the reason for having none."""
    try:
        return fingerprint_file(job[1], config.max_pixels, config.background, config.first_frame)
    except BadImageError as error:
        return Failure(error.reason, error.detail)


def group_lines(groups: Mapping[str, Iterable[str]], where: str) -> list[str]:
    """Lines of a summary: the number of near duplicates, `where` all are listed, and a few groups."""
    names = {group: sorted(members, key=os.fsencode) for group, members in sorted(groups.items())}
    images = counted(sum(map(len, names.values())), "image")
    lines = [f"  near duplicates: {images} in {counted(len(names), 'group')}{f', {where}' if names else ''}"]
    for group, members in list(names.items())[:EXAMPLES]:
        more = ", ..." if len(members) > MAX_NAMES else ""
        lines.append(f"    {group}: {printable(', '.join(members[:MAX_NAMES]))}{more}")
    return lines
