"""Every message that real servers of every major sent: decoded as it should be, refused when damaged."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from walstream.errors import DecodeError
from walstream.protocol import messages as m
from walstream.protocol.decoder import Decoder
from walstream.protocol.ledger_row import decode_begin, decode_commit

from .scenario import Scenario
from .scenarios import SCENARIOS
from .vectors import MAJORS, Capture, load, load_all, outline, render

CAPTURES = load_all()
BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}

each_capture = pytest.mark.parametrize("capture", CAPTURES, ids=lambda c: f"{c.major}-{c.scenario}")


@pytest.mark.parametrize("major", MAJORS)
def test_every_scenario_that_the_major_can_do_was_captured(major: int) -> None:
    assert [c.scenario for c in load(major)] == [s.name for s in SCENARIOS if s.since <= major]


def test_every_kind_of_message_was_captured() -> None:
    assert {m_.TAG for c in CAPTURES for _, m_ in c.decoded()} == set("BCORYIUDTMSEcAbPKrp")


@each_capture
def test_vectors_decode_to_what_is_expected(capture: Capture) -> None:
    for vector, message in capture.decoded():
        assert render(message) == vector.expected


@each_capture
def test_the_stream_says_what_the_sql_did(capture: Capture) -> None:
    """Against what was written by hand, so that a vector captured with a wrong decoder would not pass."""
    assert_says(capture, BY_NAME[capture.scenario])


def assert_says(capture: Capture, scenario: Scenario) -> None:
    lines = _without_empty(outline(message for _, message in capture.decoded()))
    if scenario.letters:
        assert re.fullmatch(scenario.letters, "".join(line[0] for line in lines))
    else:
        assert lines == list(scenario.says)


def _without_empty(lines: list[str]) -> list[str]:
    """PostgreSQL 14 sends transactions that changed nothing of the publication."""
    out: list[str] = []
    for line in lines:
        if line == "C" and out and out[-1] == "B":
            out.pop()
        else:
            out.append(line)
    return out


@each_capture
def test_positions_and_xids_agree_with_what_the_server_said_beside_the_message(capture: Capture) -> None:
    begin: m.Begin | None = None
    for vector, message in capture.decoded():
        match message:
            case m.Begin():
                begin = message
                assert message.xid == vector.xid
                assert decode_begin(vector.payload) == (message.final_lsn, message.commit_time_us, message.xid)
            case m.Commit():
                assert begin is not None
                assert message.commit_lsn == begin.final_lsn
                assert message.end_lsn == vector.lsn > message.commit_lsn
                assert message.commit_time_us == begin.commit_time_us
                assert decode_commit(vector.payload) == (message.commit_lsn, message.end_lsn, message.commit_time_us)
            case m.StreamCommit() | m.BeginPrepare() | m.Prepare() | m.StreamPrepare() | m.CommitPrepared():
                assert message.xid == vector.xid
            case m.StreamStart() | m.RollbackPrepared():
                assert message.xid == vector.xid
            case m.StreamAbort():
                assert message.sub_xid == vector.xid
            case m.Relation(oid=oid):
                assert message.name in {capture.tables[oid], "agent_events_old"}


@each_capture
def test_commit_times_are_of_the_day_of_the_capture(capture: Capture) -> None:
    """Microseconds since 2000 (C16); 0, unknown, where the transaction has an origin (C11)."""
    transaction: list[m.Message] = []
    for _, message in capture.decoded():
        transaction.append(message)
        if not isinstance(message, m.Commit | m.StreamCommit):
            continue
        with_origin = any(isinstance(each, m.Origin) for each in transaction)
        times = [each.commit_time_us for each in transaction if isinstance(each, m.Begin | m.Commit | m.StreamCommit)]
        for us in times:
            assert us == 0 if with_origin else 26 < us / 1e6 / 86400 / 365.25 < 100
        transaction.clear()


def test_blocks_carry_the_xid_of_who_made_the_change_and_abort_of_a_savepoint_names_it() -> None:
    """C28: with streaming on, rows of a savepoint come under its own xid, and A names that; never the whole."""
    for capture in (c for c in CAPTURES if c.scenario in {"blocks", "blocks, parallel"}):
        aborted: set[int] = set()
        committed: set[int] = set()
        rows: dict[int, set[bytes]] = {}
        current = 0
        tops: dict[int, int] = {}
        for vector, message in capture.decoded():
            match message:
                case m.StreamStart(xid=xid):
                    current = xid
                case m.Insert(xid=xid, new=new) if xid is not None:
                    tops[xid] = current
                    kind = new[3] if len(new) == 6 else b"other"
                    assert isinstance(kind, bytes)
                    rows.setdefault(xid, set()).add(kind)
                case m.StreamAbort():
                    aborted.add(message.sub_xid)
                    parallel = capture.scenario == "blocks, parallel"
                    assert (message.abort_lsn is not None) == parallel
                    if message.abort_lsn is not None and message.abort_time_us is not None:
                        assert abs(message.abort_lsn - vector.lsn) < 1 << 20
                        assert message.abort_time_us > 26 * 365 * 86400 * 10**6
                case m.StreamCommit(xid=xid):
                    committed.add(xid)
        kept = {kind for xid, kinds in rows.items() if xid not in aborted and tops[xid] in committed for kind in kinds}
        assert kept <= {b"keep", b"last", b"other"}
        assert kept
        assert b"rb" in {kind for kinds in rows.values() for kind in kinds}


def _damaged(capture: Capture) -> Iterator[tuple[bytes, Decoder]]:
    for vector, decoder in capture.decoders():
        payload = vector.payload
        for length in range(len(payload)):
            # A Stream Abort with position and time (25 bytes) that loses both is a good one without.
            if not (payload[:1] == b"A" and length == 9):
                yield payload[:length], decoder
        yield payload + b"\0", decoder
        yield payload + b"n", decoder
        if payload[:1] != b"A":
            yield payload + payload, decoder


@each_capture
def test_a_vector_cut_at_any_byte_or_with_bytes_behind_it_is_refused(capture: Capture) -> None:
    for payload, decoder in _damaged(capture):
        state = decoder.in_block
        with pytest.raises(DecodeError, match="1/2") as refused:
            decoder.decode(payload, 0x1_00000002)
        assert decoder.in_block == state
        assert refused.value.tag == payload[:1].decode("latin-1")


@each_capture
def test_the_fast_readers_of_begin_and_commit_refuse_the_same(capture: Capture) -> None:
    for vector in capture.vectors:
        for read, tag in ((decode_begin, b"B"), (decode_commit, b"C")):
            whole = vector.payload
            cuts = [whole[:length] for length in range(len(whole))] if whole[:1] == tag else [whole]
            for payload in [*cuts, whole + b"\0"]:
                with pytest.raises(DecodeError, match="1/2"):
                    read(payload, 0x1_00000002)
