"""``walstream import``: append events from JSON Lines."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Annotated

import psycopg2
import typer

from walstream.errors import ConfigError, WalstreamError
from walstream.ledger.erased import erased_sessions
from walstream.ledger.importing import DEFAULT_BATCH, Batch, Checked, Importer, Pace, Sources
from walstream.ledger.json_lines import BadLine

from . import console
from .options import Json, takes_settings
from .progress import counting

if TYPE_CHECKING:
    from walstream.config import Settings


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("import")(import_events)


@takes_settings
def import_events(
    settings: Settings,
    files: Annotated[list[str], typer.Argument(metavar="FILE", help="JSON Lines; - is the standard input.")],
    *,
    copies: Annotated[
        int,
        typer.Option(min=0, help="Append N copies of everything, each with session ids of its own.", metavar="N"),
    ] = 0,
    rate: Annotated[
        float | None, typer.Option(help="Events a second, at the most.", metavar="N", show_default="no limit")
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            min=0, help="Events a transaction; 0: a transaction a file.", metavar="N", show_default=str(DEFAULT_BATCH)
        ),
    ] = None,
    as_json: Json = False,  # noqa: ARG001 (read where it is printed)
) -> None:
    """Append events from JSON Lines to the ledger.

    A line is one object: session_id, agent_id, event_type (strings) and payload
    (any JSON, kept digit by digit). Files are checked before anything is written;
    a bad line is refused with its number, and nothing of its transaction is
    written. What `walstream tail --json` prints can be imported again.

    Copies get session ids derived from the old ones, the same in every run, so
    that importing the same thing twice is noticed.
    """
    if rate is not None and not (rate > 0 and math.isfinite(rate)):
        raise typer.BadParameter("must be a number above 0; leave it out for no limit", param_hint="--rate")
    if batch is None:
        # A transaction every tenth of a second, so that a slow import is a trickle and not a row of bursts.
        batch = DEFAULT_BATCH if rate is None else max(1, min(DEFAULT_BATCH, math.ceil(rate / 10)))

    sources = Sources(files, copies=copies)
    checked = sources.check()
    from walstream.source.connection import connect

    # This session writes to the user's table, so triggers find the search path they expect, and policies apply.
    connection = connect(
        settings.require_dsn(),
        application_name="walstream:import",
        connect_timeout=settings.connect_timeout,
        search_path=None,
    )
    try:
        with connection.cursor() as cur:
            cur.execute("SET row_security = on")
        connection.set_session(isolation_level="READ COMMITTED", autocommit=False)
        if erased := erased_sessions(connection, settings, list(checked.sessions)):
            raise ConfigError(
                f"session {erased[0]} was erased from this ledger"
                + (f" (and {len(erased) - 1} others in these files)" if len(erased) > 1 else "")
                + ", and importing it would bring it back",
                hint="take its lines out, or give it another session id",
            )
        importer = Importer(connection, settings.ledger)
        known = importer.known_sessions(list(checked.sessions))
        if known:
            console.note(
                f"note: {known} of these sessions have events in the ledger already;"
                " if this was imported before, it will stand there twice"
            )
        started = time.monotonic()
        _append_all(importer, sources, checked, batch, rate)
        seconds = time.monotonic() - started
    finally:
        connection.close()

    done = importer.done
    if console.json_wanted():
        console.print_json(
            {
                "events": done.events,
                "transactions": done.transactions,
                "files": list(sources.files),
                "copies": copies,
                "sessions_known": known,
                "seconds": round(seconds, 3),
            }
        )
    else:
        each = f" ({done.events / seconds:,.0f} a second)" if seconds > 0.5 else ""
        console.say(f"{done.events:,} events in {done.transactions:,} transactions, {seconds:.1f} s{each}")


def _append_all(importer: Importer, sources: Sources, checked: Checked, size: int, rate: float | None) -> None:
    pace = Pace(rate)
    at_work: Batch | None = None
    total = None if checked.events is None else checked.events * sources.times
    try:
        with counting("importing", total) as advance:
            for at_work in sources.batches(size):
                pace.wait(len(at_work.events))
                importer.append(at_work)
                advance(len(at_work.events))
                at_work = None
    except BadLine as error:
        error.hint = error.hint or f"nothing of its transaction was written; {_so_far(importer)}"
        raise
    except psycopg2.Error as error:
        from walstream.source.failures import classify

        known = classify(error, doing=f"appending {at_work.extent}" if at_work else "importing")
        raise _with_hint(known, importer, at_work) from error
    except KeyboardInterrupt:
        console.note(f"stopped; {_so_far(importer)}")
        raise


def _with_hint(error: WalstreamError, importer: Importer, at_work: Batch | None) -> WalstreamError:
    if error.transient and at_work is not None:  # it may have been the commit that was not answered
        error.hint = (
            f"{_so_far(importer)}; whether {at_work.extent} are in the ledger has to be looked up before the rest"
            " is imported"
        )
    else:
        error.hint = "; ".join(filter(None, (error.hint, _so_far(importer))))
    return error


def _so_far(importer: Importer) -> str:
    done = importer.done
    if not done.events:
        return "nothing was committed before it"
    return f"{done.events:,} events before it are committed, in transactions: {done.transactions:,}"
