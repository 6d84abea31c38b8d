"""What is told of changes of an append-only ledger, one by one and many at once."""

from __future__ import annotations

import struct
from collections.abc import Iterable

import pytest

from tests.unit.test_intake import intake, play
from walstream.engine.intake import Burst, Resume
from walstream.engine.violations import ONE_BY_ONE, STRETCH, Violation, ranges_of, without_declared
from walstream.event import ERASED_PAYLOAD
from walstream.testing import wire

UNCHANGED = object()


def values(*texts: object) -> bytes:
    """A tuple; ``None`` is NULL (or not part of the key), :data:`UNCHANGED` a TOASTed value that was not touched."""
    parts = [struct.pack(">H", len(texts))]
    for text in texts:
        if text is None:
            parts.append(b"n")
        elif text is UNCHANGED:
            parts.append(b"u")
        else:
            raw = str(text).encode()
            parts += [b"t", struct.pack(">I", len(raw)), raw]
    return b"".join(parts)


def update(new: bytes, *, old: bytes = b"", key: bytes = b"") -> bytes:
    before = b"O" + old if old else b"K" + key if key else b""
    return b"U" + struct.pack(">I", 1) + before + b"N" + new


def delete(old: bytes = b"", *, key: bytes = b"") -> bytes:
    return b"D" + struct.pack(">I", 1) + (b"O" + old if old else b"K" + key)


def truncate(*oids: int, flags: int = 0) -> bytes:
    return b"T" + struct.pack(">IB", len(oids), flags) + b"".join(struct.pack(">I", oid) for oid in oids)


def full_identity() -> bytes:
    """The ledger with REPLICA IDENTITY FULL: every column is part of its key."""
    relation = bytearray(wire.relation())
    at = relation.index(b"agent_events\0") + len(b"agent_events\0")
    relation[at : at + 1] = b"f"
    for name, _ in wire.LEDGER_COLUMNS[1:]:
        relation[relation.index(b"\0" + name.encode() + b"\0")] = 1
    return bytes(relation)


def told(*messages: bytes, relation: bytes | None = None) -> list[Violation]:
    """The violations of one transaction."""
    relation = wire.relation() if relation is None else relation
    (burst,) = play(intake(), wire.begin(100, time_us=77, xid=5), relation, *messages, wire.commit(100, 130))
    return burst.violations


def test_an_update_tells_its_row_and_leaves_out_what_was_not_sent() -> None:
    row = values(42, "s", "a", "e", UNCHANGED, None)
    (found,) = told(update(row))
    assert (found.kind, found.seq, found.keys, found.old_keys) == ("update", 42, {"seq": "42"}, None)
    assert (found.time_us, found.xid, found.declarable) == (77, 5, False)


def test_only_what_an_erasure_leaves_of_a_payload_can_be_declared() -> None:
    """Whoever may declare could put anything in its place otherwise."""
    erased = ERASED_PAYLOAD.decode()
    rows = [values(42, "s", "a", "e", payload, None) for payload in (erased, '{"forged": 1}', UNCHANGED)]
    assert [each.declarable for each in told(*map(update, rows))] == [True, False, False]
    old = values(42, "s", "a", "e", "{}", None)
    also = values(42, "s", "somebody else", "e", erased, None)
    found = told(update(rows[0], old=old), update(also, old=old), relation=full_identity())
    assert [each.declarable for each in found] == [True, False]


def test_stretches_keep_apart_what_can_be_declared() -> None:
    erased, forged = (values(1, "s", "a", "e", payload, None) for payload in (ERASED_PAYLOAD.decode(), "{}"))
    several = [update(row) for _ in range(ONE_BY_ONE // 2 + 3) for row in (erased, forged)]
    stretches = [each for each in told(*several) if each.seqs is not None]
    assert [(each.changes, each.declarable) for each in stretches] == [(3, True), (3, False)]
    assert len({each.ordinal for each in stretches}) == 2


def test_a_key_that_was_changed_is_told_as_it_was_and_as_it_is() -> None:
    (found,) = told(update(values(43, "s", "a", "e", "{}", None), key=values(42, None, None, None, None, None)))
    assert (found.seq, found.keys, found.old_keys) == (42, {"seq": "43"}, {"seq": "42"})
    assert not found.declarable  # an erasure declares a row that stays under its seq, or goes


def test_with_the_whole_old_row_the_changed_columns_are_named() -> None:
    old = values(42, "s", "a", "e", "{}", "2026-01-01")
    (found,) = told(update(values(42, "s", "b", "e", UNCHANGED, None), old=old), relation=full_identity())
    assert found.detail == "UPDATE public.agent_events: agent_id, created_at"
    whole = {"seq": "42", "session_id": "s", "agent_id": "b", "event_type": "e", "created_at": None}
    assert found.keys == whole
    assert found.old_keys == {**whole, "agent_id": "a", "created_at": "2026-01-01"}


def test_an_unchanged_value_is_never_null() -> None:
    """C14: an identity with a TOASTed column that the UPDATE did not touch."""
    old = values(42, "s", "a" * 3000, "e", "{}", None)
    (found,) = told(update(values(42, "s", UNCHANGED, "x", "{}", None), old=old), relation=full_identity())
    assert found.keys is not None
    assert "agent_id" not in found.keys
    assert found.old_keys is not None
    assert found.old_keys["agent_id"] == "a" * 200 + "…"
    assert found.detail.endswith(": event_type")


def test_of_a_key_tuple_only_the_key_is_real() -> None:
    """C14: ``n`` in a K tuple is no NULL."""
    (found,) = told(delete(key=values(42, None, None, None, None, None)))
    assert (found.kind, found.seq, found.old_keys, found.keys) == ("delete", 42, {"seq": "42"}, None)


def test_a_row_that_is_told_by_another_key_has_no_seq() -> None:
    relation = bytearray(wire.relation())
    relation[relation.index(b"\x01seq\0")] = 0
    relation[relation.index(b"\0agent_id\0")] = 1
    (found,) = told(delete(key=values(None, None, "a", None, None, None)), relation=bytes(relation))
    assert (found.seq, found.old_keys, found.declarable) == (None, {"agent_id": "a"}, False)


def test_a_truncate_is_told_for_each_part_of_the_ledger() -> None:
    leaf = wire.relation(oid=3)
    other = wire.relation(oid=2, name="elsewhere")
    messages = (wire.relation(), leaf, other, truncate(1, 2, 3, flags=2))
    (burst,) = play(intake(), wire.begin(100), *messages, wire.commit(100, 130))
    assert [(each.kind, each.ordinal, each.seq) for each in burst.violations] == [
        ("truncate", 1, None),
        ("truncate", 2, None),
    ]
    assert burst.violations[0].detail == "TRUNCATE public.agent_events, RESTART IDENTITY"


def test_changes_of_other_tables_are_nothing() -> None:
    other = wire.relation(name="elsewhere")
    row = values(42, "s", "a", "e", "{}", None)
    target = intake()
    assert play(target, wire.begin(100), other, update(row), delete(row), truncate(1), wire.commit(100, 130)) == []
    assert target.passed == 130


def test_a_row_changed_and_deleted_in_the_transaction_that_inserted_it() -> None:
    row = values(42, "s", "a", "e", "{}", None)
    (burst,) = play(
        intake(),
        wire.begin(100),
        wire.relation(),
        wire.event(42),
        update(row),
        delete(key=values(42, None, None, None, None, None)),
        wire.commit(100, 130),
    )
    assert [row[0] for row in burst.rows] == [42]
    assert [(each.kind, each.seq) for each in burst.violations] == [("update", 42), ("delete", 42)]
    assert [(rows, end) for _, rows, end, _ in burst.pieces] == [(1, 130)]


def test_a_transaction_of_changes_alone_is_a_piece_without_rows() -> None:
    """So that it waits until it is visible (rule 2), and is confirmed behind what was recorded (rule 3)."""
    (burst,) = play(
        intake(),
        wire.begin(100, xid=9),
        wire.relation(),
        delete(key=values(1, None, None, None, None, None)),
        wire.commit(100, 130),
    )
    ((commit, rows, end, inserts),) = burst.pieces
    assert (commit.xid, rows, end, inserts) == (9, 0, 130, 0)


def test_changes_of_an_open_transaction_are_kept_back() -> None:
    target = intake()
    gone = delete(key=values(1, None, None, None, None, None))
    (burst,) = play(
        target, wire.begin(100), wire.relation(), wire.event(1), wire.commit(100, 130), wire.begin(200), gone
    )
    assert burst.violations == []
    (burst,) = play(target, gone, wire.commit(200, 230))
    assert [(each.commit_lsn, each.ordinal) for each in burst.violations] == [(200, 1), (200, 2)]


def flood(count: int, chunk: int, resume: Resume) -> list[Burst]:
    updates = [update(values(seq, "s", "a", "e", "{}", None)) for seq in range(1, count + 1)]
    target = intake(chunk=chunk, resume=resume)
    return play(target, wire.begin(100), wire.relation(), *updates, wire.commit(100, 130))


def all_of(bursts: Iterable[Burst]) -> list[Violation]:
    return [violation for burst in bursts for violation in burst.violations]


@pytest.mark.parametrize("extra", [1, STRETCH, STRETCH + 1, 2 * STRETCH + 7])
def test_many_changes_are_told_in_stretches_that_a_resend_repeats(extra: int) -> None:
    count = ONE_BY_ONE + extra
    once, again = all_of(flood(count, 1 << 30, Resume())), all_of(flood(count, 20_000, Resume(100, 3)))
    assert once == again
    assert len({each.ordinal for each in once}) == len(once) == ONE_BY_ONE + -(-extra // STRETCH)
    assert sum(each.changes for each in once) == count
    assert [seq for each in once for seq in (each.seqs or (each.seq,))] == list(range(1, count + 1))


@pytest.mark.parametrize("rows", [130_000, pytest.param(300_000, marks=pytest.mark.slow)])
def test_memory_is_bounded_while_somebody_changes_many_rows(rows: int) -> None:
    bursts = flood(rows, 100_000, Resume())
    assert len(bursts) > 10
    assert max(burst.nbytes for burst in bursts) < 400_000
    assert [piece[2] for burst in bursts for piece in burst.pieces][-2:] == [0, 130]


def test_what_an_erasure_declares_is_taken_out() -> None:
    row = Violation("delete", 100, 1, 7, 5, "", declarable=True)
    assert without_declared(row, {(5, 7)}) is None
    assert without_declared(row, {(6, 7), (5, 8)}) is row  # by another transaction; another row
    stretch = Violation("update", 100, 1001, None, 5, "", changes=4, seqs=[1, 2, 3], declarable=True)
    left = without_declared(stretch, {(5, 1), (5, 3)})
    assert left is not None
    assert (list(left.seqs or ()), left.changes, left.ordinal) == ([2], 2, 1001)  # the fourth one has no seq
    assert without_declared(stretch, {(5, 1), (5, 2), (5, 3)}) is not None
    moved = Violation("update", 100, 1, 7, 5, "")
    assert without_declared(moved, {(5, 7)}) is moved


def test_seqs_as_ranges() -> None:
    assert ranges_of([5, 1, 2, 3, 3, 9, 10]) == [[1, 3], [5, 5], [9, 10]]
    assert ranges_of([]) == []
