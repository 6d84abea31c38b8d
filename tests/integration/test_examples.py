"""The programs in docs/examples run as they are, on a real server: started as a reader would, fed, stopped."""

from __future__ import annotations

import http.server
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, urlencode

import pytest
from psycopg2.extensions import parse_dsn
from psycopg2.extras import Json

from tests.cli_calls import call, ok
from tests.conftest import Database

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
SESSION = "00000000-0000-4000-8000-00000000000a"
_PATIENCE = 60.0


class Program:
    """A running example. Its lines can be waited for; it is stopped with SIGTERM and has to end well."""

    def __init__(self, dsn: str, *arguments: str, **environment: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=EXAMPLES,
            env={**os.environ, "WALSTREAM_DSN": dsn, "PYTHONDONTWRITEBYTECODE": "1", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # Under nohup, or in the background of a script, SIGINT is ignored, and children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._errors: list[str] = []
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._read, self._read_errors)]
        for thread in self._threads:
            thread.start()

    def wait_for(self, words: str) -> str:
        """The next line that contains ``words``."""
        until = time.monotonic() + _PATIENCE
        while time.monotonic() < until:
            ended = self._process.poll() is not None
            try:
                line = self._lines.get(timeout=0.2)
            except queue.Empty:
                if ended:
                    break
                continue
            if words in line:
                return line
        pytest.fail(f"no line with {words!r}; on stderr: {''.join(self._errors)}")

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Signal it and return its exit code."""
        self._process.send_signal(number)
        return self.end()

    def end(self) -> int:
        try:
            return self._process.wait(_PATIENCE)
        finally:
            self._process.kill()
            for thread in self._threads:
                thread.join(60)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            for line in stream:
                self._lines.put(line)

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as stream:
            self._errors.extend(stream)


@pytest.fixture
def ledger(database: Database) -> Database:
    """A ledger that was set up the way the README says."""
    ok("init", "--slot", slot_of(database), dsn=database.dsn)
    return database


def slot_of(database: Database) -> str:
    """Slots belong to the whole server, so one that is shared needs a name for each database."""
    return f"examples_{database.name[-8:]}"


@pytest.fixture
def start(ledger: Database) -> Iterator[type[Program]]:
    """Starts programs that belong to this test's ledger, and ends what is left of them."""
    started: list[Program] = []

    class OfThisLedger(Program):
        def __init__(self, *arguments: str, **environment: str) -> None:
            super().__init__(
                ledger.dsn,
                *arguments,
                WALSTREAM_SLOT=slot_of(ledger),
                WALSTREAM_ALLOW_UNBOUNDED_SLOT="true",
                **environment,
            )
            started.append(self)

    yield OfThisLedger
    for program in started:
        program.stop(signal.SIGKILL)


def append(ledger: Database, event_type: str, payload: object, agent_id: str = "planner") -> None:
    ledger.execute(
        "INSERT INTO agent_events (session_id, agent_id, event_type, payload) VALUES (%s, %s, %s, %s)",
        SESSION,
        agent_id,
        event_type,
        Json(payload),
    )


def run(start: type[Program], example: str, **environment: str) -> Program:
    return start("-m", "walstream", "run", f"{example}:stream", **environment)


def test_first_projector(ledger: Database, start: type[Program]) -> None:
    append(ledger, "handoff.emitted", {"to": "writer"})
    program = run(start, "first_projector")
    assert "planner hands over to writer" in program.wait_for("writer")
    append(ledger, "tool.invoked", {"tool": "search"})
    append(ledger, "handoff.emitted", {"to": "reviewer"})
    assert program.wait_for("reviewer").startswith("3: ")
    assert program.stop() == 0


def test_first_projector_as_a_program(ledger: Database, start: type[Program]) -> None:
    program = start("first_projector.py")
    append(ledger, "handoff.emitted", {"to": "writer"})
    program.wait_for("writer")
    assert program.stop() == 0


def test_token_usage_and_read_your_writes(ledger: Database, start: type[Program]) -> None:
    append(ledger, "model.responded", {"tokens": 23}, "writer")
    program = run(start, "token_usage")
    reader = start("read_your_writes.py")
    assert reader.wait_for("(") == "(123,)\n"
    assert reader.end() == 0
    assert program.stop() == 0
    assert ledger.execute("SELECT * FROM token_usage") == [("writer", 123)]


def test_webhook(ledger: Database, start: type[Program]) -> None:
    received: queue.Queue[tuple[str, bytes]] = queue.Queue()
    answers = iter((503, 200))

    class Target(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.put((self.headers["Idempotency-Key"], body))
            self.send_response(next(answers))
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Target) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        program = run(start, "webhook", WEBHOOK_URL=f"http://127.0.0.1:{server.server_port}/", no_proxy="*")
        append(ledger, "task.completed", {"result": "ok"})
        first, second = received.get(timeout=_PATIENCE), received.get(timeout=_PATIENCE)
        server.shutdown()
    assert first == second  # the target was away the first time; the key is the same
    assert first[0].endswith(":1")
    assert first[1] == b'{"result": "ok"}'
    assert program.stop() == 0


def test_inside_an_app(ledger: Database, start: type[Program]) -> None:
    program = start("inside_an_app.py")
    program.wait_for("ready")
    for _ in range(100):  # it begins at "latest", and when that is, is not to be seen from here
        append(ledger, "task.completed", {})
        if ledger.execute("SELECT 1 FROM walstream.cursors WHERE projector = 'dashboard'"):
            break
        ledger.execute("SELECT pg_sleep(0.1)")
    append(ledger, "task.completed", {})
    assert SESSION in program.wait_for("is done")
    assert program.stop() == 0


def test_follow(ledger: Database, start: type[Program]) -> None:
    consumer = start("-m", "walstream", "run", "--ingest-only")
    append(ledger, "tool.invoked", {"tool": "search"})
    append(ledger, "tool.observed", {"result": 1})
    program = start("follow.py", "1")
    assert program.wait_for("tool.") == '2 tool.observed {"result": 1}\n'
    append(ledger, "task.completed", {})
    assert program.wait_for("task.") == "3 task.completed {}\n"
    assert program.stop(signal.SIGINT) == 0
    assert consumer.stop() == 0


def test_agent_loop(ledger: Database, start: type[Program]) -> None:
    """Killed early, started twice at once, and once more when all is done (tests/chaos kills it at every step)."""
    for seconds in (0.5, 0.7):
        program = start("agent_loop.py")
        time.sleep(seconds)
        program.stop(signal.SIGKILL)
    both = [start("agent_loop.py"), start("agent_loop.py")]
    for program in both:
        assert program.wait_for("paid:") == "paid: acme, globex, initech\n"
        assert program.end() == 0
    again = start("agent_loop.py")
    assert again.wait_for("paid:")
    assert again.end() == 0
    assert ledger.execute("SELECT invoice, amount FROM payments ORDER BY id") == [
        ("acme", 120),
        ("globex", 75),
        ("initech", 310),
    ]
    assert ledger.execute("SELECT count(*) FROM agent_events WHERE event_type = 'task.completed'") == [(1,)]


@pytest.mark.usefixtures("ledger")
def test_own_event_type(start: type[Program]) -> None:
    program = start("own_event_type.py", SESSION)
    for line in (
        "user: Find the failing test.",
        "assistant: ['search']",
        "tool: [no result was recorded for this call]",
        "user: Never mind, run all of them.",
        "notes: ['there are 12 test files'], fold version: 2+note.added=2+user.said=1",
    ):
        assert program.wait_for("") == f"{line}\n"
    assert program.end() == 0
    check = start("-m", "walstream", "fold", "check", "--fold", "own_event_type:fold")
    assert check.wait_for("") == "pure: own_event_type:fold over 5 events of 1 session, hash seeds 0, 1, 2\n"
    assert check.end() == 0
    shown = start("-m", "walstream", "context", SESSION, "--json", WALSTREAM_FOLD="own_event_type:fold")
    assert '"notes":["there are 12 test files"]' in shown.wait_for("messages")
    assert shown.end() == 0


def uri(ledger: Database) -> str:
    """The database as a URI, the one form that every driver takes."""
    parts = dict(parse_dsn(ledger.dsn))
    login = quote(parts.pop("user")) + (f":{quote(parts.pop('password'))}" if "password" in parts else "")
    return f"postgresql://{login}@/{quote(parts.pop('dbname'))}?{urlencode(parts)}"


def test_append_and_side_effect_commit_together(ledger: Database, start: type[Program]) -> None:
    for seq, (example, table) in enumerate(
        (
            ("append_psycopg2", "bookings"),
            ("append_psycopg3", "bookings"),
            ("append_asyncpg", "bookings"),
            ("append_sqlalchemy", "flight_bookings"),
            ("append_django", "trips_booking"),
        ),
        1,
    ):
        program = start(f"{example}.py", WALSTREAM_DSN=uri(ledger))
        assert program.wait_for("seq") == f"appended as seq {seq}\n"
        assert program.end() == 0
        if example in ("append_psycopg2", "append_asyncpg"):  # of the others, test_ledger.py knows it
            again = start(f"{example}.py", WALSTREAM_DSN=uri(ledger))
            assert again.wait_for("seq") == f"was there already as seq {seq}\n"
            assert again.end() == 0
        # The event and its effect are rows of one transaction.
        assert ledger.execute(
            "SELECT e.seq, e.xmin = b.xmin, e.event_type, b.flight"
            f" FROM agent_events AS e JOIN {table} AS b USING (session_id) WHERE e.seq = {seq}"
        ) == [(seq, True, "tool.observed", "LH 400")]


def test_rehearsed_projector(ledger: Database) -> None:
    """As a user runs it: by pytest, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "rehearsed_projector.py"],
        cwd=EXAMPLES,
        env={**os.environ, "WALSTREAM_DSN": ledger.dsn, "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout


def test_every_example_is_in_the_index_and_runs_in_a_test() -> None:
    index = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    # The one that verifies an audit trail runs on the trails of its own tests.
    tests = [Path(__file__), Path(__file__).parents[1] / "unit" / "test_audit_verify.py"]
    run_by = "".join(path.read_text(encoding="utf-8") for path in tests)
    for path in EXAMPLES.glob("*.py"):
        assert f"({path.name})" in index
        assert path.stem in run_by


def test_three_agents_and_one_approval(ledger: Database, start: type[Program]) -> None:
    agents = ("planner", "researcher", "buyer")
    programs = [run(start, "three_agents"), *(worker(start, f"three_agents:{agent}") for agent in agents)]
    person = start("three_agents.py", "a chair")
    session = person.wait_for("session").split()[1]
    request = person.wait_for("walstream approvals approve").split()[-1]
    eventually_parked = "SELECT 1 FROM agent_jobs WHERE agent_id = 'buyer' AND status = 'AWAITING_HUMAN'"
    assert ledger.execute(eventually_parked), "the request and the waiting were one transaction"
    decided = call("approvals", "edit", request, "--json-edit", '{"buy": "a stool", "price": 70}', dsn=ledger.dsn)
    assert decided.exit_code == 0, decided
    assert person.wait_for("ordered") == "ordered a stool for 70\n"
    assert person.end() == 0
    assert [program.stop() for program in programs] == [0, 0, 0, 0]
    assert ledger.execute("SELECT item, price FROM orders") == [("a stool", 70)]
    assert ledger.execute("SELECT agent_id, status, hops FROM agent_jobs ORDER BY job_id") == [
        ("planner", "COMPLETED", 1),
        ("researcher", "COMPLETED", 2),
        ("buyer", "COMPLETED", 3),
    ]
    happened = [kind for (kind,) in ledger.execute("SELECT event_type FROM agent_events ORDER BY seq")]
    handoff = ["handoff.emitted", "handoff.received"]
    assert happened == [
        *(*handoff, "model.responded"),
        *(*handoff, "tool.invoked", "tool.observed"),
        *(*handoff, "approval.requested", "approval.granted", "task.completed"),
    ]
    assert ledger.execute("SELECT DISTINCT session_id::text FROM agent_events") == [(session,)]


def worker(start: type[Program], target: str) -> Program:
    return start("-m", "walstream", "worker", target)
