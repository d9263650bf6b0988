"""Exact duplicates, recognised by the hashes of files of equal size before any file is decoded.

The first of several files with equal bytes, by name, is converted. The others get its result.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

from vae.config.prepare_flags import PreprocessConfig
from vae.prepare.ledger import ACCEPTED, DUPLICATE, REJECTED, Content, Ledger, Result, first_names
from vae.prepare.pool import count_workers
from vae.prepare.preprocess.convert import record_without_images
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
        return own._replace(reason="exact_duplicate", detail=detail, sha256=content.sha256)
    if result.status == REJECTED and result.reason not in TRANSIENT:
        return own._replace(status=REJECTED, reason=result.reason, detail=result.detail, sha256=result.sha256)
    return None


def _contents(
    ledger: Ledger, config: PreprocessConfig, is_current: Callable[[Result, str], bool]
) -> Iterator[Content]:
    for name, output in first_names(ledger, config.limit):
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
