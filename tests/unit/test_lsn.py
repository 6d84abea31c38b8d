from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from walstream.errors import ConfigError
from walstream.lsn import INVALID, format_lsn, parse_lsn


@pytest.mark.parametrize(
    ("text", "lsn"),
    [
        ("0/0", INVALID),
        ("2/3F42B70", 0x0000000203F42B70),
        ("16/B374D848", 0x16B374D848),
        ("F/FFFFFFFF", 0xFFFFFFFFF),
        ("10/0", 0x1000000000),
        ("FFFFFFFF/FFFFFFFF", 2**64 - 1),
    ],
)
def test_known_positions(text: str, lsn: int) -> None:
    assert parse_lsn(text) == lsn
    assert format_lsn(lsn) == text


def test_numbers_compare_where_text_does_not() -> None:
    assert parse_lsn("F/FFFFFFFF") < parse_lsn("10/0")
    assert "F/FFFFFFFF" > "10/0"


def test_lower_case_and_leading_zeros_are_read() -> None:
    assert parse_lsn("00000016/b374d848") == parse_lsn("16/B374D848")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "/",
        "16",
        "16/",
        "/1",
        "16/B374D848/0",
        "1_6/0",
        "+1/0",
        " 1/0",
        "1/0 ",
        "G/0",
        "123456789/0",
        "1/0x1",
        "١/0",
        "1/0\n",
    ],
)
def test_what_is_not_an_lsn_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_lsn(text)
    assert repr(text) in str(raised.value)


@pytest.mark.parametrize("lsn", [-1, 2**64])
def test_what_does_not_fit_is_refused(lsn: int) -> None:
    with pytest.raises(ValueError, match="64 bits"):
        format_lsn(lsn)


@given(st.integers(0, 2**64 - 1))
def test_there_and_back(lsn: int) -> None:
    assert parse_lsn(format_lsn(lsn)) == lsn
