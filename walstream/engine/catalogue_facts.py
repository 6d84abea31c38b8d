"""What the catalogue says of the ledger: its tables, columns, triggers and rules, and its publication."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Final

from walstream.config import Settings, quote

if TYPE_CHECKING:
    from psycopg2.extensions import cursor as Cursor

Facts = dict[str, dict[str, Any]]
"""By name: ``relation:OID``, ``columns``, ``publication``, ``trigger:OID:NAME``, ``rule:OID:NAME``."""

_TREE = """
    WITH tree AS MATERIALIZED (
        SELECT %(oid)s::oid AS oid, NULL::oid AS parent
         UNION SELECT relid::oid, parentrelid::oid FROM pg_catalog.pg_partition_tree(%(oid)s::oid::regclass)
                WHERE relid::oid <> %(oid)s)
"""

_RELATIONS = f"""{_TREE}
    SELECT 'relation:' || c.oid,
           jsonb_build_object('name', format('%%I.%%I', n.nspname, c.relname), 'parent', t.parent::bigint,
                              'filenode', CASE WHEN c.relkind = 'r' THEN pg_relation_filenode(c.oid)::bigint END,
                              'persistence', c.relpersistence,
                              'attached', (SELECT i.xmin::text FROM pg_catalog.pg_inherits AS i
                                            WHERE i.inhrelid = c.oid))
      FROM tree AS t JOIN pg_catalog.pg_class AS c ON c.oid = t.oid
      JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace"""

# On 14 the triggers that a partition has from its root are internal; those of foreign keys are on every version.
_TRIGGERS = f"""{_TREE}
    SELECT format('trigger:%%s:%%s', t.oid, g.tgname),
           jsonb_build_object('name', quote_ident(g.tgname), 'on', t.oid::regclass::text, 'relation', t.oid::bigint,
                              'enabled', g.tgenabled, 'definition', pg_get_triggerdef(g.oid),
                              'ours', n.nspname = %(namespace)s, 'cloned', g.tgparentid <> 0)
      FROM tree AS t JOIN pg_catalog.pg_trigger AS g ON g.tgrelid = t.oid
                       AND (NOT g.tgisinternal OR (g.tgparentid <> 0 AND g.tgconstraint = 0))
      JOIN pg_catalog.pg_proc AS p ON p.oid = g.tgfoid JOIN pg_catalog.pg_namespace AS n ON n.oid = p.pronamespace"""

_RULES = f"""{_TREE}
    SELECT format('rule:%%s:%%s', t.oid, r.rulename),
           jsonb_build_object('name', quote_ident(r.rulename), 'on', t.oid::regclass::text, 'relation', t.oid::bigint,
                              'enabled', r.ev_enabled, 'definition', pg_get_ruledef(r.oid))
      FROM tree AS t JOIN pg_catalog.pg_rewrite AS r ON r.ev_class = t.oid"""

_COLUMNS = """
    SELECT 'columns', jsonb_object_agg(attname, format_type(atttypid, atttypmod))
      FROM pg_catalog.pg_attribute WHERE attrelid = %(oid)s AND attnum > 0 AND NOT attisdropped HAVING count(*) > 0"""

# The ledger under its root or its partitions; what version 14 does not know (filters, lists) is NULL there. `xmin` is
# the transaction that wrote the catalogue's row last: it tells what was changed and put back between two looks.
_PUBLICATION = f"""{_TREE}
    SELECT 'publication',
           jsonb_build_object(
               'name', p.pubname,
               'version', p.oid || ':' || p.xmin,
               'entries', (SELECT jsonb_object_agg(r.prrelid, r.oid || ':' || r.xmin)
                             FROM pg_catalog.pg_publication_rel AS r
                            WHERE r.prpubid = p.oid AND r.prrelid IN (SELECT oid FROM tree)),
               'operations', array_remove(ARRAY[CASE WHEN p.pubinsert THEN 'insert' END,
                                                CASE WHEN p.pubupdate THEN 'update' END,
                                                CASE WHEN p.pubdelete THEN 'delete' END,
                                                CASE WHEN p.pubtruncate THEN 'truncate' END], NULL),
               'filter', (SELECT string_agg(DISTINCT to_jsonb(s) ->> 'rowfilter', '; ')
                            FROM pg_catalog.pg_publication_tables AS s
                            JOIN pg_catalog.pg_namespace AS n ON n.nspname = s.schemaname
                            JOIN pg_catalog.pg_class AS c ON c.relnamespace = n.oid AND c.relname = s.tablename
                           WHERE s.pubname = p.pubname AND c.oid IN (SELECT oid FROM tree)),
               'columns', (SELECT string_agg(to_jsonb(r) ->> 'prattrs', '; ') FROM pg_catalog.pg_publication_rel AS r
                            WHERE r.prpubid = p.oid AND r.prrelid IN (SELECT oid FROM tree)))
      FROM pg_catalog.pg_publication AS p
     WHERE p.pubname = %(publication)s
       AND EXISTS (SELECT FROM pg_catalog.pg_publication_tables AS s
                     JOIN pg_catalog.pg_namespace AS n ON n.nspname = s.schemaname
                     JOIN pg_catalog.pg_class AS c ON c.relnamespace = n.oid AND c.relname = s.tablename
                    WHERE s.pubname = p.pubname AND c.oid IN (SELECT oid FROM tree))"""

# Who may read the ledger may not read its partitions by their own names. Those by range are found through the root.
_READABLE: Final = """
    SELECT CASE WHEN has_table_privilege(c.oid, 'SELECT') THEN format('%%I.%%I', n.nspname, c.relname)
                WHEN p.partstrat = 'r' AND p.partdefid <> c.oid
                THEN %(root)s || ' WHERE ' || pg_get_partition_constraintdef(c.oid) END,
           pg_relation_size(c.oid) > 0
      FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
      LEFT JOIN pg_catalog.pg_inherits AS i ON i.inhrelid = c.oid
      LEFT JOIN pg_catalog.pg_partitioned_table AS p ON p.partrelid = i.inhparent
     WHERE c.oid = %(oid)s"""


def read_facts(cur: Cursor, settings: Settings, table_oid: int) -> Facts:
    """All of it, as of now.

    Raises:
        psycopg2.Error: of the connection.
    """
    values = {"oid": table_oid, "namespace": settings.namespace, "publication": settings.publication}
    found: Facts = {}
    for question in (_RELATIONS, _COLUMNS, _TRIGGERS, _RULES, _PUBLICATION):
        cur.execute(question, values)
        found.update(cur.fetchall())
    return found


def present(cur: Cursor, oids: Collection[int]) -> set[int]:
    """Which of these tables exist."""
    if not oids:
        return set()
    cur.execute("SELECT oid::bigint FROM pg_catalog.pg_class WHERE oid = ANY (%s::oid[])", (list(oids),))
    return {int(oid) for (oid,) in cur.fetchall()}


def rows_of(cur: Cursor, settings: Settings, oid: int) -> list[int] | None:
    """First and last seq of a table; ``None`` if it is empty, an empty list if it is not and this role may not see."""
    cur.execute(_READABLE, {"oid": oid, "root": settings.ledger.qualified})
    row: Any = cur.fetchone()
    if row is None or not row[1]:
        return None
    if row[0] is None:
        return []
    seq = quote(settings.ledger.columns.seq)
    cur.execute(f"SELECT min({seq}), max({seq}) FROM {row[0]}")
    row = cur.fetchone()
    return None if row[0] is None else [int(row[0]), int(row[1])]
