"""What was done to the ledger besides appending: `walstream audit violations`, `acknowledge`, a line in `status`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from walstream.errors import ConfigError

from . import console
from .options import Json, takes_settings
from .session import database, installed

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

    from walstream.config import Settings

_SHOWN = 100


@dataclass(frozen=True)
class OpenViolations:
    """Violations that nobody has acknowledged.

    Attributes:
        records: rows; ``changes``: how many changes they stand for.
        last: of the newest one: what, and when it was noticed.
    """

    records: int = 0
    changes: int = 0
    last_id: int | None = None
    last: str = ""

    @property
    def problem(self) -> str:
        """The line in `walstream status`."""
        what = "1 change" if self.changes == 1 else f"{self.changes:,} changes"
        return (
            f"TAMPER ALARM: {what} of the ledger that nobody declared; the last: {self.last}."
            " See `walstream audit violations`, then `walstream audit acknowledge`"
        )


def register(group: typer.Typer) -> None:
    """Add the commands to `walstream audit`."""
    group.command()(violations)
    group.command()(acknowledge)


def count_open(conn: Connection, settings: Settings) -> OpenViolations:
    """What is not acknowledged; nothing where the schema is older, or this login may not see it.

    Args:
        conn: in autocommit.
    """
    return _open(conn, settings) or OpenViolations()


def open_if_known(settings: Settings) -> OpenViolations | str | None:
    """What is not acknowledged, for whoever has the files alone to look at, too.

    Returns:
        Why that could not be asked, in words, if it could not; ``None`` if no database was named, or it does not say.
    """
    from walstream.errors import WalstreamError

    if not settings.dsn:
        return None
    try:
        with database(settings, "audit") as conn:
            return _open(conn, settings)
    except WalstreamError as error:
        return str(error)


def _open(conn: Connection, settings: Settings) -> OpenViolations | None:
    """``None`` where the schema is older, or this login may not see it."""
    from psycopg2.errors import InsufficientPrivilege, UndefinedColumn, UndefinedTable

    from walstream.config import quote

    with conn.cursor() as cur:
        try:
            cur.execute(
                f"""
                SELECT count(*), coalesce(sum(changes), 0), max(id),
                       (SELECT coalesce(nullif(detail, ''), kind) || coalesce(' (seq ' || seq || ')', '')
                               || ', noticed ' || to_char(noticed_at AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS "UTC"')
                          FROM {quote(settings.namespace)}.violations
                         WHERE acknowledged_at IS NULL ORDER BY id DESC LIMIT 1)
                  FROM {quote(settings.namespace)}.violations WHERE acknowledged_at IS NULL"""
            )
        except (InsufficientPrivilege, UndefinedColumn, UndefinedTable):
            return None
        records, changes, last_id, last = cur.fetchone() or (0, 0, None, "")
    return OpenViolations(int(records), int(changes), last_id, last or "")


@takes_settings
def violations(
    settings: Settings,
    *,
    every: Annotated[bool, typer.Option("--all", help="Also those that were acknowledged.")] = False,
    as_json: Json = False,
) -> None:
    """List what was done to the ledger besides appending, the newest first: up to a hundred, or all with --json."""
    from walstream.config import quote
    from walstream.ledger.schema import ALARM_VERSION

    with installed(settings, "audit", ALARM_VERSION) as conn, conn.cursor() as cur:
        cur.execute(
            "SELECT to_jsonb(v) FROM (SELECT id, kind, origin, seq, changes, seqs, keys, old_keys, detail, xid,"
            " commit_lsn, committed_at, noticed_at, acknowledged_at, acknowledged_by, note FROM"
            f" {quote(settings.namespace)}.violations WHERE %s OR acknowledged_at IS NULL ORDER BY id DESC LIMIT %s)"
            " AS v",
            (every, None if as_json else _SHOWN),
        )
        found: list[dict[str, Any]] = [row[0] for row in cur.fetchall()]
    if as_json:
        console.print_json(found)
        return
    for each in found:
        console.say(_in_words(each))
    if not found:
        console.say("there is none" if every else "there is none that is not acknowledged")


@takes_settings
def acknowledge(
    settings: Settings,
    *,
    upto: Annotated[
        int | None,
        typer.Option("--upto", metavar="ID", min=1, help="Only up to this one; all of now if not given."),
    ] = None,
    note: Annotated[str | None, typer.Option("--note", help="What they were, for who reads it later.")] = None,
    as_json: Json = False,
) -> None:
    """Take violations note of: they are no problem in `walstream status` any more, and ingest that halted goes on.

    Nothing is taken off the record. Your login and the note are kept beside them.
    """
    from psycopg2.errors import InsufficientPrivilege

    from walstream.config import quote
    from walstream.ledger.schema import ALARM_VERSION

    table = f"{quote(settings.namespace)}.violations"
    with installed(settings, "audit", ALARM_VERSION) as conn, conn.cursor() as cur:
        try:
            cur.execute(
                f"UPDATE {table} SET acknowledged_at = clock_timestamp(), acknowledged_by = session_user, note = %s"
                " WHERE acknowledged_at IS NULL AND (%s::bigint IS NULL OR id <= %s) RETURNING id",
                (note, upto, upto),
            )
        except InsufficientPrivilege as error:
            raise ConfigError(
                f"this login may not acknowledge violations: {error.diag.message_primary}",
                hint=f"as the owner of schema {quote(settings.namespace)}, or: GRANT SELECT, UPDATE ON {table} TO …",
            ) from error
        ids = sorted(int(row[0]) for row in cur.fetchall())
    if as_json:
        console.print_json({"acknowledged": len(ids), "upto": ids[-1] if ids else None})
    else:
        console.say(f"acknowledged: {len(ids):,}" + (f", up to {ids[-1]}" if ids else ""))


def _in_words(each: dict[str, Any]) -> str:
    when = each["committed_at"] or each["noticed_at"]
    row = "" if each["seq"] is None else f" seq {each['seq']}"
    many = "" if each["changes"] == 1 else f" {each['changes']:,} changes, seqs {each['seqs']}"
    who = f", xid {each['xid']}, LSN {each['commit_lsn']}" if each["xid"] else f", LSN {each['commit_lsn']}"
    done = f"; acknowledged by {each['acknowledged_by']}: {each['note'] or ''}" if each["acknowledged_at"] else ""
    return f"{each['id']}: {when} {each['kind']}{row}{many} ({each['detail'] or each['origin']}{who}){done}"
