"""The zip archive of a checkpoint, checked before PyTorch reads it: a forged one could fill the memory."""

import pickletools
import re
import zipfile
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from vae.system.files import open_regular

_MAX_MEMBERS = 100_000  # one per tensor: the default model with AdamW and EMA has about 1,600
_MAX_PICKLE_BYTES = (
    64 * 2**20
)  # names, shapes and the image list's fingerprint; the tensors are other members
_MAX_PARTS = 2**20  # values of all lists and dicts, each as often as it is referred to
_MAX_DEPTH = 32
_TOO_LARGE = "its content is nested too deeply, or refers to itself"
_END = object()
_MAGIC = b"PK\x03\x04"
_MEMBER_HEADER_BYTES = 30  # the smallest header of a member
# Everything that `checkpoint_content` needs. PyTorch's own list of safe names also allows bytearray(10**12).
_GLOBALS = re.compile(
    r"collections OrderedDict|torch\._utils _rebuild_tensor_v2|torch (Float|Double|Half|BFloat16|Long|Int|"
    r"Short|Char|Byte|Bool)Storage"
)


class ArchiveError(ValueError):
    """The archive is not one that torch.save wrote."""


def check_archive(path: Path) -> None:
    """Raise ArchiveError if the file is not an archive of plain tensors without compression.

    Reads its list of members and its pickle, which is not executed. Raises OSError if it cannot be read.
    """
    with open_regular(path) as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise ArchiveError("it is not a zip archive")
        try:
            with zipfile.ZipFile(file) as archive:
                _check_members(archive, path.stat().st_size)
                _check_pickle(archive)
        except (OSError, ArchiveError):
            raise
        except Exception as error:  # damage in the archive's own fields raises many types
            raise ArchiveError(f"its list of parts cannot be read: {error}") from None


def _check_members(archive: zipfile.ZipFile, file_bytes: int) -> None:
    """Without compression and overlaps, the content is not larger than the file."""
    members = archive.infolist()
    if len(members) > _MAX_MEMBERS:
        raise ArchiveError(f"it has {len(members)} parts")
    compressed = [member.filename for member in members if member.compress_type != zipfile.ZIP_STORED]
    if compressed:
        raise ArchiveError(f"its part {compressed[0]!r} is compressed")
    if len({member.filename for member in members}) < len(members):
        raise ArchiveError("two of its parts have the same name")
    if sum(member.file_size + _MEMBER_HEADER_BYTES for member in members) > file_bytes:
        raise ArchiveError("its parts are larger than the file")


def _check_pickle(archive: zipfile.ZipFile) -> None:
    """The pickle is of a bounded size, and uses only the names that a checkpoint needs."""
    names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
    if len(names) != 1 or archive.getinfo(names[0]).file_size > _MAX_PICKLE_BYTES:
        raise ArchiveError("it has no data.pkl of a checkpoint")
    sizes = _TupleSizes()
    for opcode, argument, _position in pickletools.genops(archive.read(names[0])):
        if opcode.name in ("GLOBAL", "STACK_GLOBAL", "INST") and not _GLOBALS.fullmatch(str(argument)):
            raise ArchiveError(f"it uses {argument or 'a computed name'}")
        if sizes.after(opcode, argument) > _MAX_PARTS:
            raise ArchiveError(_TOO_LARGE)


class _TupleSizes:
    """Parts of the tuples that a pickle builds: one that has another twice, 40 times, takes years to hash."""

    def __init__(self) -> None:
        self._stack: list[int] = []
        self._marks: list[int] = []
        self._memo: dict[int, int] = {}

    def after(self, opcode: pickletools.OpcodeInfo, argument: Any) -> int:
        """The size of the newest object after this opcode; IndexError for a pickle that is not valid."""
        stack, name = self._stack, opcode.name
        if name == "MARK":
            self._marks.append(len(stack))
        elif "GET" in name:
            stack.append(self._memo[int(argument)])
        elif "PUT" in name or name == "MEMOIZE":
            self._memo[len(self._memo) if argument is None else int(argument)] = stack[-1]
        else:
            count, start = len(opcode.stack_before), len(stack)
            if pickletools.markobject in opcode.stack_before:
                count, start = opcode.stack_before.index(pickletools.markobject), self._marks.pop()
            popped = stack[start - count :]
            del stack[start - count :]
            size = sum(popped, 1) if name.startswith("TUPLE") else max(popped, default=1)
            stack += [size] * len(opcode.stack_after)
        return stack[-1] if stack else 0


def check_bounded(content: Any) -> None:
    """Raise ArchiveError for lists and dicts that are nested too deeply, or refer to themselves."""
    parts = 0
    levels: list[Iterator[Any]] = [iter((content,))]
    while levels:
        part = next(levels[-1], _END)
        if part is _END:
            levels.pop()
            continue
        parts += 1
        if parts > _MAX_PARTS or len(levels) > _MAX_DEPTH:
            raise ArchiveError(_TOO_LARGE)
        if isinstance(part, dict):
            levels.append(chain(part, part.values()))
        elif isinstance(part, list | tuple | set | frozenset):
            levels.append(iter(part))
