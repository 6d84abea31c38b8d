"""What a projector cannot get past, as the table ``projectors`` has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from walstream.event import Event

from .retry import describe


class Trouble(NamedTuple):
    """An error, and of what it may tell: a payload can stand in its text, and an erasure has to know of which event.

    Attributes:
        text: in one line.
        offset: of the first event that the projector had in hand; ``None`` if there was none.
        seqs: of all that it had in hand; empty if the text is our own, ``None`` if it may tell of any event.
    """

    text: str
    offset: int | None
    seqs: tuple[int, ...] | None

    @classmethod
    def of(cls, error: BaseException, events: Sequence[Event]) -> Trouble:
        """What was raised while the projector had these events in hand, or none that is known here."""
        offset = events[0].offset if events else None
        return cls(describe(error)[0], offset, tuple(event.seq for event in events) or None)
