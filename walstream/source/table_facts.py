"""Facts about the ledger's table and its publication (see :mod:`walstream.source.facts`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from psycopg2.extensions import connection as Connection

from walstream.config import LedgerTable
from walstream.source.publications import OPERATIONS

INTEGER_TYPES: Final = frozenset({20, 21, 23})
"""OIDs of int8, int2 and int4."""


@dataclass(frozen=True, slots=True)
class PublishedTable:
    """One table that a publication sends.

    Attributes:
        columns: the columns that are sent, or ``None`` where the version knows no column lists (14).
        row_filter: SQL, or ``""``.
    """

    oid: int
    namespace: str
    name: str
    columns: tuple[str, ...] | None
    row_filter: str


@dataclass(frozen=True, slots=True)
class PublicationFacts:
    """One publication of this database.

    Attributes:
        operations: out of insert, update, delete, truncate.
        via_root: changes of a partition are sent under its root's name.
        tables: what it sends, as ``pg_publication_tables`` resolves it: roots, or leaves if not via the root.
        members: OIDs of the tables that it names itself.
        schemas: names of the schemas that it holds as a whole (from 15).
    """

    name: str
    owner: str
    all_tables: bool
    operations: tuple[str, ...]
    via_root: bool
    tables: tuple[PublishedTable, ...]
    members: frozenset[int]
    schemas: frozenset[str]

    def names(self, table: TableFacts) -> bool:
        """Whether it holds this very table, by name or as part of something larger, so that a new partition of it is
        held as well."""
        return self.all_tables or table.oid in self.members or table.namespace in self.schemas

    def table(self, oid: int) -> PublishedTable | None:
        """The entry for the table with this OID."""
        return next((table for table in self.tables if table.oid == oid), None)


@dataclass(frozen=True, slots=True)
class ColumnFacts:
    """One column.

    Attributes:
        type_name: as ``format_type`` writes it.
        generated: computed by the server; such columns are not sent before 18 (and then only if asked for).
    """

    name: str
    type_oid: int
    type_name: str
    nullable: bool
    generated: bool


@dataclass(frozen=True, slots=True)
class IndexFacts:
    """One usable index: valid, not partial, not on expressions, checked at once."""

    name: str
    columns: tuple[str, ...]
    unique: bool
    primary: bool


@dataclass(frozen=True, slots=True)
class SequenceFacts:
    """The sequence behind a column.

    Attributes:
        cache: numbers that each session takes at once; above 1 they commit far out of order.
    """

    name: str
    cache: int
    cycle: bool


@dataclass(frozen=True, slots=True)
class TableFacts:
    """The ledger's table, as it is.

    Attributes:
        kind: ``pg_class.relkind``: ``r`` table, ``p`` partitioned, ``v`` view, ``m`` materialized view, ``f`` foreign.
        persistence: ``p`` permanent, ``u`` unlogged, ``t`` temporary.
        root_oid: of the topmost partitioned table above it; its own OID if there is none.
        leaves: OIDs and qualified names of its partitions that hold rows, with their persistence.
        seq_sequence: the sequence that belongs to the ``seq`` column, if there is one.
        row_security: policies apply to the table; ``force_row_security``: to its owner as well.
        row_security_applies: to this role.
        replica_identity: ``d`` default, ``n`` nothing, ``f`` full, ``i`` index.
        readable: this role may SELECT all of it.
    """

    oid: int
    namespace: str
    name: str
    owner: str
    kind: str
    persistence: str
    root_oid: int
    leaves: tuple[tuple[int, str, str], ...]
    columns: tuple[ColumnFacts, ...]
    indexes: tuple[IndexFacts, ...]
    seq_sequence: SequenceFacts | None
    row_security: bool
    force_row_security: bool
    row_security_applies: bool
    replica_identity: str
    readable: bool

    @property
    def partitioned(self) -> bool:
        return self.kind == "p"

    def column(self, name: str) -> ColumnFacts | None:
        """The column of this name."""
        return next((column for column in self.columns if column.name == name), None)

    def unique_on(self, column: str) -> bool:
        """Whether the server itself keeps ``column`` unique: a unique index on it alone."""
        return any(index.unique and index.columns == (column,) for index in self.indexes)

    def keyed_by(self, column: str) -> bool:
        """Whether rows can be found by ``column`` and it is part of a unique key: alone, or, on a partitioned table
        (whose keys must hold the partition key as well), as the first of several."""
        if self.unique_on(column):
            return True
        return self.partitioned and any(index.unique and index.columns[:1] == (column,) for index in self.indexes)


def publication_facts(connection: Connection, publication: str) -> PublicationFacts | None:
    """Read one publication of the current database; ``None`` if there is none of this name."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pg_catalog.to_jsonb(p), p.oid, pg_catalog.pg_get_userbyid(p.pubowner)"
            " FROM pg_catalog.pg_publication p WHERE p.pubname = %s",
            (publication,),
        )
        found: Any = cursor.fetchone()
        if found is None:
            return None
        row, publication_oid, owner = found
        cursor.execute(
            """
            SELECT c.oid, t.schemaname, t.tablename, pg_catalog.to_jsonb(t)
              FROM pg_catalog.pg_publication_tables t
              JOIN pg_catalog.pg_namespace n ON n.nspname = t.schemaname
              JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = t.tablename
             WHERE t.pubname = %s ORDER BY t.schemaname, t.tablename
            """,
            (publication,),
        )
        tables = tuple(
            PublishedTable(
                oid=oid,
                namespace=namespace,
                name=name,
                columns=tuple(facts["attnames"]) if facts.get("attnames") is not None else None,
                row_filter=facts.get("rowfilter") or "",
            )
            for oid, namespace, name, facts in cursor.fetchall()
        )
        cursor.execute("SELECT prrelid FROM pg_catalog.pg_publication_rel WHERE prpubid = %s", (publication_oid,))
        members = frozenset(oid for (oid,) in cursor.fetchall())
        schemas: frozenset[str] = frozenset()
        if connection.server_version >= 150000:
            cursor.execute(
                "SELECT n.nspname FROM pg_catalog.pg_publication_namespace p"
                " JOIN pg_catalog.pg_namespace n ON n.oid = p.pnnspid WHERE p.pnpubid = %s",
                (publication_oid,),
            )
            schemas = frozenset(name for (name,) in cursor.fetchall())
    return PublicationFacts(
        name=publication,
        owner=owner,
        all_tables=row["puballtables"],
        operations=tuple(operation for operation in OPERATIONS if row[f"pub{operation}"]),
        via_root=row["pubviaroot"],
        tables=tables,
        members=members,
        schemas=schemas,
    )


def table_facts(connection: Connection, ledger: LedgerTable) -> TableFacts | None:
    """Read the ledger's table; ``None`` if nothing has its name."""
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT c.oid, pg_catalog.pg_get_userbyid(c.relowner), c.relkind::text, c.relpersistence::text,
                   coalesce(pg_catalog.pg_partition_root(c.oid), c.oid)::oid,
                   c.relrowsecurity, c.relforcerowsecurity,
                   c.relrowsecurity AND NOT (r.rolsuper OR r.rolbypassrls) AND
                     (c.relforcerowsecurity OR NOT pg_catalog.pg_has_role(c.relowner, 'USAGE')),
                   c.relreplident::text,
                   pg_catalog.has_schema_privilege(n.oid, 'USAGE') AND pg_catalog.has_table_privilege(c.oid, 'SELECT')
              FROM pg_catalog.pg_class c
              JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
              JOIN pg_catalog.pg_roles r ON r.rolname = current_user
             WHERE n.nspname = %s AND c.relname = %s
               AND c.relkind NOT IN ('i', 'I', 'S', 't', 'c')
            """,
            (ledger.namespace, ledger.table),
        )
        found: Any = cursor.fetchone()
        if found is None:
            return None
        oid, owner, kind, persistence, root, secured, forced, applies, identity, readable = found
        return TableFacts(
            oid=oid,
            namespace=ledger.namespace,
            name=ledger.table,
            owner=owner,
            kind=kind,
            persistence=persistence,
            root_oid=root,
            leaves=_leaves(cursor, oid),
            columns=_columns(cursor, oid),
            indexes=_indexes(cursor, oid),
            seq_sequence=_sequence(cursor, oid, ledger.columns.seq),
            row_security=secured,
            force_row_security=forced,
            row_security_applies=applies,
            replica_identity=identity,
            readable=readable,
        )


def _leaves(cursor: Any, oid: int) -> tuple[tuple[int, str, str], ...]:
    cursor.execute(
        """
        SELECT c.oid, pg_catalog.format('%%I.%%I', n.nspname, c.relname), c.relpersistence::text
          FROM pg_catalog.pg_partition_tree(%s::regclass) t
          JOIN pg_catalog.pg_class c ON c.oid = t.relid JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
         WHERE t.isleaf AND c.oid <> %s ORDER BY 2
        """,
        (oid, oid),
    )
    return tuple(cursor.fetchall())


def _columns(cursor: Any, oid: int) -> tuple[ColumnFacts, ...]:
    cursor.execute(
        """
        SELECT attname, atttypid, pg_catalog.format_type(atttypid, atttypmod), NOT attnotnull, attgenerated <> ''
          FROM pg_catalog.pg_attribute WHERE attrelid = %s AND attnum > 0 AND NOT attisdropped ORDER BY attnum
        """,
        (oid,),
    )
    return tuple(ColumnFacts(*row) for row in cursor.fetchall())


def _indexes(cursor: Any, oid: int) -> tuple[IndexFacts, ...]:
    cursor.execute(
        """
        SELECT c.relname, ARRAY(SELECT a.attname::text
                                  FROM pg_catalog.unnest(i.indkey::int2[]) WITH ORDINALITY k (number, place)
                                  JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.number
                                 WHERE k.place <= i.indnkeyatts ORDER BY k.place),
               i.indisunique, i.indisprimary
          FROM pg_catalog.pg_index i JOIN pg_catalog.pg_class c ON c.oid = i.indexrelid
         WHERE i.indrelid = %s AND i.indisvalid AND i.indimmediate AND i.indpred IS NULL AND i.indexprs IS NULL
         ORDER BY NOT i.indisprimary, c.relname
        """,
        (oid,),
    )
    return tuple(IndexFacts(name, tuple(columns), unique, primary) for name, columns, unique, primary in cursor)


def _sequence(cursor: Any, oid: int, column: str) -> SequenceFacts | None:
    cursor.execute(
        """
        SELECT pg_catalog.format('%%I.%%I', n.nspname, c.relname), s.seqcache, s.seqcycle
          FROM pg_catalog.pg_attribute a
          JOIN pg_catalog.pg_depend d ON d.refclassid = 'pg_catalog.pg_class'::regclass AND d.refobjid = a.attrelid
           AND d.refobjsubid = a.attnum AND d.classid = 'pg_catalog.pg_class'::regclass AND d.deptype IN ('a', 'i')
          JOIN pg_catalog.pg_sequence s ON s.seqrelid = d.objid
          JOIN pg_catalog.pg_class c ON c.oid = s.seqrelid JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
         WHERE a.attrelid = %s AND a.attname = %s
        """,
        (oid, column),
    )
    found = cursor.fetchone()
    return SequenceFacts(*found) if found else None


def table_name(connection: Connection, oid: int) -> str | None:
    """What a table is called now, as ``--table`` takes it (schema and name, not quoted); ``None`` if there is none."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pg_catalog.format('%%s.%%s', n.nspname, c.relname) FROM pg_catalog.pg_class AS c"
            " JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = %s",
            (oid,),
        )
        row: Any = cursor.fetchone()
    return None if row is None else str(row[0])
