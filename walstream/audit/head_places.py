"""Second places for heads: another directory, a table, standard output."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import psycopg2

from walstream.config import Settings, quote
from walstream.errors import ConfigError
from walstream.source.connection import connect
from walstream.source.failures import classify

from .heads import Head, heads_in
from .segments import sync_folder

Place = Callable[[Head, Settings], None]
"""Takes a head and keeps it, durably as far as the place can."""

_TABLE: Final = "table:"


def place_called(name: str) -> Place:
    """The place with this name: ``stdout``, ``table:[SCHEMA.]NAME``, or the path of a directory.

    Raises:
        ConfigError: it is none of these.
    """
    if name == "stdout":
        return _print
    if name.startswith(_TABLE):
        table = table_called(name)
        return lambda head, settings: _insert(head, settings, table)
    if not name or ":" in name.partition("/")[0]:
        raise ConfigError(f"{name!r} is no place for heads", hint="write stdout, table:[SCHEMA.]NAME, or a directory")
    folder = Path(name)
    return lambda head, _settings: append_to(folder / f"{head.chain[:16]}.heads.jsonl", head)


def table_called(name: str) -> str:
    """The table, quoted for SQL, that ``table:[SCHEMA.]NAME`` names.

    Raises:
        ConfigError: it names none.
    """
    parts = name.removeprefix(_TABLE).split(".")
    if len(parts) > 2 or not all(parts):
        raise ConfigError(f"{name!r} names no table", hint="write table:NAME or table:SCHEMA.NAME")
    return ".".join(map(quote, parts if len(parts) == 2 else ["public", *parts]))


def append_to(path: Path, head: Head) -> None:
    """Append a head to a file, durably. A line that a crash left half written is passed over by readers.

    Raises:
        OSError: it cannot be written.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        torn = size and os.pread(descriptor, 1, size - 1) != b"\n"
        data = (b"\n" if torn else b"") + head.line
        if os.write(descriptor, data) != len(data):
            raise OSError(28, "No space left on device")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if not size:
        sync_folder(path.parent)


def heads_of_table(settings: Settings, table: str) -> list[Head]:
    """The heads that stand in a table.

    Raises:
        WalstreamError: the database does not answer, or there is no such table.
    """
    connection = connect(settings.require_dsn(), application_name="walstream:audit")
    try:
        with connection.cursor() as cur:
            cur.execute(f"SELECT line FROM {table} ORDER BY id")
            return [head for (line,) in cur.fetchall() for head in heads_in(line.encode())]
    except psycopg2.Error as error:
        raise classify(error, doing=f"reading heads from {table}") from error
    finally:
        connection.close()


def _print(head: Head, settings: Settings) -> None:
    del settings
    sys.stdout.write(head.line.decode())
    sys.stdout.flush()


def _insert(head: Head, settings: Settings, table: str) -> None:
    connection = connect(settings.require_dsn(), application_name=f"walstream:{settings.namespace}:audit-heads")
    try:
        with connection.cursor() as cur:
            cur.execute("SELECT to_regclass(%s)", (table,))
            if cur.fetchone() == (None,):
                cur.execute(
                    f"CREATE TABLE IF NOT EXISTS {table} (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,"
                    " chain text NOT NULL, n bigint NOT NULL, line text NOT NULL,"
                    " written_at timestamptz NOT NULL DEFAULT now())"
                )
            cur.execute(
                f"INSERT INTO {table} (chain, n, line) VALUES (%s, %s, %s)",
                (head.chain, head.n, head.line.decode().rstrip()),
            )
    except psycopg2.Error as error:
        raise classify(error, doing=f"writing a head to {table}") from error
    finally:
        connection.close()
