"""--where: conditions on the metadata of an image, such as "aesthetic>=5 and lang==en"; nothing is evaluated.

A condition is a column, a comparison, and a number or a word. An image without the column, or with text
where a number is compared, does not fulfil it.
"""

import operator
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from vae.system.errors import UserError

_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
_CONDITION = re.compile(r"\s*([\w.-]+)\s*(>=|<=|==|!=|>|<)\s*(?:\"([^\"]*)\"|'([^']*)'|([\w.+-]+))\s*")
_AND = re.compile(r"and\s+")


class Condition(NamedTuple):
    """One comparison."""

    column: str
    compare: Callable[[Any, Any], bool]
    value: float | str

    def holds(self, metadata: Mapping[str, Any]) -> bool:
        """Whether it holds for these columns."""
        value = metadata.get(self.column)
        if value is None:
            return False
        if isinstance(self.value, str):
            text = str(value).lower() if isinstance(value, bool) else str(value)
            return self.compare(text, self.value)
        try:
            return self.compare(float(value), self.value)
        except (TypeError, ValueError, OverflowError):
            return False


def parse_where(text: str) -> list[Condition]:
    """The conditions of --where, which all must hold; UserError if it is not one."""
    conditions: list[Condition] = []
    position = 0
    while position < len(text) or not conditions:
        found = _CONDITION.match(text, position)
        if found is None:
            raise _mistake(text)
        column, comparison, *quoted, bare = found.groups()
        value: float | str = next((word for word in quoted if word is not None), bare)
        if bare is not None:
            value = _number(bare)
        if isinstance(value, str) and comparison not in ("==", "!="):
            raise UserError(f"--where {text}: {comparison} needs a number, not {value}: use == or !=")
        conditions.append(Condition(column, _COMPARISONS[comparison], value))
        position = found.end()
        if position < len(text):
            joined = _AND.match(text, position)
            if joined is None:
                raise _mistake(text)
            position = joined.end()
    return conditions


def _number(word: str) -> float | str:
    try:
        return float(word)
    except ValueError:
        return word


def _mistake(text: str) -> UserError:
    return UserError(
        f'--where {text}: give conditions such as "aesthetic>=5 and lang==en": a column, one of '
        f'{" ".join(_COMPARISONS)}, and a number or a word; join them with "and"'
    )
