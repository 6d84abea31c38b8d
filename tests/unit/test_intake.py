"""Intake: messages in, bursts out."""

from __future__ import annotations

import pytest

from walstream.config import Columns
from walstream.engine.intake import Burst, Intake, Resume
from walstream.errors import DecodeError, LedgerError
from walstream.protocol.messages import Relation
from walstream.testing import wire

FRESH = Resume()


def intake(*, resume: Resume = FRESH, chunk: int = 1 << 20) -> Intake:
    def is_ledger(relation: Relation) -> bool:
        return relation.name == "agent_events"

    return Intake(Columns(), is_ledger, key_prefix="l:1", resume=resume, chunk_bytes=chunk)


def play(target: Intake, *messages: bytes) -> list[Burst]:
    bursts = []
    for message in messages:
        if not target.handle(message, 7):
            burst = target.take()
            assert burst is not None
            bursts.append(burst)
    last = target.take()
    return [*bursts, *([last] if last is not None else [])]


def test_a_transaction_becomes_one_piece() -> None:
    target = intake()
    (burst,) = play(
        target, wire.begin(100, xid=5), wire.relation(), wire.event(1), wire.event(2), wire.commit(100, 130)
    )
    ((commit, rows, end, inserts),) = burst.pieces
    assert (commit.lsn, commit.xid, rows, end, inserts) == (100, 5, 2, 130, 2)
    assert [row[0] for row in burst.rows] == [1, 2]
    assert target.passed == 130


def test_an_open_transaction_is_kept_back() -> None:
    target = intake()
    play(target, wire.begin(100), wire.relation(), wire.event(1), wire.commit(100, 130))
    assert play(target, wire.begin(200), wire.event(2)) == []
    assert target.in_transaction
    (burst,) = play(target, wire.commit(200, 230))
    assert [row[0] for row in burst.rows] == [2]


def test_an_open_transaction_behind_a_complete_one_is_kept_back() -> None:
    target = intake()
    (burst,) = play(
        target,
        wire.begin(100),
        wire.relation(),
        wire.event(1),
        wire.commit(100, 130),
        wire.begin(200),
        wire.event(2),
    )
    assert [row[0] for row in burst.rows] == [1]
    (burst,) = play(target, wire.event(3), wire.commit(200, 230))
    assert [row[0] for row in burst.rows] == [2, 3]
    assert [piece[1:] for piece in burst.pieces] == [(2, 230, 2)]


def test_empty_transactions_leave_nothing_but_move_the_position() -> None:
    target = intake()
    assert play(target, wire.begin(100), wire.commit(100, 130)) == []
    assert target.passed == 130


def test_a_large_transaction_comes_in_pieces_that_say_how_far_they_got() -> None:
    target = intake(chunk=300)
    bursts = play(
        target, wire.begin(100), wire.relation(), *(wire.event(n) for n in range(1, 8)), wire.commit(100, 130)
    )
    pieces = [piece for burst in bursts for piece in burst.pieces]
    assert len(pieces) > 2
    assert [end for _, _, end, _ in pieces] == [0] * (len(pieces) - 1) + [130]
    done = 0
    for _, rows, _, inserts in pieces:
        done += rows
        assert inserts == done
    assert [row[0] for burst in bursts for row in burst.rows] == list(range(1, 8))


@pytest.mark.parametrize("done", range(8))
def test_a_resend_skips_exactly_what_is_ordered(done: int) -> None:
    """Rule 5: the order ends inside the commit at 100, after `done` of its inserts."""
    target = intake(resume=Resume(100, done))
    bursts = play(
        target,
        wire.begin(50),
        wire.relation(),
        wire.event(99),
        wire.commit(50, 80),
        wire.begin(100),
        *(wire.event(n) for n in range(1, 8)),
        wire.commit(100, 130),
    )
    assert [row[0] for burst in bursts for row in burst.rows] == list(range(done + 1, 8))
    assert [(rows, end, inserts) for burst in bursts for _, rows, end, inserts in burst.pieces] == [(7 - done, 130, 7)]


def test_a_commit_record_may_start_where_the_last_one_ended() -> None:
    target = intake(resume=Resume(130, 0))
    (burst,) = play(
        target,
        wire.begin(100),
        wire.relation(),
        wire.event(1),
        wire.commit(100, 130),
        wire.begin(130),
        wire.event(2),
        wire.commit(130, 160),
    )
    assert [row[0] for row in burst.rows] == [2]


def test_a_very_large_payload_is_not_kept() -> None:
    target = intake(chunk=1000)
    bursts = play(
        target, wire.begin(100), wire.relation(), wire.event(1, payload='"' + "x" * 5000 + '"'), wire.commit(100, 130)
    )
    assert list(bursts[0].stripped) == [0]
    assert 5002 < bursts[0].stripped[0] < 5200
    assert bursts[0].rows[0][4] == b""


def test_inserts_elsewhere_are_no_events() -> None:
    target = intake()
    (burst,) = play(
        target,
        wire.begin(100),
        wire.relation(2, name="other"),
        wire.event(9, oid=2),
        wire.relation(),
        wire.event(1),
        wire.commit(100, 130),
    )
    assert [row[0] for row in burst.rows] == [1]


def test_a_column_added_in_the_middle_reaches_the_event_as_an_extra() -> None:
    target = intake()
    (burst,) = play(
        target,
        wire.begin(100),
        wire.relation(),
        wire.event(1),
        wire.relation(columns=(*wire.LEDGER_COLUMNS, ("trace_id", 25))),
        wire.insert("2", "s", "a", "e", "{}", "2026-01-01 00:00:00+00", "t-1"),
        wire.commit(100, 130),
    )
    assert burst.rows[0][6] is None
    assert burst.rows[1][6] == (("trace_id",), (b"t-1",))


def test_a_column_that_is_gone_stops_before_anything_is_delivered() -> None:
    target = intake()
    columns = [column for column in wire.LEDGER_COLUMNS if column[0] != "agent_id"]
    target.handle(wire.begin(100), 7)
    with pytest.raises(LedgerError, match=r"agent_id.*0/7") as caught:
        target.handle(wire.relation(columns=columns), 7)
    assert "ledger.columns" in caught.value.hint


@pytest.mark.parametrize(
    ("messages", "kind", "seq"),
    [
        ((b"T\x00\x00\x00\x01\x02\x00\x00\x00\x01",), "truncate", None),
        ((b"D\x00\x00\x00\x01K\x00\x06t\x00\x00\x00\x0242nnnnn",), "delete", 42),
        (
            (b"U\x00\x00\x00\x01N\x00\x06t\x00\x00\x00\x0242nnn" + b"u" + b"n",),
            "update",
            42,
        ),
    ],
)
def test_what_is_no_insert_is_a_violation(messages: tuple[bytes, ...], kind: str, seq: int | None) -> None:
    target = intake()
    (burst,) = play(target, wire.begin(100, xid=5), wire.relation(), *messages, wire.commit(100, 130))
    (violation,) = burst.violations
    assert (violation.kind, violation.seq, violation.commit_lsn, violation.xid) == (kind, seq, 100, 5)
    assert burst.rows == []


@pytest.mark.parametrize(
    "messages",
    [
        (wire.begin(1), wire.begin(2)),
        (wire.commit(1, 2),),
        (wire.begin(1), wire.commit(2, 3)),
        (wire.begin(1), wire.event(1)),
        (b"",),
        (b"\xff",),
        (wire.begin(1), wire.relation(), wire.event(1)[:-1]),
    ],
)
def test_nonsense_is_refused(messages: tuple[bytes, ...]) -> None:
    target = intake()
    with pytest.raises(DecodeError):
        play(target, *messages)
