"""The publication that `walstream tail` makes for itself where no stream is installed, and how a forgotten one is told.

A temporary slot ends with its session by itself; a publication does not. So its name says which session made it: the
server's process id and the start of that session (together they name one session for ever). A publication whose session
is gone was left behind by a tail that was killed, and can be dropped by anyone who may.
"""

from __future__ import annotations

from typing import Any, Final

import psycopg2
from psycopg2.errorcodes import INSUFFICIENT_PRIVILEGE, UNDEFINED_OBJECT
from psycopg2.extensions import connection as Connection

from walstream.config import LedgerTable
from walstream.source.failures import classify
from walstream.source.publications import create_statement, drop_statement

PREFIX: Final = "walstream_tail_"

_SESSION: Final = "a.pid || '_' || (extract(epoch FROM a.backend_start) * 1000000)::bigint"

# Start times of other roles' sessions are hidden from a role without pg_read_all_stats: such a session counts as alive.
_LEFTOVERS: Final = f"""\
SELECT p.pubname FROM pg_catalog.pg_publication AS p
 WHERE pg_catalog.starts_with(p.pubname, %(prefix)s)
   AND NOT EXISTS (
       SELECT FROM pg_catalog.pg_stat_activity AS a
        WHERE p.pubname = %(prefix)s || {_SESSION}
           OR (a.backend_start IS NULL AND pg_catalog.starts_with(p.pubname, %(prefix)s || a.pid || '_')))
 ORDER BY 1"""


def make(connection: Connection, ledger: LedgerTable) -> str:
    """Make the publication of this session and return its name, which is good for a temporary slot as well.

    Args:
        connection: in autocommit; it has to stay open for as long as the publication is in use.

    Raises:
        WalstreamError: the table is not there or not ours to publish.
    """
    doing = f"making a publication of {ledger.qualified}"
    try:
        with connection.cursor() as cursor:
            cursor.execute(
                f"SELECT {_SESSION}, EXISTS (SELECT FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n"
                " ON n.oid = c.relnamespace WHERE n.nspname = %s AND c.relname = %s AND c.relkind = 'p')"
                " FROM pg_catalog.pg_stat_activity AS a WHERE a.pid = pg_catalog.pg_backend_pid()",
                (ledger.namespace, ledger.table),
            )
            row: Any = cursor.fetchone()
            name = f"{PREFIX}{row[0]}"
            cursor.execute(create_statement(name, ledger, operations=("insert",), via_root=row[1]))
    except psycopg2.Error as error:
        raise classify(error, doing=doing) from error
    return name


def leftovers(connection: Connection) -> list[str]:
    """Names of tail's publications in this database whose session is gone.

    Raises:
        WalstreamError: of the connection.
    """
    try:
        with connection.cursor() as cursor:
            cursor.execute(_LEFTOVERS, {"prefix": PREFIX})
            return [name for (name,) in cursor.fetchall()]
    except psycopg2.Error as error:
        raise classify(error, doing="looking for what a killed tail left behind") from error


def remove_leftovers(connection: Connection) -> list[str]:
    """Drop those of :func:`leftovers` that this role may drop; return their names.

    Raises:
        WalstreamError: of the connection.
    """
    return [name for name in leftovers(connection) if drop(connection, name)]


def drop(connection: Connection, name: str) -> bool:
    """Drop one publication; ``False`` if this role may not, or somebody else was faster.

    Raises:
        WalstreamError: of the connection.
    """
    try:
        with connection.cursor() as cursor:
            cursor.execute(drop_statement(name))
    except psycopg2.Error as error:
        if error.pgcode in (INSUFFICIENT_PRIVILEGE, UNDEFINED_OBJECT):
            return False
        raise classify(error, doing=f"dropping the publication {name}") from error
    return True
