"""Connections to Postgres, all alike: text comes out the same whatever a role, a database or an environment sets.

Logical decoding renders values with the *session's* settings, so a role or a database with ``datestyle = 'SQL, DMY'``
changes what is streamed, and ``timezone`` what a timestamp looks like. Every connection (cold readers included, so that
both paths yield the same bytes) therefore pins these settings in its startup packet, and then asks the server what it
really has: anything else than what was asked for is refused, because a wrong value would be silent.

TLS, passwords, service files, several hosts: whatever libpq understands is passed through as it is.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any, Final

import psycopg2
from psycopg2.extensions import connection as Connection
from psycopg2.extensions import make_dsn, parse_dsn
from psycopg2.extras import LogicalReplicationConnection

from walstream.errors import ConfigError
from walstream.source.answers import LOOKOUT, AskingConnection, answered_within, shut_down
from walstream.source.failures import classify

PINNED: Final[Mapping[str, str]] = {
    "client_encoding": "UTF8",
    "datestyle": "ISO",
    "timezone": "UTC",
    "intervalstyle": "postgres",
    "extra_float_digits": "1",  # shortest text that reads back as the same double (documentation, 20.11.2)
    "bytea_output": "hex",
    "row_security": "off",  # a policy must fail loudly, never filter: decoding does not know policies
}
"""The settings of every session, and their values."""

APPLICATION_NAME_LIMIT: Final = 63
"""The server cuts ``application_name`` at NAMEDATALEN - 1 bytes."""

# libpq sends these variables of the environment in the startup packet *after* `options`, so they win over it.
_STARTUP_VARIABLES: Final = ("PGDATESTYLE", "PGTZ")

FIRST_ANSWERS: Final = 15.0
"""Seconds for what a new connection is asked first: trifles, for a server that has let it in."""

# A peer that is silently gone is noticed within 30 s, if the user says nothing else (libpq, 34.1.2).
_LIVENESS: Final[Mapping[str, str]] = {
    "keepalives": "1",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "4",
    "tcp_user_timeout": "30000",
}


def connect(
    dsn: str,
    *,
    application_name: str,
    autocommit: bool = True,
    connect_timeout: int = 10,
    options: Mapping[str, str] | None = None,
    search_path: str | None = "pg_catalog",
) -> Connection:
    """Open an SQL connection with pinned settings.

    Args:
        dsn: connection string or URI; its own ``options`` (or PGOPTIONS) are kept, ours are added and win.
        application_name: what ``pg_stat_activity`` shows: ``walstream:<role>``. A name in the DSN is added to it.
        autocommit: as psycopg2's connection attribute.
        connect_timeout: seconds, unless the DSN or PGCONNECT_TIMEOUT say otherwise.
        options: further session settings, such as ``{"lock_timeout": "2s"}``.
        search_path: fixed to this; ``None`` leaves the server's.

    Raises:
        ConfigError: what only a person can change: address, login, TLS, a pooler that refuses session settings.
        Unavailable: the server does not answer (now).
    """
    made = _open(dsn, application_name, connect_timeout, options, search_path, replication=False)
    assert isinstance(made, Connection)
    made.autocommit = autocommit
    return made


def watch_answers() -> None:
    """From now on, in this process: who waits on a connection of :func:`connect` for an answer that cannot come any
    more, because the server has forgotten the session, sees a lost connection (walstream/source/answers.py)."""
    LOOKOUT.start()


def abandon(connection: Connection) -> None:
    """End a connection at once, whoever waits on it, from any thread: to him it is lost.

    Not ``connection.cancel()``: psycopg2 connects to the server for that, for as long as the network likes, and lets no
    thread of the process go on meanwhile.
    """
    shut_down(connection)


def replication_connect(
    dsn: str,
    *,
    application_name: str,
    connect_timeout: int = 10,
    options: Mapping[str, str] | None = None,
    search_path: str | None = "pg_catalog",
) -> LogicalReplicationConnection:
    """Open a connection that speaks the replication protocol and SQL to one database (``replication=database``).

    Arguments and errors as for :func:`connect`; a role without REPLICATION is a ConfigError.
    """
    made = _open(dsn, application_name, connect_timeout, options, search_path, replication=True)
    assert isinstance(made, LogicalReplicationConnection)
    return made


def merged_options(user: str, ours: Mapping[str, str]) -> str:
    """Return the ``options`` of a startup packet: the user's own, then ours, the last of which win.

    Blanks and backslashes inside a value are escaped (libpq, 34.1.2, "options").
    """
    added = (f"-c {name}={_escaped(value)}" for name, value in ours.items())
    return " ".join([user.strip(), *added]).strip()


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace(" ", "\\ ")


def give_up_unacknowledged(descriptor: int, seconds: float) -> None:
    """Let the kernel end a TCP connection whose sent bytes stay unacknowledged so long (TCP_USER_TIMEOUT, Linux)."""
    option = getattr(socket, "TCP_USER_TIMEOUT", None)
    if option is None:
        return
    with socket.socket(fileno=os.dup(descriptor)) as shared:
        if shared.family in (socket.AF_INET, socket.AF_INET6):
            wanted = int(seconds * 1000)
            present = shared.getsockopt(socket.IPPROTO_TCP, option)
            if not 0 < present <= wanted:
                shared.setsockopt(socket.IPPROTO_TCP, option, wanted)


def _open(
    dsn: str,
    application_name: str,
    connect_timeout: int,
    options: Mapping[str, str] | None,
    search_path: str | None,
    *,
    replication: bool,
) -> Any:
    parameters = _parsed(dsn)
    wanted = dict(PINNED)
    if search_path is not None:
        wanted["search_path"] = search_path
    sent = {**wanted, **(options or {})}
    # A service file may hold `options` that only libpq sees; ours in the packet would hide them.
    hidden = "options" not in parameters and ("service" in parameters or "PGSERVICE" in os.environ)
    if not hidden:
        parameters["options"] = merged_options(
            parameters.get("options") or os.environ.get("PGOPTIONS", ""),
            {name: value for name, value in sent.items() if name != "client_encoding"},
        )
    parameters["client_encoding"] = PINNED["client_encoding"]
    if replication:
        parameters["replication"] = "database"
    else:
        parameters.pop("replication", None)
    own = parameters.get("application_name")
    named = f"{application_name} ({own})" if own and own != application_name else application_name
    parameters["application_name"] = named.encode()[:APPLICATION_NAME_LIMIT].decode(errors="ignore")
    if "PGCONNECT_TIMEOUT" not in os.environ:
        parameters.setdefault("connect_timeout", str(connect_timeout))
    for name, value in _LIVENESS.items():
        parameters.setdefault(name, value)

    doing = f"connecting to {_address(parameters)}"
    try:
        made = (
            psycopg2.connect(make_dsn(**parameters), connection_factory=LogicalReplicationConnection)
            if replication
            else psycopg2.connect(make_dsn(**parameters), connection_factory=AskingConnection)
        )
    except psycopg2.Error as error:
        raise classify(error, doing=doing) from error
    try:
        if not replication:
            made.autocommit = True  # a SET inside a transaction could be rolled back
        with answered_within(made, FIRST_ANSWERS), made.cursor() as cursor:
            if hidden or any(name in os.environ for name in _STARTUP_VARIABLES):
                pairs = (f"set_config({_literal(name)}, {_literal(value)}, false)" for name, value in sent.items())
                cursor.execute(f"SELECT {', '.join(pairs)}")
            _verify(cursor, wanted, doing)
            if isinstance(made, AskingConnection):
                _look_after(made, cursor, parameters)
    except BaseException as error:
        made.close()
        if isinstance(error, psycopg2.Error):
            raise classify(error, doing=doing) from error
        raise
    return made


def _parsed(dsn: str) -> dict[str, Any]:
    try:
        return dict(parse_dsn(dsn))
    except psycopg2.Error:
        # libpq's message quotes what it could not parse, and that may be a piece of the password.
        raise ConfigError(
            "the connection string is neither a libpq string nor a URI that libpq can parse",
            hint="host=… port=… dbname=… user=…, or postgresql://user@host:port/database; special characters in a URI "
            "are percent-encoded, blanks in a value need single quotes",
        ) from None


def _verify(cursor: Any, wanted: Mapping[str, str], doing: str) -> None:
    """Ask the server for what was pinned. A pooler may have dropped `options` without a word."""
    cursor.execute("SELECT " + ", ".join(f"current_setting({_literal(name)})" for name in wanted))
    for (name, value), actual in zip(wanted.items(), cursor.fetchone(), strict=True):
        shown = actual.split(",")[0].strip() if name == "datestyle" else actual  # ISO, DMY: output is ISO all the same
        if shown.lower() != value.lower():
            raise ConfigError(
                f"{doing}: the session has {name} = {actual!r} although walstream asked for {value!r}",
                hint="something in the path (a pooler with ignore_startup_parameters?) drops the session settings: "
                "connect to Postgres itself, or through a pooler in session mode that passes `options` on",
            )


def _look_after(made: AskingConnection, cursor: Any, parameters: Mapping[str, Any]) -> None:
    """Let whoever waits on it in vain be woken."""
    cursor.execute("SELECT pg_catalog.pg_backend_pid(), pg_catalog.pg_postmaster_start_time()::text")
    made.backend, made.server = cursor.fetchone()
    beside = {**parameters, "application_name": "walstream:answers"}
    made.again = lambda: psycopg2.connect(make_dsn(**beside))
    LOOKOUT.add(made)


def _literal(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def _address(parameters: Mapping[str, Any]) -> str:
    """Where a connection leads, for messages: without options, and above all without a password."""
    names = ("service", "host", "hostaddr", "port", "dbname", "user")
    shown = {name: parameters[name] for name in names if name in parameters}
    return " ".join(f"{name}={value}" for name, value in shown.items()) or "the server that the environment names"
