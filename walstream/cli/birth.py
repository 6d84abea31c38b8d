"""The first birth of a slot, or the one that a person asks for: `walstream init` takes the ledger's lease for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from walstream.config import Settings, quote

from .leasing import holding
from .plan import floor_query

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

    from walstream.engine.birth import Born, Progress


def bear(settings: Settings, conn: Connection, *, from_now: bool, timeout: float, progress: Progress) -> Born:
    """Make the slot, from whatever state the last attempt left.

    From which row on there are events is decided in the transaction that takes the lease: whoever goes on with a birth
    that was cut short must find the decision made.

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

    floor = f", floor_seq = coalesce(floor_seq, {floor_query(settings)})" if from_now else ""
    begun = f"UPDATE {quote(settings.namespace)}.identity SET slot_state = 'creating'{floor}"
    with holding(settings, conn, "init", also=(begun,)) as lease:
        return Birth(settings, conn, lease, SourceSlots(), timeout=timeout, progress=progress).run()
