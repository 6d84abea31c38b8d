"""Ingest that halts for violations (``violations = "halt"``) keeps its lease and waits for somebody to acknowledge
them: `walstream status` shows it at work and why it stands still, and it goes on within moments."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from walstream.config import Settings, quote
from walstream.errors import WalstreamError

from .leadership import Lease
from .violation_store import LedgerTouched, ViolationStore

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

log = logging.getLogger("walstream.ingest")

HALTED: Final = "halted"


def wait_until_acknowledged(
    connection: Connection,
    settings: Settings,
    lease: Lease,
    stopping: threading.Event,
    on_halt: Callable[[WalstreamError], None],
) -> bool:
    """Return once nothing is open, ``False`` if told to stop meanwhile.

    Args:
        connection: that holds the lease, in autocommit.
        lease: taken; it is renewed here.
        on_halt: called with the reason when it has to wait.

    Raises:
        Fenced: another process took over.
        ConfigError: the schema is too old to know what was acknowledged.
    """
    store = ViolationStore(settings.namespace, lease, settings.violations)
    told = ""
    while True:
        with connection.cursor() as cur:
            try:
                store.refuse_if_open(cur)
                return True
            except LedgerTouched as halted:
                reason = halted
            cur.execute(
                f"UPDATE {quote(settings.namespace)}.ingest SET state = %s, error = %s,"
                " heartbeat_at = clock_timestamp(), lease_until = clock_timestamp() + make_interval(secs => %s)"
                " WHERE only_row AND generation = %s",
                (HALTED, str(reason), lease.seconds, lease.generation),
            )
            if cur.rowcount != 1:
                raise lease.fenced()
        if str(reason) != told:
            told = str(reason)
            log.error("%s (%s)", reason, reason.hint)
            on_halt(reason)
        if stopping.wait(min(settings.poll_seconds, lease.seconds / 4)):
            return False
