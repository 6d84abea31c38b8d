"""The publication, widened to UPDATE, DELETE and TRUNCATE, so that the tamper alarm sees them (docs/audit.md).

What is checked before: that the application's own UPDATEs and DELETEs go on working. Postgres refuses them for a table
without a replica identity as soon as they are published, in every session, and not only for the ledger: for all tables
of the publication.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from walstream.config import Settings, quote
from walstream.errors import ConfigError

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

    from walstream.source.table_facts import PublicationFacts, TableFacts


def is_wanted(settings: Settings, asked: bool) -> bool:
    """Whether the publication shall publish every change: somebody says so, or the sink is configured."""
    from walstream.source.publications import SINK

    return asked or SINK in settings.projectors


def missing(publication: PublicationFacts) -> tuple[str, ...]:
    """The operations that it does not publish."""
    from walstream.source.publications import OPERATIONS

    return tuple(operation for operation in OPERATIONS if operation not in publication.operations)


def require_identities(
    conn: Connection, settings: Settings, publication: PublicationFacts | None, table: TableFacts | None
) -> None:
    """Check that UPDATE and DELETE can be published, of every table that the publication holds.

    Raises:
        ConfigError: Postgres would refuse them to the application; the hint has the statements.
    """
    from walstream.source.replica_identity import without_identity

    name = quote(settings.publication)
    if publication is not None and publication.all_tables:
        raise ConfigError(
            f"publication {name} is FOR ALL TABLES: with UPDATE and DELETE published, Postgres would refuse them for"
            " every table of this database without a primary key, also for those that are made later",
            hint=f"give the ledger a publication of its own: DROP PUBLICATION {name}; then `walstream init`",
        )
    oids = {table.oid} if table is not None else set()
    if publication is not None:
        oids |= publication.members | {each.oid for each in publication.tables}
    bare = without_identity(conn, oids)
    if bare:
        raise ConfigError(
            f"{', '.join(bare)} has neither a primary key nor another replica identity: with UPDATE and DELETE"
            " published, Postgres would refuse them in every session of the application",
            hint="; ".join(
                f"ALTER TABLE {each} REPLICA IDENTITY FULL (or give it a primary key, or REPLICA IDENTITY USING INDEX)"
                for each in bare[:3]
            ),
        )
