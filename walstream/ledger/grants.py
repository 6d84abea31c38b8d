"""What a login needs to run walstream, to append as an agent's worker, to decide approvals, or to erase sessions, and
no more: the statements, for set-up and for docs/operations.md.

None of it makes the login an owner: it cannot change the schema, the publication or the ledger's rows. A worker cannot
even insert: it appends through functions that do it with their owner's rights. Whether a login may replicate is an
attribute of the role (or, with some providers, the membership in one), which only a superuser, or the provider's
stand-in for one, can give.
"""

from __future__ import annotations

from typing import Final

from walstream.config import Settings, quote

from .identity import literal
from .schema import (
    ALARM_VERSION,
    APPROVALS_VERSION,
    JOBS_VERSION,
    LEDGER_VERSION,
    PRUNING_VERSION,
    RECOVERIES_VERSION,
)

# The privileges on each of walstream's tables. FOR SHARE on the fencing row needs UPDATE on it (documentation, SELECT,
# "The Locking Clause"); compaction replaces order rows, so it deletes; erasures are declared by people, not by `run`.
PRIVILEGES: Final[dict[str, str]] = {
    "migrations": "SELECT",
    "identity": "SELECT, UPDATE (slot_state)",  # of a slot that is made anew
    "generation": "SELECT, UPDATE",
    "ingest": "SELECT, UPDATE",
    "commit_order": "SELECT, INSERT, DELETE",
    "projectors": "SELECT, INSERT, UPDATE",
    "cursors": "SELECT, INSERT, UPDATE, DELETE",
    "parked": "SELECT, INSERT, UPDATE, DELETE",
    "erasures": "SELECT",
    "violations": "SELECT, INSERT",
}

# What the snapshot writer reads besides, from the schema's second version on.
LEDGER_PRIVILEGES: Final[dict[str, str]] = {
    "messages": "SELECT",
    "forks": "SELECT",
}
SNAPSHOT_PRIVILEGES: Final = "SELECT, INSERT, UPDATE, DELETE"

# What the handoff router needs, from the third version on. Jobs it makes through a function, and only looks at.
ROUTER_PRIVILEGES: Final[dict[str, str]] = {
    "job_transitions": "SELECT",
    "dead_letters": "SELECT, INSERT, UPDATE",
}
ROUTER_FUNCTIONS: Final = ("submit_job",)

# What a rebuild, a recovery and the commands that read sessions look at. Nothing of it can be written.
WORKER_TABLES: Final = (
    "migrations",
    "identity",
    "commit_order",
    "ingest",
    "erasures",
    "append_keys",
    "messages",
    "forks",
    "job_transitions",
    "approvals",
)
WORKER_FUNCTIONS: Final = (
    *("append", "append_batch", "appended", "fork", "session_lock_key"),
    *("submit_job", "claim_job", "begin_job", "renew_job", "complete_job", "fail_job", "release_job"),
    *("request_approval", "expire_approvals"),
    *("await_human", "resume_job", "cancel_job", "retry_job", "wake_workers", "take_job", "finish_job"),
)

# Who decides looks at requests and what they are about. Not a worker: no agent may approve what it asked itself.
APPROVER_TABLES: Final = ("migrations", "approvals")
APPROVER_FUNCTIONS: Final = ("decide_approval", "wake_workers")

# Who erases sees which sessions there are and what would be touched, and reads no payload.
ERASER_TABLES: Final[dict[str, str]] = {
    "migrations": "SELECT",
    "erasures": "SELECT",
    "forks": "SELECT",
    "projectors": "SELECT (name)",
}
ERASER_FUNCTIONS: Final = ("erasure_preview", "erase_session")


def run_privileges(settings: Settings, version: int = RECOVERIES_VERSION) -> dict[str, str]:
    """Privileges by qualified table that `walstream run` needs on a schema of ``version``, but those on the ledger."""
    namespace, ledger = quote(settings.namespace), settings.ledger
    wanted = {f"{namespace}.{table}": privileges for table, privileges in PRIVILEGES.items()}
    if version >= LEDGER_VERSION:
        wanted |= {f"{namespace}.{table}": privileges for table, privileges in LEDGER_PRIVILEGES.items()}
        wanted[ledger.beside(ledger.snapshots)] = SNAPSHOT_PRIVILEGES
    if version >= JOBS_VERSION:
        wanted |= {f"{namespace}.{table}": privileges for table, privileges in ROUTER_PRIVILEGES.items()}
        wanted[ledger.beside(ledger.jobs)] = "SELECT"
    if version >= APPROVALS_VERSION:
        wanted[f"{namespace}.approvals"] = "SELECT"  # `status` counts the open ones
    if version >= PRUNING_VERSION:
        wanted[f"{namespace}.pruned_jobs"] = "SELECT"  # the router asks whether an event had a job
    if version >= ALARM_VERSION:
        wanted[f"{namespace}.ledger_catalogue"] = "SELECT, INSERT, UPDATE, DELETE"
    if version >= RECOVERIES_VERSION:
        wanted[f"{namespace}.recoveries"] = "SELECT, INSERT"
    return wanted


def run_checks(settings: Settings, version: int = RECOVERIES_VERSION) -> list[tuple[str, str, str | None]]:
    """The same one by one, for asking whether a role has them: table, privilege, and the column that it is for."""
    checks: list[tuple[str, str, str | None]] = []
    for table, privileges in run_privileges(settings, version).items():
        for each in privileges.split(", "):
            privilege, _, column = each.partition(" ")
            checks.append((table, privilege, column.strip("()") or None))
    return checks


def grant_statements(settings: Settings, role: str) -> list[str]:
    """The statements that let ``role`` run this stream, apart from the right to replicate. Idempotent.

    What a projector writes to tables of its own has to be granted on those tables.
    """
    grantee = quote(role)
    return [
        *_usage(settings, grantee),
        *(f"GRANT {privileges} ON {table} TO {grantee};" for table, privileges in run_privileges(settings).items()),
        f"GRANT SELECT ON {settings.ledger.qualified} TO {grantee};",
        _sequence(settings, grantee),
        *_functions(settings, ROUTER_FUNCTIONS, grantee),
    ]


def worker_statements(settings: Settings, role: str) -> list[str]:
    """The statements that let ``role`` append events and read sessions, and write nothing by itself. Idempotent.

    Side effects of an agent in tables of the application have to be granted on those tables.
    """
    namespace, ledger, grantee = quote(settings.namespace), settings.ledger, quote(role)
    tables = [
        *(f"{namespace}.{table}" for table in WORKER_TABLES),
        ledger.qualified,
        ledger.beside(ledger.snapshots),
        ledger.beside(ledger.jobs),
    ]
    return [
        *_usage(settings, grantee),
        *(f"GRANT SELECT ON {table} TO {grantee};" for table in tables),
        *_functions(settings, WORKER_FUNCTIONS, grantee),
    ]


def approver_statements(settings: Settings, role: str) -> list[str]:
    """The statements that let ``role`` look at requests for an approval, and decide them. Idempotent."""
    namespace, ledger, grantee = quote(settings.namespace), settings.ledger, quote(role)
    tables = [
        *(f"{namespace}.{table}" for table in APPROVER_TABLES),
        ledger.qualified,
        ledger.beside(ledger.jobs),
    ]
    return [
        *_usage(settings, grantee),
        *(f"GRANT SELECT ON {table} TO {grantee};" for table in tables),
        *_functions(settings, APPROVER_FUNCTIONS, grantee),
    ]


def eraser_statements(settings: Settings, role: str) -> list[str]:
    """The statements that let ``role`` erase sessions, by declaration, and change nothing else. Idempotent."""
    namespace, ledger, grantee = quote(settings.namespace), settings.ledger, quote(role)
    return [
        *_usage(settings, grantee),
        *(f"GRANT {privilege} ON {namespace}.{table} TO {grantee};" for table, privilege in ERASER_TABLES.items()),
        f"GRANT SELECT ({quote(ledger.columns.session_id)}) ON {ledger.qualified} TO {grantee};",
        *_functions(settings, ERASER_FUNCTIONS, grantee),
    ]


def _functions(settings: Settings, functions: tuple[str, ...], grantee: str) -> list[str]:
    # Without arguments: each of these names is one function, whatever arguments a release has given it.
    namespace = quote(settings.namespace)
    return [f"GRANT EXECUTE ON FUNCTION {namespace}.{name} TO {grantee};" for name in functions]


def _sequence(settings: Settings, grantee: str) -> str:
    """The statement that lets the snapshot writer see which number was drawn last (``walstream.ledger.settling``).

    Where the column has no sequence of its own it grants nothing, and snapshots are exact without it.
    """
    table, column = settings.ledger.qualified, settings.ledger.columns.seq
    found = f"pg_catalog.pg_get_serial_sequence({literal(table)}, {literal(column)})"
    grant = f"'GRANT SELECT ON SEQUENCE ' || {found} || {literal(f' TO {grantee}')}"
    return f"DO $walstream$ BEGIN IF {found} IS NOT NULL THEN EXECUTE {grant}; END IF; END $walstream$;"


def _usage(settings: Settings, grantee: str) -> list[str]:
    return [
        f"GRANT USAGE ON SCHEMA {quote(name)} TO {grantee};" for name in (settings.namespace, settings.ledger.namespace)
    ]
