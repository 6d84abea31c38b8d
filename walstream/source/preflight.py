"""What must be true before a stream is read, or events would be lost, or the stream would stand still and look healthy.

Every finding is an error of its own with the statement that fixes it; the order of the checks is the order in which a
person would repair things. `walstream doctor` says more (what is merely unwise); this says what `run` refuses.
"""

from __future__ import annotations

from typing import Any, Final

import psycopg2
from psycopg2.extensions import connection as Connection

from walstream.config import Settings, quote
from walstream.errors import ConfigError, LedgerError, PublicationGone, SlotError, SlotGone, Unavailable
from walstream.lsn import format_lsn, parse_lsn
from walstream.source.connection import replication_connect
from walstream.source.facts import (
    UNBOUNDED,
    Facts,
    RoleFacts,
    ServerFacts,
    SlotFacts,
    role_facts,
    server_facts,
    slot_facts,
)
from walstream.source.failures import classify
from walstream.source.publications import (
    DEFAULT_OPERATIONS,
    OPERATIONS,
    SINK,
    add_table_statement,
    alter_statement,
    create_statement,
    set_table_statement,
)
from walstream.source.slots import PLUGIN
from walstream.source.table_facts import (
    INTEGER_TYPES,
    PublicationFacts,
    TableFacts,
    publication_facts,
    table_facts,
    table_name,
)

OLDEST_MAJOR: Final = 14
"""The first version whose pgoutput has the option ``messages``, which the canary needs."""

_KINDS: Final = {"v": "a view", "m": "a materialized view", "f": "a foreign table"}
_INIT: Final = "run `walstream init`"


def preflight(settings: Settings, connection: Connection) -> Facts:
    """Check everything that ``run`` needs, and return what was found.

    Args:
        connection: an SQL connection to the ledger's database, in autocommit. A replication connection is opened as
            well, and closed again: it proves the privilege, the path, and that both lead to the same server.

    Raises:
        SlotGone: the slot is to be made anew; everything that comes before it in this list is well.
        ConfigError, SlotError, LedgerError: what a person has to change, with the statement.
        Unavailable: the server (or a free walsender) is away, or this is a standby.
    """
    try:
        server = server_facts(connection)
        check_server(server)
        role = role_facts(connection)
        found = table_facts(connection, settings.ledger)
        if found is None:
            raise table_gone(settings, connection, _ours(settings, connection, "identity", "table_oid::bigint"))
        table = check_table(settings, found, role)
        _check_same_table(settings, table, connection)
        publication = check_publication(settings, publication_facts(connection, settings.publication), table)
        known = _known_position(settings, connection)
        check_position(settings, known, server)
        check_bound(settings, server)  # before the slot: a new one in the place of a lost one needs a bound as well
        slot = check_slot(settings, slot_facts(connection, settings.slot), server)
    except psycopg2.Error as error:
        raise classify(error, doing="looking at the server before streaming") from error
    check_replication_path(settings, server)
    return Facts(server, role, slot, publication, table, slot_moved=slot.confirmed_flush_lsn > known)


def check_server(server: ServerFacts) -> None:
    """The server can decode, and will not wait for us to let its own clients commit."""
    if server.major < OLDEST_MAJOR:
        raise ConfigError(
            f"this is PostgreSQL {server.version_text}; walstream needs {OLDEST_MAJOR} or newer",
            hint="upgrade the server",
        )
    if server.in_recovery:
        raise Unavailable(
            "this server is a standby (in recovery): the order of events is written to the primary",
            hint="connect to the primary; with several hosts in the DSN, add target_session_attrs=read-write",
        )
    level = server.settings.get("wal_level", "")
    if level != "logical":
        raise ConfigError(
            f"wal_level is {level!r}; logical decoding needs 'logical'",
            hint="ALTER SYSTEM SET wal_level = 'logical', and restart the server (on managed Postgres by parameter: "
            "rds.logical_replication = 1, cloudsql.logical_decoding = on, on Azure wal_level itself)",
        )
    if server.any_standby_is_synchronous:
        names = server.settings["synchronous_standby_names"]
        raise ConfigError(
            f"synchronous_standby_names is {names!r}: with `*` the walsender of walstream counts as a synchronous "
            "standby, so every commit of the application would wait for walstream, and walstream for itself",
            hint="name the standbys: ALTER SYSTEM SET synchronous_standby_names = 'FIRST 1 (standby1, standby2)'; "
            "SELECT pg_reload_conf()",
        )


def check_table(settings: Settings, table: TableFacts | None, role: RoleFacts) -> TableFacts:
    """The ledger is a table whose every row is in the WAL, can be read by this role, and can be found by ``seq``."""
    ledger = settings.ledger
    name = ledger.qualified
    if table is None:
        raise ConfigError(f"there is no table {name}", hint=f"{_INIT}, or correct [ledger] in the configuration")
    if table.kind not in ("r", "p"):
        raise ConfigError(
            f"{name} is {_KINDS.get(table.kind, 'not a table')}; a ledger is a table",
            hint="name the table itself in [ledger]",
        )
    fleeting = [leaf for _, leaf, persistence in table.leaves if persistence != "p"]
    if table.persistence != "p" or fleeting:
        which = ", ".join(fleeting) or name
        raise ConfigError(
            f"{which} is unlogged or temporary: its rows are not in the WAL, so they can never be streamed",
            hint=f"ALTER TABLE {which} SET LOGGED",
        )
    if table.root_oid != table.oid:
        raise ConfigError(
            f"{name} is a partition of another table",
            hint="name the partitioned table itself in [ledger]; its partitions come with it",
        )
    missing = [column for column in ledger.columns.names() if table.column(column) is None]
    if missing:
        have = ", ".join(column.name for column in table.columns)
        raise ConfigError(
            f"{name} has no column {', '.join(map(repr, missing))}; it has {have}",
            hint="say what the columns are called in [ledger.columns]",
        )
    seq = table.column(ledger.columns.seq)
    assert seq is not None
    if seq.type_oid not in INTEGER_TYPES or seq.nullable:
        raise ConfigError(
            f"{name}.{quote(seq.name)} is {seq.type_name}{' and may be NULL' if seq.nullable else ''}; the ledger's "
            "number is an integer that is never NULL",
            hint="map `seq` to the right column in [ledger.columns]",
        )
    if not table.keyed_by(seq.name):
        raise ConfigError(
            f"{name} has no unique key on {quote(seq.name)}: rows could neither be told apart nor found again",
            hint=f"CREATE UNIQUE INDEX CONCURRENTLY ON {name} ({quote(seq.name)})"
            if not table.partitioned
            else f"ALTER TABLE {name} ADD UNIQUE ({quote(seq.name)}, <the partition key>)",
        )
    if not table.readable:
        raise ConfigError(
            f"{role.name} may not read {name}",
            hint=f"GRANT USAGE ON SCHEMA {quote(ledger.namespace)} TO {quote(role.name)}; "
            f"GRANT SELECT ON {name} TO {quote(role.name)}",
        )
    if table.row_security_applies:
        raise ConfigError(
            f"row security of {name} applies to {role.name}: the stream would bring rows that this role cannot read",
            hint=f"ALTER ROLE {quote(role.name)} BYPASSRLS, or run as the table's owner ({table.owner})",
        )
    return table


def check_publication(settings: Settings, publication: PublicationFacts | None, table: TableFacts) -> PublicationFacts:
    """Every insert into the ledger is sent, whole."""
    ledger, name = settings.ledger, settings.publication
    if publication is None:
        raise PublicationGone(
            f"there is no publication {quote(name)} in this database",
            statement=create_statement(
                name, ledger, operations=_operations(settings, table), via_root=table.partitioned
            ),
            hint=f"{_INIT}; a publication has to be older than the slot, so `init` also renews the slot",
        )
    if "insert" not in publication.operations:
        widened = ("insert", *publication.operations)
        raise ConfigError(
            f"publication {quote(name)} does not publish inserts", hint=alter_statement(name, operations=widened)
        )
    if table.partitioned and not publication.via_root:
        # Leaves may come under their own names, but only if new ones will come too: the root itself must be published.
        if not publication.names(table):
            raise ConfigError(
                f"publication {quote(name)} does not hold the partitioned table {ledger.qualified} itself, so a new "
                "partition would never be streamed",
                hint=f"{add_table_statement(name, ledger)}; {_via_root(name)}",
            )
        wanted = [oid for oid, _, _ in table.leaves]
    else:
        wanted = [table.oid]
    for oid in wanted:
        sent = publication.table(oid)
        if sent is None:
            raise PublicationGone(
                f"publication {quote(name)} does not hold {ledger.qualified} (OID {oid}): nothing written to it is "
                "streamed. If the table was swapped or recreated, the publication still follows the old one",
                statement=add_table_statement(name, ledger),
                hint=f"{add_table_statement(name, ledger)}; rows written meanwhile are found by the reconciler",
            )
        if sent.row_filter:
            raise ConfigError(
                f"publication {quote(name)} sends only rows of {sent.namespace}.{sent.name} with {sent.row_filter}",
                hint=f"{set_table_statement(name, ledger)} (takes the filter away, and other tables too)",
            )
        if sent.columns is not None:
            made_up = [c.name for c in table.columns if c.generated and c.name in sent.columns]
            if made_up:
                raise ConfigError(
                    f"publication {quote(name)} sends generated columns of {sent.namespace}.{sent.name}: "
                    f"{', '.join(made_up)}; an event would differ between the stream and the table",
                    hint=f"ALTER PUBLICATION {quote(name)} SET (publish_generated_columns = none)",
                )
            left_out = [c.name for c in table.columns if not c.generated and c.name not in sent.columns]
            if left_out:
                raise ConfigError(
                    f"publication {quote(name)} leaves out columns of {sent.namespace}.{sent.name}: "
                    f"{', '.join(left_out)}; an event would differ between the stream and the table",
                    hint=f"{set_table_statement(name, ledger)} (takes the list away, and other tables too)",
                )
    return publication


def check_slot(settings: Settings, slot: SlotFacts | None, server: ServerFacts) -> SlotFacts:
    """The slot is ours to read, and can be read.

    Raises:
        SlotGone: there is none, or one of ours that can never be read again.
        SlotError: it is not ours.
    """
    name = settings.slot
    if slot is None:
        raise SlotGone(
            f"there is no slot {name} on this server",
            hint=f"{_INIT}: it makes a new one, and the reconciler takes the events in between from the ledger",
        )
    if slot.slot_type != "logical" or slot.plugin != PLUGIN:
        kind = f"made with {slot.plugin}" if slot.plugin else "a physical slot"
        raise SlotError(f"slot {name} is {kind}; walstream reads {PLUGIN}", hint=f"name another slot, or {_drop(name)}")
    if slot.database != server.database:
        raise SlotError(
            f"slot {name} belongs to database {slot.database}, not to {server.database}",
            hint="slot names are unique in the whole cluster: choose another name, or connect to its database",
        )
    if slot.temporary:
        raise SlotError(
            f"slot {name} is temporary: it belongs to a session that runs now ({slot.holder or 'unknown'})",
            hint="name another slot",
        )
    if slot.two_phase:
        raise SlotError(
            f"slot {name} was made with two_phase: it sends transactions at PREPARE, before it is known whether they "
            "commit",
            hint=f"{_drop(name)}, then {_INIT}",
        )
    if slot.lost:
        why = slot.invalidation_reason or slot.wal_status
        raise SlotGone(
            f"slot {name} is lost ({why}): the server removed WAL that it needs; confirmed up to "
            f"{format_lsn(slot.confirmed_flush_lsn)}",
            hint=f"{_drop(name)}, then {_INIT}; the reconciler takes what was missed from the ledger. Raise "
            "max_slot_wal_keep_size if the consumer was merely away",
        )
    if slot.confirmed_flush_lsn > server.wal_end:
        raise SlotGone(
            f"slot {name} was confirmed up to {format_lsn(slot.confirmed_flush_lsn)}, beyond the server's WAL "
            f"({format_lsn(server.wal_end)}): it would send nothing until the WAL has grown past that, and skip it",
            hint=f"{_drop(name)}, then {_INIT}; the reconciler takes what was missed from the ledger",
        )
    return slot


def check_bound(settings: Settings, server: ServerFacts) -> None:
    """A slot cannot fill the disk, or somebody has said that it may."""
    if server.slot_keep_bytes == UNBOUNDED and not settings.allow_unbounded_slot:
        raise ConfigError(
            "max_slot_wal_keep_size is -1: if this consumer stays away, its slot keeps WAL until the disk is full",
            hint="ALTER SYSTEM SET max_slot_wal_keep_size = '50GB'; SELECT pg_reload_conf() (choose what the disk can "
            "spare; a lost slot loses no event), or `walstream init --slot-wal-keep 50GB`; on managed Postgres it is a "
            "parameter of the provider's, which `walstream doctor` names. Or set allow_unbounded_slot = true",
        )


def check_position(settings: Settings, position: int, server: ServerFacts) -> None:
    """What was written down as read exists on this server; a position beyond the WAL is accepted in silence."""
    if position > server.wal_end:
        raise SlotError(
            f"slot {settings.slot} was read up to {format_lsn(position)}, but this server's WAL ends at "
            f"{format_lsn(server.wal_end)} (system {server.system_identifier}, timeline {server.timeline}): the "
            "position is from another history",
            hint="the server was restored, replaced or failed over with a loss: if that was on purpose, "
            "`walstream adopt` accepts it",
        )


def check_replication_path(settings: Settings, server: ServerFacts) -> None:
    """The replication connection can be made, and leads to the same server and database as the SQL one."""
    made = replication_connect(
        settings.replication_dsn or settings.require_dsn(),
        application_name="walstream:preflight",
        connect_timeout=settings.connect_timeout,
    )
    try:
        with made.cursor() as cursor:
            cursor.execute("IDENTIFY_SYSTEM")
            row: Any = cursor.fetchone()
    except psycopg2.Error as error:
        raise classify(error, doing="trying the replication connection") from error
    finally:
        made.close()
    if row[0] != server.system_identifier or row[3] != server.database:
        raise ConfigError(
            f"replication_dsn leads to database {row[3]} of system {row[0]}, and dsn to database {server.database} of "
            f"system {server.system_identifier}: the stream would bring another ledger's rows",
            hint="both must name the same server and database",
        )


def table_gone(settings: Settings, connection: Connection, oid: int | None) -> ConfigError:
    """What to say where nothing has the ledger's name: it was never made, was renamed, or was dropped.

    Args:
        oid: of the table that was set up; ``None`` if none was.
    """
    name = settings.ledger.qualified
    if oid is None:
        return ConfigError(f"there is no table {name}", hint=f"{_INIT}, or correct [ledger] in the configuration")
    present = table_name(connection, oid)
    if present is None:
        return ConfigError(
            f"there is no table {name}, and the one that was set up (OID {oid}) was dropped",
            hint="restore it; or, to begin a new ledger, `walstream teardown` and then `walstream init`",
        )
    return ConfigError(
        f"there is no table {name}: the ledger that was set up is called {present} now",
        hint="rename it back; or, if that is its name now, correct [ledger] in the configuration (or --table"
        f" {present}) and run `walstream adopt`",
    )


def _check_same_table(settings: Settings, table: TableFacts, connection: Connection) -> None:
    remembered = _ours(settings, connection, "identity", "table_oid::bigint")
    if remembered is not None and remembered != table.oid:
        raise LedgerError(
            f"{settings.ledger.qualified} is another table now (OID {table.oid}) than the ledger that was set up (OID "
            f"{remembered}): it was swapped or recreated, and rows of the new one are not in the stream",
            hint="rename it back, or correct [ledger]; if the new table is the ledger now: `walstream adopt`",
        )


def _known_position(settings: Settings, connection: Connection) -> int:
    """The furthest position that walstream itself wrote down as read; 0 if it has none."""
    idle = _ours(settings, connection, "ingest", "confirmed_lsn::text")
    ordered = _ours(
        settings, connection, "commit_order", "last_lsn::text", "WHERE NOT recovered ORDER BY first_offset DESC LIMIT 1"
    )
    return max(parse_lsn(text) if text else 0 for text in (idle, ordered))


def _ours(settings: Settings, connection: Connection, table: str, column: str, rest: str = "") -> Any:
    """One value out of one of walstream's own tables; ``None`` if the table or the row is not there."""
    name = f"{quote(settings.namespace)}.{table}"
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_catalog.to_regclass(%s) IS NOT NULL", (name,))
        there: Any = cursor.fetchone()
        if not there[0]:
            return None
        cursor.execute(f"SELECT {column} FROM {name} {rest}")
        row = cursor.fetchone()
        return row[0] if row else None


def _drop(slot: str) -> str:
    return f"SELECT pg_drop_replication_slot('{slot}')"


def _operations(settings: Settings, table: TableFacts) -> tuple[str, ...]:
    """What a publication that is made again publishes: every change, where the audit sink is configured and the
    application would be refused nothing."""
    keyed = table.replica_identity == "d" and any(index.primary for index in table.indexes)
    wide = SINK in settings.projectors and (keyed or table.replica_identity in ("f", "i"))
    return OPERATIONS if wide else DEFAULT_OPERATIONS


def _via_root(publication: str) -> str:
    return f"ALTER PUBLICATION {quote(publication)} SET (publish_via_partition_root = true)"
