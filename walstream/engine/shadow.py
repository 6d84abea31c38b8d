"""Shadow copies of a projector's tables: filled beside the live ones, compared with them, and put in their place.

The copies stand in a schema of their own, which a rebuild puts first in its ``search_path``; a projector that names its
tables without a schema then fills the copies with the very code that fills the live ones. What takes the live tables'
place is the *content*, row by row where they differ: the tables themselves stay what they are, with their grants,
triggers, views and foreign keys, and readers see one state or the other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from walstream.config import quote
from walstream.errors import ConfigError, LedgerError, ProjectorHalted

if TYPE_CHECKING:
    from psycopg2.extensions import cursor as Cursor

_NAME_LIMIT = 63  # bytes of a name in Postgres (NAMEDATALEN - 1)


class WroteToLive(ProjectorHalted):
    """During its rebuild a projector wrote to a live table."""


@dataclass(frozen=True, slots=True)
class Table:
    """A live table.

    Attributes:
        columns: those that can be written, in order.
        compared: those of them that a projector fills itself. A column that the database fills (an identity, a default
            that calls a function) differs from one replay to the next and says nothing.
        identities: identity columns, whose counters a swap has to move on.
        key: the primary key; empty if there is none.
    """

    oid: int
    namespace: str
    name: str
    columns: tuple[str, ...]
    compared: tuple[str, ...]
    identities: tuple[str, ...]
    key: tuple[str, ...]

    @property
    def qualified(self) -> str:
        return f"{quote(self.namespace)}.{quote(self.name)}"


@dataclass(frozen=True, slots=True)
class Difference:
    """How a live table differs from its rebuilt copy.

    Attributes:
        table: the live table, with its schema.
        rows: in the rebuilt copy.
        missing: rows of the copy that the live table does not have.
        surplus: rows of the live table that the copy does not have. A row with another value counts in both.
    """

    table: str
    rows: int
    missing: int
    surplus: int

    @property
    def any(self) -> bool:
        """Whether there is one."""
        return self.missing > 0 or self.surplus > 0


class Shadow:
    """The shadow of one projector's tables.

    Args:
        namespace: walstream's schema; the shadow's is named after it and the projector.
        projector: its name.
        tables: as the projector declares them.
    """

    def __init__(self, namespace: str, projector: str, tables: Sequence[str]) -> None:
        self._declared = tuple(tables)
        self._projector = projector
        self.tables: tuple[Table, ...] = ()
        name = f"{namespace}_rebuild_{projector}"
        if len(name.encode()) > _NAME_LIMIT:
            name = f"walstream_rebuild_{hashlib.sha256(name.encode()).hexdigest()[:32]}"
        self.schema = name

    def create(self, cur: Cursor) -> None:
        """Make empty copies, in place of any that an earlier rebuild left. In one transaction of the caller.

        Raises:
            ConfigError: a declared table does not exist in the session's ``search_path``, or is no ordinary table.
        """
        self.tables = tuple(self._resolve(cur, name) for name in self._declared)
        self.drop(cur)
        cur.execute(f"CREATE SCHEMA {quote(self.schema)}")
        for table in self.tables:
            cur.execute(f"CREATE TABLE {self._copy(table)} (LIKE {table.qualified} INCLUDING ALL)")

    def enter(self, cur: Cursor) -> None:
        """Let the session find the copies first."""
        cur.execute("SELECT pg_catalog.current_setting('search_path')")
        row = cur.fetchone()
        assert row is not None
        path = f"{quote(self.schema)}, {row[0]}" if row[0] else quote(self.schema)
        cur.execute("SELECT pg_catalog.set_config('search_path', %s, false)", (path,))

    def refuse_live_writes(self, cur: Cursor) -> None:
        """Check, inside a transaction, that it has not written to a live table.

        Raises:
            WroteToLive: it has: the projector names the table with its schema.
        """
        cur.execute(
            "SELECT relid FROM pg_catalog.pg_stat_xact_all_tables WHERE relid = ANY (%s)"
            " AND n_tup_ins + n_tup_upd + n_tup_del > 0",
            ([table.oid for table in self.tables],),
        )
        written = {row[0] for row in cur.fetchall()}
        for table in self.tables:
            if table.oid in written:
                raise WroteToLive(
                    f"projector {self._projector!r} wrote to {table.qualified} during its rebuild, past the copy",
                    hint=f"name the table without its schema: {quote(table.name)}. Nothing was committed",
                )

    def lock(self, cur: Cursor) -> None:
        """Keep everybody from writing to the live tables until the end of the transaction; readers go on."""
        cur.execute(f"LOCK TABLE {', '.join(table.qualified for table in self.tables)} IN SHARE ROW EXCLUSIVE MODE")

    def differences(self, cur: Cursor) -> list[Difference]:
        """Compare each live table with its copy, by the columns that the projector fills."""
        found = []
        for table in self.tables:
            # As text: not every type has an equality (json), and both are rendered by the same session.
            live, copy = (f"SELECT {_as_text(table.compared)} AS r FROM {name}" for name in self._both(table))
            cur.execute(
                f"SELECT (SELECT count(*) FROM {self._copy(table)}),"
                f" (SELECT count(*) FROM ({copy} EXCEPT ALL {live}) AS missing),"
                f" (SELECT count(*) FROM ({live} EXCEPT ALL {copy}) AS surplus)"
            )
            row = cur.fetchone()
            assert row is not None
            found.append(Difference(table.qualified, int(row[0]), int(row[1]), int(row[2])))
        return found

    def put_in_place(self, cur: Cursor, differences: Sequence[Difference]) -> None:
        """Give the live tables the content of their copies. Rows that agree are not touched."""
        changed = [table for table, found in zip(self.tables, differences, strict=True) if found.any]
        for table in reversed(changed):  # what was declared later may refer to what was declared earlier
            live, copy = self._both(table)
            same = f"{_as_text(table.compared, 's')} = {_as_text(table.compared, 'l')}"
            keep = f" WHERE NOT EXISTS (SELECT 1 FROM {copy} AS s WHERE {_keys(table)} AND {same})" if table.key else ""
            cur.execute(f"DELETE FROM {live} AS l{keep}")
        for table in changed:
            live, copy = self._both(table)
            columns = ", ".join(map(quote, table.columns))
            keep = f" WHERE NOT EXISTS (SELECT 1 FROM {live} AS l WHERE {_keys(table)})" if table.key else ""
            cur.execute(
                f"INSERT INTO {live} ({columns}) OVERRIDING SYSTEM VALUE"
                f" SELECT {', '.join(f's.{quote(column)}' for column in table.columns)} FROM {copy} AS s{keep}"
            )
            for column in table.identities:  # the copy counted for itself: the live counter must not give these again
                cur.execute(
                    "SELECT pg_catalog.setval(pg_catalog.pg_get_serial_sequence(%s, %s), greatest(max_value,"
                    " pg_catalog.nextval(pg_catalog.pg_get_serial_sequence(%s, %s))))"
                    f" FROM (SELECT max({quote(column)}) AS max_value FROM {live}) AS m",
                    (live, column, live, column),
                )

    def drop(self, cur: Cursor) -> None:
        """Remove the copies."""
        cur.execute(f"DROP SCHEMA IF EXISTS {quote(self.schema)} CASCADE")

    def _copy(self, table: Table) -> str:
        return f"{quote(self.schema)}.{quote(table.name)}"

    def _both(self, table: Table) -> tuple[str, str]:
        return table.qualified, self._copy(table)

    def _resolve(self, cur: Cursor, declared: str) -> Table:
        cur.execute(
            """
            SELECT c.oid::bigint, n.nspname, c.relname, c.relkind,
                   (SELECT array_agg(a.attname::text ORDER BY a.attnum) FROM pg_catalog.pg_attribute AS a
                     WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = ''),
                   (SELECT array_agg(a.attname::text ORDER BY a.attnum)
                      FROM pg_catalog.pg_attribute AS a
                      LEFT JOIN pg_catalog.pg_attrdef AS d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
                     WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = ''
                       AND a.attidentity = ''
                       -- a call, or what is written without brackets (CURRENT_TIMESTAMP and its like)
                       AND coalesce(pg_catalog.pg_get_expr(d.adbin, d.adrelid), '') !~ '\\(|CURRENT_|LOCALTIME'),
                   (SELECT array_agg(a.attname::text) FROM pg_catalog.pg_attribute AS a
                     WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped AND a.attidentity <> ''),
                   (SELECT array_agg(a.attname::text)
                      FROM pg_catalog.pg_index AS i
                      JOIN pg_catalog.pg_attribute AS a ON a.attrelid = i.indrelid AND a.attnum = ANY (i.indkey)
                     WHERE i.indrelid = c.oid AND i.indisprimary)
              FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
             WHERE c.oid = pg_catalog.to_regclass(%s)""",
            (declared,),
        )
        row = cur.fetchone()
        if row is None:
            raise ConfigError(
                f"projector {self._projector!r} declares the table {declared!r}, which does not exist",
                hint="declare names as SQL would find them, and start the projector once before it is rebuilt",
            )
        oid, namespace, name, kind, columns, compared, identities, key = row
        if kind not in ("r", "p"):
            raise ConfigError(f"projector {self._projector!r} declares {declared!r}, which is no table")
        if not compared:
            raise LedgerError(f"{namespace}.{name} has no column that a projector fills: there is nothing to compare")
        return Table(
            int(oid),
            str(namespace),
            str(name),
            tuple(columns),
            tuple(compared),
            tuple(identities or ()),
            tuple(key or ()),
        )


def _as_text(columns: Sequence[str], alias: str = "") -> str:
    prefix = f"{alias}." if alias else ""
    return f"ROW({', '.join(prefix + quote(column) for column in columns)})::text"


def _keys(table: Table) -> str:
    return " AND ".join(f"s.{quote(column)} = l.{quote(column)}" for column in table.key)
