"""What a server says about itself, the role, the slot, the publication and the table: read-only facts, no judgement.

`doctor`, `status`, `init` and the preflight of `run` all judge the same facts. Catalogues that gain columns from one
major version to the next are read as JSON, so one query serves them all and a fact that a server does not know is
simply absent. LSNs are integers here (see :mod:`walstream.lsn`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from psycopg2.extensions import connection as Connection

from walstream.lsn import parse_lsn
from walstream.source.table_facts import PublicationFacts, TableFacts

MiB: Final = 1024 * 1024
UNBOUNDED: Final = -1
"""``max_slot_wal_keep_size``: a slot may keep WAL until the disk is full."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """A server, as seen from one session.

    Attributes:
        version: ``server_version_num``, e.g. 150008.
        version_text: e.g. ``15.8``.
        system_identifier: of the cluster (IDENTIFY_SYSTEM gives the same).
        timeline: the history that is written now.
        in_recovery: it is a standby.
        wal_end: flushed end of the WAL (of what was received, on a standby).
        database, encoding: of the session, and the database's encoding.
        settings: name to value in the parameter's base unit (``pg_settings.setting``), as far as the role may see them.
    """

    version: int
    version_text: str
    system_identifier: str
    timeline: int
    in_recovery: bool
    wal_end: int
    database: str
    encoding: str
    settings: Mapping[str, str]

    @property
    def major(self) -> int:
        return self.version // 10000

    @property
    def slot_keep_bytes(self) -> int:
        """``max_slot_wal_keep_size`` in bytes, or :data:`UNBOUNDED`."""
        megabytes = int(self.settings["max_slot_wal_keep_size"])
        return UNBOUNDED if megabytes < 0 else megabytes * MiB

    @property
    def any_standby_is_synchronous(self) -> bool:
        """``synchronous_standby_names`` holds ``*``, which makes *our* walsender a synchronous standby too."""
        return "*" in self.settings.get("synchronous_standby_names", "")


@dataclass(frozen=True, slots=True)
class RoleFacts:
    """The login of a session.

    Attributes:
        name: ``session_user``.
        superuser, replication, bypass_row_security: role attributes.
        member_of: every role it is a member of, directly or not (``rds_replication``, ``pg_monitor``, …).
    """

    name: str
    superuser: bool
    replication: bool
    bypass_row_security: bool
    member_of: frozenset[str]


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """One backend, as far as the role may see it: enough to tell an operator who it is."""

    pid: int
    application_name: str
    address: str
    started: str
    state: str = ""

    def __str__(self) -> str:
        named = f", {self.application_name}" if self.application_name else ""
        return f"pid {self.pid}{named}, from {self.address}, since {self.started or 'unknown'}"


@dataclass(frozen=True, slots=True)
class SlotFacts:
    """One row of ``pg_replication_slots`` (documentation, 54.19); what a version does not have is at its default.

    Attributes:
        plugin: ``""`` for a physical slot.
        database: ``""`` for a physical slot.
        restart_lsn, confirmed_flush_lsn: 0 where the server has none (a lost slot has no restart_lsn).
        wal_status: ``reserved``, ``extended``, ``unreserved``, ``lost``; ``""`` where unknown.
        safe_wal_size: bytes that may be written before the slot is in danger; ``None`` without a limit, or if lost.
        invalidation_reason: from 17; ``""`` otherwise.
        inactive_since: from 17; ``""`` otherwise.
        holder: the session that reads it now.
        inactive_seconds: since ``inactive_since``; ``None`` while it is read, and before 17.
    """

    name: str
    plugin: str
    slot_type: str
    database: str
    temporary: bool
    active: bool
    restart_lsn: int
    confirmed_flush_lsn: int
    wal_status: str
    safe_wal_size: int | None
    two_phase: bool
    failover: bool
    synced: bool
    conflicting: bool
    invalidation_reason: str
    inactive_since: str
    holder: SessionFacts | None
    inactive_seconds: float | None

    @property
    def lost(self) -> bool:
        """The server gave up what the slot needs: it can never be read again."""
        return self.wal_status == "lost" or self.conflicting or bool(self.invalidation_reason)

    def retained_bytes(self, wal_end: int) -> int | None:
        """WAL that is kept for this slot; ``None`` for a lost one (the worst state, not zero)."""
        return max(0, wal_end - self.restart_lsn) if self.restart_lsn and not self.lost else None


@dataclass(frozen=True, slots=True)
class Blocker:
    """An open transaction that has written something: the creation of a slot waits until it ends.

    Attributes:
        pid: its backend; ``None`` for a prepared transaction, which has none.
        gid: the name of a prepared transaction, or ``""``.
        since: when the transaction began (or was prepared), or ``""`` where the role may not see it.
        seconds: how long ago that is; ``None`` where the role may not see it.
        xid: the id of the transaction, which everybody may see.
    """

    pid: int | None
    gid: str
    database: str
    user: str
    application_name: str
    state: str
    since: str
    query: str
    seconds: float | None
    xid: str

    def __str__(self) -> str:
        where = f"in database {self.database} by {self.user}, open since {self.since or 'unknown'}"
        if self.gid:
            return f"prepared transaction {self.gid!r} {where}"
        named = f" {self.application_name!r}" if self.application_name else ""
        state = f", {self.state}" if self.state else ""
        return f"pid {self.pid}{named} {where}{state}"

    @property
    def remedy(self) -> str:
        """The statement that ends it, for a person who has made sure that it may be ended."""
        if self.gid:
            return "ROLLBACK PREPARED '" + self.gid.replace("'", "''") + f"' (or COMMIT PREPARED), in {self.database}"
        return f"SELECT pg_terminate_backend({self.pid})"


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that ``run`` needs to be true, as it was found.

    Attributes:
        slot_moved: the slot stands past every position that walstream wrote down: somebody else read or advanced it, or
            it was made anew. What it skipped is in the ledger only.
    """

    server: ServerFacts
    role: RoleFacts
    slot: SlotFacts
    publication: PublicationFacts
    table: TableFacts
    slot_moved: bool


def server_facts(connection: Connection) -> ServerFacts:
    """Read what the server says about itself."""
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT current_setting('server_version_num')::int, current_setting('server_version'),
                   (SELECT system_identifier::text FROM pg_catalog.pg_control_system()),
                   pg_catalog.pg_is_in_recovery(),
                   CASE WHEN pg_catalog.pg_is_in_recovery()
                        THEN coalesce(pg_catalog.pg_last_wal_receive_lsn(), pg_catalog.pg_last_wal_replay_lsn())
                        ELSE pg_catalog.pg_current_wal_flush_lsn() END::text,
                   CASE WHEN pg_catalog.pg_is_in_recovery() THEN NULL
                        ELSE pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_lsn()) END,
                   (SELECT timeline_id FROM pg_catalog.pg_control_checkpoint()),
                   pg_catalog.current_database(),
                   (SELECT pg_catalog.pg_encoding_to_char(encoding) FROM pg_catalog.pg_database
                     WHERE datname = pg_catalog.current_database())
            """
        )
        row: Any = cursor.fetchone()
        cursor.execute("SELECT name, setting FROM pg_catalog.pg_settings")
        settings = dict(cursor.fetchall())
    version, text, system, recovering, end, wal_file, checkpoint_timeline, database, encoding = row
    return ServerFacts(
        version=version,
        version_text=text.split()[0],
        system_identifier=system,
        # A WAL file's name begins with the timeline; the checkpoint lags behind a promotion.
        timeline=int(wal_file[:8], 16) if wal_file else checkpoint_timeline,
        in_recovery=recovering,
        wal_end=parse_lsn(end) if end else 0,
        database=database,
        encoding=encoding,
        settings=settings,
    )


def role_facts(connection: Connection) -> RoleFacts:
    """Read what the login may do."""
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT r.rolname, r.rolsuper, r.rolreplication, r.rolbypassrls,
                   ARRAY(SELECT m.rolname::text FROM pg_catalog.pg_roles m
                          WHERE m.oid <> r.oid AND pg_catalog.pg_has_role(r.oid, m.oid, 'MEMBER'))
              FROM pg_catalog.pg_roles r WHERE r.rolname = session_user
            """
        )
        row: Any = cursor.fetchone()
    return RoleFacts(row[0], row[1], row[2], row[3], frozenset(row[4]))


_SLOTS: Final = """
    SELECT pg_catalog.to_jsonb(s),
           extract(epoch FROM pg_catalog.clock_timestamp()
                              - (pg_catalog.to_jsonb(s) ->> 'inactive_since')::timestamptz)::float8,
           a.pid, a.application_name,
           coalesce(pg_catalog.host(a.client_addr), 'a local socket'), a.backend_start::text, a.state
      FROM pg_catalog.pg_replication_slots s LEFT JOIN pg_catalog.pg_stat_activity a ON a.pid = s.active_pid
"""


def slot_facts(connection: Connection, slot: str) -> SlotFacts | None:
    """Read one slot, whatever database it belongs to; ``None`` if there is none of this name."""
    with connection.cursor() as cursor:
        cursor.execute(f"{_SLOTS} WHERE s.slot_name = %s", (slot,))
        row: Any = cursor.fetchone()
    return _slot(*row) if row else None


def logical_slots(connection: Connection) -> list[SlotFacts]:
    """Read all logical slots of the server, whatever database they belong to, by name."""
    with connection.cursor() as cursor:
        cursor.execute(f"{_SLOTS} WHERE s.slot_type = 'logical' ORDER BY s.slot_name")
        return [_slot(*row) for row in cursor.fetchall()]


def absent_standbys(connection: Connection, server: ServerFacts) -> tuple[str, ...]:
    """The physical slots of ``synchronized_standby_slots`` (from 17 on) that nobody reads, that are lost or not there:
    the server sends nothing on a slot for fail-over before each of them has it."""
    names = server.settings.get("synchronized_standby_slots", "").strip()
    if not names:
        return ()
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pg_catalog.btrim(n, ' \"') FROM pg_catalog.unnest(pg_catalog.string_to_array(%s, ',')) AS n"
            " WHERE NOT EXISTS (SELECT FROM pg_catalog.pg_replication_slots AS s"
            " WHERE s.slot_name = pg_catalog.btrim(n, ' \"') AND s.active)",
            (names,),
        )
        return tuple(name for (name,) in cursor.fetchall())


def blockers(connection: Connection) -> list[Blocker]:
    """Open transactions of any database that have written something, oldest first, prepared ones included.

    Every transaction holds an exclusive lock on its own id, and ``pg_locks`` shows those to everybody; what
    ``pg_stat_activity`` adds may be hidden from a role without ``pg_read_all_stats``.
    """
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT l.pid, coalesce(p.gid, ''), coalesce(a.datname, p.database, '?'), coalesce(a.usename, p.owner, '?'),
                   coalesce(a.application_name, ''), coalesce(a.state, ''),
                   coalesce(a.xact_start, p.prepared)::text, coalesce(pg_catalog.left(a.query, 200), ''),
                   extract(epoch FROM pg_catalog.clock_timestamp() - coalesce(a.xact_start, p.prepared))::float8,
                   l.transactionid::text
              FROM pg_catalog.pg_locks l
              LEFT JOIN pg_catalog.pg_stat_activity a ON a.pid = l.pid
              LEFT JOIN pg_catalog.pg_prepared_xacts p ON p.transaction = l.transactionid AND l.pid IS NULL
             WHERE l.locktype = 'transactionid' AND l.mode = 'ExclusiveLock' AND l.granted
               AND l.pid IS DISTINCT FROM pg_catalog.pg_backend_pid()
             ORDER BY pg_catalog.age(l.transactionid) DESC
            """
        )
        return [
            Blocker(pid, gid, database, user, name, state, since or "", query, seconds, xid)
            for pid, gid, database, user, name, state, since, query, seconds, xid in cursor.fetchall()
        ]


@dataclass(frozen=True, slots=True)
class WalsenderProgress:
    """What a walsender is at.

    Attributes:
        at: ``sent_lsn``, ``reply_time`` (or the time of the look) and the state: to be compared with what the next look
            finds.
        waits: it has nothing to do: it waits for more WAL, or for room to send.
    """

    at: tuple[int, str, str]
    waits: bool


def walsender_progress(connection: Connection, pid: int, started: str) -> WalsenderProgress | None:
    """What shows that a walsender is at work although it sends nothing; ``None`` if it is gone.

    Decoding a long transaction of other tables, or catching up through other databases' WAL, takes minutes in which
    nothing arrives, no canary either: the walsender does one thing after the other, and as long as it receives our
    feedback it sees no reason for a keepalive. But it moves its ``sent_lsn``, and it looks at our feedback at least
    every half of ``wal_sender_timeout`` (``reply_time``). If two looks a whole timeout apart find the same, it stands
    still. A login without ``pg_read_all_stats`` sees neither; of its own sessions it sees what they wait for, and a
    walsender that waits for nothing of its trade (more WAL, room to send) is at work: each look then differs.

    Args:
        pid, started: ``backend_pid`` and ``backend_start`` of the stream.
    """
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT coalesce(r.sent_lsn, '0/0')::text,"
            " CASE WHEN r.sent_lsn IS NULL AND coalesce(a.wait_event, '') NOT LIKE 'WalSender%%'"
            " THEN pg_catalog.clock_timestamp()::text ELSE coalesce(r.reply_time::text, '') END, coalesce(r.state, ''),"
            " coalesce(a.wait_event, '') LIKE 'WalSender%%'"
            " FROM pg_catalog.pg_stat_replication AS r JOIN pg_catalog.pg_stat_activity AS a ON a.pid = r.pid"
            " WHERE r.pid = %s AND r.backend_start = %s::timestamptz",
            (pid, started),
        )
        row: Any = cursor.fetchone()
    return WalsenderProgress((parse_lsn(row[0]), row[1], row[2]), bool(row[3])) if row else None


def _slot(
    row: dict[str, Any],
    inactive_seconds: float | None,
    pid: int | None,
    name: str | None,
    address: str,
    started: str | None,
    state: str | None,
) -> SlotFacts:
    def lsn(column: str) -> int:
        return parse_lsn(row[column]) if row.get(column) else 0

    return SlotFacts(
        name=row["slot_name"],
        plugin=row["plugin"] or "",
        slot_type=row["slot_type"],
        database=row["database"] or "",
        temporary=row["temporary"],
        active=row["active"],
        restart_lsn=lsn("restart_lsn"),
        confirmed_flush_lsn=lsn("confirmed_flush_lsn"),
        wal_status=row.get("wal_status") or "",
        safe_wal_size=row.get("safe_wal_size"),
        two_phase=bool(row.get("two_phase")),
        failover=bool(row.get("failover")),
        synced=bool(row.get("synced")),
        conflicting=bool(row.get("conflicting")),
        invalidation_reason=row.get("invalidation_reason") or "",
        inactive_since=row.get("inactive_since") or "",
        holder=SessionFacts(pid, name or "", address, started or "", state or "") if pid is not None else None,
        inactive_seconds=inactive_seconds,
    )
