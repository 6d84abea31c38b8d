"""Waking readers in other processes, and doing without."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from psycopg2.extensions import connection as Connection

from tests.conftest import Database, Server
from tests.integration.order_bench import OrderBench, bench, module_database, until
from walstream.errors import Unavailable
from walstream.order.wake import Listener, Notifier, channel_of


@pytest.fixture(scope="module")
def shared(server: Server) -> Iterator[Database]:
    with module_database(server, "wake") as made:
        yield made


@pytest.fixture
def order(shared: Database) -> Iterator[OrderBench]:
    with bench(shared.dsn, namespace='Näme "x"') as made:
        yield made


@pytest.fixture
def listener(order: OrderBench) -> Iterator[Listener]:
    made = Listener(order.connect, order.namespace, 60)
    assert made.wait(60), "listening begins: what grew before was not announced"
    assert made.listening
    yield made
    made.close()


def test_channels_fit_and_differ() -> None:
    names = ["walstream", "a" * 63, "a" * 62 + "b", "漢" * 21]
    channels = [channel_of(name) for name in names]
    assert all(len(channel.encode()) <= 63 for channel in channels)
    assert len(set(channels)) == len(names)


def test_a_notification_wakes_a_listener(order: OrderBench, listener: Listener) -> None:
    other = Listener(order.connect, "another stream", 60)
    other.wait(60)
    notifier = Notifier(order.connect, order.namespace)
    with ThreadPoolExecutor(1) as pool:
        for _ in range(3):
            waiting = pool.submit(listener.wait, 60)
            notifier.notify()
            assert waiting.result(60)
    notifier.close()
    assert not other.wait(0.05)
    other.close()


def test_without_news_a_wait_ends_with_its_timeout(listener: Listener) -> None:
    assert not listener.wait(0.01)


def test_many_calls_become_few_notifications(order: OrderBench) -> None:
    entered, gate = threading.Event(), threading.Event()

    def connect() -> Connection:
        entered.set()
        gate.wait(60)
        return order.connect()

    heard = order.connect()
    with heard.cursor() as cursor:
        cursor.execute(f'LISTEN "{channel_of(order.namespace).replace(chr(34), chr(34) * 2)}"')
    notifier = Notifier(connect, order.namespace)
    notifier.notify()
    assert entered.wait(60)
    for _ in range(10_000):
        notifier.notify()
    gate.set()

    def count() -> int:
        heard.poll()
        return len(heard.notifies)

    until(lambda: count() == 2, "one that was on its way and one for all the others")
    notifier.close()
    assert count() == 2


@pytest.mark.parametrize(
    "bad",
    [("a" * 64, ""), ("jobs", "x" * 8000), ("jobs", "a\0b"), ("jobs", "\ud800")],
    ids=["a channel that is too long", "a payload that is too long", "a NUL", "half a character"],
)
def test_what_cannot_be_announced_silences_nobody_else(
    order: OrderBench, listener: Listener, bad: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """It is dropped; what came together with it is announced, and so is what comes later."""
    entered, gate = threading.Event(), threading.Event()

    def connect() -> Connection:
        entered.set()
        gate.wait(60)
        return order.connect()

    jobs = Listener(order.connect, order.namespace, 60, channel="jobs", payloads=["good", "later"])
    jobs.wait(60)
    notifier = Notifier(connect, order.namespace)
    notifier.notify("warm", "up")
    assert entered.wait(60)
    notifier.notify("jobs", "good")
    notifier.notify(*bad)
    notifier.notify()
    gate.set()
    assert listener.wait(60)
    assert jobs.wait(60)
    notifier.notify("jobs", "later")
    assert jobs.wait(60)
    assert len([record for record in caplog.records if "not announced on channel" in record.getMessage()]) == 1
    notifier.close()
    jobs.close()


def test_what_cannot_be_sent_for_long_is_not_kept_without_end() -> None:
    tried = threading.Event()

    def refused() -> Connection:
        tried.set()
        raise Unavailable("away")

    notifier = Notifier(refused, "walstream")
    for number in range(30_000):
        notifier.notify("jobs", str(number))
        if number == 5_000:
            assert tried.wait(60)
    notifier.notify()
    assert len(notifier._due) <= 20_001
    assert channel_of("walstream") in [channel for channel, _ in notifier._due]
    notifier.close()


def test_a_lost_connection_is_made_again(order: OrderBench, listener: Listener) -> None:
    """Neither side fails, and what was announced in between is not missed: a new LISTEN is a reason to look."""
    notifier = Notifier(order.connect, order.namespace)
    notifier.notify()
    assert listener.wait(60)
    order.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
        " AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
    )
    assert listener.wait(60), "the loss is a reason to look"
    assert not listener.listening
    until(lambda: listener.wait(0.05) and listener.listening, "LISTEN again")
    listener.wait(0)
    notifier.notify()
    until(lambda: listener.wait(0.05), "NOTIFY again")
    notifier.close()


def test_where_nothing_can_be_connected_readers_poll() -> None:
    def refused() -> Connection:
        raise Unavailable("no listening here")

    listener = Listener(refused, "walstream", 0.05)
    assert not listener.wait(3600)  # the poll's interval bounds every wait
    assert not listener.listening
    notifier = Notifier(refused, "walstream")
    notifier.notify()
    notifier.close()
    assert not notifier._thread.is_alive()
    listener.close()
    listener.wake()  # after the end: nothing


def test_a_listener_works_where_many_files_are_open() -> None:
    """An application with more than 1,024 descriptors in use: ``select`` cannot take those above."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1200:
        pytest.skip("a process may not open so many files here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    held: list[int] = []
    try:
        while not held or held[-1] < 1030:
            held.append(os.open(os.devnull, os.O_RDONLY))

        def refused() -> Connection:
            raise Unavailable("no listening here")

        listener = Listener(refused, "walstream", 60)
        assert not listener.wait(0.01)
        listener.wake()
        assert listener.wait(60)
        listener.close()
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_wait_can_be_ended(listener: Listener) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(listener.wait, 60)
        listener.wake()
        assert waiting.result(60)
    listener.wake()
    assert listener.wait(60)
    assert not listener.wait(0.01), "several calls are one"


def test_a_channel_of_its_own_and_only_what_is_meant(order: OrderBench) -> None:
    channel = "jobs of a stream"
    mine = Listener(order.connect, order.namespace, 60, channel=channel, payloads=("me", ""))
    mine.wait(60)
    notifier = Notifier(order.connect, order.namespace)
    notifier.notify(channel, "somebody else")
    notifier.notify()
    assert not mine.wait(0.3)
    for payload in ("me", ""):
        notifier.notify(channel, payload)
        until(lambda: mine.wait(0.05), f"{payload!r} is heard")
    notifier.close()
    mine.close()
