"""Violations for a person: in `status`, listed, and acknowledged."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from psycopg2.extensions import make_dsn

from tests.cli_calls import call, ok
from tests.conftest import Server
from tests.runner_world import World, world_on
from walstream.errors import ExitCode


@pytest.fixture
def world(server: Server) -> Iterator[World]:
    with world_on(server) as made:
        yield made


def tamper(world: World, *seqs: int) -> list[int]:
    """What ingest writes down of DELETEs; the ids."""
    return [
        int(id_)
        for (id_,) in world.execute(
            "INSERT INTO walstream.violations (kind, commit_lsn, ordinal, seq, xid, detail)"
            " SELECT 'delete', '0/500', s, s, 77, 'DELETE public.agent_events' FROM unnest(%s) AS s RETURNING id",
            list(seqs),
        )
    ]


def problems(world: World) -> list[str]:
    called = call("status", "--json", dsn=world.settings.dsn or "")
    assert called.exit_code == ExitCode.FAILED, "nobody ingests here"
    return [each for each in called.json["problems"] if "TAMPER" in each]


def test_the_red_line_stays_until_somebody_acknowledges(world: World) -> None:
    dsn = world.settings.dsn or ""
    assert problems(world) == []
    first, _ = tamper(world, 4, 5)
    world.execute("UPDATE walstream.violations SET changes = 7 WHERE seq = 4")
    (line,) = problems(world)
    assert "8 changes of the ledger that nobody declared; the last: DELETE public.agent_events (seq 5), noticed" in line
    assert "! TAMPER ALARM: 8 changes" in call("status", dsn=dsn).stdout
    document = ok("audit", "acknowledge", "--upto", str(first), "--note", "a drill", "--json", dsn=dsn).json
    assert document == {"acknowledged": 1, "upto": first}
    assert "1 change of the ledger" in problems(world)[0]
    assert ok("audit", "acknowledge", dsn=dsn).stdout.startswith("acknowledged: 1, up to ")
    assert problems(world) == []
    assert ok("audit", "acknowledge", dsn=dsn).stdout == "acknowledged: 0\n"
    assert world.execute("SELECT acknowledged_by = session_user, note FROM walstream.violations WHERE seq = 4") == [
        (True, "a drill")
    ]


def test_they_are_listed(world: World) -> None:
    dsn = world.settings.dsn or ""
    assert ok("audit", "violations", dsn=dsn).stdout == "there is none that is not acknowledged\n"
    ids = tamper(world, 4, 5)
    lines = ok("audit", "violations", dsn=dsn).stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == [str(id_) for id_ in reversed(ids)]
    assert lines[0].endswith("delete seq 5 (DELETE public.agent_events, xid 77, LSN 0/500)")
    ok("audit", "acknowledge", "--note", "a drill", dsn=dsn)
    assert ok("audit", "violations", "--json", dsn=dsn).json == []
    assert [each["seq"] for each in ok("audit", "violations", "--all", "--json", dsn=dsn).json] == [5, 4]
    assert "; acknowledged by " in ok("audit", "violations", "--all", dsn=dsn).stdout


def test_who_may_not_is_told(world: World) -> None:
    tamper(world, 4)
    role = f"r_{world.database.name[-8:]}"
    world.execute(f"CREATE ROLE {role} LOGIN")
    try:
        world.execute(
            f"GRANT USAGE ON SCHEMA walstream TO {role};"
            f" GRANT SELECT ON walstream.migrations, walstream.violations TO {role}"
        )
        called = call("audit", "acknowledge", dsn=make_dsn(world.settings.dsn, user=role, password="irrelevant"))
        assert called.exit_code == ExitCode.CONFIG
        assert "GRANT SELECT, UPDATE" in called.stderr
    finally:
        world.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")
