"""The first birth of a slot, or the one that a person asks for: `walstream init` takes the ledger's lease for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from walstream.config import Settings, quote
from walstream.errors import Unavailable

from .plan import floor_query

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

    from walstream.engine.birth import Born, Progress
    from walstream.engine.leadership import Lease


def bear(settings: Settings, conn: Connection, *, from_now: bool, timeout: float, progress: Progress) -> Born:
    """Make the slot, from whatever state the last attempt left.

    Args:
        conn: in autocommit, on a database where the steps of the plan are done.
        from_now: rows that are there already are never events.
        timeout: seconds that the creation of the slot may wait for open transactions.

    Raises:
        Unavailable: a consumer works on the ledger, or transactions stood in the way until the end.
        SlotError, ConfigError: the slot cannot be made; the message says why.
        Fenced: another set-up took over.
    """
    from walstream.engine.birth import Birth
    from walstream.wiring import SourceSlots

    with _lease(settings, conn, from_now=from_now) as lease:
        return Birth(settings, conn, lease, SourceSlots(), timeout=timeout, progress=progress).run()


@contextlib.contextmanager
def _lease(settings: Settings, conn: Connection, *, from_now: bool) -> Iterator[Lease]:
    """Hold the ledger's lease: while a slot is born, nobody else writes the order.

    From which row on there are events is decided in the same transaction: whoever goes on with a birth that was cut
    short must find the decision made.

    Raises:
        Unavailable: a consumer, or another set-up, has it.
    """
    from walstream.engine.birth import LEASE_SECONDS
    from walstream.engine.leadership import Lease, owner_name

    namespace = quote(settings.namespace)
    lease = Lease.for_ingest(settings.namespace, owner=f"{owner_name()} (init)", seconds=LEASE_SECONDS)
    with conn.cursor() as cur:
        cur.execute("BEGIN")
        try:
            generation = lease.acquire(cur)
            if generation is None:
                cur.execute(f"SELECT owner FROM {namespace}.ingest")
                row: Any = cur.fetchone()
                raise Unavailable(
                    f"{row[0]} works on this ledger at this moment, and a slot cannot be made beside it",
                    hint="stop it, or wait until it has ended, and run `walstream init` again",
                )
            # The lease's row and the fencing row change together, or not at all (rule 7).
            cur.execute(f"UPDATE {namespace}.generation SET generation = %s", (generation,))
            floor = f", floor_seq = coalesce(floor_seq, {floor_query(settings)})" if from_now else ""
            cur.execute(f"UPDATE {namespace}.identity SET slot_state = 'creating'{floor}")
            cur.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(Exception):  # what was raised matters more
                cur.execute("ROLLBACK")
            raise
        try:
            yield lease
        finally:
            with contextlib.suppress(Exception):  # a lost connection ends the lease as well
                lease.release(cur)
