"""Where two JSON values differ first."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from .canonical import canonical

ABSENT: Final[Any] = type("Absent", (), {"__repr__": lambda _self: "(absent)"})()
"""Stands where one of the two has nothing."""

_EXCERPT: Final = 60


class Difference(NamedTuple):
    """The first place where two values differ.

    Attributes:
        path: the way to it, as a program would write it: ``messages[3].content``; empty for the values themselves.
        left: what one has there; ``ABSENT`` if nothing.
        right: what the other has there.
    """

    path: str
    left: Any
    right: Any

    def __str__(self) -> str:
        return f"{self.path or 'the value'}: {excerpt(self.left)} / {excerpt(self.right)}"


def first_difference(left: Any, right: Any) -> Difference | None:
    """Find it, objects by their sorted keys, lists from the front; ``None`` if both have one canonical text.

    Raises:
        PayloadError: one of them is not JSON.
    """
    todo: list[tuple[str, Any, Any]] = [("", left, right)]
    while todo:
        path, one, other = todo.pop()
        if one is other:
            continue
        if isinstance(one, dict) and isinstance(other, dict):
            below = [
                (f"{path}{_member(key, path)}", one.get(key, ABSENT), other.get(key, ABSENT))
                for key in sorted(one.keys() | other.keys())
            ]
        elif isinstance(one, list | tuple) and isinstance(other, list | tuple):
            length = max(len(one), len(other))
            below = [
                (f"{path}[{n}]", one[n] if n < len(one) else ABSENT, other[n] if n < len(other) else ABSENT)
                for n in range(length)
                if n >= len(one) or n >= len(other) or one[n] is not other[n]
            ]
        elif isinstance(one, str) and isinstance(other, str):
            if one != other:
                return Difference(path, one, other)
            continue
        elif one is ABSENT or other is ABSENT or canonical(one) != canonical(other):
            return Difference(path, one, other)
        else:
            continue
        todo.extend(reversed(below))
    return None


def excerpt(value: Any, length: int = _EXCERPT) -> str:
    """A value in short, for a person."""
    text = repr(value) if value is ABSENT else canonical(value).decode()
    return text if len(text) <= length else f"{text[: length - 1]}…"


def _member(key: str, path: str) -> str:
    if not key.isidentifier():
        return f"[{canonical(key).decode()}]"
    return f".{key}" if path else key
