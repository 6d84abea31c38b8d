"""Who this ledger is: one row, written at set-up, checked at every start.

A position (an LSN, an offset, a key that was sent somewhere) is only good for the history it was taken in. The row says
which one that is: the *cluster* (system identifier), its *timeline* (a fail-over or a restore begins a new one), the
*environment* (a copy of production must not pass for it), and the *epoch* (part of every event's key; it rises when
commits were lost, because a seq may then be given a second time).

Sources: system identifier and timeline are those of IDENTIFY_SYSTEM (documentation, 55.4); over SQL they come from
``pg_control_system()`` and from the first eight digits of a WAL file's name, which on a primary is the timeline it
writes (``pg_control_checkpoint()`` lags behind a promotion until the next checkpoint).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from walstream.config import Settings, quote
from walstream.errors import ConfigError, SlotError

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection
    from psycopg2.extensions import cursor as Cursor

SlotState = Literal["creating", "filling", "ready"]

_COLUMNS: Final = (
    "ledger_id::text, environment, epoch, system_identifier, timeline, table_namespace, table_name, table_oid, "
    "publication, slot, slot_state, floor_seq"
)


@dataclass(frozen=True)
class Identity:
    """The row. Attributes are its columns; ``floor_seq`` is ``None`` unless ``init --from now`` set it."""

    ledger_id: str
    environment: str
    epoch: int
    system_identifier: str
    timeline: int
    table_namespace: str
    table_name: str
    table_oid: int
    publication: str
    slot: str
    slot_state: SlotState
    floor_seq: int | None

    @property
    def key_prefix(self) -> str:
        """``ledger:epoch``, the first two parts of every event's key."""
        return f"{self.ledger_id}:{self.epoch}"


@dataclass(frozen=True)
class Cluster:
    """Which history a server is in."""

    system_identifier: str
    timeline: int


def cluster_of(cur: Cursor) -> Cluster:
    """The history of the server behind ``cur``, which has to be a primary.

    Raises:
        ConfigError: it is a standby: nothing of ours can be written there.
    """
    cur.execute("SELECT pg_catalog.pg_is_in_recovery()")
    if _one(cur)[0]:
        raise ConfigError(
            "this server is a standby (it is in recovery), and the order of events is written to the primary",
            hint="point the DSN at the primary; with several hosts in it, add target_session_attrs=read-write",
        )
    cur.execute(
        "SELECT (SELECT system_identifier::text FROM pg_catalog.pg_control_system()),"
        " pg_catalog.left(pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_lsn()), 8)"
    )
    system_identifier, timeline = _one(cur)
    return Cluster(system_identifier, int(timeline, 16))


def read_identity(cur: Cursor, namespace: str) -> Identity | None:
    """The identity that stands in the database, or ``None`` before ``walstream init`` wrote one."""
    cur.execute(f"SELECT {_COLUMNS} FROM {quote(namespace)}.identity")
    row = cur.fetchone()
    return None if row is None else Identity(*row)


def identity_sql(settings: Settings) -> str:
    """The statement that writes the identity of a ledger that has none; the server fills in who it is itself."""
    ledger = settings.ledger
    return (
        f"INSERT INTO {quote(settings.namespace)}.identity\n"
        "    (environment, system_identifier, timeline, table_namespace, table_name, table_oid, publication, slot)\n"
        f"SELECT {literal(settings.environment)},\n"
        "       (SELECT system_identifier::text FROM pg_catalog.pg_control_system()),\n"
        "       ('x' || pg_catalog.left(pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_lsn()), 8))\n"
        "           ::bit(32)::int,\n"
        f"       {literal(ledger.namespace)}, {literal(ledger.table)},\n"
        f"       {literal(ledger.qualified)}::pg_catalog.regclass::oid,\n"
        f"       {literal(settings.publication)}, {literal(settings.slot)}\n"
        "ON CONFLICT DO NOTHING;"
    )


def check_identity(conn: Connection, settings: Settings, *, unfinished: bool = False) -> Identity:
    """Check that this database is the one that the configuration means, in the history that was recorded.

    Args:
        unfinished: accept a slot whose birth was cut short (not one that was never begun: only a person knows from
            which row on there are events). Who accepts it goes on with it, or does without a slot.

    Raises:
        ConfigError: nothing is set up, set-up was not completed, or the configuration names another environment, table,
            slot or publication.
        SlotError: the server is another cluster or on another timeline: positions of the old one are worth nothing. Or
            the slot is another database's: this one is a copy within the cluster.
    """
    with conn.cursor() as cur:
        identity = read_identity(cur, settings.namespace)
        if identity is None or not (identity.slot_state == "ready" or (unfinished and _begun(cur, settings))):
            state = "has not been set up" if identity is None else f"is half set up (state {identity.slot_state!r})"
            raise ConfigError(
                f"the stream in schema {settings.namespace!r} {state}",
                hint="run `walstream init`; it begins again where that is needed and is safe to repeat",
            )
        require_same_stream(identity, settings)
        if identity.environment != settings.environment:
            raise ConfigError(
                f"this ledger belongs to the environment {identity.environment!r}, and this configuration is for"
                f" {settings.environment!r}",
                hint="if the database is a copy that is to live on its own, accept it with"
                f" `walstream adopt --environment {settings.environment}`;"
                " otherwise the DSN or the environment is wrong",
            )
        cluster = cluster_of(cur)
        _refuse_copy_within_cluster(cur, identity)
    if differences := history_changes(identity, cluster):
        raise SlotError(
            f"the positions of this ledger are from another history: {'; '.join(differences)}",
            hint="if that is known and wanted (fail-over, restore, migration, copy), accept it with `walstream adopt`",
        )
    return identity


def _begun(cur: Cursor, settings: Settings) -> bool:
    """Whether somebody has begun to make the slot: the lease was taken for it, and the floor set with that."""
    cur.execute(f"SELECT generation > 0 FROM {quote(settings.namespace)}.ingest")
    return bool(_one(cur)[0])


def _refuse_copy_within_cluster(cur: Cursor, identity: Identity) -> None:
    """``CREATE DATABASE … TEMPLATE`` copies the identity with everything in it; the slot stays the original's. To be
    found before any projector of the copy acts on the world a second time."""
    cur.execute(
        "SELECT database, pg_catalog.current_database() FROM pg_catalog.pg_replication_slots"
        " WHERE slot_name = %s AND database <> pg_catalog.current_database()",
        (identity.slot,),
    )
    row = cur.fetchone()
    if row is not None:
        raise SlotError(
            f"slot {identity.slot} belongs to database {row[0]}, so {row[1]} is a copy of it within the same cluster,"
            " and its events are the original's",
            hint="to let the copy live on its own: drop schema and publication of walstream in it, then `walstream"
            ' init` with another slot and environment (docs/operations.md, "Backup, restore, fail-over, copies")',
        )


def require_same_stream(identity: Identity, settings: Settings) -> None:
    """Check that the configuration means the stream that stands in this schema.

    Raises:
        ConfigError: it names another table, slot or publication.
    """
    ledger = settings.ledger
    pairs = (
        ("table", f"{identity.table_namespace}.{identity.table_name}", f"{ledger.namespace}.{ledger.table}"),
        ("slot", identity.slot, settings.slot),
        ("publication", identity.publication, settings.publication),
    )
    for what, recorded, configured in pairs:
        if recorded != configured:
            raise ConfigError(
                f"the stream in schema {settings.namespace!r} was set up with the {what} {recorded!r},"
                f" and this configuration names {configured!r}",
                hint="every stream has a schema of its own: set another --namespace for a second one,"
                f" or correct the {what}",
            )


def history_changes(identity: Identity, cluster: Cluster) -> list[str]:
    """What differs between the recorded history and the one the server is in, in words; empty if nothing does."""
    changes = []
    if identity.system_identifier != cluster.system_identifier:
        changes.append(
            f"system identifier {identity.system_identifier} was recorded,"
            f" and this cluster is {cluster.system_identifier}"
        )
    if identity.timeline != cluster.timeline:
        changes.append(f"timeline {identity.timeline} was recorded and this server writes timeline {cluster.timeline}")
    return changes


def literal(text: str) -> str:
    """Quote a string for SQL that is printed. Works whatever ``standard_conforming_strings`` says (4.1.2.2).

    Raises:
        ConfigError: it holds a NUL character.
    """
    if "\0" in text:
        raise ConfigError(f"{text!r} cannot be a text in SQL")
    quoted = text.replace("'", "''")
    return "E'" + quoted.replace("\\", "\\\\") + "'" if "\\" in text else f"'{quoted}'"


def _one(cur: Cursor) -> tuple[Any, ...]:
    row = cur.fetchone()
    assert row is not None
    return row
