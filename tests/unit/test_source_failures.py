"""The table of failures: each kind with a remedy, the server's real words, and unknown ones that end the process."""

from __future__ import annotations

import psycopg2
import pytest

from walstream.errors import (
    ConfigError,
    ConnectionLost,
    ExitCode,
    Fenced,
    SlotError,
    Stalled,
    Unavailable,
    WalstreamError,
)
from walstream.source.failures import KINDS, classify, kind_of


def test_every_kind_has_a_name_of_its_own_and_a_remedy() -> None:
    names = [kind.name for kind in KINDS]
    assert len(set(names)) == len(names)
    assert all(kind.hint for kind in KINDS)
    assert all(kind.states or kind.bare for kind in KINDS)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        # what libpq and servers say without an SQLSTATE, word for word
        ('FATAL:  password authentication failed for user "x"', ConfigError),
        ("fe_sendauth: no password supplied", ConfigError),
        ('FATAL:  database "nodb" does not exist', ConfigError),
        ('FATAL:  role "nouser" does not exist', ConfigError),
        ('FATAL:  no pg_hba.conf entry for host "10.0.0.1", user "x", database "d", no encryption', ConfigError),
        ("server does not support SSL, but SSL was required", ConfigError),
        ("SSL error: certificate verify failed", ConfigError),
        ('server certificate for "a" does not match host name "b"', ConfigError),
        ("FATAL:  must be superuser or replication role to start walsender", ConfigError),  # 14, 15
        ("FATAL:  permission denied to start WAL sender\nDETAIL:  Only roles with the REPLICATION …", ConfigError),
        ("FATAL:  unsupported startup parameter: replication", ConfigError),
        ("FATAL:  Tenant or user not found", ConfigError),
        ('could not translate host name "db" to address: Temporary failure in name resolution', Unavailable),
        ('connection to server at "127.0.0.1", port 1 failed: Connection refused', Unavailable),
        ("timeout expired", Unavailable),
        ("FATAL:  the database system is starting up", Unavailable),
        ("FATAL:  the database system is shutting down", Unavailable),
        ("FATAL:  the database system is not yet accepting connections", Unavailable),
        ("FATAL:  sorry, too many clients already", Unavailable),
        ("FATAL:  number of requested standby connections exceeds max_wal_senders (currently 1)", Unavailable),
        ("could not fork new process for connection: Resource temporarily unavailable", Unavailable),
        ("server sent an error response during SSL exchange", Unavailable),  # the same, with sslmode=prefer
        ("FATAL:  terminating connection due to administrator command", ConnectionLost),
        ("server closed the connection unexpectedly", ConnectionLost),
        ("error with status PGRES_COPY_BOTH and no message from the libpq", ConnectionLost),
        ("no COPY in progress", ConnectionLost),  # after a server's orderly goodbye
        ("SSL SYSCALL error: EOF detected", ConnectionLost),
        ("SSL error: unexpected eof while reading", ConnectionLost),
        ("could not receive data from server: Connection timed out", Unavailable),
    ],
)
def test_words_without_a_code(words: str, error: type[WalstreamError]) -> None:
    for raised in (psycopg2.OperationalError(words + "\n"), psycopg2.DatabaseError(words)):
        found = classify(raised, doing="reading slot s")
        assert isinstance(found, error)
        assert found.transient is error.transient
        assert str(found).startswith("reading slot s: ")
        assert "\n" not in str(found)


def test_a_closed_connection_is_a_lost_one() -> None:
    for words in ("connection already closed", "cursor already closed"):
        assert isinstance(classify(psycopg2.InterfaceError(words), doing="d"), ConnectionLost)


def test_what_is_unknown_ends_the_process() -> None:
    for raised in (
        psycopg2.OperationalError("el servidor habla español"),
        ValueError("a bug"),
        psycopg2.DataError("?"),
    ):
        assert kind_of(raised) is None
        found = classify(raised, doing="d")
        assert type(found) is WalstreamError
        assert not found.transient
        assert found.exit_code == ExitCode.FAILED


def test_the_systems_own_errors_are_transient() -> None:
    assert classify(ConnectionResetError("reset"), doing="d").transient
    assert classify(TimeoutError("late"), doing="d").transient


def test_errors_of_ours_pass_as_they_are() -> None:
    for own in (Stalled("s"), Fenced("f"), SlotError("x", hint="h")):
        assert classify(own, doing="d") is own
