"""The import format: what a line may hold, and what is said about one that may not."""

from __future__ import annotations

import io
import json

import pytest

from walstream.ledger.append import NewEvent
from walstream.ledger.json_lines import BadLine, parse_event, read_events


def line(payload: str, **changes: str) -> bytes:
    members = {"session_id": '"s"', "agent_id": '"a"', "event_type": '"t"', "payload": payload} | changes
    return ("{" + ", ".join(f'"{name}": {text}' for name, text in members.items()) + "}\n").encode()


@pytest.mark.parametrize(
    "payload",
    [
        "{}",
        "[]",
        "null",
        '""',
        "-0.0",
        "1234567890123456789012345678901234567890",
        '{"n": 1.10, "m": 1E+2, "o": 0.1234567890123456789}',
        "9" * 20000,
        '{"a":[1,{"b":[]}], "b" : {"c":{}} }',
        r'"\ud83d\ude00 \\u0000 \\\\ud800 \" \/ \b\f\n\r\t"',
        '"' + "é€😀" + '"',
        "[" * 5000 + "]" * 5000,
        '{"a":' * 3000 + "1" + "}" * 3000,
    ],
    ids=lambda value: repr(value)[:60],
)
def test_a_payload_is_kept_character_by_character(payload: str) -> None:
    assert parse_event(line(payload)) == NewEvent("s", "a", "t", payload)


def test_the_order_of_the_keys_and_the_white_space_do_not_matter() -> None:
    raw = b'\t{ "payload" :{"a": 1 } ,"event_type":"t","agent_id":"\\u0061", "session_id" : "s" } \r\n'
    assert parse_event(raw) == NewEvent("s", "a", "t", '{"a": 1 }')


def test_what_tail_prints_beside_the_fields_is_ignored() -> None:
    raw = line("{}", offset="7", seq="9", created_at='"2024-02-03"', key='"k"', recovered="false", extras="{}")
    assert parse_event(raw) == NewEvent("s", "a", "t", "{}")


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "not a JSON object"),
        (b"[]", "not a JSON object"),
        (b"hello", "not a JSON object"),
        (b"{}", "without session_id, agent_id, event_type, payload"),
        (b'{"session_id": "s"', "the line ends at column 19 where ',' or '}' was expected"),
        (line("{}") + b"{}", "something follows the object"),
        (line("{}", payload2="1"), "unknown key 'payload2'"),
        (line("{}", session_id="7"), "session_id must be a string, not 7"),
        (line("{}", agent_id='""'), "agent_id is empty"),
        (b'{"payload": 1, "payload": 2}', "the key 'payload' comes twice"),
        (line("NaN"), "NaN at column 68 is not JSON"),
        (line("[1, -Infinity]"), "-Infinity at column 72 is not JSON"),
        (line("[1,]"), "expected a value at column 71, found ']}'"),
        (line("[1 2]"), "expected ',' or ']' at column 71"),
        (line("[1}"), "expected ',' or ']' at column 70"),
        (line("{1: 2}"), "expected a key in double quotes at column 69"),
        (line('{"a": 1,}'), "expected a key in double quotes at column 76"),
        (line('{"a" 1}'), "expected ':' at column 73"),
        (line("01"), "expected ',' or '}' at column 69, found '1}'"),
        (line("1."), "expected ',' or '}' at column 69, found '.}'"),
        (line("+1"), "expected a value at column 68, found '+1}'"),
        (line("True"), "expected a value at column 68, found 'True}'"),
        (line('"a\tb"'), "a string at column 68 has no end, a bad escape, or a raw control character"),
        (line(r'"\x41"'), "a string at column 68 has no end, a bad escape"),
        (line('"open'), "a string at column 68 has no end"),
        (line(r'"\u0000"'), "U+0000 at column 69, which jsonb cannot hold"),
        (line("{}", agent_id=r'"\u0000"'), "U+0000 at column 34"),
        (line(r'"\ud800"'), "a lone surrogate at column 69"),
        (line(r'"\ud800 \udc00"'), "a lone surrogate at column 69"),
        (line(r'"\udc00\ud800"'), "a lone surrogate at column 69"),
        (line(r'["\ud800","\udc00"]'), "a lone surrogate at column 70"),
        (line('"\xff"').replace(b"\xc3\xbf", b"\xff"), "not UTF-8: byte 0xff at position 69"),
        (line('"\xff"').replace(b"\xc3\xbf", b"\xed\xa0\x80"), "not UTF-8"),
        (line("1e140000"), "the number 1e140000 is beyond what numeric"),
        (line("1e99999999999999999999"), "is beyond what numeric"),
        (line("-0.1e-16383"), "is beyond what numeric"),
        (line("9" * 131073), "is beyond what numeric"),
        (line("[" * 3000 + "]" * 2999), "expected ',' or ']' at"),
        (line("[" * 3000).rstrip(b"}\n"), "the line ends"),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_a_bad_line_is_refused_with_its_reason(raw: bytes, reason: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_event(raw)
    assert reason in str(caught.value)


def test_lines_are_counted_as_an_editor_counts_them() -> None:
    stream = io.BytesIO(b"\xef\xbb\xbf" + line("1") + b"\n  \r\n" + line("2") + line('"\\u2028"') + line("3").rstrip())
    assert [(number, event.payload) for number, event in read_events(stream, "f")] == [
        (1, "1"),
        (4, "2"),
        (5, '"\\u2028"'),
        (6, "3"),
    ]


def test_an_error_names_file_and_line() -> None:
    stream = io.BytesIO(line("1") + b"\n" + line("nul"))
    with pytest.raises(BadLine) as caught:
        list(read_events(stream, "runs/a.jsonl"))
    assert str(caught.value).startswith("runs/a.jsonl:3: expected a value at column 68")
    assert (caught.value.file, caught.value.line) == ("runs/a.jsonl", 3)


def test_numbers_that_numeric_can_hold_are_accepted_to_the_last_digit() -> None:
    for number in ("1e131071", "9" * 131072, "1e-16383", "0.1e-16382", "0e5", "0.000e3", "123e-5"):
        assert parse_event(line(number)).payload == number


def test_accepts_the_same_as_the_standard_library_does() -> None:
    # The walk without recursion must agree with the scanner that it stands in for.
    from walstream.ledger import json_lines

    values = ['{"a": [1, 2.5e3, true, null, "x\\n"], "": {}}', "[]", "[[[]]]", '"\\""', "-1", " 1"]
    for text in values:
        end = json_lines._walk(text, 0)
        assert text[:end].strip() == text.strip()
        json.loads(text)
