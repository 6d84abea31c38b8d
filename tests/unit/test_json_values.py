"""What a payload may hold, and that it arrives as it was: without a database."""

from __future__ import annotations

import enum
import hashlib
import json
import uuid
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from walstream import idempotency_key
from walstream.errors import PayloadError
from walstream.event import parse_payload
from walstream.ledger import json_values
from walstream.ledger.json_values import MAX_DEPTH, exact_text, json_text


class Color(enum.Enum):
    RED = "red"


class Named(str, enum.Enum):  # noqa: UP042  # the older form, which many programs have, writes itself differently
    ONE = "one"


def nested(depth: int, innermost: Any = 0) -> Any:
    value = innermost
    for n in range(depth):
        value = [value] if n % 2 else {"a": value}
    return value


REFUSED = [
    ({"a": "x\0y"}, "payload.a: the string holds U+0000"),
    (
        {"messages": [{"content": "ok"}, {"content": "\ud800"}]},
        "payload.messages[1].content: the string holds the lone",
    ),
    ({"a\0": 1}, "payload: the key 'a\\x00' holds U+0000"),
    ({"a": {"\udfff": 1}}, "payload.a: the key '\\udfff' holds the lone surrogate U+DFFF"),
    ({"a": [1, float("nan")]}, "payload.a[1]: nan is no number of JSON"),
    ({"a": None, "b": float("inf")}, "payload.b: inf"),
    ({"a": Decimal("NaN")}, "payload.a: NaN"),
    ({"a": Decimal("sNaN")}, "payload.a: sNaN"),
    ({"a": Decimal("-Infinity")}, "payload.a: -Infinity"),
    ({"a b": [{1: 2}]}, "payload['a b'][0]: the key 1 is no string"),
    ({"a": {(1, 2): 3}}, "payload.a: the key (1, 2) is no string"),
    ({"a": Decimal("1e131072")}, "payload.a: an integer of 131073 digits"),
    ({"a": Decimal("1e-16384")}, "payload.a: a number with"),
    ({"a": Decimal("0e-16384")}, "payload.a: a number with"),
    ({"a": Decimal(10) ** 131072 + Decimal("0.5")}, "payload.a: "),
    ({"a": 10**4300}, "payload.a: an integer of 4301 digits"),
    ({"a": {1, 2}}, "payload.a: a value of type set is not JSON"),
    ({"a": b"x"}, "payload.a: a value of type bytes is not JSON"),
    ({"a": object()}, "payload.a: a value of type object is not JSON"),
    ({"a": (n for n in (1, 2))}, "payload.a: a value of type generator"),
    (float("nan"), "payload: nan"),
    (nested(MAX_DEPTH + 1), f"nested more than {MAX_DEPTH} deep"),
    (nested(100_000), "nested more than"),
]


@pytest.mark.parametrize(("value", "words"), REFUSED, ids=range(len(REFUSED)))
def test_what_jsonb_cannot_hold_is_refused_with_the_path_to_it(value: Any, words: str) -> None:
    with pytest.raises(PayloadError) as caught:
        json_text(value)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a\0b\ud800c", '"a\ufffdb\ufffdc"'),
        ("\ud83d\ude00", '"😀"'),  # two halves that were left apart
        ([float("nan"), float("-inf"), Decimal("NaN"), 1.5], "[null,null,null,1.5]"),
        ({1: 1, None: 2, False: 3, 1.5: 4, "\0": 5}, '{"1":1,"null":2,"false":3,"1.5":4,"\ufffd":5}'),
        ([Decimal("1e131072"), 10**5000], f'["1E+131072","{10**4299}{"0" * 701}"]'),
    ],
)
def test_it_is_replaced_on_request(value: Any, text: str) -> None:
    with pytest.raises(PayloadError):
        json_text(value)
    assert json_text(value, replace=True) == text
    json.loads(text)


@pytest.mark.parametrize(
    "value",
    [{(1, 2): 3}, {"a": {1}}, nested(MAX_DEPTH + 1), {1: "a", "1": "b"}, {"a\0": 1, "a\ufffd": 2}],
    ids=range(5),
)
def test_what_has_no_obvious_replacement_is_refused_all_the_same(value: Any) -> None:
    with pytest.raises(PayloadError):
        json_text(value, replace=True)


def test_the_greatest_that_fits() -> None:
    for value in (
        nested(MAX_DEPTH - 1),
        10**4300 - 1,
        -(10**4300 - 1),
        Decimal("1e-16383"),
        Decimal("9" * 131072 + ".5"),
        Decimal("0e999999"),
        5e-324,
        1.7976931348623157e308,
    ):
        again = parse_payload(json_text({"v": value}).encode())["v"]
        assert again == value or Decimal(again) == Decimal(str(value))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Decimal("1.10"), "1.10"),
        (Decimal("-0"), "0"),
        (Decimal("1E+3"), "1000"),
        (9007199254740993, "9007199254740993"),
        (2**64, "18446744073709551616"),
        (-(2**200), str(-(2**200))),
        (True, "true"),
        (0.1, "0.1"),
        ((1, 2), "[1,2]"),
        (uuid.UUID(int=1), '"00000000-0000-0000-0000-000000000001"'),
        (datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=UTC), '"2026-01-02T03:04:05.000678+00:00"'),
        (date(2026, 1, 2), '"2026-01-02"'),
        (Color.RED, '"red"'),
        (Named.ONE, '"one"'),
        ({Named.ONE: 1}, '{"one":1}'),
        ("é\n\x01\x7f\u2028", '"é\\n\\u0001\x7f\u2028"'),
    ],
)
def test_both_roads_write_the_same(value: Any, text: str) -> None:
    assert json_text(value) == text
    assert json_text([value, Decimal(1)]) == f"[{text},1]"  # a Decimal takes the exact road
    assert exact_text(value, root="v") == text


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
    | st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**30), max_value=10**30)
)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text("ab é"), inner), max_leaves=20)


def same(one: Any, other: Any) -> bool:
    """Equal as JSON: a Decimal is the number that its digits say, and so is a float."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, bool) or isinstance(other, bool) or not isinstance(one, int | float | Decimal):
        return bool(one == other and type(one) is type(other))
    return isinstance(other, int | float | Decimal) and Decimal(str(one)) == Decimal(str(other))


@settings(max_examples=50)
@given(VALUES)
def test_whatever_json_holds_comes_back(value: Any) -> None:
    assert same(parse_payload(json_text(value).encode()), value)
    assert same(parse_payload(exact_text(value, root="v").encode()), value)


@settings(max_examples=50)
@given(
    st.recursive(
        st.text() | st.floats() | st.integers(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=20,
    )
)
def test_replacing_leaves_nothing_that_would_be_refused(value: Any) -> None:
    try:
        text = json_text(value, replace=True)
    except PayloadError:
        with pytest.raises(PayloadError, match="twice"):  # two keys became one, and nothing else is in the way
            json_text(value, replace=True)
        return
    assert json_text(parse_payload(text.encode())) == json_text(parse_payload(text.encode()), replace=True)
    assert "\\u0000" not in text


def test_a_value_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_values, "_SURELY_FITS", 100)
    monkeypatch.setattr(json_values, "_MAX_BYTES", 1000)
    monkeypatch.setattr(json_values, "_MAX_ELEMENTS", 50)
    monkeypatch.setattr(json_values, "_MAX_MEMBERS", 20)
    assert json_text(["x" * 900])
    for value, words in (
        ({"a": {"b": ["x" * 600, "y" * 600]}}, "payload.a.b: too large for jsonb: about 12"),
        ({"a": ["x" * 600], "b": ["x" * 600]}, "payload: too large for jsonb"),
        ({"a": [0] * 51}, "payload.a: too large for jsonb: 51 members"),
        ({"a": [{str(n): "xxxx" for n in range(21)}]}, "payload.a[0]: too large for jsonb: 21 members"),
        ({"a" * 1100: 1}, "payload: too large for jsonb"),
    ):
        with pytest.raises(PayloadError) as caught:
            json_text(value)
        assert words in str(caught.value)


# -- idempotency keys --------------------------------------------------------------------------------------------------


@given(st.lists(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
                | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
                | st.dictionaries(st.text("ab é"), st.integers()), min_size=1))  # fmt: skip
def test_a_key_is_the_hash_of_the_parts_as_json(parts: list[Any]) -> None:
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    assert idempotency_key(*parts) == hashlib.sha256(text.encode()).hexdigest()


def test_keys_differ_where_their_parts_do() -> None:
    parts: list[tuple[Any, ...]] = [("a", "bc"), ("ab", "c"), ("abc",), (["a", "bc"],), (1,), ("1",), (True,), (None,)]
    assert len({idempotency_key(*each) for each in parts}) == len(parts)
    assert idempotency_key(uuid.UUID(int=1)) == idempotency_key(str(uuid.UUID(int=1)))
    assert idempotency_key({"a": 1, "b": 2}) == idempotency_key({"b": 2, "a": 1})
    assert idempotency_key(Decimal("1.10")) != idempotency_key(Decimal("1.1"))


def test_a_key_of_nothing_or_of_what_is_not_json_is_refused() -> None:
    for parts in ((), (object(),), (float("nan"),), ("\ud800",)):
        with pytest.raises(PayloadError):
            idempotency_key(*parts)
