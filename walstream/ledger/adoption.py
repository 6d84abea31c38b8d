"""Accept, knowingly, that a ledger lives on in another history: after a fail-over, a restore, a migration, as a copy.

What is accepted is written into the identity. Whoever still works under the old one is fenced off (the generation
rises), and positions that mean nothing in the new history are cleared. Events keep their offsets and projectors their
cursors: both are rows of this very database, so they went through the change together with the ledger.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from walstream.config import Settings, quote
from walstream.errors import ConfigError
from walstream.lsn import format_lsn, parse_lsn

from . import functions, schema
from .identity import Identity, cluster_of, read_identity

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection
    from psycopg2.extensions import cursor as Cursor


@dataclass(frozen=True)
class Change:
    """One thing that differs from what was recorded.

    Attributes:
        what: ``environment``, ``system_identifier``, ``timeline``, ``table``, ``table_oid``, ``epoch``, ``position``,
            ``functions``.
        recorded: the value that stands in the identity.
        found: the value that takes its place.
    """

    what: str
    recorded: str
    found: str

    @property
    def of_history(self) -> bool:
        """Whether commits may have been lost on the way, so that the epoch has to be decided on."""
        return self.what in {"system_identifier", "timeline"}


@dataclass(frozen=True)
class Adoption:
    """What an adoption would change, or has changed."""

    changes: tuple[Change, ...]
    before: Identity

    @property
    def needs_epoch(self) -> bool:
        return any(change.of_history for change in self.changes)

    def document(self) -> dict[str, Any]:
        """For ``--json``."""
        return {"ledger_id": self.before.ledger_id, "changes": [asdict(change) for change in self.changes]}


def look(cur: Cursor, settings: Settings, *, new_epoch: bool) -> Adoption:
    """What adoption under ``settings`` would change. Changes nothing.

    Raises:
        ConfigError: nothing is set up, the server is a standby, the table is gone, or the configuration names another
            slot or publication than the stream has.
    """
    identity = read_identity(cur, settings.namespace)
    if identity is None:
        raise ConfigError(
            f"the stream in schema {settings.namespace!r} has not been set up", hint="run `walstream init`"
        )
    for what, recorded, configured in (
        ("slot", identity.slot, settings.slot),
        ("publication", identity.publication, settings.publication),
    ):
        if recorded != configured:
            raise ConfigError(
                f"the stream was set up with the {what} {recorded!r}, and this configuration names {configured!r}",
                hint=f"correct the {what}; adoption is about the server's history, the environment and the table",
            )
    ledger = settings.ledger
    cur.execute("SELECT pg_catalog.to_regclass(%s)::pg_catalog.oid::bigint", (ledger.qualified,))
    (table_oid,) = _one(cur)
    if table_oid is None:
        raise ConfigError(
            f"there is no table {ledger.qualified} in this database",
            hint="correct `ledger` in the configuration (or --table); `walstream doctor` says what became of the table",
        )
    cluster = cluster_of(cur)
    pairs = (
        ("environment", identity.environment, settings.environment),
        ("system_identifier", identity.system_identifier, cluster.system_identifier),
        ("timeline", identity.timeline, cluster.timeline),
        ("table", f"{identity.table_namespace}.{identity.table_name}", f"{ledger.namespace}.{ledger.table}"),
        ("table_oid", identity.table_oid, table_oid),
        ("epoch", identity.epoch, identity.epoch + new_epoch),
    )
    changes = [Change(what, str(recorded), str(found)) for what, recorded, found in pairs if recorded != found]
    if (ahead := _position_ahead(cur, settings.namespace)) is not None:
        changes.append(Change("position", format_lsn(ahead), format_lsn(0)))
    if stale := _stale_functions(cur, settings):
        changes.append(Change("functions", ", ".join(stale), f"made anew for {ledger.qualified}"))
    return Adoption(tuple(changes), identity)


def adopt(conn: Connection, settings: Settings, *, new_epoch: bool) -> Adoption:
    """Write the new identity, in one transaction; return what was changed.

    Args:
        new_epoch: raise the epoch. Right whenever commits were lost (a restore to an earlier point, a fail-over to a
            standby that was behind): a seq may then be given to another event, which must not have the old key.

    Raises:
        ConfigError: as :func:`look`, or a consumer holds the ledger at this moment.
    """
    autocommit, conn.autocommit = conn.autocommit, False
    namespace = quote(settings.namespace)
    try:
        with conn, conn.cursor() as cur:
            cur.execute(f"SELECT 1 FROM {namespace}.identity FOR UPDATE")
            if holder := live_holder(cur, settings.namespace):
                raise ConfigError(
                    f"a consumer works on this ledger at this moment: {holder}",
                    hint="stop it first; what it would go on writing belongs to the old identity",
                )
            adoption = look(cur, settings, new_epoch=new_epoch)
            cluster = cluster_of(cur)
            cur.execute(
                f"UPDATE {namespace}.identity SET environment = %s, system_identifier = %s, timeline = %s,"
                " table_namespace = %s, table_name = %s, table_oid = pg_catalog.to_regclass(%s)::pg_catalog.oid,"
                " epoch = epoch + %s",
                (
                    settings.environment,
                    cluster.system_identifier,
                    cluster.timeline,
                    settings.ledger.namespace,
                    settings.ledger.table,
                    settings.ledger.qualified,
                    int(new_epoch),
                ),
            )
            if adoption.changes:
                # Both rows, as at a take-over: the next lease continues from ingest's.
                cur.execute(f"UPDATE {namespace}.ingest SET generation = generation + 1 RETURNING generation")
                cur.execute(f"UPDATE {namespace}.generation SET generation = %s", _one(cur))
            if adoption.needs_epoch or _moved(adoption):
                cur.execute(f"UPDATE {namespace}.ingest SET confirmed_lsn = NULL")
            if _moved(adoption):
                # A position of a longer WAL would make ingest take every transaction of this one for a repetition.
                cur.execute(
                    f"UPDATE {namespace}.commit_order SET last_lsn = '0/0', partial_inserts = NULL"
                    " WHERE last_lsn > pg_catalog.pg_current_wal_insert_lsn()"
                )
            if any(change.what == "functions" for change in adoption.changes):
                cur.execute(schema.functions_sql(settings, schema.installed_version(cur, settings.namespace)))
            return adoption
    finally:
        conn.autocommit = autocommit


def live_holder(cur: Cursor, namespace: str) -> str | None:
    """Who holds the lease of the ledger's ingest at this moment and is alive; ``None`` if nobody does."""
    cur.execute(
        f"""
        SELECT i.owner FROM {quote(namespace)}.ingest AS i
          JOIN pg_catalog.pg_stat_activity AS a
            ON a.pid = i.control_pid AND (a.backend_start IS NULL OR a.backend_start = i.control_start)
         WHERE i.owner IS NOT NULL AND i.lease_until > pg_catalog.clock_timestamp()"""
    )
    row = cur.fetchone()
    return None if row is None else str(row[0])


def _stale_functions(cur: Cursor, settings: Settings) -> list[str]:
    """Those that hold other names than the configured ones. What a newer release made is left to that release."""
    version = schema.installed_version(cur, settings.namespace)
    known = schema.LEDGER_VERSION <= version <= schema.migrations()[-1].version
    return functions.stale(cur, settings) if known else []


def _position_ahead(cur: Cursor, namespace: str) -> int | None:
    """The furthest position of order and ingest, if it lies ahead of this server's WAL: it is another server's then."""
    cur.execute(
        f"SELECT max(position)::text FROM (SELECT last_lsn AS position FROM {quote(namespace)}.commit_order"
        f" UNION ALL SELECT confirmed_lsn FROM {quote(namespace)}.ingest) AS known"
        " WHERE position > pg_catalog.pg_current_wal_insert_lsn()"
    )
    (text,) = _one(cur)
    return None if text is None else parse_lsn(text)


def _moved(adoption: Adoption) -> bool:
    return any(change.what == "position" for change in adoption.changes)


def _one(cur: Cursor) -> tuple[Any, ...]:
    row = cur.fetchone()
    assert row is not None
    return row
