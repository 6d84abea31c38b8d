"""Replica identities: what a table needs before UPDATE and DELETE of it may be published.

With either published and no identity, Postgres refuses them in every session of the application (documentation, CREATE
PUBLICATION, "Notes"). The identity that counts is the one of the table that holds the row: of each partition, not of
the root. So it is looked at for every table that a publication sends, before the publication is widened.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection


def without_identity(connection: Connection, oids: Collection[int]) -> list[str]:
    """Which of these tables, and of their partitions, have none; qualified names, quoted.

    Raises:
        psycopg2.Error: of the connection.
    """
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT DISTINCT pg_catalog.format('%%I.%%I', n.nspname, c.relname) AS name
              FROM unnest(%s::oid[]) AS root
             CROSS JOIN LATERAL (
                   SELECT root AS relid WHERE NOT EXISTS (SELECT FROM pg_catalog.pg_partition_tree(root::regclass))
                    UNION ALL SELECT t.relid::oid FROM pg_catalog.pg_partition_tree(root::regclass) AS t) AS part
              JOIN pg_catalog.pg_class AS c ON c.oid = part.relid AND c.relkind = 'r'
              JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
             WHERE c.relreplident <> 'f' AND NOT EXISTS (
                   SELECT FROM pg_catalog.pg_index AS i
                    WHERE i.indrelid = c.oid AND i.indisvalid AND i.indimmediate
                      AND CASE c.relreplident WHEN 'd' THEN i.indisprimary WHEN 'i' THEN i.indisreplident END)
             ORDER BY 1""",
            (list(oids),),
        )
        return [str(name) for (name,) in cursor.fetchall()]
