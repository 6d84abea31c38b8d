"""A word in the log before the ledger runs out of partitions: nobody reads a catalogue every day."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import psycopg2

from walstream.config import LedgerTable
from walstream.ledger.partition_layout import look
from walstream.source.failures import classify

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

log = logging.getLogger("walstream.ingest")


def warn_of_partitions(connection: Connection, ledger: LedgerTable) -> None:
    """Log a warning if the ledger is partitioned by time and less than a month is prepared.

    Raises:
        Unavailable: the server is away. Nothing else: a word in the log is not worth an end of ingest.
    """
    try:
        with connection.cursor() as cur:
            layout = look(cur, ledger)
    except psycopg2.Error as error:
        known = classify(error, doing="looking at the ledger's partitions")
        if known.transient:
            raise known from error
        log.warning("whether partitions are prepared cannot be told: %s", known)
        return
    if layout is None or layout.month_is_prepared:
        return
    consequence = (
        "later rows go into the default partition" if layout.default is not None else "later rows will be refused"
    )
    log.warning(
        "less than a month of partitions is prepared for %s: %s. Run `walstream partitions --ahead 3`, by cron for"
        " preference",
        ledger.qualified,
        consequence,
    )
