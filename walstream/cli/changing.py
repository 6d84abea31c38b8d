"""A transaction that changes the schema: all of it or nothing, and in words what stood in its way."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from walstream.errors import ConfigError, Unavailable

from .session import LOCK_TIMEOUT

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection
    from psycopg2.extensions import cursor as Cursor

    from walstream.config import Settings


@contextlib.contextmanager
def changes(settings: Settings, conn: Connection, command: str, hint: str) -> Iterator[Cursor]:
    """One transaction, alone among those that set this stream up; the connection is in autocommit before and after.

    Args:
        command: the command's name, for messages.
        hint: what to do when this role may not.

    Raises:
        ConfigError: this role may not.
        Unavailable: somebody held a lock for too long; the message says who.
    """
    import psycopg2
    from psycopg2.errorcodes import LOCK_NOT_AVAILABLE
    from psycopg2.errors import InsufficientPrivilege

    from walstream.ledger import schema

    conn.autocommit = False
    try:
        with conn, conn.cursor() as cur:
            schema.line_up(cur, settings.namespace)
            yield cur
    except InsufficientPrivilege as error:
        raise ConfigError(
            f"this role may not do what `walstream {command}` has to do: {error.diag.message_primary}", hint=hint
        ) from error
    except psycopg2.Error as error:
        if error.pgcode != LOCK_NOT_AVAILABLE:
            raise
        conn.autocommit = True
        holders = lock_holders(conn, settings)
        raise Unavailable(
            f"`walstream {command}` waited {LOCK_TIMEOUT} for a lock and gave up, changing nothing; in the way:"
            f" {'; '.join(holders) or 'a session that has gone meanwhile'}",
            hint=f"wait until it has ended (or end it with pg_terminate_backend), and run `walstream {command}` again",
        ) from error
    finally:
        conn.autocommit = True


def lock_holders(conn: Connection, settings: Settings, *, partitions: bool = False) -> list[str]:
    """Who holds a lock on the ledger's tables, or is setting this stream up as well.

    Args:
        partitions: whoever reads or writes a partition is in the way, too.
    """
    ledger = settings.ledger
    with conn.cursor() as cur:
        cur.execute(
            """
            SELECT DISTINCT l.pid, coalesce(a.application_name, ''), coalesce(a.usename::text, '?'),
                   coalesce(a.state, '?'), coalesce(a.xact_start::text, 'unknown')
              FROM pg_catalog.pg_locks AS l LEFT JOIN pg_catalog.pg_stat_activity AS a ON a.pid = l.pid
             WHERE l.granted AND l.pid <> pg_catalog.pg_backend_pid()
               AND l.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database())
               AND (l.locktype = 'advisory'
                    OR l.relation = pg_catalog.to_regclass(%s)
                   AND l.mode NOT IN ('AccessShareLock', 'RowShareLock', 'RowExclusiveLock')
                    OR l.relation IN (pg_catalog.to_regclass(%s), pg_catalog.to_regclass(%s))
                    OR %s AND l.relation IN (
                       SELECT relid FROM pg_catalog.pg_partition_tree(pg_catalog.to_regclass(%s)) WHERE isleaf))
             ORDER BY 5""",
            (
                ledger.qualified,
                ledger.beside(ledger.snapshots),
                ledger.beside(ledger.jobs),
                partitions,
                ledger.qualified,
            ),
        )
        return [
            f"pid {pid} {name!r} by {user}, {state}, transaction open since {since}"
            for pid, name, user, state, since in cur.fetchall()
        ]
