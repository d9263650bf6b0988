"""Output names: the source names with the output's extension, unique on every file system."""

import hashlib
import os
import unicodedata

from vae.prepare.ledger import Ledger

MAX_BYTES = 255  # of one name, on all common file systems


def assign_outputs(ledger: Ledger, extension: str) -> None:
    """Assign an output name to every listed file; two names never differ only in case.

    If several files would have the same output name, the first of them gets it. The others get a hash of
    their own name, which does not change when files are added later.
    """
    with ledger.transaction():
        for name, _ in ledger.files():
            outputs = (output_name(name, extension, digits) for digits in (0, 8, 16, 32))
            assert any(ledger.claim(name, output, output_key(output)) for output in outputs)


def output_name(name: str, extension: str, digits: int = 0) -> str:
    """`folder/stem.png` as `folder/stem.jpg`, with `digits` digits of the name's hash after the stem."""
    folder, base = os.path.split(name)
    stem = os.path.splitext(base)[0] if "." in base.lstrip(".") else base
    most = MAX_BYTES - len(extension)
    if len(os.fsencode(stem)) > most:
        digits = digits or 8
    if digits:
        mark = "_" + hashlib.blake2b(os.fsencode(name), digest_size=16).hexdigest()[:digits]
        stem = _shorten(stem, most - len(mark)) + mark
    return f"{folder}/{stem}{extension}" if folder else stem + extension


def output_key(output: str) -> str:
    """A key that is equal for names that a file system may treat as one: other case or accent encoding."""
    text = os.fsencode(output).decode("utf-8", "backslashreplace")
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", text).casefold())


def _shorten(stem: str, most: int) -> str:
    while len(os.fsencode(stem)) > most:
        stem = stem[:-1]
    return stem
