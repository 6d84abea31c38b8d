"""``walstream init --grants ROLE``, ``--worker ROLE``, ``--approver ROLE`` and ``--eraser ROLE``: what can be granted
is, and what only a superuser can give is said."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from walstream.config import quote
from walstream.errors import ConfigError
from walstream.ledger.grants import approver_statements, eraser_statements, grant_statements, worker_statements

from .provider import provider_of

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

    from walstream.config import Settings


def require_role(conn: Connection, role: str, *, streams: bool) -> None:
    """Check that ``role`` exists.

    Args:
        streams: it is to read the slot.

    Raises:
        ConfigError: it does not; the hint has the statement that makes it.
    """
    with conn.cursor() as cur:
        cur.execute("SELECT 1 FROM pg_catalog.pg_roles WHERE rolname = %s", (role,))
        if cur.fetchone() is None:
            raise ConfigError(
                f"there is no role {role!r} to grant anything to",
                hint=f"CREATE ROLE {quote(role)} LOGIN{' REPLICATION' if streams else ''}",
            )


def grant(settings: Settings, conn: Connection, role: str) -> list[str]:
    """Grant, in one transaction; return what the role still lacks and only a superuser can give."""
    _run(conn, grant_statements(settings, role))
    provider = provider_of(conn)
    with conn.cursor() as cur:
        cur.execute(
            "SELECT r.rolsuper OR r.rolreplication OR EXISTS (SELECT 1 FROM pg_catalog.pg_roles AS m"
            " WHERE m.rolname = %s AND pg_catalog.pg_has_role(r.oid, m.oid, 'MEMBER')),"
            " r.rolsuper OR r.rolbypassrls OR NOT c.relrowsecurity"
            " FROM pg_catalog.pg_roles AS r, pg_catalog.pg_class AS c"
            " WHERE r.rolname = %s AND c.oid = pg_catalog.to_regclass(%s)",
            (provider.replication_role, role, settings.ledger.qualified),
        )
        row: Any = cur.fetchone()
    notes = []
    if not row[0]:
        notes.append(f"{role} may not replicate yet: {provider.allow_replication(role)}")
    if not row[1]:
        notes.append(
            f"row security is on, and hides rows from {role}: ALTER ROLE {quote(role)} BYPASSRLS (an owner needs it"
            " not)"
        )
    return notes


def grant_worker(settings: Settings, conn: Connection, role: str) -> None:
    """Grant ``role`` what an agent's worker needs, in one transaction."""
    _run(conn, worker_statements(settings, role))


def grant_approver(settings: Settings, conn: Connection, role: str) -> None:
    """Grant ``role`` what who decides approvals needs, in one transaction."""
    _run(conn, approver_statements(settings, role))


def grant_eraser(settings: Settings, conn: Connection, role: str) -> str:
    """Grant ``role`` what who erases sessions needs, in one transaction; say what that is."""
    _run(conn, eraser_statements(settings, role))
    return (
        f"{role} may erase sessions (`walstream erase`, {quote(settings.namespace)}.erase_session), also of a ledger"
        " that is append-only, and may read no payload; each erasure says whose login it was"
    )


def _run(conn: Connection, statements: list[str]) -> None:
    conn.autocommit = False
    try:
        with conn, conn.cursor() as cur:
            for statement in statements:
                cur.execute(statement)
    finally:
        conn.autocommit = True
