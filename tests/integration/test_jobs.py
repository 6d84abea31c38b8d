"""``Jobs`` and ``walstream jobs``: the functions of jobs from Python and from the command line."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import psycopg2
import pytest
from psycopg2.extensions import make_dsn
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from tests.cli_calls import call, ok, set_up
from tests.conftest import Database, Server
from tests.integration.test_append_sql import ODD, A, B, Ledger
from walstream import ConfigError, Fenced, Job, JobRefused, Jobs, LedgerError
from walstream.config import Settings
from walstream.ledger import schema
from walstream.ledger.grants import worker_statements
from walstream.ledger.job import STATUSES

DOCS = Path(__file__).resolve().parents[2] / "docs" / "handoffs.md"


@pytest.fixture
def ledger(database: Database) -> Ledger:
    return Ledger(database)


@pytest.fixture
def jobs(ledger: Ledger) -> Jobs:
    return Jobs(ledger.settings)


@pytest.fixture
def on(ledger: Ledger) -> Any:
    conn = ledger.database.connect()
    conn.autocommit = True
    return conn


def _claim(jobs: Jobs, on: Any) -> Job:
    job = jobs.claim("a", "me", on=on)
    assert job is not None
    return job


def test_the_life_of_a_job(jobs: Jobs, on: Any) -> None:
    due = datetime(2020, 2, 3, 4, 5, 6, 789, tzinfo=UTC)
    number, created = jobs.submit(
        A, "a", event_seq=1 << 40, priority=2, hops=3, max_delivery_attempts=3, not_before=due, on=on
    )
    assert created
    assert jobs.submit(A, "a", event_seq=1 << 40, on=on) == (number, False)
    waiting = jobs.get(number, on=on)
    assert (waiting.status, waiting.next_try, waiting.event_seq, waiting.hops) == ("SUBMITTED", due, 1 << 40, 3)

    job = jobs.claim("a", "me", lease_seconds=30, concurrency=1, on=on)
    assert job is not None
    assert (job.job_id, job.session_id, job.agent_id, job.status) == (number, A, "a", "DELIVERED")
    assert (job.attempts, job.fencing_token, job.lease_owner, job.priority) == (1, 1, "me", 2)
    assert job.lease_expires_at is not None
    assert timedelta(seconds=25) < job.lease_expires_at - datetime.now(UTC) < timedelta(seconds=35)
    assert jobs.claim("a", "other", on=on) is None

    jobs.begin(job, on=on)
    assert jobs.renew(job, on=on) is True
    jobs.await_human(number, job.fencing_token, on=on)
    jobs.resume(number, on=on)
    again = _claim(jobs, on)
    jobs.release(again, on=on)
    again = _claim(jobs, on)
    assert jobs.fail(again, "no network", retry_after=0, on=on) == "SUBMITTED"
    assert jobs.get(number, on=on).error == "no network"
    again = _claim(jobs, on)
    jobs.begin(again, on=on)
    jobs.complete(again, on=on)
    done = jobs.get(number, on=on)
    assert (done.status, done.error) == ("COMPLETED", None)
    assert done.finished_at is not None


def test_what_is_refused(jobs: Jobs, on: Any) -> None:
    number, _ = jobs.submit(A, "a", on=on)
    job = _claim(jobs, on)
    with pytest.raises(JobRefused, match=f"job {number} is DELIVERED, and complete_job cannot make it COMPLETED") as no:
        jobs.complete(job, on=on)
    assert "jobs show" in no.value.hint
    jobs.cancel(number, "enough", on=on)
    with pytest.raises(Fenced, match=f"job {number}: the fencing token 1 of job {number} is stale"):
        jobs.begin(job, on=on)
    assert jobs.renew(job, on=on) is False
    with pytest.raises(JobRefused):
        jobs.resume(number, on=on)
    jobs.retry(number, on=on)
    for ask in (jobs.retry, jobs.cancel, jobs.get):
        with pytest.raises(LedgerError, match="no job 4711"):
            ask(4711, on=on)
    with pytest.raises(TypeError, match="fencing token"):
        jobs.begin(number, on=on)
    with pytest.raises(ValueError, match="offset"):
        jobs.submit(A, "a", not_before=datetime(2026, 1, 1), on=on)
    with pytest.raises(LedgerError, match="uuid"):
        jobs.submit("mine", "a", on=on)
    with pytest.raises(ValueError, match="no status 'DONE'"):
        jobs.find(statuses=["DONE"], on=on)


def test_it_works_inside_the_callers_transaction(jobs: Jobs, ledger: Ledger) -> None:
    conn = ledger.database.connect()
    jobs.submit(A, "a", on=conn)
    assert jobs.claim("a", "me", on=conn)
    conn.rollback()
    assert jobs.find(on=conn) == []


def test_with_the_other_drivers(jobs: Jobs, ledger: Ledger) -> None:
    with psycopg.connect(ledger.database.dsn) as three:
        number, _ = jobs.submit(A, "a", on=three)
        three.commit()
        job = _claim(jobs, three)
        assert job == jobs.get(number, on=three.cursor())
    engine = create_engine("postgresql+psycopg2://", creator=lambda: psycopg2.connect(ledger.database.dsn))
    with Session(engine) as session, session.begin():
        jobs.begin(job, on=session)
        jobs.complete(job, on=session)
        assert [each.status for each in jobs.find(statuses=["COMPLETED"], agent_id="a", on=session)] == ["COMPLETED"]
    engine.dispose()


def test_finding_jobs(jobs: Jobs, on: Any) -> None:
    numbers = [jobs.submit(session, agent, on=on)[0] for session, agent in ((A, "a"), (A, "b"), (B, "a"), (B, "b"))]
    jobs.cancel(numbers[0], on=on)

    def found(**words: Any) -> list[int]:
        return [job.job_id for job in jobs.find(**words, on=on)]

    assert found() == numbers[::-1]
    assert found(limit=2) == [numbers[3], numbers[2]]
    assert found(agent_id="a") == [numbers[2], numbers[0]]
    assert found(session_id=A) == [numbers[1], numbers[0]]
    assert found(statuses=["CANCELED", "FAILED"]) == [numbers[0]]


def test_under_names_that_need_quotes(database: Database) -> None:
    ledger = Ledger(database, ODD)
    jobs, conn = Jobs(ODD), ledger.database.connect()
    number, _ = jobs.submit(A, "a", on=conn)
    job = _claim(jobs, conn)
    assert job == jobs.get(number, on=conn) == jobs.find(on=conn)[0]


def test_the_statuses_are_those_of_the_state_machine(ledger: Ledger) -> None:
    found = ledger.database.execute(
        "SELECT from_status FROM walstream.job_transitions UNION SELECT to_status FROM walstream.job_transitions"
    )
    assert {status for (status,) in found} == set(STATUSES)


def test_the_drawing_is_made_of_the_table(ledger: Ledger) -> None:
    found = ledger.database.execute("SELECT from_status, to_status, what FROM walstream.job_transitions")
    found.sort(key=lambda row: (STATUSES.index(row[0]), STATUSES.index(row[1])))
    arrows = [f"    {before} --> {after}: {what}" for before, after, what in found]
    drawing = "\n".join(["stateDiagram-v2", "    [*] --> SUBMITTED: submit_job", *arrows, "    COMPLETED --> [*]"])
    assert f"```mermaid\n{drawing}\n```" in DOCS.read_text(encoding="utf-8")


def test_the_worker_of_the_documentation_works(database: Database) -> None:
    settings = set_up(database)
    conn = database.connect()
    conn.autocommit = True
    number, _ = Jobs(settings).submit(A, "researcher", on=conn)
    text = DOCS.read_text(encoding="utf-8")
    code = text[text.index("### The functions") :].split("```python\n")[1].split("```")[0]
    exec(code.replace('"postgresql:///app"', repr(database.dsn)), {})
    assert Jobs(settings).get(number, on=conn).status == "COMPLETED"
    assert database.execute("SELECT event_type FROM agent_events") == [("task.completed",)]


def test_an_older_schema_has_no_jobs(database: Database) -> None:
    database.execute(schema.ledger_sql(Settings().ledger))
    schema.install(database.connect(), Settings(), upto=2)
    with pytest.raises(ConfigError, match="no function 'submit_job'") as caught:
        Jobs(Settings()).submit(A, "a", on=database.connect())
    assert "walstream migrate" in caught.value.hint


def test_a_worker_moves_jobs_through_the_functions_only(ledger: Ledger, server: Server) -> None:
    database = ledger.database
    role = f"worker_{database.name[-8:]}"
    server.execute(f"CREATE ROLE {role} LOGIN NOSUPERUSER PASSWORD 'irrelevant'")
    jobs = Jobs(ledger.settings)
    try:
        database.execute(f"GRANT USAGE ON SCHEMA walstream TO {role}; GRANT SELECT ON agent_jobs TO {role}")
        conn = psycopg2.connect(make_dsn(database.dsn, user=role, password="irrelevant"))
        conn.autocommit = True
        try:
            with pytest.raises(ConfigError, match="may not work on jobs") as caught:
                jobs.submit(A, "a", on=conn)
            assert "--worker" in caught.value.hint
            database.execute("\n".join(worker_statements(ledger.settings, role)))
            number, _ = jobs.submit(A, "a", on=conn)
            job = _claim(jobs, conn)
            jobs.begin(job, on=conn)
            jobs.await_human(job, on=conn)
            jobs.resume(number, on=conn)
            job = _claim(jobs, conn)
            jobs.release(job, on=conn)
            job = _claim(jobs, conn)
            assert jobs.renew(job, on=conn)
            assert jobs.fail(job, "x", on=conn) == "FAILED"
            jobs.retry(number, on=conn)
            job = _claim(jobs, conn)
            jobs.begin(job, on=conn)
            jobs.complete(job, on=conn)
            for refused in (
                "UPDATE agent_jobs SET fencing_token = 9",
                "INSERT INTO agent_jobs (session_id) VALUES (gen_random_uuid())",
                "DELETE FROM agent_jobs",
                "UPDATE walstream.job_transitions SET to_status = 'COMPLETED'",
                f"SELECT walstream.hold_job({number}, 1, true)",
            ):
                with conn.cursor() as cur, pytest.raises(psycopg2.errors.InsufficientPrivilege):
                    cur.execute(refused)
        finally:
            conn.close()
    finally:
        database.execute(f"DROP OWNED BY {role}")
        server.execute(f"DROP ROLE {role}")


# -- the command line ----------------------------------------------------------------------------------------


def test_jobs_are_listed_shown_canceled_and_tried_again(database: Database) -> None:
    settings = set_up(database)
    jobs, conn = Jobs(settings), database.connect()
    conn.autocommit = True
    assert "no job" in ok("jobs", "list", dsn=database.dsn).stdout
    numbers = [jobs.submit(session, agent, event_seq=9, on=conn)[0] for session, agent in ((A, "a"),)]
    numbers += [jobs.submit(B, "b\x1b[31m", on=conn)[0]]
    job = _claim(jobs, conn)
    jobs.fail(job, "no \x1b[31mnetwork\nat all", on=conn)

    listed = ok("jobs", "list", dsn=database.dsn).stdout
    assert "no ·[31mnetwork·at all" in listed
    assert A in listed
    assert "\x1b" not in listed
    found = ok("jobs", "list", "--status", "failed", "--agent", "a", "--session", A, "--json", dsn=database.dsn).json
    assert [(each["job_id"], each["status"], each["event_seq"], each["attempts"]) for each in found] == [
        (numbers[0], "FAILED", 9, 1)
    ]
    assert len(ok("jobs", "list", "--limit", "1", "--json", dsn=database.dsn).json) == 1
    assert "--limit shows more" in ok("jobs", "list", "--limit", "1", dsn=database.dsn).stderr
    assert call("jobs", "list", "--status", "DONE", dsn=database.dsn).exit_code == 2

    shown = ok("jobs", "show", str(numbers[0]), dsn=database.dsn).stdout
    assert "no ·[31mnetwork·at all" in shown
    assert ok("jobs", "show", str(numbers[0]), "--json", dsn=database.dsn).json["status"] == "FAILED"
    missing = call("jobs", "show", "4711", dsn=database.dsn)
    assert missing.exit_code == LedgerError.exit_code
    assert "no job 4711" in missing.stderr

    again = call("jobs", "retry", str(numbers[0]), str(numbers[1]), "4711", "--json", dsn=database.dsn)
    assert again.exit_code == 1
    assert again.json["jobs"] == [numbers[0]]
    assert set(again.json["refused"]) == {str(numbers[1]), "4711"}
    gone = call("jobs", "cancel", str(numbers[0]), "4711", "--reason", "enough", dsn=database.dsn)
    assert gone.exit_code == 1
    assert f"canceled: {numbers[0]}" in gone.stdout
    assert "no job 4711" in gone.stderr
    canceled = jobs.get(numbers[0], on=conn)
    assert (canceled.status, canceled.error) == ("CANCELED", "enough")


def test_the_commands_need_the_version_that_brings_jobs(database: Database) -> None:
    database.execute(schema.ledger_sql(Settings().ledger))
    schema.install(database.connect(), Settings(), upto=2)
    for words in (["list"], ["show", "1"], ["retry", "1"], ["cancel", "1"]):
        called = call("jobs", *words, dsn=database.dsn)
        assert called.exit_code == ConfigError.exit_code
        assert "walstream migrate" in called.stderr


def test_status_counts_what_is_not_finished(database: Database) -> None:
    settings = set_up(database)
    jobs, conn = Jobs(settings), database.connect()
    conn.autocommit = True
    assert call("status", "--json", dsn=database.dsn).json["jobs"] == []
    for session in (A, B):
        jobs.submit(session, "a", on=conn)
    jobs.begin(_claim(jobs, conn), on=conn)
    done = jobs.submit(A, "b", on=conn)[0]
    jobs.cancel(done, on=conn)
    database.execute(
        "UPDATE agent_jobs SET updated_at = now() - interval '3 h' WHERE status = 'SUBMITTED';"
        " UPDATE agent_jobs SET lease_expires_at = now() - interval '1 s' WHERE status = 'IN_PROGRESS'"
    )
    waiting, running = call("status", "--json", dsn=database.dsn).json["jobs"]
    assert (waiting["status"], waiting["count"], waiting["expired"]) == ("SUBMITTED", 1, 0)
    assert 3 * 3600 <= waiting["oldest_seconds"] < 3 * 3600 + 60
    assert (running["status"], running["count"], running["expired"]) == ("IN_PROGRESS", 1, 1)
    said = call("status", dsn=database.dsn).stdout
    assert "1 SUBMITTED (the oldest for 3 h), 1 IN_PROGRESS" in said
    assert "1 with an expired lease" in said
