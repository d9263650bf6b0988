"""Validate one option's value."""

import difflib
import math
import types
import typing
from collections.abc import Sequence
from dataclasses import Field
from typing import Any

from vae.config.other_names import name_here
from vae.system.addresses import is_like_address
from vae.system.errors import UserError
from vae.system.files import is_utf8

MAX_WHOLE = 2**63 - 1  # what a tensor's shape, a seed or an index can be
_MAX_NAME = 100  # characters of a name that are compared and shown: one in a file from others may be huge


def base_type(item: Field[Any]) -> type:
    """The type of one value of an option: bool, int, float or str. For a tuple of ints it is int."""
    kind = _without_none(item)
    return typing.get_args(kind)[0] if is_list(item) else kind


def _without_none(item: Field[Any]) -> Any:
    if isinstance(item.type, types.UnionType):  # int | None
        return next(part for part in typing.get_args(item.type) if part is not type(None))
    return item.type


def is_list(item: Field[Any]) -> bool:
    """Whether the option accepts several values."""
    return typing.get_origin(_without_none(item)) is tuple


def check(item: Field[Any], value: Any) -> None:
    """Raise UserError if `value` is not valid for the option."""
    limits = item.metadata
    if limits["writes"] and isinstance(value, str) and is_like_address(value):
        raise UserError(f"--{item.name} {value} is an address: give a path on this machine")
    if limits["writes"] and isinstance(value, str) and not is_utf8(value):
        raise UserError(
            f"--{item.name} {value} is not valid UTF-8, so PyTorch cannot open files there: give another name"
        )
    if value == "" or (is_list(item) and value is not None and "" in value):
        raise UserError(f"--{item.name} has no value: give one or remove the flag")
    if limits["choices"] and value is not None and value not in limits["choices"]:
        raise UserError(f"--{item.name} {value} is not one of {', '.join(map(str, limits['choices']))}")
    if limits["auto"]:
        if value == "auto":
            return
        value = _whole_number(item, value)
    for part in value if is_list(item) and value is not None else [value]:
        if isinstance(part, float) and not math.isfinite(part):
            raise UserError(f"--{item.name} {part} is not a finite number: give one such as 0.001")
        if part is None:
            continue
        if isinstance(part, int) and abs(part) > MAX_WHOLE:
            shown = f" {part}" if abs(part) < 10**_MAX_NAME else ""  # Python prints no more than 4,300 digits
            raise UserError(f"--{item.name}{shown} has too many digits: the maximum is {MAX_WHOLE}")
        if limits["at_least"] is not None and part < limits["at_least"]:
            raise UserError(f"--{item.name} {part} is too small: the minimum is {limits['at_least']}")
        if limits["at_most"] is not None and part > limits["at_most"]:
            raise UserError(f"--{item.name} {part} is too large: the maximum is {limits['at_most']}")


def check_once(name: str, values: Sequence[Any]) -> None:
    """Raise UserError if an option has the same value more than once."""
    twice = next((value for value in values if values.count(value) > 1), None)
    if twice is not None:
        raise UserError(f"--{name} contains {twice} twice: give it once")


def _whole_number(item: Field[Any], value: Any) -> int:
    try:
        return int(value)
    except ValueError:
        raise UserError(f"--{item.name} {value} is neither a whole number nor auto") from None


def nearest(name: str, known: typing.Iterable[str]) -> str:
    """The remedy ': did you mean X?' with the most similar known name, or an empty string."""
    close = most_similar(name, known)
    return f": did you mean {close}?" if close else ""


def most_similar(name: str, known: typing.Iterable[str]) -> str | None:
    """The most similar known name, or None if none is similar."""
    known = list(known)
    name = name[:_MAX_NAME]
    bare = name.lstrip("-")
    ours = name_here(bare)
    if ours is not None and name[: len(name) - len(bare)] + ours in known:
        return name[: len(name) - len(bare)] + ours
    # Below 0.75, most suggestions for flags of other trainers were wrong: num_epochs for num_processes.
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    return close[0] if close else None
