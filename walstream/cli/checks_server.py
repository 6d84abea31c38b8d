"""Findings about the server, the login and the way to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from walstream.config import quote
from walstream.figures import size

from .checks import Exam, Finding, State, judged

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

OLD_TRANSACTION: Final = "5 minutes"


def version(exam: Exam) -> Iterator[Finding]:
    from walstream.source.preflight import OLDEST_MAJOR

    server = exam.server
    state: State = "ok" if server.major >= OLDEST_MAJOR else "failed"
    fix = "" if state == "ok" else f"upgrade: walstream needs PostgreSQL {OLDEST_MAJOR} or newer"
    yield Finding("server", state, f"PostgreSQL {server.version_text}, {exam.provider.name}", fix)
    if server.in_recovery:
        yield Finding(
            "primary",
            "failed",
            "this server is a standby: the order of events is written to the primary",
            "point the DSN at the primary; with several hosts in it, add target_session_attrs=read-write",
        )


def wal_level(exam: Exam) -> Iterator[Finding]:
    level = exam.server.settings.get("wal_level", "unknown")
    good = level == "logical"
    yield Finding("wal_level", "ok" if good else "failed", level, "" if good else exam.provider.logical)


def capacity(exam: Exam) -> Iterator[Finding]:
    """Free slots and walsenders. A slot or a walsender of ours that is there already is counted as free."""
    settings = exam.server.settings
    ((slots, senders),) = exam.rows(
        "SELECT (SELECT count(*) FROM pg_catalog.pg_replication_slots WHERE slot_name <> %s),"
        " (SELECT count(*) FROM pg_catalog.pg_stat_replication AS r WHERE NOT EXISTS"
        " (SELECT 1 FROM pg_catalog.pg_replication_slots AS s WHERE s.slot_name = %s AND s.active_pid = r.pid))",
        exam.settings.slot,
        exam.settings.slot,
    )
    for name, used in (("max_replication_slots", slots), ("max_wal_senders", senders)):
        limit = int(settings.get(name, "0"))
        free = limit - used
        fix = f"raise {name} and restart the server"
        if exam.provider.key == "own":
            fix = f"ALTER SYSTEM SET {name} = {limit + 10}; then restart the server"
        state: State = "failed" if free < 1 else "warning" if free < 2 else "ok"
        yield Finding(name, state, f"{limit}, of which others use {used}", "" if state == "ok" else fix)


def login(exam: Exam) -> Iterator[Finding]:
    role, provider = exam.role, exam.provider
    may = role.superuser or role.replication or provider.replication_role in role.member_of
    yield Finding(
        "replication privilege",
        "ok" if may else "failed",
        f"{role.name} may {'' if may else 'not '}replicate",
        "" if may else provider.allow_replication(role.name),
    )
    if role.superuser:
        yield Finding(
            "role",
            "warning",
            f"{role.name} is a superuser, and `walstream run` needs none",
            "a login with REPLICATION and `walstream init --grants ROLE`",
        )


def replication_path(exam: Exam) -> Iterator[Finding]:
    """The replication connection is really made, and closed again."""
    from walstream.source.preflight import check_replication_path

    way = "by replication_dsn" if exam.settings.replication_dsn else "by the same DSN"
    yield judged("replication connection", way, lambda: check_replication_path(exam.settings, exam.server))


def pooler(exam: Exam) -> Iterator[Finding]:
    if pooled(exam.conn):
        direct = f": {exam.provider.direct}" if exam.provider.direct else ""
        yield Finding(
            "pooler",
            "warning",
            "a connection pooler stands in the path of the DSN",
            "session mode is needed (leases and projectors are tied to sessions), and replication_dsn has to lead past"
            f" it{direct}",
        )
    else:
        yield Finding("pooler", "ok", "none in the path")


def pooled(conn: Connection) -> bool:
    """Whether a pooler answers: the process id that was announced at the connection's start is then the pooler's."""
    with conn.cursor() as cur:
        cur.execute("SELECT pg_catalog.pg_backend_pid()")
        row = cur.fetchone()
    return row is not None and row[0] != conn.info.backend_pid


def encoding(exam: Exam) -> Iterator[Finding]:
    name = exam.server.encoding
    if name == "SQL_ASCII":
        yield Finding(
            "encoding", "failed", "SQL_ASCII: text of no known encoding", "keep the ledger in a database with UTF8"
        )
    else:
        yield Finding("encoding", "ok", name if name == "UTF8" else f"{name}; text is converted to UTF-8")


def slot_bound(exam: Exam) -> Iterator[Finding]:
    from walstream.source.facts import UNBOUNDED

    keep = exam.server.slot_keep_bytes
    name = "max_slot_wal_keep_size"
    if keep != UNBOUNDED:
        yield Finding(name, "ok", size(keep))
    else:
        allowed = exam.settings.allow_unbounded_slot
        yield Finding(
            name,
            "warning" if allowed else "failed",
            "-1: a consumer that stays away fills the disk" + (" (allow_unbounded_slot is set)" if allowed else ""),
            exam.provider.set_parameter(name, "50GB"),
        )
    idle = int(exam.server.settings.get("idle_replication_slot_timeout", "0"))
    if idle:
        yield Finding(
            "idle_replication_slot_timeout",
            "warning",
            f"{idle} s: a consumer that is away for longer loses its slot",
            "no event is lost by that (`walstream init` makes a new slot and finds what was missed); or set it to 0",
        )


def synchronous(exam: Exam) -> Iterator[Finding]:
    server = exam.server
    if server.any_standby_is_synchronous:
        yield Finding(
            "synchronous_standby_names",
            "failed",
            f"{server.settings['synchronous_standby_names']}: the walsender of walstream itself would be a standby",
            exam.provider.set_parameter("synchronous_standby_names", "FIRST 1 (standby1, standby2)"),
        )
    for name, words in (
        ("fsync", "off: a crash of the server can destroy ledger and order alike"),
        ("full_page_writes", "off: a crash of the server can tear pages"),
    ):
        if server.settings.get(name) == "off":
            yield Finding(name, "warning", words, exam.provider.set_parameter(name, "on"))


def habits(exam: Exam) -> Iterator[Finding]:
    """Settings of the writers, wherever they are made: on the server, for the database, for a role."""
    for name, bad, words in (
        (
            "synchronous_commit",
            ("off",),
            "a crash of the server takes back the last commits of the writers, events among them",
        ),
        (
            "default_transaction_isolation",
            ("serializable",),
            "writers of events will fail with serialization errors, for nothing that they need",
        ),
    ):
        places = list(_where(exam, name, bad))
        if places:
            fixes = "; ".join(fix for _, fix in places)
            yield Finding(name, "warning", f"{bad[0]} {', '.join(where for where, _ in places)}: {words}", fixes)
        else:
            yield Finding(name, "ok", exam.server.settings.get(name, "unknown"))


def _where(exam: Exam, name: str, bad: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """The places that set ``name`` to a bad value, and how each is mended."""
    if exam.server.settings.get(name) in bad and not _set_for_this_login(exam, name):
        yield "on the server", exam.provider.set_parameter(name, _DEFAULTS[name])
    for database, role, entry in exam.rows(
        "SELECT d.datname::text, r.rolname::text, c.entry FROM pg_catalog.pg_db_role_setting AS s"
        " LEFT JOIN pg_catalog.pg_database AS d ON d.oid = s.setdatabase"
        " LEFT JOIN pg_catalog.pg_roles AS r ON r.oid = s.setrole"
        " CROSS JOIN LATERAL unnest(s.setconfig) AS c (entry)"
        " WHERE (s.setdatabase = 0 OR d.datname = current_database())"
        " AND pg_catalog.split_part(c.entry, '=', 1) = %s ORDER BY 1, 2",
        name,
    ):
        if entry.partition("=")[2] in bad:
            within = f" IN DATABASE {quote(database)}" if database else ""
            if role is None:
                yield f"for database {database}", f"ALTER DATABASE {quote(database)} RESET {name};"
            else:
                yield f"for role {role}", f"ALTER ROLE {quote(role)}{within} RESET {name};"


_DEFAULTS: Final = {"synchronous_commit": "on", "default_transaction_isolation": "read committed"}


def _set_for_this_login(exam: Exam, name: str) -> bool:
    """Whether this session has the value from its database or role, and not from the server."""
    ((source,),) = exam.rows("SELECT source FROM pg_catalog.pg_settings WHERE name = %s", name)
    return source in ("database", "user", "database user", "client", "session")


def timeouts(exam: Exam) -> Iterator[Finding]:
    settings = exam.server.settings
    if settings.get("wal_sender_timeout") == "0":
        yield Finding(
            "wal_sender_timeout",
            "warning",
            "0: the server never notices that a consumer is gone, and its slot stays taken",
            exam.provider.set_parameter("wal_sender_timeout", "60s"),
        )
    if settings.get("idle_session_timeout", "0") != "0":
        yield Finding(
            "idle_session_timeout",
            "warning",
            f"{settings['idle_session_timeout']} ms for {exam.role.name}: quiet connections of walstream are cut",
            f"ALTER ROLE {quote(exam.role.name)} SET idle_session_timeout = 0;",
        )


def open_transactions(exam: Exam) -> Iterator[Finding]:
    """What holds WAL of every slot, and the creation of a new one."""
    rows = exam.rows(
        "SELECT 'pid ' || pid || coalesce(' (' || nullif(application_name, '') || ')', ''), xact_start::text,"
        " 'SELECT pg_terminate_backend(' || pid || ')' FROM pg_catalog.pg_stat_activity"
        " WHERE backend_xid IS NOT NULL AND xact_start < now() - %s::interval AND pid <> pg_catalog.pg_backend_pid()"
        " UNION ALL SELECT 'prepared transaction ' || quote_literal(gid), prepared::text,"
        " 'ROLLBACK PREPARED ' || quote_literal(gid) || ' in database ' || database FROM pg_catalog.pg_prepared_xacts"
        " WHERE prepared < now() - %s::interval ORDER BY 2",
        OLD_TRANSACTION,
        OLD_TRANSACTION,
    )
    if not rows:
        yield Finding("open transactions", "ok", f"none that wrote is older than {OLD_TRANSACTION}")
        return
    yield Finding(
        "open transactions",
        "warning",
        "; ".join(f"{who}, open since {since}" for who, since, _ in rows[:5])
        + (f"; and {len(rows) - 5} more" if len(rows) > 5 else "")
        + ": every slot keeps WAL from there on, and a new slot waits for it",
        f"if it is forgotten: {rows[0][2]}",
    )


CHECKS: Final[tuple[Callable[[Exam], Iterator[Finding]], ...]] = (
    version,
    wal_level,
    capacity,
    login,
    replication_path,
    pooler,
    encoding,
    slot_bound,
    synchronous,
    habits,
    timeouts,
    open_transactions,
)
