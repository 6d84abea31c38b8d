"""``walstream jobs``: which there are and how they stand, and moving one by hand."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Final

import typer

from walstream.errors import ConfigError, ExitCode, JobRefused, LedgerError

from . import console
from .options import Json, takes_settings
from .pruning import prune
from .session import installed
from .shown import MOST, one_line, shortened

if TYPE_CHECKING:
    from datetime import datetime

    from psycopg2.extensions import connection as Connection

    from walstream.config import Settings
    from walstream.ledger.job import Job

Numbers = Annotated[list[int], typer.Argument(metavar="JOB…", help="Numbers of jobs.", min=1)]

_COLOURS: Final = {"FAILED": "red", "AWAITING_HUMAN": "yellow", "DELIVERED": "green", "IN_PROGRESS": "green"}
_COUNT: Final = """
SELECT j.status, count(*), greatest(0, extract(epoch FROM clock_timestamp() - min(j.updated_at)))::float8,
       count(*) FILTER (WHERE j.lease_expires_at < clock_timestamp())
  FROM $jobs AS j WHERE j.status IN ('SUBMITTED', 'DELIVERED', 'IN_PROGRESS', 'AWAITING_HUMAN') GROUP BY j.status"""


@dataclass(frozen=True)
class JobCount:
    """The unfinished jobs of one status.

    Attributes:
        oldest_seconds: for how long the first of them has had it.
        expired: how many of them have a lease that nobody renewed.
    """

    status: str
    count: int
    oldest_seconds: float
    expired: int


def register(app: typer.Typer) -> None:
    """Add the command and those below it."""
    group = typer.Typer(help="Jobs of agents.", no_args_is_help=True)
    group.command("list")(list_jobs)
    group.command()(show)
    group.command()(retry)
    group.command()(cancel)
    group.command()(prune)
    app.add_typer(group, name="jobs")


@takes_settings
def list_jobs(
    settings: Settings,
    *,
    status: Annotated[
        list[str] | None,
        typer.Option(metavar="STATUS", help="Only those with this status. Can be repeated.", show_default=False),
    ] = None,
    agent: Annotated[str | None, typer.Option(metavar="NAME", help="Only of this agent.", show_default=False)] = None,
    session: Annotated[str | None, typer.Option(metavar="ID", help="Only in this session.", show_default=False)] = None,
    limit: Annotated[int, typer.Option(min=1, max=MOST, metavar="N", help="How many at the most.")] = 20,
    as_json: Json = False,
) -> None:
    """List jobs, the newest first."""
    from walstream.ledger.job import STATUSES
    from walstream.ledger.jobs import Jobs
    from walstream.ledger.schema import JOBS_VERSION

    wanted = [each.upper() for each in status or ()]
    if unknown := [each for each in wanted if each not in STATUSES]:
        raise typer.BadParameter(f"{unknown[0]} is none of {', '.join(STATUSES)}", param_hint="--status")
    with installed(settings, "jobs", JOBS_VERSION) as conn:
        found = Jobs(settings).find(statuses=wanted or None, agent_id=agent, session_id=session, limit=limit, on=conn)
    if as_json:
        console.print_json([asdict(job) for job in found])
    elif not found:
        console.say("no job")
    else:
        _show(found)
        if len(found) == limit:
            console.note(f"the newest {limit} are shown; --limit shows more")


@takes_settings
def show(
    settings: Settings,
    job: Annotated[int, typer.Argument(metavar="JOB", help="The number of a job.", min=1)],
    *,
    as_json: Json = False,
) -> None:
    """Show all of a job: whose it is, where it came from, who has it, why it failed last."""
    from walstream.ledger.jobs import Jobs
    from walstream.ledger.schema import JOBS_VERSION

    with installed(settings, "jobs", JOBS_VERSION) as conn:
        found = Jobs(settings).get(job, on=conn)
    if as_json:
        console.print_json(asdict(found))
        return
    for name, value in asdict(found).items():
        if value is not None:
            console.say(f"{name:22} {_moment(value) if name.endswith(('_at', '_try')) else one_line(str(value))}")


@takes_settings
def retry(settings: Settings, jobs: Numbers, *, as_json: Json = False) -> None:
    """Submit jobs again that failed for good or were canceled. Their attempts begin anew.

    Exit code 1 if one of them is neither, or is not there.
    """
    from walstream.ledger.jobs import Jobs

    _move(settings, jobs, as_json, "submitted again", lambda job, conn: Jobs(settings).retry(job, on=conn))


@takes_settings
def cancel(
    settings: Settings,
    jobs: Numbers,
    *,
    reason: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Why, for whoever looks at the job later.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Cancel unfinished jobs. A worker that is at one can write nothing in its name from then on.

    Exit code 1 if one of them is finished, or is not there.
    """
    from walstream.ledger.jobs import Jobs

    _move(settings, jobs, as_json, "canceled", lambda job, conn: Jobs(settings).cancel(job, reason, on=conn))


def _move(
    settings: Settings, jobs: list[int], as_json: bool, done: str, move: Callable[[int, Connection], None]
) -> None:
    """Move each by itself: one that is refused keeps no other."""
    from walstream.ledger.jobs import Jobs
    from walstream.ledger.schema import JOBS_VERSION

    moved: list[int] = []
    refused: dict[int, str] = {}
    with installed(settings, "jobs", JOBS_VERSION) as conn:
        for job in dict.fromkeys(jobs):
            try:
                move(job, conn)
            except (JobRefused, LedgerError) as error:
                refused[job] = str(error)
            else:
                moved.append(job)
        if moved:
            with suppress(ConfigError):  # this login may not wake workers: they look by themselves
                Jobs(settings).wake(on=conn)
    if as_json:
        console.print_json({"jobs": moved, "refused": {str(job): why for job, why in refused.items()}})
    else:
        if moved:
            console.say(f"{done}: {', '.join(map(str, moved))}")
        for why in refused.values():
            console.note(why)
    if refused:
        raise typer.Exit(ExitCode.FAILED)


def count_jobs(conn: Connection, settings: Settings) -> tuple[JobCount, ...]:
    """The unfinished jobs by status, in the order of their lives; none where the schema has none yet, or this login may
    not see them.

    Args:
        conn: in autocommit.
    """
    from psycopg2.errors import InsufficientPrivilege, UndefinedColumn, UndefinedTable

    from walstream.ledger.job import STATUSES
    from walstream.ledger.schema import fill, names

    with conn.cursor() as cur:
        try:
            cur.execute(fill(_COUNT, names(settings)))
        except (InsufficientPrivilege, UndefinedColumn, UndefinedTable):
            return ()
        rows = cur.fetchall()
    return tuple(sorted((JobCount(*row) for row in rows), key=lambda each: STATUSES.index(each.status)))


def in_words(counts: tuple[JobCount, ...]) -> str:
    """The counts for a person."""
    from walstream.figures import duration

    return ", ".join(
        f"{each.count:,} {each.status} (the oldest for {duration(each.oldest_seconds)}"
        + (f", {each.expired:,} with an expired lease)" if each.expired else ")")
        for each in counts
    )


def _show(found: list[Job]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for title in ("job", "agent", "session", "event", "status", "attempt", "owner", "created", "error"):
        table.add_column(title, overflow="fold")  # cut off, a session could not be given to the next command
    for job in found:
        table.add_row(
            str(job.job_id),
            Text(one_line(job.agent_id or "")),
            Text(one_line(job.session_id)),
            str(job.event_seq or ""),
            Text(job.status, style=_COLOURS.get(job.status, "")),
            f"{job.attempts} of {job.max_delivery_attempts}",
            Text(one_line(job.lease_owner or "")),
            _moment(job.created_at),
            Text(shortened(job.error or "", 100)),
        )
    console.out().print(table)


def _moment(value: datetime | None) -> str:
    return "" if value is None else value.strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
