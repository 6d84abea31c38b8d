"""Where `walstream tail` gets events from: the order of an installed stream, or a temporary slot."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, Protocol

import psycopg2

from walstream.config import quote
from walstream.errors import ConfigError, DecodeError, WalstreamError
from walstream.event import Commit, Event
from walstream.ledger.identity import read_identity, require_same_stream
from walstream.ledger.schema import installed_version
from walstream.order.reader import ColdReader
from walstream.order.wake import Listener
from walstream.protocol.decoder import Decoder
from walstream.protocol.ledger_row import RowDecoder, compile_row_decoder, decode_begin, decode_commit
from walstream.protocol.messages import Relation
from walstream.protocol.tags import BEGIN, COMMIT, INSERT, RELATION
from walstream.source import tail_publication
from walstream.source.stream import ReplicationStream

from . import console
from .session import database
from .standing import ALIVE

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection

    from walstream.config import Settings

_LIMIT: Final = 500  # events read at once
_BYTES: Final = 4 << 20  # of payload read at once
_RETRY_FIRST: Final = 0.5
_RETRY_LAST: Final = 15.0


class Source(Protocol):
    """Yields events as they commit."""

    def read(self, timeout: float) -> Sequence[Event]:
        """Return what is new; nothing after ``timeout`` seconds at the latest."""
        ...


class OrderSource:
    """Reads the commit order from an offset, on connections that are made again when they are lost.

    Args:
        start: the first offset to read; ``None``: what comes from now on; negative: so many before the end.
    """

    def __init__(self, settings: Settings, key_prefix: str, start: int | None) -> None:
        self._settings = settings
        self._key_prefix = key_prefix
        self._start = start
        self._position: int | None = None
        self._reader: ColdReader | None = None
        self._connection: Connection | None = None
        self._listener = Listener(self._connect, settings.namespace, settings.poll_seconds)
        self._pause = _RETRY_FIRST

    def read(self, timeout: float) -> Sequence[Event]:
        try:
            events = self._read()
            if not events:
                self._listener.wait(timeout)
                events = self._read()
        except WalstreamError as error:
            if not error.transient or self._position is None:
                raise
            self._drop()
            console.note(f"connecting again in {self._pause:g} s, nothing will be missed: {error}")
            time.sleep(self._pause)
            self._pause = min(self._pause * 2, _RETRY_LAST)
            return ()
        self._pause = _RETRY_FIRST
        return events

    def close(self) -> None:
        """Close all connections."""
        self._drop()
        self._listener.close()

    def _read(self) -> Sequence[Event]:
        settings = self._settings
        if self._reader is None:
            self._connection = self._connect()
            self._reader = ColdReader(self._connection, settings.namespace, settings.ledger, self._key_prefix)
        if self._position is None:
            self._position = self._first_position(self._reader.head())
        batch = self._reader.read(self._position, _LIMIT, _BYTES)
        self._position = batch.through
        return batch.events

    def _first_position(self, head: int) -> int:
        if self._start is None:
            return head
        return self._start - 1 if self._start > 0 else max(0, head + self._start)

    def _connect(self) -> Connection:
        from walstream.source.connection import connect

        settings = self._settings
        return connect(
            settings.require_dsn(), application_name="walstream:tail", connect_timeout=settings.connect_timeout
        )

    def _drop(self) -> None:
        self._reader = None
        if self._connection is not None:
            with contextlib.suppress(psycopg2.Error):
                self._connection.close()
            self._connection = None


class SlotSource:
    """Reads a temporary slot. Its events have no offset: nobody writes their order down."""

    def __init__(self, settings: Settings) -> None:
        self._columns = settings.ledger.columns.names()
        self._stream = ReplicationStream.open_temporary(settings)
        self._decode = Decoder(1).decode
        self._rows: dict[int, RowDecoder] = {}
        self._commit = Commit(0, 0, 0, "")
        self._events: list[Event] = []
        self._bytes = 0
        self._failure: WalstreamError | None = None

    def read(self, timeout: float) -> Sequence[Event]:
        if self._failure is not None:
            raise self._failure
        stream = self._stream
        try:
            if not stream.drain(self._handle, _LIMIT):
                stream.wait(timeout)
                stream.drain(self._handle, _LIMIT)
            stream.feedback()
        except WalstreamError as error:
            self._failure = error  # what came before it is shown first
        events, self._events, self._bytes = self._events, [], 0
        return events

    def close(self) -> None:
        """End the stream, and the slot with it."""
        self._stream.close()

    def _handle(self, payload: bytes, lsn: int) -> bool:
        tag = payload[0]
        if tag == INSERT:
            relation = int.from_bytes(payload[1:5], "big")
            decode = self._rows.get(relation)
            if decode is None:
                raise DecodeError(f"a row of relation {relation}, which was not described before", tag="I", lsn=lsn)
            self._events.append(Event(0, decode(payload, lsn), self._commit))
            self._bytes += len(payload)
        elif tag == BEGIN:
            self._commit = Commit(*decode_begin(payload, lsn), "")
        elif tag == COMMIT:
            _, end_lsn, _ = decode_commit(payload, lsn)
            self._stream.note_commit(end_lsn)
            self._stream.confirm(end_lsn)
        elif tag == RELATION:
            message = self._decode(payload, lsn)
            assert isinstance(message, Relation)
            self._rows[message.oid] = compile_row_decoder(message, self._columns)
        return self._bytes < _BYTES


@contextlib.contextmanager
def open_source(settings: Settings, start: int | None) -> Iterator[Source]:
    """The order of the installed stream, or else a temporary slot, which leaves nothing behind.

    Args:
        start: as for :class:`OrderSource`.

    Raises:
        ConfigError: ``start`` was given and no stream is installed.
        WalstreamError: of the connection, the slot or the publication.
    """
    with database(settings, "tail") as conn:
        prefix = _installed_as(conn, settings)
        if prefix is not None:
            _note_if_nobody_ingests(conn, settings)
            order = OrderSource(settings, prefix, start)
            try:
                yield order
            finally:
                order.close()
            return
        if start is not None:
            raise ConfigError(
                "--from needs an installed stream: without one, no offsets are written down",
                hint="run `walstream init` and `walstream run`, or leave --from out to see what commits from now on",
            )
        with _temporary(conn, settings) as temporary:
            source = SlotSource(temporary)
            console.note(f"no stream is installed: reading through a temporary slot, {temporary.slot}")
            try:
                yield source
            finally:
                source.close()


@contextlib.contextmanager
def _temporary(conn: Connection, settings: Settings) -> Iterator[Settings]:
    """Settings with a publication of our own, which is dropped at the end whatever happened to ``conn``."""
    for name in tail_publication.remove_leftovers(conn):
        console.note(f"dropped the publication {name}, which a killed tail had left behind")
    name = tail_publication.make(conn, settings.ledger)
    try:
        yield settings.model_copy(update={"slot": name, "publication": name})
    finally:
        try:
            tail_publication.drop(conn, name)
        except WalstreamError:
            with database(settings, "tail") as again:
                tail_publication.drop(again, name)


def _installed_as(conn: Connection, settings: Settings) -> str | None:
    """The prefix of keys of the stream that is installed here and ready; ``None`` if there is none."""
    with conn.cursor() as cur:
        if not installed_version(cur, settings.namespace):
            return None
        identity = read_identity(cur, settings.namespace)
    if identity is None or identity.slot_state != "ready":
        return None
    require_same_stream(identity, settings)
    return identity.key_prefix


def _note_if_nobody_ingests(conn: Connection, settings: Settings) -> None:
    with conn.cursor() as cur:
        cur.execute(f"SELECT {ALIVE.format(row='i')} FROM {quote(settings.namespace)}.ingest AS i")
        alive = cur.fetchone()
    if alive is None or not alive[0]:
        console.note("note: no ingest is running; new events appear once `walstream run` has put them in order")
