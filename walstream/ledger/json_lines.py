"""The import format: JSON Lines, one event a line, read without distorting a byte of any payload.

A line is an object with the keys ``session_id``, ``agent_id``, ``event_type`` (strings) and ``payload`` (any JSON).
The payload is cut out of the line as text and never parsed into Python values: ``1234567890123456789`` and ``1.10``
arrive in the ledger as they were written. What ``jsonb`` cannot hold is refused here, with the line's number, before
it costs a transaction (PostgreSQL documentation, 8.14 "JSON Types": U+0000, lone surrogates, numbers beyond
``numeric``). The scanner is iterative: nesting that Postgres accepts and a recursive parser does not is no problem.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import IO, Final

from walstream.errors import LedgerError

from .append import NewEvent

FIELDS: Final = ("session_id", "agent_id", "event_type", "payload")

IGNORED: Final = frozenset({"offset", "seq", "created_at", "committed_at", "lsn", "key", "recovered", "extras"})
"""What ``walstream tail --json`` writes beside the four fields. The ledger that imports gives its own."""

# One JSON token after optional white space (RFC 8259). The string's inner loop is unrolled: C speed over plain text.
_TOKEN = re.compile(
    r"[ \t\n\r]*(?:"
    r'(?P<string>"[^"\\\x00-\x1f]*(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})[^"\\\x00-\x1f]*)*")'
    r"|(?P<punctuation>[{}\[\]:,])"
    r"|(?P<number>-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?)(?![0-9.eE+-])"
    r"|(?P<word>true|false|null)(?![A-Za-z0-9_])"
    r")"
)
_SPACE = re.compile(r"[ \t\n\r]*")
_SUSPICIOUS_ESCAPE = re.compile(r"\\u(?:0000|[dD][89a-fA-F])")
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|.)", re.DOTALL)
_NUMBER = re.compile(r"-?([0-9]+)(?:\.([0-9]+))?(?:[eE]([-+]?[0-9]+))?")

# What `numeric` can hold (documentation, 8.1.2): digits before and after the decimal point.
_MAX_WHOLE_DIGITS: Final = 131072
_MAX_SCALE: Final = 16383


class BadLine(LedgerError):
    """A line of an import that is not an event, or that the ledger cannot hold.

    Attributes:
        file: the name as it was given (``-`` for the standard input).
        line: its number, from 1.
        reason: what is wrong with it.
    """

    def __init__(self, file: str, line: int, reason: str, *, hint: str = "") -> None:
        super().__init__(f"{file}:{line}: {reason}", hint=hint)
        self.file = file
        self.line = line
        self.reason = reason


def read_events(stream: IO[bytes], file: str) -> Iterator[tuple[int, NewEvent]]:
    """Yield ``(line number, event)`` for every line that is not blank.

    Args:
        stream: binary, so that line numbers count real line feeds and the encoding is checked here.
        file: its name, for errors.

    Raises:
        BadLine: at the first line that is not an event.
    """
    for number, raw in enumerate(stream, start=1):
        if number == 1 and raw.startswith(b"\xef\xbb\xbf"):
            raw = raw[3:]  # a byte order mark, as some editors leave it
        if not raw.strip():
            continue
        try:
            yield number, parse_event(raw)
        except ValueError as error:
            raise BadLine(file, number, str(error)) from None


def parse_event(raw: bytes) -> NewEvent:
    """Parse one line.

    Raises:
        ValueError: it is not an event; the message says why, for a person.
    """
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: byte 0x{raw[error.start]:02x} at position {error.start + 1}") from None
    found = _members(text)
    missing = [name for name in FIELDS if name not in found]
    if missing:
        raise ValueError(f"without {', '.join(missing)}; an event has {', '.join(FIELDS)}")
    unknown = [name for name in found if name not in FIELDS and name not in IGNORED]
    if unknown:
        raise ValueError(f"unknown key {unknown[0]!r}; an event has {', '.join(FIELDS)}")
    session_id, agent_id, event_type = (_string(name, found[name]) for name in FIELDS[:3])
    return NewEvent(session_id, agent_id, event_type, found["payload"])


def _string(name: str, text: str) -> str:
    if not text.startswith('"'):
        raise ValueError(f"{name} must be a string, not {text[:40]}")
    value = json.loads(text)
    if not value:
        raise ValueError(f"{name} is empty")
    assert isinstance(value, str)
    return value


def _members(text: str) -> dict[str, str]:
    """Validate ``text`` as one JSON object and return its members as the texts they were written in."""
    members: dict[str, str] = {}
    token = _TOKEN.match(text)
    if token is None or token.group("punctuation") != "{":
        raise ValueError("not a JSON object")
    position = token.end()
    closing = _TOKEN.match(text, position)
    if closing is not None and closing.group("punctuation") == "}":
        position = closing.end()
    else:
        while True:
            position, name = _expect_name(text, position)
            if name in members:
                raise ValueError(f"the key {name!r} comes twice")
            start = _end_of_space(text, position)
            position = _end_of_value(text, start)
            members[name] = text[start:position]
            token = _TOKEN.match(text, position)
            mark = token.group("punctuation") if token else None
            if token is None or mark not in (",", "}"):
                raise _unexpected(text, position, "',' or '}'")
            position = token.end()
            if mark == "}":
                break
    rest = _end_of_space(text, position)
    if rest != len(text):
        raise ValueError(f"something follows the object, at column {rest + 1}: {text[rest : rest + 20]!r}")
    _check_escapes(text)
    return members


def _expect_name(text: str, position: int) -> tuple[int, str]:
    token = _TOKEN.match(text, position)
    if token is None or token.group("string") is None:
        raise _unexpected(text, position, "a key in double quotes")
    colon = _TOKEN.match(text, token.end())
    if colon is None or colon.group("punctuation") != ":":
        raise _unexpected(text, token.end(), "':'")
    name = json.loads(token.group("string"))
    assert isinstance(name, str)
    return colon.end(), name


def _end_of_value(text: str, position: int) -> int:
    """Return where the JSON value that starts at ``position`` ends.

    The standard library's scanner says so for nearly all of them; what it refuses, or is too deep for it, is judged
    here, so that every complaint has a column.
    """
    try:
        return _QUICK.raw_decode(text, position)[1]
    except (ValueError, RecursionError):
        return _walk(text, position)


def _walk(text: str, position: int) -> int:
    """The same without recursion.

    ``stack`` holds the closing mark of every open container. ``state`` is what may come next: ``value``, ``first``
    (a value or name, or the end of an empty container), ``name``, or ``end`` (a comma or the container's end).
    """
    match = _TOKEN.match
    stack: list[str] = []
    state = "value"
    while True:
        token = match(text, position)
        if token is None:
            raise _unexpected(text, position, "a value" if state == "value" else "JSON to go on")
        kind = token.lastgroup
        mark = token.group("punctuation")
        if state in ("name", "first") and stack and stack[-1] == "}" and kind == "string":
            colon = match(text, token.end())
            if colon is None or colon.group("punctuation") != ":":
                raise _unexpected(text, token.end(), "':'")
            position = colon.end()
            state = "value"
            continue
        if state == "end":
            if mark == ",":
                position = token.end()
                state = "name" if stack[-1] == "}" else "value"
                continue
            if mark != stack[-1]:
                raise _unexpected(text, position, f"',' or '{stack[-1]}'")
            stack.pop()
        elif state == "first" and mark == stack[-1]:
            stack.pop()
        elif state == "name" or (state == "first" and stack[-1] == "}"):
            raise _unexpected(text, position, "a key in double quotes")
        elif mark in ("{", "["):
            stack.append("}" if mark == "{" else "]")
            position = token.end()
            state = "first"
            continue
        elif mark is not None:
            raise _unexpected(text, position, "a value")
        elif kind == "number":
            _check_number(token.group("number"))
        position = token.end()
        if not stack:
            return position
        state = "end"


def _end_of_space(text: str, position: int) -> int:
    space = _SPACE.match(text, position)
    return space.end() if space else position


def _unexpected(text: str, position: int, wanted: str) -> ValueError:
    position = _end_of_space(text, position)
    found = text[position : position + 20].rstrip("\n\r")
    for constant in ("NaN", "Infinity", "-Infinity"):
        if found.startswith(constant):
            return ValueError(f"{constant} at column {position + 1} is not JSON, and jsonb cannot hold it")
    if not found:
        return ValueError(f"the line ends at column {position + 1} where {wanted} was expected")
    if found.startswith('"'):
        return ValueError(f"a string at column {position + 1} has no end, a bad escape, or a raw control character")
    return ValueError(f"expected {wanted} at column {position + 1}, found {found!r}")


def _check_number(number: str) -> None:
    """Refuse what ``numeric`` cannot hold.

    Raises:
        ValueError: the number has too many digits before or after its decimal point.
    """
    if len(number) < 1000 and "e" not in number and "E" not in number:
        return
    parts = _NUMBER.fullmatch(number)
    assert parts is not None
    whole, fraction, exponent = parts.group(1), parts.group(2) or "", parts.group(3) or "0"
    power = int(exponent) if len(exponent) < 12 else (1 << 40) * (-1 if exponent.startswith("-") else 1)
    digits = (whole + fraction).lstrip("0")
    first = len(whole) - (len(whole + fraction) - len(digits)) + power if digits else 0  # digits before the point
    if first > _MAX_WHOLE_DIGITS or len(fraction) - power > _MAX_SCALE or abs(power) > 1 << 30:
        shown = number if len(number) <= 24 else f"{number[:24]}…"
        raise ValueError(f"the number {shown} is beyond what numeric, and so jsonb, can hold")


def _check_escapes(text: str) -> None:
    """Refuse U+0000 and lone surrogates. Backslashes stand in strings only, so one pass over the text finds them."""
    if _SUSPICIOUS_ESCAPE.search(text) is None:
        return
    high_ends_at = -1
    for escape in _ESCAPE.finditer(text):
        code = int(escape.group(1), 16) if escape.group(1) else -1
        low = 0xDC00 <= code <= 0xDFFF
        if high_ends_at >= 0 and not (low and escape.start() == high_ends_at):
            raise ValueError(f"a lone surrogate at column {high_ends_at - 5}, which jsonb cannot hold")
        if low and high_ends_at < 0:
            raise ValueError(f"a lone surrogate at column {escape.start() + 1}, which jsonb cannot hold")
        if code == 0:
            raise ValueError(f"U+0000 at column {escape.start() + 1}, which jsonb cannot hold")
        high_ends_at = escape.end() if 0xD800 <= code <= 0xDBFF else -1
    if high_ends_at >= 0:
        raise ValueError(f"a lone surrogate at column {high_ends_at - 5}, which jsonb cannot hold")


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


# Numbers stay text: nothing is converted, so no limit on digits is met and no time is spent.
_QUICK = json.JSONDecoder(parse_float=_check_number, parse_int=_check_number, parse_constant=_refuse_constant)
