"""``walstream partitions``: what the ledger is cut into, and its next months made ahead of time."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from walstream.errors import ConfigError, ExitCode, Unavailable

from . import console
from .options import Json, takes_settings
from .session import PATIENT, database

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection
    from psycopg2.extensions import cursor as Cursor

    from walstream.config import Settings
    from walstream.ledger.partition_layout import Layout

LOCK_TIMEOUT: Final = "2s"
"""Attaching a partition waits for who uses the default one, and makes everybody wait who comes to that meanwhile."""

_ATTEMPTS: Final = 5
_PAUSE: Final = 1.0


@dataclass
class Outcome:
    """What became of the months that were asked for.

    Attributes:
        made: names of partitions that were made (or would be).
        scripts: SQL for each month that is missing, whether it was run or not.
        held: months that stand in the default partition, with the number of rows there; nothing was done about them.
        partly: months that other partitions cover in part, with their names.
    """

    made: list[str] = field(default_factory=list)
    scripts: dict[str, list[str]] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)
    partly: dict[str, list[str]] = field(default_factory=dict)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(partitions)


@takes_settings
def partitions(
    settings: Settings,
    *,
    ahead: Annotated[
        int | None,
        typer.Option(min=0, max=120, metavar="N", help="Make this month's partition and those of the next N months."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say which would be made, and change nothing.")] = False,
    sql: Annotated[bool, typer.Option("--sql", help="Print what is missing as a script for psql.")] = False,
    as_json: Json = False,
) -> None:
    """List the ledger's partitions, or (--ahead) make those of the next months.

    Meant for cron: `walstream partitions --ahead 3` does nothing where nothing is missing, any number of them may run
    at once, and none waits for a lock for more than a moment. Months are months in UTC. Exit code 1: a month could not
    be made, because rows of it stand in the default partition; the output says how they are moved.
    """
    from walstream.ledger import partitions as ledger_partitions

    options = {**PATIENT, "lock_timeout": LOCK_TIMEOUT}
    wanted = ahead
    if wanted is None and (dry_run or sql):
        wanted = ledger_partitions.AHEAD
    with database(settings, "partitions", options) as conn:
        with conn.cursor() as cur:
            layout = _layout(cur, settings, wanted)
        outcome = Outcome()
        if wanted is not None:
            outcome = _make(settings, conn, wanted, pretend=dry_run or sql)
        if outcome.made and not (dry_run or sql):
            with conn.cursor() as cur:
                layout = _layout(cur, settings, wanted)
    if sql and not as_json:
        _print_script(outcome)
        return
    if as_json:
        console.print_json(_document(layout, outcome, pretended=dry_run or sql))
    else:
        _show(settings, layout, outcome, wanted, pretended=dry_run)
    if outcome.held or outcome.partly:
        raise typer.Exit(ExitCode.FAILED)


def _layout(cur: Cursor, settings: Settings, ahead: int | None) -> Layout:
    """How the ledger is partitioned.

    Raises:
        ConfigError: it is not, or there is nothing to make ahead.
    """
    from walstream.ledger.partition_layout import look

    ledger = settings.ledger
    layout = look(cur, ledger)
    if layout is None:
        cur.execute("SELECT pg_catalog.to_regclass(%s) IS NULL", (ledger.qualified,))
        row: Any = cur.fetchone()
        if row[0]:
            raise ConfigError(f"there is no table {ledger.qualified}", hint="run `walstream init --partition-by month`")
        raise ConfigError(
            f"{ledger.qualified} is not partitioned", hint="docs/ledger.md (Partitions) says how a table is converted"
        )
    if ahead is not None and not layout.by_time:
        raise ConfigError(
            f"{ledger.qualified} is partitioned by {_how(layout)}, so there are no months to make",
            hint=f"only what is partitioned by range of {ledger.columns.created_at} alone has months",
        )
    return layout


def _make(settings: Settings, conn: Connection, ahead: int, *, pretend: bool) -> Outcome:
    """Make what is missing, each month in a transaction of its own.

    Raises:
        ConfigError: this role may not, or another table has the name.
        Unavailable: the default partition is in use for too long, or another table-changing session is at work.
    """
    import psycopg2
    from psycopg2.errorcodes import CHECK_VIOLATION, DEADLOCK_DETECTED, LOCK_NOT_AVAILABLE

    outcome = Outcome()
    failures = 0
    while True:
        try:
            if _next(settings, conn, ahead, outcome, pretend=pretend):
                return outcome
        except psycopg2.Error as error:
            # A row of that month came into the default partition a moment ago: it is counted at the next attempt.
            if error.pgcode not in (LOCK_NOT_AVAILABLE, DEADLOCK_DETECTED, CHECK_VIOLATION):
                raise _in_words(settings, error) from error
            failures += 1
            if failures == _ATTEMPTS:
                from .changing import lock_holders

                holders = lock_holders(conn, settings, partitions=True)
                raise Unavailable(
                    f"a partition could not be attached in {_ATTEMPTS} attempts of {LOCK_TIMEOUT}; in the way:"
                    f" {'; '.join(holders) or 'sessions that have gone meanwhile'}",
                    hint="run it again; `walstream partitions` leaves nothing half done",
                ) from error
            time.sleep(_PAUSE)


def _next(settings: Settings, conn: Connection, ahead: int, outcome: Outcome, *, pretend: bool) -> bool:
    """Make the first month that is missing; whether nothing is left to make."""
    from walstream.ledger import schema

    conn.autocommit = False
    try:
        with conn, conn.cursor() as cur:
            if not pretend:
                schema.line_up(cur, settings.namespace)
            found = _first_missing(cur, settings, ahead, outcome)
            if found is None:
                return True
            name, statements = found
            if not pretend:
                _require_free(cur, settings, name)
                for statement in statements:
                    cur.execute(statement)
        outcome.made.append(name)
        return False
    finally:
        conn.autocommit = True


def _first_missing(cur: Cursor, settings: Settings, ahead: int, outcome: Outcome) -> tuple[str, list[str]] | None:
    """The name of the first partition that is to be made, and how; notes what stands in the way of others."""
    from walstream.ledger import append_only, partition_layout
    from walstream.ledger import partitions as ledger_partitions

    ledger = settings.ledger
    layout = _layout(cur, settings, ahead)
    guarded = append_only.standing(cur, settings).asked
    guard = [append_only.statement(settings)] if guarded else []  # what is new, or was lifted, is guarded as the rest
    cur.execute("SELECT current_user::text")
    row: Any = cur.fetchone()
    owner = None if layout.owner == row[0] else layout.owner
    missing, partly = partition_layout.missing_months(cur, layout, ahead)
    outcome.partly = {str(month): names for month, names in partly.items()}
    for month in missing:
        name = ledger_partitions.month_name(ledger, month)
        if name in outcome.made or str(month) in outcome.held:
            continue
        default = layout.default
        rows = 0 if default is None else partition_layout.rows_in_default(cur, ledger, default, month)
        if default is None or not rows:
            hold = default is not None and month.first == layout.present.replace(day=1)
            attach = ledger_partitions.attach_statements(ledger, month, owner, hold_writers=hold)
            outcome.scripts[str(month)] = attach + guard
            return name, outcome.scripts[str(month)]
        columns = _stored_columns(cur, settings)
        refresh = ledger_partitions.refresh_statements(cur, settings.publication)
        outcome.held[str(month)] = rows
        lift = append_only.lift_statement(settings, default.name) if guarded else None
        moved = ledger_partitions.move_statements(ledger, month, default, columns, owner, refresh, lift)
        outcome.scripts[str(month)] = moved + guard
    return None


def _require_free(cur: Cursor, settings: Settings, name: str) -> None:
    cur.execute("SELECT pg_catalog.to_regclass(%s) IS NOT NULL", (name,))
    row: Any = cur.fetchone()
    if row[0]:
        raise ConfigError(
            f"{name} is there already, and is no partition of {settings.ledger.qualified} for its month",
            hint="rename it; or, if it was detached and is to come back, attach it (docs/ledger.md, Partitions)",
        )


def _stored_columns(cur: Cursor, settings: Settings) -> tuple[str, ...]:
    cur.execute(
        "SELECT attname::text FROM pg_catalog.pg_attribute WHERE attrelid = pg_catalog.to_regclass(%s)"
        " AND attnum > 0 AND NOT attisdropped AND attgenerated = '' ORDER BY attnum",
        (settings.ledger.qualified,),
    )
    return tuple(name for (name,) in cur.fetchall())


def _in_words(settings: Settings, error: Exception) -> Exception:
    from psycopg2.errors import InsufficientPrivilege

    if isinstance(error, InsufficientPrivilege):
        return ConfigError(
            f"this role may not make partitions: {error.diag.message_primary}",
            hint=f"run it as the owner of {settings.ledger.qualified}, who also needs CREATE on its schema; or hand the"
            " output of `walstream partitions --sql` to a DBA",
        )
    return error


def _how(layout: Layout) -> str:
    return f"{layout.strategy} ({', '.join(column or 'an expression' for column in layout.key)})"


def _until(layout: Layout) -> str | None:
    """Up to when there are partitions, as text; ``None`` if nothing says."""
    from datetime import UTC, datetime

    until = layout.prepared_until()
    if until is None:
        return None
    try:
        return f"{datetime.fromtimestamp(until, UTC):%Y-%m-%d %H:%M:%S+00}"
    except (OverflowError, ValueError, OSError):  # an open end, or a year that datetime does not have
        return "infinity"


def _document(layout: Layout, outcome: Outcome, *, pretended: bool) -> dict[str, Any]:
    return {
        "by": _how(layout),
        "prepared_until": _until(layout),
        "partitions": [
            {"name": each.name, "bounds": each.bounds, "default": each.default, "rows": each.rows, "bytes": each.nbytes}
            for each in layout.partitions
        ],
        "made": [] if pretended else outcome.made,
        "would_make": outcome.made if pretended else [],
        "held": [
            {"month": month, "rows": rows, "sql": ["BEGIN;", *outcome.scripts[month], "COMMIT;"]}
            for month, rows in outcome.held.items()
        ],
        "partly": [{"month": month, "partitions": names} for month, names in outcome.partly.items()],
        "sql": [script for month, scripts in outcome.scripts.items() if month not in outcome.held for script in scripts]
        if pretended
        else [],
    }


def _show(settings: Settings, layout: Layout, outcome: Outcome, ahead: int | None, *, pretended: bool) -> None:
    if ahead is None:
        _list(settings, layout)
        return
    for name in outcome.made:
        console.say(f"{'would make' if pretended else 'made'}: {name}")
    if not (outcome.made or outcome.held or outcome.partly):
        console.say("every month that was asked for is there")
    for month, names in outcome.partly.items():
        console.say(f"not made: {month} is covered in part by {', '.join(names)}")
    for month, rows in outcome.held.items():
        console.say(
            f"not made: {month}, because {rows:,} rows of it stand in the default partition. This moves them, unseen by"
            " the stream; who appends waits meanwhile:"
        )
        for statement in ("BEGIN;", *outcome.scripts[month], "COMMIT;"):
            console.say("    " + statement.replace("\n", "\n    "))


def _list(settings: Settings, layout: Layout) -> None:
    from rich.table import Table
    from rich.text import Text

    from walstream.figures import size

    table = Table("partition", "bounds", title=f"{settings.ledger.qualified} by {_how(layout)}", title_justify="left")
    table.add_column("rows (estimate)", justify="right")
    table.add_column("size", justify="right")
    for each in layout.partitions:
        rows = "unknown" if each.rows is None else f"{each.rows:,}"
        table.add_row(Text(each.name), Text(each.bounds), rows, size(each.nbytes))
    console.out().print(table)
    if layout.by_time and not layout.month_is_prepared:
        console.say("less than a month is prepared: walstream partitions --ahead 3")


def _print_script(outcome: Outcome) -> None:
    if not outcome.scripts:
        console.say("-- every month that was asked for is there")
        return
    console.say("-- Makes partitions of the ledger. Run it with psql -v ON_ERROR_STOP=1 -f FILE, as its owner.")
    console.say(f"SET lock_timeout = '{LOCK_TIMEOUT}';")
    for month, scripts in outcome.scripts.items():
        if month in outcome.held:
            console.say(f"-- {outcome.held[month]:,} rows of {month} stand in the default partition: they are moved.")
        for statement in ("BEGIN;", *scripts, "COMMIT;"):
            console.say(statement)
