"""How many events each agent appended since the last look, from the ledger itself, so that no consumer is needed."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, Final

import psycopg2
import psycopg2.errors

from walstream.config import LedgerTable, quote

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

log = logging.getLogger("walstream.guard")

_ROWS: Final = 20_000
"""The newest rows that one look reads, at the most; above that the rates are an extrapolation."""


class AgentRates:
    """Counts by agent. The rows are found by ``seq``, which has an index; what commits late is not counted.

    Args:
        ledger: the table. Where it cannot be read there are no rates, and that is said once.
    """

    def __init__(self, ledger: LedgerTable) -> None:
        self._table = ledger.qualified.replace("%", "%%")
        self._seq = quote(ledger.columns.seq).replace("%", "%%")
        self._agent = quote(ledger.columns.agent_id).replace("%", "%%")
        self._last: tuple[int, float] | None = None
        self._silent = False

    def read(self, connection: Connection) -> dict[str, float] | None:
        """Events a second by agent since the call before; ``None`` the first time, or where it cannot be known."""
        try:
            with connection.cursor() as cursor:
                cursor.execute(f"SELECT coalesce(max({self._seq}), 0) FROM {self._table}")
                row: Any = cursor.fetchone()
                top, now = int(row[0]), time.monotonic()
                before, self._last = self._last, (top, now)
                if before is None or top < before[0] or now <= before[1]:
                    return None
                cursor.execute(
                    f"SELECT agent, count(*), min(min(seq)) OVER () FROM (SELECT {self._agent}::text AS agent,"
                    f" {self._seq} AS seq FROM {self._table} WHERE {self._seq} > %s AND {self._seq} <= %s"
                    f" ORDER BY {self._seq} DESC LIMIT {_ROWS}) AS newest GROUP BY agent",
                    (before[0], top),
                )
                rows = cursor.fetchall()
        except (
            psycopg2.errors.InsufficientPrivilege,
            psycopg2.errors.UndefinedTable,
            psycopg2.errors.UndefinedColumn,
        ) as error:
            if not self._silent:
                log.info("event rates by agent are not watched: %s", str(error).splitlines()[0])
            self._silent = True
            return None
        if not rows:
            return {}
        lowest = int(rows[0][2])
        whole = (top - before[0]) / (top - lowest + 1) if sum(row[1] for row in rows) == _ROWS else 1.0
        seconds = now - before[1]
        return {str(agent): count * whole / seconds for agent, count, _ in rows}
