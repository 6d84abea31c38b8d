"""A walsender that costs nothing: it plays what a real one sent, as fast as a client takes it.

Until START_REPLICATION everything is passed on to the real server, so that a client finds there what it expects: login,
settings, the system's identity. After that the recorded messages come in the streaming replication protocol, then
keepalives with the real server's position, as from a walsender that has caught up. What the client says is read and
forgotten.

    python -m tests.benchmarks.mock_walsender RECORDING FOLDER PORT REAL-FOLDER DSN

listens on the Unix socket of ``PORT`` in FOLDER, and passes on to that in REAL-FOLDER.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Final

import psycopg2
from psycopg2.extensions import connection as Connection

from tests.benchmarks.filled_ledger import PUBLICATION, SLOT, FilledLedger
from walstream.lsn import parse_lsn

_KEEPALIVE_SECONDS: Final = 0.05
_BLOCK: Final = 1 << 18
_COPY_BOTH: Final = b"W" + struct.pack(">IBH", 7, 0, 0)
_QUERY: Final = ord("Q")
_START: Final = b"START_REPLICATION"


def record(ledger: FilledLedger, file: Path) -> int:
    """Write what the slot of a filled ledger sends, as frames of the protocol; return how many messages there are."""
    count = 0
    connection = psycopg2.connect(ledger.dsn())
    try:
        with file.open("wb") as out, connection.cursor("record") as cur:
            cur.itersize = 10_000
            cur.execute(
                "SELECT lsn::text, data FROM pg_logical_slot_peek_binary_changes(%s, NULL, NULL,"
                " 'proto_version', '1', 'publication_names', %s)",
                (SLOT, PUBLICATION),
            )
            for text, data in cur:
                lsn = 0 if data[:1] == b"R" else parse_lsn(text)  # as the walsender does
                out.write(_frame(b"w" + struct.pack(">QQq", lsn, lsn, 0) + bytes(data)))
                count += 1
    finally:
        connection.close()
    return count


def serve(recording: Path, folder: Path, port: str, real: Path, dsn: str) -> None:
    """Listen, and play the recording to each client that starts replication; one after the other."""
    frames = recording.read_bytes()
    with socket.socket(socket.AF_UNIX) as listener, contextlib.closing(psycopg2.connect(dsn)) as connection:
        connection.autocommit = True
        listener.bind(str(folder / f".s.PGSQL.{port}"))
        listener.listen()
        while True:
            client, _ = listener.accept()
            with client, socket.socket(socket.AF_UNIX) as server, contextlib.suppress(ConnectionError):
                server.connect(str(real / f".s.PGSQL.{port}"))
                if _pass_on(client, server):
                    _play(client, frames, connection)


def _pass_on(client: socket.socket, server: socket.socket) -> bool:
    """Carry bytes between the two until the client wants replication to start; ``False`` if it ends before that."""
    said = b""
    greeted = False
    with selectors.DefaultSelector() as watched:
        watched.register(client, selectors.EVENT_READ)
        watched.register(server, selectors.EVENT_READ)
        while True:
            for key, _ in watched.select():
                if key.fileobj is server:
                    data = server.recv(_BLOCK)
                    if not data:
                        return False
                    client.sendall(data)
                    continue
                data = client.recv(_BLOCK)
                if not data:
                    return False
                said += data
                while True:
                    start = 1 if greeted else 0  # the first message has no letter in front of its length
                    if len(said) < start + 4:
                        break
                    length = start + int.from_bytes(said[start : start + 4], "big")
                    if len(said) < length:
                        break
                    message, said = said[:length], said[length:]
                    if greeted and message[0] == _QUERY and message[5:].startswith(_START):
                        return True
                    greeted = True
                    server.sendall(message)


def _play(client: socket.socket, frames: bytes, connection: Connection) -> None:
    client.sendall(_COPY_BOTH)
    gone = threading.Event()

    def listen() -> None:
        with contextlib.suppress(OSError):
            while client.recv(_BLOCK):
                pass
        gone.set()

    threading.Thread(target=listen, daemon=True).start()
    view = memoryview(frames)
    for start in range(0, len(view), _BLOCK):
        client.sendall(view[start : start + _BLOCK])
    while not gone.wait(_KEEPALIVE_SECONDS):
        with connection.cursor() as cur:
            cur.execute("SELECT pg_current_wal_flush_lsn()::text")
            ((position,),) = cur.fetchall()
        client.sendall(_frame(b"k" + struct.pack(">QqB", parse_lsn(position), int(time.time() * 1e6), 0)))


def _frame(body: bytes) -> bytes:
    return b"d" + (len(body) + 4).to_bytes(4, "big") + body


if __name__ == "__main__":
    recording_file, own_folder, number, real_folder, address = sys.argv[1:]
    serve(Path(recording_file), Path(own_folder), number, Path(real_folder), address)
