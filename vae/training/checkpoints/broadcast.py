"""A checkpoint or VAE is read and verified by the main process, and sent to the other ones.

So shared storage reads it once, and all processes begin from the same bytes. Tensors go through a buffer
on the device, over the network of the gradients.
"""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from vae.system.errors import UserError
from vae.training.distributed import Distributed

BUFFER_BYTES = 64 * 2**20

_Content = TypeVar("_Content")


class _Absent(NamedTuple):
    """The place of a tensor that follows."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def from_main(read: Callable[[], _Content], group: Distributed) -> _Content:
    """What `read` returns on the main process, on all of them: plain data, dataclasses and CPU tensors.

    If it raises a UserError there, the others end with its exit code and without a line of their own.
    """
    if group.world_size == 1:
        return read()
    content, failure = None, None
    if group.is_main:
        try:
            content = read()
        except UserError as error:
            failure = error
    tensors: list[torch.Tensor] = []
    message = [failure and failure.exit_code, _without_tensors(content, tensors)]
    dist.broadcast_object_list(message, 0, device=torch.device("cpu"))
    code, plain = message
    if code is not None:
        raise failure or SystemExit(code)
    if not group.is_main:
        content = _with_tensors(plain, tensors)
    _send(tensors, group)
    return content  # type: ignore[return-value]


def _without_tensors(value: Any, found: list[torch.Tensor]) -> Any:
    """The value with an _Absent for each of its tensors, which are appended to `found`."""
    if isinstance(value, torch.Tensor):
        found.append(value)
        return _Absent(tuple(value.shape), value.dtype)
    return _mapped(value, lambda part: _without_tensors(part, found))


def _with_tensors(value: Any, made: list[torch.Tensor]) -> Any:
    """The value with an empty tensor for each _Absent; they are appended to `made`, in the same order."""
    if isinstance(value, _Absent):
        made.append(torch.empty(value.shape, dtype=value.dtype))
        return made[-1]
    return _mapped(value, lambda part: _with_tensors(part, made))


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {key: change(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(change(part) for part in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{item.name: change(getattr(value, item.name)) for item in fields(value)})
    return value


def _send(tensors: list[torch.Tensor], group: Distributed) -> None:
    """Fill the tensors of the other processes with those of the main one."""
    buffer = torch.empty(BUFFER_BYTES, dtype=torch.uint8, device=group.device)
    for parts in _groups(tensors):
        pieces = buffer[: sum(map(len, parts))].split([len(part) for part in parts])
        if group.is_main:
            for piece, part in zip(pieces, parts, strict=True):
                piece.copy_(part)
        dist.broadcast(buffer[: sum(map(len, parts))], 0)
        if not group.is_main:
            for piece, part in zip(pieces, parts, strict=True):
                part.copy_(piece)


def _groups(tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Groups of byte tensors; each group fits into the buffer."""
    group: list[torch.Tensor] = []
    free = BUFFER_BYTES
    for tensor in tensors:
        left = tensor.contiguous().reshape(-1).view(torch.uint8)
        while len(left):
            part, left = left[:free], left[free:]
            group.append(part)
            free -= len(part)
            if not free:
                yield group
                group, free = [], BUFFER_BYTES
    if group:
        yield group
