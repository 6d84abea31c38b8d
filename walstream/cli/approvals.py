"""``walstream approvals``: what agents ask a person, and the answers."""

from __future__ import annotations

import getpass
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from walstream.errors import ConfigError, PayloadError

from . import console
from .editor import edited
from .options import Json, takes_settings
from .session import installed
from .shown import MOST, lines, one_line, shortened

if TYPE_CHECKING:
    from datetime import datetime

    from psycopg2.extensions import connection as Connection

    from walstream.config import Settings
    from walstream.ledger.approvals import Approval

Request = Annotated[int, typer.Argument(metavar="SEQ", help="The number of a request.", min=1)]
By = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Who decides; the user of this login if not given.", show_default=False),
]
Reason = Annotated[str | None, typer.Option(metavar="TEXT", help="Why, for the agent.", show_default=False)]

_SHORT: Final = 100  # characters of an action
_COUNT: Final = """
SELECT count(*), extract(epoch FROM clock_timestamp() - min(a.requested_at))::float8
  FROM $namespace.approvals AS a JOIN $jobs AS j ON j.job_id = a.job_id WHERE """


@dataclass(frozen=True)
class OpenApprovals:
    """What waits for a person's decision.

    Attributes:
        oldest_seconds: for how long the first of them has; ``None`` if there is none.
    """

    count: int = 0
    oldest_seconds: float | None = None


def register(app: typer.Typer) -> None:
    """Add the command and those below it."""
    group = typer.Typer(help="What agents ask a person.", no_args_is_help=True)
    group.command("list")(list_approvals)
    group.command()(show)
    group.command()(approve)
    group.command()(edit)
    group.command()(reject)
    app.add_typer(group, name="approvals")


@takes_settings
def list_approvals(
    settings: Settings,
    *,
    agent: Annotated[str | None, typer.Option(metavar="NAME", help="Only of this agent.", show_default=False)] = None,
    session: Annotated[str | None, typer.Option(metavar="ID", help="Only in this session.", show_default=False)] = None,
    limit: Annotated[int, typer.Option(min=1, max=MOST, metavar="N", help="How many at the most.")] = 20,
    as_json: Json = False,
) -> None:
    """List what waits for a decision, the oldest first."""
    from walstream.ledger.approvals import Approvals
    from walstream.ledger.schema import APPROVALS_VERSION

    with installed(settings, "approvals", APPROVALS_VERSION) as conn:
        found = Approvals(settings).open(agent_id=agent, session_id=session, limit=limit, on=conn)
    if as_json:
        console.print_json([_document(approval) for approval in found])
    elif not found:
        console.say("nothing waits for a decision")
    else:
        _show(found)
        if len(found) == limit:
            console.note(f"the oldest {limit} are shown; --limit shows more")


@takes_settings
def show(settings: Settings, request: Request, *, as_json: Json = False) -> None:
    """Show all of a request: who asks, for what, and what was decided."""
    from walstream.ledger.approvals import Approvals
    from walstream.ledger.schema import APPROVALS_VERSION

    with installed(settings, "approvals", APPROVALS_VERSION) as conn:
        found = Approvals(settings).get(request, on=conn)
        if as_json:
            console.print_json(_document(found))
            return
        console.say(f"{'status':16} {standing(found)}")
        for name, value in asdict(found).items():
            if value is None or name in ("is_open", "decision"):
                continue
            if name in ("action", "edit"):
                value = "\n                 ".join(lines(_pretty(conn, value)).split("\n"))
            elif name == "deadline" or name.endswith("_at"):
                value = _moment(value)
            else:
                value = one_line(str(value))
            console.say(f"{name:16} {value}")


@takes_settings
def approve(
    settings: Settings, request: Request, *, by: By = None, reason: Reason = None, as_json: Json = False
) -> None:
    """Grant what a request asks for, as it stands. Its job goes on at once.

    Exit code 1 if it was decided already, its job waits for it no longer, or its deadline has passed.
    """
    _decide(settings, request, by, as_json, granted=True, reason=reason)


@takes_settings
def reject(
    settings: Settings, request: Request, *, by: By = None, reason: Reason = None, as_json: Json = False
) -> None:
    """Reject it. Its job goes on at once, and its agent knows.

    Exit code 1 if it was decided already, its job waits for it no longer, or its deadline has passed.
    """
    _decide(settings, request, by, as_json, granted=False, reason=reason)


@takes_settings
def edit(
    settings: Settings,
    request: Request,
    *,
    file: Annotated[
        str | None, typer.Option("--edit", metavar="FILE", help="JSON in a file, or - for standard input.")
    ] = None,
    text: Annotated[str | None, typer.Option("--json-edit", metavar="JSON", help="The JSON itself.")] = None,
    by: By = None,
    reason: Reason = None,
    as_json: Json = False,
) -> None:
    """Grant another action than the one that was asked for.

    Without --edit or --json-edit the action opens in the editor ($VISUAL, $EDITOR), and what is saved there is granted.
    Exit code 1 if it was decided already, its job waits for it no longer, or its deadline has passed.
    """
    if file is not None and text is not None:
        raise typer.BadParameter("give one of --edit and --json-edit", param_hint="--edit")
    if text is None and file is None:
        if not person_is_there():
            raise ConfigError("an edit is needed, and nobody is there to write it", hint="--edit FILE, or --edit -")
        text = _in_the_editor(settings, request)
    elif file is not None:
        text = sys.stdin.read() if file == "-" else _read(file)
    assert text is not None
    _decide(settings, request, by, as_json, granted=True, reason=reason, instead=_parsed(text))


def _decide(
    settings: Settings,
    request: int,
    by: str | None,
    as_json: bool,
    *,
    granted: bool,
    reason: str | None,
    instead: Any = None,
) -> None:
    from walstream.ledger.approvals import Approvals
    from walstream.ledger.jobs import Jobs
    from walstream.ledger.schema import APPROVALS_VERSION

    who = _who() if by is None else by
    approvals = Approvals(settings)
    with installed(settings, "approvals", APPROVALS_VERSION) as conn:
        asked = approvals.get(request, on=conn)
        if granted:
            seq = approvals.approve(request, by=who, edit=instead, reason=reason, on=conn)
        else:
            seq = approvals.reject(request, by=who, reason=reason, on=conn)
        Jobs(settings).wake(asked.agent_id, on=conn)  # the decision has committed: each statement is a transaction here
    decision = "granted" if granted else "rejected"
    if as_json:
        console.print_json(
            {"request_seq": request, "decision": decision, "decision_seq": seq, "job_id": asked.job_id, "by": who}
        )
    else:
        words = f"{decision} with an edit" if instead is not None else decision
        console.say(f"{words}: request {request} of {one_line(asked.agent_id)}; job {asked.job_id} goes on")


def person_is_there() -> bool:
    """Whether somebody can answer an editor."""
    return sys.stdin.isatty() and not console.json_wanted()


def _who() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        raise typer.BadParameter("this login's user has no name: say who decides", param_hint="--by") from None


def _read(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error


def _parsed(text: str) -> Any:
    from walstream.event import parse_payload

    try:
        value = parse_payload(text.encode())
    except PayloadError as error:
        raise PayloadError(f"the edit is not JSON: {error}", hint="nothing was decided") from error
    if value is None:
        raise PayloadError("the edit is null, which is no action", hint="nothing was decided")
    return value


def _in_the_editor(settings: Settings, request: int) -> str:
    """What a person makes of the action in an editor. No transaction, and no connection, is open meanwhile."""
    from walstream.ledger.approvals import Approvals
    from walstream.ledger.schema import APPROVALS_VERSION

    with installed(settings, "approvals", APPROVALS_VERSION) as conn:
        asked = Approvals(settings).get(request, on=conn)
        if not asked.is_open:
            raise ConfigError(f"request {request} cannot be decided: it is {standing(asked)}")
        before = _pretty(conn, asked.action) + "\n"
    after = edited(before, ".json")
    if after == before:
        raise ConfigError(
            "nothing was changed, and nothing was decided", hint="`walstream approvals approve` grants it as it is"
        )
    return after


def _pretty(conn: Connection, value: Any) -> str:
    """JSON for a person, by the server, which keeps every digit."""
    from walstream.ledger.json_values import json_text

    with conn.cursor() as cur:
        cur.execute("SELECT pg_catalog.jsonb_pretty(%s::pg_catalog.jsonb)", (json_text(value),))
        row: Any = cur.fetchone()
    return str(row[0])


def count_open(conn: Connection, settings: Settings) -> OpenApprovals:
    """What waits for a decision; nothing where the schema has no approvals yet, or this login may not see them.

    Args:
        conn: in autocommit.
    """
    from psycopg2.errors import InsufficientPrivilege, UndefinedColumn, UndefinedTable

    from walstream.ledger.approvals import IS_OPEN
    from walstream.ledger.schema import fill, names

    with conn.cursor() as cur:
        try:
            cur.execute(fill(_COUNT, names(settings)) + IS_OPEN)
        except (InsufficientPrivilege, UndefinedColumn, UndefinedTable):
            return OpenApprovals()
        row: Any = cur.fetchone()
    return OpenApprovals(*row)


def standing(approval: Approval) -> str:
    """How a request stands, in one word: open, granted, rejected, or stale."""
    return approval.decision or ("open" if approval.is_open else "stale")


def _document(approval: Approval) -> dict[str, Any]:
    import orjson

    from walstream.ledger.json_values import json_text

    exact = {
        name: None if value is None else orjson.Fragment(json_text(value))
        for name, value in (("action", approval.action), ("edit", approval.edit))
    }
    return {**asdict(approval), **exact, "status": standing(approval)}


def _show(found: list[Approval]) -> None:
    from rich.table import Table
    from rich.text import Text

    from walstream.ledger.json_values import json_text

    table = Table()
    for title in ("request", "agent", "session", "job", "asked", "deadline", "action"):
        table.add_column(title, overflow="fold")  # cut off, a session could not be given to the next command
    for approval in found:
        action = "" if approval.action is None else json_text(approval.action)
        table.add_row(
            str(approval.request_seq),
            Text(one_line(approval.agent_id)),
            Text(one_line(approval.session_id)),
            str(approval.job_id),
            _moment(approval.requested_at),
            _moment(approval.deadline),
            Text(shortened(action, _SHORT)),
        )
    console.out().print(table)


def _moment(value: datetime | None) -> str:
    return "" if value is None else value.strftime("%Y-%m-%d %H:%M:%S")
