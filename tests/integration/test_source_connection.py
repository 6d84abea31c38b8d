"""Connections: the same text whatever is set elsewhere, and every way to fail told apart (cases C02, C53)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from psycopg2.extensions import connection as Connection
from psycopg2.extensions import make_dsn, parse_dsn

from tests.conftest import Database, Server
from tests.integration.source_ledgers import Relay
from walstream.errors import ConfigError, Unavailable, WalstreamError
from walstream.postgres import PostgresServer
from walstream.source.connection import APPLICATION_NAME_LIMIT, connect, replication_connect

OPENERS: list[Callable[..., Connection]] = [connect, replication_connect]
NAMES = ("datestyle", "timezone", "intervalstyle", "bytea_output", "client_encoding", "row_security", "search_path")
PINNED = ("ISO, ", "UTC", "postgres", "hex", "UTF8", "off", "pg_catalog")


def setting(conn: Connection, name: str) -> str:
    with conn.cursor() as cursor:
        cursor.execute(f"SELECT current_setting('{name}')")
        row: Any = cursor.fetchone()
        return str(row[0])


def check_pinned(conn: Connection) -> None:
    found = tuple(setting(conn, name) for name in NAMES)
    assert found[0].startswith(PINNED[0])  # the order of day and month does not touch ISO output
    assert found[1:] == PINNED[1:]


@pytest.mark.parametrize("opener", OPENERS)
@pytest.mark.parametrize("way", ["dsn", "uri", "environment", "service"])
def test_pinned_settings_win_and_the_users_own_options_stay(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opener: Callable[..., Connection], way: str
) -> None:
    database.execute(f"ALTER DATABASE {database.name} SET datestyle = 'SQL, DMY'")
    database.execute(f"ALTER DATABASE {database.name} SET timezone = 'Asia/Kathmandu'")
    database.execute(f"ALTER DATABASE {database.name} SET bytea_output = 'escape'")
    own = "-c work_mem=5MB -c datestyle=German --intervalstyle=iso_8601"
    parameters: dict[str, Any] = parse_dsn(database.dsn)
    if way == "dsn":
        dsn = make_dsn(database.dsn, options=own)
    elif way == "uri":
        escaped = own.replace(" ", "%20").replace("=", "%3D")
        rest = "&".join(
            f"{key}={str(value).replace('/', '%2F')}" for key, value in parameters.items() if key != "dbname"
        )
        dsn = f"postgresql:///{database.name}?{rest}&options={escaped}"
    elif way == "environment":
        dsn = database.dsn
        monkeypatch.setenv("PGOPTIONS", own)
        monkeypatch.setenv("PGTZ", "Europe/Amsterdam")  # libpq sends these two after `options`
        monkeypatch.setenv("PGDATESTYLE", "Postgres, MDY")
    else:
        lines = "\n".join(f"{key}={value}" for key, value in {**parameters, "options": own}.items())
        (tmp_path / "services").write_text(f"[ledger]\n{lines}\n")
        monkeypatch.setenv("PGSERVICEFILE", str(tmp_path / "services"))
        dsn = "service=ledger"
    conn = opener(dsn, application_name="walstream:test")
    check_pinned(conn)
    assert setting(conn, "work_mem") == "5MB"
    conn.close()


def test_further_options_and_search_path(database: Database) -> None:
    conn = connect(
        database.dsn,
        application_name="walstream:test",
        options={"lock_timeout": "1234ms", "default_text_search_config": "pg_catalog.simple"},
        search_path='walstream, "odd \\ name", pg_catalog',
    )
    assert setting(conn, "lock_timeout") == "1234ms"
    assert setting(conn, "search_path") == 'walstream, "odd \\ name", pg_catalog'
    assert conn.autocommit
    conn.close()
    database.execute(f"ALTER DATABASE {database.name} SET search_path = theirs")
    conn = connect(database.dsn, application_name="walstream:test", search_path=None, autocommit=False)
    assert setting(conn, "search_path") == "theirs"
    assert not conn.autocommit
    conn.close()


def test_application_name_is_ours_and_keeps_what_the_user_calls_it(database: Database) -> None:
    long = make_dsn(database.dsn, application_name="über-agenten " * 6)
    conn = connect(long, application_name="walstream:test")
    assert setting(conn, "application_name").startswith("walstream:test (")
    assert len(conn.get_dsn_parameters()["application_name"].encode()) <= APPLICATION_NAME_LIMIT
    conn.close()


def test_connections_notice_a_dead_peer_unless_the_user_says_otherwise(database: Database) -> None:
    conn = connect(make_dsn(database.dsn, keepalives_idle="77"), application_name="walstream:test", connect_timeout=7)
    sent = conn.get_dsn_parameters()
    assert sent["keepalives_idle"] == "77"
    assert sent["tcp_user_timeout"] == "30000"
    assert sent["connect_timeout"] == "7"
    conn.close()


def tcp(server: Server) -> tuple[str, int]:
    parameters = parse_dsn(server.dsn(tcp=True))
    return str(parameters["host"]), int(parameters["port"])


@pytest.mark.parametrize("opener", OPENERS)
def test_a_pooler_that_drops_the_settings_is_found_out(server: Server, opener: Callable[..., Connection]) -> None:
    with Relay(*tcp(server), drop_options=True) as relay:
        dsn = make_dsn(server.dsn(tcp=True), port=str(relay.port), sslmode="disable")
        with pytest.raises(ConfigError, match="asked for") as caught:
            opener(dsn, application_name="walstream:test")
    assert "pooler" in caught.value.hint


def test_a_pooler_that_refuses_the_settings_is_named_as_such(server: Server) -> None:
    with Relay(*tcp(server), refuse="unsupported startup parameter: options") as relay:
        dsn = make_dsn(server.dsn(tcp=True), port=str(relay.port), sslmode="disable")
        with pytest.raises(ConfigError, match="unsupported startup parameter") as caught:
            connect(dsn, application_name="walstream:test")
    assert "replication_dsn" in caught.value.hint


SECRET = "hunter2-and-more"


@pytest.mark.parametrize(
    ("change", "error", "hint"),
    [
        ({"port": "1"}, Unavailable, "host and port"),
        ({"host": "no-such-host.invalid"}, Unavailable, "host and port"),
        ({"host": "/nowhere"}, Unavailable, "host and port"),
        ({"user": "nobody_of_this_name"}, ConfigError, ""),
        ({"dbname": "no_such_database"}, ConfigError, "database name"),
        ({"sslmode": "require"}, ConfigError, "sslmode"),
        ({"sslmode": "verify-full", "sslrootcert": "/nowhere.pem"}, ConfigError, "sslrootcert"),
        ({"options": "-c no_such_setting=1"}, ConfigError, "options"),
        ({"options": "-c work_mem=lots"}, ConfigError, "options"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_what_a_person_must_change_ends_and_what_may_heal_is_tried_again(
    server: Server, change: dict[str, str], error: type[WalstreamError], hint: str
) -> None:
    right = {"password": SECRET, **parse_dsn(server.dsn(tcp=True))}
    with pytest.raises(WalstreamError) as caught:
        connect(make_dsn(**{**right, "connect_timeout": "3", **change}), application_name="walstream:test")
    assert type(caught.value) is error
    assert hint in caught.value.hint
    assert str(right["password"]) not in f"{caught.value} {caught.value.hint} {caught.value.__cause__}"


def test_logins_that_fail(own_server: Callable[..., PostgresServer]) -> None:
    server = own_server()
    server.execute("CREATE ROLE plain LOGIN PASSWORD 'right'")
    server.execute("CREATE ROLE locked PASSWORD 'right'")
    base = {name: value for name, value in parse_dsn(server.dsn(tcp=True)).items() if name != "password"}

    def failure(opener: Callable[..., Connection], **change: str) -> WalstreamError:
        with pytest.raises(WalstreamError) as caught:
            opener(make_dsn(**{**base, **change}), application_name="walstream:test")
        assert SECRET not in f"{caught.value} {caught.value.hint} {caught.value.__cause__}"
        return caught.value

    assert isinstance(failure(connect, user="plain", password=SECRET), ConfigError)
    assert isinstance(failure(connect, user="plain", passfile="/nowhere"), ConfigError)
    assert isinstance(failure(connect, user="locked", password="right"), ConfigError)
    refused = failure(replication_connect, user="plain", password="right")
    assert isinstance(refused, ConfigError)
    assert "REPLICATION" in refused.hint
    hba = server.data_dir / "pg_hba.conf"
    hba.write_text("local all all trust\nlocal replication all trust\n")
    server.reload()
    refused = failure(connect, user="plain", password="right")
    assert isinstance(refused, ConfigError)
    assert "pg_hba.conf" in refused.hint


def test_a_restart_is_waited_for(own_server: Callable[..., PostgresServer]) -> None:
    """Whatever the server answers on its way down and up again, it is worth another try."""
    server = own_server()
    found: list[WalstreamError] = []
    wrong: list[BaseException] = []
    done = threading.Event()

    def knock() -> None:
        while not done.is_set():
            try:
                connect(server.dsn(), application_name="walstream:test", connect_timeout=3).close()
            except Unavailable as error:
                found.append(error)
            except BaseException as error:
                wrong.append(error)
            time.sleep(0.002)

    thread = threading.Thread(target=knock)
    thread.start()
    try:
        server.restart("immediate")
        server.restart("fast")
    finally:
        done.set()
        thread.join()
    assert found
    assert not wrong


@pytest.mark.slow
def test_too_many_connections_are_waited_for(own_server: Callable[..., PostgresServer]) -> None:
    server = own_server(max_connections=10, superuser_reserved_connections=2, max_wal_senders=1)
    server.execute("CREATE ROLE plain LOGIN REPLICATION")
    opened: list[Connection] = []

    def open_many(opener: Callable[..., Connection], user: str) -> None:
        opened.extend(opener(server.dsn(user=user), application_name="walstream:test") for _ in range(12))

    with pytest.raises(Unavailable, match=r"connection slots|too many") as caught:
        open_many(connect, "plain")
    assert "max_connections" in caught.value.hint
    for each in opened:
        each.close()
    with pytest.raises(Unavailable) as caught:
        open_many(replication_connect, "postgres")
    assert "max_wal_senders" in caught.value.hint


def test_a_connection_string_that_cannot_be_parsed_is_not_printed() -> None:
    for dsn in (f"host=h password={SECRET[:4]} {SECRET}", f"postgresql://u:{SECRET}%zz@h/db", f"{SECRET}=1"):
        with pytest.raises(ConfigError) as caught:
            connect(dsn, application_name="walstream:test")
        assert SECRET not in f"{caught.value} {caught.value.hint} {caught.value.__cause__}"
