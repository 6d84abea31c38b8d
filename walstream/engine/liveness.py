"""Is a silent stream alive? Judged by what arrives: when nothing has, a canary must come through.

While the ledger is quiet, each heartbeat emits one on ingest's own connection, so a stream that is well is never silent
for long. Where it is, somebody looks at the walsender over a new connection, every second or two:

- It is gone: nothing will come any more.
- It waits for WAL although a canary was flushed behind which it has to be, twice in a row: what it sends does not
  arrive here. The connection is half-open; TCP itself may go on acknowledging (a proxy that hangs) and never tell.
- It works, or nobody can say: a walsender that decodes a long transaction of other tables, or catches up through the
  WAL of other databases, is silent for minutes, lets no canary pass and answers nothing. To drop it would only make it
  begin again, for ever. It is given up when it was not seen to move for as long as it may look the same while it is
  well.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from walstream.errors import ConnectionLost
from walstream.lsn import format_lsn, parse_lsn

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

LOOK_SECONDS: Final = 1.5
"""Between two looks at a walsender that is suspected."""

LOOKS: Final = 2
"""So many in a row have to find that it waits, with a canary behind it."""


class Progress(Protocol):
    """What a walsender is at (:class:`walstream.source.facts.WalsenderProgress`)."""

    @property
    def at(self) -> object: ...
    @property
    def waits(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Look:
    """What a look at the walsender found.

    Attributes:
        emitted: position behind the canary that this look emitted.
        flushed: up to where the WAL was flushed, before the walsender was looked at.
        walsender: what it is at; ``None`` if it is gone.
    """

    emitted: int
    flushed: int
    walsender: Progress | None


CANARY: Final = "SELECT pg_logical_emit_message(false, 'walstream', 'canary')"
"""Returns the position behind it. No transaction: it is sent as soon as it is flushed."""


class Silent(Protocol):
    """The stream, as far as its silence goes."""

    backend_pid: int
    patience: float

    def progress(self, connection: Connection) -> Progress | None: ...
    @property
    def last_heard(self) -> float: ...
    @property
    def passed(self) -> int: ...


def look_at(stream: Silent, connection: Connection) -> Look:
    """Emit a canary, and look at the walsender.

    Raises:
        psycopg2.Error: of the connection.
    """
    with connection.cursor() as cur:
        cur.execute(f"SELECT pg_current_wal_flush_lsn()::text, ({CANARY})::text")
        row = cur.fetchone()
    assert row is not None
    flushed, emitted = map(parse_lsn, row)
    return Look(emitted, flushed, stream.progress(connection))


class Liveness:
    """Watches over one stream.

    Args:
        slot: its name, for messages.
        limit: seconds of silence before anybody looks.
        stream: that is watched.
        look: emits a canary and looks, over a connection of its own; ``None`` if nothing could be learned. It raises
            nothing, and may take as long as the network likes.
    """

    def __init__(self, slot: str, limit: float, stream: Silent, look: Callable[[], Look | None]) -> None:
        self._slot = slot
        self._limit = limit
        self._stream = stream
        self._look = look
        self._looked_at = 0.0
        self._suspected = 0
        self._canary: int | None = None
        self._last: Progress | None = None
        self._moved = 0.0
        self._dead = ""

    def check(self) -> None:
        """To be called when nothing was there to be read.

        Raises:
            ConnectionLost: the connection is dead.
        """
        now = time.monotonic()
        silence = now - self._stream.last_heard
        if silence < self._limit:
            self._looked_at, self._suspected, self._canary, self._dead = 0.0, 0, None, ""
            return
        if not self._looked_at:
            self._moved = now
        stands = now - self._moved >= max(2 * self._limit, self._stream.patience)
        dead = self._dead or ("its walsender was not seen to move" if self._looked_at and stands else "")
        if dead:
            raise ConnectionLost(
                f"nothing arrived on slot {self._slot!r} for {silence:.0f} s, not even the message sent to test it, and"
                f" {dead} (pid {self._stream.backend_pid}); last position {format_lsn(self._stream.passed)}",
                hint="the connection is half-open (a firewall, a proxy, a stopped walsender); it is made anew",
            )
        if now - self._looked_at >= (LOOK_SECONDS if self._suspected else min(self._limit, 4 * LOOK_SECONDS)):
            self._looked_at = now
            # On a thread of its own: making a connection can take as long as the network likes, and feedback is due.
            threading.Thread(target=self._probe, name="walstream-canary", daemon=True).start()

    def _probe(self) -> None:
        heard = self._stream.last_heard
        found = self._look()
        if found is None or self._stream.last_heard != heard:
            return
        if found.walsender is None:
            self._dead = "its walsender is gone"
            return
        if found.walsender.at != (self._last and self._last.at):
            self._moved = time.monotonic()
        self._last = found.walsender
        canary = self._canary
        if canary is None:
            self._canary = found.emitted
            self._suspected = 1  # the next look is due soon
        elif found.walsender.waits and found.flushed >= canary:
            self._suspected += 1
            if self._suspected > LOOKS:
                self._dead = "its walsender waits, and believes to have sent it"
        else:
            self._suspected = 0
