"""What set-up still has to do: looked at on the server, or, without a server, everything.

The order is not free: table, publication, slot. Decoding uses the catalogues as they were at each position of the WAL,
so a publication that is younger than the slot's position does not exist for it (and that is why a publication that is
made anew makes the slot anew as well).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING, Any, Final

from walstream.config import Settings, quote
from walstream.errors import ConfigError, SlotError
from walstream.ledger import append_only, functions, partition_layout, partitions, schema
from walstream.ledger.existing import check_existing
from walstream.ledger.identity import (
    Cluster,
    Identity,
    history_changes,
    identity_sql,
    literal,
    read_identity,
    require_same_stream,
)

from . import failover, widening

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

    from walstream.ledger.partition_layout import Layout
    from walstream.ledger.partitions import PartitionBy
    from walstream.source.facts import ServerFacts, SlotFacts
    from walstream.source.table_facts import TableFacts

JSON_TYPES: Final = frozenset({114, 3802})
"""OIDs of json and jsonb."""


_WHY_WIDE: Final = (
    ", so that the audit sink sees who changes the ledger (the application's own UPDATE and DELETE go on working)"
)


@dataclass(frozen=True)
class Step:
    """One thing that is missing.

    Attributes:
        what: in words.
        scripts: SQL, each to be run as it is.
    """

    what: str
    scripts: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """What is missing.

    Attributes:
        steps: of one transaction: schema, table, identity, publication.
        birth: why the slot has to be made (or made anew); empty if it is there and good.
        drop: a slot of ours that has to go before that.
        notes: what a person should know; nothing that stops set-up.
        failover: what the slot that is there has to be changed to; ``None`` if it is as it should be.
    """

    steps: tuple[Step, ...]
    birth: str
    drop: bool
    notes: tuple[str, ...] = ()
    failover: bool | None = None


def everything(
    settings: Settings, partition_by: PartitionBy | None = None, *, guard: bool = False, audit: bool = False
) -> Plan:
    """The plan for a database that was not looked at: all of it."""
    table = _table(settings, partition_by, datetime.now(UTC).date())
    wide = widening.is_wanted(settings, audit)
    publication = _publication(settings, partition_by is not None, wide)
    steps = [table, *_schema(settings, 0), _identity(settings), publication]
    if guard:
        steps.append(_append_only(settings))
    return Plan(tuple(steps), "new", False)


def look(
    conn: Connection,
    settings: Settings,
    *,
    from_now: bool = False,
    partition_by: PartitionBy | None = None,
    guard: bool = False,
    audit: bool = False,
) -> Plan:
    """The plan for this database. Changes nothing.

    Args:
        partition_by: how the ledger's table is partitioned if it has to be made.
        guard: the ledger is to be append-only. Where it was made so, what is missing of that is made in any case.
        audit: the publication is to publish every change, whether the sink is configured or not.

    Raises:
        ConfigError, SlotError, Unavailable: what is there contradicts the configuration, or cannot be worked with.
    """
    from walstream.source.facts import role_facts, server_facts, slot_facts
    from walstream.source.preflight import check_publication, check_server, check_table, table_gone
    from walstream.source.table_facts import publication_facts, table_facts

    server = server_facts(conn)
    check_server(server)
    if server.encoding == "SQL_ASCII":
        raise ConfigError(
            f"the database {server.database} has the encoding SQL_ASCII: its text has no encoding that could be read",
            hint="keep the ledger in a database with a real encoding, UTF8 for preference",
        )
    steps: list[Step] = []
    with conn.cursor() as cur:
        version = schema.installed_version(cur, settings.namespace)
        identity = read_identity(cur, settings.namespace) if version else None
        layout = partition_layout.look(cur, settings.ledger)
        cur.execute("SELECT (now() AT TIME ZONE 'UTC')::date")
        row: Any = cur.fetchone()
        today = row[0]
        if schema.brings_ledger(version):
            check_existing(cur, settings)
        guarded = append_only.standing(cur, settings)
    if identity is not None:
        _check_identity(identity, settings, server)

    table = table_facts(conn, settings.ledger)
    if table is None:
        if identity is not None:
            raise table_gone(settings, conn, identity.table_oid)
        steps.append(_table(settings, partition_by, today))
    else:
        if partition_by is not None:
            _check_partitioning(settings, partition_by, layout)
        check_columns(settings, check_table(settings, table, role_facts(conn)))
        if identity is not None and identity.table_oid != table.oid:
            raise ConfigError(
                f"{settings.ledger.qualified} is another table now (OID {table.oid}) than the one that was set up"
                f" (OID {identity.table_oid}): it was swapped or recreated",
                hint="rename it back, or accept the new one with `walstream adopt`",
            )
    steps += _schema(settings, version)
    if schema.LEDGER_VERSION <= version <= schema.migrations()[-1].version:
        steps += _functions(conn, settings)
    if identity is None:
        steps.append(_identity(settings))
    elif from_now and identity.floor_seq is None:
        _refuse_late_floor(conn, settings, identity)

    notes: list[str] = []
    publication = publication_facts(conn, settings.publication)
    wide = widening.is_wanted(settings, audit)
    if wide and (publication is None or widening.missing(publication)):
        widening.require_identities(conn, settings, publication, table)
    if publication is None:
        via_root = partition_by is not None if table is None else table.partitioned
        steps.append(_publication(settings, via_root, wide))
    elif table is None:
        if not publication.all_tables and settings.ledger.namespace not in publication.schemas:
            steps.append(_add_table(settings))
    elif publication.names(table) or publication.table(table.oid):
        check_publication(settings, publication, table)
    else:
        steps.append(_add_table(settings))
    if wide and publication is not None and (lacking := widening.missing(publication)):
        steps.append(_widened(settings, lacking))
    if publication is not None and publication.all_tables:
        notes.append(
            f"publication {settings.publication!r} is FOR ALL TABLES: everything that the database writes is sent here"
            " and thrown away; one of its own, for the ledger's table alone, is better"
        )
    if (guard or guarded.asked) and not guarded.whole:
        steps.append(_append_only(settings))
    slot = slot_facts(conn, settings.slot)
    birth, drop = _birth(identity, slot, server, publication is None)
    return Plan(tuple(steps), birth, drop, tuple(notes), None if birth else failover.due(settings, slot, server))


def check_columns(settings: Settings, table: TableFacts) -> None:
    """The mapped columns hold what an event needs, in every row.

    Raises:
        ConfigError: one may be NULL, or the payload is not JSON.
    """
    columns, name = settings.ledger.columns, settings.ledger.qualified
    for mapped in columns.names():
        facts = table.column(mapped)
        assert facts is not None  # check_table came before
        if facts.nullable and mapped != columns.created_at:
            raise ConfigError(
                f"{name}.{quote(mapped)} may be NULL, and an event without it is none",
                hint=f"ALTER TABLE {name} ALTER COLUMN {quote(mapped)} SET NOT NULL;",
            )
        if facts.generated:
            raise ConfigError(
                f"{name}.{quote(mapped)} is a generated column: those are not streamed",
                hint="map a column that is stored in [ledger.columns]",
            )
    payload = table.column(columns.payload)
    assert payload is not None
    if payload.type_oid not in JSON_TYPES:
        raise ConfigError(
            f"{name}.{quote(payload.name)} is {payload.type_name}; a payload is json or jsonb",
            hint="map `payload` to the right column in [ledger.columns], or change the column's type",
        )


def slot_scripts(settings: Settings, plan: Plan, *, from_now: bool) -> list[str]:
    """The birth of the slot as SQL for a DBA, to be run after the steps and outside of a transaction."""
    namespace = quote(settings.namespace)
    slot = literal(settings.slot)
    scripts = []
    if plan.drop:
        scripts.append(f"SELECT pg_catalog.pg_drop_replication_slot({slot});")
    scripts.append(
        f"UPDATE {namespace}.identity SET slot_state = 'creating'"
        + (f", floor_seq = {floor_query(settings)}" if from_now else "")
        + ";"
    )
    scripts += [
        "SET lock_timeout = '30s';",
        "SELECT pg_catalog.pg_create_logical_replication_slot(slot, 'pgoutput')\n"
        f"  FROM {namespace}.identity WHERE slot_state = 'creating';",
        "RESET lock_timeout;",
        f"UPDATE {namespace}.identity AS i SET slot_state = 'ready'\n"
        "  FROM pg_catalog.pg_replication_slots AS s WHERE s.slot_name = i.slot AND s.plugin = 'pgoutput'\n"
        "   AND s.database = pg_catalog.current_database();",
    ]
    return scripts


def floor_query(settings: Settings) -> str:
    """The highest seq of the ledger at this moment, as a scalar subquery; 0 in an empty table."""
    ledger = settings.ledger
    return f"(SELECT coalesce(max({quote(ledger.columns.seq)}), 0) FROM {ledger.qualified})"


def _schema(settings: Settings, version: int) -> list[Step]:
    scripts = schema.statements(settings, version)
    if not scripts:
        return []
    target = schema.migrations()[-1].version
    what = f"schema {quote(settings.namespace)} of walstream's own tables, version {target}"
    return [Step(what if version == 0 else f"{what} (from {version})", tuple(scripts))]


def _functions(conn: Connection, settings: Settings) -> list[Step]:
    """The functions that workers call, where they do not fit (a migration that is due makes them anyway)."""
    with conn.cursor() as cur:
        stale = functions.due(cur, settings)
    if not stale:
        return []
    return [Step(f"functions {', '.join(stale)}", (schema.functions_sql(settings).strip(),))]


def _table(settings: Settings, partition_by: PartitionBy | None, today: date) -> Step:
    ledger = settings.ledger
    if partition_by is None:
        scripts = [schema.ledger_sql(ledger).strip()]
    else:
        scripts = partitions.table_statements(ledger, partition_by, today)
    if ledger.namespace != "public":
        scripts.insert(0, f"CREATE SCHEMA IF NOT EXISTS {quote(ledger.namespace)};")
    how = "" if partition_by is None else f", partitioned by {partition_by}"
    return Step(f"table {ledger.qualified}{how}", tuple(scripts))


def _check_partitioning(settings: Settings, wanted: PartitionBy, layout: Layout | None) -> None:
    """A table that is there is never converted.

    Raises:
        ConfigError: it is not partitioned in the way that is asked for.
    """
    if layout is None:
        found = "is not partitioned"
    elif wanted.matches(layout, settings.ledger):
        return
    else:
        key = ", ".join(column or "an expression" for column in layout.key)
        found = f"is partitioned by {layout.strategy} ({key}) into {len(layout.partitions)}"
    raise ConfigError(
        f"{settings.ledger.qualified} is there already and {found}; --partition-by {wanted} is for a table that"
        " `walstream init` makes",
        hint="leave --partition-by out to keep the table as it is; docs/ledger.md (Partitions) says how a table is"
        " converted",
    )


def _identity(settings: Settings) -> Step:
    return Step(f"identity of the ledger, environment {settings.environment!r}", (identity_sql(settings),))


def _append_only(settings: Settings) -> Step:
    return Step(f"{settings.ledger.qualified} append-only", (append_only.statement(settings),))


def _publication(settings: Settings, partitioned: bool, wide: bool) -> Step:
    from walstream.source.publications import DEFAULT_OPERATIONS, OPERATIONS, create_statement

    operations = OPERATIONS if wide else DEFAULT_OPERATIONS
    script = create_statement(settings.publication, settings.ledger, operations=operations, via_root=partitioned)
    what = f"publication {quote(settings.publication)} for {settings.ledger.qualified}"
    return Step(what + (_WHY_WIDE if wide else ""), (f"{script};",))


def _widened(settings: Settings, lacking: tuple[str, ...]) -> Step:
    from walstream.source.publications import OPERATIONS, alter_statement

    script = alter_statement(settings.publication, operations=OPERATIONS)
    words = " and ".join(filter(None, (", ".join(lacking[:-1]), lacking[-1])))
    return Step(f"publication {quote(settings.publication)} publishes {words} as well{_WHY_WIDE}", (f"{script};",))


def _add_table(settings: Settings) -> Step:
    from walstream.source.publications import add_table_statement

    script = add_table_statement(settings.publication, settings.ledger)
    return Step(f"{settings.ledger.qualified} into publication {quote(settings.publication)}", (f"{script};",))


def _check_identity(identity: Identity, settings: Settings, server: ServerFacts) -> None:
    require_same_stream(identity, settings)
    changes = history_changes(identity, Cluster(server.system_identifier, server.timeline))
    if identity.environment != settings.environment:
        changes.append(f"environment {identity.environment!r} was recorded, {settings.environment!r} is configured")
    if changes:
        raise ConfigError(
            f"this ledger was set up in another place or history: {'; '.join(changes)}",
            hint="if that is known and wanted, accept it with `walstream adopt` first, then run `walstream init` again",
        )


def _refuse_late_floor(conn: Connection, settings: Settings, identity: Identity) -> None:
    with conn.cursor() as cur:
        cur.execute(f"SELECT EXISTS (SELECT 1 FROM {quote(settings.namespace)}.commit_order)")
        row = cur.fetchone()
    if identity.slot_state == "ready" or (row is not None and row[0]):
        raise ConfigError(
            "--from now only works at the first set-up, and this stream has been set up without it",
            hint="rows of the ledger are events already; a projector can begin at the end with start = 'latest'",
        )


def _birth(
    identity: Identity | None, slot: SlotFacts | None, server: ServerFacts, new_publication: bool
) -> tuple[str, bool]:
    """Why the slot has to be made, and whether one of ours has to be dropped before."""
    if identity is None:
        if slot is not None:
            raise SlotError(
                f"there is a slot {slot.name} already (database {slot.database or 'none'}, plugin"
                f" {slot.plugin or 'none'}), and it is not of this stream",
                hint="choose another --slot; or, if nobody needs it,"
                f" SELECT pg_drop_replication_slot({literal(slot.name)})",
            )
        return "new", False
    if slot is None:
        return ("it is missing" if identity.slot_state == "ready" else "its birth was interrupted"), False
    _check_ours(slot, server)
    if identity.slot_state != "ready":
        return f"its birth was interrupted (state {identity.slot_state})", True
    if slot.lost:
        return f"it is lost ({slot.invalidation_reason or slot.wal_status})", True
    if slot.confirmed_flush_lsn > server.wal_end:
        return "its position is ahead of the server's WAL", True
    if new_publication:
        return "the publication is younger than it would be", True
    return "", False


def _check_ours(slot: SlotFacts, server: ServerFacts) -> None:
    if slot.slot_type != "logical" or slot.plugin != "pgoutput" or slot.database != server.database:
        raise SlotError(
            f"slot {slot.name} is not the one of this stream any more: type {slot.slot_type}, plugin"
            f" {slot.plugin or 'none'}, database {slot.database or 'none'}",
            hint=f"if nobody needs it: SELECT pg_drop_replication_slot({literal(slot.name)}); then `walstream init`",
        )
    if slot.two_phase or slot.temporary:
        raise SlotError(
            f"slot {slot.name} was made {'with two_phase' if slot.two_phase else 'TEMPORARY'}; walstream makes no such",
            hint=f"if nobody needs it: SELECT pg_drop_replication_slot({literal(slot.name)}); then `walstream init`",
        )
