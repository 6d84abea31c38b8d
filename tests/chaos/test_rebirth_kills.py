"""A consumer dies, or stands still, while it makes its slot anew: in each durable state, the next one goes on."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from psycopg2.extensions import connection as Connection

from tests.conftest import Database
from tests.integration.births import INSERT, insert_rows
from tests.integration.streams import Installed, Recorder, eventually

from .consumer import Consumer


class Reborn:
    """A stream whose slot is gone, and a consumer that can be held at any step of making it anew."""

    def __init__(self, database: Database, folder: Path) -> None:
        self.database = database
        self.stream = Installed(database)
        self.consumer = Consumer(
            database.dsn,
            folder / "log",
            settings={"SLOT": self.stream.settings.slot},
            environ={"CHAOS_KEY_FILE": str(folder / "keys")},
            flags=("--ingest-only",),
        )
        insert_rows(database, 5)
        database.execute("SELECT pg_drop_replication_slot(%s)", self.stream.settings.slot)

    def hold_order(self) -> Connection:
        """Nothing can be written to the order until this is rolled back. It takes no transaction id."""
        holder = self.database.connect()
        holder.cursor().execute("LOCK TABLE walstream.commit_order IN SHARE MODE")
        return holder

    def state(self) -> str:
        return str(self.database.execute("SELECT slot_state FROM walstream.identity")[0][0])

    def waits(self, name: str) -> bool:
        return bool(
            self.database.execute(
                "SELECT 1 FROM pg_stat_activity WHERE datname = %s AND application_name = %s"
                " AND wait_event_type = 'Lock'",
                self.database.name,
                name,
            )
        )

    def reach_filling(self) -> Connection:
        """The consumer has made the slot, and stands at its first segment from the snapshot."""
        writer = self.database.connect()
        writer.cursor().execute(INSERT)
        self.consumer.start()
        eventually(lambda: self.waits("walstream:create-slot"), "the creation waits for the open transaction")
        insert_rows(self.database, 3)  # after the fill, before the slot: only its snapshot shows them
        holder = self.hold_order()
        writer.commit()
        eventually(lambda: self.waits("walstream:walstream:ingest"), "it stands at a segment from the snapshot")
        assert self.state() == "filling"
        insert_rows(self.database, 4)  # these come through a slot that nobody will believe in
        return holder

    def assert_all_once(self, recorder: Recorder) -> None:
        self.stream.wait_ordered()
        eventually(lambda: len(recorder.got) == len(self.stream.ledger()), "everything was delivered")
        assert [event.offset for event in recorder.got] == list(range(1, len(recorder.got) + 1))
        assert sorted(event.seq for event in recorder.got) == self.stream.ledger()
        # Its rows may be with the projectors before the state is written.
        eventually(lambda: self.state() == "ready", "the new slot is believed in")


@pytest.fixture
def reborn(database: Database, tmp_path: Path) -> Iterator[Reborn]:
    made = Reborn(database, tmp_path)
    yield made
    if made.consumer.running:
        made.consumer.kill()


def test_killed_while_creating(reborn: Reborn) -> None:
    holder = reborn.hold_order()
    reborn.consumer.start()
    eventually(lambda: reborn.waits("walstream:walstream:ingest"), "it stands at its first segment")
    assert reborn.state() == "creating"
    reborn.consumer.kill()
    holder.rollback()
    recorder = Recorder()
    with reborn.stream.host(recorder):
        insert_rows(reborn.database, 2)
        reborn.assert_all_once(recorder)


def test_killed_while_the_slot_is_being_made(reborn: Reborn) -> None:
    writer = reborn.database.connect()
    writer.cursor().execute(INSERT)
    reborn.consumer.start()
    eventually(lambda: reborn.waits("walstream:create-slot"), "the creation waits for the open transaction")
    assert reborn.stream.ordered() == [1, 2, 3, 4, 5], "what stands in the ledger does not wait for the slot"
    reborn.consumer.kill()
    writer.commit()
    recorder = Recorder()
    with reborn.stream.host(recorder):
        insert_rows(reborn.database, 2)
        reborn.assert_all_once(recorder)


def test_killed_while_filling(reborn: Reborn) -> None:
    holder = reborn.reach_filling()
    reborn.consumer.kill()
    holder.rollback()
    recorder = Recorder()
    with reborn.stream.host(recorder):
        insert_rows(reborn.database, 2)
        reborn.assert_all_once(recorder)


def test_stopped_while_filling_and_continued_when_another_has_taken_over(reborn: Reborn) -> None:
    """What it wakes up to do (write the order, call the slot ready, drop it) is another's by then."""
    holder = reborn.reach_filling()
    reborn.consumer.signal(signal.SIGSTOP)
    reborn.database.execute("UPDATE walstream.ingest SET lease_until = now()")  # a birth's lasts a minute
    recorder = Recorder()
    with reborn.stream.host(recorder):
        eventually(
            lambda: reborn.database.execute("SELECT generation > 2 FROM walstream.ingest") == [(True,)], "a take-over"
        )
        holder.rollback()
        reborn.assert_all_once(recorder)
        reborn.consumer.signal(signal.SIGCONT)
        insert_rows(reborn.database, 2)
        reborn.assert_all_once(recorder)
        eventually(lambda: "replaced" in reborn.consumer.output or "connection" in reborn.consumer.output, "it noticed")
        insert_rows(reborn.database, 2)
        reborn.assert_all_once(recorder)
