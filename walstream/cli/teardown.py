"""``walstream teardown``: take a stream away again; the ledger stays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import typer

from walstream.config import Settings, quote
from walstream.errors import ConfigError

from . import console
from .options import Json, Yes, takes_settings
from .session import database

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection
    from psycopg2.extensions import cursor as Cursor

_OF_THE_LEDGER: Final = ("append_keys", "messages", "forks", "approvals", "pruned_jobs")
"""Tables in walstream's schema that say what no other place says: events refer to messages, keys keep an append from
being made twice, jobs wait for approvals, and events had jobs that are forgotten."""


@dataclass(frozen=True)
class Remains:
    """What of a stream is there.

    Attributes:
        slot, publication: their names, or ``None`` where there is none (any more).
        shared: why the publication stays, or empty.
        schema: walstream's own schema is there.
        events, projectors: what is lost with it.
        snapshots: the table of snapshots, quoted; ``None`` where there is none, or another stream uses it.
        kept: tables of that schema that stay, because they belong to the ledger and are not empty.
    """

    slot: str | None
    publication: str | None
    shared: str
    schema: bool
    events: int
    projectors: int
    snapshots: str | None
    kept: tuple[str, ...]

    @property
    def nothing(self) -> bool:
        return not (self.slot or self.schema or (self.publication and not self.shared))


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(teardown)


@takes_settings
def teardown(settings: Settings, *, yes: Yes = False, as_json: Json = False) -> None:
    """Drop the slot, the publication, the snapshots and walstream's own tables, with every offset and cursor in them.

    The ledger's table and the jobs are never touched, nor what belongs to the ledger's rows: stored messages, keys of
    appends, forks. (Snapshots are made again from the ledger.) A publication that publishes other tables as well stays.
    It is safe to repeat.
    """
    from walstream.source import slots
    from walstream.source.publications import drop_statement

    with database(settings, "teardown") as conn:
        found = _look(conn, settings)
        _require_owner(conn, settings, found)
        if found.nothing:
            _report(settings, found, as_json, "nothing is there to take away")
            return
        if not as_json:
            _show(settings, found)
        console.confirm("Drop all this?", yes)
        with conn.cursor() as cur:
            if found.schema:
                # Whoever reads or writes the order without a lease (a stopped process) is fenced off first.
                cur.execute(f"UPDATE {quote(settings.namespace)}.generation SET generation = generation + 1")
            if found.snapshots:
                _drop_snapshots(cur, found.snapshots)
            # The schema last: it is what says that the slot is ours, so that an attempt that was cut short can go on.
            if found.slot:
                slots.drop(conn, found.slot)
            if found.publication and not found.shared:
                cur.execute(drop_statement(found.publication))
        if found.schema:
            _drop_schema(conn, settings, found.kept)
    _report(settings, found, as_json, f"taken away; {settings.ledger.qualified} is as it was")


def _drop_snapshots(cur: Cursor, table: str) -> None:
    from psycopg2.errors import DependentObjectsStillExist

    try:
        cur.execute(f"DROP TABLE {table}")
    except DependentObjectsStillExist as error:
        raise ConfigError(
            f"{table} cannot be dropped: {error.diag.message_detail or error.diag.message_primary}",
            hint="drop first what was built on it; nothing has been taken away yet",
        ) from error


def _drop_schema(conn: Connection, settings: Settings, kept: tuple[str, ...]) -> None:
    """Drop walstream's schema; what is kept of it stands in a schema of the same name afterwards."""
    namespace = quote(settings.namespace)
    conn.autocommit = False
    try:
        with conn, conn.cursor() as cur:
            if not kept:
                cur.execute(f"DROP SCHEMA {namespace} CASCADE")
                return
            aside = quote(f"{settings.namespace[:40]} aside")
            cur.execute(f"CREATE SCHEMA {aside}")
            for table in kept:
                cur.execute(f"ALTER TABLE {namespace}.{quote(table)} SET SCHEMA {aside}")
            cur.execute(f"DROP SCHEMA {namespace} CASCADE")
            cur.execute(f"ALTER SCHEMA {aside} RENAME TO {namespace}")
    finally:
        conn.autocommit = True


def _look(conn: Connection, settings: Settings) -> Remains:
    """What is there, and ours to drop.

    Raises:
        ConfigError: a consumer works on the ledger, or the schema is another stream's.
    """
    from walstream.ledger.adoption import live_holder
    from walstream.ledger.identity import read_identity, require_same_stream
    from walstream.ledger.schema import LEDGER_VERSION, installed_version
    from walstream.source.facts import slot_facts
    from walstream.source.table_facts import publication_facts, table_facts

    identity = None
    events = projectors = 0
    kept: tuple[str, ...] = ()
    snapshots = None
    with conn.cursor() as cur:
        version = installed_version(cur, settings.namespace)
        schema = version > 0
        if schema:
            identity = read_identity(cur, settings.namespace)
            if holder := live_holder(cur, settings.namespace):
                raise ConfigError(
                    f"a consumer works on this ledger at this moment: {holder}", hint="stop it first (SIGTERM)"
                )
            namespace = quote(settings.namespace)
            cur.execute(
                f"SELECT (SELECT coalesce(sum(events), 0) FROM {namespace}.commit_order)::bigint,"
                f" (SELECT count(*) FROM {namespace}.projectors)"
            )
            row: Any = cur.fetchone()
            events, projectors = row
        if version >= LEDGER_VERSION:
            kept = tuple(table for table in _OF_THE_LEDGER if _holds_rows(cur, f"{namespace}.{table}"))
            snapshots = _snapshots(cur, settings)
    if identity is not None:
        require_same_stream(identity, settings)
    # Without an identity nothing says that a slot of this name is ours.
    slot = slot_facts(conn, settings.slot) if identity is not None else None
    publication = publication_facts(conn, settings.publication) if identity is not None else None
    shared = ""
    if publication is not None:
        table = table_facts(conn, settings.ledger)
        ours = set() if table is None else {table.oid, *(leaf for leaf, _, _ in table.leaves)}
        if publication.all_tables:
            shared = "it is FOR ALL TABLES"
        elif others := [f"{each.namespace}.{each.name}" for each in publication.tables if each.oid not in ours]:
            shared = f"it also publishes {', '.join(others)}"
    return Remains(
        slot.name if slot else None,
        publication.name if publication else None,
        shared,
        schema,
        events,
        projectors,
        snapshots,
        kept,
    )


def _holds_rows(cur: Cursor, table: str) -> bool:
    """Whether it does, if it is there. Who may not read it is no owner, and is refused anyway."""
    cur.execute("SELECT pg_catalog.has_table_privilege(pg_catalog.to_regclass(%s), 'SELECT')", (table,))
    row: Any = cur.fetchone()
    if not row[0]:
        return False
    cur.execute(f"SELECT EXISTS (SELECT FROM {table})")
    row = cur.fetchone()
    return bool(row[0])


def _snapshots(cur: Cursor, settings: Settings) -> str | None:
    """The table of snapshots, if it is there and no other stream in this database is set up on the same ledger."""
    ledger = settings.ledger
    name = ledger.beside(ledger.snapshots)
    cur.execute(
        "SELECT n.nspname::text, pg_catalog.has_schema_privilege(n.oid, 'USAGE')"
        " AND pg_catalog.has_table_privilege(i.oid, 'SELECT')"
        " FROM pg_catalog.pg_namespace AS n"
        " JOIN pg_catalog.pg_class AS i ON i.relnamespace = n.oid AND i.relname = 'identity'"
        " JOIN pg_catalog.pg_class AS k ON k.relnamespace = n.oid AND k.relname = 'append_keys'"
        " WHERE n.nspname <> %s AND pg_catalog.to_regclass(%s) IS NOT NULL",
        (settings.namespace, name),
    )
    for namespace, readable in cur.fetchall():
        if not readable:
            return None
        cur.execute(
            f"SELECT EXISTS (SELECT FROM {quote(namespace).replace('%', '%%')}.identity"
            " WHERE table_oid = pg_catalog.to_regclass(%s)::oid)",
            (ledger.qualified,),
        )
        row: Any = cur.fetchone()
        if row[0]:
            return None
    cur.execute("SELECT pg_catalog.to_regclass(%s) IS NOT NULL", (name,))
    row = cur.fetchone()
    return name if row[0] else None


def _require_owner(conn: Connection, settings: Settings, found: Remains) -> None:
    """Refuse a role that could drop the slot, and then neither the publication nor the schema.

    Raises:
        ConfigError: one of them is another role's.
    """
    with conn.cursor() as cur:
        cur.execute(
            "SELECT what, pg_catalog.pg_get_userbyid(owner)::text, current_user::text FROM ("
            " SELECT 'schema ' || nspname, nspowner FROM pg_catalog.pg_namespace WHERE %s AND nspname = %s UNION ALL"
            " SELECT 'publication ' || pubname, pubowner FROM pg_catalog.pg_publication WHERE pubname = %s"
            ") AS ours (what, owner) WHERE NOT pg_catalog.pg_has_role(owner, 'USAGE')",
            (found.schema, settings.namespace, None if found.shared else found.publication),
        )
        foreign = cur.fetchall()
    if foreign:
        what, owner, role = foreign[0]
        raise ConfigError(f"{what} belongs to {owner}, and {role} may not drop it", hint=f"run this as {owner}")


def _show(settings: Settings, found: Remains) -> None:
    if found.slot:
        console.say(f"slot {found.slot}")
    if found.publication:
        console.say(f"publication {found.publication}" + (f" stays, because {found.shared}" if found.shared else ""))
    if found.schema:
        console.say(
            f"schema {settings.namespace}, with the order of {found.events:,} events and the cursors of"
            f" {found.projectors:,} projectors; after another `walstream init` offsets begin at 1 again"
        )
    if found.snapshots:
        console.say(f"table {found.snapshots}: a projection, which is made again from the ledger")
    ledger = settings.ledger
    console.say(f"(the tables {ledger.qualified} and {ledger.beside(ledger.jobs)} stay)")
    if found.kept:
        console.say(
            f"({', '.join(found.kept)} in schema {settings.namespace} stay: they belong to the ledger's rows, and"
            " another `walstream init` takes them over)"
        )


def _report(settings: Settings, found: Remains, as_json: bool, words: str) -> None:
    if as_json:
        console.print_json(
            {
                "slot": found.slot,
                "publication": None if found.shared else found.publication,
                "publication_kept": found.shared or None,
                "schema": settings.namespace if found.schema else None,
                "snapshots": found.snapshots,
                "kept": list(found.kept),
            }
        )
    else:
        console.say(words)
