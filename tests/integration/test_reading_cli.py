"""`walstream sessions`, `context`, `events`, `inflight`: what a person and a script read of a ledger."""

from __future__ import annotations

import io
import json
import re
import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from psycopg2.extensions import connection as Connection
from rich.cells import cell_len
from rich.console import Console

from tests.cli_calls import append_to_order, call, ok, set_up
from tests.conftest import Database
from walstream.cli.shown import cut_at_the_end
from walstream.config import Columns, LedgerTable, Settings
from walstream.ledger import sessions as ledger_sessions
from walstream.ledger.ledger import Ledger
from walstream.ledger.rebuild import rebuild_context

RUNS = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "recorded-runs"


@pytest.fixture
def settings(database: Database) -> Settings:
    return set_up(database)


@pytest.fixture
def conn(database: Database, settings: Settings) -> Connection:
    del settings
    made = database.connect()
    made.autocommit = True
    return made


class Writer:
    """Appends to one session."""

    def __init__(self, conn: Connection, settings: Settings, session: str | None = None) -> None:
        self.conn = conn
        self.ledger = Ledger(settings)
        self.session = session or str(uuid.uuid4())

    def __call__(self, event_type: str, agent: str = "planner", **payload: Any) -> int:
        return self.ledger.append(self.session, agent, event_type, payload, on=self.conn).seq

    def say(self, *texts: str) -> int:
        """A window of these messages; its seq."""
        return self("context.loaded", messages=[{"role": "user", "content": text} for text in texts])


@pytest.fixture
def write(conn: Connection, settings: Settings) -> Writer:
    return Writer(conn, settings)


# -- sessions ----------------------------------------------------------------------------------------


def test_sessions_and_how_they_stand(database: Database, conn: Connection, settings: Settings) -> None:
    done, failed, open_, running, again = (Writer(conn, settings) for _ in range(5))
    done.say("x")
    done("tool.invoked", call_id="left open")
    done("task.completed", "reviewer")
    done("handoff.emitted", to="x")  # does not begin it anew
    failed("task.failed", error="no")
    open_("tool.invoked", call_id="c1")
    open_("tool.invoked", call_id="c2")
    running.say("x")
    again("task.completed")
    first_fork = Ledger(settings).fork(open_.session, 10**9, "brancher", on=conn)
    again.say("one more thing")
    found = ok("sessions", "--json", dsn=database.dsn).json
    assert [(each["session_id"], each["state"], each["in_flight"], each["events"]) for each in found] == [
        (again.session, "running", 0, 2),
        (first_fork.session, "in flight", 2, 1),
        (running.session, "running", 0, 1),
        (open_.session, "in flight", 2, 2),
        (failed.session, "failed", 0, 1),
        (done.session, "completed", 1, 4),
    ]
    assert found[-1]["agents"] == ["planner", "reviewer"]
    assert found[1]["forked_from"] == {"session_id": open_.session, "at_seq": found[3]["last_seq"]}
    assert found[0]["forked_from"] is None
    first, last = database.execute("SELECT min(seq), max(seq) FROM agent_events WHERE session_id = %s", done.session)[0]
    assert (found[-1]["first_seq"], found[-1]["last_seq"]) == (first, last)
    assert database.execute(
        "SELECT created_at = %s::timestamptz FROM agent_events WHERE seq = %s", found[-1]["last_at"], last
    ) == [(True,)]
    shown = ok("sessions", dsn=database.dsn).stdout
    for words in ("completed", "failed", "in flight", "running", "planner, reviewer", f"at {found[3]['last_seq']}"):
        assert words in shown


def test_sessions_by_agent_time_and_number(database: Database, conn: Connection, settings: Settings) -> None:
    writers = [Writer(conn, settings) for _ in range(4)]
    for number, write in enumerate(writers):
        write("note", f"agent {number % 2}")
    ids = [write.session for write in writers]
    newest = [each["session_id"] for each in ok("sessions", "--limit", "2", "--json", dsn=database.dsn).json]
    assert newest == [ids[3], ids[2]]
    by_agent = ok("sessions", "--agent", "agent 0", "--json", dsn=database.dsn).json
    assert [each["session_id"] for each in by_agent] == [ids[2], ids[0]]
    assert ok("sessions", "--agent", "nobody", "--json", dsn=database.dsn).json == []
    assert "no session" in ok("sessions", "--agent", "nobody", dsn=database.dsn).stdout
    database.execute("UPDATE agent_events SET created_at = now() - interval '2 hours' WHERE session_id = %s", ids[0])
    database.execute("UPDATE agent_events SET created_at = '2026-01-05 10:00+00' WHERE session_id = %s", ids[1])
    recent = ok("sessions", "--since", "1h", "--json", dsn=database.dsn).json
    assert [each["session_id"] for each in recent] == [ids[3], ids[2]]
    moment = datetime.now(UTC) - timedelta(hours=3)
    for spelled in (moment.isoformat(), moment.replace(tzinfo=None).isoformat(sep=" ")):
        recent = ok("sessions", "--since", spelled, "--json", dsn=database.dsn).json
        assert [each["session_id"] for each in recent] == [ids[3], ids[2], ids[0]]
    wrong = call("sessions", "--since", "yesterday", dsn=database.dsn)
    assert wrong.exit_code == 2
    assert "is no time" in wrong.stderr


def test_sessions_of_an_empty_ledger(database: Database, settings: Settings) -> None:
    del settings
    assert ok("sessions", "--json", dsn=database.dsn).json == []


@pytest.mark.parametrize("walk", [1, 20])
def test_few_sessions_with_many_events(
    database: Database, settings: Settings, monkeypatch: pytest.MonkeyPatch, walk: int
) -> None:
    """Whichever way they are found, they are the same, in the same order."""
    monkeypatch.setattr(ledger_sessions, "_STEP", 100)
    monkeypatch.setattr(ledger_sessions, "_WALK", walk)
    database.execute(
        "INSERT INTO agent_events (session_id, agent_id, event_type, payload)"
        " SELECT md5((n / 150)::text)::uuid, 'agent ' || (n / 150) % 3, 'note', '{}' FROM generate_series(0, 1499) n"
    )
    truth = database.execute("SELECT session_id::text FROM agent_events GROUP BY 1 ORDER BY max(seq) DESC")
    conn = database.connect()
    with conn.cursor() as cur:
        for limit in (1, 3, 10, 99):
            found = ledger_sessions.newest_sessions(cur, settings, limit)
            assert found == [session for (session,) in truth[:limit]]
        found = ledger_sessions.newest_sessions(cur, settings, 99, agent_id="agent 1")
    assert found == [
        session
        for (session,) in database.execute(
            "SELECT session_id::text FROM agent_events WHERE agent_id = 'agent 1' GROUP BY 1 ORDER BY max(seq) DESC"
        )
    ]


def test_the_newest_sessions_are_found_without_reading_the_ledger(database: Database, settings: Settings) -> None:
    database.execute(
        "INSERT INTO agent_events (session_id, agent_id, event_type, payload)"
        " SELECT md5((n / 100)::text)::uuid, 'a', 'tool.invoked', jsonb_build_object('call_id', n::text)"
        " FROM generate_series(0, 49999) n"
    )
    database.execute("ANALYZE agent_events")
    conn = database.connect()
    statements: list[str] = []
    with conn.cursor() as cur:
        execute = cur.execute

        class Noting:
            """Keeps what is asked, as it is asked."""

            def execute(self, sql: str, values: Any = None) -> None:
                statements.append(cur.mogrify(sql, values).decode())
                execute(sql, values)

            def __getattr__(self, name: str) -> Any:
                return getattr(cur, name)

            def __iter__(self) -> Iterator[Any]:
                return iter(cur)

        noting: Any = Noting()
        ids = ledger_sessions.newest_sessions(noting, settings, 20)
        assert len(ids) == 20
        assert ledger_sessions.summary(noting, settings, ids[0]).in_flight == 100
        ledger_sessions._all_sessions(noting, settings, 20, None)
        plans = []
        for statement in statements:
            if "agent_events" in statement and "regclass" not in statement:
                cur.execute("EXPLAIN " + statement)
                plans.append("\n".join(line for (line,) in cur.fetchall()))
    assert len(plans) >= 6
    assert [plan for plan in plans if "Seq Scan on agent_events" in plan] == []
    assert "Index Scan Backward" in plans[0]


# -- events ----------------------------------------------------------------------------------------


def test_events_with_their_places(database: Database, write: Writer) -> None:
    seqs = [write("note", text="a"), write("model.responded", number=1), write("tool.invoked", call_id="c")]
    last = write("note", "other", text="later")
    append_to_order(database, [seqs[2]], [seqs[0], seqs[1]], ages=[60.0, None])
    found = ok("events", write.session, "--json", dsn=database.dsn).json
    assert found["session_id"] == write.session
    assert found["more"] is False
    events = found["events"]
    assert [(each["offset"], each["seq"]) for each in events] == [
        (2, seqs[0]),
        (3, seqs[1]),
        (1, seqs[2]),
        (None, last),
    ]
    assert events[0]["committed_at"] is None
    committed = datetime.fromisoformat(events[2]["committed_at"])
    assert abs(committed.timestamp() - time.time() + 60) < 30
    assert [each["payload"] for each in events][:2] == [{"text": "a"}, {"number": 1}]
    assert events[3]["agent_id"] == "other"
    shown = ok("events", write.session, dsn=database.dsn).stdout
    assert "tool.invoked" in shown
    assert '{"call_id": "c"}' in shown


def test_a_long_payload_takes_no_room_from_what_stands_before_it(database: Database, write: Writer) -> None:
    seq = write("tool.invoked", "researcher", call_id="call-1", name="search", arguments={"q": "long " * 60})
    append_to_order(database, [seq])
    (event,) = ok("events", write.session, "--json", dsn=database.dsn).json["events"]
    (row,) = (line for line in ok("events", write.session, dsn=database.dsn).stdout.splitlines() if "long" in line)
    offset, shown_seq, created, committed, agent, kind, payload = (cell.strip() for cell in row.strip("│").split("│"))
    assert (offset, shown_seq, agent, kind) == ("1", str(seq), "researcher", "tool.invoked")
    assert event["created_at"].startswith(created)
    assert event["committed_at"].startswith(committed)
    assert len(created) == len(committed) == len("2026-01-02 03:04:05.678")
    assert payload.endswith("…")
    (row,) = (line for line in ok("inflight", dsn=database.dsn).stdout.splitlines() if "long" in line)
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells[:6] == [write.session, "researcher", "call-1", "search", str(seq), "1"]
    assert cells[-1].endswith("…")


@pytest.mark.parametrize("width", [80, 120, 300])
def test_a_table_that_is_cut_off_at_its_end_loses_nothing_before_it(width: int) -> None:
    console = Console(width=width, file=io.StringIO(), record=True)
    row = ("1234567", "some agent", "2026-01-02 03:04:05.678", "日本" * 60)
    console.print(cut_at_the_end(("seq", "agent", "created", "payload"), [row], width, right=("seq",)))
    lines = console.export_text().splitlines()
    assert {cell_len(line) for line in lines} <= {len(lines[0])}
    assert len(lines[0]) <= width
    assert len(lines) == 5, "one line for one row"
    cells = [cell.strip() for cell in lines[3].strip("│").split("│")]
    assert cells[:3] == list(row[:3])
    assert (cells[3] == row[3]) if width == 300 else cells[3].endswith("…")


def test_in_a_narrow_terminal_what_has_no_room_is_broken_and_not_cut_off() -> None:
    console = Console(width=40, file=io.StringIO(), record=True)
    console.print(cut_at_the_end(("session", "payload"), [("0123456789" * 4, "x" * 99)], 40))
    rows = [line.strip("│").split("│") for line in console.export_text().splitlines() if line.startswith("│")]
    assert "".join(cells[0].strip() for cells in rows) == "0123456789" * 4
    assert rows[0][1].strip().endswith("…")


def test_events_are_filtered_and_paged(database: Database, write: Writer) -> None:
    seqs = [
        write(kind, n=n, call_id="c")
        for n, kind in enumerate(("tool.invoked", "tool_x", "tool.observed", "note", "note"))
    ]

    def asked(*options: str) -> list[int]:
        return [each["n"] for each in _payloads(ok("events", write.session, *options, "--json", dsn=database.dsn).json)]

    assert asked() == [0, 1, 2, 3, 4]
    assert asked("--type", "tool.*") == [0, 2]
    assert asked("--type", "tool_x", "--type", "note") == [1, 3, 4]
    assert asked("--type", "tool?x") == [1]
    assert asked("--after", str(seqs[2])) == [3, 4]
    assert asked("--limit", "2") == [0, 1]
    assert asked("--limit", "2", "--last") == [3, 4]
    assert asked("--limit", "1", "--last", "--type", "tool*") == [2]
    page = ok("events", write.session, "--limit", "2", dsn=database.dsn)
    assert f"--after {seqs[1]} goes on" in page.stderr
    assert ok("events", write.session, "--limit", "2", "--json", dsn=database.dsn).json["more"] is True
    assert "no such event" in ok("events", write.session, "--type", "x", dsn=database.dsn).stdout
    assert call("events", write.session, "--limit", str(2**63), dsn=database.dsn).exit_code == 2


def _payloads(document: Any) -> list[Any]:
    return [each["payload"] for each in document["events"]]


def test_a_payload_is_shown_exactly(database: Database, write: Writer) -> None:
    """C05, C06: nothing on the way parses it; C61 of terminals: nothing in it moves the cursor."""
    database.execute(
        "INSERT INTO agent_events (session_id, agent_id, event_type, payload) VALUES"
        " (%s, 'a', 'n', '{\"n\": 9007199254740993, \"d\": 0.1234567890123456789, \"z\": 1.10}'),"
        " (%s, 'a', 'n', (repeat('[', 7000) || repeat(']', 7000))::jsonb),"
        " (%s, 'a', E'n\\x1b[31m', '{\"text\": \"\\u001b[2Jgone \\u202e\"}')",
        *[write.session] * 3,
    )
    raw = ok("events", write.session, "--json", dsn=database.dsn).stdout
    assert '"n": 9007199254740993' in raw
    assert "0.1234567890123456789" in raw
    assert "1.10" in raw
    assert "[" * 7000 in raw
    for option in ((), ("--full",)):
        shown = ok("events", write.session, *option, dsn=database.dsn).stdout
        assert "\x1b" not in shown
        assert "\u202e" not in shown
    assert "[" * 7000 in shown
    assert max(map(len, ok("events", write.session, dsn=database.dsn).stdout.splitlines())) < 400


# -- context ----------------------------------------------------------------------------------------


def conversation(write: Writer) -> list[int]:
    """A turn with two calls, one of which is open; the seqs."""
    message = {
        "role": "assistant",
        "content": "Let me look.\nTwice.",
        "tool_calls": [
            {"id": call_id, "type": "function", "function": {"name": "search", "arguments": '{"q": "x"}'}}
            for call_id in ("c1", "c2")
        ],
    }
    return [
        write.say("What is new?"),
        write("model.responded", message=message),
        write("tool.invoked", call_id="c1", name="search"),
        write("tool.invoked", call_id="c2", name="search"),
        write("tool.observed", call_id="c1", result="\n".join(f"line {n}" for n in range(50))),
        write("handoff.emitted", to="writer", text="go on"),
    ]


def test_context_for_a_person(database: Database, write: Writer) -> None:
    conversation(write)
    shown = ok("context", write.session, dsn=database.dsn).stdout
    for words in ("user", "What is new?", "assistant", "Twice.", '→ search({"q": "x"})  c1', "tool  c1", "line 11"):
        assert words in shown
    assert "line 12" not in shown
    assert "(38 more lines)" in shown
    assert "in flight: search, call c2, attempt 1" in shown
    assert "handed over:" in shown
    assert "line 49" in ok("context", write.session, "--full", dsn=database.dsn).stdout
    asked = write("approval.requested", action={"tool": "pay"})
    assert f'approval {asked} requested: {{"tool":"pay"}}' in ok("context", write.session, dsn=database.dsn).stdout
    write("approval.granted", request=asked, by="alice")
    assert f"approval {asked} granted:" in ok("context", write.session, dsn=database.dsn).stdout
    asked = write("approval.requested", action={"tool": "pay", "sum": 80})
    write("approval.granted", request=asked, by="alice", edit={"tool": "pay", "sum": 70})
    granted = f'approval {asked} granted, edited: {{"sum":70,"tool":"pay"}}'
    assert granted in ok("context", write.session, dsn=database.dsn).stdout, "what may be done, and not what was asked"
    write("task.failed", error="x")
    assert "failed at seq" in ok("context", write.session, dsn=database.dsn).stdout


def test_context_as_it_was_at_a_seq(database: Database, write: Writer, conn: Connection, settings: Settings) -> None:
    for seq in conversation(write):
        found = ok("context", write.session, "--at", str(seq), "--json", dsn=database.dsn).json
        truth = rebuild_context(conn, write.session, seq, settings=settings, snapshots=False)
        assert found == json.loads(json.dumps(truth))
    assert ok("context", write.session, "--json", dsn=database.dsn).json == found
    assert ok("context", write.session, "--at", "0", "--json", dsn=database.dsn).json["messages"] == []


def test_context_by_offset_is_the_fold_of_what_was_there(database: Database, write: Writer) -> None:
    """A lower seq that committed later is not in it before its offset (C21), and is folded in its place after."""
    write_other = Writer(write.conn, Settings(dsn=database.dsn))
    one, two, three = (write("handoff.emitted", n=n) for n in range(3))
    other = write_other("note")
    unordered = write("handoff.emitted", n=3)
    append_to_order(database, [two], [other, three], [one])
    for offset, expected in ((0, []), (1, [1]), (2, [1]), (3, [1, 2]), (4, [0, 1, 2]), (99, [0, 1, 2])):
        found = ok("context", write.session, "--at-offset", str(offset), "--json", dsn=database.dsn).json
        assert [each["n"] for each in found["handoffs"]] == expected, offset
    append_to_order(database, [unordered])
    found = ok("context", write.session, "--at-offset", "5", "--json", dsn=database.dsn).json
    assert [each["n"] for each in found["handoffs"]] == [0, 1, 2, 3]


def test_a_context_before_the_first_event_says_that_there_was_none(database: Database, write: Writer) -> None:
    first = write.say("hello")
    append_to_order(database, [first], ages=[60.0])
    database.execute("UPDATE agent_events SET created_at = now() - interval '1 minute'")

    def shown(*at: str) -> str:
        said = ok("context", write.session, *at, dsn=database.dsn).stdout
        assert ok("context", write.session, *at, "--json", dsn=database.dsn).json["messages"] == (
            [{"role": "user", "content": "hello"}] if "hello" in said else []
        )
        return said

    nothing = f"session {write.session} has no event "
    assert shown("--at", str(first - 1)) == f"{nothing}up to seq {first - 1}\n"
    assert shown("--at-offset", "0") == f"{nothing}up to offset 0\n"
    assert shown("--at-time", "2026-01-02 03:04:05+01:00") == f"{nothing}by 2026-01-02 02:04:05.000000 UTC\n"
    for at in (("--at", str(first)), ("--at-offset", "1"), ("--at-time", "1s"), ()):
        assert "hello" in shown(*at)
    # Something is there, and nothing was said yet.
    silent = Writer(write.conn, Settings(dsn=database.dsn))
    silent("handoff.emitted", to="b")
    assert "no messages" in ok("context", silent.session, dsn=database.dsn).stdout


def test_context_by_time_is_by_commit_and_else_by_created_at(database: Database, write: Writer) -> None:
    seqs = [write("handoff.emitted", n=n) for n in range(4)]
    append_to_order(database, [seqs[1]], [seqs[0]], [seqs[2]], ages=[500, 300, None])
    for seq, age in zip(seqs, (9000, 9000, 400, 200), strict=True):  # of the first two the commit counts
        database.execute(
            "UPDATE agent_events SET created_at = now() - %s * interval '1 second' WHERE seq = %s", age, seq
        )
    for ago, expected in (("600s", []), ("450s", [1]), ("350s", [1, 2]), ("250s", [0, 1, 2]), ("0s", [0, 1, 2, 3])):
        found = ok("context", write.session, "--at-time", ago, "--json", dsn=database.dsn).json
        assert [each["n"] for each in found["handoffs"]] == expected, ago


def test_rows_below_the_floor_were_there_before_the_first_offset(database: Database, write: Writer) -> None:
    below, above = write("handoff.emitted", n=0), write("handoff.emitted", n=1)
    database.execute("UPDATE walstream.identity SET floor_seq = %s", below)
    append_to_order(database, [above])
    for offset, expected in ((0, [0]), (1, [0, 1])):
        found = ok("context", write.session, "--at-offset", str(offset), "--json", dsn=database.dsn).json
        assert [each["n"] for each in found["handoffs"]] == expected


def test_context_keeps_every_digit(database: Database, write: Writer) -> None:
    """C05."""
    database.execute(
        "INSERT INTO agent_events (session_id, agent_id, event_type, payload) VALUES (%s, 'a', 'handoff.emitted',"
        ' \'{"n": 12345678901234567890123, "d": 0.1234567890123456789}\')',
        write.session,
    )
    raw = ok("context", write.session, "--json", dsn=database.dsn).stdout
    assert "12345678901234567890123" in raw
    assert "0.1234567890123456789" in raw


def test_a_payload_that_cannot_be_folded_is_named_and_the_rest_can_be_read(database: Database, write: Writer) -> None:
    """C06."""
    before = write.say("hello")
    database.execute(
        "INSERT INTO agent_events (session_id, agent_id, event_type, payload) VALUES"
        " (%s, 'a', 'tool.observed', ('{\"call_id\": ' || repeat('[', 7000) || repeat(']', 7000) || '}')::jsonb)",
        write.session,
    )
    bad = database.execute("SELECT max(seq) FROM agent_events")[0][0]
    called = call("context", write.session, "--json", dsn=database.dsn)
    assert called.exit_code == 6
    assert called.error["error"] == "PayloadError"
    assert f"seq {bad} of session {write.session}" in called.error["message"]
    assert "hello" in ok("context", write.session, "--at", str(before), dsn=database.dsn).stdout
    assert ok("sessions", "--json", dsn=database.dsn).json[0]["events"] == 2
    assert ok("inflight", write.session, "--json", dsn=database.dsn).json == []


def test_contexts_in_many_shapes_are_shown(database: Database, write: Writer) -> None:
    parts = [{"type": "text", "text": "in parts"}, {"type": "image_url", "image_url": {"url": "http://x/"}}]
    messages = [
        {"role": "system", "content": parts},
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "user", "content": {"odd": 1}},
        {"content": "[/red] no markup"},
    ]
    write("context.loaded", messages=messages)
    write("model.requested", model="m")
    write("handoff.received", text="from afar")
    write("tool.observed", call_id="nowhere", result=1)
    shown = ok("context", write.session, dsn=database.dsn).stdout
    for words in ("in parts", "image_url", '{"odd":1}', "[/red] no markup", "from afar", "has not answered"):
        assert words in shown.replace('{"odd": 1}', '{"odd":1}')
    assert "1 events have no place in the messages" in shown


def test_a_context_that_a_fold_made_otherwise_is_shown(
    database: Database, write: Writer, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    (tmp_path / "other_folds_of_a_test.py").write_text(
        "from walstream import Fold\nfold = Fold()\n"
        "@fold.on('x')\n"
        "def x(context, event):\n"
        "    for name in (*context, 'set_aside', 'forked_from'):\n"
        "        context[name] = event.payload['all']\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("WALSTREAM_FOLD", "other_folds_of_a_test:fold")
    for value in (5, "text", [1], {"a": None}, True):
        write("x", all=value)
        ok("context", write.session, dsn=database.dsn)


# -- inflight ----------------------------------------------------------------------------------------


def test_inflight(database: Database, write: Writer, conn: Connection, settings: Settings) -> None:
    assert "no tool call is in flight" in ok("inflight", dsn=database.dsn).stdout
    other = Writer(conn, settings)
    write("tool.invoked", call_id="c1", name="search", arguments={"q": 12345678901234567890})
    write("tool.invoked", call_id="c2")
    write("tool.observed", call_id="c2", result="x")
    other("tool.invoked", "writer", call_id="c1", idempotency_key="k")
    found = ok("inflight", "--json", dsn=database.dsn).json
    assert [(each["session_id"], each["call_id"], each["attempt"]) for each in found] == [
        (write.session, "c1", 1),
        (other.session, "c1", 1),
    ]
    assert found[0]["arguments"] == {"q": 12345678901234567890}
    assert found[1]["idempotency_key"] == "k"
    assert ok("inflight", write.session, "--json", dsn=database.dsn).json == found[:1]
    assert ok("inflight", "--agent", "writer", "--json", dsn=database.dsn).json == found[1:]
    assert ok("inflight", "--newest", "1", "--json", dsn=database.dsn).json == found[1:]
    assert ok("inflight", "--newest", "9", "--json", dsn=database.dsn).json == found
    assert ok("inflight", "--before", "1h", "--json", dsn=database.dsn).json == []
    database.execute("UPDATE agent_events SET created_at = now() - interval '2 hours' WHERE seq = %s", found[0]["seq"])
    old = ok("inflight", "--before", "1h", "--json", dsn=database.dsn).json
    assert [each["session_id"] for each in old] == [write.session]
    shown = ok("inflight", dsn=database.dsn).stdout
    assert "search" in shown
    assert "2 tool calls are in flight" in shown
    assert call("inflight", write.session, "--newest", "1", dsn=database.dsn).exit_code == 2


# -- for all of them ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["context", "events", "inflight", "fork"])
def test_an_unknown_session_is_a_clear_error(database: Database, settings: Settings, command: str) -> None:
    del settings
    never = str(uuid.uuid4())
    for session, words in ((never, f"no event of session {never}"), ("nonsense", "'nonsense' cannot be a session id")):
        called = call(command, session, "--json", dsn=database.dsn)
        assert called.exit_code == 3
        assert called.error["error"] == "UnknownSession"
        assert words in called.error["message"]
        assert "walstream sessions" in called.error["hint"]


@pytest.mark.parametrize("command", ["sessions", "inflight"])
def test_without_an_installation_they_say_so(database: Database, command: str) -> None:
    called = call(command, "--json", dsn=database.dsn)
    assert called.exit_code == 3
    assert "walstream init" in called.error["hint"]


@pytest.mark.parametrize("kind", ["", "HASH (thread_id)", "RANGE (at)"])
def test_partitions_text_ids_and_renamed_columns(database: Database, tmp_path: Path, kind: str) -> None:
    ledger = LedgerTable(
        table='ev%"s',
        columns=Columns(
            seq="n%", session_id="thread_id", agent_id="who", event_type="kind", payload="body", created_at="at"
        ),
    )
    table = ledger.qualified
    database.execute(
        f'CREATE TABLE {table} ("n%%" bigserial, thread_id text NOT NULL, who text NOT NULL, kind text NOT NULL,'
        " body jsonb NOT NULL, at timestamptz NOT NULL DEFAULT now())".replace("%%", "%")
        + (f" PARTITION BY {kind}" if kind else "")
        + f'; CREATE INDEX ON {table} (thread_id, "n%"); CREATE INDEX ON {table} ("n%")'
    )
    if kind.startswith("HASH"):
        for number in range(2):
            database.execute(
                f"CREATE TABLE p{number} PARTITION OF {table} FOR VALUES WITH (MODULUS 2, REMAINDER {number})"
            )
    elif kind:
        database.execute(f"CREATE TABLE p PARTITION OF {table} DEFAULT")
    from walstream.ledger import schema
    from walstream.ledger.identity import identity_sql

    settings = Settings(dsn=database.dsn, ledger=ledger)
    schema.install(database.connect(), settings)
    database.execute(identity_sql(settings))
    conn = database.connect()
    conn.autocommit = True
    config = tmp_path / "walstream.toml"
    config.write_text(
        '[ledger]\ntable = \'ev%"s\'\n[ledger.columns]\nseq = "n%"\nsession_id = "thread_id"\nagent_id = "who"\n'
        'event_type = "kind"\npayload = "body"\ncreated_at = "at"\n'
    )
    options = ("--config", str(config), "--json")
    write = Writer(conn, settings, "it's 100% text")
    seqs = conversation(write)
    Writer(conn, settings, "second")("tool.invoked", call_id="x")
    append_to_order(database, seqs)
    found = ok("sessions", *options, dsn=database.dsn).json
    assert [each["session_id"] for each in found] == ["second", write.session]
    assert found[1]["events"] == len(seqs)
    assert len(ok("sessions", "--agent", "planner", "--since", "1h", *options, dsn=database.dsn).json) == 2
    events = ok("events", write.session, *options, dsn=database.dsn).json["events"]
    assert [each["seq"] for each in events] == seqs
    assert [each["offset"] for each in events] == list(range(1, len(seqs) + 1))
    by_offset = ok("context", write.session, "--at-offset", "4", *options, dsn=database.dsn).json
    assert by_offset == ok("context", write.session, "--at", str(seqs[3]), *options, dsn=database.dsn).json
    assert [each["call_id"] for each in ok("inflight", *options, dsn=database.dsn).json] == ["c2", "x"]
    made = ok("fork", write.session, "--at", str(seqs[3]), "--as", "child", *options, dsn=database.dsn).json
    assert made["session_id"] == "child"
    assert [each["call_id"] for each in ok("inflight", "child", *options, dsn=database.dsn).json] == ["c1", "c2"]


# -- the recorded runs ----------------------------------------------------------------------------------------


@pytest.mark.recorded
def test_recorded_runs_that_stop_in_mid_call_list_it(database: Database, settings: Settings) -> None:
    if not RUNS.is_dir():
        pytest.skip(f"the recorded runs are not in {RUNS}")
    del settings
    files = sorted(RUNS.glob("*.jsonl"))
    ok("import", *map(str, files), dsn=database.dsn)
    open_calls: dict[str, str] = {}
    for file in files:
        events = [json.loads(line) for line in file.read_text().splitlines()]
        invoked = [each for each in events if each["event_type"] == "tool.invoked"]
        observed = {each["payload"]["call_id"] for each in events if each["event_type"] == "tool.observed"}
        for each in invoked:
            if each["payload"]["call_id"] not in observed:
                open_calls[each["session_id"]] = each["payload"]["call_id"]
    assert len(open_calls) == 5
    found = ok("inflight", "--json", dsn=database.dsn).json
    assert {each["session_id"]: each["call_id"] for each in found} == open_calls
    listed = ok("sessions", "--json", dsn=database.dsn).json
    assert {each["session_id"] for each in listed if each["in_flight"]} == set(open_calls)
    assert {each["state"] for each in listed} == {"completed", "failed"}
    for each in listed:
        assert ok("context", each["session_id"], dsn=database.dsn).stdout
        assert re.search(r"task\.(completed|failed)", ok("events", each["session_id"], dsn=database.dsn).stdout)
