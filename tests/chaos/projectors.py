"""The projectors that the chaos tests run in a consumer process: each writes down every event it is given."""

from __future__ import annotations

import os
from collections.abc import Sequence

from walstream import Context, Event, Projector, Stream


class Seen(Projector):
    """Transactional: a row an event, without any key, so that a double delivery would show."""

    name = "seen"
    transactional = True
    batch = 200

    def setup(self, ctx: Context) -> None:
        ctx.cursor.execute(
            "CREATE TABLE IF NOT EXISTS seen (id bigserial, event_offset bigint NOT NULL, seq bigint NOT NULL,"
            " session_id text NOT NULL)"
        )

    def project(self, events: Sequence[Event], ctx: Context) -> None:
        ctx.cursor.execute(
            "INSERT INTO seen (event_offset, seq, session_id)"
            " SELECT * FROM unnest(%s::bigint[], %s::bigint[], %s::text[])",
            (
                [event.offset for event in events],
                [event.seq for event in events],
                [event.session_id for event in events],
            ),
        )


class KeyFile(Projector):
    """External: a line an event with its key, appended to a file."""

    name = "key-file"

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def project(self, events: Sequence[Event], ctx: Context) -> None:
        del ctx
        os.write(self._file, b"".join(f"{event.offset} {event.key}\n".encode() for event in events))


class Lengths(Projector):
    """External: looks at every payload once, as a projector that has something to do with it."""

    name = "lengths"

    def project(self, events: Sequence[Event], ctx: Context) -> None:
        del ctx
        for event in events:
            assert event.payload_bytes.endswith(b"}")


lengths = Stream()
lengths.add(Lengths())

stream = Stream()
stream.add(Seen())
if "CHAOS_KEY_FILE" in os.environ:
    stream.add(KeyFile(os.environ["CHAOS_KEY_FILE"]))
