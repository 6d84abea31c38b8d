"""One text for one value: on both roads, and after Postgres had it."""

from __future__ import annotations

import hashlib
import json
import random
import sys
from decimal import Decimal
from typing import Any

import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.conftest import Database, Server
from walstream.errors import PayloadError
from walstream.event import parse_payload
from walstream.ledger.canonical import _pieces, canonical, digest

texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)
decimals = st.decimals(allow_nan=False, allow_infinity=False) | st.builds(
    lambda digits, power: Decimal(digits).scaleb(power), st.integers(-(10**30), 10**30), st.integers(-60, 60)
)


def is_moderate(number: Decimal) -> bool:
    """Whether ``numeric`` holds it, and a test does not print it for ever."""
    return -1000 < number.adjusted() < 1000 and len(format(number, "f")) < 2000


numbers = st.one_of(
    st.integers(),
    st.integers(-(2**65), 2**65),
    st.floats(allow_nan=False, allow_infinity=False),
    st.floats(1e14, 1e24),
    decimals.filter(is_moderate),
    st.sampled_from([-0.0, 0.0, 0, 1.0, 1, Decimal("-0"), Decimal("-0.000"), Decimal("0E+7"), Decimal("1.10")]),
)
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=10,
)

HUGE = Decimal("1E+5000")  # digits that Python's integers refuse to be parsed from


@settings(max_examples=60)
@given(values)
@example({"a": [1e16, -0.0]})
@example([[1e22]])
@example({"x": ":5e3", "y": ',-0.0"'})
@example([None, [None]])
def test_both_roads_give_one_text(value: Any) -> None:
    text = canonical(value)
    assert text == b"".join(_pieces(value))
    assert canonical(parse_payload(text)) == text


@settings(max_examples=40)
@given(st.dictionaries(texts, values, max_size=4), st.randoms())
def test_the_order_of_keys_does_not_matter(value: dict[str, Any], chance: random.Random) -> None:
    items = list(value.items())
    chance.shuffle(items)
    assert canonical(dict(items)) == canonical(value)


@given(values)
def test_it_is_the_json_of_that_value(value: Any) -> None:
    def equal(ours: Any, theirs: Any) -> bool:
        if isinstance(theirs, dict):
            return sorted(ours) == sorted(theirs) and all(equal(ours[key], theirs[key]) for key in theirs)
        if isinstance(theirs, list):
            return len(ours) == len(theirs) and all(map(equal, ours, theirs))
        if isinstance(theirs, float):
            return bool(ours == Decimal(repr(theirs)))
        return type(ours) is type(theirs) and ours == theirs if isinstance(theirs, bool | str) else bool(ours == theirs)

    assert equal(json.loads(canonical(value), parse_float=Decimal), value)


@pytest.fixture(scope="module")
def shelf(server: Server) -> Any:
    """Puts JSON texts into a jsonb column and returns what Postgres makes of them."""
    database = Database(server, "t_canonical_shelf")
    database.create()
    conn = database.connect()
    conn.autocommit = True

    def through(text: bytes) -> bytes:
        with conn.cursor() as cur:
            cur.execute("SELECT %s::jsonb::text", (text.decode(),))
            (found,) = cur.fetchone() or ("",)
            return str(found).encode()

    yield through
    database.drop()


@settings(max_examples=80)
@given(value=values)
@example(value={"n": HUGE})
@example(value=[HUGE + Decimal("0.5"), -HUGE, 10**700, Decimal(10**5000)])
@example(value=[5e-324, 1.7976931348623157e308, 2**64, 2**63, -(2**63) - 1])
@example(value={"\u2028": '\x7f\x1f"\\/\ud7ff\U0010ffff'})
def test_the_text_is_a_fixed_point_of_postgres(shelf: Any, value: Any) -> None:
    text = canonical(value)
    assert canonical(parse_payload(shelf(text))) == text


@settings(max_examples=80)
@given(value=values)
def test_so_is_the_value_however_it_was_written(shelf: Any, value: Any) -> None:
    def plain(each: Any) -> Any:
        if isinstance(each, Decimal):
            return orjson.Fragment(str(each))  # with an exponent, with zeros at the end
        if isinstance(each, int) and not isinstance(each, bool) and each.bit_length() > 60:
            return orjson.Fragment(str(each))
        if isinstance(each, list):
            return [plain(inner) for inner in each]
        return {key: plain(inner) for key, inner in each.items()} if isinstance(each, dict) else each

    read_back = parse_payload(shelf(orjson.dumps(plain(value))))
    assert canonical(parse_payload(shelf(canonical(read_back)))) == canonical(read_back)


def test_nesting_has_no_limit() -> None:
    deep: Any = {"b": 1, "a": [2, 3]}
    for _ in range(sys.getrecursionlimit() * 5):
        deep = {"x": [deep]}
    text = canonical(deep)
    assert text.startswith(b'{"x":[{"x":[')
    assert b'{"a":[2,3],"b":1}' in text
    assert digest(deep) == hashlib.sha256(text).digest()


def test_numbers_that_are_one_number_have_one_text() -> None:
    for same, text in (
        ([1e16, 10**16, Decimal("1E+16"), Decimal("10000000000000000.0")], b"10000000000000000"),
        ([0.1, Decimal("0.1"), Decimal("0.10"), Decimal("1E-1")], b"0.1"),
        ([0, Decimal("-0"), Decimal("0E+3")], b"0"),
        ([0.0, -0.0, Decimal("-0.00")], b"0.0"),
        ([Decimal("0.12345678901234567890"), Decimal("0.1234567890123456789")], b"0.1234567890123456789"),
    ):
        assert {canonical(each) for each in same} == {text}
        assert {canonical([each]) for each in same} == {b"[" + text + b"]"}


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), Decimal("NaN"), Decimal("-Infinity"), {1, 2}, b"x", {1: 2}]
)
def test_what_is_not_json_is_refused(value: Any) -> None:
    for each in (value, [value], {"a": None, "b": {"c": [None, value]}}):
        with pytest.raises(PayloadError):
            canonical(each)


def test_a_lone_surrogate_that_only_the_type_json_lets_through() -> None:
    value = parse_payload(b'{"a": "\\ud800"}')
    assert canonical(value) == b'{"a":"\\ud800"}'
    assert canonical(parse_payload(canonical(value))) == canonical(value)
