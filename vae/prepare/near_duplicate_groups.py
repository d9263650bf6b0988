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
from vae.prepare.fingerprints import Fingerprint, fingerprint_file, fingerprints_to_add, read_fingerprints
from vae.prepare.near_duplicates import find_clusters
from vae.prepare.overlaps import join_overlapping
from vae.prepare.pool import Failure
from vae.progress import Progress
from vae.system.console import counted, printable
from vae.system.errors import DataError

EXAMPLES, MAX_NAMES = 3, 4  # groups that a summary names, and images of each


def near_duplicate_groups(fingerprints: Mapping[str, Fingerprint]) -> dict[str, str]:
    """The name of each image's group, by the SHA-256 of its file; an image in no group is left out.

    Exact copies are one image here. The order of the images does not matter.
    """
    contents = sorted(fingerprints)
    hashes = np.array([fingerprints[content].words for content in contents], np.uint64).reshape(-1, 2)
    keypoints = [fingerprints[content].keypoints for content in contents]
    clusters = join_overlapping(find_clusters(hashes), hashes, keypoints)
    sizes = np.bincount(clusters, minlength=len(contents))
    in_group = np.flatnonzero(sizes[clusters] > 1).tolist()
    return {contents[at]: f"near-{contents[clusters[at]][:16]}" for at in in_group}


def largest_first(name: str, width: int, height: int, num_bytes: int) -> tuple[int, int, bytes]:
    """Key that sorts the images of a group: most pixels first, then most bytes, then by name.

    The first image is the one that --drop_duplicates keeps.
    """
    return -width * height, -num_bytes, os.fsencode(name)


def fingerprint_all(folder: Path, paths: Mapping[str, str], config: ReadingConfig) -> dict[str, Fingerprint]:
    """The fingerprint of each image file of `paths`, by its SHA-256; missing ones are stored in `folder`.

    Raises DataError for an image that cannot be read.
    """
    known = read_fingerprints(folder)
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
