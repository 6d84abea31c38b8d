"""One text for one JSON value, so that contexts can be compared and digested.

The text survives Postgres: written into a ``jsonb`` column, read back and parsed
(:func:`walstream.event.parse_payload`), the value has the same canonical text again. ``jsonb`` keeps a number's digits
but neither its exponent nor a minus before zero, and the parser makes floats, integers and decimals of what it finds.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, Final

import orjson

from walstream.errors import PayloadError

# What orjson writes in a way that does not survive: -0.0 (Postgres drops the minus) and a positive exponent (Postgres
# writes the digits out, and an integer comes back). Both stand behind `:`, `,` or `[`; a match inside of a string only
# costs time.
_UNSTABLE: Final = re.compile(rb"[:,\[](?:-0\.0[,\]}]|-?[0-9][0-9.]*e\+?[0-9])")

_EXPONENT: Final = b"e+" if b"e+" in orjson.dumps(1e16) else b"e"  # releases of orjson differ

# Python refuses to parse integers of more digits than this, at the strictest setting
# (documentation, "Integer string conversion length limitation"). With a point in it, a number is read as a Decimal.
_INTEGER_DIGITS: Final = 640

_CONTAINERS: Final = (dict, list, tuple)


def canonical(value: Any) -> bytes:
    """The canonical JSON text of a value in UTF-8: sorted keys, no spaces, every digit of every number.

    Args:
        value: what JSON knows, as ``parse_payload`` returns it: dicts with string keys, lists, strings, numbers
            (``int`` of any size, ``float``, ``Decimal``), booleans and ``None``, nested to any depth.

    Raises:
        PayloadError: something in it is not JSON (NaN and infinity are not).
    """
    if isinstance(value, _CONTAINERS):
        try:
            text = orjson.dumps(value, default=_fragment, option=orjson.OPT_SORT_KEYS | orjson.OPT_PASSTHROUGH_DATETIME)
        except TypeError:
            pass  # too deep, an integer beyond 64 bits, a lone surrogate, or no JSON: the exact road tells
        else:
            # orjson writes NaN as null. Only if there are more nulls than the outermost container shows, look for one.
            nulls = text.count(b"null")
            if not _is_unstable(text) and (not nulls or nulls <= _top_nones(value) or not _has_nan(value)):
                return text
    return b"".join(_pieces(value))


def digest(context: Any) -> bytes:
    """SHA-256 of the canonical text: 32 bytes.

    Raises:
        PayloadError: see :func:`canonical`.
    """
    return hashlib.sha256(canonical(context)).digest()


def _fragment(value: Any) -> Any:
    if isinstance(value, Decimal):
        return orjson.Fragment(_decimal(value))
    raise TypeError


def _top_nones(value: Any) -> int:
    items = value.values() if isinstance(value, dict) else value
    return sum(1 for each in items if each is None)


def _is_unstable(text: bytes) -> bool:
    # Two quick looks, which nearly always say no, before the slow one.
    return (b"-0.0" in text or _EXPONENT in text) and _UNSTABLE.search(text) is not None


def _has_nan(value: Any) -> bool:
    stack = [value]
    while stack:
        holder = stack.pop()
        for each in holder.values() if isinstance(holder, dict) else holder:
            kind = type(each)
            if kind is str or kind is int or each is None:
                continue
            if isinstance(each, _CONTAINERS):
                stack.append(each)
            elif isinstance(each, float) and not math.isfinite(each):
                return True
    return False


def _pieces(value: Any) -> Iterator[bytes]:
    """The exact road: slower, without recursion, and for every number."""
    # What is still to be written, last first: text as it is, or a value (in a tuple of its own, to tell them apart).
    todo: list[bytes | tuple[Any]] = [(value,)]
    while todo:
        item = todo.pop()
        if isinstance(item, bytes):
            yield item
            continue
        each = item[0]
        if isinstance(each, dict):
            yield b"{"
            todo.append(b"}")
            for place, key in enumerate(reversed(_sorted_keys(each))):
                if place:
                    todo.append(b",")
                todo.append((each[key],))
                todo.append(_string(key) + b":")
        elif isinstance(each, (list, tuple)):
            yield b"["
            todo.append(b"]")
            for place, member in enumerate(reversed(each)):
                if place:
                    todo.append(b",")
                todo.append((member,))
        else:
            yield _scalar(each)


def _sorted_keys(value: dict[Any, Any]) -> list[str]:
    for key in value:
        if not isinstance(key, str):
            raise PayloadError(f"{key!r} is no key of a JSON object: keys are strings")
    return sorted(value)


def _scalar(value: Any) -> bytes:
    if isinstance(value, str):
        return _string(value)
    if value is None:
        return b"null"
    if isinstance(value, bool):
        return b"true" if value else b"false"
    if isinstance(value, int):
        return _integer(value)
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, Decimal):
        return _decimal(value)
    raise PayloadError(f"a value of type {type(value).__name__} is not JSON")


def _string(value: str) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:  # a lone surrogate, which only the type `json` lets through, and only escaped
        return json.dumps(value).encode()


def _integer(value: int) -> bytes:
    if -(1 << 63) <= value < 1 << 64:
        return orjson.dumps(int(value))
    return _whole(format(Decimal(value), "f"))


def _whole(digits: str) -> bytes:
    return (digits if len(digits) <= _INTEGER_DIGITS else f"{digits}.0").encode()


def _float(value: float) -> bytes:
    if not math.isfinite(value):
        raise PayloadError(f"{value} is not JSON", hint="a fold has to keep such a number as a string or as null")
    if value == 0:
        return b"0.0"
    if abs(value) < 1e16:
        return orjson.dumps(float(value))
    return _whole(format(Decimal(repr(float(value))), "f"))


def _decimal(value: Decimal) -> bytes:
    exponent = value.as_tuple().exponent
    if not isinstance(exponent, int):
        raise PayloadError(f"{value} is not JSON", hint="a fold has to keep such a number as a string or as null")
    if exponent < 0:
        near = float(value)
        if math.isfinite(near) and Decimal(repr(near)) == value:
            return _float(near)  # the parser makes a float of it
        digits = format(value, "f").rstrip("0")
        return digits.encode() if digits[-1] != "." else _whole(digits[:-1])
    return _whole(format(value, "f")) if value else b"0"
