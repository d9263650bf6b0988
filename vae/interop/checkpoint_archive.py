"""Read the file of a checkpoint, as torch.save writes it: a zip archive of a pickle and the tensors' numbers.

One parse decides what is read: the members that are checked here become the tensors, and nothing parses the
file again. No code of the file runs, and no more memory is used than the file has bytes.
"""

import io
import os
import pickletools
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vae.system.files import check_regular

_MAX_DIRECTORY_BYTES = 8 * 2**20  # the list of members: 0.2 MB for the default model with AdamW and EMA
_MAX_PICKLE_BYTES = 16 * 2**20  # names and shapes: 0.3 MB for the same
_MAX_PARTS = 2**20  # values of all lists and dicts, each as often as it is referred to
_MAX_DEPTH = 32
_END = object()
_MAGIC = b"PK\x03\x04"
_MEMBER_HEADER_BYTES = 30  # the smallest header of a member
_MAX_DIMENSIONS = 8
_DTYPES = {
    "torch FloatStorage": torch.float32,
    "torch DoubleStorage": torch.float64,
    "torch HalfStorage": torch.float16,
    "torch BFloat16Storage": torch.bfloat16,
    "torch LongStorage": torch.int64,
    "torch IntStorage": torch.int32,
    "torch ByteStorage": torch.uint8,
    "torch BoolStorage": torch.bool,
}


class ArchiveError(ValueError):
    """The content is not plain data and dense tensors."""


class DamagedArchiveError(ArchiveError):
    """The archive itself, or a part of it, is damaged."""


class _Global(NamedTuple):
    """A name that a pickle refers to. It is never imported."""

    name: str


def read_archive(path: Path, *, with_tensors: bool = True) -> Any:
    """The content of the file. Without `with_tensors`, they have shapes but no numbers, and are not read.

    The checksum of every part that is read is verified. Raises OSError if the file cannot be read, else
    ArchiveError.
    """
    check_regular(path)
    try:
        with _File(path) as file:
            return _Unpickler(_members(file), with_tensors).content()
    except (OSError, ArchiveError):
        raise
    except Exception as error:  # damage raises many types
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DamagedArchiveError(f"its parts cannot be read: {reason}") from None


class _File(io.FileIO):
    """A file from which zipfile reads at most `limit` bytes at once."""

    limit = _MAX_DIRECTORY_BYTES

    def read(self, size: int | None = -1) -> bytes:
        left = os.fstat(self.fileno()).st_size - self.tell()
        wanted = left if size is None or size < 0 else min(size, left)
        if wanted > self.limit:
            raise DamagedArchiveError("its list of parts is too long")
        return super().read(max(0, wanted)) or b""


def _members(file: _File) -> zipfile.ZipFile:
    """The archive, whose parts are stored without compression and are together no larger than the file."""
    if file.read(len(_MAGIC)) != _MAGIC:
        raise DamagedArchiveError("it is not a zip archive")
    archive = zipfile.ZipFile(file)
    members = archive.infolist()
    file_bytes = file.seek(0, io.SEEK_END)
    file.limit = file_bytes
    for member in members:
        if member.compress_type != zipfile.ZIP_STORED or member.compress_size != member.file_size:
            raise DamagedArchiveError(f"its part {member.filename!r:.80} is compressed")
    if archive.comment or min((member.header_offset for member in members), default=1):
        raise DamagedArchiveError("it has data before or after its parts")
    if len({member.filename for member in members}) < len(members):
        raise DamagedArchiveError("two of its parts have the same name")
    if sum(member.file_size + _MEMBER_HEADER_BYTES for member in members) > file_bytes:
        raise DamagedArchiveError("its parts are larger than the file")
    return archive


class _Unpickler:
    """The operations of pickle that plain data and tensors need; every other one is an error."""

    def __init__(self, archive: zipfile.ZipFile, with_tensors: bool) -> None:
        self._archive, self._with_tensors = archive, with_tensors
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._storages: dict[str, torch.Tensor] = {}

    def content(self) -> Any:
        """The object in data.pkl."""
        (name,) = [name for name in self._archive.namelist() if name.endswith("/data.pkl")]
        if self._archive.getinfo(name).file_size > _MAX_PICKLE_BYTES:
            raise ArchiveError("its data.pkl is too large")
        self._folder = name.removesuffix("data.pkl")
        for opcode, argument, _position in pickletools.genops(self._archive.read(name)):
            self._apply(opcode.name, argument)
        (content,) = self._stack
        check_bounded(content)
        return content

    def _apply(self, operation: str, argument: Any) -> None:
        stack = self._stack
        match operation:
            case "PROTO" | "STOP":
                pass
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINFLOAT" | "BINUNICODE":
                stack.append(argument)
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[operation])
            case "EMPTY_DICT" | "EMPTY_LIST" | "EMPTY_TUPLE":
                stack.append({"EMPTY_DICT": {}, "EMPTY_LIST": [], "EMPTY_TUPLE": ()}[operation])
            case "MARK":
                self._marks.append(len(stack))
            case "TUPLE":
                stack.append(tuple(self._after_mark()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                start = len(stack) - int(operation[-1])
                stack[start:] = [tuple(stack[start:])]
            case "APPEND" | "APPENDS":
                parts = self._after_mark() if operation == "APPENDS" else [stack.pop()]
                self._top(list).extend(parts)
            case "SETITEM" | "SETITEMS":
                parts = self._after_mark() if operation == "SETITEMS" else [stack.pop(-2), stack.pop()]
                if not all(type(key) in (str, int) for key in parts[::2]):  # a tuple's hash can take years
                    raise ArchiveError("a key is neither text nor a whole number")
                self._top(dict, OrderedDict).update(zip(parts[::2], parts[1::2], strict=True))
            case "BINPUT" | "LONG_BINPUT":
                self._memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(self._memo[argument])
            case "GLOBAL":
                stack.append(_Global(argument))
            case "BINPERSID":
                stack.append(self._storage(*stack.pop()))
            case "REDUCE":
                arguments, function = stack.pop(), stack.pop()
                stack.append(self._called(function, arguments))
            case "BUILD":  # the version of each module in a state dict, which nothing here reads
                stack.pop()
                self._top(OrderedDict)
            case _:
                raise ArchiveError(f"it uses {operation}")

    def _after_mark(self) -> list[Any]:
        start = self._marks.pop()
        parts = self._stack[start:]
        del self._stack[start:]
        return parts

    def _top(self, *types: type) -> Any:
        if type(self._stack[-1]) not in types:
            raise ArchiveError("an object is not what its parts need")
        return self._stack[-1]

    def _called(self, function: Any, arguments: Any) -> Any:
        if function == _Global("collections OrderedDict") and len(arguments) == 0:
            return OrderedDict()
        if function == _Global("torch._utils _rebuild_tensor_v2"):
            return _tensor(*arguments[:4])
        raise ArchiveError(f"it uses {function.name if isinstance(function, _Global) else 'a computed name'}")

    def _storage(self, kind: str, dtype_name: Any, key: str, _device: str, count: int) -> torch.Tensor:
        """The numbers of a part of the archive, in one dimension."""
        if not isinstance(dtype_name, _Global) or kind != "storage" or type(key) is not str:
            raise ArchiveError("it refers to something other than the numbers of a tensor")
        if dtype_name.name not in _DTYPES:
            raise ArchiveError(f"it uses {dtype_name.name:.80}")
        dtype = _DTYPES[dtype_name.name]
        member = self._archive.getinfo(f"{self._folder}data/{key}")
        if type(count) is not int or count * dtype.itemsize != member.file_size:
            raise ArchiveError(f"its part {member.filename:.80} has another size than its tensor")
        if key not in self._storages:
            if not self._with_tensors or not count:
                self._storages[key] = torch.empty(count, dtype=dtype, device="cpu" if not count else "meta")
            else:
                data = bytearray(self._archive.read(member))  # tensors can be written to
                self._storages[key] = torch.frombuffer(data, dtype=dtype)
        storage = self._storages[key]
        if storage.dtype != dtype or len(storage) != count:
            raise ArchiveError(f"two tensors read its part {member.filename:.80} as different types")
        return storage


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any) -> torch.Tensor:
    """A view of a part of the archive."""
    if not isinstance(storage, torch.Tensor) or len(shape) > _MAX_DIMENSIONS or len(stride) != len(shape):
        raise ArchiveError("a tensor has no data, or too many dimensions")
    if not all(type(number) is int and number >= 0 for number in (offset, *shape, *stride)):
        raise ArchiveError("the shape of a tensor is not of whole numbers")
    end = offset + 1 + sum((side - 1) * step for side, step in zip(shape, stride, strict=True))
    if prod(shape) > len(storage) or (0 not in shape and end > len(storage)):
        raise ArchiveError("a tensor is larger than its data")
    return storage.as_strided(shape, stride, offset)


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
            raise ArchiveError("its content is nested too deeply, or refers to itself")
        if isinstance(part, dict):
            levels.append(chain(part, part.values()))
        elif isinstance(part, list | tuple):
            levels.append(iter(part))
