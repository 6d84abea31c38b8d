"""What the ledger holds, made fit to be shown to a person, and moments as a person writes them."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

import typer

if TYPE_CHECKING:
    from rich.table import Table

MOST: Final = 1_000_000_000
"""Of whatever is shown: more than anybody reads, and a number that Postgres takes."""

_LEAST: Final = 20  # characters of a column that is cut off
_UNPRINTABLE: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_SPAN: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd])")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def one_line(text: str) -> str:
    """Without what could move the cursor, colour the terminal or turn the direction of writing."""
    return _UNPRINTABLE.sub("·", text)


def lines(text: str, most: int | None = None) -> str:
    """The same for text of several lines, of which the first ``most`` are kept, and a word about the rest."""
    each = [one_line(line.expandtabs(4)) for line in text.replace("\r\n", "\n").split("\n")]
    if most is not None and len(each) > most:
        left = len(each) - most
        each = [*each[:most], f"… ({left} more {'line' if left == 1 else 'lines'})"]
    return "\n".join(each)


def shortened(text: str, most: int) -> str:
    """One line of at most so many characters."""
    text = one_line(text[: most + 1])
    return text if len(text) <= most else text[: most - 1].rstrip() + "…"


def cut_at_the_end(
    titles: Sequence[str], rows: Sequence[Sequence[str]], width: int, *, right: Collection[str] = ()
) -> Table:
    """A table of which the last column alone is cut off, to what the others leave of ``width``.

    Where they leave next to nothing, they are broken into lines, which loses no character.

    Args:
        right: titles of the columns that are aligned to the right.
    """
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    others = zip(titles[:-1], *(row[:-1] for row in rows), strict=True)
    taken = sum(max(map(cell_len, column)) + 3 for column in others) + 4
    table = Table()
    for title in titles[:-1]:
        table.add_column(title, overflow="fold", justify="right" if title in right else "left")
    table.add_column(titles[-1], overflow="ellipsis", no_wrap=True, max_width=max(width - taken, _LEAST))
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def moment(text: str, option: str) -> datetime:
    """What a person means by ``2026-02-03T04:05``, ``2026-02-03 04:05:06+02:00`` or ``15m`` (ago: s, m, h, d).

    Without an offset it is UTC, as everything that is shown.

    Raises:
        typer.BadParameter: it is none of these.
    """
    try:
        if _SPAN.fullmatch(text.strip()):
            return datetime.now(UTC) - span(text, option)
        found = datetime.fromisoformat(text.strip())
        return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
    except (ValueError, OverflowError):
        raise typer.BadParameter(
            f"{text!r} is no time: write 2026-02-03T04:05:06, with an offset unless it is UTC, or 15m (ago)",
            param_hint=option,
        ) from None


def span(text: str, option: str) -> timedelta:
    """What a person means by ``90d`` or ``1.5 h`` (s, m, h, d).

    Raises:
        typer.BadParameter: it is no span of time, or longer than Python knows one.
    """
    found = _SPAN.fullmatch(text.strip())
    try:
        if found:
            return timedelta(seconds=float(found[1]) * _SECONDS[found[2]])
    except OverflowError:
        pass
    raise typer.BadParameter(f"{text!r} is no span of time: write 90d, or 12h (s, m, h, d)", param_hint=option)


def time_of_day(text: str | None) -> str:
    """A timestamp as Postgres prints it in UTC, to the millisecond and without the zone."""
    if text is None:
        return ""
    found = re.fullmatch(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(\.\d{1,3})?\d*\+00", text)
    return f"{found[1]}{(found[2] or '.').ljust(4, '0')}" if found else text
