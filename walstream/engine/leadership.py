"""Who may write: a lease on one row, held by a connection, fenced by a generation.

Ingest has one such row (``ingest``) and so has every projector (``projectors``). Three rules:

- A lease is taken when nobody holds it, when its time has run out, or when the holder's database connection is gone
  (recorded by process id *and* start time, because process ids are used again). The last makes a take-over after
  ``kill -9`` a matter of a poll, not of the lease's length.
- Each taking raises the row's generation. Whoever writes under a generation proves in the same statement that it is
  still the row's (rule 7), so it does not matter how long a stopped process believes itself to be the holder.
- A new connection is a new generation: a lease does not survive the loss of the connection it was taken on.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from walstream.config import quote
from walstream.errors import Fenced

if TYPE_CHECKING:
    from psycopg2.extensions import cursor as Cursor


def owner_name() -> str:
    """A name for this process that a person can follow: host, process id, and four bytes of chance."""
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"


@dataclass(frozen=True)
class Backend:
    """A server process, named so that no other can be meant: the id alone is used again."""

    pid: int
    start: str


class Lease:
    """A lease on one row that has the columns ``generation, owner, control_pid, control_start, lease_until``.

    Args:
        relation: the row's table, quoted for SQL.
        where: the condition that picks the row, with ``%s`` for each of ``key``.
        key: its values.
        owner: who takes it (see :func:`owner_name`).
        seconds: how long it lasts without being renewed.

    All times are the server's clock, so that the clocks of two hosts need not agree.
    """

    def __init__(self, relation: str, where: str, key: Sequence[Any], *, owner: str, seconds: float) -> None:
        self._relation = relation
        self._where = where
        self._key = tuple(key)
        self.owner = owner
        self.seconds = seconds
        self.generation = 0

    @classmethod
    def for_ingest(cls, namespace: str, *, owner: str, seconds: float) -> Lease:
        """The lease of the ledger's one ingest, whatever its slot is called."""
        return cls(f"{quote(namespace)}.ingest", "only_row", (), owner=owner, seconds=seconds)

    @classmethod
    def for_projector(cls, namespace: str, name: str, *, owner: str, seconds: float) -> Lease:
        """The lease of one projector, with all its lanes."""
        return cls(f"{quote(namespace)}.projectors", "name = %s", (name,), owner=owner, seconds=seconds)

    def acquire(self, cur: Cursor, seconds: float | None = None) -> int | None:
        """Try to take the lease on the connection of ``cur``; return its new generation, or ``None`` if a live other
        holds it. One statement: two processes that try at once cannot both succeed.

        Args:
            seconds: how long it lasts until it is renewed for the first time, if not as long as later.
        """
        cur.execute(
            f"""
            UPDATE {self._relation} AS l
               SET generation = l.generation + 1, owner = %s,
                   control_pid = pg_backend_pid(),
                   control_start = (SELECT backend_start FROM pg_stat_activity WHERE pid = pg_backend_pid()),
                   lease_until = clock_timestamp() + make_interval(secs => %s)
             WHERE {self._where}
               AND (l.owner IS NULL OR l.owner = %s OR l.lease_until IS NULL OR l.lease_until < clock_timestamp()
                    OR NOT EXISTS (SELECT 1 FROM pg_stat_activity AS a
                                    WHERE a.pid = l.control_pid
                                      -- NULL: a backend of another role, whose start this role may not see
                                      AND (a.backend_start IS NULL OR a.backend_start = l.control_start)))
            RETURNING l.generation""",
            (self.owner, self.seconds if seconds is None else seconds, *self._key, self.owner),
        )
        row = cur.fetchone()
        if row is None:
            return None
        self.generation = int(row[0])
        return self.generation

    def renew(self, cur: Cursor) -> bool:
        """Extend the lease; ``False`` if another has taken it meanwhile."""
        cur.execute(
            f"""UPDATE {self._relation} SET lease_until = clock_timestamp() + make_interval(secs => %s)
                 WHERE {self._where} AND generation = %s""",
            (self.seconds, *self._key, self.generation),
        )
        return bool(cur.rowcount == 1)

    def release(self, cur: Cursor) -> None:
        """Give it back, so that a stand-by need not wait. Harmless if another has taken it."""
        cur.execute(
            f"""UPDATE {self._relation} SET owner = NULL, lease_until = NULL, control_pid = NULL, control_start = NULL
                 WHERE {self._where} AND generation = %s""",
            (*self._key, self.generation),
        )

    def fenced(self) -> Fenced:
        """The error for a write that was refused under this lease."""
        return Fenced(
            f"{self.owner} was replaced: generation {self.generation} of {self._relation} is no longer the newest",
            hint="another process took over; this one stands by (see `walstream status` for the holder)",
        )


def end_backend(cur: Cursor, backend: Backend) -> bool:
    """End one server process, if it is still the one that was recorded; ``False`` if it is gone.

    Ending needs no superuser for backends of the same role (documentation, 9.28.2 "Server Signaling Functions").
    """
    cur.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid = %s AND backend_start = %s::timestamptz",
        (backend.pid, backend.start),
    )
    return cur.fetchone() is not None
