"""What is drained: the shapes of events that the benchmarks are about, written by the server itself.

A and B have payloads of 290 bytes, C and D of 3.7 kB; A and C one event a transaction, B and D 500 of them. The large
one is a single transaction of 290-byte payloads. Payloads are of hexadecimal digits, which compress about as well as
text does; those of 3.7 kB are therefore stored out of line, as most answers of a model are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Shape:
    """A kind of load.

    Attributes:
        name: what it is called in tables.
        payload: bytes of the payload's text.
        batch: events a transaction; 0: all of them.
        events: how many, unless another number is asked for.
    """

    name: str
    payload: int
    batch: int
    events: int

    @property
    def title(self) -> str:
        """For tables."""
        batch = {0: "all in one transaction", 1: "one a transaction"}.get(self.batch, f"{self.batch} a transaction")
        return f"{self.name}: {self.payload:,} bytes, {batch}"


SHAPES: Final = {
    shape.name: shape
    for shape in (
        Shape("A", 290, 1, 200_000),
        Shape("B", 290, 500, 200_000),
        Shape("C", 3_700, 1, 50_000),
        Shape("D", 3_700, 500, 50_000),
        Shape("large", 290, 0, 500_000),
    )
}

_FRAME: Final = len('{"n": , "text": ""}')
_AROUND: Final = 7  # digits of the number
_DIGEST: Final = 32  # hexadecimal digits

_FILL: Final = """DO $$
BEGIN
  PERFORM set_config('synchronous_commit', 'off', false);
  FOR start IN {first}..{last} BY {batch} LOOP
    INSERT INTO agent_events (session_id, agent_id, event_type, payload)
    SELECT ('00000000-0000-4000-8000-' || lpad((n % {sessions})::text, 12, '0'))::uuid,
           (ARRAY['planner', 'researcher-1', 'researcher-12', 'writer', 'reviewer'])[1 + n % 5],
           (ARRAY['model.requested', 'model.responded', 'tool.invoked', 'handoff.emitted'])[1 + n % 4],
           ('{{"n": ' || (1000000 + n) || ', "text": "' || substr({text}, 1, {size}) || '"}}')::jsonb
      FROM generate_series(start, least(start + {batch} - 1, {last})) AS n;
    COMMIT;
  END LOOP;
END $$"""


def filling(shape: Shape, events: int, *, first: int = 1, sessions: int = 1000) -> str:
    """SQL that writes the events numbered ``first`` and following. To be run in autocommit: it commits by itself."""
    size = shape.payload - _FRAME - _AROUND
    digests = range(-(-size // _DIGEST))
    return _FILL.format(
        first=first,
        last=first + events - 1,
        batch=shape.batch or events,
        sessions=sessions,
        text=" || ".join(f"md5((n::bigint * 1000 + {k})::text)" for k in digests),
        size=size,
    )
