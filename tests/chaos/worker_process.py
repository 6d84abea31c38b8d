"""Workers as processes of their own, forked on request, that may kill themselves at a chosen step.

A step is a boundary: before and after each statement on the connection that carries a turn out (the claim, the reading
of the context, ``append_now``, each statement of the completion, and its COMMIT), and between the lines of the handler.
Requests and answers are JSON, one object a line. Forking spares the start of Python.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import psycopg2

from tests.chaos.agent_process import SteppingConnection, note, steps
from walstream import ClaimedJob, Fenced, TurnLedger, Worker
from walstream.worker.hand import Hand

log = logging.getLogger("tests.worker_process")

_EFFECT = (
    "INSERT INTO effects (job_id, session_id, token, worker, begun, ended)"
    " VALUES (%s, %s, %s, %s, pg_catalog.to_timestamp(%s), pg_catalog.clock_timestamp())"
)


class Turns:
    """The handler. What it is to do stands in the message of the handoff:

    ``{"hold": true}``: its first attempt waits until the test says so (:meth:`Workers.go`), then appends once more;
    ``{"stop": true}``: its first attempt stops its process (SIGSTOP) in the middle of the completion;
    ``{"sleep": 0.1}``: it takes so long;
    ``{"plain": true}``: no function of its own runs in the completion, which is a single statement then;
    ``{"ask": true}``: it asks a person before it is done; ``{"ask_late": true}``: so does its first attempt, last.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, context: dict[str, Any], job: ClaimedJob, ledger: TurnLedger) -> None:
        del context
        begun = time.time()
        note(str(self._folder / "begun"), f"{os.getpid()} {job.job_id} {job.fencing_token}")
        steps.take()
        assert job.handoff is not None
        orders = job.handoff.payload.get("message") or {}
        said: dict[str, Any] = {"job": job.job_id, "token": job.fencing_token, "asked": False}
        ledger.append_now("turn.step", {"job": job.job_id, "token": job.fencing_token})
        steps.take()
        if orders.get("ask") and ledger.approval is None:
            ledger.append("turn.said", {**said, "asked": True})
            ledger.request_approval({"tool": "pay", "job": job.job_id})
            steps.take()
            return
        time.sleep(orders.get("sleep", 0))
        if orders.get("hold") and job.fencing_token == 1:
            self._hold(job)
            self._late(job, ledger)
            if orders.get("ask_late"):
                ledger.request_approval({"tool": "pay", "job": job.job_id})
                return
        if orders.get("plain"):
            said |= {"worker": os.getpid(), "begun": begun}  # the effect is a trigger's
        ledger.append("turn.said", said)
        values = (job.job_id, job.session_id, job.fencing_token, os.getpid(), begun)

        def effect(cur: Any) -> None:
            cur.execute(_EFFECT, values)
            if orders.get("stop") and job.fencing_token == 1:
                (self._folder / f"stopped-{job.job_id}").touch()
                os.kill(os.getpid(), signal.SIGSTOP)
            steps.take()

        if not orders.get("plain"):
            ledger.on_completion(effect)
        ledger.hand_off("nobody", {"after": job.job_id})
        steps.take()

    def _hold(self, job: ClaimedJob) -> None:
        (self._folder / f"held-{job.job_id}").touch()
        while not (self._folder / f"go-{job.job_id}").exists():
            time.sleep(0.01)

    def _late(self, job: ClaimedJob, ledger: TurnLedger) -> None:
        try:
            ledger.append_now("turn.late", {"job": job.job_id, "token": job.fencing_token})
        except Fenced as error:
            log.warning("the late append of job %d was refused: %s", job.job_id, error)


def live(request: dict[str, Any]) -> None:
    """A worker's life in this process: until SIGTERM, or until it has done so many turns."""
    logging.basicConfig(filename=request["log"], level=logging.INFO, format="%(levelname)s %(message)s")
    steps.taken = 0
    steps.deadly = request.get("kill_at")
    connect = psycopg2.connect

    def stepping(dsn: str, **rest: Any) -> Any:
        if "walstream:walstream:worker" in dsn:
            rest["connection_factory"] = SteppingConnection
        return connect(dsn, **rest)

    setattr(psycopg2, "connect", stepping)  # noqa: B010 (its type is three overloads)
    worker = Worker(request["dsn"], **request["options"])
    worker.handle(Turns(Path(request["folder"])))
    left = request.get("turns")
    if left is not None:
        work = Hand._work

        def counted(self: Hand, job: ClaimedJob) -> None:
            nonlocal left
            work(self, job)
            left -= 1
            if left <= 0:
                self._place.stopping.set()
                worker.request_stop()

        Hand._work = counted  # type: ignore[method-assign]
    code = worker.run()
    note(request["log"], f"ended with {code}")


def serve() -> None:
    """Answer requests: ``{"start": …}`` with the process id, ``{"wait": pid}`` with the exit code and the steps."""
    pipes: dict[int, int] = {}
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            pid = request["wait"]
            _, status = os.waitpid(pid, 0)
            with os.fdopen(pipes.pop(pid)) as pipe:
                answer = {"code": os.waitstatus_to_exitcode(status), "said": pipe.read()}
            print(json.dumps(answer), flush=True)
            continue
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.close(reader)
                live(request["start"])
                os.write(writer, str(steps.taken).encode())
                code = 0
            except BaseException:
                os.write(writer, traceback.format_exc().encode()[-4000:])
            finally:
                with contextlib.suppress(Exception):
                    logging.shutdown()
                os._exit(code)
        os.close(writer)
        pipes[pid] = reader
        print(json.dumps({"pid": pid}), flush=True)


if __name__ == "__main__":
    serve()
