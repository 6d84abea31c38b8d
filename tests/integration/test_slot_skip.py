"""A change that the server cannot send (C18): it ends ingest, and a person steps over it, on record."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.cli_calls import call, ok
from tests.conftest import Database
from tests.integration.streams import INSERT, Installed, Recorder, eventually
from walstream.errors import DecodeError, ExitCode
from walstream.postgres import PostgresServer

BROKEN = INSERT.replace("'a'", "chr(129)")
"""A byte that the database's encoding has and UTF-8 has not: neither we nor the walsender can read that row."""


@pytest.fixture
def stream(database: Database) -> Installed:
    database.create("ENCODING 'WIN1252' LC_COLLATE 'C' LC_CTYPE 'C'", template="template0")
    made = Installed(database)
    made.insert("before")
    return made


def words(stream: Installed) -> tuple[str, ...]:
    return ("--slot", stream.settings.slot, "--json")


def ends(stream: Installed, recorder: Recorder) -> None:
    """Ingest ends at the change, with what to run."""
    with stream.host(recorder) as host:
        eventually(lambda: host.wait(0), "it ends")
        assert isinstance(host.error, DecodeError)
        assert host.exit_code == ExitCode.DATA
        assert "walstream slot skip" in host.error.hint


def test_that_transaction_alone_is_stepped_over(stream: Installed) -> None:
    stream.place.execute(f"BEGIN; {INSERT}; {BROKEN}; {INSERT}; COMMIT", *["poison"] * 3)
    stream.insert("after")
    recorder = Recorder()
    ends(stream, recorder)
    assert stream.ordered() == [1], "what came before it is ordered"
    ends(stream, recorder)  # again and again
    done = ok("slot", "skip", "--yes", *words(stream), dsn=stream.place.dsn).json
    assert done["unreadable"] == [3]
    with stream.host(recorder):
        stream.insert("last")
        eventually(lambda: len(recorder.got) == 5, "the rest")
    assert sorted(event.seq for event in recorder.got) == [1, 2, 4, 5, 6]
    assert {event.seq for event in recorder.got if event.recovered} == {2, 4}
    assert [event.offset for event in recorder.got] == [1, 2, 3, 4, 5]
    assert stream.place.execute("SELECT kind, seq, xid FROM walstream.violations") == [("gap", 3, done["xid"])]
    assert stream.place.execute("SELECT kind, unreadable FROM walstream.recoveries WHERE kind = 'skip'") == [
        ("skip", [3])
    ]
    # Neither a new slot nor a comparison of everything finds it again.
    stream.place.execute("SELECT pg_drop_replication_slot(%s)", stream.settings.slot)
    with stream.host(recorder):
        stream.insert("more")
        eventually(lambda: len(recorder.got) == 6, "with a new slot")
    assert recorder.types[-1] == "more"


def test_a_ledger_that_halts_goes_on_after_the_gap_is_acknowledged(stream: Installed) -> None:
    """`violations = halt`: the gap is one; then the comparison finds what of the transaction can be read."""
    stream.place.execute(f"BEGIN; {INSERT}; {BROKEN}; {INSERT}; COMMIT", *["poison"] * 3)
    recorder = Recorder()
    ends(stream, recorder)
    done = call("slot", "skip", "--slot", stream.settings.slot, "--yes", dsn=stream.place.dsn)
    assert "cannot be sent on slot" in done.stdout
    with stream.host(recorder, violations="halt") as host:
        assert host.ingest is not None
        eventually(lambda: host.ingest and host.ingest.state.state == "halted", "it halts for the gap")
        stream.insert("after")
        ok("audit", "acknowledge", "--note", "known", dsn=stream.place.dsn)
        eventually(lambda: sorted(event.seq for event in recorder.got) == [1, 2, 4, 5], "all that can be read")
        assert host.ingest.error is None
    # At its next start it neither halts again nor finds the row that was given up.
    with stream.host(recorder, violations="halt"):
        stream.insert("last")
        eventually(lambda: recorder.types[-1] == "last", "it goes on")
    assert [event.offset for event in recorder.got] == [1, 2, 3, 4, 5]


def test_not_where_nothing_is_in_the_way_and_not_beside_a_consumer(stream: Installed) -> None:
    called = call("slot", "skip", "--yes", *words(stream), dsn=stream.place.dsn)
    assert called.exit_code == ExitCode.SLOT
    assert "nothing to step over" in called.error["message"]
    confirmed = stream.confirmed()
    with stream.host():
        stream.wait_ordered()
        called = call("slot", "skip", "--yes", *words(stream), dsn=stream.place.dsn)
        assert called.exit_code == ExitCode.UNAVAILABLE
    assert stream.confirmed() >= confirmed


def test_nothing_is_given_up_unasked(stream: Installed) -> None:
    stream.place.execute(BROKEN, "poison")
    ends(stream, Recorder())
    before = stream.confirmed()
    called = call("slot", "skip", *words(stream), dsn=stream.place.dsn)
    assert called.exit_code == ExitCode.CONFIG
    assert "--yes" in called.error["hint"]
    assert stream.confirmed() == before
    assert stream.place.execute("SELECT count(*) FROM walstream.violations") == [(0,)]


def test_a_single_row(stream: Installed) -> None:
    """One that no slot brings any more."""
    stream.place.execute(BROKEN, "poison")
    ends(stream, Recorder())
    assert "can be read" in call("slot", "skip", "--seq", "99", *words(stream), dsn=stream.place.dsn).error["message"]
    assert "has an offset" in call("slot", "skip", "--seq", "1", *words(stream), dsn=stream.place.dsn).error["message"]
    assert ok("slot", "skip", "--seq", "2", "--yes", *words(stream), dsn=stream.place.dsn).json["unreadable"] == [2]
    assert stream.place.execute("SELECT unreadable FROM walstream.recoveries WHERE kind = 'skip'") == [([2],)]


@pytest.mark.slow
def test_a_payload_whose_text_is_above_a_gigabyte(own_server: Callable[..., PostgresServer]) -> None:
    """The real thing: 2 MB on the disk. Without the command, a new slot cannot help either."""
    server = own_server()
    server.execute("CREATE DATABASE ledger")
    stream = Installed(Database(server, "ledger", made=True))
    stream.insert("before")
    stream.place.execute(
        "INSERT INTO agent_events (session_id, agent_id, event_type, payload) VALUES (gen_random_uuid(), 'a', 'poison',"
        " jsonb_build_object('k', repeat(chr(1), 200 * 1024 * 1024)))"
    )
    stream.insert("after")
    recorder = Recorder()
    with stream.host(recorder) as host:
        eventually(lambda: host.wait(0), "it ends", timeout=180)
        assert isinstance(host.error, DecodeError)
    assert ok("slot", "skip", "--yes", *words(stream), dsn=stream.place.dsn).json["unreadable"] == [2]
    with stream.host(recorder):
        eventually(lambda: recorder.types == ["before", "after"], "the one after it", timeout=60)
