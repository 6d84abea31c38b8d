"""``Approvals`` and ``walstream approvals``: the functions of approvals from Python and from the command line."""

from __future__ import annotations

import getpass
import json
import select
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
import psycopg2
import pytest
from psycopg2.errors import InsufficientPrivilege
from psycopg2.extensions import make_dsn
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from tests.cli_calls import call, ok, set_up
from tests.conftest import Database, Server
from tests.integration.streams import eventually
from tests.integration.test_append_sql import ODD, A, B, Ledger
from walstream import (
    Approval,
    ApprovalRefused,
    Approvals,
    ConfigError,
    Fenced,
    Job,
    JobRefused,
    Jobs,
    LedgerError,
    PayloadError,
    rebuild_context,
)
from walstream.cli import approvals as commands
from walstream.config import Settings
from walstream.ledger import schema
from walstream.ledger.grants import approver_statements, worker_statements

DOCS = Path(__file__).resolve().parents[2] / "docs" / "handoffs.md"
EXACT = {"amount": Decimal("12345678901234567890.123456789"), "id": 123456789012345678901234567890, "rate": 0.1}
EXACT_TEXT = '{"amount": 12345678901234567890.123456789, "id": 123456789012345678901234567890, "rate": 0.1}'


class Desk:
    """A ledger with jobs that ask."""

    def __init__(self, database: Database, settings: Settings | None = None) -> None:
        self.database = database
        self.settings = settings or set_up(database)
        self.jobs, self.approvals = Jobs(self.settings), Approvals(self.settings)
        self.on = database.connect()
        self.on.autocommit = True

    def begun(self, session: str = A, agent: str = "a") -> Job:
        self.jobs.submit(session, agent, on=self.on)
        return self.claimed(agent)

    def claimed(self, agent: str = "a") -> Job:
        job = self.jobs.claim(agent, "me", per_session=False, on=self.on)
        assert job is not None
        self.jobs.begin(job, on=self.on)
        return job

    def ask(self, action: Any = "buy it", session: str = A, agent: str = "a", **named: Any) -> int:
        return self.approvals.request(self.begun(session, agent), action, on=self.on, **named)

    def get(self, request: int) -> Approval:
        return self.approvals.get(request, on=self.on)

    def status(self, request: int) -> str:
        return self.jobs.get(self.get(request).job_id, on=self.on).status


@pytest.fixture
def desk(database: Database) -> Desk:
    return Desk(database)


# -- from Python ---------------------------------------------------------------------------------------------


def test_the_life_of_a_request(desk: Desk) -> None:
    job = desk.begun()
    assert desk.approvals.newest(job.job_id, on=desk.on) is None
    deadline = datetime(2100, 2, 3, 4, 5, 6, 789, tzinfo=UTC)
    request = desk.approvals.request(job, EXACT, deadline=deadline, reason="over the limit", on=desk.on)
    asked = desk.get(request)
    assert (asked.request_seq, asked.job_id, asked.session_id, asked.agent_id) == (request, job.job_id, A, "a")
    assert (asked.action, asked.request_reason, asked.deadline, asked.is_open) == (
        EXACT,
        "over the limit",
        deadline,
        True,
    )
    assert (asked.decision, asked.decided_by, asked.decided_at, asked.edit, asked.reason) == (None,) * 5
    assert (asked.granted, asked.rejected, asked.approved_action) == (False, False, None)
    assert asked.requested_at is not None
    assert asked == desk.approvals.newest(job.job_id, on=desk.on)
    assert desk.approvals.open(on=desk.on) == [asked]

    edit = {"amount": Decimal("0.1000000000000000055511151231257827")}
    seq = desk.approvals.approve(request, by="alice", edit=edit, reason="rounded", on=desk.on)
    granted = desk.get(request)
    assert (granted.decision, granted.decision_seq, granted.decided_by) == ("granted", seq, "alice")
    assert (granted.granted, granted.rejected, granted.is_open) == (True, False, False)
    assert (granted.edit, granted.approved_action, granted.action) == (edit, edit, EXACT)
    assert (granted.reason, granted.request_reason) == ("rounded", "over the limit")
    assert granted.decided_at is not None
    assert granted.decided_at >= asked.requested_at
    assert desk.approvals.open(on=desk.on) == []

    second = desk.approvals.request(desk.claimed(), "again", on=desk.on)
    desk.approvals.reject(second, by="bob", reason="no", on=desk.on)
    newest = desk.approvals.newest(job.job_id, on=desk.on)
    assert newest is not None
    assert (newest.request_seq, newest.rejected, newest.approved_action, newest.reason) == (second, True, None, "no")


def test_what_was_granted_as_it_stood_is_the_action(desk: Desk) -> None:
    actions: tuple[Any, ...] = (EXACT, 0, "", [], False)
    for action in actions:
        request = desk.ask(action)
        desk.approvals.approve(request, by="alice", on=desk.on)
        assert desk.get(request).approved_action == action
        desk.jobs.cancel(desk.get(request).job_id, on=desk.on)


def test_an_edit_may_be_an_empty_thing(desk: Desk) -> None:
    request = desk.ask({"amount": 5})
    desk.approvals.approve(request, by="alice", edit={}, on=desk.on)
    assert desk.get(request).approved_action == {}


def test_a_deadline_may_be_so_much_time_by_the_clock_of_the_server(desk: Desk) -> None:
    deadline = desk.get(desk.ask(deadline=timedelta(days=7, microseconds=1))).deadline
    assert deadline is not None
    assert timedelta(days=6, hours=23) < deadline - datetime.now(UTC) < timedelta(days=7, hours=1)
    for wait in (timedelta(days=36500, seconds=3599, microseconds=999999), timedelta(days=-40, microseconds=-1)):
        asked = desk.get(desk.ask(deadline=wait))
        assert asked.deadline is not None
        assert asked.requested_at is not None
        assert abs(asked.deadline - asked.requested_at - wait) < timedelta(seconds=5)


def test_after_the_deadline_it_is_rejected(desk: Desk) -> None:
    request = desk.ask(deadline=timedelta(seconds=-1))
    assert not desk.get(request).is_open
    assert desk.approvals.open(on=desk.on) == []
    with pytest.raises(ApprovalRefused, match=f"the deadline of request {request} passed at"):
        desk.approvals.approve(request, by="alice", on=desk.on)
    assert desk.approvals.expire("b", on=desk.on) == []
    assert desk.approvals.expire("a", on=desk.on) == [desk.get(request).job_id]
    found = desk.get(request)
    assert (found.rejected, found.decided_by, found.reason) == (True, "deadline", "nobody decided in time")
    assert desk.status(request) == "SUBMITTED"


def test_what_is_refused(desk: Desk) -> None:
    job = desk.begun()
    with pytest.raises(ValueError, match="an action"):
        desk.approvals.request(job, None, on=desk.on)
    with pytest.raises(ValueError, match="offset"):
        desk.approvals.request(job, "x", deadline=datetime(2100, 1, 1), on=desk.on)
    with pytest.raises(PayloadError, match=r"action\.a"):
        desk.approvals.request(job, {"a": float("nan")}, on=desk.on)
    with pytest.raises(TypeError, match="fencing token"):
        desk.approvals.request(job.job_id, "x", on=desk.on)
    with pytest.raises(Fenced, match="stale"):
        desk.approvals.request(job.job_id, "x", token=job.fencing_token + 1, on=desk.on)
    request = desk.approvals.request(job.job_id, "x", token=job.fencing_token, on=desk.on)
    with pytest.raises(JobRefused, match="AWAITING_HUMAN"):
        desk.approvals.request(job, "x", on=desk.on)
    for name in ("", "deadline"):
        with pytest.raises(ValueError, match="name"):
            desk.approvals.reject(request, by=name, on=desk.on)
    with pytest.raises(PayloadError, match="edit"):
        desk.approvals.approve(request, by="alice", edit={"a": "\0"}, on=desk.on)
    for decide in (desk.approvals.approve, desk.approvals.reject):
        with pytest.raises(LedgerError, match="no request 4711") as no:
            decide(4711, by="alice", on=desk.on)
        assert "approvals list" in no.value.hint
    with pytest.raises(LedgerError, match="no request 4711"):
        desk.get(4711)
    desk.approvals.approve(request, by="alice", on=desk.on)
    with pytest.raises(ApprovalRefused, match=f"request {request} was granted by alice at") as twice:
        desk.approvals.reject(request, by="bob", on=desk.on)
    assert "approvals show" in twice.value.hint


def test_a_request_of_a_canceled_job_is_stale(desk: Desk) -> None:
    request = desk.ask()
    desk.jobs.cancel(desk.get(request).job_id, on=desk.on)
    assert not desk.get(request).is_open
    assert desk.approvals.open(on=desk.on) == []
    with pytest.raises(ApprovalRefused, match="stale"):
        desk.approvals.approve(request, by="alice", on=desk.on)
    desk.jobs.retry(desk.get(request).job_id, on=desk.on)
    job = desk.claimed()
    newer = desk.approvals.request(job, "again", on=desk.on)
    assert [each.request_seq for each in desk.approvals.open(on=desk.on)] == [newer]


def test_finding_what_is_open(desk: Desk) -> None:
    requests = [desk.ask(n, session, agent) for n, (session, agent) in enumerate([(A, "a"), (A, "b"), (B, "a")])]

    def found(**words: Any) -> list[int]:
        return [each.request_seq for each in desk.approvals.open(on=desk.on, **words)]

    assert found() == requests
    assert found(limit=1) == requests[:1]
    assert found(agent_id="a") == [requests[0], requests[2]]
    assert found(session_id=A) == requests[:2]


def test_an_action_that_was_erased_is_none(desk: Desk) -> None:
    request = desk.ask()
    desk.database.execute("DELETE FROM agent_events")
    assert desk.get(request).action is None


def test_it_works_inside_the_callers_transaction_of_any_driver(desk: Desk) -> None:
    job = desk.begun()
    with psycopg.connect(desk.database.dsn) as three:
        desk.approvals.request(job, "x", on=three)
        three.rollback()
        assert desk.approvals.newest(job.job_id, on=three) is None
        request = desk.approvals.request(job, EXACT, deadline=timedelta(days=1), on=three)
    engine = create_engine("postgresql+psycopg2://", creator=lambda: psycopg2.connect(desk.database.dsn))
    with Session(engine) as session, session.begin():
        assert [each.action for each in desk.approvals.open(on=session)] == [EXACT]
        desk.approvals.approve(request, by="alice", edit=EXACT, on=session)
    engine.dispose()
    assert desk.get(request).approved_action == EXACT


@pytest.mark.parametrize("kind", ["jsonb", "json"])
def test_under_names_that_need_quotes_and_payloads_of_either_type(database: Database, kind: str) -> None:
    shape = schema.ledger_sql(ODD.ledger).replace("jsonb", kind)
    desk = Desk(database, Ledger(database, ODD, shape).settings)
    request = desk.ask(EXACT)
    desk.approvals.approve(request, by="alice", edit=EXACT, on=desk.on)
    assert (desk.get(request).action, desk.get(request).edit) == (EXACT, EXACT)


def test_an_older_schema_has_no_approvals(database: Database) -> None:
    database.execute(schema.ledger_sql(Settings().ledger))
    schema.install(database.connect(), Settings(), upto=3)
    approvals = Approvals(Settings())
    with pytest.raises(ConfigError, match="no function 'decide_approval'") as caught:
        approvals.approve(1, by="alice", on=database.connect())
    assert "walstream migrate" in caught.value.hint
    with pytest.raises(ConfigError, match="no table 'approvals'"):
        approvals.open(on=database.connect())
    for words in (["list"], ["show", "1"], ["approve", "1"], ["edit", "1", "--json-edit", "{}"], ["reject", "1"]):
        called = call("approvals", *words, dsn=database.dsn)
        assert called.exit_code == ConfigError.exit_code
        assert "walstream migrate" in called.stderr


def test_the_code_of_the_documentation_works(desk: Desk) -> None:
    text = DOCS.read_text(encoding="utf-8")
    blocks = text[text.index("## Approvals") :].split("```python\n")[1:]
    worker, person = (block.split("```")[0].replace('"postgresql:///app"', repr(desk.database.dsn)) for block in blocks)
    number, _ = desk.jobs.submit(A, "buyer", on=desk.on)
    names: dict[str, Any] = {}
    exec(worker, names)
    with names["worker"]:
        eventually(lambda: desk.jobs.get(number, on=desk.on).status == "AWAITING_HUMAN", "the worker asks")
        exec(person, {})
        eventually(lambda: desk.jobs.get(number, on=desk.on).status == "COMPLETED", "the job goes on")
    events = desk.database.execute("SELECT event_type FROM agent_events ORDER BY seq")
    assert events == [("approval.requested",), ("approval.granted",), ("task.completed",)]


def test_the_decision_stands_in_the_context(desk: Desk) -> None:
    request = desk.ask(EXACT, deadline=datetime(2100, 1, 1, tzinfo=UTC))
    job_id = desk.get(request).job_id
    asked = {"action": EXACT, "job_id": job_id, "deadline": "2100-01-01T00:00:00.000000Z"}
    context = rebuild_context(desk.on, A, settings=desk.settings)
    assert context["approvals"] == {str(request): {"status": "requested", **asked}}
    desk.approvals.approve(request, by="alice", edit=EXACT, on=desk.on)
    context = rebuild_context(desk.on, A, settings=desk.settings)
    assert context["approvals"] == {str(request): {"status": "granted", **asked, "by": "alice", "edit": EXACT}}


# -- who may -------------------------------------------------------------------------------------------------


@pytest.fixture
def roles(database: Database, server: Server) -> Iterator[tuple[str, str]]:
    names = (f"worker_{database.name[-8:]}", f"approver_{database.name[-8:]}")
    for name in names:
        server.execute(f"CREATE ROLE {name} LOGIN NOSUPERUSER PASSWORD 'irrelevant'")
    yield names
    for name in names:
        database.execute(f"DROP OWNED BY {name}")
        server.execute(f"DROP ROLE {name}")


def test_a_worker_asks_and_an_approver_decides_and_neither_can_do_both(desk: Desk, roles: tuple[str, str]) -> None:
    worker, approver = roles
    desk.database.execute("\n".join(worker_statements(desk.settings, worker)))
    desk.database.execute("\n".join(approver_statements(desk.settings, approver)))
    desk.database.execute("\n".join(approver_statements(desk.settings, approver)))  # as often as one likes
    asking, deciding = (
        psycopg2.connect(make_dsn(desk.database.dsn, user=role, password="irrelevant")) for role in roles
    )
    for conn in (asking, deciding):
        conn.autocommit = True
    job = desk.begun()
    request = desk.approvals.request(job, "x", on=asking)
    with pytest.raises(ConfigError, match="may not decide approvals") as no:
        desk.approvals.approve(request, by="me", on=asking)
    assert "--approver" in no.value.hint
    for conn, statement in (
        (asking, "UPDATE walstream.approvals SET decision = 'granted'"),
        (asking, f"SELECT walstream.settle_approval({request}, 'granted', 'me', NULL, NULL)"),
        (deciding, "UPDATE walstream.approvals SET deadline = now()"),
        (deciding, "INSERT INTO walstream.approvals SELECT * FROM walstream.approvals"),
        (deciding, f"SELECT walstream.settle_approval({request}, 'granted', 'me', NULL, NULL)"),
        (deciding, f"SELECT walstream.resume_job({job.job_id})"),
        (deciding, f"SELECT walstream.append('{A}', 'a', 'x', '{{}}')"),
    ):
        with conn.cursor() as cur, pytest.raises(InsufficientPrivilege):
            cur.execute(statement)
    with pytest.raises(ConfigError, match="may not work on approvals") as no:
        desk.approvals.request(job, "x", on=deciding)
    assert "--worker" in no.value.hint
    assert [each.action for each in desk.approvals.open(on=deciding)] == ["x"]

    dsn = make_dsn(desk.database.dsn, user=approver, password="irrelevant")
    assert ok("approvals", "list", "--json", dsn=dsn).json[0]["action"] == "x"
    ok("approvals", "approve", str(request), "--by", "alice", dsn=dsn)
    newest = desk.approvals.newest(job.job_id, on=asking)
    assert newest is not None
    assert newest.granted
    again = desk.claimed()
    desk.approvals.request(again, "y", deadline=timedelta(0), on=asking)
    assert desk.approvals.expire("a", on=asking) == [job.job_id]
    asking.close()
    deciding.close()


# -- the command line ----------------------------------------------------------------------------------------


def test_listed_shown_and_decided(desk: Desk) -> None:
    dsn = desk.database.dsn
    assert "nothing waits" in ok("approvals", "list", dsn=dsn).stdout
    first = desk.ask(EXACT, agent="a\x1b[31m", reason="over\nthe limit", deadline=timedelta(days=7))
    second = desk.ask({"note": "b\u202e\x1b[31m"}, B, "b")
    listed = ok("approvals", "list", dsn=dsn).stdout
    assert "\x1b" not in listed
    assert "\u202e" not in listed
    for word in (A, B, str(first), "12345678901234567890.123456789"):
        assert word in listed
    found = ok("approvals", "list", "--json", dsn=dsn).stdout
    for text in ("12345678901234567890.123456789", "123456789012345678901234567890"):
        assert f":{text}" in found.replace(" ", "")
    assert [each["request_seq"] for each in json.loads(found)] == [first, second]
    assert [e["status"] for e in ok("approvals", "list", "--agent", "b", "--json", dsn=dsn).json] == ["open"]
    assert len(ok("approvals", "list", "--session", A, "--json", dsn=dsn).json) == 1
    assert "--limit shows more" in ok("approvals", "list", "--limit", "1", dsn=dsn).stderr

    shown = ok("approvals", "show", str(first), dsn=dsn).stdout
    assert "status           open" in shown
    assert '"amount": 12345678901234567890.123456789' in shown
    assert "over·the limit" in shown
    assert "\x1b" not in shown

    done = ok("approvals", "approve", str(first), "--reason", "fine", "--json", dsn=dsn).json
    approval = desk.get(first)
    assert done == {
        "request_seq": first,
        "decision": "granted",
        "decision_seq": approval.decision_seq,
        "job_id": approval.job_id,
        "by": getpass.getuser(),
    }
    assert (approval.granted, approval.decided_by, approval.reason) == (True, getpass.getuser(), "fine")
    assert desk.status(first) == "SUBMITTED"
    said = ok("approvals", "reject", str(second), "--by", "bob", "--reason", "no", dsn=dsn).stdout
    assert f"rejected: request {second} of b; job {approval.job_id + 1} goes on" in said
    shown = ok("approvals", "show", str(second), "--json", dsn=dsn).json
    assert (shown["status"], shown["decided_by"], shown["reason"]) == ("rejected", "bob", "no")

    twice = call("approvals", "reject", str(first), "--by", "bob", dsn=dsn)
    assert twice.exit_code == 1
    assert f"was granted by {getpass.getuser()}" in twice.stderr
    missing = call("approvals", "approve", "4711", dsn=dsn)
    assert missing.exit_code == LedgerError.exit_code
    assert "no request 4711" in missing.stderr
    stale = desk.ask("x")
    desk.jobs.cancel(desk.get(stale).job_id, on=desk.on)
    assert "status           stale" in ok("approvals", "show", str(stale), dsn=dsn).stdout
    assert call("approvals", "approve", str(stale), dsn=dsn).exit_code == 1


def test_a_decision_wakes_the_workers_of_the_agent(desk: Desk) -> None:
    with desk.on.cursor() as cur:
        cur.execute(f'LISTEN "{desk.jobs.channel}"')
    for words in (["approve"], ["reject"], ["edit", "--json-edit", "{}"]):
        request = desk.ask(agent="buyer")
        ok("approvals", words[0], str(request), *words[1:], dsn=desk.database.dsn)
        while not desk.on.notifies:
            assert select.select([desk.on], [], [], 30)[0], words
            desk.on.poll()
        assert [each.payload for each in desk.on.notifies] == ["buyer"]
        desk.on.notifies.clear()
        desk.jobs.cancel(desk.get(request).job_id, on=desk.on)


def test_edits_keep_every_digit(desk: Desk, tmp_path: Path) -> None:
    dsn = desk.database.dsn
    file = tmp_path / "edit.json"
    file.write_text(EXACT_TEXT, encoding="utf-8")
    ways = (["--edit", str(file)], ["--json-edit", EXACT_TEXT], ["--edit", "-"])
    for way in ways:
        request = desk.ask("x")
        called = call("approvals", "edit", str(request), *way, "--by", "alice", dsn=dsn, answer=EXACT_TEXT)
        assert called.exit_code == 0, called
        assert "granted with an edit" in called.stdout
        assert desk.get(request).approved_action == EXACT
        shown = ok("approvals", "show", str(request), "--json", dsn=dsn).stdout
        assert "12345678901234567890.123456789" in shown
    request = desk.ask("x")
    for bad, why in (("{", "not JSON"), ("null", "no action")):
        called = call("approvals", "edit", str(request), "--json-edit", bad, dsn=dsn)
        assert called.exit_code == PayloadError.exit_code
        assert why in called.stderr
    both = call("approvals", "edit", str(request), "--json-edit", "1", "--edit", "-", dsn=dsn)
    assert both.exit_code == 2
    assert "cannot be read" in call("approvals", "edit", str(request), "--edit", str(tmp_path), dsn=dsn).stderr
    assert "nobody is there" in call("approvals", "edit", str(request), dsn=dsn).stderr
    assert desk.get(request).is_open


def _editor(tmp_path: Path, code: str) -> str:
    script = tmp_path / "editor.py"
    script.write_text(f"import pathlib, sys\nfile = pathlib.Path(sys.argv[1])\n{code}\n", encoding="utf-8")
    return f"{sys.executable} {script}"


def test_an_action_is_edited_in_the_editor(desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The runner of the command line exchanges standard input for one that is no terminal.
    monkeypatch.setattr(commands, "person_is_there", lambda: True)
    monkeypatch.delenv("VISUAL", raising=False)
    request = desk.ask(EXACT)
    for code, why in (
        ("", "nothing was changed"),
        ("sys.exit(3)", "did not work"),
        ("file.write_text('{')", "not JSON"),
    ):
        monkeypatch.setenv("EDITOR", _editor(tmp_path, code))
        called = call("approvals", "edit", str(request), dsn=desk.database.dsn)
        assert called.exit_code in (ConfigError.exit_code, PayloadError.exit_code)
        assert why in called.stderr
        assert desk.get(request).is_open
    monkeypatch.setenv("EDITOR", _editor(tmp_path, "file.write_text(file.read_text().replace(': 0.1', ': 0.2'))"))
    ok("approvals", "edit", str(request), "--by", "alice", dsn=desk.database.dsn)
    assert desk.get(request).approved_action == EXACT | {"rate": 0.2}
    assert "it is granted" in call("approvals", "edit", str(request), dsn=desk.database.dsn).stderr


def test_status_counts_what_is_open(desk: Desk) -> None:
    dsn = desk.database.dsn
    assert call("status", "--json", dsn=dsn).json["approvals"] == {"count": 0, "oldest_seconds": None}
    assert "approvals" not in call("status", dsn=dsn).stdout
    desk.approvals.approve(desk.ask(), by="alice", on=desk.on)
    desk.jobs.cancel(desk.get(desk.ask()).job_id, on=desk.on)
    for _ in range(2):
        desk.ask(agent="b")
    desk.database.execute("UPDATE walstream.approvals SET requested_at = now() - interval '3 h' WHERE agent_id = 'b'")
    found = call("status", "--json", dsn=dsn).json["approvals"]
    assert found["count"] == 2
    assert 3 * 3600 <= found["oldest_seconds"] < 3 * 3600 + 60
    assert "2 to be decided (the oldest for 3 h)" in call("status", dsn=dsn).stdout
