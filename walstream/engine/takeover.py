"""How ingest takes over a ledger: the lease, the fencing row, and the end of what the predecessor left behind."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import psycopg2

from walstream.config import quote

from .leadership import Backend, Lease, end_backend

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

log = logging.getLogger("walstream.ingest")

_STANDBY_POLL = 0.5
_STARTING_SECONDS = 60.0
"""How long a lease lasts until the stream is open: two that start more slowly than a lease would otherwise replace each
other for ever. One that dies meanwhile is still noticed at once, by its connection."""


def take_over(
    connection: Connection,
    namespace: str,
    lease: Lease,
    *,
    stopping: threading.Event,
    on_standby: Callable[[str], None],
) -> bool:
    """Take the lease, standing by while another ingest has it; ``False`` if told to stop meanwhile.

    When this returns, whatever the predecessor still writes is refused, its backends were ended, and all that it had
    written is durable.

    Args:
        connection: in autocommit; the lease belongs to it.
        namespace: schema of walstream's tables.
        lease: of ingest.
        stopping: ends the waiting.
        on_standby: called once, with the holder's name, if there is one.

    Raises:
        psycopg2.Error: the connection or the server is away, or a lock could not be had in time.
    """
    schema = quote(namespace)
    announced = False
    while not stopping.is_set():
        with connection.cursor() as cur:
            cur.execute(
                "SELECT owner, control_pid, control_start::text, walsender_pid, walsender_start::text"
                f" FROM {schema}.ingest"
            )
            predecessor = cur.fetchone()
            # One transaction: the lease's row and the fencing row change together, or not at all. It is durable, and
            # with it every order row before it: the stream may then start at the end of the order (rule 3).
            cur.execute("BEGIN; SET LOCAL synchronous_commit = local")
            try:
                generation = lease.acquire(cur, max(lease.seconds, _STARTING_SECONDS))
                if generation is not None:
                    _end_predecessor(cur, predecessor, connection.info.backend_pid)
                    cur.execute(f"UPDATE {schema}.generation SET generation = %s", (generation,))
                cur.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(psycopg2.Error):
                    cur.execute("ROLLBACK")
                raise
        if generation is not None:
            return True
        if not announced:
            announced = True
            on_standby(str(predecessor[0]) if predecessor else "unknown")
        stopping.wait(_STANDBY_POLL)
    return False


def let_go(connection: Connection, namespace: str, lease: Lease) -> None:
    """Give the lease back, so that a stand-by need not wait for it to run out. Harmless if another has it."""
    with connection.cursor() as cur:
        cur.execute(
            f"UPDATE {quote(namespace)}.ingest SET state = 'stopped' WHERE generation = %s", (lease.generation,)
        )
        lease.release(cur)


def _end_predecessor(cur: Any, row: Sequence[Any] | None, own_pid: int) -> None:
    """End the backends of the ingest that is replaced, by recorded pid and start time, never anyone else's: a stopped
    one still holds the slot, and may hold the fencing row."""
    if row is None:
        return
    for pid, start in ((row[1], row[2]), (row[3], row[4])):
        if pid is None or start is None or pid == own_pid:
            continue
        if end_backend(cur, Backend(pid, start)):
            log.warning("ended backend %d (started %s) of the ingest that is replaced (%s)", pid, start, row[0])
