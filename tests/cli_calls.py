"""Calls of the command line, in this process, as a script would make them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from typer.testing import CliRunner

from walstream.cli import app


@dataclass(frozen=True)
class Called:
    """What a call printed and how it ended."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        """Standard output as the one JSON document that it has to be."""
        return json.loads(self.stdout)

    @property
    def error(self) -> Any:
        """Standard error as the one JSON document that it has to be."""
        return json.loads(self.stderr)


def call(*arguments: str, dsn: str, answer: str | None = None) -> Called:
    """``walstream ARGUMENTS --dsn DSN``. An exception that is no exit is raised here: it would be a traceback."""
    result = CliRunner().invoke(app, [*arguments, "--dsn", dsn], input=answer, env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Called(result.exit_code, result.stdout, result.stderr)


def ok(*arguments: str, dsn: str) -> Called:
    """The same for a call that has to succeed."""
    called = call(*arguments, dsn=dsn)
    assert called.exit_code == 0, called
    return called
