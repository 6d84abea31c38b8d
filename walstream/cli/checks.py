"""The findings of ``walstream doctor``: each precondition, what was found, and how to mend it. Reads only.

What ``walstream run`` refuses is judged by the very functions that it uses (:mod:`walstream.source.preflight`); what is
merely unwise is judged here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from walstream.config import Settings, quote
from walstream.errors import ConfigError, WalstreamError
from walstream.ledger import schema
from walstream.ledger.identity import Identity, check_identity, read_identity

from .provider import Provider, provider_of

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

    from walstream.source.facts import RoleFacts, ServerFacts, SlotFacts
    from walstream.source.table_facts import PublicationFacts, TableFacts

State = Literal["ok", "warning", "failed"]

INIT: Final = "walstream init"


@dataclass(frozen=True)
class Finding:
    """One line.

    Attributes:
        check: what was looked at.
        state: ``failed``: ``walstream run``, ``init`` or a worker's append will refuse or fail; ``warning``: it works
            and is unwise.
        found: what there is.
        fix: what to do, a statement where there is one; empty if nothing.
    """

    check: str
    state: State
    found: str
    fix: str = ""


@dataclass(frozen=True)
class Exam:
    """Everything that is known about the patient.

    Attributes:
        version: of walstream's schema; ``None`` if this role may not read it.
        readable: this role may read the identity.
    """

    settings: Settings
    conn: Connection
    server: ServerFacts
    role: RoleFacts
    provider: Provider
    table: TableFacts | None
    publication: PublicationFacts | None
    slot: SlotFacts | None
    version: int | None
    identity: Identity | None
    readable: bool

    def rows(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        """The rows of one query."""
        with self.conn.cursor() as cur:
            cur.execute(sql, values or None)
            return cur.fetchall()


def examine(settings: Settings, conn: Connection) -> Exam:
    """Read all facts once."""
    from walstream.source.facts import role_facts, server_facts, slot_facts
    from walstream.source.table_facts import publication_facts, table_facts

    version: int | None
    identity, readable = None, False
    with conn.cursor() as cur:
        try:
            version = schema.installed_version(cur, settings.namespace)
        except ConfigError:
            version = None
        if version:
            cur.execute(
                "SELECT pg_catalog.has_table_privilege(%s, 'SELECT')", (f"{quote(settings.namespace)}.identity",)
            )
            row: Any = cur.fetchone()
            readable = row[0]
            identity = read_identity(cur, settings.namespace) if readable else None
    return Exam(
        settings,
        conn,
        server_facts(conn),
        role_facts(conn),
        provider_of(conn),
        table_facts(conn, settings.ledger),
        publication_facts(conn, settings.publication),
        slot_facts(conn, settings.slot),
        version,
        identity,
        readable,
    )


def findings(exam: Exam) -> Iterator[Finding]:
    """All findings, in the order in which a person would repair things."""
    from . import checks_ledger, checks_server, checks_worker

    for check in (*checks_server.CHECKS, *checks_ledger.CHECKS, *checks_worker.CHECKS):
        yield from check(exam)


def judged(check: str, found: str, judge: Callable[[], object]) -> Finding:
    """The finding that a function of the preflight comes to: ``found`` if it is content, else its error."""
    try:
        judge()
    except WalstreamError as error:
        return Finding(check, "failed", str(error), error.hint)
    return Finding(check, "ok", found)


def identity_findings(exam: Exam) -> Iterator[Finding]:
    """Whether the stream is set up, and whether this is the place and the history where that was."""
    settings = exam.settings
    if exam.version == 0:
        yield Finding("set-up", "failed", f"there is no schema {settings.namespace} of walstream's tables", INIT)
        return
    yield judged(
        "set-up",
        f"schema {settings.namespace}, version {exam.version}",
        lambda: schema.require_schema(exam.conn, settings),
    )
    if exam.identity is None:
        if exam.readable:
            yield Finding("identity", "failed", "the stream has not been set up: there is no identity", INIT)
    else:
        identity = exam.identity
        yield judged(
            "identity",
            f"ledger {identity.ledger_id}, environment {identity.environment}, epoch {identity.epoch}",
            lambda: check_identity(exam.conn, settings),
        )
