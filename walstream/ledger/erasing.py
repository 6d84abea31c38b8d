"""Erasing a session: what would be touched, doing it, and what is out of reach (docs/ledger.md, "Erasing").

The logic is one SQL function, so that every language has the same one. Here it is called, and its refusals are said in
our words.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

import psycopg2
from psycopg2.errors import InsufficientPrivilege
from psycopg2.extensions import connection as Connection

from walstream.config import Settings, quote
from walstream.errors import ConfigError, UnknownSession

from .inflight import known_session
from .stored_rows import of_session, plain_cursor, statement

Mode = Literal["redact", "remove"]
Forks = Literal["erase", "keep"]

_REFUSED: Final = "WS006"
_PREVIEW: Final = "SELECT place, touched FROM $namespace.erasure_preview(%s, %s)"
_ERASE: Final = "SELECT place, touched FROM $namespace.erase_session(%s, %s, %s, %s, %s)"
_DECLARED: Final = "SELECT EXISTS (SELECT FROM $namespace.erasures WHERE session_id = %s)"
_FORKS: Final = """
WITH RECURSIVE line (id) AS (
    SELECT f.session_id FROM $namespace.forks AS f WHERE f.parent_id = %s
     UNION
    SELECT f.session_id FROM line JOIN $namespace.forks AS f ON f.parent_id = line.id
)
SELECT id::text FROM line ORDER BY 1"""
_PROJECTORS: Final = "SELECT name FROM $namespace.projectors ORDER BY 1"
_COLUMNS: Final = """
SELECT a.attname::text FROM pg_catalog.pg_attribute AS a
 WHERE a.attrelid = pg_catalog.to_regclass(%s) AND a.attnum > 0 AND NOT a.attisdropped AND a.attname <> ALL (%s)
 ORDER BY a.attnum"""


@dataclass(frozen=True, slots=True)
class Reach:
    """What an erasure would do.

    Attributes:
        session_id: as the ledger has it.
        touched: how many rows by place.
        forks: the sessions that go on from it.
        beyond: in words, what holds, or may hold, payloads of the session and is not reached.
    """

    session_id: str
    touched: dict[str, int]
    forks: tuple[str, ...]
    beyond: tuple[str, ...]

    @property
    def events(self) -> int:
        """How many events have a payload that is not redacted yet."""
        return self.touched["events"] - self.touched["redacted already"]


def look(conn: Connection, settings: Settings, session: str, *, mode: Mode, with_forks: bool) -> Reach:
    """What erasing a session would touch. Changes nothing.

    Raises:
        UnknownSession: the ledger has no event of it, and no erasure declares that.
        ConfigError: this login may not.
    """
    with plain_cursor(conn) as cur, _as_ours(settings, session), of_session(session):
        try:
            session = known_session(cur, settings, session)
        except UnknownSession:
            cur.execute(statement(settings, _DECLARED), (session,))
            if cur.fetchone() != (True,):
                raise
        cur.execute(statement(settings, _PREVIEW), (session, with_forks))
        touched = {place: int(count) for place, count in cur.fetchall()}
        cur.execute(statement(settings, _FORKS), (session,))
        forks = tuple(each for (each,) in cur.fetchall())
        cur.execute(statement(settings, _PROJECTORS))
        projectors = [name for (name,) in cur.fetchall()]
        cur.execute(_COLUMNS, (settings.ledger.qualified, list(settings.ledger.columns.names())))
        columns = [name for (name,) in cur.fetchall()]
    return Reach(session, touched, forks, tuple(_beyond(settings, projectors, columns, mode)))


def erase_session(
    conn: Connection,
    settings: Settings,
    session: str,
    reason: str,
    *,
    mode: Mode = "redact",
    forks: Forks | None = None,
    force: bool = False,
) -> dict[str, int]:
    """Erase a session, in the caller's transaction; return how many rows were touched, by place.

    Args:
        reason: is declared, and goes on record.
        mode: ``redact`` takes the payloads, ``remove`` the rows.
        forks: whether the sessions that go on from it are erased as well; there may be none if not given.
        force: cancel jobs that are at work, too.

    Raises:
        ConfigError: a job is at work, there are forks, or this login may not.
    """
    with plain_cursor(conn) as cur, _as_ours(settings, session), of_session(session):
        cur.execute(statement(settings, _ERASE), (session, reason, mode, forks, force))
        rows: list[Any] = cur.fetchall()
    return {place: int(count) for place, count in rows}


@contextlib.contextmanager
def _as_ours(settings: Settings, session: str) -> Iterator[None]:
    try:
        yield
    except InsufficientPrivilege as error:
        function = f"{quote(settings.namespace)}.erase_session, {quote(settings.namespace)}.erasure_preview"
        raise ConfigError(
            f"this login may not erase sessions: {str(error).splitlines()[0]}",
            hint="run it as the owner of walstream's tables, or let this login do it: `walstream init --eraser LOGIN`"
            f" (GRANT EXECUTE ON FUNCTION {function}, and what is read besides)",
        ) from error
    except psycopg2.Error as error:
        if error.pgcode != _REFUSED:
            raise
        said = (error.diag.message_primary or "").removeprefix("walstream: ")
        hint = error.diag.message_hint or ""
        if "is at work" in said:
            hint = "`walstream jobs cancel JOB` cancels it; --force does, too"
        elif "go on from session" in said:
            hint = f"say --forks erase or --forks keep; `walstream erase {session} --dry-run` names them"
        raise ConfigError(said, hint=hint) from error


def _beyond(settings: Settings, projectors: list[str], columns: list[str], mode: Mode) -> Iterator[str]:
    table = settings.ledger.qualified
    yield "backups, archived WAL, WAL that a slot keeps, and replicas until they have replayed it"
    yield f"pages on the disk: the old rows stay in them until VACUUM {table} (and the other tables) has run"
    yield "the memory of processes that run: for some seconds they may still hand out what they hold of it"
    yield "log files, files that were exported, and whatever was sent elsewhere"
    if columns and mode == "redact":
        yield f"columns of {table} besides the payload: {', '.join(columns)}"
    for name in projectors:
        configured = settings.projectors.get(name)
        archive = None if configured is None else configured.options.get("archive")
        if name == "audit-sink":
            yield f"{name}: blanks the payloads in its own segments, as soon as it runs"
            yield f"{name}: copies of its segments in object storage" + (f" ({archive})" if archive else ", if any")
        elif name not in ("snapshot-writer", "handoff-router"):
            yield f"{name}: what it made of the events (`walstream projectors rebuild {name}`, where it can be rebuilt)"
