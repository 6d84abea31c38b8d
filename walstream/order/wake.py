"""Waking readers in other processes: NOTIFY after the order has committed, LISTEN, and a slow poll as the net.

Rule 8: a NOTIFY takes a lock of the whole cluster until its transaction has committed, and under synchronous
replication one that waits for a standby keeps everybody else's waiting. So it has a connection and a thread of its
own, commits asynchronously, and its failure concerns nobody: readers look by themselves now and then.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Collection
from typing import Final

import psycopg2
from psycopg2 import DataError
from psycopg2.extensions import connection as Connection

from walstream.config import channel, quote
from walstream.errors import WalstreamError
from walstream.source.connection import abandon

_log = logging.getLogger(__name__)

_GAP: Final = 0.002  # seconds between two notifications: what comes in between needs none of its own
_MOST: Final = 10_000
_RETRY_FIRST: Final = 0.5
_RETRY_LAST: Final = 30.0
_LOCK_TIMEOUT: Final = "5s"


def channel_of(namespace: str) -> str:
    """The channel on which growth of this stream's order is announced."""
    return channel(namespace, "commit_order")


class Notifier:
    """Tells listeners that the order has grown, or what else there is to tell. What is announced many times in a short
    time becomes one notification.

    Args:
        connect: makes a connection (in autocommit) whenever one is needed.
        namespace: schema of walstream's tables.
    """

    def __init__(self, connect: Callable[[], Connection], namespace: str) -> None:
        self._connect = connect
        self._growth = channel_of(namespace), ""
        self._announce_growth = f"NOTIFY {quote(self._growth[0])}"
        self._changed = threading.Condition()
        self._due: dict[tuple[str, str], None] = {}
        self._closed = False
        self._connection: Connection | None = None
        self._thread = threading.Thread(target=self._run, name="walstream-notify", daemon=True)
        self._thread.start()

    def notify(self, channel: str | None = None, payload: str = "") -> None:
        """Announce something soon. Returns at once, never fails, may be called from any thread.

        Args:
            channel: on which one; that of the order's growth if not given.
            payload: what is said, less than 8,000 bytes; who listens may wait for this alone. What the server does not
                take is dropped, with a warning in the log; so is what comes when 10,000 others wait to be sent.
        """
        told = (channel, payload) if channel else self._growth
        with self._changed:
            if told == self._growth or len(self._due) < _MOST:
                self._due[told] = None
                self._changed.notify()

    def close(self, timeout: float = 2.0) -> None:
        """Stop; a notification that waits for a lock is given up after ``timeout`` seconds at the most."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout / 2)
        if self._thread.is_alive() and (connection := self._connection) is not None:
            abandon(connection)
            self._thread.join(timeout / 2)

    def _run(self) -> None:
        pause = _RETRY_FIRST
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._due or self._closed)
                if self._closed:
                    break
                due, self._due = self._due, {}
            try:
                self._send(due)
            except Exception as error:  # whatever it is, ingest must not notice
                if pause == _RETRY_FIRST:
                    _log.warning("readers in other processes are not woken, they poll: %s", error)
                self._drop()
                with self._changed:
                    self._due = due | self._due
                    self._changed.wait_for(lambda: self._closed, pause)
                pause = min(pause * 2, _RETRY_LAST)
            else:
                pause = _RETRY_FIRST
                with self._changed:
                    self._changed.wait_for(lambda: self._closed, _GAP)
        self._drop()

    def _send(self, due: Collection[tuple[str, str]]) -> None:
        try:
            self._send_together(due)
        except (DataError, ValueError) as error:  # too long, or a character that no text has, or not this database
            if len(due) == 1:
                _log.warning("not announced on channel %r: %s", next(iter(due))[0], str(error).strip())
                return
            for each in due:
                self._send([each])

    def _send_together(self, due: Collection[tuple[str, str]]) -> None:
        if self._connection is None:
            made = self._connect()
            self._connection = made
            with made.cursor() as cursor:
                cursor.execute(
                    "SELECT set_config('synchronous_commit', 'off', false), set_config('lock_timeout', %s, false)",
                    (_LOCK_TIMEOUT,),
                )
        with self._connection.cursor() as cursor:
            if set(due) == {self._growth}:
                cursor.execute(self._announce_growth)  # a third of what the query costs the server, up to 500 a second
                return
            cursor.execute(
                "SELECT pg_notify(d.channel, d.payload) FROM unnest(%s::text[], %s::text[]) AS d (channel, payload)",
                ([channel for channel, _ in due], [payload for _, payload in due]),
            )

    def _drop(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(psycopg2.Error):
                self._connection.close()
            self._connection = None


class Listener:
    """Waits until the order may have grown, or whatever else is announced on a channel.

    Where LISTEN cannot be had (a pooler that shares sessions, a standby) it only waits: the poll is the net that
    catches everything, notifications only make it quicker.

    Args:
        connect: makes a connection (in autocommit) whenever one is needed; it is used for nothing else.
        namespace: schema of walstream's tables.
        poll_seconds: no wait is longer than this.
        channel: another one than that of the order's growth.
        payloads: what else is said there is not heard; everything is if not given.
    """

    def __init__(
        self,
        connect: Callable[[], Connection],
        namespace: str,
        poll_seconds: float,
        *,
        channel: str | None = None,
        payloads: Collection[str] | None = None,
    ) -> None:
        self._connect = connect
        self._channel = channel or channel_of(namespace)
        self._payloads = payloads
        self._poll_seconds = poll_seconds
        self._connection: Connection | None = None
        self._retry_at = 0.0
        self._pause = _RETRY_FIRST
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        os.set_blocking(self._write_end, False)
        self._closing = threading.Lock()
        self._closed = False

    @property
    def listening(self) -> bool:
        """Whether notifications can arrive at present."""
        return self._connection is not None

    def wait(self, timeout: float) -> bool:
        """Block until the order may have grown, and at the most ``timeout`` or ``poll_seconds``.

        To be called from one thread, and followed by a look at the order whatever it returns.

        Returns:
            Whether there was a reason to look at once: a notification, :meth:`wake`, or that listening began just now
            (what grew before that was not announced here).
        """
        deadline = time.monotonic() + min(timeout, self._poll_seconds)
        if self._connection is None and time.monotonic() >= self._retry_at and self._listen():
            return True
        while True:
            if self._take():
                return True
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            watched = select.poll()  # `select` takes no descriptor above 1023, and an application may have more open
            watched.register(self._read_end, select.POLLIN)
            if self._connection is not None:
                watched.register(self._connection.fileno(), select.POLLIN)
            if any(descriptor == self._read_end for descriptor, _ in watched.poll(left * 1000)):
                self._drain()
                return True

    def wake(self) -> None:
        """End the present (or else the next) :meth:`wait`. May be called from any thread."""
        with self._closing, contextlib.suppress(BlockingIOError):
            if not self._closed:
                os.write(self._write_end, b"\0")

    def close(self) -> None:
        """Close the connection. To be called by the thread that waits, or when none does."""
        self._drop()
        with self._closing:  # the numbers of closed pipes are given to others
            if not self._closed:
                self._closed = True
                os.close(self._read_end)
                os.close(self._write_end)

    def _listen(self) -> bool:
        try:
            self._connection = self._connect()
            with self._connection.cursor() as cursor:
                cursor.execute(f"LISTEN {quote(self._channel)}")
        except (WalstreamError, psycopg2.Error) as error:
            self._failed(error)
            return False
        self._pause = _RETRY_FIRST
        return True

    def _take(self) -> bool:
        """Whether a notification has arrived."""
        if self._connection is None:
            return False
        try:
            self._connection.poll()
        except psycopg2.Error as error:
            self._failed(error)
            return True  # what grew since the last notification was perhaps not announced
        heard = any(self._payloads is None or each.payload in self._payloads for each in self._connection.notifies)
        self._connection.notifies.clear()
        return heard

    def _failed(self, error: Exception) -> None:
        if self._pause == _RETRY_FIRST:
            _log.info("no notifications at present, polling every %s s: %s", self._poll_seconds, error)
        self._drop()
        self._retry_at = time.monotonic() + self._pause
        self._pause = min(self._pause * 2, _RETRY_LAST)

    def _drop(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(psycopg2.Error):
                self._connection.close()
            self._connection = None

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._read_end, 512):
                pass
