"""Runs docs/examples/agent_loop.py again and again, each time in a fork that kills itself at a chosen step.

A step is a boundary: before and after each statement, commit and rollback of the agent's connection, whoever makes it
(append, recover, rebuild, the tool). The number of the step at which the fork dies by SIGKILL comes with each request,
one JSON object a line on standard input; how the fork ended goes out the same way. Forking spares the start of Python.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psycopg2
from psycopg2.extensions import connection, cursor

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "examples" / "agent_loop.py"


class Steps:
    """Counts steps, and dies at one of them."""

    def __init__(self, deadly: int | None) -> None:
        self.deadly = deadly
        self.taken = 0

    def take(self) -> None:
        self.taken += 1
        if self.taken == self.deadly:
            os.kill(os.getpid(), signal.SIGKILL)


steps = Steps(None)


class SteppingCursor(cursor):
    def execute(self, *arguments: Any) -> None:
        steps.take()
        super().execute(*arguments)
        steps.take()


class SteppingConnection(connection):
    def cursor(self, name: str | None = None, cursor_factory: Any = None, **rest: Any) -> Any:  # type: ignore[override]  # three overloads in one
        if name is None:
            cursor_factory = SteppingCursor  # also where ours asks for the plain one
        return super().cursor(*(() if name is None else (name,)), cursor_factory=cursor_factory, **rest)

    def commit(self) -> None:
        steps.take()
        super().commit()
        steps.take()

    def rollback(self) -> None:
        steps.take()
        super().rollback()
        steps.take()


def load() -> ModuleType:
    """The example, as a module of its own."""
    spec = importlib.util.spec_from_file_location("agent_loop", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(example: Any, request: dict[str, Any]) -> None:
    """The agent's whole life in this process."""
    steps.deadly = request["kill_at"]
    connect = psycopg2.connect

    def stepping(dsn: str, **rest: Any) -> connection:
        made: connection = connect(dsn, connection_factory=SteppingConnection, **rest)
        return made

    example.psycopg2 = SimpleNamespace(connect=stepping)
    example.SESSION = request["session"]
    execute = example.execute

    def noted(conn: Any, call_id: str, *rest: Any) -> None:
        # Beside the database, so that it is there whatever becomes of the transaction.
        note(request["log"], f"begin {os.getpid()} {call_id}")
        steps.take()
        execute(conn, call_id, *rest)
        steps.take()
        note(request["log"], f"end {os.getpid()} {call_id}")

    example.execute = noted
    with contextlib.redirect_stdout(io.StringIO()):
        example.main()


def note(log: str, line: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, f"{line}\n".encode())
    os.close(descriptor)


def serve() -> None:
    """Answer requests: ``{"runs": [{"session", "kill_at", "log"}, …]}``, all of which run at once."""
    example = load()
    for line in sys.stdin:
        children = {}
        for request in json.loads(line)["runs"]:
            reader, writer = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(reader)
                code = 1
                try:
                    run(example, request)
                    os.write(writer, str(steps.taken).encode())
                    code = 0
                except BaseException:
                    os.write(writer, traceback.format_exc().encode()[-4000:])
                finally:
                    os._exit(code)
            os.close(writer)
            children[pid] = reader
        ends = []
        for pid, reader in children.items():
            _, status = os.waitpid(pid, 0)
            with os.fdopen(reader) as pipe:
                ends.append({"pid": pid, "code": os.waitstatus_to_exitcode(status), "said": pipe.read()})
        print(json.dumps(ends), flush=True)


if __name__ == "__main__":
    serve()
