"""Idempotency keys that a retry derives again from what it is about."""

from __future__ import annotations

import hashlib
import re
from typing import Any, Final

from walstream.errors import PayloadError

from .json_values import exact_text

_BEYOND_ASCII: Final = re.compile(r"[^\x00-\x7e]")


def idempotency_key(*parts: Any) -> str:
    """A key that is the same whenever it is made of the same parts: SHA-256, as 64 hexadecimal digits.

    For a message that is the session, its role, its content and the number of the turn; for a call of another system
    the session, the step, and what identifies the effect. What differs between two tries (the time, an attempt's
    number) must not be among them.

    What is hashed is the JSON array of the parts in ASCII, without spaces and with sorted keys, so that other languages
    can make the same key; in Python it is ``json.dumps(parts, sort_keys=True, separators=(",", ":"))``. A UUID counts
    as its text, a ``Decimal`` as a number with its digits (1.10 is not 1.1).

    Args:
        parts: JSON values.

    Raises:
        PayloadError: there are none, or one of them is not JSON.

    >>> idempotency_key("7f2c", "user", "Book the flight", 3)[:16]
    'ce6f302ff8aa1cb3'
    >>> idempotency_key("a", "bc") == idempotency_key("ab", "c")
    False
    """
    if not parts:
        raise PayloadError("an idempotency key has to be made of something")
    text = exact_text([_sorted(part) for part in parts], root="key")
    return hashlib.sha256(_BEYOND_ASCII.sub(_escaped, text).encode()).hexdigest()


def _escaped(found: re.Match[str]) -> str:
    units = found[0].encode("utf-16-be").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, list | tuple):
        return [_sorted(each) for each in value]
    return value
