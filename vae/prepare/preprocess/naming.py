"""Names of outputs: those of the sources with the output's extension, distinct on every system."""

import hashlib
import os
import unicodedata

from vae.prepare.ledger import Ledger

MOST_BYTES = 255  # of one name, on all common file systems


def assign_outputs(ledger: Ledger, extension: str) -> None:
    """Give every listed file the name of its output, without two names that differ in case alone.

    Of several files that would give one name, the first keeps it; the others get a hash of their own name,
    which stays the same whatever is added later.
    """
    with ledger.transaction():
        for name, _ in ledger.files():
            outputs = (output_name(name, extension, digits) for digits in (0, 8, 16, 32))
            assert any(ledger.claim(name, output, output_key(output)) for output in outputs)


def output_name(name: str, extension: str, digits: int = 0) -> str:
    """`folder/stem.png` as `folder/stem.jpg`, with so many digits of the name's hash behind the stem."""
    folder, base = os.path.split(name)
    stem = os.path.splitext(base)[0] if "." in base.lstrip(".") else base
    room = MOST_BYTES - len(extension)
    if len(os.fsencode(stem)) > room:
        digits = digits or 8
    if digits:
        mark = "_" + hashlib.blake2b(os.fsencode(name), digest_size=16).hexdigest()[:digits]
        stem = _shorten(stem, room - len(mark)) + mark
    return f"{folder}/{stem}{extension}" if folder else stem + extension


def output_key(output: str) -> str:
    """The same for names that some file system takes for one: other case, other composition of accents."""
    text = os.fsencode(output).decode("utf-8", "backslashreplace")
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", text).casefold())


def _shorten(stem: str, room: int) -> str:
    while len(os.fsencode(stem)) > room:
        stem = stem[:-1]
    return stem
