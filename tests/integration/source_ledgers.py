"""What the tests of `walstream.source` share: a ledger with publication and slot, a reader, and a relay in the path."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from walstream.config import LedgerTable, Settings
from walstream.lsn import parse_lsn
from walstream.protocol.decoder import Decoder
from walstream.protocol.messages import Insert, Relation
from walstream.source import publications
from walstream.source.stream import ReplicationStream

TABLE = """
CREATE TABLE {name} (
    seq bigserial PRIMARY KEY, session_id uuid NOT NULL DEFAULT gen_random_uuid(), agent_id text NOT NULL DEFAULT 'a',
    event_type text NOT NULL, payload jsonb NOT NULL DEFAULT '{{}}', created_at timestamptz NOT NULL DEFAULT now())
"""

Execute = Callable[..., list[tuple[Any, ...]]]


class Ledger:
    """A ledger in one database: table, publication and slot made in this order, as `init` does."""

    def __init__(self, dsn: str, execute: Execute, slot: str, publication: str = "p", **settings: Any) -> None:
        self.execute = execute
        self.settings = Settings(dsn=dsn, slot=slot, publication=publication, **settings)

    @property
    def table(self) -> LedgerTable:
        return self.settings.ledger

    def make(self, ddl: str = TABLE, *, slot: bool = True, via_root: bool = False) -> Ledger:
        self.execute(ddl.format(name=self.table.qualified))
        self.execute(publications.create_statement(self.settings.publication, self.table, via_root=via_root))
        if slot:
            self.make_slot()
        return self

    def make_slot(self, plugin: str = "pgoutput", *, two_phase: bool = False) -> None:
        self.execute(
            "SELECT pg_create_logical_replication_slot(%s, %s, false, %s)", self.settings.slot, plugin, two_phase
        )

    def insert(self, *event_types: str) -> None:
        """One transaction for all of them."""
        values = ", ".join(["(%s)"] * len(event_types))
        self.execute(f"INSERT INTO {self.table.qualified} (event_type) VALUES {values}", *event_types)

    def confirmed(self) -> int:
        row = self.execute(
            "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = %s", self.settings.slot
        )
        return parse_lsn(row[0][0])

    def wal_end(self) -> int:
        return parse_lsn(self.execute("SELECT pg_current_wal_flush_lsn()::text")[0][0])

    @contextlib.contextmanager
    def reading(self, start_lsn: int = 0, *, generation: int = 1) -> Iterator[Reading]:
        with ReplicationStream.open(self.settings, start_lsn=start_lsn, generation=generation) as stream:
            yield Reading(stream)


class Reading:
    """A stream, what it brought, and waiting for it with a bound.

    Attributes:
        messages: (tag, data_start, payload) of everything, in order.
        rows: the inserts, each as column name to text.
        commits: end LSNs.
    """

    def __init__(self, stream: ReplicationStream) -> None:
        self.stream = stream
        self.messages: list[tuple[str, int, bytes]] = []
        self.rows: list[dict[str, str | None]] = []
        self.commits: list[int] = []
        self._decoder = Decoder()
        self._relations: dict[int, Relation] = {}

    @property
    def event_types(self) -> list[str | None]:
        return [row["event_type"] for row in self.rows]

    def handle(self, payload: bytes, data_start: int) -> bool:
        tag = chr(payload[0])
        self.messages.append((tag, data_start, payload))
        if tag == "C":
            self.commits.append(data_start)
            self.stream.note_commit(data_start)
        elif tag in "RI":
            message = self._decoder.decode(payload, data_start)
            if isinstance(message, Relation):
                self._relations[message.oid] = message
            elif isinstance(message, Insert):
                relation = self._relations[message.relation_oid]
                self.rows.append(
                    {
                        column.name: value.decode() if isinstance(value, bytes) else None
                        for column, value in zip(relation.columns, message.new, strict=True)
                    }
                )
        return True

    def turn(self, wait: float = 0.05) -> None:
        """One round of what ingest does."""
        self.stream.drain(self.handle, 10_000)
        self.stream.feedback()
        self.stream.wait(wait)

    def until(self, done: Callable[[], bool], timeout: float = 60) -> None:
        end = time.monotonic() + timeout
        while not done():
            assert time.monotonic() < end, (
                f"not in {timeout} s; so far {self.event_types}, {len(self.messages)} messages"
            )
            self.turn()

    def until_rows(self, count: int) -> None:
        """Until so many rows have come, and their commit."""
        self.until(lambda: len(self.rows) >= count and self.messages[-1][0] == "C")

    def for_a_while(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.turn()


class Relay:
    """A TCP relay in front of a server, as a pooler would stand in the path: it can take `options` out of the startup
    packet, refuse it as pgbouncer does, and it writes down the standby status updates that pass.

    Attributes:
        feedback: (time, write, flush, apply, reply requested) of every status update.
    """

    def __init__(self, host: str, port: int, *, drop_options: bool = False, refuse: str = "") -> None:
        self._target = (host, port)
        self._drop_options = drop_options
        self._refuse = refuse
        self.feedback: list[tuple[float, int, int, int, bool]] = []
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]

    def __enter__(self) -> Relay:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for each in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._sockets.append(client)
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError):
            startup = self._startup(client)
            if self._refuse:
                fields = b"SFATAL\0C08P01\0M" + self._refuse.encode() + b"\0\0"
                client.sendall(b"E" + struct.pack(">I", len(fields) + 4) + fields)
                client.close()
                return
            server = socket.create_connection(self._target)
            self._sockets.append(server)
            server.sendall(startup)
            threading.Thread(target=self._pump, args=(server, client), daemon=True).start()
            while True:
                header = _exactly(client, 5)
                body = _exactly(client, struct.unpack(">I", header[1:])[0] - 4)
                if header[:1] == b"d" and body[:1] == b"r":
                    write, flush, apply, _, reply = struct.unpack(">QQQQB", body[1:])
                    self.feedback.append((time.monotonic(), write, flush, apply, bool(reply)))
                server.sendall(header + body)

    def _startup(self, client: socket.socket) -> bytes:
        while True:
            size, code = struct.unpack(">II", _exactly(client, 8))
            body = _exactly(client, size - 8)
            if code == 196608:
                break
            client.sendall(b"N")  # no TLS, no GSS encryption here
        words = body.split(b"\0")[:-2]
        pairs = dict(zip(words[::2], words[1::2], strict=True))
        if self._drop_options:
            pairs.pop(b"options", None)
        kept = b"".join(name + b"\0" + value + b"\0" for name, value in pairs.items()) + b"\0"
        return struct.pack(">II", len(kept) + 8, code) + kept

    @staticmethod
    def _pump(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


def _exactly(source: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = source.recv(size - len(data))
        if not more:
            raise EOFError
        data += more
    return data


def slot_name(database_name: str) -> str:
    """A slot's name that is this test's own: slots belong to the whole server."""
    return f"s_{database_name}"[:63]
