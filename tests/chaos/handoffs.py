"""Handoffs that workers do while they are killed, and what has to be true of them in the end, asked in SQL."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections import Counter
from pathlib import Path
from typing import Any, Final

import psycopg2
from psycopg2.extensions import connection as Connection

from tests.cli_calls import set_up
from tests.conftest import Database
from tests.integration.streams import eventually
from walstream import Jobs, Ledger
from walstream.config import Settings

ROOT: Final = Path(__file__).resolve().parents[2]
KILLED: Final = -9
AGENT: Final = "writer"

# No key in it: an effect that happened twice would be there twice. `claims` is written by a trigger, whoever claims.
_TABLES: Final = """
    CREATE TABLE effects (
        job_id bigint, session_id text, token bigint, worker int, begun timestamptz, ended timestamptz
    );
    CREATE TABLE claims (
        number bigserial, job_id bigint, before bigint, token bigint, owner text, of_agent bigint, of_session bigint
    );
    GRANT ALL ON effects TO PUBLIC;
    CREATE FUNCTION note_claim() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = public AS $$
    BEGIN
        INSERT INTO claims (job_id, before, token, owner, of_agent, of_session)
        SELECT NEW.job_id, OLD.fencing_token, NEW.fencing_token, NEW.lease_owner,
               count(*) FILTER (WHERE j.agent_id = NEW.agent_id), count(*) FILTER (WHERE j.session_id = NEW.session_id)
          FROM agent_jobs AS j
         WHERE j.status IN ('DELIVERED', 'IN_PROGRESS') AND j.lease_expires_at > clock_timestamp();
        RETURN NEW;
    END $$;
    CREATE TRIGGER note_claim AFTER UPDATE OF fencing_token ON agent_jobs FOR EACH ROW EXECUTE FUNCTION note_claim();
    CREATE FUNCTION note_effect() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = public AS $$
    BEGIN
        INSERT INTO effects VALUES (
            (NEW.payload ->> 'job')::bigint, NEW.session_id, (NEW.payload ->> 'token')::bigint,
            (NEW.payload ->> 'worker')::int, to_timestamp((NEW.payload ->> 'begun')::float8), clock_timestamp()
        );
        RETURN NEW;
    END $$;
    CREATE TRIGGER note_effect AFTER INSERT ON agent_events FOR EACH ROW
        WHEN (NEW.event_type = 'turn.said' AND NEW.payload ? 'begun') EXECUTE FUNCTION note_effect();"""

# Each of these counts has to be 0.
FAULTS: Final = {
    "handoffs without their one job": """
        SELECT count(*) FROM agent_events AS e WHERE e.event_type = 'handoff.emitted' AND e.payload ->> 'to' <> 'nobody'
           AND (SELECT count(*) FROM agent_jobs AS j WHERE j.event_seq = e.seq) <> 1""",
    "jobs that are not completed": "SELECT count(*) FROM agent_jobs WHERE status <> 'COMPLETED'",
    "jobs without their one effect": """
        SELECT count(*) FROM agent_jobs AS j
         WHERE (SELECT count(*) FROM effects AS f WHERE f.job_id = j.job_id) <> 1""",
    "effects of another transaction than the completion's": """
        SELECT count(*) FROM effects AS f JOIN agent_jobs AS j USING (job_id)
         WHERE f.xmin <> j.xmin OR f.token <> j.fencing_token""",
    "handoffs not received once": """
        SELECT count(*) FROM agent_jobs AS j WHERE 1 <> (
            SELECT count(*) FROM agent_events AS e
             WHERE e.event_type = 'handoff.received' AND (e.payload ->> 'handoff')::bigint = j.event_seq)""",
    "turns not said once": """
        SELECT count(*) FROM agent_jobs AS j WHERE 1 <> (
            SELECT count(*) FROM agent_events AS e WHERE e.event_type = 'turn.said'
               AND (e.payload ->> 'job')::bigint = j.job_id AND e.payload ->> 'asked' = 'false')""",
    "follow-ups not emitted once": """
        SELECT count(*) FROM agent_jobs AS j WHERE 1 <> (
            SELECT count(*) FROM agent_events AS e
             WHERE e.payload ->> 'to' = 'nobody' AND (e.payload #>> '{message,after}')::bigint = j.job_id)""",
    "events kept by an attempt that died": """
        SELECT count(*) FROM agent_events AS e JOIN effects AS f ON f.job_id = (e.payload ->> 'job')::bigint
         WHERE e.event_type = 'turn.said' AND e.payload ->> 'asked' = 'false'
           AND (f.xmin <> e.xmin OR f.token <> (e.payload ->> 'token')::bigint)""",
    "steps written twice, or by a token that nobody had": """
        SELECT count(*) FROM (
            SELECT (e.payload ->> 'job')::bigint AS job_id, (e.payload ->> 'token')::bigint AS token, count(*) AS times
              FROM agent_events AS e WHERE e.event_type = 'turn.step' GROUP BY 1, 2) AS s
         WHERE s.times <> 1 OR NOT EXISTS (SELECT FROM claims AS c WHERE c.job_id = s.job_id AND c.token = s.token)""",
    "what a zombie wrote": "SELECT count(*) FROM agent_events WHERE event_type = 'turn.late'",
    "tokens that did not rise": "SELECT count(*) FROM claims WHERE token <= before",
    "tokens given to two": """
        SELECT count(*) FROM (SELECT FROM claims GROUP BY job_id, token HAVING count(*) > 1) AS c""",
    "leases of one session at once": "SELECT count(*) FROM claims WHERE of_session > 1",
    "jobs of a session that overlap, or are out of order": """
        SELECT count(*) FROM effects AS a JOIN effects AS b ON b.session_id = a.session_id AND b.job_id > a.job_id
         WHERE a.ended > b.begun""",
}


class Forks:
    """A process that forks workers: one for many tests, because it takes a second to start."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.worker_process"],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the process that forks workers is gone"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        if self._process is None:
            return
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(60)


class Workers:
    """A ledger, and processes of workers over it that a test may kill.

    Args:
        forks: makes the processes.
        database: an empty one.
        folder: for logs, and for what handlers and the test tell each other.
        installed: what `walstream init` made, if it has run in the database.
    """

    def __init__(self, forks: Forks, database: Database, folder: Path, installed: Settings | None = None) -> None:
        self._forks = forks
        self.database = database
        self.folder = folder
        self.settings = installed or set_up(database)
        self.jobs = Jobs(self.settings)
        self.ledger = Ledger(self.settings)
        self.kills = 0
        database.execute(_TABLES)
        self._on: Connection | None = None
        self._logs = 0
        self._running: set[int] = set()

    @property
    def on(self) -> Connection:
        """A connection of the test's, in autocommit, made anew after the server was away."""
        if self._on is None or self._on.closed:
            self._on = self.database.connect()
            self._on.autocommit = True
        return self._on

    # -- handoffs ------------------------------------------------------------------------------------------------------

    def hand_off(self, session: str | None = None, to: str = AGENT, attempts: int = 1000, **orders: Any) -> int:
        """Emit a handoff and submit its job, as a router would; the job."""
        session = session or str(uuid.uuid4())
        payload = {"to": to, "message": orders}
        emitted = self.ledger.append(session, "planner", "handoff.emitted", payload, on=self.on)
        job, _ = self.jobs.submit(session, to, event_seq=emitted.seq, max_delivery_attempts=attempts, on=self.on)
        return job

    def status(self, job: int) -> str:
        return self.jobs.get(job, on=self.on).status

    def ends(self, job: int, status: str = "COMPLETED", timeout: float = 60) -> None:
        eventually(lambda: self.status(job) == status, f"job {job} is {status}", timeout)

    def unfinished(self) -> int:
        """How many jobs are not completed; asked on a connection of its own, which a crash may end."""
        try:
            return int(self.database.execute(FAULTS["jobs that are not completed"])[0][0])
        except psycopg2.OperationalError:
            return -1

    def get_on(self, jobs: int) -> None:
        """Wait until more than so many of them are completed that are not yet."""
        before = self.unfinished()
        eventually(lambda: 0 <= self.unfinished() < before - jobs, "workers get on", 60)

    def all_end(self, timeout: float = 60) -> None:
        eventually(lambda: self.unfinished() == 0, "all jobs are completed", timeout)

    def check(self, *, but: tuple[str, ...] = ()) -> None:
        """Nothing is lost, nothing is there twice, and nothing of what died."""
        found = {name: self.database.execute(sql)[0][0] for name, sql in FAULTS.items() if name not in but}
        assert found == dict.fromkeys(found, 0)
        times = Counter(tuple(line.split()[1:]) for line in self.begun())
        twice = {attempt for attempt, count in times.items() if count > 1}
        assert twice == set(), "two turns had one token"

    def begun(self) -> list[str]:
        """A line for each turn that began: process, job, token."""
        file = self.folder / "begun"
        return file.read_text().splitlines() if file.exists() else []

    # -- what handlers that hold are told ------------------------------------------------------------------------------

    def held(self, job: int) -> None:
        """Wait until its handler holds."""
        eventually((self.folder / f"held-{job}").exists, f"the handler of job {job} holds", 60)

    def go(self, job: int) -> None:
        """Let its handler go on."""
        (self.folder / f"go-{job}").touch()

    # -- processes -----------------------------------------------------------------------------------------------------

    def options(self, **options: Any) -> dict[str, Any]:
        """What workers here are made with."""
        quick = {"lease_seconds": 0.5, "poll_seconds": 0.05, "drain_seconds": 5.0, "retry_cap_seconds": 0.2}
        named = {"agent": AGENT, "slot": self.settings.slot}
        return {**named, "concurrency": 1, "retry_first": 0.05, **quick, **options}

    def start(self, *, kill_at: int | None = None, turns: int | None = None, dsn: str = "", **options: Any) -> int:
        """A worker's process; its id.

        Args:
            kill_at: the step at which it kills itself.
            turns: after so many it ends.
            options: of :class:`walstream.Worker`.
        """
        self._logs += 1
        log = self.folder / f"log-{self._logs}"
        request = {
            "dsn": dsn or self.database.dsn,
            "folder": str(self.folder),
            "log": str(log),
            "kill_at": kill_at,
            "turns": turns,
            "options": self.options(**options),
        }
        pid = int(self._forks.ask({"start": request})["pid"])
        (self.folder / f"log-of-{pid}").symlink_to(log)
        self._running.add(pid)
        return pid

    def log(self, pid: int) -> str:
        """What that process has logged."""
        file = self.folder / f"log-of-{pid}"
        return file.read_text() if file.exists() else ""

    def wait(self, pid: int) -> dict[str, Any]:
        """Wait for its end: exit code, and how many steps it took."""
        end = self._forks.ask({"wait": pid})
        self._running.discard(pid)
        self.kills += end["code"] == KILLED
        assert end["code"] in (0, KILLED), (end, self.log(pid))
        return end

    def kill(self, pid: int, number: signal.Signals = signal.SIGKILL) -> dict[str, Any]:
        """Send a signal that ends it, and wait for that."""
        os.kill(pid, number)
        return self.wait(pid)

    def steps(self, **orders: Any) -> int:
        """How many steps a life has that does one such job and is not killed."""
        self.hand_off(**orders)
        return int(self.wait(self.start(turns=1))["said"])

    def dies(self, step: int, **orders: Any) -> None:
        """A worker that does one such job kills itself at that step, or at one shortly before it: a life that finds its
        job with its first claim has fewer steps than one that looked in vain once, as the one did that was counted."""
        for earlier in range(6):
            self.hand_off(**orders)
            if self.wait(self.start(kill_at=max(1, step - earlier), turns=1))["code"] == KILLED:
                return
        raise AssertionError(f"six lives in a row were over before step {step}")

    def close(self) -> None:
        for pid in list(self._running):
            os.kill(pid, signal.SIGKILL)
            self.wait(pid)
