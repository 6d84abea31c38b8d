"""A TCP proxy before a server that cuts a connection at a chosen statement: before the server has it, or after the
server has answered and before the client hears of it."""

from __future__ import annotations

import contextlib
import re
import select
import socket
import threading
from types import TracebackType
from typing import Final

_READY: Final = b"Z"  # what ends an answer in the protocol of Postgres: ReadyForQuery


class CuttingProxy:
    """Passes everything on, until :meth:`cut` says otherwise.

    Args:
        port: of the server, on 127.0.0.1.

    Attributes:
        port: where the proxy listens.
        cuts: how many connections it has cut.
    """

    def __init__(self, port: int) -> None:
        self._server = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.cuts = 0
        self._lock = threading.Lock()
        self._words: tuple[bytes, ...] = ()
        self._heard = False
        self._answered = True
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> CuttingProxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()

    def cut(self, *words: str, heard: bool, answered: bool = True) -> None:
        """Cut the next connection on which these go by, in this order, at the last of them.

        Args:
            words: regular expressions.
            heard: the server gets it and answers, and the client never hears of it; else the server never gets it.
            answered: if not, the client is cut off before the server has answered.
        """
        with self._lock:
            self._words = tuple(word.encode() for word in words)
            self._heard = heard
            self._answered = answered

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._server)) as server:
            seen: tuple[bytes, ...] = ()
            while True:
                readable, _, _ = select.select([client, server], [], [])
                for each in readable:
                    data = each.recv(1 << 16)
                    if not data:
                        return
                    if each is server:
                        client.sendall(data)
                        continue
                    due, seen = self._judge(data, seen)
                    if due and self._heard:
                        server.sendall(data)
                        if not self._answered:
                            client.shutdown(socket.SHUT_RDWR)
                        self._swallow(server)
                    if due:
                        return
                    server.sendall(data)

    def _judge(self, data: bytes, seen: tuple[bytes, ...]) -> tuple[bool, tuple[bytes, ...]]:
        """Whether to cut now, and which of the words have gone by on this connection."""
        with self._lock:
            if not self._words:
                return False, ()
            if len(seen) < len(self._words) and re.search(self._words[len(seen)], data):
                seen = (*seen, self._words[len(seen)])
            if seen != self._words:
                return False, seen
            self._words = ()
            self.cuts += 1
            return True, ()

    def _swallow(self, server: socket.socket) -> None:
        answer = b""
        while answer[-6:-5] != _READY:  # the letter, four bytes of length, and the state of the transaction
            data = server.recv(1 << 16)
            if not data:
                return
            answer += data
