"""Many processes that recover one session at once, forked from one that has imported everything.

A request is one JSON object a line: ``session``, ``processes``, how many of them are ``doomed`` to kill themselves
somewhere on the way, ``seed``, and ``log``, the file that says beside the database what began and ended to execute.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from typing import Any

import psycopg2

from tests.chaos.agent_process import note
from walstream.ledger.ledger import Ledger
from walstream.ledger.recovery import recover


def work(request: dict[str, Any], number: int) -> None:
    chance = random.Random(request["seed"] * 1000 + number)
    doomed = number < request["doomed"]
    conn = psycopg2.connect(os.environ["WALSTREAM_DSN"], application_name=f"recoverer {number}")
    conn.autocommit = chance.random() < 0.5
    ledger, session, log = Ledger(), request["session"], request["log"]

    def perhaps_die() -> None:
        if doomed and chance.random() < 0.4:
            os.kill(os.getpid(), signal.SIGKILL)

    with recover(conn, session, wait=60) as recovery:
        perhaps_die()
        for call in recovery.calls:
            again = recovery.retry(call)
            perhaps_die()
            if not conn.autocommit:
                conn.commit()
            perhaps_die()
            note(log, f"begin {os.getpid()} {again.call_id} {again.attempt}")
            time.sleep(chance.random() * 0.003)
            perhaps_die()
            note(log, f"end {os.getpid()} {again.call_id} {again.attempt}")
            answer = {"call_id": again.call_id, "result": again.attempt}
            ledger.append(session, "a", "tool.observed", answer, key=again.idempotency_key, on=conn)
            perhaps_die()
            if not conn.autocommit:
                conn.commit()
            perhaps_die()
    conn.close()


def serve() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        children = []
        for number in range(request["processes"]):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    work(request, number)
                    code = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(code)
            children.append(pid)
        ends = []
        for pid in children:
            _, status = os.waitpid(pid, 0)
            ends.append({"pid": pid, "code": os.waitstatus_to_exitcode(status)})
        print(json.dumps(ends), flush=True)


if __name__ == "__main__":
    serve()
