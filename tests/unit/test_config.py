"""Where settings come from, who wins, and what an error may say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from walstream.config import Columns, LedgerTable, Settings, load, quote
from walstream.errors import ConfigError, ExitCode


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(text: str, name: str = "walstream.toml") -> Path:
    file = Path(name)
    file.write_text(text)
    return file


class TestDsn:
    """libpq takes a password with a slash or an @ for host, port and database, and those are shown."""

    @pytest.mark.parametrize(
        "uri",
        [
            "postgresql://me:s3/cret@h/db",
            "postgres://me:12/34@h/db",
            "postgresql://m/e@h",
            "postgresql://me:s3@cret@h:5432/db",
            "postgres://me:s3@c:ret@h",
            "postgresql://m@e@h?sslmode=require",
        ],
    )
    def test_what_separates_has_to_be_encoded_in_a_password(self, uri: str) -> None:
        for name in ("dsn", "replication_dsn"):
            with pytest.raises(ConfigError, match="%2F") as raised:
                load({name: uri}, environ={})
            assert "cret" not in str(raised.value)

    @pytest.mark.parametrize(
        "uri",
        [
            "postgresql:///db?user=me@host",
            "postgresql://me:a%40b@h?options=a@b@c",
            "postgresql://me:a%2Fb@h:1,g:2/db",
            "postgresql://me@[::1]:5432/db",
            "host=/tmp",
        ],
    )
    def test_others_are_taken_as_they_are(self, uri: str) -> None:
        assert load({"dsn": uri}, environ={}).dsn == uri


def test_an_error_says_where_it_stands() -> None:
    write('dsnn = "x"\n[guard]\nwarn = 3\n')
    with pytest.raises(ConfigError, match=r"walstream.toml: dsnn: there is no such key; 'dsn' is one") as raised:
        load(environ={})
    assert "walstream.toml: guard.warn: there is no such key" in str(raised.value)
    write("lease_seconds = 'long'\n", "other.toml")
    for flags, environ, place in (
        ({}, {"WALSTREAM_CONFIG": "other.toml"}, "other.toml: lease_seconds: "),
        ({}, {"WALSTREAM_CONFIG": "other.toml", "WALSTREAM_LEASE_SECONDS": "0"}, ": WALSTREAM_LEASE_SECONDS: "),
        ({"lease_seconds": "x"}, {"WALSTREAM_LEASE_SECONDS": "0"}, "the command line: lease_seconds: "),
        ({}, {"WALSTREAM_GUARD__WARN_SHARE": "no"}, ": WALSTREAM_GUARD__WARN_SHARE: "),
    ):
        Path("walstream.toml").unlink(missing_ok=True)
        with pytest.raises(ConfigError, match=place):
            load(flags, environ=environ)
    with pytest.raises(ConfigError, match="the program: lease_seconds: "):
        load(environ={}, arguments={"lease_seconds": 0})


def test_a_table_has_a_name() -> None:
    for names in ({"table": ""}, {"namespace": ""}):
        with pytest.raises(ConfigError, match="at least 1 character"):
            load({"ledger": names}, environ={})


class TestPrecedence:
    """Flags over environment over file over arguments."""

    def test_each_layer_wins_over_the_next(self) -> None:
        flags = {"slot": "flag"}
        environ = {"WALSTREAM_SLOT": "env", "WALSTREAM_PUBLICATION": "env"}
        write('slot = "file"\npublication = "file"\nnamespace = "file"')
        arguments = dict.fromkeys(("slot", "publication", "namespace", "environment"), "argument")
        settings = load(flags, arguments=arguments, environ=environ)
        assert (settings.slot, settings.publication, settings.namespace, settings.environment) == (
            "flag",
            "env",
            "file",
            "argument",
        )

    def test_nothing_given_is_the_default(self) -> None:
        assert load(environ={}) == Settings()

    def test_a_flag_that_was_not_given_does_not_win(self) -> None:
        assert load({"slot": None}, environ={"WALSTREAM_SLOT": "env"}).slot == "env"

    def test_an_empty_variable_counts_as_absent(self) -> None:
        assert load(environ={"WALSTREAM_SLOT": ""}, arguments={"slot": "argument"}).slot == "argument"

    def test_tables_merge_key_by_key(self) -> None:
        write('[ledger]\ntable = "events"\n[ledger.columns]\nseq = "id"\npayload = "body"')
        settings = load(
            {"ledger": {"columns": {"payload": "doc"}}},
            environ={"WALSTREAM_LEDGER__COLUMNS__AGENT_ID": "agent"},
            arguments={"ledger": {"namespace": "app"}},
        )
        assert settings.ledger == LedgerTable(
            namespace="app", table="events", columns=Columns(seq="id", payload="doc", agent_id="agent")
        )

    def test_the_layers_given_are_left_as_they_are(self) -> None:
        arguments: dict[str, Any] = {"ledger": {"table": "a"}}
        load({"ledger": {"table": "b"}}, arguments=arguments, environ={})
        assert arguments == {"ledger": {"table": "a"}}


class TestFile:
    def test_walstream_toml_is_read_where_it_lies(self) -> None:
        write('slot = "here"')
        assert load(environ={}).slot == "here"

    def test_another_file_is_read_instead(self) -> None:
        write('slot = "here"')
        assert load(file=write('slot = "there"', "other.toml"), environ={}).slot == "there"
        assert load(environ={"WALSTREAM_CONFIG": "other.toml"}).slot == "there"

    def test_projector_options(self) -> None:
        write('[projectors.audit]\nlanes = 4\nstart = "latest"\noptions = {path = "audit.jsonl"}')
        audit = load(environ={}).projectors["audit"]
        assert (audit.lanes, audit.start, audit.on_poison, audit.options) == (
            4,
            "latest",
            None,
            {"path": "audit.jsonl"},
        )

    @pytest.mark.parametrize("text", ["slot = ", "slot = 'a'\nslot = 'b'", "\udcff"])
    def test_what_is_not_toml_is_refused_with_its_name(self, text: str) -> None:
        Path("bad.toml").write_bytes(text.encode("utf-8", "surrogateescape"))
        with pytest.raises(ConfigError, match=re.escape("bad.toml")):
            load(file=Path("bad.toml"), environ={})

    def test_a_file_that_was_named_has_to_be_there(self) -> None:
        with pytest.raises(ConfigError, match=re.escape("absent.toml")):
            load(file=Path("absent.toml"), environ={})
        with pytest.raises(ConfigError, match=re.escape("absent.toml")):
            load(environ={"WALSTREAM_CONFIG": "absent.toml"})


class TestEnvironment:
    def test_numbers_and_switches_are_read_from_text(self) -> None:
        settings = load(environ={"WALSTREAM_LEASE_SECONDS": "2.5", "WALSTREAM_ALLOW_UNBOUNDED_SLOT": "true"})
        assert settings.lease_seconds == 2.5
        assert settings.allow_unbounded_slot is True

    def test_what_is_no_setting_of_a_stream_is_let_be(self) -> None:
        assert load(environ={"WALSTREAM_PG_BIN": "/x", "WALSTREAM_TEST_DSN": "y", "PATH": "z"}) == Settings()

    @pytest.mark.parametrize("order", [1, -1])
    def test_a_table_cannot_be_set_as_a_whole_and_in_part(self, order: int) -> None:
        variables = {"WALSTREAM_LEDGER": "events", "WALSTREAM_LEDGER__TABLE": "events"}
        with pytest.raises(ConfigError, match="WALSTREAM_LEDGER"):
            load(environ=dict(list(variables.items())[::order]))


class TestRefusals:
    @pytest.mark.parametrize(
        ("given", "named"),
        [
            ({"slott": "x"}, "slott"),
            ({"slot": "Upper-Case"}, "slot"),
            ({"slot": "x" * 64}, "slot"),
            ({"publication": ""}, "publication"),
            ({"environment": ""}, "environment"),
            ({"buffer_bytes": 1}, "buffer_bytes"),
            ({"buffer_bytes": "64MB"}, "buffer_bytes"),
            ({"lease_seconds": 0}, "lease_seconds"),
            ({"ledger": {"tabel": "x"}}, "ledger.tabel"),
            ({"ledger": {"columns": {"seq": 3}}}, "ledger.columns.seq"),
            ({"ledger": "agent_events"}, "ledger"),
            ({"projectors": {"audit": {"lanes": 0}}}, "projectors.audit.lanes"),
            ({"projectors": {"audit": {"on_poison": "skip"}}}, "projectors.audit.on_poison"),
        ],
    )
    def test_the_key_is_named(self, given: dict[str, Any], named: str) -> None:
        with pytest.raises(ConfigError) as raised:
            load(arguments=given, environ={})
        assert f"{named}: " in str(raised.value)
        assert raised.value.exit_code is ExitCode.CONFIG

    @pytest.mark.parametrize("key", ["dsn", "replication_dsn"])
    @pytest.mark.parametrize(
        "value", ["postgresql://u:s3cret@h/\nx", "password=s3cret\0", ["s3cret"], {"password": "s3cret"}]
    )
    def test_a_password_is_never_told(self, key: str, value: Any) -> None:
        with pytest.raises(ConfigError) as raised:
            load({key: value}, environ={})
        assert key in str(raised.value)
        whole = f"{raised.value!r} {raised.value.hint} {raised.value.__cause__!r}"
        assert "s3cret" not in whole

    def test_nor_where_settings_are_printed(self) -> None:
        dsn = "postgresql://u:s3cret@h/d"
        settings = load({"dsn": dsn, "replication_dsn": dsn}, environ={})
        assert "s3cret" not in f"{settings!r} {settings}"
        assert settings.require_dsn() == dsn

    def test_a_database_has_to_be_named(self) -> None:
        with pytest.raises(ConfigError) as raised:
            load(environ={}).require_dsn()
        assert "WALSTREAM_DSN" in raised.value.hint

    def test_settings_do_not_change(self) -> None:
        settings: Any = Settings()
        with pytest.raises(ValueError, match="frozen"):
            settings.slot = "other"


class TestNames:
    @pytest.mark.parametrize(
        ("name", "quoted"),
        [
            ("events", '"events"'),
            ("Ereignis se", '"Ereignis se"'),
            ('a"b', '"a""b"'),
            ("型", '"型"'),
            ('";--', '""";--"'),
        ],
    )
    def test_quoted(self, name: str, quoted: str) -> None:
        assert quote(name) == quoted

    def test_no_identifier_holds_a_nul(self) -> None:
        with pytest.raises(ConfigError):
            quote("a\0b")

    def test_qualified(self) -> None:
        assert LedgerTable(namespace="My App", table='x"y').qualified == '"My App"."x""y"'

    def test_columns_in_the_order_of_a_row(self) -> None:
        assert Columns(seq="id", created_at="at").names() == (
            "id",
            "session_id",
            "agent_id",
            "event_type",
            "payload",
            "at",
        )
