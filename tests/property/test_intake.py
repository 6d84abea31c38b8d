"""Intake's loop for ordinary messages says what its way for all messages says, whatever comes, however it is cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from walstream.config import Columns
from walstream.engine.intake import Burst, Intake, Resume
from walstream.errors import WalstreamError
from walstream.testing import wire
from walstream.testing.scripted import ScriptedMessage

CHUNK = 1500
LEDGER, ELSEWHERE = 1, 2


@dataclass(frozen=True)
class Change:
    kind: str
    size: int = 0

    def message(self, seq: int) -> bytes:
        if self.kind == "insert":
            return wire.event(seq, payload='"' + "x" * self.size + '"', oid=LEDGER)
        if self.kind == "elsewhere":
            return wire.event(seq, oid=ELSEWHERE)
        if self.kind == "truncate":
            return b"T" + (1).to_bytes(4, "big") + b"\0" + LEDGER.to_bytes(4, "big")
        if self.kind == "relation":
            return wire.relation(oid=LEDGER)
        return {"torn": wire.event(seq)[:-3], "empty": b"", "no number": wire.insert("x", "s", "a", "e", "{}", "t")}[
            self.kind
        ]


_ORDINARY = st.builds(Change, st.just("insert"), st.integers(0, 120) | st.integers(0, 2 * CHUNK))
_RARE = st.sampled_from([Change("elsewhere"), Change("truncate"), Change("relation")])
_BROKEN = st.sampled_from([Change("torn"), Change("empty"), Change("no number")])
_TRANSACTIONS = st.lists(
    st.lists(st.one_of(_ORDINARY, _ORDINARY, _ORDINARY, _RARE), max_size=8)
    | st.lists(st.one_of(*[_ORDINARY] * 6, _BROKEN), max_size=8),
    max_size=8,
)
_SLIPS = ("begin twice", "commit alone", "another commit", "a flag", "long begin")


def _messages(transactions: list[list[Change]], slip: str) -> list[ScriptedMessage]:
    made = [(wire.relation(oid=LEDGER), 0), (wire.relation(name="elsewhere", oid=ELSEWHERE), 0)]
    seq = 0
    for number, changes in enumerate(transactions, 1):
        lsn, last = number * 1000, number == len(transactions)
        begin = wire.begin(lsn, xid=number)
        made.append((begin + b"x" if slip == "long begin" and last else begin, lsn - 500))
        if slip == "begin twice" and last:
            made.append((begin, lsn - 500))
        for change in changes:
            seq += 1
            made.append((change.message(seq), lsn - 400 + seq % 300))
        commit = bytearray(wire.commit(lsn + (slip == "another commit" and last), lsn + 30))
        if slip == "a flag" and last:
            commit[1] = 1
        made.append((bytes(commit), lsn))
        if slip == "commit alone" and last:
            made.append((bytes(commit), lsn))
    return [ScriptedMessage(*each) for each in made]


def _by_handle(intake: Intake, messages: Iterator[ScriptedMessage]) -> None:
    for message in messages:
        if not intake.handle(message.payload, message.data_start):
            return


def _outcome(
    messages: list[ScriptedMessage], resume: Resume, rounds: int, consume: Callable[[Intake, Any], None]
) -> tuple[list[object], str]:
    """What is handed on, and how it ends; ``rounds`` messages are there at a time."""
    intake = Intake(
        Columns(), lambda relation: relation.oid == LEDGER, key_prefix="l:1", resume=resume, chunk_bytes=CHUNK
    )
    found: list[object] = []
    left = list(messages)
    try:
        while left:
            before = len(left)
            consume(intake, _arriving(left, rounds))
            assert len(left) < before
            found.append((_plain(intake.take()), intake.passed, intake.in_transaction))
    except WalstreamError as error:
        return [*found, _plain(intake.take()), intake.passed, intake.in_transaction], f"{type(error).__name__}: {error}"
    return found, ""


def _arriving(left: list[ScriptedMessage], count: int) -> Iterator[ScriptedMessage]:
    while left and count:
        count -= 1
        yield left.pop(0)


def _plain(burst: Burst | None) -> object:
    if burst is None:
        return None
    pieces = [((commit.lsn, commit.time_us, commit.xid, commit.key_prefix), *rest) for commit, *rest in burst.pieces]
    return pieces, burst.rows, [repr(each) for each in burst.violations], burst.nbytes, burst.stripped


@settings(max_examples=400)
@given(_TRANSACTIONS, st.just("") | st.sampled_from(_SLIPS), st.integers(0, 5), st.integers(0, 4), st.integers(1, 30))
def test_both_ways_say_the_same(
    transactions: list[list[Change]], slip: str, ordered: int, inserts: int, rounds: int
) -> None:
    resume = Resume(ordered * 1000, inserts if ordered else 0)
    messages = _messages(transactions, slip)
    assert _outcome(messages, resume, rounds, Intake.consume) == _outcome(messages, resume, rounds, _by_handle)


@pytest.mark.parametrize("slip", _SLIPS)
def test_a_slip_is_refused_in_the_same_words(slip: str) -> None:
    messages = _messages([[Change("insert")], [Change("insert")]], slip)
    found, error = _outcome(messages, Resume(), 30, Intake.consume)
    assert (found, error) == _outcome(messages, Resume(), 30, _by_handle)
    assert error.startswith("DecodeError: ")
