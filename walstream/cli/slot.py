"""``walstream slot skip``: step over a change that the server cannot send, knowingly, and leave that on record."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from walstream.config import Settings, quote
from walstream.errors import ConfigError, DecodeError, SlotError, WalstreamError
from walstream.lsn import format_lsn

from . import console
from .options import Json, Yes, takes_settings
from .session import PATIENT, installed

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

_PART: Final = 50  # rows read at once when looking for those that cannot be read
_DRAIN: Final = 4000
_SHOWN: Final = 20  # seqs that a message names


@dataclass(frozen=True)
class Refused:
    """The transaction at which the slot stands still.

    Attributes:
        final_lsn: where its commit record begins.
        error: what the server says about it.
    """

    xid: int
    final_lsn: int
    error: DecodeError


def register(app: typer.Typer) -> None:
    """Add the command and those below it."""
    group = typer.Typer(help="The replication slot, where it needs a person.", no_args_is_help=True)
    group.callback()(_group)
    group.command()(skip)
    app.add_typer(group, name="slot")


def _group() -> None:
    """The replication slot, where it needs a person."""  # a group of one command is a group all the same


@takes_settings
def skip(
    settings: Settings,
    *,
    seq: Annotated[
        int | None,
        typer.Option(metavar="SEQ", help="Give up this row alone, and leave the slot as it is.", show_default=False),
    ] = None,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Step over the one transaction that the server cannot send (a row whose text is above 1 GB, for example).

    The slot is read up to the change that fails, and moved behind the transaction that it belongs to. What of that can
    be read is taken from the ledger at the next start of `walstream run`, flagged `recovered`; rows that nobody can
    read get no offset. What was given up stands in `walstream.recoveries` and, as a violation of the kind `gap`, in the
    audit trail.
    """
    from walstream.engine import episodes
    from walstream.ledger.identity import check_identity
    from walstream.ledger.schema import RECOVERIES_VERSION
    from walstream.source.preflight import preflight

    from .leasing import holding

    with (
        installed(settings, "slot", RECOVERIES_VERSION, {**PATIENT, "synchronous_commit": "local"}) as conn,
        holding(settings, conn, "slot skip") as lease,
    ):
        identity = check_identity(conn, settings)
        began_at = episodes.now(conn)
        if seq is not None:
            refused, lost = None, _one(settings, conn, seq)
        else:
            preflight(settings, conn)
            refused = _refused(settings, conn)
            lost = tuple(_unreadable(settings, conn, identity.floor_seq))
        if not as_json:
            console.say(_found(settings, refused, lost))
        console.confirm("Give this up?", yes)
        cause = _cause(settings, refused, lost)
        _note_gap(settings, conn, refused, lost, cause)
        episodes.record(
            conn,
            settings,
            "skip",
            cause,
            episodes.Filled(),
            began_at=began_at,
            generation=lease.generation,
            slot_lsn=None if refused is None else refused.final_lsn + 1,
            unreadable=lost,
        )
        position = None if refused is None else _step_over(settings, conn, refused)
    if as_json:
        console.print_json(
            {
                "xid": None if refused is None else refused.xid,
                "commit_lsn": None if refused is None else format_lsn(refused.final_lsn),
                "slot_lsn": None if position is None else format_lsn(position),
                "unreadable": list(lost),
            }
        )
    else:
        moved = "" if position is None else f"slot {settings.slot} stands at {format_lsn(position)} now; "
        rows = "1 row is" if len(lost) == 1 else f"{len(lost)} rows are"
        then = "`walstream audit acknowledge` (violations = halt), and " if settings.violations == "halt" else ""
        console.say(f"{moved}{rows} given up, and that is on record. Go on with {then}`walstream run`")


def _refused(settings: Settings, conn: Connection) -> Refused:
    """Read the slot as ingest does, confirming nothing, up to the change that fails.

    Raises:
        SlotError: none fails.
    """
    from walstream.lsn import parse_lsn
    from walstream.order.table import own_table, query
    from walstream.protocol.ledger_row import BEGIN, decode_begin
    from walstream.source.stream import ReplicationStream

    ((end, tail),) = query(
        conn,
        "SELECT pg_current_wal_insert_lsn()::text,"
        f" (SELECT last_lsn::text FROM {own_table(settings.namespace, 'commit_order')}"
        " ORDER BY first_offset DESC LIMIT 1)",
        doing="reading the ends of WAL and order",
    )
    begun: list[tuple[int, int]] = []

    def handle(payload: bytes, lsn: int) -> bool:
        if payload[:1] == bytes([BEGIN]):
            final_lsn, _, xid = decode_begin(payload, lsn)
            begun[:] = [(final_lsn, xid)]
        return True

    with ReplicationStream.open(settings, start_lsn=parse_lsn(tail) if tail else 0, generation=0) as stream:
        try:
            while stream.passed < parse_lsn(end):
                if not stream.drain(handle, _DRAIN):
                    stream.feedback()
                    stream.wait(0.1)
        except DecodeError as error:
            if not begun:
                raise
            final_lsn, xid = begun[0]
            return Refused(xid, final_lsn, error)
    raise SlotError(
        f"slot {settings.slot} can be read up to the end of the WAL ({end}): there is nothing to step over",
        hint="start `walstream run`",
    )


def _unreadable(settings: Settings, conn: Connection, floor_seq: int | None) -> Iterator[int]:
    """Rows without an offset that cannot be read, above what is proven."""
    from walstream.engine.episodes import given_up
    from walstream.order.reconcile import missing_seqs
    from walstream.order.table import ordered_seqs, own_table, query

    ((proven,),) = query(
        conn, f"SELECT proven_seq FROM {own_table(settings.namespace, 'ingest')}", doing="reading what is proven"
    )
    before = given_up(conn, settings)

    def known(seqs: Any) -> set[int]:
        return ordered_seqs(conn, settings.namespace, seqs) | before.intersection(seqs)

    for seqs in missing_seqs(conn, settings.ledger, known, wait=None, floor_seq=floor_seq, after_seq=proven):
        for start in range(0, len(seqs), _PART):
            yield from _failing(settings, conn, seqs[start : start + _PART])


def _failing(settings: Settings, conn: Connection, seqs: list[int]) -> Iterator[int]:
    """Those of ``seqs`` whose row cannot be read as text."""
    from walstream.order.table import query, spelled

    ledger = settings.ledger
    columns = ", ".join(f"{spelled(quote(name))}::text" for name in ledger.columns.names())
    try:
        query(
            conn,
            f"SELECT {columns} FROM {spelled(ledger.qualified)} WHERE {spelled(quote(ledger.columns.seq))} = ANY(%s)",
            (seqs,),
            doing=f"reading rows of {ledger.qualified}",
        )
    except WalstreamError as error:
        if error.transient:
            raise
        if len(seqs) == 1:
            yield seqs[0]
            return
        middle = len(seqs) // 2
        yield from _failing(settings, conn, seqs[:middle])
        yield from _failing(settings, conn, seqs[middle:])


def _one(settings: Settings, conn: Connection, seq: int) -> tuple[int, ...]:
    """The row that a person names.

    Raises:
        ConfigError: it has an offset, or can be read.
    """
    from walstream.order.table import ordered_seqs

    if ordered_seqs(conn, settings.namespace, [seq]):
        raise ConfigError(
            f"the row with seq {seq} has an offset: it is an event, and cannot be given up",
            hint="a row that is gone is declared in walstream.erasures (docs/operations.md, Removing rows)",
        )
    if not list(_failing(settings, conn, [seq])):
        raise ConfigError(
            f"the row with seq {seq} can be read (or is not there): there is nothing to give up",
            hint="`walstream run` orders it",
        )
    return (seq,)


def _step_over(settings: Settings, conn: Connection, refused: Refused) -> int:
    """Move the slot behind the transaction; where it stands then. Nothing of it is decoded for that."""
    from walstream.lsn import parse_lsn
    from walstream.order.table import query

    end = time.monotonic() + 30
    while True:
        try:
            rows = query(
                conn,
                "SELECT end_lsn::text FROM pg_replication_slot_advance(%s, %s::pg_lsn)",
                (settings.slot, format_lsn(refused.final_lsn + 1)),
                doing=f"moving slot {settings.slot}",
            )
        except WalstreamError as error:
            if not error.transient or time.monotonic() > end:  # our own reader lets go of it a moment later
                raise
            time.sleep(0.2)
        else:
            return parse_lsn(rows[0][0])


def _note_gap(settings: Settings, conn: Connection, refused: Refused | None, lost: tuple[int, ...], cause: str) -> None:
    """Durable before the slot moves; the same again after an attempt that was cut short is one entry."""
    from walstream.order.table import own_table, query

    query(
        conn,
        f"INSERT INTO {own_table(settings.namespace, 'violations')}"
        " (kind, commit_lsn, ordinal, seq, xid, detail, changes, seqs)"
        " VALUES ('gap', coalesce(%s::pg_lsn, pg_current_wal_insert_lsn()), 0, %s, %s, %s, %s, %s)"
        " ON CONFLICT (commit_lsn, ordinal) DO NOTHING RETURNING ordinal",
        (
            None if refused is None else format_lsn(refused.final_lsn),
            lost[0] if lost else None,
            None if refused is None else refused.xid,
            cause,
            max(1, len(lost)),
            json.dumps([[seq, seq] for seq in lost]),
        ),
        doing="putting the gap on record",
    )


def _cause(settings: Settings, refused: Refused | None, lost: tuple[int, ...]) -> str:
    given_up = _rows(lost)
    if refused is None:
        return f"given up by a person: {given_up}"
    return (
        f"transaction {refused.xid}, committed at {format_lsn(refused.final_lsn)}, was stepped over on slot"
        f" {settings.slot}: {refused.error}; {given_up}"
    )


def _found(settings: Settings, refused: Refused | None, lost: tuple[int, ...]) -> str:
    """What would be given up."""
    rows = _rows(lost)
    if refused is None:
        return rows
    return (
        f"transaction {refused.xid}, committed at {format_lsn(refused.final_lsn)}, cannot be sent on slot"
        f" {settings.slot}: {refused.error}; {rows}"
    )


def _rows(lost: tuple[int, ...]) -> str:
    rows = ", ".join(map(str, lost[:_SHOWN])) + (", …" if len(lost) > _SHOWN else "")
    return f"rows that nobody can read: seq {rows}" if lost else "every row of the ledger can be read"
