"""The HTTP side: ``/metrics``, ``/healthz``, ``/readyz``, on an address that the configuration names.

Threads of its own, a bounded number of them, each with a time limit: a scraper that is slow, hangs or comes too often
waits or is turned away, and costs ingest nothing. Nothing can be changed through it, and it asks for no password; bind
it to an address that only the monitoring reaches, because it shows the text of errors, which may quote an event.

- ``/healthz``: 200 while the process works as far as it can. Restart it if this fails.
- ``/readyz``: 200 if every part does its work; 503 and the parts that do not, with their reasons. ``/readyz/NAME`` asks
  for one part.
"""

from __future__ import annotations

import json
import logging
import socket
import socketserver
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlsplit

from walstream.errors import ConfigError
from walstream.metrics import METRICS, Metrics

from .health import Health, Source

if TYPE_CHECKING:
    from .exporter import Exporter

log = logging.getLogger("walstream.monitoring")

_AT_ONCE: Final = 8  # requests that are answered at the same time
_SECONDS: Final = 5.0  # for one request, at the most


class MonitoringServer:
    """Answers until it is stopped.

    Args:
        listen: ``HOST:PORT``; ``:PORT`` for all addresses, port 0 for one that is free.
        health: how the process is; quick, and from memory.
        sources: of samples besides ``metrics``.
        metrics: counters and gauges.

    Raises:
        ConfigError: ``listen`` is no address, or not to be had.
    """

    def __init__(
        self, listen: str, health: Callable[[], Health], sources: tuple[Source, ...] = (), metrics: Metrics = METRICS
    ) -> None:
        from .exporter import Exporter  # not needed, and not paid for at each start, where nothing is served

        host, port = parse_address(listen)
        try:
            self._server = _Server(host, port, health, Exporter(metrics, sources))
        except OSError as error:
            raise ConfigError(
                f"metrics_listen {listen!r}: {error.strerror or error}", hint="name a free port of this machine"
            ) from None
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, name="walstream-metrics", daemon=True
        )

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._server.server_address[1])

    def start(self) -> None:
        self._thread.start()
        log.info("metrics and health on http://%s:%d", self._server.server_name, self.port)

    def stop(self) -> None:
        if self._thread.ident is not None:
            self._server.shutdown()
            self._thread.join(2.0)
        self._server.server_close()


def parse_address(listen: str) -> tuple[str, int]:
    """``HOST:PORT`` in its two parts; ``""`` is every address. An IPv6 address stands in brackets.

    Raises:
        ConfigError: it is not of that form.

    >>> parse_address("127.0.0.1:9187"), parse_address("[::1]:9187"), parse_address(":9187")
    (('127.0.0.1', 9187), ('::1', 9187), ('', 9187))
    """
    host, colon, port = listen.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535 or (":" in bare and bare == host):
        raise ConfigError(
            f"metrics_listen {listen!r} is not HOST:PORT", hint="127.0.0.1:9187, [::1]:9187, or :9187 for all addresses"
        )
    return bare, int(port)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 16

    def __init__(self, host: str, port: int, health: Callable[[], Health], exporter: Exporter) -> None:
        self.health = health
        self.exporter = exporter
        self._free = threading.BoundedSemaphore(_AT_ONCE)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.address_family = family
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        # HTTPServer asks the resolver for a name here, which can take as long as the network likes.
        socketserver.TCPServer.server_bind(self)
        host, port = self.server_address[:2]
        self.server_name, self.server_port = str(host), int(port)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)  # it comes again
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        del request
        log.debug("a request from %s was not answered", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _SECONDS
    server_version = "walstream"
    sys_version = ""

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if path == "/metrics":
            content_type, body = self.server.exporter.render(self.headers.get("Accept", ""))
            self._answer(HTTPStatus.OK, body, content_type)
        elif path == "/healthz":
            health = self.server.health()
            self._answer_json(health.live, _document(health, "ok" if health.live else "failing"))
        elif path == "/readyz":
            health = self.server.health()
            words = "ready" if health.ready else "starting" if health.live and health.starting else "not ready"
            self._answer_json(health.ready, _document(health, words))
        elif path.startswith("/readyz/"):
            part = self.server.health().parts.get(path.removeprefix("/readyz/"))
            if part is None:
                self._not_found()
            else:
                self._answer_json(part["ready"], part)
        else:
            self._not_found()

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        log.debug("%s: %s", self.address_string(), format % args)

    def _not_found(self) -> None:
        known = ["/metrics", "/healthz", "/readyz", *(f"/readyz/{name}" for name in self.server.health().parts)]
        self._answer(HTTPStatus.NOT_FOUND, json.dumps({"known": known}).encode(), "application/json")

    def _answer_json(self, good: bool, document: dict[str, Any]) -> None:
        status = HTTPStatus.OK if good else HTTPStatus.SERVICE_UNAVAILABLE
        self._answer(status, json.dumps(document, ensure_ascii=False, default=str).encode(), "application/json")

    def _answer(self, status: HTTPStatus, body: bytes, content_type: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _document(health: Health, status: str) -> dict[str, Any]:
    return {"status": status, "parts": health.parts}
