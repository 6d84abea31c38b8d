"""A connection on which nothing comes and nothing goes is noticed within ten seconds, and a walsender that is busy is
not taken for one (docs/operations.md, "Connections that are lost without a word")."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from psycopg2.extensions import make_dsn

from tests.chaos.network import Network
from tests.integration.streams import INSERT, Installed, Recorder, eventually
from walstream.engine.host import Host
from walstream.postgres import PostgresServer

NOTICED = 10.0
SLACK = 10.0  # of a machine on which others work


class Through:
    """A database that is reached through a bad network; tests reach it without."""

    name = "through"

    def __init__(self, server: PostgresServer, network: Network) -> None:
        self._server, self._network = server, network
        server.execute(f"CREATE DATABASE {self.name}")

    @property
    def dsn(self) -> str:
        return str(make_dsn(self._server.dsn(self.name, tcp=True), port=str(self._network.port)))

    def execute(self, sql: str, *args: Any) -> list[tuple[Any, ...]]:
        return self._server.execute(sql, *args, dbname=self.name)


@pytest.fixture
def network(own_server: Callable[..., PostgresServer]) -> Iterator[tuple[Through, Network]]:
    server = own_server()
    with Network(server.port) as made:
        yield Through(server, made), made


def stream_port(host: Host) -> int:
    """The port from which its replication connection leads."""
    assert host.ingest is not None
    session: Any = host.ingest._session
    with socket.socket(fileno=os.dup(session._stream._connection.fileno())) as own:
        return int(own.getsockname()[1])


@pytest.mark.slow
@pytest.mark.parametrize("told", ["server", "both"])
@pytest.mark.parametrize("which", ["the stream alone", "all"])
def test_lost_without_a_word(network: tuple[Through, Network], which: str, told: Any) -> None:
    """Default settings. The time is taken until an event has come that was written afterwards."""
    place, bad = network
    stream = Installed(place, lease_seconds=10, poll_seconds=1)
    recorder = Recorder()
    with stream.host(recorder) as host:
        stream.insert("before")
        eventually(lambda: recorder.got, "it streams")
        time.sleep(1)
        lost = bad.half_open(told, client=stream_port(host) if which != "all" else None)
        assert lost >= 1
        began = time.monotonic()
        time.sleep(0.1)
        place.execute(INSERT, "after")
        eventually(lambda: recorder.types[-1:] == ["after"], "it is noticed", timeout=60)
        took = time.monotonic() - began
        assert stream.wait_ordered() == [1, 2]
    assert took < NOTICED + SLACK
    assert recorder.types.count("after") == 1


@pytest.mark.slow
def test_a_walsender_that_decodes_for_long_is_left_alone(
    own_server: Callable[..., PostgresServer], caplog: pytest.LogCaptureFixture
) -> None:
    """It sends nothing, lets no canary pass and answers nothing, for far longer than a silent stream is looked at."""
    server = own_server()
    server.execute("CREATE DATABASE busy")

    class Place:
        name = "busy"
        dsn = server.dsn("busy", tcp=True)

        def execute(self, sql: str, *args: Any) -> list[tuple[Any, ...]]:
            return server.execute(sql, *args, dbname="busy")

    stream = Installed(Place(), liveness_seconds=1, lease_seconds=10)
    server.execute("CREATE TABLE other (n int, t text)", dbname="busy")
    recorder = Recorder()
    with caplog.at_level(logging.WARNING), stream.host(recorder) as host:
        stream.insert("before")
        eventually(lambda: recorder.got, "it streams")
        server.execute(
            "INSERT INTO other SELECT i, repeat('x', 100) FROM generate_series(1, 3000000) AS i", dbname="busy"
        )
        stream.insert("after")
        silent = 0.0
        until = time.monotonic() + 300
        while recorder.types[-1] != "after" and time.monotonic() < until:
            assert host.ingest is not None
            silent = max(silent, host.ingest.silence or 0.0)
            time.sleep(0.02)
        assert recorder.types == ["before", "after"]
    assert silent > 4.0, "otherwise nothing was tested"
    assert not [record for record in caplog.records if "reconnects" in record.message]
