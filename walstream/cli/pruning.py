"""``walstream jobs prune``: forget finished jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import typer

from walstream.errors import ConfigError

from . import console
from .options import Json, takes_settings
from .session import PATIENT, installed
from .shown import span

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    from psycopg2.extensions import connection as Connection

    from walstream.config import Settings

_FINISHED: Final = ("COMPLETED", "FAILED", "CANCELED")
_BATCH: Final = 10_000
_COUNT: Final = """
SELECT count(*) FROM $jobs AS j
 WHERE j.status = ANY (%s) AND coalesce(j.finished_at, j.updated_at) < clock_timestamp() - %s"""


@takes_settings
def prune(
    settings: Settings,
    *,
    older_than: Annotated[str, typer.Option(metavar="AGE", help="That ended so long ago: 90d, 12h (s, m, h, d).")],
    status: Annotated[
        list[str] | None,
        typer.Option(
            metavar="STATUS",
            help="COMPLETED if nothing is said, FAILED, or CANCELED. Can be repeated.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say how many there are, and change nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Forget finished jobs of some age, in many small transactions.

    Which event each came from is kept, so that no event ever gets a second job.
    """
    from psycopg2.errors import InsufficientPrivilege

    from walstream.config import quote
    from walstream.ledger.schema import PRUNING_VERSION

    age = span(older_than, "--older-than")
    statuses = list(dict.fromkeys(each.upper() for each in status or _FINISHED[:1]))
    if unknown := [each for each in statuses if each not in _FINISHED]:
        raise typer.BadParameter(f"{unknown[0]} is none of {', '.join(_FINISHED)}", param_hint="--status")
    with installed(settings, "jobs", PRUNING_VERSION, PATIENT) as conn:
        try:
            count = _old(conn, settings, age, statuses)
            if not dry_run:
                count = _prune(conn, settings, age, statuses, count)
        except InsufficientPrivilege as error:
            function = f"{quote(settings.namespace)}.prune_jobs"
            raise ConfigError(
                f"this login may not prune jobs: {str(error).strip()}",
                hint=f"run it as the owner of walstream's tables, or GRANT EXECUTE ON FUNCTION {function} TO the login",
            ) from error
    if as_json:
        console.print_json({"done": not dry_run, "jobs": count, "statuses": statuses, "seconds": age.total_seconds()})
    else:
        console.say(f"{'would be ' if dry_run else ''}forgotten: {count:,} jobs")


def _old(conn: Connection, settings: Settings, age: timedelta, statuses: Sequence[str]) -> int:
    from walstream.ledger.stored_rows import statement

    with conn.cursor() as cur:
        cur.execute(statement(settings, _COUNT), (list(statuses), age))
        row = cur.fetchone()
    assert row is not None
    return int(row[0])


def _prune(conn: Connection, settings: Settings, age: timedelta, statuses: Sequence[str], expected: int) -> int:
    """Prune batch by batch, each in a transaction of its own; return how many jobs were forgotten."""
    from walstream.ledger.stored_rows import statement

    from .progress import counting

    sql = statement(settings, "SELECT $namespace.prune_jobs(%s, %s::text[], %s)")
    done = 0
    with conn.cursor() as cur, counting("pruning", expected) as advance:
        while True:
            cur.execute(sql, (age, list(statuses), _BATCH))
            row = cur.fetchone()
            assert row is not None
            forgotten = int(row[0])
            done += forgotten
            advance(forgotten)
            if forgotten < _BATCH:
                return done
