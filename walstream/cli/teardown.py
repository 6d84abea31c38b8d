"""``walstream teardown``: take a stream away again; the ledger stays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from walstream.config import Settings, quote
from walstream.errors import ConfigError

from . import console
from .options import Json, Yes, takes_settings
from .session import database

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection


@dataclass(frozen=True)
class Remains:
    """What of a stream is there.

    Attributes:
        slot, publication: their names, or ``None`` where there is none (any more).
        shared: why the publication stays, or empty.
        schema: walstream's own schema is there.
        events, projectors: what is lost with it.
    """

    slot: str | None
    publication: str | None
    shared: str
    schema: bool
    events: int
    projectors: int

    @property
    def nothing(self) -> bool:
        return not (self.slot or self.schema or (self.publication and not self.shared))


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(teardown)


@takes_settings
def teardown(settings: Settings, *, yes: Yes = False, as_json: Json = False) -> None:
    """Drop the slot, the publication and walstream's own tables, with every offset and cursor in them.

    The ledger's table is never touched. A publication that publishes other tables as well stays. It is safe to repeat.
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
            # The schema last: it is what says that the slot is ours, so that an attempt that was cut short can go on.
            if found.slot:
                slots.drop(conn, found.slot)
            if found.publication and not found.shared:
                cur.execute(drop_statement(found.publication))
            if found.schema:
                cur.execute(f"DROP SCHEMA {quote(settings.namespace)} CASCADE")
    _report(settings, found, as_json, f"taken away; {settings.ledger.qualified} is as it was")


def _look(conn: Connection, settings: Settings) -> Remains:
    """What is there, and ours to drop.

    Raises:
        ConfigError: a consumer works on the ledger, or the schema is another stream's.
    """
    from walstream.ledger.adoption import live_holder
    from walstream.ledger.identity import read_identity, require_same_stream
    from walstream.ledger.schema import installed_version
    from walstream.source.facts import slot_facts
    from walstream.source.table_facts import publication_facts, table_facts

    identity = None
    events = projectors = 0
    with conn.cursor() as cur:
        schema = installed_version(cur, settings.namespace) > 0
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
        slot.name if slot else None, publication.name if publication else None, shared, schema, events, projectors
    )


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
    console.say(f"(the table {settings.ledger.qualified} stays)")


def _report(settings: Settings, found: Remains, as_json: bool, words: str) -> None:
    if as_json:
        console.print_json(
            {
                "slot": found.slot,
                "publication": None if found.shared else found.publication,
                "publication_kept": found.shared or None,
                "schema": settings.namespace if found.schema else None,
            }
        )
    else:
        console.say(words)
