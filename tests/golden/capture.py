"""Captures the golden vectors from running servers, one file a major.

    python -m tests.golden.capture 'host=… port=… user=postgres dbname=postgres' [another DSN …]

Each server needs ``wal_level = logical``, a free slot, ``max_prepared_transactions`` of 1 or more, and a superuser. The
script makes databases of its own, runs the scenarios (``tests/golden/scenarios*.py``) in them and drops them. Do it
again when a new major comes out, or a scenario: the files are not edited by hand. Review the difference before
committing: LSNs, xids, OIDs and times differ each time, nothing else should.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import psycopg2
from psycopg2.extensions import make_dsn

from walstream.lsn import parse_lsn
from walstream.protocol.decoder import Decoder
from walstream.protocol.messages import Insert

from .scenario import READ, Scenario
from .scenarios import SCENARIOS
from .vectors import Capture, Vector, path, render, save

_NAME = f"walstream_golden_{os.getpid()}"  # of the database and the slot
_PINNED = (
    "-c client_encoding=UTF8 -c datestyle=ISO -c timezone=UTC -c intervalstyle=postgres -c bytea_output=hex"
    " -c extra_float_digits=1 -c statement_timeout=60s"
)
_KEPT = 2  # inserts kept of a long run of them


class Captures:
    """Takes captures from one server, in databases of its own (one for each encoding), dropped at the end."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._root = _Session(dsn)
        self._databases: dict[str, str] = {}
        self.major = self._root.connection.server_version // 10000

    def __enter__(self) -> Captures:
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._databases.values():
            self._root.run(f"DROP DATABASE {name} WITH (FORCE)")
        self._root.__exit__()

    def take(self, scenario: Scenario) -> Capture:
        """Run one scenario."""
        name = self._databases.get(scenario.create)
        if name is None:
            name = self._databases[scenario.create] = f"{_NAME}_{len(self._databases)}"
            self._root.run(f"CREATE DATABASE {name} {scenario.create}")
        try:
            rows, tables = _messages(make_dsn(self._dsn, dbname=name), scenario)
        finally:
            self._root.run(
                "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = %s", _NAME
            )
        version = int(scenario.options["proto_version"])
        decoder = Decoder(version)
        decoded = [(lsn, xid, payload, decoder.decode(payload, lsn)) for lsn, xid, payload in rows]
        vectors: list[Vector] = []
        run, last = 0, None
        for lsn, xid, payload, message in decoded:
            this = (message.relation_oid, message.xid) if isinstance(message, Insert) else None
            run = run + 1 if this is not None and this == last else 1
            last = this
            if run <= _KEPT or not scenario.letters:
                vectors.append(Vector(lsn, xid, payload, render(message)))
        return Capture(self.major, scenario.name, version, tables, vectors)


def _messages(dsn: str, scenario: Scenario) -> tuple[list[tuple[int, int, bytes]], dict[int, str]]:
    options = {"publication_names": "p", **scenario.options}
    flat = [text for pair in options.items() for text in pair]
    marks = ", %s" * len(flat)
    read = f"SELECT lsn::text, xid::text, data FROM pg_logical_slot_get_binary_changes(%s, NULL, NULL{marks})"
    rows: list[tuple[int, int, bytes]] = []
    with _Session(dsn) as first, _Session(dsn) as second, _Session(dsn) as reader:
        first.run("DROP PUBLICATION IF EXISTS p")
        first.run("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
        for statement in scenario.setup:
            first.run(statement)
        tables = dict[int, str](
            first.run(
                "SELECT c.oid::int8, relname::text FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace"
                " WHERE relkind IN ('r', 'p') AND nspname !~ '^(pg_|information_schema)'"
            )
        )
        first.run("SELECT pg_create_logical_replication_slot(%s, 'pgoutput', false, %s)", _NAME, scenario.two_phase)
        for statement in scenario.session:
            reader.run(statement)
        for step in (*scenario.steps, READ):
            if step == READ:
                rows += [(parse_lsn(lsn), int(xid), bytes(data)) for lsn, xid, data in reader.run(read, _NAME, *flat)]
            elif isinstance(step, tuple):
                second.run(step[1])
            else:
                first.run(step)
    return rows, tables


class _Session:
    """A connection in autocommit with the settings that walstream pins."""

    def __init__(self, dsn: str) -> None:
        self.connection = psycopg2.connect(dsn, options=_PINNED)
        self.connection.autocommit = True

    def run(self, sql: str, *args: Any) -> list[tuple[Any, ...]]:
        with self.connection.cursor() as cursor:
            cursor.execute(sql, args or None)
            return cursor.fetchall() if cursor.description else []

    def __enter__(self) -> _Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()


def main(dsns: list[str]) -> None:
    if not dsns:
        sys.exit(__doc__)
    for dsn in dsns:
        with _Session(dsn) as session:
            ((version,),) = session.run("SHOW server_version")
        with Captures(dsn) as captures:
            major = captures.major
            done = [(captures.take(each), each.options) for each in SCENARIOS if each.since <= major]
        save(major, version.split()[0], done)
        print(
            f"{path(major).name}: {len(done)} scenarios, {sum(len(c.vectors) for c, _ in done)} messages,"
            f" {path(major).stat().st_size} bytes"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
