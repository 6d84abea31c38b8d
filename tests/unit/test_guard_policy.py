"""The guard's policy, as a table from facts to states, and as a rule: worse facts never give a better state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from walstream.config import DropRule, GuardSettings, MiB
from walstream.guard.dropping import due
from walstream.guard.policy import (
    BRIEF,
    CAUSES,
    NOTICEABLE,
    SETTLED,
    UNSEEN,
    OpenTransaction,
    SlotReading,
    State,
    judge,
)

GiB = 1024 * MiB
LIMITS = GuardSettings()

WELL = SlotReading(
    "s",
    database="app",
    active=True,
    holder="pid 1",
    wal_status="reserved",
    retained=10 * MiB,
    behind=1 * MiB,
    safe=10 * GiB,
    bound=10 * GiB,
    wal_rate=1.0 * MiB,
    growth=0.0,
)
OLD = OpenTransaction("pid 7 in database app by me", "SELECT pg_terminate_backend(7)", 600.0, prepared=False)
YOUNG = replace(OLD, seconds=SETTLED - 1)
PREPARED = OpenTransaction("prepared transaction 'g'", "ROLLBACK PREPARED 'g'", 600.0, prepared=True)


def slot(**facts: Any) -> SlotReading:
    return replace(WELL, **facts)


@pytest.mark.parametrize(
    ("facts", "state", "cause"),
    [
        ({}, State.OK, None),
        ({"wal_status": "extended"}, State.OK, None),
        ({"exists": False}, State.LOST, "slot_missing"),
        ({"wal_status": "lost"}, State.LOST, "slot_lost"),
        ({"invalidation": "idle_timeout"}, State.LOST, "slot_lost"),
        ({"retained": None}, State.LOST, "slot_lost"),
        ({"behind": None}, State.CRITICAL, "half_made"),
        ({"safe": None}, State.CRITICAL, "ingest_behind"),
        ({"wal_status": "unreserved"}, State.CRITICAL, "ingest_behind"),
        ({"wal_status": ""}, State.CRITICAL, "ingest_behind"),
        # Nobody reads it.
        ({"active": False, "inactive_seconds": BRIEF - 1}, State.OK, None),
        ({"active": False, "inactive_seconds": BRIEF}, State.WARN, "nobody_connected"),
        ({"active": False}, State.WARN, "nobody_connected"),
        ({"active": False, "wal_rate": 10.0 * GiB / 1800}, State.CRITICAL, "nobody_connected"),
        (
            {"active": False, "retained": 8 * GiB, "behind": 8 * GiB, "safe": 2 * GiB},
            State.CRITICAL,
            "nobody_connected",
        ),
        ({"active": False, "inactive_seconds": 10.0, "idle_timeout": 86400.0}, State.OK, None),
        ({"active": False, "inactive_seconds": 80000.0, "idle_timeout": 86400.0}, State.WARN, "nobody_connected"),
        ({"active": False, "inactive_seconds": 86000.0, "idle_timeout": 86400.0}, State.CRITICAL, "nobody_connected"),
        ({"active": False, "idle_timeout": 86400.0}, State.CRITICAL, "nobody_connected"),
        ({"idle_timeout": 86400.0}, State.OK, None),
        # Ingest does not keep up. What counts is whether it falls back, not how fast the WAL grows.
        ({"retained": 1 * GiB, "behind": 1 * GiB, "safe": 9 * GiB, "wal_rate": 100.0 * MiB}, State.OK, None),
        ({"retained": 1 * GiB, "behind": 1 * GiB, "safe": 9 * GiB, "growth": -5.0 * MiB}, State.OK, None),
        (
            {"retained": 1 * GiB, "behind": 1 * GiB, "safe": 9 * GiB, "growth": 1.0 * MiB},
            State.WARN,
            "ingest_behind",
        ),
        (
            {"retained": 1 * GiB, "behind": 1 * GiB, "safe": 9 * GiB, "growth": 9.0 * MiB},
            State.CRITICAL,
            "ingest_behind",
        ),
        ({"retained": 5 * GiB, "behind": 5 * GiB, "safe": 5 * GiB}, State.WARN, "ingest_behind"),
        ({"retained": 8 * GiB, "behind": 8 * GiB, "safe": 2 * GiB}, State.CRITICAL, "ingest_behind"),
        # It waits for a standby, from 17 on: connected, and nothing comes.
        ({"awaited": ("standby",)}, State.WARN, "standby_awaited"),
        ({"awaited": ("standby",), "wal_rate": 10.0 * GiB / 1800}, State.CRITICAL, "standby_awaited"),
        # A transaction holds restart_lsn.
        ({"retained": 1 * GiB, "safe": 9 * GiB, "transaction": OLD, "wal_rate": 0.0}, State.WARN, "long_transaction"),
        ({"retained": 1 * GiB, "safe": 9 * GiB, "transaction": PREPARED}, State.WARN, "long_transaction"),
        ({"retained": 9 * GiB, "safe": 1 * GiB, "transaction": PREPARED}, State.CRITICAL, "long_transaction"),
        (
            {"retained": 1 * GiB, "safe": 9 * GiB, "transaction": OLD, "wal_rate": 10.0 * MiB},
            State.CRITICAL,
            "long_transaction",
        ),
        (
            {"retained": 1 * GiB, "safe": 9 * GiB, "transaction": replace(OLD, seconds=None), "wal_rate": 0.0},
            State.WARN,
            "long_transaction",
        ),
        ({"retained": NOTICEABLE, "transaction": OLD, "wal_rate": 0.0}, State.OK, None),
        # The server's own steps under load, with transactions that come and go, are no alarm before there is much.
        ({"retained": 1 * GiB, "safe": 9 * GiB, "transaction": YOUNG, "wal_rate": 90.0 * MiB}, State.OK, None),
        ({"retained": 9 * GiB, "safe": 1 * GiB, "transaction": YOUNG}, State.CRITICAL, "restart_held"),
        ({"retained": 6 * GiB, "safe": 4 * GiB}, State.WARN, "restart_held"),
        # No bound: what is in danger is the disk.
        ({"bound": None, "safe": None, "free_disk": 100 * GiB}, State.WARN, "bound_missing"),
        ({"bound": None, "safe": None}, State.WARN, "bound_missing"),
        (
            {"bound": None, "safe": None, "retained": 9 * GiB, "behind": 9 * GiB, "free_disk": 1 * GiB},
            State.CRITICAL,
            "ingest_behind",
        ),
        ({"bound": None, "safe": None, "retained": UNSEEN, "behind": UNSEEN}, State.CRITICAL, "ingest_behind"),
        # A bound that the disk does not have.
        ({"free_disk": 1 * MiB}, State.CRITICAL, "ingest_behind"),
        ({"free_disk": 0}, State.CRITICAL, "ingest_behind"),
    ],
)
def test_facts_and_states(facts: dict[str, Any], state: State, cause: str | None) -> None:
    verdict = judge(slot(**facts), LIMITS)
    assert (verdict.state, verdict.findings[0].cause if verdict.findings else None) == (state, cause)
    for finding in verdict.findings:
        assert finding.cause in CAUSES
        assert finding.remedy
        assert "None" not in finding.found


def test_a_server_without_a_bound_may_be_accepted() -> None:
    unbounded = slot(bound=None, safe=None, free_disk=100 * GiB)
    assert judge(unbounded, LIMITS, allow_unbounded=True).state is State.OK
    away = replace(unbounded, active=False, free_disk=None, retained=UNSEEN, behind=UNSEEN)
    assert judge(away, LIMITS, allow_unbounded=True).state is State.CRITICAL


@pytest.mark.parametrize(
    "facts",
    [
        {"wal_status": "lost"},
        {"active": False},
        {"retained": 8 * GiB, "behind": 8 * GiB, "safe": 2 * GiB},
    ],
)
def test_what_to_do_about_somebody_elses_slot_names_no_command_of_ours(facts: dict[str, Any]) -> None:
    assert "walstream" in judge(slot(**facts), LIMITS).findings[0].remedy
    (finding, *_) = judge(slot(**facts, ours=False), LIMITS).findings
    assert "walstream" not in finding.remedy + finding.found


def test_two_causes_are_both_named_and_the_greater_one_first() -> None:
    both = slot(retained=3 * GiB, behind=2 * GiB, safe=7 * GiB, active=False, transaction=OLD, wal_rate=0.0)
    assert {finding.cause for finding in judge(both, LIMITS).findings} == {"nobody_connected", "long_transaction"}
    held = slot(retained=9 * GiB, behind=2 * GiB, safe=1 * GiB, transaction=PREPARED)
    (first, *_) = judge(held, LIMITS).findings
    assert (first.cause, first.remedy) == ("long_transaction", "if it is forgotten: ROLLBACK PREPARED 'g'")
    assert "prepared transaction" in first.found
    assert "7.0 GB" in first.found


@pytest.mark.parametrize(
    ("facts", "seconds"),
    [
        ({"active": False, "wal_rate": 1.0 * MiB}, 10240.0),
        ({"active": False, "wal_rate": 1.0 * MiB, "free_disk": 1 * GiB}, 1024.0),
        ({"active": False, "wal_rate": 1.0 * MiB, "inactive_seconds": 100.0, "idle_timeout": 3600.0}, 3500.0),
        ({"active": False, "wal_rate": 0.0}, None),
        ({"active": False, "wal_rate": None}, None),
        ({"behind": 1 * GiB, "retained": 1 * GiB, "growth": 2.0 * MiB}, 5120.0),
        ({"behind": 1 * GiB, "retained": 1 * GiB, "growth": -2.0 * MiB}, None),
        ({"retained": 1 * GiB, "transaction": OLD, "wal_rate": 2.0 * MiB}, 5120.0),
        ({"wal_rate": 100.0 * MiB}, None),
    ],
)
def test_the_forecast(facts: dict[str, Any], seconds: float | None) -> None:
    assert judge(slot(**facts), LIMITS).forecast == seconds


SIZES = st.integers(0, 20 * GiB)
TRANSACTIONS = st.none() | st.builds(
    OpenTransaction, st.just("pid 7"), st.just("end it"), st.none() | st.floats(0, 1e5), st.booleans()
)


@st.composite
def slots(draw: Callable[[st.SearchStrategy[Any]], Any]) -> SlotReading:
    active = draw(st.booleans())
    behind = draw(SIZES)
    bound = draw(st.none() | st.integers(1, 20 * GiB))
    rate = draw(st.floats(0, 1e9))
    return SlotReading(
        "s",
        active=active,
        wal_status=draw(st.sampled_from(["reserved", "extended", "unreserved"])),
        retained=behind + draw(SIZES),
        behind=behind,
        safe=None if bound is None else draw(SIZES),
        bound=bound,
        free_disk=draw(st.none() | SIZES),
        inactive_seconds=None if active else draw(st.none() | st.floats(0, 1e5)),
        idle_timeout=draw(st.sampled_from([0.0, 3600.0, 86400.0])),
        wal_rate=rate,
        growth=draw(st.floats(-1e9, rate)),
        transaction=draw(TRANSACTIONS),
    )


def _older(reading: SlotReading, amount: int) -> SlotReading:
    found = reading.transaction
    if found is None or found.seconds is None:
        return reading
    return replace(reading, transaction=replace(found, seconds=found.seconds + amount / MiB))


def _shrunk(limit: int | None, amount: int) -> int | None:
    return None if limit is None else max(0, limit - amount)


WORSE: dict[str, Callable[[SlotReading, int], SlotReading]] = {
    "further behind": lambda r, n: replace(r, retained=(r.retained or 0) + n, behind=(r.behind or 0) + n),
    "more held": lambda r, n: replace(r, retained=(r.retained or 0) + n),
    "less room": lambda r, n: replace(r, safe=_shrunk(r.safe, n)),
    "less disk": lambda r, n: replace(r, free_disk=_shrunk(r.free_disk, n)),
    "more WAL": lambda r, n: replace(r, wal_rate=(r.wal_rate or 0.0) + n, growth=(r.growth or 0.0) + n),
    "falls back faster": lambda r, n: replace(r, growth=min(r.wal_rate or 0.0, (r.growth or 0.0) + n)),
    "nobody reads": lambda r, n: replace(r, active=False, inactive_seconds=r.inactive_seconds or float(n)),
    "longer alone": lambda r, n: replace(
        r, inactive_seconds=None if r.inactive_seconds is None else r.inactive_seconds + n / MiB
    ),
    "nobody knows since when": lambda r, _: replace(r, inactive_seconds=None),
    "an older transaction": _older,
    "a transaction of unknown age": lambda r, _: replace(
        r, transaction=OpenTransaction("pid 7", "end it", None, prepared=False)
    ),
    "a standby is awaited": lambda r, _: replace(r, awaited=("standby",)),
    "unreserved": lambda r, _: replace(r, wal_status="unreserved"),
    "no status": lambda r, _: replace(r, wal_status=""),
    "lost": lambda r, _: replace(r, wal_status="lost"),
    "invalidated": lambda r, _: replace(r, invalidation="wal_removed"),
    "gone": lambda r, _: replace(r, exists=False),
    "restart_lsn is NULL": lambda r, _: replace(r, retained=None),
    "confirmed_flush_lsn is NULL": lambda r, _: replace(r, behind=None),
    "safe_wal_size is NULL": lambda r, _: replace(r, safe=None),
}


@given(reading=slots(), worse=st.sampled_from(sorted(WORSE)), amount=st.integers(0, 10 * GiB), allowed=st.booleans())
def test_worse_facts_never_give_a_better_state(reading: SlotReading, worse: str, amount: int, allowed: bool) -> None:
    before = judge(reading, LIMITS, allow_unbounded=allowed)
    after = judge(WORSE[worse](reading, amount), LIMITS, allow_unbounded=allowed)
    assert after.state >= before.state
    assert (after.state is State.OK) == (not after.findings)


@pytest.mark.parametrize(
    ("rule", "facts", "wanted"),
    [
        (None, {"retained": 20 * GiB}, False),
        ({"slot": "s", "above": "10GB"}, {"retained": 10 * GiB + 1}, True),
        ({"slot": "s", "above": "10GB"}, {"retained": 10 * GiB}, False),
        ({"slot": "other", "above": "10GB"}, {"retained": 20 * GiB}, False),
        ({"slot": "s", "above": "10GB"}, {"retained": None}, False),
        ({"slot": "s", "above": "10GB"}, {"retained": 20 * GiB, "exists": False}, False),
    ],
)
def test_a_slot_is_only_due_to_be_dropped_by_its_name_and_above_its_bound(
    rule: dict[str, str] | None, facts: dict[str, Any], wanted: bool
) -> None:
    assert due(None if rule is None else DropRule.model_validate(rule), slot(**facts)) is wanted
