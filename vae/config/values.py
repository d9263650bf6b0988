"""Reading one option's value from text or JSON, and saying what is wrong with it."""

import difflib
import json
import math
import types
import typing
from dataclasses import Field
from typing import Any

from vae.config.errors import UserError


def base_type(item: Field) -> type:
    """The type of one value of an option: bool, int, float or str; int for a tuple of ints."""
    kind = _without_none(item)
    return typing.get_args(kind)[0] if is_list(item) else kind


def _without_none(item: Field) -> typing.Any:
    if isinstance(item.type, types.UnionType):  # int | None
        return next(part for part in typing.get_args(item.type) if part is not type(None))
    return item.type


def is_list(item: Field) -> bool:
    """Whether the option takes several values."""
    return typing.get_origin(_without_none(item)) is tuple


def check(item: Field, value: Any) -> None:
    """Raise UserError where `value` is outside what the option admits."""
    limits = item.metadata
    if value == "" or (is_list(item) and value is not None and "" in value):
        raise UserError(f"--{item.name} is given without a value: give one or leave it out")
    if limits["choices"] and value not in limits["choices"]:
        raise UserError(f"--{item.name} {value} is unknown: choose one of {', '.join(limits['choices'])}")
    if limits["auto"]:
        if value == "auto":
            return
        value = _whole_number(item, value)
    for part in value if is_list(item) and value is not None else [value]:
        if isinstance(part, float) and not math.isfinite(part):
            raise UserError(f"--{item.name} {part} is not a finite number: give one such as 0.001")
        if part is None:
            continue
        if limits["at_least"] is not None and part < limits["at_least"]:
            raise UserError(f"--{item.name} {part} is too small: the least is {limits['at_least']}")
        if limits["at_most"] is not None and part > limits["at_most"]:
            raise UserError(f"--{item.name} {part} is too large: the most is {limits['at_most']}")


def from_json(item: Field, value: Any) -> Any:
    """The option's value from a decoded JSON value; UserError where its type is another."""
    if value is None and item.default is None:
        return None
    if is_list(item):
        if not isinstance(value, list) or not value:
            raise UserError(
                f'"{item.name}" in the JSON file must be a list of numbers, not {json.dumps(value)}'
            )
        return [_scalar_from_json(item, part) for part in value]
    return _scalar_from_json(item, value)


def _scalar_from_json(item: Field, value: Any) -> Any:
    kind = base_type(item)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if item.metadata["auto"] and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if type(value) is not kind:
        wanted = 'a whole number or "auto"' if item.metadata["auto"] else _KIND_NAMES[kind]
        raise UserError(f'"{item.name}" in the JSON file must be {wanted}, not {json.dumps(value)}')
    return value


_KIND_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def _whole_number(item: Field, value: Any) -> int:
    try:
        return int(value)
    except ValueError:
        raise UserError(f"--{item.name} {value} is not a whole number nor auto") from None


def nearest(name: str, known: typing.Iterable[str]) -> str:
    """A remedy that names the nearest known spelling: ': did you mean X?', or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f": did you mean {close[0]}?" if close else ""
