"""The demo's proof can fail: whatever is tampered with is counted, under its name."""

from __future__ import annotations

import json
from pathlib import Path

import psycopg2
import pytest

from tests.cli_calls import append_to_order, set_up
from tests.conftest import Database
from walstream.config import Settings
from walstream.demo.journal import Begun
from walstream.demo.proof import Proof, prove
from walstream.demo.workers import EFFECTS

SESSION = "11111111-2222-4333-8444-555555555555"

TABLES = """
CREATE TABLE event_counts (session_id text, event_type text, events bigint, last_offset bigint,
                           PRIMARY KEY (session_id, event_type));
CREATE TABLE demo_deliveries (delivery bigserial PRIMARY KEY, event_offset bigint, seq bigint, committed_us bigint,
                              handled_us bigint);
"""
RESTORED = ("demo_deliveries", "demo_effects", "event_counts", "walstream.commit_order")

# Six events; offsets 1 to 6 are seqs 2, 1, 3, 4, 5, 8 (6 and 7 were rolled back).
ORDER = (2, 1, 3, 4, 5, 8)
TYPES = {1: "context.loaded", 2: "tool.invoked", 3: "handoff.emitted", 4: "handoff.received", 5: "t", 8: "t"}


class Shown:
    """A ledger, and projectors that did everything right."""

    def __init__(self, database: Database, folder: Path) -> None:
        self.database = database
        self.file = folder / "events.jsonl"
        self.settings: Settings = set_up(database)
        database.execute(TABLES)
        database.execute(EFFECTS)
        for seq, kind in TYPES.items():
            payload = '{"handoff": 3}' if seq == 4 else f'{{"n": {seq}.50}}'
            database.execute(
                "INSERT INTO agent_events (seq, session_id, agent_id, event_type, payload)"
                " VALUES (%s, %s, 'a', %s, %s)",
                seq,
                SESSION,
                kind,
                payload,
            )
        append_to_order(database, [2], [1, 3])
        append_to_order(database, [4, 5, 8])
        database.execute(
            "INSERT INTO event_counts SELECT session_id, event_type, count(*), 0 FROM agent_events GROUP BY 1, 2"
        )
        database.execute("SELECT walstream.submit_job(%s, 'writer', 3)", SESSION)
        for status in ("DELIVERED", "IN_PROGRESS", "COMPLETED"):
            database.execute(f"UPDATE agent_jobs SET status = '{status}', attempts = 1")
        database.execute("INSERT INTO demo_effects VALUES (1, 3, 1, 'writer', 2, true)")
        for offset, seq in enumerate(ORDER, start=1):
            database.execute(
                "INSERT INTO demo_deliveries (event_offset, seq, committed_us, handled_us) VALUES (%s, %s, %s, %s)",
                offset,
                seq,
                1_000_000 * offset,
                1_000_000 * offset + 1000 * offset,
            )
        self.file.write_text("".join(map(self.line, range(1, 7))))
        for table in RESTORED:
            database.execute(f"CREATE TABLE saved_{table.rpartition('.')[2]} AS TABLE {table}")

    def restore(self) -> None:
        """Undo what was done to the tables."""
        for table in RESTORED:
            self.database.execute(f"TRUNCATE {table}; INSERT INTO {table} TABLE saved_{table.rpartition('.')[2]}")

    def line(self, offset: int) -> str:
        seq = ORDER[offset - 1]
        ((text,),) = self.database.execute("SELECT payload::text FROM agent_events WHERE seq = %s", seq)
        head = {"offset": offset, "seq": seq, "session_id": SESSION, "agent_id": "a", "event_type": TYPES[seq]}
        return json.dumps(head, separators=(",", ":"))[:-1] + f', "payload": {text}}}\n'

    def prove(
        self,
        claimed: int = 6,
        outages: tuple[tuple[str, int, int], ...] = (),
        turns: tuple[Begun, ...] | None = (Begun(3, 1, "writer", 3_010_000), Begun(3, 2, "writer", 3_500_000)),
    ) -> Proof:
        connection = psycopg2.connect(self.database.dsn)
        try:
            return prove(connection, self.settings, self.file, claimed=claimed, turns=turns, outages=outages)
        finally:
            connection.close()


@pytest.fixture
def shown(database: Database, tmp_path: Path) -> Shown:
    return Shown(database, tmp_path)


def test_it_holds_where_everything_is_right(shown: Shown) -> None:
    proof = shown.prove()
    assert proof.holds
    assert proof.as_json() | {"projectors": {}, "undisturbed": {}, "undisturbed_handoffs": {}} == {
        "written": 6,
        "offsets": 6,
        "delivered": 6,
        "lost": 0,
        "duplicated": 0,
        "p50_ms": 3.5,
        "p99_ms": 5.95,
        "max_ms": 6.0,
        "holds": True,
        "claimed": 6,
        "gaps": 0,
        "out_of_order": 0,
        "altered": 0,
        "foreign": 0,
        "late_seqs": 1,
        "sessions": 1,
        "transactions": 1,  # as far as the order tells here: the helper gives all of them one LSN
        "projectors": {},
        "undisturbed": {},
        "handoffs": 1,
        "jobs": 1,
        "jobs_completed": 1,
        "effects": 1,
        "handoffs_received": 1,
        "turns_begun": 2,
        "handoffs_claimed_again": 0,
        "handoff_p50_ms": 10.0,
        "handoff_p99_ms": 10.0,
        "handoff_max_ms": 10.0,
        "undisturbed_handoffs": {},
    }
    assert set(proof.comparisons) == {
        "commit order",
        "delivery log",
        "event counter",
        "file",
        "handoff router",
        "completed jobs",
        "effects of turns",
        "received events",
    }


def test_latency_leaves_nothing_out_and_says_what_it_was_without_the_outages(shown: Shown) -> None:
    proof = shown.prove(outages=(("consumer", 4_500_000, 6_000_000), ("writer", 1, 9_000_000)))
    assert (proof.latency.events, proof.latency.max_ms) == (6, 6.0)
    assert (proof.undisturbed.events, proof.undisturbed.max_ms) == (4, 4.0)


@pytest.mark.parametrize(
    ("outage", "token", "undisturbed"),
    [
        (("consumer", 3_005_000, 4_000_000), 1, 0),
        (("writer", 2_000_000, 3_005_000), 1, 0),
        (("writer", 3_010_001, 4_000_000), 1, 1),  # it had begun
        (("reviewer", 2_000_000, 4_000_000), 1, 1),  # somebody else's
        (("writer", 9_000_000, 9_500_000), 2, 0),  # its worker died before the first line
    ],
)
def test_a_handoff_is_undisturbed_if_it_met_nobody_dead(
    shown: Shown, outage: tuple[str, int, int], token: int, undisturbed: int
) -> None:
    found = shown.prove(outages=(outage,), turns=(Begun(3, token, "writer", 3_010_000),)).handoffs
    assert (found.latency.events, found.latency.max_ms) == (1, 10.0)
    assert found.undisturbed.events == undisturbed


def test_where_nobody_works_only_the_router_is_compared(shown: Shown) -> None:
    shown.database.execute("DELETE FROM demo_effects")
    assert shown.prove(turns=None).holds
    assert shown.prove().holds is False
    shown.database.execute("DELETE FROM agent_jobs")
    assert shown.prove(turns=None).comparisons["handoff router"].lost == 1
    shown.database.execute("INSERT INTO walstream.dead_letters (event_seq, session_id, reason) VALUES (3, 's', 'why')")
    assert shown.prove(turns=None).holds


# (what is done, the comparison that shows it, lost, duplicated, foreign)
TAMPERING = [
    ("DELETE FROM demo_deliveries WHERE seq = 3", "delivery log", 1, 0, 0),
    (
        "INSERT INTO demo_deliveries (event_offset, seq, committed_us, handled_us)"
        " SELECT event_offset, seq, committed_us, handled_us FROM demo_deliveries WHERE seq = 8",
        "delivery log",
        0,
        1,
        0,
    ),
    (
        "INSERT INTO demo_deliveries (event_offset, seq, committed_us, handled_us) VALUES (7, 6, 0, 0)",
        "delivery log",
        0,
        0,
        1,
    ),
    ("UPDATE event_counts SET events = events - 1 WHERE event_type = 't'", "event counter", 1, 0, 0),
    ("UPDATE event_counts SET events = events + 2 WHERE event_type = 't'", "event counter", 0, 2, 0),
    ("DELETE FROM event_counts WHERE event_type = 't'", "event counter", 2, 0, 0),
    ("UPDATE event_counts SET session_id = 'x' WHERE event_type = 't'", "event counter", 2, 0, 2),
    ("DELETE FROM demo_effects", "effects of turns", 1, 0, 0),
    ("INSERT INTO demo_effects VALUES (2, 3, 1, 'writer', 2, true)", "effects of turns", 0, 1, 0),
    ("INSERT INTO demo_effects VALUES (2, 5, 1, 'writer', 2, true)", "effects of turns", 0, 0, 1),
    ("DELETE FROM walstream.commit_order WHERE first_offset = 4", "commit order", 3, 0, 0),
    (
        "INSERT INTO walstream.commit_order SELECT 7, events, last_lsn, partial_inserts, min_seq, max_seq,"
        " recovered, generation, body FROM walstream.commit_order WHERE first_offset = 4",
        "commit order",
        0,
        3,
        0,
    ),
]


def test_what_is_tampered_with_is_counted(shown: Shown) -> None:
    for tampering, name, lost, duplicated, foreign in TAMPERING:
        shown.database.execute(tampering)
        proof = shown.prove()
        shown.restore()
        found = {n: (c.lost, c.duplicated, c.foreign) for n, c in proof.comparisons.items()}
        wrong = {n: counts for n, counts in found.items() if any(counts)}
        assert (tampering, wrong) == (tampering, {name: (lost, duplicated, foreign)})
        assert (proof.lost, proof.duplicated, proof.holds) == (lost, duplicated, False)
    assert shown.prove().holds


def test_what_is_wrong_with_jobs_is_counted(shown: Shown) -> None:
    def wrong() -> dict[str, tuple[int, int, int]]:
        proof = shown.prove()
        assert proof.holds is False
        found = {n: (c.lost, c.duplicated, c.foreign) for n, c in proof.comparisons.items()}
        return {n: counts for n, counts in found.items() if any(counts)}

    shown.database.execute("SELECT walstream.submit_job(%s, 'writer', 5)", SESSION)
    assert wrong() == {"handoff router": (0, 0, 1)}
    shown.database.execute("DELETE FROM agent_jobs WHERE event_seq = 5")
    shown.database.execute("INSERT INTO walstream.dead_letters (event_seq, session_id, reason) VALUES (3, 's', 'why')")
    assert wrong() == {"handoff router": (0, 1, 0)}  # a job, and dead
    shown.database.execute("DELETE FROM agent_jobs")
    assert wrong() == {"completed jobs": (1, 0, 0)}
    shown.database.execute("DELETE FROM walstream.dead_letters")
    assert wrong() == {"handoff router": (1, 0, 0), "completed jobs": (1, 0, 0)}
    shown.database.execute("SELECT walstream.submit_job(%s, 'writer', 3)", SESSION)
    assert wrong() == {"completed jobs": (1, 0, 0)}


def test_lines_that_are_missing_doubled_or_altered_are_counted(shown: Shown) -> None:
    lines = [shown.line(offset) for offset in range(1, 7)]
    shown.file.write_text("".join(lines[:3] + lines[4:]))
    assert (shown.prove().comparisons["file"].lost, shown.prove().lost) == (1, 1)
    shown.file.write_text("".join([*lines, lines[2]]))
    assert (shown.prove().comparisons["file"].duplicated, shown.prove().duplicated) == (1, 1)
    shown.file.write_text("".join([lines[0].replace(".50", ".5"), *lines[1:]]))
    assert (shown.prove().altered, shown.prove().holds) == (1, False)
    shown.file.unlink()
    assert shown.prove().lost == 6


def test_a_gap_a_wrong_order_and_what_agents_miss_are_counted(shown: Shown) -> None:
    assert (shown.prove(claimed=7).lost, shown.prove(claimed=7).holds) == (1, False)
    assert shown.prove(claimed=5).holds is False  # somebody else wrote
    shown.database.execute(
        "INSERT INTO agent_events (seq, session_id, agent_id, event_type, payload)"
        " SELECT 9, session_id, agent_id, 'handoff.received', payload FROM agent_events WHERE seq = 4"
    )
    assert shown.prove(claimed=7).comparisons["received events"].duplicated == 1
    shown.database.execute("UPDATE demo_deliveries SET delivery = delivery + 100 WHERE event_offset = 3")
    assert shown.prove().out_of_order == 1
    shown.database.execute("UPDATE walstream.commit_order SET first_offset = 5 WHERE first_offset = 4")
    assert shown.prove().gaps == 1
