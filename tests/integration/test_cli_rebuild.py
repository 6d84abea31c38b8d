"""``walstream projectors rebuild``: what it compares, what it puts in place, and how it says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli_calls import call, ok
from tests.conftest import Database
from tests.integration.streams import Installed, eventually
from walstream.errors import ExitCode
from walstream.plugins import load_target

MODULE = """
from walstream import Projector, Stream

class Meter(Projector):
    name = "meter"
    transactional = True
    tables = ("meter",)

    def setup(self, ctx):
        ctx.cursor.execute("CREATE TABLE IF NOT EXISTS meter (event_type text PRIMARY KEY, n bigint NOT NULL)")

    def project(self, events, ctx):
        for event in events:
            ctx.cursor.execute(
                "INSERT INTO meter VALUES (%s, 1) ON CONFLICT (event_type) DO UPDATE SET n = meter.n + 1",
                (event.event_type,),
            )

class Outward(Projector):
    name = "outward"

    def project(self, events, ctx):
        pass

stream = Stream()
stream.add(Meter())
stream.add(Outward())
"""


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "rebuilt_app.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "rebuilt_app:stream"


def test_it_compares_and_puts_in_place(database: Database, target: str) -> None:
    stream = Installed(database)
    words = ("projectors", "rebuild", "meter", target, "--slot", stream.settings.slot)
    with stream.host(*load_target(target).projectors):
        stream.insert("a", "a", "b")
        eventually(lambda: _content(database) == [("a", 2), ("b", 1)], "the meter has them")
        same = ok(*words, "--compare", "--json", dsn=database.dsn).json
        assert (same["swapped"], same["offset"]) == (False, 3)
        assert same["differences"] == [{"table": '"public"."meter"', "rows": 2, "missing": 0, "surplus": 0}]

        database.execute("UPDATE meter SET n = 7 WHERE event_type = 'a'")
        called = call(*words, "--compare", dsn=database.dsn)
        assert called.exit_code == ExitCode.FAILED
        assert "lacked 1" in called.stdout
        assert _content(database) == [("a", 7), ("b", 1)]

        called = call(*words, dsn=database.dsn)
        assert called.exit_code == ExitCode.CONFIG
        assert "--yes" in called.stderr

        assert "in place" in ok(*words, "--yes", dsn=database.dsn).stdout
        assert _content(database) == [("a", 2), ("b", 1)]
        stream.insert("b")
        eventually(lambda: _content(database) == [("a", 2), ("b", 2)], "the live one goes on")


def _content(database: Database) -> list[tuple[object, ...]]:
    if not database.execute("SELECT to_regclass('public.meter')")[0][0]:
        return []
    return database.execute("SELECT event_type, n FROM public.meter ORDER BY 1")


def test_what_cannot_be_rebuilt_is_refused(database: Database, target: str) -> None:
    stream = Installed(database)
    words = ("projectors", "rebuild", "--slot", stream.settings.slot, "--yes")
    called = call(*words, "outward", target, dsn=database.dsn)
    assert called.exit_code == ExitCode.CONFIG
    assert "projectors reset outward" in called.stderr
    called = call(*words, "meter", target, dsn=database.dsn)
    assert called.exit_code == ExitCode.CONFIG
    assert "never run" in called.stderr
    called = call(*words, "metre", target, dsn=database.dsn)
    assert called.exit_code == ExitCode.CONFIG
    assert "meter, outward" in called.stderr
    called = call(*words, "meter", dsn=database.dsn)
    assert called.exit_code == ExitCode.CONFIG
    assert "walstream run" in called.stderr
