"""Numbers and tables for people: rounded to significant digits, as Markdown."""

import math
from typing import Any


def rounded(number: float, digits: int = 4) -> float:
    """A number with some significant digits, for a file that people read."""
    return float(f"{number:.{digits}g}") if math.isfinite(number) else number


def markdown(header: list[str], rows: list[list[Any]]) -> list[str]:
    """A table; None is shown as an empty cell."""
    cells = [["" if cell is None else str(cell) for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *cells)]
