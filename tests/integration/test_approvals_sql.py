"""The SQL functions of approvals, called as any language would call them."""

from __future__ import annotations

import json
import threading
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg2
import pytest

from tests.conftest import Database
from tests.integration.test_append_sql import ODD, A, B, Ledger
from tests.integration.test_jobs_sql import REFUSED, STALE, UNKNOWN, Jobs
from walstream.config import Settings
from walstream.ledger import schema

UNDECIDABLE = "WS005"
ACTION = {"tool": "pay", "amount": 5}


class Approvals(Jobs):
    """Approvals of a ledger, by calls on one connection in autocommit."""

    def ask(self, session: str = A, *, agent: str = "a", action: Any = ACTION, **named: Any) -> tuple[int, int]:
        """A job that waits for an approval: its number, and that of the request."""
        self.submit(session, agent)
        job = self.begun(agent, per_session=False)
        return int(job["job_id"]), self.ask_for(job, action, **named)

    def ask_for(self, job: dict[str, Any], action: Any = ACTION, **named: Any) -> int:
        text = action if isinstance(action, str) else json.dumps(action)
        (row,) = self.call("request_approval", job["job_id"], job["fencing_token"], text, **named)
        return int(row["request_approval"])

    def decide(self, request: int, decision: str = "granted", by: str = "alice", **named: Any) -> int:
        (row,) = self.call("decide_approval", request, decision, by, **named)
        return int(row["decide_approval"])

    def expired(self, agent: str = "a") -> list[int]:
        return [row["expire_approvals"] for row in self.call("expire_approvals", agent)]

    def approval(self, request: int) -> dict[str, Any]:
        home = self.ledger.home.replace("%", "%%")
        return self.sql(f"SELECT * FROM {home}.approvals WHERE request_seq = %s", request)[0]

    def events(self, session: str = A) -> list[tuple[int, str, str, Any]]:
        return [(seq, agent, kind, json.loads(text)) for seq, _, agent, kind, text in self.ledger.rows(session)]


@pytest.fixture
def approvals(database: Database) -> Approvals:
    return Approvals(Ledger(database))


def _past(seconds: float = 1) -> datetime:
    return datetime.now(UTC) - timedelta(seconds=seconds)


def test_a_job_asks_waits_and_goes_on(approvals: Approvals) -> None:
    deadline = datetime(2100, 2, 3, 4, 5, 6, 789, tzinfo=UTC)
    job, request = approvals.ask(deadline=deadline, reason="over the limit")
    waiting = approvals.row(job)
    assert (waiting["status"], waiting["lease_owner"], waiting["lease_expires_at"]) == ("AWAITING_HUMAN", None, None)
    assert approvals.claim() is None
    asked = {"job_id": job, "action": ACTION, "deadline": "2100-02-03T04:05:06.000789Z", "reason": "over the limit"}
    assert approvals.events() == [(request, "a", "approval.requested", asked)]

    decision = approvals.decide(request, edit='{"tool": "pay", "amount": 4}', reason="rounded")
    said = {"request": request, "job_id": job, "by": "alice", "edit": {"tool": "pay", "amount": 4}, "reason": "rounded"}
    assert approvals.events()[1:] == [(decision, "alice", "approval.granted", said)]
    row = approvals.approval(request)
    assert (row["decision"], row["decision_seq"], row["decided_by"]) == ("granted", decision, "alice")
    assert row["requested_at"] < row["decided_at"]
    again = approvals.claimed()
    assert (again["job_id"], again["attempts"], again["fencing_token"]) == (job, 1, 2)


def test_a_rejection_resumes_the_job_as_well(approvals: Approvals) -> None:
    job, request = approvals.ask()
    decision = approvals.decide(request, "rejected", reason="too dear")
    assert approvals.events()[1] == (
        decision,
        "alice",
        "approval.rejected",
        {"request": request, "job_id": job, "by": "alice", "reason": "too dear"},
    )
    assert approvals.claimed()["job_id"] == job


def test_one_after_the_other_in_one_job(approvals: Approvals) -> None:
    job, first = approvals.ask()
    approvals.decide(first)
    second = approvals.ask_for(approvals.begun())
    assert "was granted by alice" in approvals.refused(UNDECIDABLE, "decide_approval", first, "rejected", "bob")
    approvals.decide(second, "rejected")
    assert approvals.claimed()["job_id"] == job
    assert [(each["request_seq"], each["decision"]) for each in _all(approvals)] == [
        (first, "granted"),
        (second, "rejected"),
    ]


def _all(approvals: Approvals) -> list[dict[str, Any]]:
    return approvals.sql("SELECT * FROM walstream.approvals ORDER BY request_seq")


def test_numbers_keep_every_digit(approvals: Approvals) -> None:
    action = '{"amount": 12345678901234567890.12345678901234567890, "id": 123456789012345678901234567890}'
    edit = '{"amount": 0.1000000000000000055511151231257827, "id": 9007199254740993}'
    _, request = approvals.ask(action=action)
    decision = approvals.decide(request, edit=edit)
    found = dict(approvals.ledger.database.execute("SELECT seq, payload::text FROM agent_events"))
    assert f'"action": {_sorted(approvals, action)}' in found[request]
    assert f'"edit": {_sorted(approvals, edit)}' in found[decision]


def _sorted(approvals: Approvals, text: str) -> str:
    (row,) = approvals.sql("SELECT %s::jsonb::text AS text", text)
    for number in ("12345678901234567890.12345678901234567890", "0.1000000000000000055511151231257827"):
        assert (number in text) == (number in row["text"])
    return str(row["text"])


# -- what is refused -----------------------------------------------------------------------------------------


def test_a_decision_is_made_once(approvals: Approvals) -> None:
    _, request = approvals.ask()
    approvals.decide(request)
    for decision in ("granted", "rejected"):
        said = approvals.refused(UNDECIDABLE, "decide_approval", request, decision, "bob")
        assert f"request {request} was granted by alice at 2" in said
    approvals.sql("DELETE FROM agent_jobs")
    assert "was granted by alice" in approvals.refused(UNDECIDABLE, "decide_approval", request, "granted", "bob")
    assert len(approvals.events()) == 2


def test_of_many_who_decide_at_once_one_wins(approvals: Approvals) -> None:
    requests = [approvals.ask(session)[1] for session in (A, B) for _ in range(5)]
    won: list[tuple[int, str]] = []
    lost: list[str] = []

    def decide(name: str) -> None:
        conn = approvals.connect()
        for request in requests:
            try:
                approvals.call("decide_approval", request, "granted", name, on=conn)
                won.append((request, name))
            except psycopg2.Error as error:
                lost.append(str(error.pgcode))
        conn.close()

    threads = [threading.Thread(target=decide, args=(f"person {number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(request for request, _ in won) == sorted(requests)
    assert lost == [UNDECIDABLE] * 30
    assert {(each["request_seq"], each["decided_by"]) for each in _all(approvals)} == set(won)
    decided = [
        payload["request"] for session in (A, B) for *_, kind, payload in approvals.events(session) if "by" in payload
    ]
    assert sorted(decided) == sorted(requests)


def test_the_second_waits_for_the_first_and_is_refused_or_takes_its_place(approvals: Approvals) -> None:
    """Whether the first one commits or not is what counts."""
    for commits in (True, False):
        _, request = approvals.ask(B if commits else A)
        first = approvals.ledger.database.connect()
        approvals.call("decide_approval", request, "granted", "first", on=first)
        outcome: list[str] = []

        def second(request: int = request, outcome: list[str] = outcome) -> None:
            conn = approvals.connect()
            try:
                approvals.call("decide_approval", request, "rejected", "second", on=conn)
                outcome.append("decided")
            except psycopg2.Error as error:
                outcome.append(str(error.pgcode))
            conn.close()

        thread = threading.Thread(target=second)
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()
        first.commit() if commits else first.rollback()
        thread.join(60)
        assert outcome == [UNDECIDABLE if commits else "decided"]
        assert approvals.approval(request)["decided_by"] == ("first" if commits else "second")


def test_a_request_is_stale_once_its_job_waits_for_it_no_longer(approvals: Approvals) -> None:
    job, request = approvals.ask()

    def refused() -> str:
        return approvals.refused(UNDECIDABLE, "decide_approval", request, "granted", "alice")

    approvals.call("cancel_job", job, "enough")
    assert f"request {request} is stale: job {job} does not wait for it any more, and is CANCELED" in refused()
    approvals.call("retry_job", job)
    assert "is SUBMITTED" in refused()
    newer = approvals.ask_for(approvals.begun())
    assert "is AWAITING_HUMAN" in refused()  # for another one
    approvals.decide(newer)
    assert "is SUBMITTED" in refused()
    begun = approvals.begun()
    approvals.call("await_human", job, begun["fencing_token"])  # for whatever an application has of its own
    assert "is AWAITING_HUMAN" in refused()
    assert approvals.approval(request)["decision"] is None


def test_what_was_resumed_by_hand_is_not_decided_afterwards(approvals: Approvals) -> None:
    job, request = approvals.ask()
    approvals.call("resume_job", job)
    assert "is SUBMITTED" in approvals.refused(UNDECIDABLE, "decide_approval", request, "granted", "alice")


def test_a_worker_with_a_stale_token_asks_for_nothing(approvals: Approvals) -> None:
    approvals.submit()
    zombie = approvals.begun()
    approvals.expire(zombie["job_id"])
    approvals.begun()
    values = (zombie["job_id"], zombie["fencing_token"], "{}")
    assert "stale" in approvals.refused(STALE, "request_approval", *values)
    assert approvals.events() == []
    assert _all(approvals) == []


def test_only_who_is_at_work_may_ask_and_once(approvals: Approvals) -> None:
    approvals.submit()
    job = approvals.claimed()
    values = (job["job_id"], job["fencing_token"], "{}")
    assert "is DELIVERED" in approvals.refused(REFUSED, "request_approval", *values)
    approvals.call("begin_job", *values[:2])
    request = approvals.ask_for(job)
    assert "is AWAITING_HUMAN" in approvals.refused(REFUSED, "request_approval", *values)
    assert [seq for seq, *_ in approvals.events()] == [request]


def test_what_cannot_be_asked_or_decided(approvals: Approvals) -> None:
    bad = "22023"
    approvals.submit()
    job = approvals.begun()
    held = (job["job_id"], job["fencing_token"])
    for action in (None, "null"):
        assert "an action" in approvals.refused(bad, "request_approval", *held, action)
    assert "a deadline is a moment" in approvals.refused(bad, "request_approval", *held, "{}", "infinity")
    approvals.refused(UNKNOWN, "request_approval", 4711, 1, "{}")
    request = approvals.ask_for(job, "0")
    assert "granted or rejected" in approvals.refused(bad, "decide_approval", request, "perhaps", "alice")
    assert "granted or rejected" in approvals.refused(bad, "decide_approval", request, None, "alice")
    for name in (None, "", "deadline"):
        assert "the name of" in approvals.refused(bad, "decide_approval", request, "granted", name)
    assert "goes with granted" in approvals.refused(bad, "decide_approval", request, "rejected", "alice", "{}")
    assert "an edit is an action" in approvals.refused(bad, "decide_approval", request, "granted", "alice", "null")
    assert "no request 4711" in approvals.refused(UNKNOWN, "decide_approval", 4711, "granted", "alice")
    approvals.sql("DELETE FROM agent_jobs")
    assert "no job" in approvals.refused(UNKNOWN, "decide_approval", request, "granted", "alice")


def test_what_is_rolled_back_was_never_asked_nor_decided(approvals: Approvals) -> None:
    approvals.submit()
    job = approvals.begun()
    conn = approvals.ledger.database.connect()
    approvals.call("request_approval", job["job_id"], job["fencing_token"], "{}", on=conn)
    conn.close()  # as when the worker is killed before its commit
    assert (approvals.row(job["job_id"])["status"], approvals.events(), _all(approvals)) == ("IN_PROGRESS", [], [])
    request = approvals.ask_for(job)
    conn = approvals.ledger.database.connect()
    approvals.call("decide_approval", request, "granted", "alice", on=conn)
    conn.close()
    assert approvals.row(job["job_id"])["status"] == "AWAITING_HUMAN"
    assert approvals.approval(request)["decision"] is None
    approvals.decide(request)
    assert len(approvals.events()) == 2


# -- deadlines -----------------------------------------------------------------------------------------------


def test_after_its_deadline_a_request_is_rejected_and_the_job_goes_on(approvals: Approvals) -> None:
    job, request = approvals.ask(deadline=_past())
    later, open_one = approvals.ask(B, deadline=datetime.now(UTC) + timedelta(hours=1))
    said = approvals.refused(UNDECIDABLE, "decide_approval", request, "granted", "alice")
    assert f"the deadline of request {request} passed at 2" in said
    assert approvals.expired("another agent") == []
    assert approvals.expired() == [job]
    assert approvals.expired() == []
    seq, agent, kind, payload = approvals.events()[1]
    assert (agent, kind) == ("deadline", "approval.rejected")
    assert payload == {"request": request, "job_id": job, "by": "deadline", "reason": "nobody decided in time"}
    assert (approvals.approval(request)["decided_by"], approvals.approval(request)["decision_seq"]) == ("deadline", seq)
    assert approvals.claimed()["job_id"] == job
    assert "was rejected by deadline" in approvals.refused(UNDECIDABLE, "decide_approval", request, "granted", "alice")
    assert approvals.row(later)["status"] == "AWAITING_HUMAN"
    approvals.decide(open_one)


def test_expiry_waits_for_nobody(approvals: Approvals) -> None:
    """Neither for who has the job's row, nor for who appends to the session."""
    job, request = approvals.ask(deadline=_past())
    other = approvals.ledger.database.connect()
    with other.cursor() as cur:
        cur.execute("SELECT FROM agent_jobs WHERE job_id = %s FOR UPDATE", (job,))
        approvals.sql("SET statement_timeout = '60s'")
        assert approvals.expired() == []
        other.rollback()
        cur.execute("SELECT walstream.append(%s, 'b', 'note', '{}')", (A,))
        assert approvals.expired() == []
        other.rollback()
    assert approvals.expired() == [job]
    assert approvals.approval(request)["decision"] == "rejected"


def test_two_workers_expire_each_request_once(approvals: Approvals) -> None:
    asked = [approvals.ask(deadline=_past())[0] for _ in range(20)]
    found: list[int] = []

    def expire() -> None:
        conn = approvals.connect()
        for _ in range(10):
            found.extend(row["expire_approvals"] for row in approvals.call("expire_approvals", "a", on=conn))
        conn.close()

    threads = [threading.Thread(target=expire) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    found.extend(approvals.expired())
    assert sorted(found) == sorted(asked)
    assert sum(kind == "approval.rejected" for _, _, kind, _ in approvals.events()) == 20


def test_stale_requests_keep_no_deadline_from_being_seen(approvals: Approvals) -> None:
    for _ in range(120):
        job, _ = approvals.ask(deadline=_past(60))
        approvals.call("cancel_job", job)
    job, _ = approvals.ask(deadline=_past())
    assert approvals.expired() == [job]


# -- other ledgers and schemas -------------------------------------------------------------------------------


def test_under_names_that_need_quotes(database: Database) -> None:
    approvals = Approvals(Ledger(database, ODD))
    job, request = approvals.ask()
    approvals.decide(request)
    assert approvals.claimed()["job_id"] == job
    _, request = approvals.ask(B, agent="b", deadline=_past())
    assert len(approvals.expired("b")) == 1


def test_a_schema_of_version_3_gets_them_by_migration(database: Database) -> None:
    database.execute(schema.ledger_sql(Settings().ledger))
    conn = database.connect()
    assert schema.install(conn, Settings(), upto=schema.JOBS_VERSION) == 3
    names = "SELECT count(*) FROM pg_proc WHERE proname IN ('request_approval', 'decide_approval', 'expire_approvals')"
    assert database.execute(names) == [(0,)]
    database.execute(f"SELECT walstream.submit_job('{A}', 'a')")
    schema.install(conn, Settings())
    assert database.execute(names) == [(3,)]
