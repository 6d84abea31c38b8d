"""``walstream init``: tables, publication, then slot; as often as you like."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from walstream.errors import ConfigError

from . import console
from .options import Json, takes_settings
from .session import PATIENT, database

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

    from walstream.config import Settings
    from walstream.engine.birth import Born
    from walstream.ledger.partitions import PartitionBy

    from .plan import Plan

# `local`: a synchronous standby that is away must not hold set-up for ever; whatever is lost with the primary is made
# again by the next `walstream init`. `off` is not needed: what has to be quick commits rarely here.
_SESSION: Final = {**PATIENT, "default_transaction_isolation": "read committed", "synchronous_commit": "local"}

_SIZE: Final = re.compile(r"^[1-9][0-9]{0,8}(kB|MB|GB|TB)$")
"""A size as the server takes it (documentation, 20.1.1 "Parameter Names and Values"), so that it can be quoted."""


@dataclass(frozen=True)
class Wishes:
    """What a call asks for besides what is always done.

    Attributes:
        from_now: rows that stand in the table already are never events.
        slot_wal_keep: a size for ``max_slot_wal_keep_size``.
        grants: the role that is to run the stream; ``worker``: the one that is to append; ``approver``: the one that
            is to decide approvals; ``eraser``: the one that is to erase sessions.
        partition_by: how the ledger's table is partitioned, if it is made.
        append_only: nobody is to change rows of the ledger but by declaration.
        audit: the publication publishes every change of the ledger.
        wait: seconds that the slot may wait for open transactions.
    """

    from_now: bool
    slot_wal_keep: str | None
    grants: str | None
    worker: str | None
    approver: str | None
    eraser: str | None
    partition_by: PartitionBy | None
    append_only: bool
    audit: bool
    wait: float


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(init)


@takes_settings
def init(
    settings: Settings,
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what is missing, and change nothing.")] = False,
    sql: Annotated[
        bool,
        typer.Option("--sql", help="Print what is missing as a script for psql; without a database, everything."),
    ] = False,
    start: Annotated[
        str | None,
        typer.Option("--from", metavar="now", help="now: rows that stand in the table already are never events."),
    ] = None,
    slot_wal_keep: Annotated[
        str | None,
        typer.Option("--slot-wal-keep", metavar="SIZE", help="Set max_slot_wal_keep_size, such as 10GB."),
    ] = None,
    grants: Annotated[
        str | None, typer.Option("--grants", metavar="ROLE", help="Grant ROLE what `walstream run` needs.")
    ] = None,
    worker: Annotated[
        str | None,
        typer.Option(
            "--worker", metavar="ROLE", help="Grant ROLE what an agent's worker needs: appending and reading."
        ),
    ] = None,
    approver: Annotated[
        str | None, typer.Option("--approver", metavar="ROLE", help="Grant ROLE what who decides approvals needs.")
    ] = None,
    eraser: Annotated[
        str | None, typer.Option("--eraser", metavar="ROLE", help="Grant ROLE what who erases sessions needs.")
    ] = None,
    partition_by: Annotated[
        str | None,
        typer.Option(
            "--partition-by",
            metavar="month|hash:N",
            help="Make the ledger's table partitioned: by month of created_at, or by hash of session_id into N.",
        ),
    ] = None,
    append_only: Annotated[
        bool,
        typer.Option(
            "--append-only",
            help="Let nobody change or remove rows of the ledger, but `walstream erase` (privileges, trigger).",
        ),
    ] = False,
    audit: Annotated[
        bool,
        typer.Option(
            "--audit",
            help="Publish UPDATE, DELETE and TRUNCATE of the ledger as well, for the audit sink's tamper alarm; done by"
            " itself where the configuration has the sink.",
        ),
    ] = False,
    wait: Annotated[
        float,
        typer.Option(min=0, metavar="SECONDS", help="How long the slot may wait for transactions that are open."),
    ] = 60.0,
    _as_json: Json = False,
) -> None:
    """Set the stream up: walstream's own tables, the ledger's table, the publication, then the slot.

    What is there is kept and checked, and what cannot work is refused with the reason. It is safe to repeat, also after
    an attempt that was cut short, and it is what to run when a slot was lost: rows that were missed are found in the
    ledger.
    """
    if start not in (None, "now"):
        raise ConfigError(f"--from {start}: only `now` is known", hint="leave it out to make every row an event")
    if slot_wal_keep is not None and not _SIZE.match(slot_wal_keep):
        raise ConfigError(f"--slot-wal-keep {slot_wal_keep}: not a size", hint="a whole number and kB, MB, GB or TB")
    from walstream.ledger.partitions import PartitionBy

    from . import plan as planning

    by = None if partition_by is None else PartitionBy.parse(partition_by)
    wishes = Wishes(start == "now", slot_wal_keep, grants, worker, approver, eraser, by, append_only, audit, wait)
    if sql and not settings.dsn:
        _print_script(settings, planning.everything(settings, by, guard=append_only, audit=audit), wishes)
        return
    with database(settings, "init", _SESSION) as conn:
        if sql or dry_run:
            plan = planning.look(
                conn, settings, from_now=wishes.from_now, partition_by=by, guard=append_only, audit=audit
            )
            if sql:
                _print_script(settings, plan, wishes)
            else:
                _show(plan)
            return
        _set_up(settings, conn, wishes)


def _set_up(settings: Settings, conn: Connection, wishes: Wishes) -> None:
    from walstream.source.facts import UNBOUNDED, server_facts

    from . import failover, granting
    from .birth import bear
    from .progress import FillBar

    for role in (wishes.grants, wishes.worker, wishes.approver, wishes.eraser):
        if role is not None:
            granting.require_role(conn, role, streams=role == wishes.grants)  # before anything is made
    kept = None if wishes.slot_wal_keep is None else _keep_wal(conn, wishes.slot_wal_keep)
    plan = _run_steps(settings, conn, wishes)
    notes = list(plan.notes)
    if wishes.grants is not None:
        notes += [f"{wishes.grants} was granted what `walstream run` needs"]
        notes += granting.grant(settings, conn, wishes.grants)
    if wishes.worker is not None:
        granting.grant_worker(settings, conn, wishes.worker)
        notes.append(f"{wishes.worker} was granted what `walstream worker` needs")
    if wishes.approver is not None:
        granting.grant_approver(settings, conn, wishes.approver)
        notes.append(f"{wishes.approver} was granted what `walstream approvals` needs")
    if wishes.eraser is not None:
        notes.append(granting.grant_eraser(settings, conn, wishes.eraser))
    born = None
    if plan.birth:
        with FillBar() as bar:
            born = bear(settings, conn, from_now=wishes.from_now, timeout=wishes.wait, progress=bar)
    elif plan.failover is not None:
        notes.append(failover.change(settings, plan.failover))
    if kept is not None:
        notes.append(kept)
    elif server_facts(conn).slot_keep_bytes == UNBOUNDED and not settings.allow_unbounded_slot:
        from .provider import provider_of

        todo = provider_of(conn).set_parameter("max_slot_wal_keep_size", "10GB")
        notes.append(f"max_slot_wal_keep_size is -1, so `walstream run` will refuse to start; for example: {todo}")
    _report(settings, plan, born, notes)


def _run_steps(settings: Settings, conn: Connection, wishes: Wishes) -> Plan:
    """Run what is missing in one transaction: all of it or nothing."""
    from . import plan as planning
    from .changing import changes

    hint = (
        "hand the output of `walstream init --sql` to a DBA; or let the role create schemas (CREATE ON DATABASE), own"
        " the ledger's table, and replicate"
    )
    with changes(settings, conn, "init", hint) as cur:
        plan = planning.look(
            conn,
            settings,
            from_now=wishes.from_now,
            partition_by=wishes.partition_by,
            guard=wishes.append_only,
            audit=wishes.audit,
        )
        for step in plan.steps:
            for script in step.scripts:
                cur.execute(script)
        if plan.steps:
            planning.look(conn, settings)  # what was added to what was there has to work as a whole
    return plan


def _keep_wal(conn: Connection, size: str) -> str:
    """Set ``max_slot_wal_keep_size``; return what became of it."""
    import psycopg2
    from psycopg2.errors import InsufficientPrivilege

    from .provider import provider_of

    name = "max_slot_wal_keep_size"
    try:
        with conn.cursor() as cur:
            cur.execute(f"ALTER SYSTEM SET {name} = '{size}'")
            try:
                cur.execute("SELECT pg_catalog.pg_reload_conf()")
            except InsufficientPrivilege:  # the one can be granted without the other
                return f"{name} was set to {size}, and this role may not reload it. To do: SELECT pg_reload_conf();"
            # The reload reaches this session a moment later; the file that wins may be another one.
            for _ in range(50):
                cur.execute(
                    f"SELECT current_setting('{name}'), pg_size_bytes(current_setting('{name}')) ="
                    " pg_size_bytes(%s), pg_sleep(0.1)::text",
                    (size,),
                )
                row: Any = cur.fetchone()
                if row[1]:
                    return f"{name} is {row[0]} now"
    except InsufficientPrivilege:
        return f"this role may not set {name}. To do: {provider_of(conn).set_parameter(name, size)}"
    except psycopg2.errors.FeatureNotSupported as error:
        return f"{name} cannot be set over SQL here ({error.diag.message_primary}). To do:" + (
            f" {provider_of(conn).set_parameter(name, size)}"
        )
    return f"{name} was set to {size}, but the server still has {row[0]}: its command line or another file overrides it"


def _report(settings: Settings, plan: Plan, born: Born | None, notes: list[str]) -> None:
    if console.json_wanted():
        console.print_json(
            {
                "done": [step.what for step in plan.steps],
                "slot": None
                if born is None
                else {
                    "name": born.slot,
                    "made_because": plan.birth,
                    "filled": born.filled.events,
                    "floor_seq": born.floor_seq,
                },
                "notes": notes,
            }
        )
        return
    for step in plan.steps:
        console.say(f"made: {step.what}")
    if born is not None:
        floor = f"; rows up to seq {born.floor_seq} are not events" if born.floor_seq is not None else ""
        events = born.filled.events
        filled = f"; {events:,} rows that stood in the table are ordered" if events else ""
        console.say(f"made: slot {born.slot} ({plan.birth}){filled}{floor}")
    if not plan.steps and born is None:
        console.say("everything is there already")
    for note in notes:
        console.say(f"note: {note}")
    console.say(f"the stream of {settings.ledger.qualified} is ready: walstream run")


def _show(plan: Plan) -> None:
    if console.json_wanted():
        console.print_json(
            {
                "steps": [{"what": step.what, "sql": list(step.scripts)} for step in plan.steps],
                "slot": plan.birth or None,
                "notes": list(plan.notes),
            }
        )
        return
    for step in plan.steps:
        console.say(f"would make: {step.what}")
        for script in step.scripts:
            console.say("    " + script.strip().replace("\n", "\n    "))
    if plan.birth:
        console.say(f"would make: the slot ({plan.birth}), after ordering the rows that stand in the table")
    if plan.failover is not None:
        console.say(f"would {'let' if plan.failover else 'no longer let'} standbys keep a copy of the slot")
    if not plan.steps and not plan.birth and plan.failover is None:
        console.say("everything is there already")
    for note in plan.notes:
        console.say(f"note: {note}")


def _print_script(settings: Settings, plan: Plan, wishes: Wishes) -> None:
    from walstream.ledger.grants import approver_statements, eraser_statements, grant_statements, worker_statements

    from .plan import slot_scripts

    parts: list[tuple[str, list[str]]] = []
    if wishes.slot_wal_keep is not None:
        statement = f"ALTER SYSTEM SET max_slot_wal_keep_size = '{wishes.slot_wal_keep}';"
        parts.append(
            ("How much WAL slots may keep, for the whole server", [statement, "SELECT pg_catalog.pg_reload_conf();"])
        )
    if plan.steps:
        scripts = ["BEGIN;"]
        for step in plan.steps:
            scripts += [_comment(step.what), *step.scripts]
        parts.append(("Tables and publication", [*scripts, "COMMIT;"]))
    if wishes.grants is not None:
        parts.append((f"What {wishes.grants!r} needs for `walstream run`", grant_statements(settings, wishes.grants)))
    if wishes.worker is not None:
        parts.append((f"What {wishes.worker!r} needs to append", worker_statements(settings, wishes.worker)))
    if wishes.approver is not None:
        parts.append((f"What {wishes.approver!r} needs to decide", approver_statements(settings, wishes.approver)))
    if wishes.eraser is not None:
        parts.append((f"What {wishes.eraser!r} needs to erase sessions", eraser_statements(settings, wishes.eraser)))
    if plan.birth:
        parts.append((_SLOT_NOTE, slot_scripts(settings, plan, from_now=wishes.from_now)))
    if console.json_wanted():
        console.print_json({"sql": [script for _, scripts in parts for script in scripts if _has_a_statement(script)]})
        return
    if not parts:
        console.say(_comment("everything is there already"))
        return
    console.say(_comment(_SCRIPT_NOTE))
    for title, scripts in parts:
        console.say(f"\n{_comment(title)}")
        for script in scripts:
            console.say(script)


_SCRIPT_NOTE: Final = """\
Set-up of a walstream stream. Run it with psql -v ON_ERROR_STOP=1 -f FILE, as a role that may create schemas and
publications here, owns the ledger's table, and may replicate. Not with --single-transaction: a slot cannot be made in
a transaction that has written."""

_SLOT_NOTE: Final = """\
The slot, after the publication: decoding knows no publication that is younger than the slot.
Its creation waits for every open transaction of the server; should it give up, run this part again.
Rows that stand in the table by then are found by `walstream run` at its first start, and ordered by their seq, flagged
`recovered`. (`walstream init` itself orders them before the slot exists, which holds no WAL meanwhile.)"""


def _has_a_statement(script: str) -> bool:
    """Whether it is more than a comment. Migrations begin with one, so the first line does not tell."""
    return any(line.strip() and not line.lstrip().startswith("--") for line in script.splitlines())


def _comment(text: str) -> str:
    """``text`` as an SQL comment. A line break in a name must not end it."""
    return "\n".join(f"-- {line}" for line in text.splitlines())
