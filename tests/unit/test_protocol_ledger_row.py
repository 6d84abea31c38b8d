"""The row decoder of the ledger: by name, exact, fast, and clear about what is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.golden.vectors import MAJORS, load
from walstream.errors import DecodeError, LedgerError
from walstream.protocol import ledger_row
from walstream.protocol.ledger_row import compile_row_decoder
from walstream.protocol.messages import Column, Insert, Relation

LEDGER = ("seq", "session_id", "agent_id", "event_type", "payload", "created_at")
TYPES = {"seq": 20, "session_id": 2950, "payload": 3802, "created_at": 1184}
SESSION = b"11111111-2222-3333-4444-555555555555"
VALUES = (b"17", SESSION, b"planner", b"model.requested", b'{"k": 1}', b"2024-02-03 04:05:06.123456+00")
AT = 0x16_B374D848


def relation(names: Sequence[str] = LEDGER, **types: int) -> Relation:
    columns = tuple(Column(name == "seq", name, (TYPES | types).get(name, 25), -1) for name in names)
    return Relation(16400, "public", "agent_events", "d", columns)


def message(values: Sequence[bytes | None], oid: int = 16400) -> bytes:
    out = b"I" + oid.to_bytes(4, "big") + b"N" + len(values).to_bytes(2, "big")
    return out + b"".join(b"n" if v is None else b"t" + len(v).to_bytes(4, "big") + v for v in values)


@pytest.fixture
def only_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """The general decoder must not be needed."""

    def refuse(*_: Any) -> Any:
        pytest.fail("the fast way was left")

    monkeypatch.setattr(ledger_row._General, "__call__", refuse)


@pytest.mark.usefixtures("only_fast")
@pytest.mark.parametrize("payload", [b"", b"{}", b"x" * 300, b"y" * 70_000], ids=len)
@pytest.mark.parametrize("seq", [b"1", b"9223372036854775807", b"-9223372036854775808"])
def test_the_ledger_of_the_design_goes_the_fast_way(payload: bytes, seq: bytes) -> None:
    values = (seq, *VALUES[1:4], payload, VALUES[5])
    assert compile_row_decoder(relation(), LEDGER)(message(values)) == (int(seq), *values[1:], None)


@pytest.mark.usefixtures("only_fast")
def test_other_shapes_go_the_fast_way_too() -> None:
    """Session ids as text, other columns before, between and behind, with and without a value."""
    decode = compile_row_decoder(relation(session_id=25), LEDGER)
    assert decode(message(VALUES)) == (17, *VALUES[1:], None)

    names = ("a", "payload", "b", "created_at", "seq", "session_id", "c", "event_type", "agent_id", "d")
    decode = compile_row_decoder(relation(names), LEDGER)
    by_name = dict(zip(LEDGER, VALUES, strict=True))
    for others in ((b"1", b"", None, b"4"), (None, None, b"3", None)):
        more = dict(zip("abcd", others, strict=True))
        row = decode(message([(by_name | more)[name] for name in names]))
        assert row == (17, *VALUES[1:], (("a", "b", "c", "d"), others))


def test_what_is_unusual_is_still_the_same_row() -> None:
    decode = compile_row_decoder(relation(), LEDGER)
    long = (b"17", SESSION, b"a" * 256, b"e" * 70_000, b"{}", None)
    assert decode(message(long)) == (17, *long[1:], None)


def test_one_column_may_serve_twice() -> None:
    names = ("seq", "session_id", "event_type", "payload", "created_at")
    decode = compile_row_decoder(relation(names), ("seq", "session_id", "session_id", *names[2:]))
    row = decode(message((b"17", SESSION, *VALUES[3:])))
    assert row == (17, SESSION, SESSION, *VALUES[3:], None)


@pytest.mark.parametrize("missing", LEDGER)
def test_a_missing_column_stops_it_before_any_row(missing: str) -> None:
    """C10: named with its table, and what can be done about it."""
    with pytest.raises(LedgerError, match=f"column '{missing}' of the ledger public.agent_events") as error:
        compile_row_decoder(relation([name for name in LEDGER if name != missing]), LEDGER)
    assert "walstream.toml" in error.value.hint


@pytest.mark.parametrize("oid", [25, 1700, 2950])
def test_seq_must_be_an_integer(oid: int) -> None:
    with pytest.raises(LedgerError, match=f"column 'seq' of the ledger public.agent_events .* OID {oid}"):
        compile_row_decoder(relation(seq=oid), LEDGER)


@pytest.mark.parametrize("oid", [20, 21, 23, 16_500])
def test_seq_may_be_any_integer_or_a_domain_over_one(oid: int) -> None:
    decode = compile_row_decoder(relation(seq=oid), LEDGER)
    assert decode(message(VALUES))[0] == 17
    with pytest.raises(LedgerError, match=r"column 'seq' .* is no integer: b'x', at LSN 16/B374D848"):
        decode(message((b"x", *VALUES[1:])), AT)


@pytest.mark.parametrize("seq", [b"9223372036854775808", b"-9223372036854775809", b"1" * 5000], ids=len)
def test_seq_may_not_have_more_than_64_bits(seq: bytes) -> None:
    """As a domain over `numeric` can; said where it stands, so that what comes before it is not held up."""
    decode = compile_row_decoder(relation(seq=16_500), LEDGER)
    with pytest.raises(LedgerError, match=r"has -?[0-9]{19,}, which is more than 64 bits hold, at LSN 16/B374D848"):
        decode(message((seq, *VALUES[1:])), AT)
    for most in (b"9223372036854775807", b"-9223372036854775808"):
        assert decode(message((most, *VALUES[1:])), AT)[0] == int(most)


def test_a_ledger_has_six_columns() -> None:
    with pytest.raises(ValueError, match="not 5"):
        compile_row_decoder(relation(), LEDGER[:5])


@pytest.mark.parametrize("index", range(5))
def test_null_is_refused_where_an_event_needs_a_value(index: int) -> None:
    values = [None if i == index else value for i, value in enumerate(VALUES)]
    seq = "NULL" if index == 0 else "17"
    with pytest.raises(LedgerError, match=f"column '{LEDGER[index]}' .* is NULL .* seq {seq}, at LSN 16/B374D848"):
        compile_row_decoder(relation(), LEDGER)(message(values), AT)


@pytest.mark.parametrize("names", [LEDGER, (*LEDGER, "note")])
def test_binary_values_are_refused_with_the_option_that_makes_them(names: tuple[str, ...]) -> None:
    """C17."""
    decode = compile_row_decoder(relation(names), LEDGER)
    whole = message((*VALUES, b"note")[: len(names)])
    last = names[-1]
    at = whole.rindex(b"t\0\0\0\x04note" if last == "note" else b"t\0\0\0\x1d")
    with pytest.raises(DecodeError, match=f"column '{last}' .* is in binary format .* LSN 16/B374D848") as error:
        decode(whole[:at] + b"b" + whole[at + 1 :], AT)
    assert "`binary`" in error.value.hint


def test_an_insert_without_a_value_is_refused() -> None:
    whole = message(VALUES[:5]).replace(b"N\0\x05", b"N\0\x06") + b"u"
    with pytest.raises(DecodeError, match=r"'created_at' .* has no value"):
        compile_row_decoder(relation(), LEDGER)(whole)


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (message(VALUES, oid=16401), "belongs to relation 16401"),
        (message((*VALUES, b"more")), "7 values for the 6 columns"),
        (message(VALUES[:5]), "5 values for the 6 columns"),
        (b"C" + bytes(25), "an Insert into public.agent_events was to come"),
        (b"", "empty"),
    ],
)
def test_what_is_no_row_of_this_relation_is_refused(payload: bytes, reason: str) -> None:
    with pytest.raises(DecodeError, match=reason):
        compile_row_decoder(relation(), LEDGER)(payload, AT)


@pytest.mark.parametrize("major", MAJORS)
def test_each_new_shape_is_decoded_by_name(major: int) -> None:
    """C10, over what real servers sent: columns come, go and change their type between rows, and a renamed one stops
    the decoder by name."""
    (capture,) = (each for each in load(major) if each.scenario == "new shapes")
    rows: list[Any] = []
    decode = None
    mapping = LEDGER
    refused = []
    for vector, each in capture.decoded():
        if isinstance(each, Relation):
            try:
                decode = compile_row_decoder(each, mapping)
            except LedgerError as error:
                refused.append(str(error))
                mapping = (*LEDGER[:4], "body", LEDGER[5])
                decode = compile_row_decoder(each, mapping)
        elif isinstance(each, Insert):
            assert decode is not None
            rows.append(decode(vector.payload, vector.lsn))
    assert [row[0] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row[3] for row in rows] == [b"one", b"two", b"three", b"four", b"five", b"six"]
    assert {row[4] for row in rows} == {b"{}"}
    trace = (("trace_id",), (b"d",))
    assert [row[6] for row in rows] == [None, trace, trace, trace, None, None]
    assert len(refused) == 1
    assert "column 'payload' of the ledger public.agent_events is not in the stream" in refused[0]
