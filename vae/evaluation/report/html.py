"""The small pieces of HTML that every part of the report is made of; all text passes through `told`."""

from collections.abc import Callable, Sequence
from html import escape

from vae.console import printable

NUMBER = '<td class="number'  # how a cell begins that stands to the right


def told(text: object) -> str:
    """Any text so that it is harmless between tags and in a quoted attribute."""
    return escape(printable(str(text)))


def name_of(text: object) -> str:
    """A name from outside, between tags; right-to-left letters in it do not turn what stands around it."""
    return f"<bdi>{told(text)}</bdi>"


def shown_number(value: float) -> str:
    """A number with as many digits as say something."""
    if value == 0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def column(
    values: Sequence[float | None],
    show: Callable[[float], str] = shown_number,
    reasons: Sequence[str] | None = None,
    best: Callable[..., float] | None = None,
    candidates: Sequence[bool] | None = None,
    notes: Sequence[str] | None = None,
) -> list[str]:
    """The cells of one column; `best` (min or max) marks the winner of the `candidates`, if two have values.

    A None is said to be missing, with its reason where the pointer rests. Values that look the same when
    they are shown win together, and nobody wins where all do. `notes` follow the values in brackets.
    """
    reasons = reasons or [""] * len(values)
    taking_part = candidates or [True] * len(values)
    rivals = [value for value, there in zip(values, taking_part, strict=True) if there and value is not None]
    winner = show(best(rivals)) if best and len({show(value) for value in rivals}) > 1 else None
    notes = notes or [""] * len(values)
    cells = []
    for value, reason, there, note in zip(values, reasons, taking_part, notes, strict=True):
        note = f" <small>({told(note)})</small>" if note else ""
        if value is None:
            cells.append(f'{NUMBER} missing" title="{told(reason)}">missing</td>')
        elif there and show(value) == winner:
            mark = '<span class="mark" role="img" aria-label="best">★</span>'
            cells.append(f'{NUMBER} best">{mark} {told(show(value))}{note}</td>')
        else:
            cells.append(f'{NUMBER}">{told(show(value))}{note}</td>')
    return cells


def text_column(texts: Sequence[object]) -> list[str]:
    """Cells of words."""
    return [f"<td>{told(text)}</td>" for text in texts]


def table(caption: str, names: Sequence[str], columns: dict[str, list[str]]) -> str:
    """A table with one row per name, at least one; `columns` are cells by their heading."""
    heads = "".join(
        f'<th scope="col" class="{"number" if cells[0].startswith(NUMBER) else "words"}">{told(heading)}</th>'
        for heading, cells in columns.items()
    )
    rows = [
        f'<tr><th scope="row">{name_of(name)}</th>{"".join(cells)}</tr>\n'
        for name, *cells in zip(names, *columns.values(), strict=True)
    ]
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{told(caption)}"><table>'
        f"<caption>{told(caption)}</caption>\n"
        f"<thead><tr><td></td>{heads}</tr></thead>\n<tbody>\n{''.join(rows)}</tbody></table></div>\n"
    )


def facts(caption: str, pairs: dict[str, object]) -> str:
    """Two columns: what, and which."""
    return table(caption, list(pairs), {"": text_column(list(pairs.values()))}) if pairs else ""
