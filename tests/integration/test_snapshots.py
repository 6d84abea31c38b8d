"""The snapshot writer, what its rows promise, and ``walstream verify --snapshots``."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg2.extras
import pytest
from psycopg2.extensions import connection as Connection

from tests.cli_calls import call, ok
from tests.conftest import Database, Server
from tests.ledger_oracle import check
from tests.runner_world import SESSIONS, World, eventually, world_on
from walstream import ConfigError, Context, Event, PayloadError, UnknownSession, rebuild_context
from walstream.config import Settings
from walstream.errors import LedgerError
from walstream.ledger.canonical import canonical
from walstream.ledger.fold import BUILTIN, Fold
from walstream.ledger.schema import install
from walstream.ledger.settling import Settling
from walstream.ledger.snapshots import NewSnapshot, SnapshotTable
from walstream.ledger.verifying import Verification
from walstream.projectors.snapshot_writer import SnapshotWriter
from walstream.testing import make_event


@pytest.fixture
def world(server: Server) -> Iterator[World]:
    with world_on(server) as made:
        yield made


class Driver:
    """Drives a writer over everything that has an offset, each event or so many in a transaction."""

    def __init__(self, world: World, *, isolation: str = "read committed", **options: Any) -> None:
        self.world = world
        self.position = 0
        self.projector = SnapshotWriter(**options)
        self.connection = world.connect()
        self.connection.set_session(isolation_level=isolation)
        self.ctx = Context("snapshot-writer", connection=self.connection, settings=world.settings)
        self.projector._folds.lane(self.ctx)._settling._interval = 0

    def run(self, batch: int = 1000) -> None:
        events = [event for event in self.world.events() if event.offset > self.position]
        while events:
            self.ctx.begin()
            self.projector.project(events[:batch], self.ctx)
            self.connection.commit()
            self.position = events[:batch][-1].offset
            events = events[batch:]


def rows(world: World, columns: str = "upto_seq", session: str = SESSIONS[0]) -> list[Any]:
    found = world.execute(f"SELECT {columns} FROM agent_snapshots WHERE session_id = %s ORDER BY upto_seq", session)
    return [row[0] if len(row) == 1 else row for row in found]


def rebuilt(world: World, session: str = SESSIONS[0], **options: Any) -> Any:
    return rebuild_context(world.connection, session, settings=world.settings, **options)


# -- when it writes --------------------------------------------------------------------------------------------------


def test_after_so_many_events_and_at_the_end_of_a_task_and_the_last_ones_stay(world: World) -> None:
    writer = Driver(world, every_events=3, keep=2)
    for _ in range(4):
        for _ in range(3):
            world.add("x.y")
        writer.run(batch=1)
    assert rows(world) == [9, 12]
    world.add("task.completed")
    writer.run()
    assert rows(world) == [12, 13]
    check(world.connection, world.settings)


def test_after_so_many_bytes(world: World) -> None:
    writer = Driver(world, every_bytes=5000)
    world.add("x.y", payload={"text": "x" * 4000})
    writer.run()
    assert rows(world) == []
    world.add("x.y", payload={"text": "x" * 4000})
    writer.run()
    assert rows(world) == [2]


def test_a_snapshot_stands_at_the_end_of_a_transaction(world: World) -> None:
    writer = Driver(world, every_events=2)
    world.add(*["x.y"] * 5)
    writer.run()
    assert rows(world, "upto_seq, upto_offset") == [(5, 5)]


def test_options_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        SnapshotWriter(keep=0)


def test_it_runs_under_the_engine_with_two_lanes_and_is_rebuilt_beside_itself(world: World, tmp_path: Path) -> None:
    last = world.add_many(300, sessions=8, transaction=3)
    group = world.start(SnapshotWriter(every_events=10), projectors={"snapshot-writer": {"lanes": 2}})
    eventually(lambda: world.reached("snapshot-writer", last), what="all is folded")
    group.stop(5)
    assert check(world.connection, world.settings, every=5) >= 8
    world.execute("UPDATE agent_snapshots SET context = '{}' WHERE session_id = %s", SESSIONS[0])
    config = tmp_path / "walstream.toml"
    config.write_text("[projectors.snapshot-writer.options]\nevery_events = 10\n")
    words = ("projectors", "rebuild", "snapshot-writer", "--yes", "--json", "--config", str(config))
    assert ok(*words, dsn=world.database.dsn).json["swapped"]
    assert rows(world, "context = '{}'")[-1] is False
    assert check(world.connection, world.settings, every=5) >= 8
    assert ok("verify", "--snapshots", "--json", dsn=world.database.dsn).json["quarantined"] == []


# -- what a row promises ---------------------------------------------------------------------------------------------


def test_commits_out_of_the_order_of_seq(world: World) -> None:
    """C21: seq n + 1 commits before n; a third one is rolled back and never comes."""
    first, second, third = world.connect(), world.connect(), world.connect()
    low, _gone, high = (_insert(conn, SESSIONS[0]) for conn in (first, second, third))
    second.rollback()
    third.commit()
    writer = Driver(world, every_events=1)
    world.order([high])
    writer.run()
    assert rows(world, "upto_seq, settled_seq < 1, unsettled") == [(3, True, 1)]
    assert rebuilt(world) == rebuilt(world, snapshots=False)
    first.commit()
    # Not ingested yet: the snapshot lacks it, and who rebuilds notices.
    table = SnapshotTable(world.settings, BUILTIN.version)
    with world.connect().cursor() as cur:
        (snapshot,) = table.usable(cur, SESSIONS[0])
        with table.rows_after(cur.connection, SESSIONS[0], snapshot, None) as lacking:
            assert lacking is None
    assert check(world.connection, world.settings) == 0
    world.order([low])
    writer.run()
    assert rows(world, "upto_seq, settled_seq, unsettled") == [(3, 3, 0)]
    assert check(world.connection, world.settings) == 1


def _insert(conn: Connection, session: str, payload: str = "{}", event_type: str = "handoff.emitted") -> int:
    with conn.cursor() as cur:
        cur.execute(
            "INSERT INTO agent_events (session_id, agent_id, event_type, payload) VALUES (%s, 'a', %s, %s)"
            " RETURNING seq",
            (session, event_type, payload),
        )
        row: Any = cur.fetchone()
    return int(row[0])


def test_a_late_saver_does_not_overwrite_a_newer_snapshot(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """C62: positions decide, and never a clock."""
    table = SnapshotTable(world.settings, "1")
    text = canonical({"messages": []}).decode()

    def save(seq: int, offset: int) -> bool:
        made = NewSnapshot(SESSIONS[0], seq, text, offset, 0, 1, b"d")
        with world.connection.cursor() as cur:
            return bool(table.save(cur, [made]))

    assert save(200, 200)
    assert not save(100, 100)
    assert not save(200, 150)
    assert not save(200, 200)
    assert save(200, 201)
    world.execute("UPDATE agent_snapshots SET created_at = '2020-01-01'")
    assert save(300, 300)
    world.execute("UPDATE agent_snapshots SET created_at = '2020-01-01'")
    assert rows(world, "upto_seq, upto_offset") == [(200, 201), (300, 300)]

    # A process that was forgotten, and saves what it has: the session has come further meanwhile.
    world.execute("DELETE FROM agent_snapshots")
    late = Driver(world, every_events=4)
    world.add(*["x.y"] * 3)
    late.run()
    held = late.projector._folds.lane(late.ctx)._held[SESSIONS[0]]
    world.add(*["task.completed"] * 2)
    Driver(world).run()
    caplog.set_level(logging.INFO, "walstream.snapshots")
    late.projector._folds.lane(late.ctx)._saving.save(late.ctx.cursor, [held], 3)
    late.connection.commit()
    assert rows(world) == [5]
    assert "is not saved: a newer one stands" in caplog.text


def test_what_was_not_committed_is_forgotten(world: World) -> None:
    """C61: state and position move together."""
    writer = Driver(world, every_events=2)
    world.add("handoff.emitted")
    world.add("handoff.emitted")
    events = world.events()
    writer.projector.project(events, writer.ctx)
    writer.connection.rollback()
    assert rows(world) == []
    writer.run(batch=1)
    assert rows(world) == [2]
    writer.projector.project(events, Context("snapshot-writer", connection=writer.connection, settings=world.settings))
    writer.connection.commit()
    assert rows(world, "upto_seq, jsonb_array_length(context -> 'handoffs')") == [(2, 2)]
    assert check(world.connection, world.settings) == 1


def test_a_changed_row_is_found_by_its_digest_and_passed_over(world: World, caplog: pytest.LogCaptureFixture) -> None:
    writer = Driver(world, every_events=1)
    for _ in range(3):
        world.add("handoff.emitted")
        writer.run()
    world.execute("UPDATE agent_snapshots SET context = jsonb_set(context, '{handoffs}', '[]') WHERE upto_seq > 1")
    assert len(rebuilt(world)["handoffs"]) == 3
    assert "at seq 3 is damaged" in caplog.text
    assert "at seq 2 is damaged" in caplog.text
    check(world.connection, world.settings)


def test_numbers_keep_their_digits(world: World) -> None:
    """C05."""
    text = (
        '{"n": 9007199254740993, "d": 0.1234567890123456789, "e": 1e400, "t": 1.10, "z": -0.0,'
        ' "x": 1234567890123456789012345678901234567890.5}'
    )
    writer = Driver(world, every_events=1)
    world.add("handoff.emitted", payload_text=text)
    writer.run()
    assert check(world.connection, world.settings) == 1
    assert rebuilt(world)["handoffs"][0]["n"] == 9007199254740993
    assert str(rebuilt(world)["handoffs"][0]["d"]) == "0.1234567890123456789"


def test_a_payload_that_cannot_be_parsed_parks_its_session_and_nobody_else(world: World) -> None:
    """C06."""
    deep = "[" * 5000 + "]" * 5000
    world.add("handoff.emitted", payload_text=deep)
    world.add("x.y", payload_text=deep)  # parsed by no fold
    world.add("task.completed", session=SESSIONS[1])
    last = world.add("x.y", session=SESSIONS[2], payload_text=deep)
    last = world.add("task.completed", session=SESSIONS[2])
    quick = SnapshotWriter()
    quick.retry_first = 0.01
    group = world.start(quick)
    eventually(lambda: world.reached("snapshot-writer", last), what="the others flow on")
    group.stop(5)
    assert [entry[0] for entry in world.parked("snapshot-writer")] == [1, 2]
    assert rows(world, session=SESSIONS[1]) == [3]
    assert rows(world, session=SESSIONS[2]) == [5]
    with pytest.raises(PayloadError, match="seq 1"):
        rebuilt(world)


def test_a_context_that_jsonb_does_not_take_gets_no_snapshot_and_says_so_once(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.execute("ALTER TABLE agent_events ALTER COLUMN payload TYPE json")
    try:
        writer = Driver(world, every_events=1)
        bad, good, digits = SESSIONS[:3]
        _add_json(world, bad, '{"a": "\\u0000"}')
        _add_json(world, good, '{"a": "\\\\u0000"}')  # a backslash and letters
        writer.run()
        _add_json(world, bad, '{"a": "\\ud83d"}')
        _add_json(world, good, '{"a": "\\ud83d\\ude00"}')  # a pair is a character
        _add_json(world, digits, '{"a": 1e200000}')  # which only the server knows to be too long
        writer.run()
        assert rows(world, session=bad) == rows(world, session=digits) == []
        assert len(rows(world, session=good)) == 2
        said = [record.getMessage() for record in caplog.records if "gets no snapshots" in record.getMessage()]
        assert len(said) == 2
        assert bad in said[0]
        assert digits in said[1]
        assert [len(rebuilt(world, session)["handoffs"]) for session in (bad, good, digits)] == [2, 2, 1]
    finally:
        world.execute("DELETE FROM agent_events")
        world.execute("ALTER TABLE agent_events ALTER COLUMN payload TYPE jsonb")


def _add_json(world: World, session: str, text: str) -> None:
    insert = "INSERT INTO agent_events (session_id, agent_id, event_type, payload) VALUES (%s, 'a', %s, %s)"
    world.order([row[0] for row in world.execute(f"{insert} RETURNING seq", session, "handoff.emitted", text)])


def test_sessions_that_do_not_fit_into_memory_are_read_again(world: World) -> None:
    writer = Driver(world, every_events=4, memory_bytes=1)
    for turn in range(12):
        for session in SESSIONS:
            world.add("handoff.emitted", session=session, payload={"turn": turn})
        writer.run()
    lane = writer.projector._folds.lane(writer.ctx)
    assert len(lane._held) == 1
    assert lane.held_bytes == writer.projector._folds.held_bytes < 20_000
    assert all(len(rows(world, session=session)) == 3 for session in SESSIONS)
    assert check(world.connection, world.settings, every=6) == 24


# -- settling --------------------------------------------------------------------------------------------------------


def settled(settling: Settling, conn: Connection) -> int:
    with conn.cursor() as cur:
        mark = settling.advance(cur)
    conn.commit()
    return mark


@pytest.mark.parametrize("end", ["commit", "rollback", "prepared"])
def test_a_number_that_a_transaction_may_still_use_is_not_settled(world: World, end: str) -> None:
    settling, watcher, writer = Settling(world.settings, interval=0), world.connect(), world.connect()
    world.insert("x.y")
    assert settled(settling, watcher) == 1
    _insert(writer, SESSIONS[0])
    world.insert("x.y")
    assert settled(settling, watcher) == 1
    if end == "prepared":
        with writer.cursor() as cur:
            cur.execute("PREPARE TRANSACTION 'held'")
        writer.rollback()
        assert settled(settling, watcher) == 1
        assert settled(Settling(world.settings, interval=0), watcher) == 0
        world.execute("COMMIT PREPARED 'held'")
    else:
        getattr(writer, end)()
    assert settled(settling, watcher) == 3


def test_a_seq_that_somebody_chose_settles_nothing(world: World) -> None:
    """The highest seq that was seen says nothing about the numbers that are yet to be drawn."""
    world.execute(
        "INSERT INTO agent_events (seq, session_id, agent_id, event_type, payload) VALUES (1000, %s, 'a', 'x.y', '{}')",
        SESSIONS[0],
    )
    settling, watcher = Settling(world.settings, interval=0), world.connect()
    assert settled(settling, watcher) == 0
    writer = Driver(world, every_events=1)
    world.order([1000])
    writer.run()
    world.insert("handoff.emitted")
    assert len(rebuilt(world)["handoffs"]) == 1


@pytest.mark.parametrize(
    "back", ["SELECT setval('agent_events_seq_seq', 1)", "ALTER SEQUENCE agent_events_seq_seq RESTART WITH 2"]
)
@pytest.mark.parametrize("noted", [True, False])
def test_a_sequence_that_is_set_back_begins_anew(world: World, back: str, noted: bool) -> None:
    settling, watcher, other = Settling(world.settings, interval=0), world.connect(), world.connect()
    world.insert("x.y")
    world.execute("SELECT setval('agent_events_seq_seq', 1000)")
    if noted:  # it waits for somebody when it happens
        _insert(other, SESSIONS[1])
        assert settled(settling, watcher) == 0
        other.rollback()
    else:
        assert settled(settling, watcher) == 1000
    world.execute(back)
    writer = world.connect()
    low = _insert(writer, SESSIONS[0])
    world.insert("x.y")
    assert settled(settling, watcher) < low
    writer.commit()
    assert settled(settling, watcher) == low + 1


def test_in_repeatable_read_a_number_is_settled_for_the_next_transaction(world: World) -> None:
    settling, watcher = Settling(world.settings, interval=0), world.connect()
    watcher.set_session(isolation_level="REPEATABLE READ")
    with watcher.cursor() as cur:
        cur.execute("SELECT count(*) FROM agent_events")
        world.insert("x.y")
        assert settling.advance(cur) == 0  # this transaction does not see the row
    watcher.commit()
    assert settled(settling, watcher) == 1


@pytest.mark.parametrize(
    ("spoil", "mend"),
    [
        ("ALTER SEQUENCE agent_events_seq_seq CACHE 5", "ALTER SEQUENCE agent_events_seq_seq CACHE 1"),
        ("ALTER SEQUENCE agent_events_seq_seq CYCLE", "ALTER SEQUENCE agent_events_seq_seq NO CYCLE"),
        (
            "ALTER TABLE agent_events ALTER seq SET DEFAULT nextval('agent_events_seq_seq') %% 7",
            "ALTER TABLE agent_events ALTER seq SET DEFAULT nextval('agent_events_seq_seq')",
        ),
        (
            "ALTER TABLE agent_events ALTER seq DROP DEFAULT",
            "ALTER TABLE agent_events ALTER seq SET DEFAULT nextval('agent_events_seq_seq')",
        ),
        ("CREATE TABLE child () INHERITS (agent_events)", "DROP TABLE child"),
    ],
)
def test_where_the_argument_does_not_hold_nothing_settles(world: World, spoil: str, mend: str) -> None:
    settling, watcher = Settling(world.settings, interval=0), world.connect()
    world.insert("x.y")
    world.execute(spoil.replace("%%", "%"))
    try:
        assert settled(settling, watcher) == 0
    finally:
        world.execute(mend)
    assert settled(settling, watcher) == 1


# -- forks -----------------------------------------------------------------------------------------------------------


def test_a_fork_is_saved_once_its_parent_has_settled(world: World) -> None:
    open_writer = world.connect()
    world.add("handoff.emitted")
    low = _insert(open_writer, SESSIONS[0])
    at = world.insert("handoff.emitted")
    world.order(at)
    child, seq = world.execute("SELECT session, seq FROM walstream.fork(%s, %s, 'a')", SESSIONS[0], at[0])[0]
    grandchild, other = world.execute("SELECT session, seq FROM walstream.fork(%s, %s, 'a')", child, seq)[0]
    world.order([seq], [other])
    writer = Driver(world, every_events=1)
    writer.run()
    assert rows(world, session=child) == rows(world, session=grandchild) == []
    check(world.connection, world.settings)
    open_writer.commit()
    world.order([low])
    writer.run()
    world.add("x.y", session=SESSIONS[5])
    writer.run()
    assert rows(world, "jsonb_array_length(context -> 'handoffs')", session=child) == [3]
    assert rows(world, "jsonb_array_length(context -> 'handoffs')", session=grandchild) == [3]
    check(world.connection, world.settings)


def test_what_comes_below_what_was_settled_takes_the_snapshots_back(world: World) -> None:
    world.add("handoff.emitted")
    drawn = world.execute("SELECT nextval('agent_events_seq_seq')")[0][0]  # under no lock: nobody can know
    world.add("handoff.emitted")
    writer = Driver(world, every_events=1)
    writer.run(batch=1)
    assert rows(world, "upto_seq, settled_seq >= 2") == [(1, False), (3, True)]
    world.execute(
        "INSERT INTO agent_events (seq, session_id, agent_id, event_type, payload)"
        " VALUES (%s, %s, 'a', 'handoff.emitted', '{}')",
        drawn,
        SESSIONS[0],
    )
    assert len(rebuilt(world)["handoffs"]) == 2  # the limit: until the writer has seen it
    world.order([drawn])
    writer.run()
    assert len(rebuilt(world)["handoffs"]) == 3
    assert rows(world, "upto_seq, jsonb_array_length(context -> 'handoffs')") == [(1, 1), (3, 3)]
    check(world.connection, world.settings)


def test_what_comes_late_into_a_parent_takes_the_snapshots_of_its_forks_back(world: World) -> None:
    drawn = world.execute("SELECT nextval('agent_events_seq_seq')")[0][0]  # under no lock: nobody can know
    at = world.insert("handoff.emitted")
    world.order(at)
    child, seq = world.execute("SELECT session, seq FROM walstream.fork(%s, %s, 'a')", SESSIONS[0], at[0])[0]
    world.order([seq])
    writer = Driver(world, every_events=1)
    writer.run()
    assert rows(world, "settled_seq >= upto_seq", session=child) == [True]
    world.execute(
        "INSERT INTO agent_events (seq, session_id, agent_id, event_type, payload)"
        " VALUES (%s, %s, 'a', 'handoff.emitted', '{}')",
        drawn,
        SESSIONS[0],
    )
    world.order([drawn])
    writer.run()
    assert rows(world, session=child) == []
    assert len(rebuilt(world, child)["handoffs"]) == 2
    world.add("handoff.emitted", session=child)
    writer.run()
    assert rows(world, "jsonb_array_length(context -> 'handoffs')", session=child) == [3]
    check(world.connection, world.settings)


def test_offsets_of_a_stream_that_is_gone_hold_up_nobody(server: Server) -> None:
    """Only ledger and snapshots were restored from a dump: offsets begin at 1 again."""
    with world_on(server) as world:
        for _ in range(3):
            world.add(*["handoff.emitted"] * 10)
        Driver(world, every_events=1).run()
        assert rows(world, "upto_seq, upto_offset") == [(30, 30)]
        world.execute("DROP SCHEMA walstream CASCADE")
        again = World(world.database)
        again.add(*["handoff.emitted"] * 5)
        Driver(again, every_events=1).run()
        assert rows(again, "upto_seq, upto_offset")[-1] == (35, 5)
        assert len(rebuilt(again)["handoffs"]) == 35
        again.close()


def test_a_release_that_was_rolled_back_takes_the_newer_ones_snapshots_back_too(world: World) -> None:
    """What came below that one's settled seqs meanwhile is missing from its snapshots, and it will not look again."""
    newer = Fold()
    newer.on("note.added")(lambda _context, _event: None)
    world.add("handoff.emitted")
    old = Driver(world, every_events=1)
    old.run()
    drawn = world.execute("SELECT nextval('agent_events_seq_seq')")[0][0]  # under no lock: nobody can know
    world.add("handoff.emitted")
    world.add("handoff.emitted")
    rolled = Driver(world, every_events=1)
    lane = rolled.projector._folds.lane(rolled.ctx)
    lane.fold, lane.table = newer, SnapshotTable(world.settings, newer.version)
    rolled.run()
    assert rows(world, "upto_seq, fold_version, settled_seq >= upto_seq")[-1] == (4, newer.version, True)
    world.execute(
        "INSERT INTO agent_events (seq, session_id, agent_id, event_type, payload)"
        " VALUES (%s, %s, 'a', 'handoff.emitted', '{}')",
        drawn,
        SESSIONS[0],
    )
    world.order([drawn])
    back = Driver(world, every_events=1)
    back.position = rolled.position
    back.run()
    for fold in (BUILTIN, newer):
        assert len(rebuilt(world, fold=fold)["handoffs"]) == 4
        check(world.connection, world.settings, fold)


@pytest.mark.parametrize("first", [True, False])
def test_a_writer_that_holds_nothing_of_the_parent_takes_them_back_too(world: World, first: bool) -> None:
    """The parent has no snapshot, so nothing of it says that the event came late."""
    drawn = []
    for number in range(2):
        if first == (number == 0):
            drawn = [world.execute("SELECT nextval('agent_events_seq_seq')")[0][0]]  # under no lock: nobody can know
        at = world.insert("handoff.emitted")
        world.order(at)
    child, seq = world.execute("SELECT session, seq FROM walstream.fork(%s, %s, 'a')", SESSIONS[0], at[0])[0]
    grandchild, other = world.execute("SELECT session, seq FROM walstream.fork(%s, %s, 'a')", child, seq)[0]
    world.order([seq], [other])
    for _ in range(2):
        world.add("handoff.emitted", session=grandchild)
    writer = Driver(world, every_events=3)
    writer.run()
    assert rows(world, "settled_seq >= upto_seq", session=grandchild) == [True]
    assert rows(world) == rows(world, session=child) == []
    world.execute(
        "INSERT INTO agent_events (seq, session_id, agent_id, event_type, payload)"
        " VALUES (%s, %s, 'a', 'handoff.emitted', '{}')",
        drawn[0],
        SESSIONS[0],
    )
    world.order(drawn)
    again = Driver(world, every_events=3)
    again.position = writer.position
    again.run()
    check(world.connection, world.settings)
    assert len(rebuilt(world, grandchild)["handoffs"]) == 5


def test_a_session_that_goes_on_from_itself_is_an_error_that_says_so(world: World) -> None:
    one, two = SESSIONS[:2]
    for session, parent in ((one, two), (two, one)):
        world.insert("session.forked", session=session, payload={"parent_session": parent, "at_seq": 100})
    with pytest.raises(LedgerError, match="goes on from itself"):
        rebuilt(world, one)
    world.insert("session.forked", session=SESSIONS[3], payload={"parent_session": SESSIONS[4], "at_seq": 100})
    with pytest.raises(LedgerError, match="has no event of that session"):
        rebuilt(world, SESSIONS[3])


# -- verify ----------------------------------------------------------------------------------------------------------


def test_verify_puts_away_what_differs_and_makes_again_what_another_version_made(world: World) -> None:
    dsn = world.database.dsn
    writer = Driver(world, every_events=1)
    for session in SESSIONS[:4]:
        world.add("handoff.emitted", session=session, payload={"n": 1.10})
    writer.run()
    assert ok("verify", "--snapshots", "--json", dsn=dsn).json["right"] == 4
    changed, lied, other, superseded = SESSIONS[:4]
    world.execute("UPDATE agent_snapshots SET context = '{\"a\": 1}' WHERE session_id = %s", changed)
    wrong = canonical({"messages": ["never said"]})
    world.execute(
        "UPDATE agent_snapshots SET context = %s::jsonb, digest = sha256(%s::bytea) WHERE session_id = %s",
        wrong.decode(),
        wrong,
        lied,
    )
    world.execute("UPDATE agent_snapshots SET fold_version = '0', context = '{}' WHERE session_id = %s", other)
    world.execute("UPDATE agent_snapshots SET unsettled = 5, settled_seq = 0 WHERE session_id = %s", superseded)
    assert rebuilt(world, lied) == {"messages": ["never said"]}  # nothing else could tell
    called = call("verify", "--snapshots", "--json", dsn=dsn)
    assert called.exit_code == 1
    found = called.json
    assert (found["right"], found["rebuilt"], found["superseded"], found["failed"]) == (0, 1, 1, [])
    assert {(each["session_id"], each["why"].partition(" ")[0]) for each in found["quarantined"]} == {
        (changed, "its"),
        (lied, "the"),
    }
    assert len(rebuilt(world, lied)["handoffs"]) == len(rebuilt(world, changed)["handoffs"]) == 1
    assert rows(world, "quarantine_note IS NOT NULL", lied) == [True]
    again = ok("verify", "--snapshots", dsn=dsn)
    assert "1 snapshots are right" in again.stdout
    # The writer leaves the row to whoever looks at it, and goes on.
    world.add("handoff.emitted", session=lied)
    writer.run()
    assert rows(world, "quarantined_at IS NULL", lied) == [False, True]
    assert ok("verify", "--snapshots", "--session", lied, "--json", dsn=dsn).json["right"] == 1


def test_a_snapshot_of_what_was_archived_is_used_and_not_put_away(world: World) -> None:
    writer = Driver(world, every_events=1)
    world.add("handoff.emitted")
    writer.run()
    world.execute("INSERT INTO walstream.erasures (first_seq, last_seq, reason) VALUES (1, 1, 'archived')")
    world.execute("DELETE FROM agent_events")
    world.add("handoff.emitted")
    assert len(rebuilt(world)["handoffs"]) == 2
    found = ok("verify", "--snapshots", "--json", dsn=world.database.dsn).json
    assert (found["erased"], found["quarantined"]) == (1, [])
    assert len(rebuilt(world)["handoffs"]) == 2


def test_verify_has_to_be_told_what(world: World) -> None:
    called = call("verify", dsn=world.database.dsn)
    assert called.exit_code == 2
    assert "--snapshots" in called.stderr
    called = call("verify", "--snapshots", "--session", "no id", dsn=world.database.dsn)
    assert called.exit_code == 3
    assert "'no id' is no session id" in called.stderr


def test_a_fold_of_the_application_has_snapshots_of_its_own(world: World) -> None:
    Driver(world, every_events=1)
    world.add("note.added", payload={"text": "a"})
    Driver(world, every_events=1).run()
    fold = Fold()

    @fold.on("note.added", version=2)
    def note_added(context: Any, event: Any) -> None:
        context.setdefault("notes", []).append(event.payload["text"])

    assert rebuilt(world, fold=fold)["notes"] == ["a"]
    assert "notes" not in rebuilt(world)


@pytest.mark.parametrize("autocommit", [True, False])
def test_an_id_that_is_none_is_said_to_be_none(world: World, autocommit: bool) -> None:
    connection = world.connect()
    connection.autocommit = autocommit
    for snapshots in (True, False):
        with pytest.raises(UnknownSession, match="'no id' is no session id"):
            rebuild_context(connection, "no id", settings=world.settings, snapshots=snapshots)
        connection.rollback()


def test_rebuilds_need_no_utf8_no_tuples_and_no_autocommit(world: World) -> None:
    world.add("handoff.emitted", payload={"w": "Grüße"})
    Driver(world, every_events=1).run()
    world.add("handoff.emitted", payload={"w": "é"})
    for encoding in ("UTF8", "LATIN1"):
        conn = psycopg2.connect(world.database.dsn, cursor_factory=psycopg2.extras.RealDictCursor)
        conn.set_client_encoding(encoding)
        found = rebuild_context(conn, SESSIONS[0].upper(), settings=world.settings)
        assert [each["w"] for each in found["handoffs"]] == ["Grüße", "é"]
        conn.close()
    assert json.loads(canonical(rebuilt(world, upto_seq=1)))["handoffs"] == [{"w": "Grüße"}]


# -- other ledgers ---------------------------------------------------------------------------------------------------


def test_a_partitioned_ledger_with_names_of_its_own_and_ids_of_text(database: Database) -> None:
    database.execute(
        """
        CREATE SCHEMA "a%b";
        CREATE TABLE "a%b"."my events" ("no %s" bigserial, thread text NOT NULL, who text NOT NULL, what text NOT NULL,
            "data" json NOT NULL, at timestamptz NOT NULL DEFAULT now(), PRIMARY KEY ("no %s", thread))
            PARTITION BY HASH (thread);
        CREATE INDEX ON "a%b"."my events" (thread, "no %s");
        CREATE TABLE "a%b".p0 PARTITION OF "a%b"."my events" FOR VALUES WITH (MODULUS 2, REMAINDER 0);
        CREATE TABLE "a%b".p1 PARTITION OF "a%b"."my events" FOR VALUES WITH (MODULUS 2, REMAINDER 1)"""
    )
    columns = {"seq": "no %s", "session_id": "thread", "agent_id": "who", "event_type": "what", "payload": "data"}
    ledger = {"namespace": "a%b", "table": "my events", "columns": {**columns, "created_at": "at"}}
    settings = Settings.model_validate({"dsn": database.dsn, "ledger": ledger})
    install(database.connect(), settings)
    sessions = ["it's", "50 %", 'a "b" \\', "ü"]
    reader, other, offset = database.connect(), database.connect(), 0
    reader.autocommit = True
    ctx = Context("snapshot-writer", connection=database.connect(), settings=settings)
    writer = SnapshotWriter(every_events=2, keep=2, memory_bytes=1)
    insert = (
        "INSERT INTO \"a%%b\".\"my events\" (thread, who, what, data) VALUES (%s, 'w', 'handoff.emitted', %s)"
        ' RETURNING "no %%s"'
    )

    def add(conn: Connection, session: str) -> Event:
        nonlocal offset
        with conn.cursor() as cur:
            cur.execute(insert, (session, '{"n": 1e2}'))
            row: Any = cur.fetchone()
        offset += 1
        return make_event(offset, "handoff.emitted", session_id=session, seq=row[0], payload_text='{"n": 1e2}')

    late = []
    for turn in range(8):
        for session in sessions:
            if turn == 4:
                late.append(add(other, session))
            event = add(reader, session)
            writer.project([event], ctx)
            ctx.connection.commit()
    assert check(reader, settings) == len(sessions) * 2
    other.commit()
    assert check(reader, settings) == 0  # the newest two of each lack what came late
    for event in late:
        offset += 1
        event = make_event(offset, "handoff.emitted", session_id=event.session_id, seq=event.seq, payload=event.payload)
        writer.project([event, add(reader, event.session_id)], ctx)
        ctx.connection.commit()
    assert check(reader, settings) >= len(sessions)
    assert Verification(reader, settings, BUILTIN).run().quarantined == []
    with reader.cursor() as cur:
        assert Settling(settings, interval=0).advance(cur) == len(sessions) * 10
        # Who inserts into a partition itself holds a lock on that one alone.
        mark = len(sessions) * 10
        with other.cursor() as direct:
            direct.execute(
                "INSERT INTO \"a%b\".p0 (thread, who, what, data) SELECT t, '', '', '1' FROM"
                ' unnest(%s) AS t WHERE satisfies_hash_partition(\'"a%%b"."my events"\'::regclass, 2, 0, t)'.replace(
                    "a%b", "a%%b"
                ),
                (sessions,),
            )
            held = direct.rowcount
        assert held > 0
        assert Settling(settings, interval=0).advance(cur) == 0
        other.rollback()
        assert Settling(settings, interval=0).advance(cur) == mark + held
