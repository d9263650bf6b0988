"""Members of a tar file by the rules of WebDataset: key and extension of a name, and texts about an image."""

import io
import posixpath
import re
import tarfile
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from vae.system.files import parse_json

TEXTS = ("json", "txt", "cls")  # extensions of members that describe an image
# As in webdataset's base_plus_ext: the extension is what follows the first point behind the last slash.
_NAME = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)", re.DOTALL)
# Bytes of a stranger can make tarfile raise all of these.
TAR_ERRORS = (tarfile.TarError, ValueError, ArithmeticError, IndexError)


def split_name(name: str) -> tuple[str, str] | None:
    """Key, with its folders, and extension of a member; None if it is no part of a sample."""
    name = posixpath.normpath(name)  # ./a.jpg
    found = _NAME.fullmatch(name)
    if found is None or name.startswith(("/", "../", "__")):  # __x__ is WebDataset's own
        return None
    return found[1], found[2].lower()


def split_last(name: str) -> tuple[str, str]:
    """Key and extension of a member as file names have them: the extension follows the last point."""
    stem, extension = posixpath.splitext(posixpath.normpath(name))
    return stem, extension[1:].lower()


def is_plain(member: tarfile.TarInfo) -> bool:
    """Whether a member is a file whose bytes follow each other in the tar file."""
    return member.isreg() and not member.issparse()


def texts_in(part: bytes, *keys: str) -> dict[str, bytes]:
    """The TEXTS of the sample with one of these keys, in a part of a tar file that begins with a header.

    Ends at another sample, and where the part is cut.
    """
    texts: dict[str, bytes] = {}
    with suppress(*TAR_ERRORS), tarfile.open(fileobj=io.BytesIO(part), mode="r:") as tar:
        for member in tar:
            names = [split_name(member.name) or ("", ""), split_last(member.name)]
            if not any(key in keys for key, _ in names):
                break
            data = part[member.offset_data : member.offset_data + member.size]
            extension = next((end for key, end in names if key in keys and end in TEXTS), None)
            if extension and is_plain(member) and len(data) == member.size:
                texts.setdefault(extension, data)
    return texts


def metadata_of(texts: Mapping[str, bytes]) -> dict[str, Any]:
    """The content of a JSON text, with the other texts as `caption` and `label` if it lacks these."""
    content: Any = {}
    with suppress(ValueError):
        content = parse_json(texts.get("json", b"{}").decode("utf-8"))
    if not isinstance(content, dict):
        content = {}
    for name, extension in (("caption", "txt"), ("label", "cls")):
        if extension in texts and content.get(name) is None:
            content[name] = texts[extension].decode("utf-8", "replace").strip()
    return content
