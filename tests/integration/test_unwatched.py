"""The slot was moved or made anew: what was done to rows meanwhile was never sent, and that is on record, once."""

from __future__ import annotations

import time

import pytest

from tests.cli_calls import call, ok
from tests.conftest import Database
from walstream.engine.unwatched import ORDINAL

from .streams import Installed, Recorder, eventually

FOUND = "SELECT kind, origin, ordinal, detail FROM walstream.violations ORDER BY id"
MOVED = "SELECT pg_replication_slot_advance(%s, pg_current_wal_insert_lsn())"
DROPPED = "SELECT pg_drop_replication_slot(%s)"


def run_for_a_moment(stream: Installed, *, found: bool = False) -> None:
    """Start, read what is there and one event more, and stop; if something is ``found``, once that is on record."""
    recorder = Recorder()
    with stream.host(recorder):
        stream.insert("one more")
        eventually(lambda: "one more" in recorder.types, "it is read")
        if found:  # an event may be delivered before that
            eventually(lambda: stream.place.execute(FOUND), "it is on record")


@pytest.mark.parametrize(("by", "words"), [(MOVED, "somebody else has moved it"), (DROPPED, "was made anew")])
def test_a_delete_that_was_never_sent_leaves_a_trace(database: Database, by: str, words: str) -> None:
    stream = Installed(database, "--audit")
    for _ in range(2):
        run_for_a_moment(stream)
    assert database.execute(FOUND) == [], "a clean stop and a start are nothing"
    database.execute("DELETE FROM agent_events WHERE seq = 1")
    database.execute(by, stream.settings.slot)
    for _ in range(2):  # and once is enough
        run_for_a_moment(stream, found=True)
        ((kind, origin, ordinal, detail),) = database.execute(FOUND)
        assert (kind, origin, ordinal) == ("slot", "catalogue", ORDINAL)
        assert words in detail
    problems = call("status", "--json", "--slot", stream.settings.slot, dsn=database.dsn).json["problems"]
    assert any("TAMPER ALARM" in each and words in each for each in problems)


@pytest.mark.parametrize("by", [MOVED, DROPPED])
def test_where_changes_are_not_published_it_is_a_recovery_like_others(database: Database, by: str) -> None:
    stream = Installed(database)
    run_for_a_moment(stream)
    database.execute(by, stream.settings.slot)
    run_for_a_moment(stream)
    assert database.execute(FOUND) == []


def test_a_consumer_that_is_cut_off_again_and_again_is_nothing(database: Database) -> None:
    """The slot is confirmed behind what is written down, and never before."""
    stream = Installed(database, "--audit")
    recorder = Recorder()
    with stream.host(recorder):
        for n in range(8):
            stream.insert(f"event {n}")
            database.execute("CREATE TABLE IF NOT EXISTS other (n int); INSERT INTO other VALUES (1)")
            database.execute(
                "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = %s",
                stream.settings.slot,
            )
            eventually(lambda n=n: f"event {n}" in recorder.types, "it is read")  # type: ignore[misc]
    assert database.execute(FOUND) == []


def test_who_stepped_over_a_change_has_a_violation_already(database: Database) -> None:
    stream = Installed(database, "--audit")
    run_for_a_moment(stream)
    database.execute(
        "INSERT INTO walstream.violations (kind, commit_lsn, ordinal, detail)"
        " VALUES ('gap', pg_current_wal_insert_lsn(), 0, 'stepped over')"
    )
    database.execute(MOVED, stream.settings.slot)
    run_for_a_moment(stream)
    assert [kind for kind, *_ in database.execute(FOUND)] == ["gap"]


def test_what_is_ignored_or_may_not_be_seen_holds_nobody_up(database: Database) -> None:
    stream = Installed(database, "--audit", violations="ignore")
    run_for_a_moment(stream)
    database.execute(MOVED, stream.settings.slot)
    run_for_a_moment(stream)
    assert database.execute(FOUND) == []


@pytest.mark.parametrize("by", [MOVED, DROPPED])
def test_a_ledger_that_halts_goes_on_after_the_stretch_is_acknowledged(database: Database, by: str) -> None:
    """`violations = halt`: nothing behind it is ordered before, and it halts for it once."""
    stream = Installed(database, "--audit", violations="halt")
    run_for_a_moment(stream)
    stream.insert("missed")
    database.execute(by, stream.settings.slot)
    recorder = Recorder()
    with stream.host(recorder) as host:
        assert host.ingest is not None
        eventually(lambda: host.ingest and host.ingest.state.state == "halted", "it halts for the stretch")
        stream.insert("behind")
        time.sleep(1.0)
        assert [kind for kind, *_ in database.execute(FOUND)] == ["slot"]
        assert recorder.types in ([], ["missed"]), "a slot that is made anew has taken what it missed from the ledger"
        ok("audit", "acknowledge", "--note", "known", dsn=database.dsn)
        eventually(lambda: sorted(recorder.types) == ["behind", "missed"], "it goes on, and misses nothing")
        assert host.ingest.error is None
    run_for_a_moment(stream)  # and it does not halt again
    assert [kind for kind, *_ in database.execute(FOUND)] == ["slot"]


UPDATED = "UPDATE agent_events SET payload = '{}' WHERE seq = 1"
LARGE = (
    "INSERT INTO agent_events (session_id, agent_id, event_type, payload)"
    " VALUES (gen_random_uuid(), 'a', 'large', jsonb_build_object('x', repeat('x', 100000)))"
)


@pytest.mark.parametrize("statement", [UPDATED, LARGE], ids=["changes alone", "a large event, whose commit is a piece"])
def test_what_is_confirmed_is_written_down_before(database: Database, statement: str) -> None:
    """Else a kill right after that looks like somebody else who has moved the slot, and `halt` would halt for it."""
    stream = Installed(database, "--audit")
    moved = (
        "SELECT s.confirmed_flush_lsn > greatest(n.confirmed_lsn, "
        " (SELECT max(o.last_lsn) FROM walstream.commit_order o))"
        " FROM walstream.ingest n JOIN pg_replication_slots s ON s.slot_name = %s"
    )
    with stream.host(lease_seconds=600, idle_persist_seconds=600, chunk_bytes=65536):  # the heartbeat writes too late
        stream.insert("before")
        stream.wait_ordered()
        for _ in range(3):
            ((begins,),) = database.execute("SELECT pg_current_wal_insert_lsn() - '0/0'")
            database.execute(statement)
            eventually(lambda begins=begins: stream.confirmed() > begins, "it is confirmed")  # type: ignore[misc]
            assert database.execute(moved, stream.settings.slot) == [(False,)]
