"""A TCP proxy that is a bad network: it cuts, stalls, half-opens and slows the connections that go through it."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from types import TracebackType
from typing import Final, Literal

_BLOCK: Final = 1 << 16
_RESET: Final = struct.pack(
    "ii", 1, 0
)  # SO_LINGER: closing sends RST, as a host does that knows the connection no more

Side = Literal["client", "server", "both"]


class Link:
    """One connection through the proxy: two sockets, and a thread for each direction."""

    def __init__(self, network: Network, client: socket.socket, server: socket.socket) -> None:
        self._network = network
        self._client = client
        self._server = server
        self._lost = False
        self.client_port = int(client.getpeername()[1])
        self._threads = [
            threading.Thread(target=self._pump, args=pair, daemon=True) for pair in ((client, server), (server, client))
        ]
        for thread in self._threads:
            thread.start()

    def cut(self) -> None:
        """Reset it on both sides."""
        for each in (self._client, self._server):
            _reset(each)

    def close(self) -> None:
        """The end of it, whatever became of it."""
        self.cut()
        for thread in self._threads:
            thread.join(60)

    def half_open(self, side: Side) -> None:
        """Carry nothing any more. Only ``side`` is told; with ``both``, nobody is."""
        self._lost = True
        told = {"client": self._client, "server": self._server}.get(side)
        if told is not None:
            _reset(told)

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_BLOCK):
                self._network.hold_up(len(data))
                if not self._lost:  # what is sent into a lost connection is taken, and goes nowhere
                    target.sendall(data)
        if not self._lost:
            for each in (source, target):
                _close(each)
            self._network.forget(self)


class Network:
    """Passes on to a server whatever comes, as well as it is told to.

    Args:
        port: of the server, on 127.0.0.1.

    Attributes:
        port: where it listens.
    """

    def __init__(self, port: int) -> None:
        self._server = port
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = int(self._listener.getsockname()[1])
        self._lock = threading.Lock()
        self._links: list[Link] = []
        self._lost: list[Link] = []  # which must not be forgotten: a socket that nobody knows is closed
        self._flowing = threading.Event()
        self._flowing.set()
        self._delay = 0.0
        self._rate = 0.0
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def __enter__(self) -> Network:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _close(self._listener)
        self._thread.join(60)
        self.mend()
        for link in self._take() + self._lost:
            link.close()

    def cut(self) -> int:
        """Reset every connection; how many there were."""
        links = self._take()
        for link in links:
            link.cut()
        return len(links)

    def half_open(self, side: Side, *, client: int | None = None) -> int:
        """Lose every connection, and tell ``side`` alone; new ones are good. How many there were.

        Args:
            client: only the connection of this port.
        """
        links = self._take(client)
        for link in links:
            link.half_open(side)
        self._lost += links
        return len(links)

    def stall(self) -> None:
        """Carry nothing, in either direction, until :meth:`mend`; nothing is lost."""
        self._flowing.clear()

    def slow(self, delay: float, rate: float) -> None:
        """From now on: so many seconds a piece of data, and bytes a second."""
        self._delay, self._rate = delay, rate

    def mend(self) -> None:
        """Be a good network again."""
        self._delay = self._rate = 0.0
        self._flowing.set()

    def hold_up(self, size: int) -> None:
        """Wait for as long as ``size`` bytes take (called by the links)."""
        self._flowing.wait()
        if self._rate:
            time.sleep(self._delay + size / self._rate)

    def forget(self, link: Link) -> None:
        """It has ended (called by the links)."""
        with self._lock, contextlib.suppress(ValueError):
            self._links.remove(link)

    def _take(self, client: int | None = None) -> list[Link]:
        with self._lock:
            taken = [link for link in self._links if client in (None, link.client_port)]
            self._links = [link for link in self._links if link not in taken]
        return taken

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._server), timeout=5)
            except OSError:
                _reset(client)
                continue
            server.settimeout(None)
            for each in (client, server):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link = Link(self, client, server)
            with self._lock:
                self._links.append(link)


def _reset(each: socket.socket) -> None:
    with contextlib.suppress(OSError):
        each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    _close(each)


def _close(each: socket.socket) -> None:
    # The shutdown wakes the thread that reads from it; a close alone would leave it in there.
    with contextlib.suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)
    each.close()
