"""What a payload may hold: JSON that ``jsonb`` takes and that Python reads back, checked before a statement is sent.

Postgres refuses a payload in the middle of the caller's transaction, which is then aborted, and says little about where
the fault lies. So it is looked for here. Most payloads need one pass of orjson; only what looks suspicious takes the
exact road, which is slower and names the place.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from datetime import date, datetime, time
from decimal import Decimal
from enum import Enum
from typing import Any, Final, NoReturn
from uuid import UUID

import orjson

from walstream.errors import PayloadError

MAX_DEPTH: Final = 500
"""Containers within each other. Postgres takes some thousands (by its ``max_stack_depth``), but no reader does:
Python's own parser ends at its recursion limit, and a fold puts payloads into containers of its own."""

MAX_INTEGER_DIGITS: Final = 4300
"""Python reads no longer integers unless it is told to (``sys.set_int_max_str_digits``)."""

# ``numeric``: documentation, table 8.2 "Numeric Types".
_DIGITS_BEFORE: Final = 131_072
_DIGITS_AFTER: Final = 16_383

# ``jsonb``: JENTRY_OFFLENMASK in jsonb.h bounds a string and the sum of a container's members; and the server's parser
# doubles an array of 32 (of 72 for objects) bytes a member, which must not exceed 1 GB.
_MAX_BYTES: Final = 0x0FFF_FFFF
_MAX_ELEMENTS: Final = 1 << 24
_MAX_MEMBERS: Final = 1 << 23
_SURELY_FITS: Final = 32 * 1024 * 1024
"""Text of this length can hold none of that: ``0,`` is what grows most in ``jsonb``, to six times its size."""

_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
_NAME: Final = re.compile(r"[A-Za-z_]\w*\Z", re.ASCII)
_LONGEST_STEP: Final = 60

_string_text: Final[Callable[[str], str]] = json.JSONEncoder(ensure_ascii=False).encode


def json_text(value: Any, *, replace: bool = False, root: str = "payload") -> str:
    """The JSON text of a value, every digit of every number in it.

    Args:
        value: dicts with string keys, lists, tuples, strings, ``int``, ``float``, ``Decimal``, booleans, ``None``; and
            what has one obvious text: ``UUID``, ``datetime``, ``date``, ``time``, and members of an ``Enum``.
        replace: replace what ``jsonb`` cannot hold instead of refusing it: U+0000 and lone surrogates by U+FFFD, NaN
            and infinity by null, numbers that are too large or too fine by a string, keys that are numbers, booleans or
            ``None`` by their JSON text.
        root: what the outermost value is called in an error's path.

    Raises:
        PayloadError: something in it cannot be held; the message begins with the path to it.
    """
    text = _quickly(value)
    if text is None:
        text = _Writer(root, replace).write(value)
    if len(text) > _SURELY_FITS:
        _check_size(value, root)
    return text


def exact_text(value: Any, *, root: str) -> str:
    """The same, always by the exact road: one text for one value, as ``json.dumps`` without spaces writes it.

    Raises:
        PayloadError: as :func:`json_text`.
    """
    return _Writer(root, False).write(value)


def check_word(value: str, name: str) -> str:
    """Return ``value``, an id or a name, if Postgres can hold it as text.

    Raises:
        PayloadError: it holds U+0000 or a lone surrogate.
    """
    fault = _fault(value)
    if fault:
        raise PayloadError(f"{name} {value!r} holds {fault}, which Postgres cannot")
    return value


def _quickly(value: Any) -> str | None:
    """orjson's text, or ``None`` if the value has to be looked at closely."""
    try:
        raw = orjson.dumps(value)
    except TypeError:  # an integer beyond 64 bits, a Decimal, a lone surrogate, a key that is no string, depth, …
        return None
    # orjson writes NaN and infinity as null, and U+0000 as it should be written.
    if b"\\u0000" in raw or (b"null" in raw and _has_odd_number(value)):
        return None
    return raw.decode()


def _has_odd_number(value: Any) -> bool:
    todo = [value]
    while todo:
        each = todo.pop()
        if isinstance(each, dict):
            todo.extend(each.values())
        elif isinstance(each, list | tuple):
            todo.extend(each)
        elif isinstance(each, float) and not math.isfinite(each):
            return True
    return False


class _Writer:
    """Writes one value without recursion, and knows at every moment where it is."""

    def __init__(self, root: str, replace: bool) -> None:
        self._replace = replace
        self._path = [root]

    def write(self, value: Any) -> str:
        pieces: list[str] = []
        members: list[Iterator[tuple[str, str, Any]]] = [iter([("", self._path[0], value)])]
        ends = [""]
        while members:
            for lead, step, each in members[-1]:
                self._path[len(members) - 1 :] = [step]
                pieces.append(lead)
                while isinstance(each, Enum) and not isinstance(each, str | int | float):
                    each = each.value
                if not isinstance(each, dict | list | tuple):
                    pieces.append(self._scalar(each))
                    continue
                if len(members) > MAX_DEPTH:
                    raise PayloadError(
                        f"{self._where()}: nested more than {MAX_DEPTH} deep",
                        hint="store what is inside as text: no reader of the ledger gets so deep",
                    )
                if isinstance(each, dict):
                    pieces.append("{")
                    ends.append("}")
                    members.append(self._object(each, len(members)))
                else:
                    pieces.append("[")
                    ends.append("]")
                    members.append(self._array(each))
                break
            else:
                members.pop()
                pieces.append(ends.pop())
        return "".join(pieces)

    @staticmethod
    def _array(value: list[Any] | tuple[Any, ...]) -> Iterator[tuple[str, str, Any]]:
        for place, each in enumerate(value):
            yield "," if place else "", f"[{place}]", each

    def _object(self, value: dict[Any, Any], depth: int) -> Iterator[tuple[str, str, Any]]:
        seen: set[str] = set()
        for place, (key, each) in enumerate(value.items()):
            del self._path[depth:]
            name = self._key(key)
            if name in seen:
                self._refuse(f"the key {name!r} stands there twice", hint="jsonb would keep the last one only")
            seen.add(name)
            step = f".{name}" if _NAME.match(name) else f"[{name[:_LONGEST_STEP]!r}]"
            yield f"{',' if place else ''}{_string_text(name)}:", step, each

    def _key(self, key: Any) -> str:
        if isinstance(key, str):
            return self._clean(str.__str__(key), f"the key {str.__str__(key)[:_LONGEST_STEP]!r}")
        if not self._replace or not (key is None or isinstance(key, bool | int | float)):
            self._refuse(f"the key {key!r} is no string", hint="keys of JSON objects are strings")
        return {None: "null", True: "true", False: "false"}[key] if key is None or isinstance(key, bool) else str(key)

    def _scalar(self, value: Any) -> str:
        if isinstance(value, str):
            return _string_text(self._clean(str.__str__(value), "the string"))
        if value is None:
            return "null"
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, int):
            return self._number(Decimal(int(value)))
        if isinstance(value, float):
            if math.isfinite(value):
                return repr(float(value))
            return self._not_a_number(value)
        if isinstance(value, Decimal):
            return self._number(value) if value.is_finite() else self._not_a_number(value)
        if isinstance(value, datetime | date | time):
            return _string_text(value.isoformat())
        if isinstance(value, UUID):
            return _string_text(str(value))
        kind = type(value).__name__
        return self._refuse(f"a value of type {kind} is not JSON", hint=_HINTS.get(kind, ""))

    def _clean(self, text: str, what: str) -> str:
        fault = _fault(text)
        if not fault:
            return text
        if not self._replace:
            self._refuse(
                f"{what} holds {fault}, which Postgres cannot",
                hint="remove it, or ask for it to be replaced: replace_invalid=True",
            )
        # By way of UTF-16: two halves of a pair that were left apart become the one character that they are.
        whole = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        return whole.replace("\0", _REPLACEMENT)

    def _not_a_number(self, value: float | Decimal) -> str:
        if not self._replace:
            self._refuse(
                f"{value} is no number of JSON",
                hint="write null or a string, or ask for it to be replaced by null: replace_invalid=True",
            )
        return "null"

    def _number(self, value: Decimal) -> str:
        exponent = value.as_tuple().exponent
        assert isinstance(exponent, int)
        if not value and exponent >= 0:
            return "0"  # whatever exponent it has
        before = value.adjusted() + 1 if value else 1
        if exponent >= 0 and before > MAX_INTEGER_DIGITS:
            fault = f"an integer of {before} digits is more than {MAX_INTEGER_DIGITS}, which is what Python reads back"
        elif before > _DIGITS_BEFORE or -exponent > _DIGITS_AFTER:
            fault = (
                f"a number with {before} digits before the point and {max(0, -exponent)} behind it is beyond numeric"
            )
        else:
            # Written out: an exponent would be as exact, but reads as a float in other languages.
            return format(value, "f") if abs(exponent) <= _DIGITS_AFTER else str(value)
        if not self._replace:
            self._refuse(fault, hint="write it as a string, or ask for that: replace_invalid=True")
        return f'"{value}"'

    def _refuse(self, why: str, hint: str = "") -> NoReturn:
        raise PayloadError(f"{self._where()}: {why}", hint=hint)

    def _where(self) -> str:
        if len(self._path) > 40:
            return f"{''.join(self._path[:20])} … {''.join(self._path[-5:])}"
        return "".join(self._path)


def _fault(text: str) -> str:
    """What in a text Postgres cannot hold; empty if nothing."""
    if "\0" in text:
        return "U+0000"
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            return f"the lone surrogate U+{ord(text[error.start]):04X}"
    return ""


def _check_size(value: Any, root: str) -> None:
    """Refuse what would be larger as ``jsonb`` than that can be. Sizes are estimated, a little above the truth."""
    sizes = [0]
    paths = [root]
    members: list[Iterator[tuple[str, Any]]] = [iter([("", value)])]
    while members:
        for step, each in members[-1]:
            del paths[len(members) :]
            if isinstance(each, dict | list | tuple):
                count, most = len(each), _MAX_MEMBERS if isinstance(each, dict) else _MAX_ELEMENTS
                if count > most:
                    raise _too_large("".join([*paths, step]), f"{count} members, and the most is {most}")
                members.append(_steps(each))
                sizes.append(8)
                paths.append(step)
                break
            sizes[-1] += _size(each)
        else:
            size = sizes.pop()
            if size > _MAX_BYTES:
                raise _too_large("".join(paths[: len(members)]), f"about {size} bytes, and the most is {_MAX_BYTES}")
            members.pop()
            if sizes:
                sizes[-1] += size


def _steps(container: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(container, dict):
        for key, each in container.items():
            yield f".{str(key)[:_LONGEST_STEP]}", str(key)
            yield f".{str(key)[:_LONGEST_STEP]}", each
    else:
        for place, each in enumerate(container):
            yield f"[{place}]", each


def _size(value: Any) -> int:
    """Bytes of a scalar in ``jsonb``: its entry in the container, and what stands behind that."""
    if isinstance(value, str):
        return 4 + (len(value) if value.isascii() else len(value.encode(errors="replace")))
    if value is None or isinstance(value, bool):
        return 4
    if isinstance(value, int):
        return 12 + value.bit_length() // 6
    return 16 + len(str(value)) // 2


def _too_large(where: str, why: str) -> PayloadError:
    return PayloadError(
        f"{where}: too large for jsonb: {why}", hint="store it elsewhere, and what finds it there in the event"
    )


_HINTS: Final = {
    "bytes": "encode it as text, in base64 for instance",
    "bytearray": "encode it as text, in base64 for instance",
    "set": "make it a list, sorted: a set has no order, and the event would differ each time",
    "frozenset": "make it a list, sorted: a set has no order, and the event would differ each time",
    "generator": "make it a list",
}
