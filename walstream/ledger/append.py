"""Writing events to the ledger, as plain rows in the caller's own transaction."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from psycopg2.extensions import cursor as Cursor
from psycopg2.extras import execute_values

from walstream.config import LedgerTable, quote

_PAGE = 500  # rows a statement; larger ones gain nothing and cost the server memory


class NewEvent(NamedTuple):
    """An event that is not in the ledger yet. ``seq`` and ``created_at`` are the table's own defaults.

    Attributes:
        payload: JSON *text*. It goes to the server as it stands, so that no number is changed by a parser on the way.
    """

    session_id: str
    agent_id: str
    event_type: str
    payload: str


def insert_events(cur: Cursor, ledger: LedgerTable, events: Iterable[NewEvent]) -> None:
    """Insert ``events`` in their order, within the transaction of ``cur``: nothing is committed here.

    The values are sent as untyped literals, so that a session id fits a column of type ``uuid`` or ``text`` and a
    payload one of ``jsonb`` or ``json``.

    Raises:
        psycopg2.Error: the server refused a row; the transaction is then aborted, as ever.
    """
    columns = ledger.columns
    names = ", ".join(quote(c) for c in (columns.session_id, columns.agent_id, columns.event_type, columns.payload))
    target = f"{ledger.qualified} ({names})".replace("%", "%%")
    execute_values(cur, f"INSERT INTO {target} VALUES %s", events, page_size=_PAGE)
