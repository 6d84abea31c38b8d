"""Answers that never come: who waits for one is woken.

A connection whose other end has forgotten it looks like one whose server thinks hard. TCP notices that within half a
minute where packets are lost; it notices nothing where something in between still acknowledges them (a proxy, a pooler,
a load balancer that hangs). A thread that waits there would wait for ever, with its lease and whatever it holds.

So one thread looks at who has been waiting for long, and asks the server, over another connection, what the session in
question does. If it is gone, or idle (it has answered, or was never asked), and still is some seconds later, no answer
will come: the socket is shut down, and whoever waits sees a lost connection, which everybody knows how to deal with.
As long as the server says that it works on it, or says nothing, nothing is done; nor while something arrives, for a
server that has handed a large answer to its kernel is idle, and a slow network takes its time.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final

import psycopg2
from psycopg2.extensions import connection as Connection
from psycopg2.extensions import cursor as Cursor

log = logging.getLogger("walstream.connection")

PATIENCE: Final = 3.0
"""Seconds that somebody has waited before he is looked after."""

AGAIN: Final = 2.0
"""Seconds between the two looks that have to see the same."""

_OWN_PATIENCE: Final = 5.0  # for the answers to its own questions
_LOOK: Final = 0.5
_TCP_LAST_DATA_RECV: Final = 52  # where struct tcp_info (linux/tcp.h) has milliseconds since data arrived
_STATE: Final = "SELECT state, pg_postmaster_start_time()::text FROM pg_stat_activity WHERE pid = %s"
_ALIVE: Final = "SELECT pg_postmaster_start_time()::text"


class AskingCursor(Cursor):
    """Says on its connection since when it waits."""

    connection: AskingConnection

    def execute(self, query: Any, vars: Any = None) -> None:
        asking = self.connection
        asking.asked_at = time.monotonic()
        try:
            super().execute(query, vars)
        finally:
            asking.asked_at = None

    def copy_expert(self, *arguments: Any, **named: Any) -> None:
        asking = self.connection
        asking.asked_at = time.monotonic()
        try:
            super().copy_expert(*arguments, **named)
        finally:
            asking.asked_at = None


class AskingStream(AskingCursor):
    """The same for a cursor on the server, whose every fetch, and its end, is a question as well."""

    def _asking(self, ask: Callable[..., Any], *arguments: Any) -> Any:
        asking = self.connection
        asking.asked_at = time.monotonic()
        try:
            return ask(*arguments)
        finally:
            asking.asked_at = None

    def __next__(self) -> Any:
        return self._asking(super().__next__)

    def fetchone(self) -> Any:
        return self._asking(super().fetchone)

    def fetchmany(self, size: int | None = None) -> Any:
        return self._asking(super().fetchmany, self.itersize if size is None else size)

    def fetchall(self) -> Any:
        return self._asking(super().fetchall)

    def scroll(self, value: int, mode: str = "relative") -> None:
        self._asking(super().scroll, value, mode)

    def close(self) -> None:
        self._asking(super().close)


class AskingConnection(Connection):
    """Knows since when it waits for an answer, and how the same server is reached once more.

    Attributes:
        asked_at: since when, on the monotonic clock; ``None`` while it waits for none.
        backend: process id of its session, by the server's own word (a pooler's would be another).
        server: when the server started, which tells it from others.
        again: opens another connection to where it leads.
    """

    asked_at: float | None = None
    backend = 0
    server = ""
    again: Callable[[], Connection] | None = None

    def cursor(self, name: Any = None, cursor_factory: Any = None, **named: Any) -> Any:  # type: ignore[override]  # three overloads in one
        plain = cursor_factory is None or cursor_factory is Cursor
        if name is not None:
            return super().cursor(name, cursor_factory=AskingStream if plain else cursor_factory, **named)
        return super().cursor(cursor_factory=AskingCursor if plain else cursor_factory, **named)

    def commit(self) -> None:
        self.asked_at = time.monotonic()
        try:
            super().commit()
        finally:
            self.asked_at = None

    def rollback(self) -> None:
        self.asked_at = time.monotonic()
        try:
            super().rollback()
        finally:
            self.asked_at = None


class Lookout:
    """The thread that looks after those who wait, one a process.

    Args:
        patience, again: as the constants above.
    """

    def __init__(self, *, patience: float = PATIENCE, again: float = AGAIN) -> None:
        self._patience = patience
        self._again = again
        self._lock = threading.Lock()
        self._connections: weakref.WeakSet[AskingConnection] = weakref.WeakSet()
        self._suspected: dict[int, tuple[float, float]] = {}
        self._thread: threading.Thread | None = None

    def add(self, connection: AskingConnection) -> None:
        """From now on it is looked after, if :meth:`start` was called."""
        with self._lock:
            self._connections.add(connection)

    def start(self) -> None:
        """Look; once, however often it is called (and again in a process that was forked)."""
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="walstream-answers", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            time.sleep(min(_LOOK, self._patience))
            try:
                self.look()
            except Exception:  # it serves everybody; whatever goes wrong with one connection must not end it
                log.exception("a look at who waits for an answer failed")

    def look(self) -> None:
        """One look at all of them."""
        now = time.monotonic()
        with self._lock:
            waiting = [each for each in self._connections if each.asked_at is not None]
        late = [each for each in waiting if now - (each.asked_at or now) > self._patience and each.again]
        self._suspected = {key: seen for key, seen in self._suspected.items() if key in set(map(id, late))}
        for connection in late:
            asked_at = connection.asked_at
            if asked_at is None or _arriving(connection, self._again) or not _forgotten(connection):
                self._suspected.pop(id(connection), None)
                continue
            before = self._suspected.setdefault(id(connection), (asked_at, now))
            if before[0] != asked_at:
                self._suspected[id(connection)] = (asked_at, now)
            elif now - before[1] >= self._again and connection.asked_at == asked_at:
                self._suspected.pop(id(connection), None)
                log.warning(
                    "the server has forgotten a session (process %d) that has been waiting for its answer for %.0f s: "
                    "the connection is given up",
                    connection.backend,
                    now - asked_at,
                )
                shut_down(connection)


def _arriving(connection: AskingConnection, lately: float) -> bool:
    """Whether something has arrived on its socket within so many seconds (Linux, TCP; elsewhere nobody can say)."""
    option = getattr(socket, "TCP_INFO", None)
    if option is None:
        return False
    try:
        with socket.socket(fileno=os.dup(connection.fileno())) as shared:
            if shared.family not in (socket.AF_INET, socket.AF_INET6):
                return False
            size = _TCP_LAST_DATA_RECV + 4
            told = shared.getsockopt(socket.IPPROTO_TCP, option, size)
    except (OSError, psycopg2.Error):
        return False
    return len(told) == size and int.from_bytes(told[-4:], sys.byteorder) < lately * 1000


def _forgotten(connection: AskingConnection) -> bool:
    """Whether the server is there and its session is not, or has nothing to do."""
    assert connection.again is not None
    try:
        with contextlib.closing(connection.again()) as beside, answered_within(beside, _OWN_PATIENCE):
            beside.autocommit = True
            with beside.cursor() as cur:
                cur.execute("SET statement_timeout = '3s'")
                cur.execute(_STATE, (connection.backend,))
                row = cur.fetchone()
                if row is not None:
                    return row[1] == connection.server and str(row[0]).startswith("idle")
                cur.execute(_ALIVE)
                found = cur.fetchone()
    except psycopg2.Error:
        return False  # nothing is known
    # Another start of the server ended all sessions before it; but it may be another server, where there are several.
    return found is not None and (found[0] == connection.server or "," not in connection.info.host)


@contextlib.contextmanager
def answered_within(connection: Connection, seconds: float) -> Iterator[None]:
    """What the connection is asked inside takes the server a moment, so after so many seconds it is shut down. For a
    connection that nobody looks after: because it is so new, because it is the lookout's own, or because it streams."""
    timer = threading.Timer(seconds, shut_down, (connection,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # so that it never meets a connection that was closed, or another one in its place


def shut_down(connection: Connection) -> None:
    """Wake whoever waits on a connection: to him it is lost."""
    with contextlib.suppress(OSError, psycopg2.Error), socket.socket(fileno=os.dup(connection.fileno())) as shared:
        shared.shutdown(socket.SHUT_RDWR)


LOOKOUT: Final = Lookout()
"""That of this process."""
