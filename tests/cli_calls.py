"""Calls of the command line, in this process, as a script would make them, and ledgers to make them on."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from psycopg2.extensions import connection
from typer.testing import CliRunner

from tests.conftest import Database
from tests.ready import make_tables
from walstream.cli import app
from walstream.config import Settings, quote
from walstream.ledger.identity import identity_sql
from walstream.order.segment import Segment, size_codes
from walstream.order.writer import OrderWriter


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


def set_up(database: Database, **fields: Any) -> Settings:
    """Install walstream's tables, the ledger's and an identity that is ready, but no publication and no slot."""
    make_tables(database, Settings(**fields))
    settings = Settings(dsn=database.dsn, **fields)
    database.execute(identity_sql(settings))
    database.execute(f"UPDATE {quote(settings.namespace)}.identity SET slot_state = 'ready'")
    return settings


def append_to_order(
    database: Database, *pieces: Sequence[int], ages: Sequence[float | None] = (), recovered: bool = False
) -> None:
    """Write one segment: a list of seqs for each transaction, which committed so many seconds ago (None: unknown)."""
    conn = database.connect()
    conn.autocommit = True
    now = time.time() - 946_684_800  # since 2000-01-01 UTC
    times = [0 if age is None else int((now - age) * 1e6) for age in (ages or [0.0] * len(pieces))]
    generation = database.execute("SELECT generation FROM walstream.generation")[0][0]
    writer = OrderWriter(conn, "walstream", generation)
    seqs = [seq for piece in pieces for seq in piece]
    writer.append(
        Segment(
            writer.tail().next_offset,
            seqs,
            [len(piece) for piece in pieces],
            [0x1000] * len(pieces),
            times,
            size_codes([100] * len(seqs)),
            0x1000,
            None,
            recovered,
            generation,
        )
    )


def add_projector(database: Database, name: str, position: int, **columns: Any) -> None:
    """Register a projector that no process runs, at ``position``."""
    fields = {"name": name, "kind": "external", **columns}
    database.execute(
        f"INSERT INTO walstream.projectors ({', '.join(fields)}) VALUES ({', '.join(['%s'] * len(fields))})",
        *fields.values(),
    )
    database.execute(
        "INSERT INTO walstream.cursors (projector, lane, position)"
        " SELECT name, lane, %s FROM walstream.projectors, generate_series(0, lanes - 1) AS lane WHERE name = %s",
        position,
        name,
    )


def hold(database: Database, row: str) -> connection:
    """Take the lease of ``ingest``, or of a projector, on the connection that is returned; closing it lets go."""
    conn = database.connect()
    conn.autocommit = True
    table, where = ("ingest", "true") if row == "ingest" else ("projectors", f"name = '{row}'")
    with conn.cursor() as cur:
        cur.execute(
            f"UPDATE walstream.{table} SET owner = 'host:1', state = 'running', control_pid = pg_backend_pid(),"
            " control_start = (SELECT backend_start FROM pg_stat_activity WHERE pid = pg_backend_pid()),"
            f" lease_until = now() + interval '1 hour' WHERE {where}"
        )
        assert cur.rowcount == 1
    return conn
