"""``walstream handoffs``: those that the router could not route, and routing them again."""

from __future__ import annotations

from contextlib import closing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from walstream.errors import ConfigError, ExitCode, RowMissing

from . import console
from .options import Json, takes_settings
from .session import installed

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

    from walstream.config import Settings
    from walstream.event import Event
    from walstream.projectors.handoff_router import HandoffRouter, Routed

_LARGEST: Final = 2**31  # bytes of one event: a single row comes whatever its size

# A handoff has a job when somebody else has routed it since: another router, or a person.
_OPEN: Final = """
  FROM $namespace.dead_letters AS d
 WHERE d.rerouted_at IS NULL AND NOT EXISTS (SELECT FROM $jobs AS j WHERE j.event_seq = d.event_seq)
   AND (%(session)s::text IS NULL OR d.session_id = %(session)s)"""
_COUNT: Final = f"SELECT count(*) {_OPEN}"
_LIST: Final = f"""
SELECT d.event_seq, d.session_id, d.reason, d.created_at,
       greatest(0, extract(epoch FROM clock_timestamp() - d.created_at))::float8
{_OPEN} ORDER BY d.created_at, d.event_seq LIMIT %(limit)s"""


@dataclass(frozen=True)
class _Ready:
    """A dead letter that is to be routed again: its event, or why there is none."""

    seq: int
    event: Event | None
    reason: str


def register(app: typer.Typer) -> None:
    """Add the command and those below it."""
    group = typer.Typer(help="Handoffs that could not be routed.", no_args_is_help=True)
    group.command()(dead)
    group.command()(reroute)
    app.add_typer(group, name="handoffs")


@takes_settings
def dead(
    settings: Settings,
    *,
    session: Annotated[str | None, typer.Option(metavar="ID", help="Only of this session.", show_default=False)] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many at the most, oldest first.", metavar="N")] = 100,
    as_json: Json = False,
) -> None:
    """List the handoffs that nobody got: each with the reason why the router had no way for it."""
    from walstream.ledger.schema import JOBS_VERSION
    from walstream.ledger.stored_rows import statement

    values = {"session": session, "limit": limit}
    with installed(settings, "handoffs", JOBS_VERSION) as conn, conn.cursor() as cur:
        cur.execute(statement(settings, _COUNT), values)
        (count,) = cur.fetchone() or (0,)
        cur.execute(statement(settings, _LIST), values)
        rows = cur.fetchall()
    if as_json:
        columns = ("event_seq", "session_id", "reason", "created_at", "age")
        console.print_json({"dead": count, "letters": [dict(zip(columns, row, strict=True)) for row in rows]})
    elif not rows:
        console.say("no handoff is waiting for a way")
    else:
        _show(rows)
        more = f"; the oldest {len(rows)} are shown" if len(rows) < count else ""
        console.say(f"handoffs without a job: {count}{more}")


def count_dead(conn: Connection, settings: Settings) -> int:
    """How many `dead` lists; none where the schema has no jobs yet, or this login may not see them.

    Args:
        conn: in autocommit.
    """
    from psycopg2.errors import InsufficientPrivilege, UndefinedColumn, UndefinedTable

    from walstream.ledger.stored_rows import statement

    with conn.cursor() as cur:
        try:
            cur.execute(statement(settings, _COUNT), {"session": None})
        except (InsufficientPrivilege, UndefinedColumn, UndefinedTable):
            return 0
        (count,) = cur.fetchone() or (0,)
    return int(count)


def _show(rows: list[tuple[Any, ...]]) -> None:
    from rich.table import Table
    from rich.text import Text

    from walstream.figures import duration

    table = Table()
    for title in ("seq", "session", "since", "reason"):
        table.add_column(title, overflow="fold")  # cut off, a session could not be given to the next command
    for seq, session_id, reason, _at, age in rows:
        table.add_row(*(Text(cell) for cell in (str(seq), session_id, duration(age), reason)))
    console.out().print(table)


@takes_settings
def reroute(
    settings: Settings,
    seqs: Annotated[
        list[int] | None, typer.Argument(metavar="[SEQ…]", help="Their events, as `dead` shows them.")
    ] = None,
    *,
    every: Annotated[bool, typer.Option("--all", help="All that `dead` lists.")] = False,
    session: Annotated[
        str | None, typer.Option(metavar="ID", help="With --all: only of this session.", show_default=False)
    ] = None,
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="AGENT", help="Who gets them, whatever the rules say.", show_default=False),
    ] = None,
    stream: Annotated[
        str | None,
        typer.Option(
            "--stream",
            metavar="TARGET",
            help="The stream that has the router, as package.module:name, as for `run`; else the configuration's.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Route dead handoffs again: by the rules as they are now, or to an agent of your choice.

    Each is a transaction of its own. With --to, the limit on hops is no obstacle, and they are counted anew from there.
    Exit code 1 if one of them still has no way.
    """
    from walstream.ledger.identity import check_identity
    from walstream.ledger.schema import JOBS_VERSION

    if every == bool(seqs):
        raise ConfigError("which handoffs?", hint="name their seqs, as `walstream handoffs dead` shows them, or --all")
    _check_agent(to)
    settings, router = _router(settings, stream, needed=to is None)
    with installed(settings, "handoffs", JOBS_VERSION) as conn:
        prefix = check_identity(conn, settings).key_prefix
        wanted = list(dict.fromkeys(seqs or _open_letters(conn, settings, session)))
        ready = [_event(conn, settings, prefix, seq) for seq in wanted]
        conn.autocommit = False
        outcomes = [_route(conn, settings, router, each, to) for each in ready]
        conn.autocommit = True
        _wake(conn, settings, {outcome.agent for outcome in outcomes if outcome.created and outcome.agent})
    if as_json:
        console.print_json({"handoffs": [_document(outcome) for outcome in outcomes]})
    else:
        for outcome in outcomes:
            console.say(_told(outcome))
        if not outcomes:
            console.say("no handoff is waiting for a way")
    if any(outcome.job_id is None for outcome in outcomes):
        raise typer.Exit(ExitCode.FAILED)


def _check_agent(to: str | None) -> None:
    from walstream.projectors.handoff_router import Unroutable, agent_name

    if to is None:
        return
    try:
        agent_name(to)
    except Unroutable as error:
        raise ConfigError(f"--to: {error}") from error


def _router(settings: Settings, target: str | None, *, needed: bool) -> tuple[Settings, HandoffRouter]:
    """The router whose rules count, and the settings that its stream makes of ours.

    Raises:
        ConfigError: neither the target nor the configuration has one.
    """
    from walstream.plugins import configured_projectors, load_target
    from walstream.projectors.handoff_router import HandoffRouter

    brought: tuple[Any, ...] = ()
    if target is not None:
        stream = load_target(target)
        settings = stream.settings(settings.model_dump(exclude_unset=True))
        brought = tuple(stream.projectors)
    for projector in (*brought, *configured_projectors(_only_router(settings), beside=brought)):
        if isinstance(projector, HandoffRouter):
            return settings, projector
    if needed:
        raise ConfigError(
            f"there is no handoff router in {target or 'the configuration'}, so there are no rules to route by",
            hint="name the stream that has it (--stream package.module:name), or who gets them (--to AGENT)",
        )
    return settings, HandoffRouter()


def _only_router(settings: Settings) -> Settings:
    """Settings without the projectors that need not be made here: one may open a file as it is made."""
    from walstream.projectors.handoff_router import HandoffRouter

    name = HandoffRouter.name
    mine = {name: settings.projectors[name]} if name in settings.projectors else {}
    return settings.model_copy(update={"projectors": mine})


def _open_letters(conn: Connection, settings: Settings, session: str | None) -> list[int]:
    from walstream.ledger.stored_rows import statement

    with conn.cursor() as cur:
        cur.execute(
            statement(settings, f"SELECT d.event_seq {_OPEN} ORDER BY d.created_at, d.event_seq"), {"session": session}
        )
        return [int(seq) for (seq,) in cur.fetchall()]


def _event(conn: Connection, settings: Settings, key_prefix: str, seq: int) -> _Ready:
    """The event of a dead letter, as the router would get it."""
    from walstream.order.reader import ColdReader

    reader = ColdReader(conn, settings.namespace, settings.ledger, key_prefix)
    offset = reader.offset_of(seq)
    if offset is None:
        return _Ready(seq, None, "it has no place in the order of commits")
    try:
        events = reader.read(offset - 1, 1, _LARGEST).events
    except RowMissing as error:
        return _Ready(seq, None, str(error))
    if not events or events[0].seq != seq:
        return _Ready(seq, None, "its event was erased")
    return _Ready(seq, events[0], "")


def _route(conn: Connection, settings: Settings, router: HandoffRouter, ready: _Ready, to: str | None) -> Routed:
    """Route one of them in a transaction of its own."""
    from walstream.config import quote
    from walstream.engine.context import Context
    from walstream.projectors.handoff_router import Routed

    if ready.event is None:
        return Routed(ready.seq, reason=ready.reason)
    with conn, closing(conn.cursor()) as cur:
        # Two people at once: the second waits here, and finds the job that the first has made.
        cur.execute(
            f"SELECT rerouted_at FROM {quote(settings.namespace)}.dead_letters WHERE event_seq = %s FOR UPDATE",
            (ready.seq,),
        )
        if cur.fetchone() is None:
            return Routed(ready.seq, reason="it is no dead letter")
        return router.route(ready.event, Context(router.name, connection=conn, settings=settings), to=to)


def _wake(conn: Connection, settings: Settings, agents: set[str]) -> None:
    """Wake the workers that have got a job, after it committed."""
    from walstream.ledger.jobs import Jobs

    with suppress(ConfigError):  # this login may not: they look by themselves
        for agent in sorted(agents):
            Jobs(settings).wake(agent, on=conn)


def _document(outcome: Routed) -> dict[str, Any]:
    return {
        "event_seq": outcome.event_seq,
        "agent": outcome.agent,
        "job_id": outcome.job_id,
        "created": outcome.created,
        "reason": outcome.reason,
    }


def _told(outcome: Routed) -> str:
    if outcome.job_id is None:
        return f"seq {outcome.event_seq}: {outcome.reason}"
    if outcome.agent is None:
        return f"seq {outcome.event_seq}: has job {outcome.job_id} already"
    return f"seq {outcome.event_seq}: job {outcome.job_id} for {outcome.agent}"
