"""A comparison, or the making of a slot, that is cut short: what it had done is on record, and the next one goes on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.consumer import Consumer
from tests.cli_calls import call
from tests.conftest import Database
from tests.integration.streams import Installed, eventually
from walstream.engine import caretaker, reconciler
from walstream.engine.reconciler import Reconciler
from walstream.errors import ConnectionLost
from walstream.order import reconcile
from walstream.order.reconcile import missing_seqs
from walstream.postgres import PostgresServer

MANY = (
    "INSERT INTO agent_events (session_id, agent_id, event_type, payload)"
    " SELECT gen_random_uuid(), 'a', 't', '{{}}' FROM generate_series(1, {})"
)
ON_RECORD = (
    "SELECT (SELECT coalesce(sum(events), 0) FROM walstream.recoveries),"
    " (SELECT coalesce(sum(events), 0) FROM walstream.commit_order WHERE recovered)"
)


def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconciler, "missing_seqs", partial(missing_seqs, chunk=50))
    monkeypatch.setattr(reconcile, "CANDIDATES", 50)
    monkeypatch.setattr(caretaker, "_AGAIN_AFTER_FAILURE", 0.1)


def missed(stream: Installed, rows: int) -> None:
    """So many rows that the slot never delivers."""
    with stream.host():
        stream.insert("before")
        stream.wait_ordered()
    stream.place.execute(MANY.format(rows))
    stream.place.execute(
        "SELECT pg_replication_slot_advance(slot_name, pg_current_wal_lsn()) FROM pg_replication_slots"
        " WHERE slot_name = %s",
        stream.settings.slot,
    )
    stream.place.execute("CHECKPOINT")  # which makes that durable


def episodes(stream: Installed) -> list[tuple[Any, ...]]:
    """Events and offsets of the comparisons, a row for each part."""
    return stream.place.execute(
        "SELECT events, first_offset, last_offset, min_seq, max_seq FROM walstream.recoveries"
        " WHERE kind = 'reconciler' ORDER BY id"
    )


def test_each_part_of_a_comparison_is_on_record_while_it_goes_on(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Installed(database)
    missed(stream, 200)
    small_chunks(monkeypatch)
    whole = Reconciler._order
    parts: list[int] = []

    def order(self: Reconciler, rows: Any) -> None:
        if rows and len(parts) == 2:
            parts.append(0)
            raise ConnectionLost("the network is gone")
        whole(self, rows)
        if rows:
            parts.append(len(rows))

    monkeypatch.setattr(Reconciler, "_order", order)
    with stream.host():
        eventually(lambda: len(parts) >= 3, "it is cut short")
        assert episodes(stream)[:2] == [(99, 2, 100, 2, 100), (50, 101, 150, 101, 150)]
        assert stream.wait_ordered() == list(range(1, 202))
        eventually(lambda: stream.place.execute(ON_RECORD) == [(200, 200)], "the next one goes on")
    assert episodes(stream)[2][1] == 151
    # Two comparisons, each of which shows as one.
    shown = call("status", "--json", "--slot", stream.settings.slot, dsn=database.dsn).json["recoveries"]
    assert [(each["events"], each["first_offset"], each["last_offset"]) for each in shown[:2]] == [
        (51, 151, 201),
        (149, 2, 150),
    ]


def test_what_was_ordered_and_not_recorded_is_found_in_the_order(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process dies between the two; the next one has never heard of it."""
    stream = Installed(database)
    missed(stream, 200)
    small_chunks(monkeypatch)
    monkeypatch.setattr(caretaker, "_AGAIN_AFTER_FAILURE", 600.0)
    died = []

    def die(self: Reconciler, *_: Any) -> None:
        if self._recorded is not None:
            died.append(self)
            raise ConnectionLost("dead")
        self._recorded = 0

    with monkeypatch.context() as patched:
        patched.setattr(Reconciler, "_record", die)
        with stream.host():
            eventually(lambda: died, "it has ordered a part")
    ordered = len(stream.ordered())
    assert ordered < 201
    assert episodes(stream) == []
    with stream.host():
        stream.wait_ordered()
        eventually(lambda: stream.place.execute(ON_RECORD) == [(200, 200)], "all of it is on record")
    first = episodes(stream)[0]
    assert first[:3] == (ordered - 1, 2, ordered)
    (cause,) = stream.place.execute("SELECT cause FROM walstream.recoveries WHERE kind = 'reconciler' ORDER BY id")[0]
    assert "cut short" in cause


@pytest.mark.slow
@pytest.mark.parametrize("dies", ["the consumer", "the server"])
def test_killed_in_the_middle(own_server: Callable[..., PostgresServer], tmp_path: Path, dies: str) -> None:
    """Many rows that the slot never delivers: some are ordered, and then somebody is gone."""
    rows = 200_000
    server = own_server(wal_writer_delay="2s")
    server.execute("CREATE DATABASE ledger")
    stream = Installed(Database(server, "ledger", made=True))
    missed(stream, rows)

    def ordered() -> int:
        return int(stream.place.execute(ON_RECORD)[0][1])

    with Consumer(stream.place.dsn, tmp_path / "log", settings={"SLOT": stream.settings.slot}) as consumer:
        eventually(lambda: ordered() > 0, "it gets on")
        if dies == "the server":
            server.restart("immediate")
        else:
            consumer.kill()
        in_between = ordered()
        if dies == "the consumer":
            consumer.start()
        eventually(lambda: stream.place.execute(ON_RECORD) == [(rows, rows)], "all is on record", timeout=120)
        assert consumer.running, consumer.output[-2000:]
    assert 0 < in_between < rows, "it was in the middle"
    assert sorted(stream.ordered()) == stream.ledger()
    parts = [(first, last) for _, first, last, _, _ in episodes(stream)]
    assert all(one[1] < two[0] for one, two in pairwise(parts)), "nothing is on record twice"
