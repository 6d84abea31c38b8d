"""A standby is promoted: the slot came along, or is made anew; what only the old primary knew is noticed."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.audit_files import offsets, verified
from tests.cli_calls import call, ok
from tests.conftest import Database
from tests.integration.streams import Installed, Recorder, eventually
from walstream.config import ProjectorSettings
from walstream.errors import ExitCode, SlotError
from walstream.postgres import PostgresServer
from walstream.postgres.server import Setting, _free_port
from walstream.postgres.workspace import Workspace
from walstream.projectors.audit_sink import AuditSink


class Standby(PostgresServer):
    """A copy of a primary that follows it, and keeps copies of its slots where the version can."""

    def __init__(self, primary: PostgresServer) -> None:
        following: dict[str, Setting] = {
            "primary_conninfo": f"{primary.dsn('postgres')} application_name=standby",
            "hot_standby": True,
            "hot_standby_feedback": True,
            "primary_slot_name": "standby",
        }
        if primary.major >= 17:
            following["sync_replication_slots"] = True
        super().__init__({**primary.settings, **following}, bin_dir=primary.bin_dir, durable=False)
        self._primary = primary
        self.password = primary.password
        self.port = _free_port()  # not 0: then it would set a password, which a standby cannot

    def init(self) -> None:
        self._workspace = place = Workspace(self._account)
        self._primary.execute("SELECT pg_create_physical_replication_slot('standby', true)")
        source = ("-d", self._primary.dsn("postgres"), "-c", "fast")
        copied = self._run("pg_basebackup", "-D", place.data, *source, timeout=120)
        assert copied.returncode == 0, copied.stderr
        (place.data / "standby.signal").touch()
        subprocess.run(["chown", "-R", "--reference", str(place.data), str(place.data)], check=True)

    def promote(self) -> None:
        self.execute("SELECT pg_promote()")
        eventually(lambda: self.execute("SELECT pg_is_in_recovery()") == [(False,)], "the promotion")


@pytest.fixture
def pair(own_server: Callable[..., PostgresServer]) -> Iterator[tuple[Installed, Standby]]:
    """A stream on a primary, and a standby of that."""
    primary = own_server()
    primary.execute("CREATE DATABASE ledger")
    stream = Installed(Database(primary, "ledger", made=True))
    with Standby(primary) as standby:
        yield stream, standby


def caught_up(stream: Installed) -> bool:
    place: Any = stream.place
    return bool(
        place.execute(
            "SELECT count(*) FROM pg_stat_replication WHERE application_name = 'standby'"
            " AND replay_lsn >= pg_current_wal_flush_lsn()"
        )[0][0]
    )


def kept(stream: Installed, standby: Standby) -> bool:
    """Whether the standby has a copy of the slot that will last."""
    rows = standby.execute(
        "SELECT (to_jsonb(s) ->> 'synced')::boolean AND NOT temporary FROM pg_replication_slots AS s"
        " WHERE slot_name = %s",
        stream.settings.slot,
    )
    return rows == [(True,)]


def after(stream: Installed, standby: Standby, epoch: str = "--same-epoch") -> Installed:
    """The same stream on the promoted server, adopted."""
    database = Database(standby, "ledger", made=True)
    words = ("--slot", stream.settings.slot)
    refused = call("status", "--json", dsn=database.dsn)
    assert refused.exit_code == ExitCode.FAILED
    moved = stream.settings.model_copy(update={"dsn": database.dsn})
    made: Installed = object.__new__(Installed)
    made.place, made.settings = database, moved
    with pytest.raises(SlotError, match="timeline"), made.host():
        pass
    ok("adopt", *words, epoch, "--yes", dsn=database.dsn)
    return made


def test_a_clean_switch_over(pair: tuple[Installed, Standby]) -> None:
    """The slot of a fail-over is read on, where the server keeps such; otherwise a new one is made by `run`."""
    stream, standby = pair
    recorder = Recorder()
    keeps = standby.major >= 17
    with stream.host(recorder):
        stream.insert("one", "two")
        eventually(lambda: len(recorder.got) == 2, "two events")
        if keeps:
            eventually(lambda: kept(stream, standby), "the standby has a copy of the slot", timeout=60)
    stream.insert("unread")
    eventually(lambda: caught_up(stream), "the standby has everything")
    old: Any = stream.place
    old.server.stop("fast")
    standby.promote()
    now = after(stream, standby)
    assert kept(now, standby) == keeps
    with now.host(recorder):
        now.insert("new")
        eventually(lambda: len(recorder.got) == 4, "what was unread, and what is new")
        assert now.wait_ordered() == sorted(now.ordered())
    assert recorder.types == ["one", "two", "unread", "new"]
    assert [event.offset for event in recorder.got] == [1, 2, 3, 4]
    births = now.place.execute("SELECT count(*) FROM walstream.recoveries WHERE kind = 'rebirth'")
    assert births == [(0 if keeps else 1,)]
    assert ok("doctor", "--slot", stream.settings.slot, "--json", dsn=now.place.dsn).json


@pytest.mark.slow
def test_nothing_is_delivered_before_the_standby_has_it(pair: tuple[Installed, Standby]) -> None:
    """`synchronized_standby_slots`: what a fail-over can lose is not out; the slot that came along is read on."""
    stream, standby = pair
    if standby.major < 17:
        pytest.skip("slots for fail-over exist from 17 on")
    old: Any = stream.place
    old.execute("ALTER SYSTEM SET synchronized_standby_slots = 'standby'")
    old.execute("SELECT pg_reload_conf()")
    words = ("--slot", stream.settings.slot)
    recorder = Recorder()
    with stream.host(recorder):
        stream.insert("one", "two")
        eventually(lambda: len(recorder.got) == 2, "two events")
        eventually(lambda: kept(stream, standby), "the standby has a copy of the slot", timeout=60)
        standby.stop("fast")
        stream.insert("three")
        time.sleep(3)
        assert recorder.types == ["one", "two"], "the standby does not have it"
        judged = call("guard", *words, "--json", dsn=old.dsn).json["slots"][0]
        assert (judged["state"], judged["causes"][0]["cause"]) == ("warn", "standby_awaited")
        assert "standby" in call("status", *words, dsn=old.dsn).stdout
        standby.start()
        eventually(lambda: recorder.types == ["one", "two", "three"], "the standby has it")
        assert call("guard", *words, "--json", dsn=old.dsn).json["slots"][0]["state"] == "ok"
    eventually(lambda: caught_up(stream), "the standby has everything")
    old.server.stop("immediate")
    standby.promote()
    now = after(stream, standby)
    assert kept(now, standby)
    with now.host(recorder):
        now.insert("new")
        eventually(lambda: recorder.types == ["one", "two", "three", "new"], "what is new, and nothing twice")
        now.wait_ordered()
    assert now.place.execute("SELECT count(*) FROM walstream.recoveries WHERE kind = 'rebirth'") == [(0,)]


@pytest.mark.slow
@pytest.mark.parametrize("numbers", ["skipped", "given again"])
def test_what_only_the_old_primary_had_is_named(pair: tuple[Installed, Standby], tmp_path: Path, numbers: str) -> None:
    """A lossy fail-over: events are on record outside of the database, and do not exist on the promoted server.

    A standby skips up to 32 numbers of a sequence; where more were lost, others get them again.
    """
    stream, standby = pair
    lost = ["lost"] * (7 if numbers == "skipped" else 40)
    trail = tmp_path / "audit"
    recorder = Recorder()
    with stream.host(recorder, AuditSink(trail)):
        stream.insert("one", "two")
        eventually(lambda: len(recorder.got) == 2, "two events")
        if standby.major >= 17:
            eventually(lambda: kept(stream, standby), "the standby has a copy of the slot", timeout=60)
        eventually(lambda: caught_up(stream), "the standby has everything so far")
        eventually(lambda: len(standby.execute(_ORDERED, dbname="ledger")) > 0, "and its order")
        standby.stop("fast")
        stream.insert(*lost)
        eventually(lambda: len(offsets(trail)) == 2 + len(lost), "the trail has all of them")
    old: Any = stream.place
    old.server.stop("immediate")
    standby.start()
    standby.promote()
    now = after(stream, standby, "--new-epoch")
    named = f"holds {len(lost)} events that this ledger does not have any more: offsets 3 to {2 + len(lost)}"
    again = Recorder()
    with now.host(again, AuditSink(trail)):
        eventually(lambda: error_of(now, "audit-sink"), "the sink has looked")
        assert named in error_of(now, "audit-sink")
        status = call("status", "--slot", stream.settings.slot, "--json", dsn=now.place.dsn).json
        assert any("audit-sink" in problem and "does not have any more" in problem for problem in status["problems"])
        now.insert(*["new"] * 45)
        eventually(lambda: again.types.count("new") == 45, "everybody else goes on")
        now.wait_ordered()
    with now.host(AuditSink(trail)):  # by now others have their offsets, and perhaps their numbers
        eventually(lambda: "another" in error_of(now, "audit-sink"), "the first difference")
        assert "under offset 3" in error_of(now, "audit-sink")
    assert len(offsets(trail)) == 2 + len(lost), "the record of the old history stands as it was"
    verified(trail)
    # As docs/audit.md has it: another chain, from where the histories part.
    ok("projectors", "reset", "audit-sink", "--to", "3", "--yes", dsn=now.place.dsn)
    fresh = tmp_path / "another"
    with now.host(AuditSink(fresh), projectors={"audit-sink": ProjectorSettings(start=3)}):
        eventually(lambda: fresh.exists() and offsets(fresh) == list(range(3, 48)), "the new history, on record")
    verified(fresh)


_ORDERED = "SELECT 1 FROM walstream.commit_order WHERE max_seq >= 2"


def error_of(stream: Installed, projector: str) -> str:
    rows = stream.place.execute("SELECT error FROM walstream.projectors WHERE name = %s", projector)
    return str(rows[0][0] or "") if rows else ""


def test_a_standby_without_a_copy_of_the_slot(pair: tuple[Installed, Standby]) -> None:
    """As before 17: the slot is not there, and `run` makes a new one; nothing is lost."""
    stream, standby = pair
    stream.insert("one", "two")
    with stream.host():
        stream.wait_ordered()
    stream.insert("unread")
    eventually(lambda: caught_up(stream), "the standby has everything")
    old: Any = stream.place
    old.server.stop("fast")
    standby.promote()
    standby.execute(
        "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = %s",
        stream.settings.slot,
    )
    now = after(stream, standby)
    recorder = Recorder()
    with now.host(recorder):
        now.insert("new")
        eventually(lambda: len(recorder.got) == 4, "everything")
    assert sorted(recorder.types) == ["new", "one", "two", "unread"]
    assert "unread" in [event.event_type for event in recorder.got if event.recovered]


def test_doctor_and_init_see_to_it(own_server: Callable[..., PostgresServer], tmp_path: Path) -> None:
    server = own_server()
    if server.major < 17:
        pytest.skip("slots for fail-over exist from 17 on")
    server.execute("CREATE DATABASE ledger")
    database = Database(server, "ledger", made=True)
    stream = Installed(database)
    words = ("--slot", stream.settings.slot)

    def failover() -> bool:
        return bool(server.execute("SELECT failover FROM pg_replication_slots")[0][0])

    def found() -> dict[str, str]:
        findings = call("doctor", *words, "--json", dsn=database.dsn).json["checks"]
        return next(each for each in findings if each["check"] == "fail-over slot")

    assert failover()
    assert found()["state"] == "ok"
    off = tmp_path / "off.toml"
    off.write_text('failover_slot = "off"\n')
    with stream.host():
        stream.insert("one")
        stream.wait_ordered()
        notes = ok("init", *words, "--config", str(off), "--json", dsn=database.dsn).json["notes"]
        assert any("cannot be changed now" in note for note in notes)
    eventually(lambda: not server.execute("SELECT 1 FROM pg_replication_slots WHERE active"), "nobody reads it")
    ok("init", *words, "--config", str(off), dsn=database.dsn)
    assert not failover()
    assert found()["state"] == "warning"
    ok("init", *words, dsn=database.dsn)
    assert failover()
