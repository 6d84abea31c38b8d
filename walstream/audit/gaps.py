"""Offsets that never came to the sink: what the order says of them, and the records that stand for them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from walstream.config import Settings

from . import order_facts
from .loading import TrailBroken
from .record import GONE, Pen

_CHUNK: Final = 5_000


def places(settings: Settings, first: int, last: int) -> list[order_facts.Place]:
    """The places of the order from ``first`` on, to ``last`` or as many as are looked at in one go.

    Raises:
        WalstreamError: of the database.
    """
    if not settings.dsn:
        return []
    connection = order_facts.open_database(settings)
    try:
        return order_facts.places_between(connection, settings.namespace, first, min(last, first + _CHUNK - 1))
    finally:
        connection.close()


def gone(pen: Pen, directory: Path, first: int, last: int, settings: Settings, now: bytes) -> Iterator[bytes]:
    """Records for offsets whose events were removed, by declaration, before they came here.

    Raises:
        TrailBroken: one of them was not.
        WalstreamError: of the database.
    """
    for start in range(first, last + 1, _CHUNK):
        stop = min(last, start + _CHUNK - 1)
        found = places(settings, start, stop)
        lost = next((place for place in found if place.reason is None), None)
        if lost is not None or [place.offset for place in found] != list(range(start, stop + 1)):
            what = f"offset {lost.offset} (seq {lost.seq})" if lost else f"offsets {start} to {stop}"
            raise TrailBroken(
                f"{directory} ends with offset {first - 1} and the next event has offset {last + 1}: {what} is not"
                " on record, and no erasure declares that",
                hint="records were cut off (see the folder `torn`), or the projector was moved on by hand: set it"
                f" back with `walstream projectors reset NAME --to {first}`",
            )
        for place in found:
            at = place.erased_at.isoformat() if place.erased_at else None
            yield pen.other(GONE, {"reason": place.reason, "erased_at": at}, now, place=(place.offset, place.seq))
