"""The trail against a ledger and its order: what was changed there is named; what is gone by declaration passes."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.audit_files import offsets, records, verified
from tests.cli_calls import Called, call, ok
from tests.conftest import Server
from tests.runner_world import SESSIONS, World, eventually, world_on
from walstream import RetryLater
from walstream.audit.heads import read_heads
from walstream.audit.keys import generate
from walstream.audit.loading import TrailBroken
from walstream.audit.trail import AuditTrail
from walstream.cli import app
from walstream.errors import Unavailable
from walstream.projectors.audit_sink import AuditSink


@pytest.fixture
def world(server: Server) -> Iterator[World]:
    with world_on(server) as made:
        yield made


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "audit"


def put_on_record(world: World, directory: Path, **options: Any) -> None:
    trail = AuditTrail(directory, **options)
    try:
        trail.record(world.events(), world.settings)
    finally:
        trail.close()


def verify(world: World, directory: Path, *words: str) -> Called:
    return call("audit", "verify", str(directory), "--ledger", "--json", *words, dsn=world.settings.dsn)


def findings(called: Called) -> list[tuple[str, int | None, int | None]]:
    """Kind, offset and seq of each."""
    assert called.exit_code == (1 if not called.json["verified"] else 0)
    document = called.json
    every = [*document["findings"], *document["ledger"]["findings"]]
    return [(each["kind"], each["offset"], each["seq"]) for each in every]


def test_a_ledger_that_nobody_touched(world: World, directory: Path) -> None:
    world.add_many(60, transaction=7)
    world.add("t", payload_text='{"n": 1.10, "big": 123456789012345678901234567890}')
    put_on_record(world, directory)
    called = verify(world, directory)
    assert findings(called) == []
    assert called.json["ledger"]["same"] == called.json["events"] == 61


@pytest.mark.parametrize(
    ("column", "value"),
    [("payload", "'{\"n\": 5.0}'"), ("agent_id", "'other'"), ("event_type", "'other'"), ("created_at", "now()")],
)
def test_an_altered_row(world: World, directory: Path, column: str, value: str) -> None:
    world.add_many(20)
    put_on_record(world, directory)
    world.execute(f"UPDATE agent_events SET {column} = {value} WHERE seq = 6")
    called = verify(world, directory)
    assert findings(called) == [("altered", 6, 6)]
    (found,) = called.json["ledger"]["findings"]
    assert found["what"] == f"the ledger says another {column}"
    assert (found["n"], found["segment"]) == (7, "0000000000000001-0000000000000001.jsonl")


def test_a_missing_row_and_one_that_is_gone_by_declaration(world: World, directory: Path) -> None:
    world.add_many(20)
    put_on_record(world, directory)
    world.execute("DELETE FROM agent_events WHERE seq IN (3, 9, 10)")
    world.execute("INSERT INTO walstream.erasures (first_seq, last_seq, reason) VALUES (9, 10, 'retention')")
    called = verify(world, directory)
    assert findings(called) == [("missing", 3, 3)]
    assert called.json["ledger"]["erased"] == 2


def test_everything_is_gone(world: World, directory: Path) -> None:
    world.add_many(30)
    put_on_record(world, directory)
    world.execute("TRUNCATE agent_events")
    called = verify(world, directory)
    assert called.exit_code == 1
    assert called.json["ledger"]["missing"] == 30
    words = call("audit", "verify", str(directory), "--ledger", dsn=world.settings.dsn)
    assert words.exit_code == 1
    assert "FIRST DIFFERENCE: missing: the ledger has no such row" in words.stdout
    assert "record 2, offset 1, seq 1" in words.stdout
    assert words.stdout.endswith("NOT verified\n")


def test_rows_that_are_there_besides(world: World, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has no place in the order, while somebody ingests; and those that the sink has not got to."""
    monkeypatch.setattr("walstream.audit.ledger_comparison._PATIENCE", 0.3)
    world.add_many(20)
    put_on_record(world, directory)
    world.add_many(5)
    (seq,) = world.insert("smuggled")
    world.execute("UPDATE walstream.ingest SET lease_until = now() + interval '1 hour'")
    called = verify(world, directory)
    assert findings(called) == [("extra", None, seq)]
    assert called.json["ledger"]["behind"] == 5


def test_a_row_without_a_place_while_nobody_ingests_is_no_difference(world: World, directory: Path) -> None:
    world.add_many(3)
    put_on_record(world, directory)
    world.insert("late")
    called = verify(world, directory)
    assert findings(called) == []
    assert called.json["ledger"]["unordered"] == 1


def test_an_order_with_another_row_under_an_offset(world: World, directory: Path) -> None:
    world.add_many(10)
    put_on_record(world, directory)
    rows = world.insert("one", "two")
    world.execute("DELETE FROM walstream.commit_order")
    world.order([*range(1, 9), rows[0], 10])
    assert findings(verify(world, directory)) == [("order", 9, 9), ("extra", 9, rows[0])]
    world.execute("DELETE FROM walstream.commit_order")
    assert [kind for kind, *_ in findings(verify(world, directory))] == ["order"] * 10


def test_two_rows_that_carry_one_seq(world: World, directory: Path) -> None:
    world.add_many(10)
    put_on_record(world, directory)
    world.execute("ALTER TABLE agent_events DROP CONSTRAINT agent_events_pkey CASCADE")
    try:
        world.execute("INSERT INTO agent_events SELECT * FROM agent_events WHERE seq = 4")
        called = verify(world, directory)
        assert findings(called) == [("extra", None, 4)]
        assert called.json["ledger"]["same"] == 9
    finally:
        world.execute("DELETE FROM agent_events WHERE seq = 4")
        world.execute("ALTER TABLE agent_events ADD PRIMARY KEY (seq)")


def test_a_stretch_is_compared(world: World, directory: Path) -> None:
    world.add_many(20)
    put_on_record(world, directory)
    world.execute("DELETE FROM agent_events WHERE seq IN (3, 12)")
    called = verify(world, directory, "--from", "10", "--to", "15")
    assert findings(called) == [("missing", 12, 12)]
    assert called.json["ledger"]["compared"] == 6


def test_a_column_that_came_later_is_not_compared(world: World, directory: Path) -> None:
    world.add_many(5)
    put_on_record(world, directory)
    world.execute("ALTER TABLE agent_events ADD COLUMN tenant text DEFAULT 't'")
    try:
        world.add_many(2)
        put_on_record(world, directory)
        assert findings(verify(world, directory)) == []
        assert records(directory)[-1].fields()["extras"] == {"tenant": "t"}
        world.execute("UPDATE agent_events SET tenant = 'u' WHERE seq IN (1, 7)")
        assert findings(verify(world, directory)) == [("altered", 7, 7)]
    finally:
        world.execute("ALTER TABLE agent_events DROP COLUMN tenant")


# -- the sink and the order --------------------------------------------------------------------------------------------


def test_offsets_that_are_gone_by_declaration_are_on_record_as_gone(world: World, directory: Path) -> None:
    world.add_many(20)
    world.execute(
        "INSERT INTO walstream.erasures (first_seq, last_seq, reason) VALUES (1, 2, 'asked for'), (7, 9, 'old')"
    )
    world.execute("DELETE FROM agent_events WHERE seq IN (1, 2, 7, 8, 9)")
    world.start(AuditSink(directory))
    eventually(lambda: world.reached("audit-sink", 20))
    assert offsets(directory) == list(range(1, 21))
    gone = [
        (each.offset, json.loads(each.payload or b"")["reason"]) for each in records(directory) if each.kind == "gone"
    ]
    assert gone == [(1, "asked for"), (2, "asked for"), (7, "old"), (8, "old"), (9, "old")]
    verified(directory)
    assert findings(verify(world, directory)) == []


def test_a_projector_that_was_moved_on_halts(world: World, directory: Path) -> None:
    world.add_many(10)
    put_on_record(world, directory)
    world.add_many(10)
    trail = AuditTrail(directory)
    with pytest.raises(TrailBroken, match=r"offset 11 \(seq 11\) is not on record, and no erasure declares that"):
        trail.record(world.events()[14:], world.settings)
    trail.close()


def test_another_history_is_noticed_before_the_first_event(world: World, directory: Path) -> None:
    world.add_many(10)
    put_on_record(world, directory)
    world.execute("DELETE FROM walstream.commit_order")
    rows = world.insert("another")
    world.order([*range(1, 10), rows[0]])
    world.start(AuditSink(directory))
    eventually(lambda: world.state("audit-sink") == "halted")
    (error,) = world.execute("SELECT error FROM walstream.projectors WHERE name = 'audit-sink'")[0]
    assert f"holds seq 10 under offset 10, and the ledger's order has seq {rows[0]} there" in error


def test_a_trail_that_is_ahead_of_the_order_waits_and_compares(world: World, directory: Path) -> None:
    """Rule 4: the server lost the order's end."""
    world.add_many(10)
    put_on_record(world, directory)
    world.execute("DELETE FROM walstream.commit_order")
    world.order(range(1, 6))
    world.start(AuditSink(directory))
    eventually(lambda: world.reached("audit-sink", 5))
    assert offsets(directory) == list(range(1, 11))
    world.order(range(6, 11))
    world.add_many(3)
    eventually(lambda: world.reached("audit-sink", 13))
    assert offsets(directory) == list(range(1, 14))
    verified(directory)
    assert findings(verify(world, directory)) == []


@pytest.mark.parametrize("reached", [5, 0])
def test_events_that_the_database_lost_are_named_at_once(world: World, directory: Path, reached: int) -> None:
    """A fail-over to a standby that was behind: neither order nor ledger has the last events."""
    world.add_many(10)
    put_on_record(world, directory)
    world.execute("DELETE FROM walstream.commit_order")
    if reached:
        world.order(range(1, 1 + reached))
    world.execute("DELETE FROM agent_events WHERE seq BETWEEN 8 AND 10")
    before = [each.hash for each in records(directory)]
    world.start(AuditSink(directory))
    eventually(lambda: world.state("audit-sink") == "halted")
    (error,) = world.execute("SELECT error FROM walstream.projectors WHERE name = 'audit-sink'")[0]
    assert "holds 3 events that this ledger does not have any more: offsets 8 to 10, seqs 8 to 10." in error
    assert [each.hash for each in records(directory)] == before


def test_what_an_erasure_declares_is_not_lost(world: World, directory: Path) -> None:
    world.add_many(10)
    put_on_record(world, directory)
    world.execute("DELETE FROM walstream.commit_order")
    world.order(range(1, 6))
    world.execute("INSERT INTO walstream.erasures (first_seq, last_seq, reason) VALUES (8, 10, 'retention')")
    world.execute("DELETE FROM agent_events WHERE seq BETWEEN 8 AND 10")
    trail = AuditTrail(directory)
    try:
        assert trail.check(world.settings) == 10
    finally:
        trail.close()


def test_where_two_histories_part_is_found(world: World, directory: Path) -> None:
    """The promoted server has gone on for a while before the sink looks."""
    world.add_many(40)
    put_on_record(world, directory)
    world.execute("DELETE FROM walstream.commit_order")
    world.execute("DELETE FROM agent_events WHERE seq > 23")
    others = world.insert(*["other"] * 30)
    world.order([*range(1, 24), *others])
    trail = AuditTrail(directory)
    try:
        with pytest.raises(TrailBroken, match=f"seq 24 under offset 24, and the ledger's order has seq {others[0]} th"):
            trail.check(world.settings)
    finally:
        trail.close()


def test_another_event_of_the_same_number_is_no_changed_one(world: World, directory: Path) -> None:
    """A seq that was lost can be given again, at the same offset: no tampering, but another history."""
    world.add_many(10)
    put_on_record(world, directory)
    world.execute("DELETE FROM walstream.commit_order")
    world.execute("UPDATE agent_events SET event_type = 'another' WHERE seq = 10")
    world.order(range(1, 11))  # at other places of the WAL
    trail = AuditTrail(directory)
    try:
        with pytest.raises(TrailBroken, match="another event under offset 10 and seq 10"):
            trail.record(world.events(), world.settings)
    finally:
        trail.close()
    assert offsets(directory) == list(range(1, 11)), "nothing was written"


def test_a_directory_without_its_disk_shows_in_the_state(world: World, directory: Path) -> None:
    world.add_many(10)
    world.start(AuditSink(directory))
    eventually(lambda: world.reached("audit-sink", 10))
    directory.rename(directory.with_name("away"))
    directory.mkdir()
    world.add_many(1)
    eventually(lambda: world.state("audit-sink") == "retrying")
    (error,) = world.execute("SELECT error FROM walstream.projectors WHERE name = 'audit-sink'")[0]
    assert "holds no chain, and the projector stands at offset 10: is the disk mounted?" in error
    for each in directory.iterdir():
        each.unlink()
    directory.rmdir()
    directory.with_name("away").rename(directory)
    eventually(lambda: world.reached("audit-sink", 11))
    assert offsets(directory) == list(range(1, 12))


def test_lanes_halt_the_sink(world: World, directory: Path) -> None:
    world.add_many(1)
    world.start(AuditSink(directory), projectors={"audit-sink": {"lanes": 2}})
    eventually(lambda: world.state("audit-sink") == "halted")
    assert not directory.exists()


# -- heads in a table --------------------------------------------------------------------------------------------------


def test_heads_in_a_table_notice_an_end_that_is_cut_off(world: World, directory: Path, tmp_path: Path) -> None:
    public, key_id = generate(tmp_path / "key")
    world.add_many(10)
    put_on_record(world, directory, key=tmp_path / "key", heads_to="table:audit_heads")
    world.add_many(10)
    put_on_record(world, directory, key=tmp_path / "key", heads_to="table:public.audit_heads")
    assert world.execute("SELECT n FROM public.audit_heads ORDER BY id") == [(11,), (21,)]
    words = ("--key", str(public), "--heads", "table:audit_heads")
    called = verify(world, directory, *words)
    assert findings(called) == []
    assert (called.json["signed"], called.json["vouched_n"]) == (4, 21)
    (segment,) = directory.glob("0*.jsonl")
    segment.write_bytes(b"".join(segment.read_bytes().splitlines(keepends=True)[:11]))
    heads = read_heads(directory / "heads.jsonl")
    (directory / "heads.jsonl").write_bytes(heads[0].line)
    assert {head.key for head in heads} == {key_id}
    assert call("audit", "verify", str(directory), "--key", str(public), dsn=world.settings.dsn).exit_code == 0
    called = call("audit", "verify", str(directory), *words, dsn=world.settings.dsn)
    assert called.exit_code == 1
    assert "the chain ends with record 11, and a head vouches for more: it was cut off" in called.stdout


def test_a_sink_needs_no_more_than_to_add_to_the_table(world: World, directory: Path) -> None:
    """The table as docs/audit.md makes it, with the grant that it gives, and what it reads of walstream's own."""
    role = f"sink_{secrets.token_hex(4)}"
    page = (Path(__file__).resolve().parents[2] / "docs" / "audit.md").read_text(encoding="utf-8")
    statements = (
        page.split("```sql\n")[1].split("```")[0].replace("TO walstream", f"TO {role}").replace("auditor", "public")
    )
    world.execute(f"CREATE ROLE {role} LOGIN")
    try:
        world.execute(statements)
        world.execute(f"GRANT USAGE ON SCHEMA walstream TO {role}")
        world.execute(f"GRANT SELECT ON walstream.migrations, walstream.erasures TO {role}")
        login = world.settings.model_copy(update={"dsn": world.database.server.dsn(world.database.name, role)})
        world.add_many(3)
        trail = AuditTrail(directory, heads_to="table:audit_heads")
        trail.record(world.events(), login)
        trail.close()
        assert world.execute("SELECT n FROM public.audit_heads") == [(4,)]
    finally:
        world.execute(f"DROP OWNED BY {role}")
        world.execute(f"DROP ROLE {role}")


def test_a_table_that_cannot_be_written_to_is_waited_for(world: World, directory: Path) -> None:
    world.add_many(3)
    broken = world.settings.model_copy(update={"dsn": "postgresql://127.0.0.1:1/nowhere"})
    trail = AuditTrail(directory, heads_to="table:audit_heads")
    with pytest.raises((Unavailable, RetryLater)):
        trail.record(world.events(), broken)
    trail.record(world.events(), world.settings)
    trail.close()
    assert world.execute("SELECT count(*) FROM public.audit_heads") == [(1,)]
    assert offsets(directory) == [1, 2, 3]


# -- the command line --------------------------------------------------------------------------------------------------


def test_show_filters(world: World, directory: Path) -> None:
    world.add_many(20, sessions=4, event_type="tool.invoked")
    world.add("model.responded", session=SESSIONS[1], payload={"text": "a\nb"})
    put_on_record(world, directory)

    def shown(*words: str) -> list[int]:
        called = ok("audit", "show", str(directory), "--json", *words, dsn=world.settings.dsn)
        return [json.loads(line)["header"].get("offset", 0) for line in called.stdout.splitlines()]

    assert shown() == list(range(22))
    assert shown("--session", SESSIONS[1]) == [2, 6, 10, 14, 18, 21]
    assert shown("--type", "model.responded") == [21]
    assert shown("--agent", "nobody") == []
    assert shown("--from", "5", "--to", "7") == [5, 6, 7]
    assert shown("--limit", "3") == [0, 1, 2]
    assert shown("--until", "2001-01-01") == []
    assert len(shown("--since", "2001-01-01T00:00:00Z")) == 22
    table = ok("audit", "show", str(directory), "--type", "model.responded", dsn=world.settings.dsn).stdout
    assert SESSIONS[1] in table
    assert "model.responded" in table
    assert call("audit", "show", str(directory), "--since", "soon", dsn=world.settings.dsn).exit_code == 2


def test_export_writes_parquet(world: World, directory: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    world.add_many(20, event_type="tool.invoked")
    world.add("t", payload_text='{"n": 1.10, "big": 123456789012345678901234567890}')
    put_on_record(world, directory)
    target = tmp_path / "events.parquet"
    called = ok(
        "audit", "export", str(directory), "--parquet", str(target), "--from", "11", "--json", dsn=world.settings.dsn
    )
    assert called.json["records"] == 11
    rows = parquet.read_table(target).to_pylist()
    assert [row["offset"] for row in rows] == list(range(11, 22))
    assert rows[-1]["payload"] == '{"n": 1.10, "big": 123456789012345678901234567890}'
    assert rows[0]["committed_at"].tzinfo is not None
    assert rows[0]["hash"] == records(directory)[11].hash.decode()
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_the_directory_comes_from_the_configuration(
    world: World, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    called = call("audit", "verify", dsn=world.settings.dsn)
    assert (called.exit_code, "no audit directory was named" in called.stderr) == (3, True)
    public, _ = generate(tmp_path / "key")
    (tmp_path / "heads").mkdir()
    Path("walstream.toml").write_text(
        f'[projectors.audit-sink.options]\ndirectory = "{directory}"\nkey = "{tmp_path / "key"}"\n'
        f'heads_to = ["{tmp_path / "heads"}", "stdout"]\n'
    )
    world.add_many(3)
    put_on_record(world, directory, key=tmp_path / "key", heads_to=str(tmp_path / "heads"))
    called = ok("audit", "verify", "--json", dsn=world.settings.dsn)
    assert (called.json["heads"], called.json["signed"], called.json["findings"]) == (2, 2, [])
    assert public.exists()


def test_keygen(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["audit", "keygen", str(tmp_path / "key"), "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["public"] == str(tmp_path / "key.pub")
    assert CliRunner().invoke(app, ["audit", "keygen", str(tmp_path / "key")]).exit_code == 3
