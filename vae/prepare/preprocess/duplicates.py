"""Exact duplicates, recognised before any file is decoded, and near duplicates, recognised afterwards.

The first of several files with equal bytes, by name, is converted. The others get its result. Of a group of
near duplicates, --drop_duplicates keeps the largest image.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

from vae.config.prepare_flags import PreprocessConfig
from vae.images.decoding import upright_size
from vae.images.formats import BadImageError
from vae.prepare.fingerprints import (
    FILE_NAME,
    Fingerprint,
    fingerprint_line,
    fingerprints_to_add,
    read_fingerprints,
)
from vae.prepare.ledger import (
    ACCEPTED,
    DUPLICATE,
    EXACT_DUPLICATE,
    NEAR_DUPLICATE,
    REJECTED,
    Content,
    Ledger,
    Result,
)
from vae.prepare.near_duplicate_groups import fingerprint_all, largest_first, near_duplicate_groups
from vae.prepare.parts import Part
from vae.prepare.pool import count_workers
from vae.prepare.preprocess.convert import record_without_images
from vae.prepare.preprocess.output_folder import OutputFolder, replace_if_new
from vae.prepare.rejections import TRANSIENT
from vae.progress import Progress
from vae.system.console import printable
from vae.system.files import sha256_of_file

CHUNK = 1000  # files at a time, so that memory does not grow


def find_contents(
    ledger: Ledger, config: PreprocessConfig, is_current: Callable[[Result, str], bool]
) -> None:
    """List the contents of all files, and hash those that may be duplicates of a file to convert."""
    ledger.list_contents(_contents(ledger, config, is_current))
    count, names = ledger.count_possible_duplicates(), ledger.possible_duplicates()
    if not count:
        return
    threads = ThreadPoolExecutor(count_workers(config.num_workers))  # hashing and reading release the GIL
    try:
        with Progress("looking for duplicates", count, "file", keep=False) as bar:
            while chunk := list(islice(names, CHUNK)):
                paths = (os.path.join(config.input_dir, name) for name in chunk)
                for name, digest in zip(chunk, threads.map(_hash, paths), strict=True):
                    if digest is not None:
                        ledger.set_hash(name, digest)
                    bar.update()
    finally:
        threads.shutdown(cancel_futures=True)


def is_first(ledger: Ledger, content: Content) -> bool:
    """Whether no earlier file has the same bytes."""
    return content.sha256 is None or ledger.first_with_hash(content.sha256).name == content.name


def result_of_first(ledger: Ledger, content: Content, output: str) -> Result | None:
    """The result of a file from that of the first file with the same bytes; None if it must be decoded.

    It must be decoded if the first file changed while it was read, or was rejected for a reason that may not
    apply again.
    """
    assert content.sha256 is not None, "only hashed files have a first file"
    first = ledger.first_with_hash(content.sha256)
    result = ledger.result(first.name)
    if result is None or (result.size, result.mtime_ns) != (first.size, first.mtime_ns):
        return None
    own = Result(
        content.name,
        DUPLICATE,
        size=content.size,
        mtime_ns=content.mtime_ns,
        record=record_without_images(output),
    )
    if result.status == ACCEPTED and result.sha256 == content.sha256:
        detail = f"of {printable(first.name)}"
        return own._replace(reason=EXACT_DUPLICATE, detail=detail, sha256=content.sha256)
    if result.status == REJECTED and result.reason not in TRANSIENT:
        return own._replace(status=REJECTED, reason=result.reason, detail=result.detail, sha256=result.sha256)
    return None


def drop_near_duplicates(ledger: Ledger, config: PreprocessConfig, folder: OutputFolder) -> int:
    """Mark accepted images as duplicates of the largest image in their group.

    If an image has become the largest of its group, its result is deleted, so that it is converted again.
    Returns the number of deleted results.
    """

    fingerprints = find_fingerprints(ledger, config, folder)
    lines = [fingerprint_line(content, fingerprints[content]) for content in sorted(fingerprints)]
    replace_if_new(folder.hidden / FILE_NAME, lambda: iter(lines))  # whatever order they were added in
    groups = near_duplicate_groups(sorted(fingerprints.items()), folder.hidden)
    members: dict[str, list[Result]] = {}
    for result in _candidates(ledger):
        if group := groups.get(str(result.sha256)):
            members.setdefault(group, []).append(result)
        elif result.reason == NEAR_DUPLICATE:  # the other images of its group no longer exist
            members[str(result.sha256)] = [result]
    return sum(_keep_largest(ledger, config, group) for group in members.values())


def find_fingerprints(
    ledger: Ledger, config: PreprocessConfig, folder: OutputFolder
) -> dict[str, Fingerprint]:
    """The fingerprints of all images that may be near duplicates, by SHA-256; missing ones are stored."""
    paths = {str(one.sha256): os.path.join(config.input_dir, one.name) for one in _candidates(ledger)}
    return fingerprint_all(folder.fingerprints, paths, config)


def join_fingerprints(folder: OutputFolder, count: int) -> None:
    """Add the fingerprints that so many parts have stored."""
    with fingerprints_to_add(folder.fingerprints) as add:
        for number in range(count):
            for content, fingerprint in read_fingerprints(folder.fingerprints_of(Part(number, count))):
                add(content, fingerprint)


def _candidates(ledger: Ledger) -> Iterator[Result]:
    for result in ledger.results(ACCEPTED, DUPLICATE):
        if result.reason != EXACT_DUPLICATE:
            yield result


def _keep_largest(ledger: Ledger, config: PreprocessConfig, group: list[Result]) -> int:
    def key(result: Result) -> tuple[int, int, bytes]:
        try:
            width, height = upright_size(os.path.join(config.input_dir, result.name), config.max_pixels)
        except (BadImageError, OSError):  # it has changed just now: the next run converts it again
            width, height = 0, 0
        return largest_first(result.name, width, height, result.size)

    first, *others = sorted(group, key=key)
    for result in others:
        detail = f"of {printable(first.name)}"
        ledger.record(result._replace(status=DUPLICATE, reason=NEAR_DUPLICATE, detail=detail))
    if first.reason == NEAR_DUPLICATE:
        ledger.forget(first.name)
    return first.reason == NEAR_DUPLICATE


def _contents(
    ledger: Ledger, config: PreprocessConfig, is_current: Callable[[Result, str], bool]
) -> Iterator[Content]:
    for name, output in ledger.files(config.limit):
        assert output is not None, "assign_outputs has named it"
        result = ledger.result(name)
        if result is not None and is_current(result, output):
            yield Content(name, result.size, result.mtime_ns, result.sha256, pending=False)
            continue
        try:
            status = os.stat(os.path.join(config.input_dir, name))
        except OSError:  # converting it reports the reason
            yield Content(name, -1, -1, None, pending=True)
        else:
            yield Content(name, status.st_size, status.st_mtime_ns, None, pending=True)


def _hash(path: str) -> str | None:
    try:
        return sha256_of_file(path)
    except OSError:  # converting it reports the reason
        return None
