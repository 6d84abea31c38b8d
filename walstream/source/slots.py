"""Replication slots: made without hanging, and dropped.

The creation of a logical slot waits for every transaction that is open anywhere in the cluster and has written
something, prepared ones included; ``statement_timeout`` does not end that wait, ``lock_timeout`` does, and the server
then removes the half-made slot itself. So each attempt is short, each failure names the sessions in the way, and the
whole has an end.

Slots are never made with ``two_phase``: such a slot sends transactions at PREPARE, before it is known whether they
commit, and does so under protocol 1 as well.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import psycopg2
from psycopg2.errorcodes import LOCK_NOT_AVAILABLE, UNDEFINED_OBJECT
from psycopg2.extensions import connection as Connection

from walstream.config import quote
from walstream.errors import ConfigError, SlotError, Unavailable
from walstream.lsn import format_lsn, parse_lsn
from walstream.source.answers import answered_within
from walstream.source.connection import abandon, replication_connect
from walstream.source.facts import Blocker, blockers, slot_facts
from walstream.source.failures import classify
from walstream.source.publications import name_list, string_literal

PLUGIN: Final = "pgoutput"

_PAUSES: Final = (0.2, 0.5, 1.0, 2.0, 5.0)  # between attempts; the last one repeats
_ALTER_SECONDS: Final = 5.0
_NAMED: Final = 5  # sessions in the way that a message names


@dataclass(frozen=True, slots=True)
class NewSlot:
    """A slot that was just made.

    Attributes:
        consistent_point: LSN from which it sends commits; everything that committed before is in the snapshot.
        snapshot: for ``SET TRANSACTION SNAPSHOT`` in another session, as long as the context that gave it is open.
        backend_pid: of the session that made it.
    """

    name: str
    consistent_point: int
    snapshot: str
    backend_pid: int


OnWait = Callable[[Sequence[Blocker]], None]


@contextlib.contextmanager
def create(
    dsn: str,
    slot: str,
    *,
    timeout: float = 60.0,
    attempt_timeout: float = 2.0,
    connect_timeout: int = 10,
    failover: bool | None = False,
    on_wait: OnWait | None = None,
) -> Iterator[NewSlot]:
    """Make a logical slot and hold its exported snapshot while the context is open.

    Publication and table must exist already: decoding uses the catalogues as they were at each position, so a
    publication that is younger than the slot's position does not exist for it.

    Args:
        dsn: where replication is possible (not a pooler).
        timeout: seconds for everything.
        attempt_timeout: seconds that one attempt may wait for a transaction in the way.
        failover: (17 and newer) let the slot be synchronized to standbys; ``None``: where the server can.
        on_wait: called with the transactions in the way after each attempt that failed.

    If the body raises, the slot is dropped again: a slot that nobody fills would hold WAL for nobody.

    Raises:
        Unavailable: transactions were in the way until the end; the message names them.
        SlotError: a slot of this name exists.
        ConfigError: wal_level, no free slot, privileges, or ``failover`` on a server before 17.
    """
    made = replication_connect(
        dsn,
        application_name="walstream:create-slot",
        connect_timeout=connect_timeout,
        options={
            "lock_timeout": f"{attempt_timeout * 1000:.0f}ms",
            # The exported snapshot is a transaction that stands idle for as long as the caller fills.
            "idle_in_transaction_session_timeout": "0",
            "idle_session_timeout": "0",
        },
    )
    try:
        if made.server_version >= 170000:
            with made.cursor() as cursor:
                cursor.execute("SET transaction_timeout = 0")
        if failover is None:
            failover = made.server_version >= 170000
        new = create_on(made, slot, timeout=timeout, failover=failover, on_wait=on_wait)
        try:
            yield new
        except BaseException:
            with contextlib.suppress(psycopg2.Error), made.cursor() as cursor:
                cursor.execute(f"DROP_REPLICATION_SLOT {quote(slot)}")
            raise
    finally:
        made.close()


def create_on(
    connection: Connection,
    slot: str,
    *,
    timeout: float = 60.0,
    failover: bool = False,
    temporary: bool = False,
    on_wait: OnWait | None = None,
) -> NewSlot:
    """Make a slot on a replication connection that is open already (with a ``lock_timeout``).

    Args:
        temporary: it lives as long as the connection, and no snapshot is exported.

    Errors and other arguments as for :func:`create`. The snapshot is good until the connection's next command.
    """
    doing = f"creating slot {slot}"
    command = create_command(slot, connection.server_version, failover=failover, temporary=temporary)
    end = time.monotonic() + timeout
    attempt = 0
    while True:
        try:
            with connection.cursor() as cursor:
                cursor.execute(command)
                row: Any = cursor.fetchone()
                return NewSlot(row[0], parse_lsn(row[1]), row[2] or "", connection.info.backend_pid)
        except psycopg2.Error as error:
            if error.pgcode != LOCK_NOT_AVAILABLE:
                raise classify(error, doing=doing) from error
        try:
            in_the_way = blockers(connection)
        except psycopg2.Error as error:
            raise classify(error, doing=doing) from error
        if on_wait is not None:
            on_wait(in_the_way)
        pause = _PAUSES[min(attempt, len(_PAUSES) - 1)]
        attempt += 1
        if time.monotonic() + pause >= end:
            raise _blocked(slot, timeout, in_the_way)
        time.sleep(pause)


def create_command(slot: str, server_version: int, *, failover: bool = False, temporary: bool = False) -> str:
    """Return the ``CREATE_REPLICATION_SLOT`` for this server (documentation, 55.4; options in parentheses since 15).

    Raises:
        ConfigError: ``failover`` before 17.
    """
    kept = " TEMPORARY" if temporary else ""
    begin = f"CREATE_REPLICATION_SLOT {quote(slot)}{kept} LOGICAL {PLUGIN}"
    if failover and server_version < 170000:
        raise ConfigError(
            f"slot {slot}: this is PostgreSQL {server_version // 10000}, and slots survive a fail-over from 17 on",
            hint="leave `failover` off; after a fail-over `walstream init` makes a new slot, and the reconciler fills "
            "the gap",
        )
    if server_version < 150000:
        return f"{begin} {'NOEXPORT_SNAPSHOT' if temporary else 'EXPORT_SNAPSHOT'}"
    options = ["SNAPSHOT 'nothing'" if temporary else "SNAPSHOT 'export'", *(["FAILOVER true"] if failover else [])]
    return f"{begin} ({', '.join(options)})"


def set_failover(dsn: str, slot: str, wanted: bool, *, connect_timeout: int = 10) -> None:
    """Let a slot that is there be synchronized to standbys, or no more (17 and newer).

    Raises:
        Unavailable: somebody reads it.
        SlotError, ConfigError: it is not there, or this role may not.
    """
    open_one = partial(
        replication_connect, dsn, application_name="walstream:alter-slot", connect_timeout=connect_timeout
    )
    made = open_one()
    # The command waits for whoever reads the slot, without a limit that could be set: so it is cancelled from here.
    limit = threading.Timer(_ALTER_SECONDS, _cancel, (made, open_one))
    limit.daemon = True
    try:
        facts = slot_facts(made, slot)
        if facts is not None and facts.holder is not None:
            raise Unavailable(f"slot {slot} is read by {facts.holder}")
        limit.start()
        with made.cursor() as cursor:
            cursor.execute(f"ALTER_REPLICATION_SLOT {quote(slot)} (FAILOVER {'true' if wanted else 'false'})")
    except psycopg2.errors.QueryCanceled as error:
        raise Unavailable(f"slot {slot} was not free within {_ALTER_SECONDS:.0f} s") from error
    except psycopg2.Error as error:
        raise classify(error, doing=f"changing slot {slot}") from error
    finally:
        limit.cancel()
        if limit.ident is not None:
            limit.join()  # it must not meet a connection that was closed
        made.close()


def _cancel(connection: Connection, open_one: Callable[[], Connection]) -> None:
    """Cancel what a connection waits for, by way of another one; where that cannot be had, give the connection up."""
    try:
        with (
            contextlib.closing(open_one()) as other,
            answered_within(other, _ALTER_SECONDS),
            other.cursor() as cursor,
        ):
            cursor.execute("SELECT pg_cancel_backend(%s)", (connection.info.backend_pid,))
    except Exception:  # whatever it is, the command must not be waited for any longer
        abandon(connection)


def start_command(slot: str, start_lsn: int, *publications: str) -> str:
    """Return the ``START_REPLICATION`` for a slot (documentation, 55.4 and 55.5).

    Written here in full because psycopg2's own builder encodes option values as latin-1. Protocol 1: a transaction
    comes whole, after its commit; ``messages`` for the canary; text values.
    """
    names = string_literal(name_list(*publications))
    return (
        f"START_REPLICATION SLOT {quote(slot)} LOGICAL {format_lsn(start_lsn)} "
        f"(proto_version '1', publication_names {names}, messages 'true')"
    )


def drop(connection: Connection, slot: str) -> bool:
    """Drop a slot of the current database; ``False`` if there is none.

    Raises:
        Unavailable: somebody reads it; the message names the session.
        SlotError: it belongs to another database, or it is not a logical slot: not ours to drop.
    """
    facts = slot_facts(connection, slot)
    if facts is None:
        return False
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_catalog.current_database()")
        row: Any = cursor.fetchone()
        if facts.database != row[0]:
            raise SlotError(
                f"slot {slot} belongs to {facts.database or 'no database (it is a physical slot)'}, not to {row[0]}",
                hint="correct the name of the slot, or connect to its database",
            )
        held = f" (held by {facts.holder})" if facts.holder else ""
        try:
            cursor.execute("SELECT pg_catalog.pg_drop_replication_slot(%s)", (slot,))
        except psycopg2.Error as error:
            if error.pgcode == UNDEFINED_OBJECT:  # somebody else was faster
                return False
            raise classify(error, doing=f"dropping slot {slot}{held}") from error
    return True


def _blocked(slot: str, timeout: float, in_the_way: Sequence[Blocker]) -> Unavailable:
    named = "; ".join(str(blocker) for blocker in in_the_way[:_NAMED]) or "a transaction that has ended meanwhile"
    more = f"; and {len(in_the_way) - _NAMED} more" if len(in_the_way) > _NAMED else ""
    oldest = f": {in_the_way[0].remedy}" if in_the_way else ""
    return Unavailable(
        f"slot {slot} could not be made in {timeout:.0f} s, because its creation waits for every open transaction, in "
        f"any database: {named}{more}. Nothing was left behind",
        hint=f"wait until they have ended and try again, or end the oldest{oldest}",
    )
