"""What a projector sees of a row. C01, C05 and C06 of the faults that users of other consumers reported."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from walstream.errors import PayloadError
from walstream.event import Commit, Event, Row, parse_payload

SESSION = b"0b1c7f3e-6a52-4f3b-9a55-0d6a1c1f2e3d"


def event(
    payload: bytes = b"{}",
    created_at: bytes | None = b"2024-02-03 04:05:06.123456+00",
    *,
    time_us: int = 0,
    extras: tuple[tuple[str, ...], tuple[bytes | None, ...]] | None = None,
    recovered: bool = False,
) -> Event:
    row: Row = (7, SESSION, b"planner", b"tool.invoked", payload, created_at, extras)
    return Event(42, row, Commit(0x16B374D848, time_us, 731, "ledger-1:3", recovered))


def test_the_fields_of_an_event() -> None:
    each = event(b'{"a": [1, null]}', time_us=760_166_706_123_456)
    assert each.offset == 42
    assert each.seq == 7
    assert each.session_id == SESSION.decode()
    assert each.agent_id == "planner"
    assert each.event_type == "tool.invoked"
    assert each.payload == {"a": [1, None]}
    assert each.payload_text == '{"a": [1, null]}'
    assert each.payload_bytes == b'{"a": [1, null]}'
    assert each.created_at == datetime(2024, 2, 3, 4, 5, 6, 123456, UTC)
    assert each.committed_at == datetime(2000, 1, 1, tzinfo=UTC) + timedelta(microseconds=760_166_706_123_456)
    assert each.lsn == 0x16B374D848
    assert each.key == "ledger-1:3:7"
    assert each.recovered is False
    assert each.extras == {}


def test_text_is_utf8_in_every_field() -> None:
    row: Row = (1, b"s", "café".encode(), "型".encode(), b"{}", None, (("größe", "n"), ("ß".encode(), None)))
    each = Event(1, row, Commit(1, 1, 1, "l:1"))
    assert (each.agent_id, each.event_type) == ("café", "型")
    assert each.extras == {"größe": "ß", "n": None}


def test_an_unknown_commit_time_is_not_the_year_2000() -> None:
    assert event(time_us=0).committed_at is None


def test_a_commit_before_the_year_2000_has_its_time() -> None:
    assert event(time_us=-1_000_000).committed_at == datetime(1999, 12, 31, 23, 59, 59, tzinfo=UTC)


def test_recovered_belongs_to_the_transaction() -> None:
    assert event(recovered=True).recovered is True


def test_an_event_is_immutable_and_light() -> None:
    each: Any = event()
    with pytest.raises(AttributeError):
        each.offset = 1
    with pytest.raises(AttributeError):
        each.anything = 1
    assert not hasattr(each, "__dict__")


def test_the_payload_is_parsed_once_and_shared() -> None:
    each = event(b'{"a": 1}')
    assert each.payload is each.payload


def test_a_payload_that_is_null_is_parsed_once_too() -> None:
    assert event(b"null").payload is None


class TestCreatedAt:
    """C01: datetime cannot hold everything that Postgres can; the text is always exact, nothing is clamped."""

    @pytest.mark.parametrize(
        "text",
        [
            "infinity",
            "-infinity",
            "4713-01-01 00:00:00+00 BC",
            "0001-12-31 23:40:28+00 BC",
            "294276-12-31 23:59:59.999999+00",
            "15000-12-31 00:00:00+00",
        ],
    )
    def test_out_of_range(self, text: str) -> None:
        each = event(created_at=text.encode())
        assert each.created_at is None
        assert each.created_at_text == text

    def test_null(self) -> None:
        each = event(created_at=None)
        assert each.created_at is None
        assert each.created_at_text is None

    @pytest.mark.parametrize(
        ("text", "right"),
        [
            ("2024-02-03 04:05:06+00", datetime(2024, 2, 3, 4, 5, 6, 0, UTC)),
            ("2024-02-03 04:05:06.1+00", datetime(2024, 2, 3, 4, 5, 6, 100_000, UTC)),
            ("2024-02-03 04:05:06.12345+00", datetime(2024, 2, 3, 4, 5, 6, 123_450, UTC)),
            ("2024-02-03 09:50:06+05:45", datetime(2024, 2, 3, 4, 5, 6, 0, UTC)),
            ("1900-02-03 09:46:22+05:41:16", datetime(1900, 2, 3, 4, 5, 6, 0, UTC)),
            ("0001-01-01 00:00:00+00", datetime(1, 1, 1, tzinfo=UTC)),
            ("9999-12-31 23:59:59.999999+00", datetime(9999, 12, 31, 23, 59, 59, 999_999, UTC)),
        ],
    )
    def test_in_range(self, text: str, right: datetime) -> None:
        found = event(created_at=text.encode()).created_at
        assert found == right
        assert found is not None
        assert found.tzinfo is UTC

    @pytest.mark.parametrize("text", ["0001-01-01 00:00:00+05", "9999-12-31 23:59:59-05"])
    def test_in_range_only_where_it_was_written(self, text: str) -> None:
        # The same instant in UTC lies in the year 0 or 10000.
        each = event(created_at=text.encode())
        assert each.created_at is None
        assert each.created_at_text == text


class TestNumbers:
    """C05: no number changes on the way."""

    @pytest.mark.parametrize(
        "number",
        [
            "9007199254740993",
            "-9007199254740993",
            "1234567890123456789",
            "18446744073709551616",
            "123456789012345678901234567890",
            "0.1234567890123456789",
            "1.10",
            "0",
            "-0.0",
            "0.1",
            "100",
            "12345678901234.5",
            "9007199254740993.5",
            "1" + "0" * 400 + ".5",
            "1e400",
            "1e-400",
            "1E+2",
            "1.7976931348623157e308",
            "5e-324",
        ],
    )
    def test_exact(self, number: str) -> None:
        found = parse_payload(b'{"n": %b}' % number.encode())["n"]
        assert Decimal(str(found)) == Decimal(number)

    def test_what_a_float_holds_is_a_float(self) -> None:
        assert parse_payload(b"[0.5, 1.10, 1e5]") == [0.5, 1.1, 1e5]
        assert all(type(each) is float for each in parse_payload(b"[0.5, 1.10, 1e5, 100000000000000.25]"))

    def test_what_a_float_does_not_hold_is_a_decimal(self) -> None:
        assert parse_payload(b"[0.1234567890123456789]") == [Decimal("0.1234567890123456789")]
        assert type(parse_payload(b"1e400")) is Decimal

    def test_digits_inside_strings_stay_text(self) -> None:
        assert parse_payload(b'{"12345678901234567890": "0.12345678901234567890e1"}') == {
            "12345678901234567890": "0.12345678901234567890e1"
        }


class TestUnparseable:
    """C06: legal in Postgres, impossible here. A typed error, and the text is still good."""

    def test_an_integer_of_5000_digits(self) -> None:
        digits = b"1" + b"0" * 5000
        each = event(b'{"n": %b}' % digits)
        with pytest.raises(PayloadError, match="4300 digits") as raised:
            _ = each.payload
        assert "payload_text" in raised.value.hint
        assert each.payload_bytes == b'{"n": %b}' % digits

    @pytest.mark.parametrize("number", [b"1e9999999999999999999999", b"-1e-9999999999999999999999"])
    def test_an_exponent_beyond_decimal(self, number: bytes) -> None:
        with pytest.raises(PayloadError):
            parse_payload(number)

    def test_7000_levels(self) -> None:
        raw = b"[" * 7000 + b"]" * 7000
        each = event(raw)
        if sys.version_info < (3, 12):
            with pytest.raises(PayloadError, match="recursion"):
                _ = each.payload
        else:  # the C stack is counted apart there, and may be deep enough
            try:
                assert _depth(each.payload) == 7000
            except PayloadError:
                pass
        assert each.payload_bytes == raw

    def test_deeper_than_any_stack(self) -> None:
        with pytest.raises(PayloadError):
            parse_payload(b"[" * 1_000_000 + b"]" * 1_000_000)

    def test_a_second_reader_gets_the_same_error(self) -> None:
        each = event(b"[" * 1_000_000)
        for _ in range(2):
            with pytest.raises(PayloadError):
                _ = each.payload

    @pytest.mark.parametrize("raw", [b"", b"{", b"NaN", b"[Infinity]", b"-Infinity", b"\xff", b"01", b"{} {}"])
    def test_what_is_no_json(self, raw: bytes) -> None:
        with pytest.raises(PayloadError):
            parse_payload(raw)

    def test_the_error_does_not_quote_the_payload(self) -> None:
        with pytest.raises(PayloadError) as raised:
            parse_payload(b'{"token": "s3cret", ')
        assert "s3cret" not in str(raised.value)

    def test_more_levels_than_orjson_takes(self) -> None:
        # orjson stops at 1024; up to what Python's own parser takes, the payload is parsed. 900 leaves room for the
        # frames of the test runner.
        assert _depth(parse_payload(b"[" * 900 + b"]" * 900)) == 900


def _depth(value: Any) -> int:
    depth = 0
    while value is not None:
        depth += 1
        value = value[0] if value else None
    return depth


def test_the_timezone_of_committed_at_is_utc() -> None:
    found = event(time_us=1).committed_at
    assert found is not None
    assert found.utcoffset() == timezone(timedelta(0)).utcoffset(None)


@pytest.mark.parametrize(
    "text",
    [
        '{"id": "5e3f00e12345678901234567890", "n": 12345678901234567890123}',
        '{"id": "5e3", "n": 1.2345678901234567890123}',
        '{"quote \\" 5e3": 1e400, "n": 5}',
        '{"ends with a backslash \\\\": 12345678901234567890123}',
        '{"a": "\\\\\\" 1e5 \\\\\\\\", "n": [1.00000000000000000001]}',
        '["5e3", 5e3, "\\\\", 1e400]',
    ],
)
def test_a_number_beside_strings_that_look_like_numbers_is_exact(text: str) -> None:
    assert parse_payload(text.encode()) == json.loads(text, parse_float=Decimal)


@given(st.recursive(st.none() | st.text('\\"0e15 .', max_size=30) | st.integers(), lambda inner: st.lists(inner)))
def test_whatever_stands_in_strings_nothing_is_lost(value: Any) -> None:
    assert parse_payload(json.dumps(value).encode()) == value
