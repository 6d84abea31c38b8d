"""The SQL connection that a command works on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

    from walstream.config import Settings

LOCK_TIMEOUT: Final = "10s"
"""No command of a person waits longer for a lock than this: what it does is rarely worth a queue behind it, and every
statement that waits for a strong lock makes everybody else wait as well."""

PATIENT: Final[Mapping[str, str]] = {"statement_timeout": "0", "idle_in_transaction_session_timeout": "0"}
"""For long reads of ours: limits that a role has for its application's sake."""


@contextlib.contextmanager
def database(settings: Settings, command: str, options: Mapping[str, str] | None = None) -> Iterator[Connection]:
    """A connection in autocommit, named ``walstream:<command>``, closed at the end.

    Raises:
        ConfigError, Unavailable: see :func:`walstream.source.connection.connect`.
    """
    from walstream.source.connection import connect

    conn = connect(
        settings.require_dsn(),
        application_name=f"walstream:{command}",
        connect_timeout=settings.connect_timeout,
        options={"lock_timeout": LOCK_TIMEOUT, **(options or {})},
    )
    try:
        yield conn
    finally:
        conn.close()


@contextlib.contextmanager
def installed(
    settings: Settings, command: str, needed: int | None = None, options: Mapping[str, str] | None = None
) -> Iterator[Connection]:
    """As :func:`database`, for commands that need walstream's own tables.

    Args:
        needed: the schema's version that they have to have at least; the stream's own if not given.

    Raises:
        ConfigError: they are not there, or too old.
    """
    from walstream.ledger.schema import REQUIRED_VERSION, require_schema

    with database(settings, command, options) as conn:
        require_schema(conn, settings, REQUIRED_VERSION if needed is None else needed)
        yield conn
