"""Who waits for an answer that cannot come is woken; who waits for one that takes long is not."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg2
import pytest
from psycopg2.extensions import make_dsn

from tests.chaos.network import Network
from walstream.errors import ConnectionLost, WalstreamError
from walstream.postgres import PostgresServer
from walstream.source import answers, connection
from walstream.source.answers import AskingConnection, Lookout
from walstream.source.connection import connect
from walstream.source.failures import classify


class Asking:
    """A connection through a bad network, on which a thread waits."""

    def __init__(self, server: PostgresServer, network: Network) -> None:
        dsn = str(make_dsn(server.dsn(tcp=True), port=str(network.port)))
        made = connect(dsn, application_name="test", connect_timeout=2)
        assert isinstance(made, AskingConnection)
        self.connection = made
        self.error: BaseException | None = None
        self.lookout = Lookout(patience=0.3, again=0.3)
        self.lookout.add(made)

    def ask(self, sql: str) -> threading.Thread:
        thread = threading.Thread(target=self._ask, args=(sql,), daemon=True)
        thread.start()
        return thread

    def _ask(self, sql: str) -> None:
        try:
            with self.connection.cursor() as cur:
                cur.execute(sql)
        except psycopg2.Error as error:
            self.error = error

    def look_until(self, ended: Callable[[], bool], seconds: float) -> bool:
        until = time.monotonic() + seconds
        while not ended() and time.monotonic() < until:
            self.lookout.look()
            time.sleep(0.1)
        return ended()


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with PostgresServer(durable=False) as made:
        yield made


@pytest.fixture
def asking(server: PostgresServer) -> Iterator[tuple[Asking, Network]]:
    with Network(server.port) as network:
        yield Asking(server, network), network


@pytest.mark.parametrize("told", ["server", "both"])
@pytest.mark.parametrize("sql", ["SELECT 1", "COMMIT"])
def test_a_session_that_the_server_has_forgotten_is_given_up(
    asking: tuple[Asking, Network], told: str, sql: str
) -> None:
    """Whether it is gone there, or idle because it was never asked."""
    one, network = asking
    if told == "server":
        assert network.half_open("server") == 1
    else:
        assert network.half_open("both") == 1
    thread = one.ask(sql)
    assert one.look_until(lambda: not thread.is_alive(), 60), "it waits still"
    assert one.error is not None
    assert isinstance(classify(one.error, doing="asking"), ConnectionLost)


def test_a_commit_without_a_cursor_is_looked_after_too(asking: tuple[Asking, Network]) -> None:
    one, network = asking
    one.connection.autocommit = False
    with one.connection.cursor() as cur:
        cur.execute("SELECT 1")
    network.half_open("server")

    def commit() -> None:
        with pytest.raises(psycopg2.OperationalError):
            one.connection.commit()

    thread = threading.Thread(target=commit, daemon=True)
    thread.start()
    assert one.look_until(lambda: not thread.is_alive(), 60), "it waits still"


@pytest.mark.parametrize("lost", ["before it began", "in the middle", "at its end"])
def test_rows_that_are_streamed_are_looked_after_too(asking: tuple[Asking, Network], lost: str) -> None:
    """A cursor on the server asks with every fetch, and when it is closed."""
    one, network = asking
    one.connection.autocommit = False
    cursor = one.connection.cursor("rows")
    cursor.itersize = 10

    errors: list[psycopg2.Error] = []

    def stream() -> None:
        try:
            if lost == "before it began":
                network.half_open("both")
            cursor.execute("SELECT generate_series(1, 1000)")
            if lost == "at its end":
                cursor.fetchone()
                network.half_open("both")
                cursor.close()
            for (number,) in cursor:
                if number == 20:
                    network.half_open("both")
        except psycopg2.Error as error:
            errors.append(error)

    thread = threading.Thread(target=stream, daemon=True)
    thread.start()
    assert one.look_until(lambda: not thread.is_alive(), 20), "it waits still"
    assert len(errors) == 1


def test_rows_that_are_streamed_come_as_they_are(asking: tuple[Asking, Network]) -> None:
    one, _ = asking
    one.connection.autocommit = False
    cursor = one.connection.cursor("rows", scrollable=True)
    cursor.execute("SELECT generate_series(1, 10)")
    assert cursor.fetchone() == (1,)
    assert cursor.fetchmany(2) == [(2,), (3,)]
    cursor.scroll(-1)
    assert next(cursor) == (3,)
    assert [number for (number,) in cursor] == list(range(4, 11))
    assert cursor.fetchall() == []
    cursor.close()


def test_a_statement_that_takes_long_is_left_alone(asking: tuple[Asking, Network]) -> None:
    one, _ = asking
    thread = one.ask("SELECT pg_sleep(2)")
    assert one.look_until(lambda: not thread.is_alive(), 60)
    assert one.error is None


def test_nothing_is_given_up_while_nothing_is_known(asking: tuple[Asking, Network]) -> None:
    """The network stands still: nobody can tell a session that is lost from one that is slow."""
    one, network = asking
    network.stall()
    thread = one.ask("SELECT 1")
    assert not one.look_until(lambda: not thread.is_alive(), 2)
    network.mend()
    assert one.look_until(lambda: not thread.is_alive(), 60)
    assert one.error is None


@pytest.mark.skipif(not hasattr(socket, "TCP_INFO"), reason="this system does not say when data arrived")
def test_an_answer_that_trickles_in_is_waited_for(asking: tuple[Asking, Network]) -> None:
    """The server has handed it to its kernel, and is idle."""
    one, network = asking
    network.slow(0.05, 2e6)
    thread = one.ask("SELECT repeat('x', 4000000)")
    assert one.look_until(lambda: not thread.is_alive(), 60)
    assert one.error is None


def test_a_connection_that_is_lost_before_its_first_answers(
    server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has let it in, and nobody looks after it yet."""
    verify = connection._verify
    with Network(server.port) as network:

        def lose(*arguments: Any) -> None:
            assert network.half_open("both") == 1
            verify(*arguments)

        monkeypatch.setattr(connection, "_verify", lose)
        monkeypatch.setattr(connection, "FIRST_ANSWERS", 0.5)
        with pytest.raises(WalstreamError) as caught:
            connect(str(make_dsn(server.dsn(tcp=True), port=str(network.port))), application_name="test")
    assert caught.value.transient


def test_the_lookout_s_own_question_is_not_answered(
    asking: tuple[Asking, Network], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gives that up, and finds the other connection when it asks again."""
    one, network = asking
    monkeypatch.setattr(answers, "_OWN_PATIENCE", 0.5)
    again = one.connection.again
    assert again is not None
    asked: list[psycopg2.extensions.connection] = []

    def lost() -> psycopg2.extensions.connection:
        made = again()
        if not asked:
            network.half_open("both")
        asked.append(made)
        return made

    one.connection.again = lost
    network.half_open("both")
    thread = one.ask("SELECT 1")
    assert one.look_until(lambda: not thread.is_alive(), 60), "it waits still"
    assert len(asked) > 1
