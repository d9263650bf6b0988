"""Names of the output images: those of the sources, unique on every file system."""

import hashlib
import os
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import replace

from vae.prepare.blocks import Block, FileBlock, block_id
from vae.prepare.tar_source import TarBlock
from vae.system.files import utf8_text

# Devices of Windows, with any extension.
_RESERVED = re.compile(r"(con|prn|aux|nul|conin\$|conout\$|com[0-9¹²³]|lpt[0-9¹²³]) *(\.|$)", re.IGNORECASE)
MAX_BYTES = 240  # of one name, on all common file systems, without an extension and the digits of a size


def name_outputs(blocks: Sequence[Block]) -> list[Block]:
    """The blocks with the output name of each of their images, which depends on all names.

    If several files would have the same output name, the first of them gets it, and the others get a hash of
    their own name.
    """
    taken: set[bytes] = set()
    named: list[Block] = []
    for block in blocks:
        if not isinstance(block, FileBlock):
            named.append(block)
            continue
        outputs = []
        for name in block.names:
            for digits in (0, 8, 16, 32):
                output = output_name(name, digits)
                key = hashlib.blake2b(output_key(output).encode(), digest_size=12).digest()
                if key not in taken:
                    break
            taken.add(key)
            outputs.append(output)
        named.append(replace(block, id=block_id(block.id, outputs), outputs=tuple(outputs)))
    return named


def output_of(block: Block, at: int, name: str) -> str:
    """The output name, without an extension, of an image of a block."""
    if isinstance(block, FileBlock):
        return block.outputs[at]
    # Other names of the block are not known: one that a file system may change gets a hash.
    plain = f"{block.name.removesuffix('.tar')}/{name}" if isinstance(block, TarBlock) else name
    output = output_name(plain)
    is_plain = output_key(output) == output and plain.startswith(output)
    return output if is_plain else output_name(plain, 8)


def output_name(name: str, digits: int = 0) -> str:
    """`folder/stem.png` as `folder/stem`, with `digits` digits of the name's hash after the stem."""
    parts = [_safe(part) for part in name.replace("\\", "/").split("/")]
    stem = os.path.splitext(parts[-1])[0] if "." in parts[-1].lstrip(".") else parts[-1]
    return "/".join([*(_marked(part, part, 0) for part in parts[:-1]), _marked(stem, name, digits)])


def _marked(text: str, name: str, digits: int) -> str:
    """A text of at most MAX_BYTES, with `digits` digits of the hash of `name`, or 8 if it is too long."""
    if len(text.encode()) > MAX_BYTES:
        digits = digits or 8
    if not digits:
        return text
    mark = "_" + hashlib.blake2b(os.fsencode(name), digest_size=16).hexdigest()[:digits]
    return text.encode()[: MAX_BYTES - len(mark)].decode("utf-8", "ignore") + mark


def _safe(part: str) -> str:
    """A part of a path that every file system and every reader accepts."""
    text = "".join(
        char if char.isprintable() and char not in '\\<>:"|?*' else "_" for char in utf8_text(part)
    )
    kept = text.rstrip(". ")  # which Windows removes
    text = kept + "_" * (len(text) - len(kept))
    return f"_{text}" if not text or _RESERVED.match(text) else text


def output_key(output: str) -> str:
    """A key that is equal for names that a file system may treat as one: other case or accent encoding."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", output).casefold())
