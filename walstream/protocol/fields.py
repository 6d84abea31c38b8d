"""Reading a message's fields one after the other, so that no byte is taken that is not there.

Source: PostgreSQL documentation, "Message Data Types" (55.6), and TupleData in "Logical Replication Message Formats".
"""

from __future__ import annotations

from struct import Struct
from struct import error as StructError
from typing import NoReturn

from walstream.errors import DecodeError

from .messages import UNCHANGED, Binary, TupleData, Value

# Letters of the columns inside a tuple.
_NULL, _UNCHANGED, _TEXT, _BINARY = 0x6E, 0x75, 0x74, 0x62

_size = Struct(">i").unpack_from


class Fields:
    """A message's payload and how far it has been read. Every read checks that the bytes are there."""

    __slots__ = ("at", "in_block", "lsn", "payload", "version")

    def __init__(self, payload: bytes, lsn: int, in_block: bool, version: int) -> None:
        self.payload = payload
        self.at = 1
        self.lsn = lsn
        self.in_block = in_block
        self.version = version

    def fail(self, reason: str, hint: str = "") -> NoReturn:
        raise DecodeError(reason, tag=chr(self.payload[0]), lsn=self.lsn, hint=hint)

    def end(self) -> None:
        left = len(self.payload) - self.at
        if left:
            self.fail(f"{left} bytes left over after byte {self.at}")

    def _take(self, size: int) -> bytes:
        at = self.at
        end = at + size
        if end > len(self.payload):
            self.fail(f"cut short: {size} bytes were to come at byte {at}, {len(self.payload) - at} did")
        self.at = end
        return self.payload[at:end]

    def unsigned(self, size: int) -> int:
        return int.from_bytes(self._take(size), "big")

    def signed(self, size: int) -> int:
        return int.from_bytes(self._take(size), "big", signed=True)

    def count(self, size: int) -> int:
        """A number of things or bytes: sent signed, never negative."""
        at = self.at
        number = self.signed(size)
        if number < 0:
            self.fail(f"a length of {number} at byte {at}")
        return number

    def flags(self, known: int) -> int:
        """One byte of flags, none of them outside of ``known``."""
        flags = self.unsigned(1)
        if flags & ~known:
            self.fail(f"flags {flags:#x} are not known")
        return flags

    def char(self, allowed: frozenset[str]) -> str:
        letter = chr(self.unsigned(1))
        if letter not in allowed:
            self.fail(f"{letter!r} at byte {self.at - 1} is none of {', '.join(sorted(allowed))}")
        return letter

    def name(self) -> str:
        at = self.at
        end = self.payload.find(0, at)
        if end < 0:
            self.fail(f"no NUL byte ends the name at byte {at}")
        self.at = end + 1
        try:
            return self.payload[at:end].decode()
        except UnicodeDecodeError as error:
            self.fail(
                f"the name at byte {at} is not UTF-8 ({error.reason})",
                hint="the connection must have client_encoding = UTF8, and a database in SQL_ASCII names that fit it",
            )

    def lsn64(self) -> int:
        return self.unsigned(8)

    def time(self) -> int:
        return self.signed(8)

    def xid(self) -> int:
        return self.unsigned(4)

    def block_xid(self) -> int | None:
        """The xid that a change has inside a stream block only."""
        return self.unsigned(4) if self.in_block else None

    def oid(self) -> int:
        return self.unsigned(4)

    def sized(self) -> bytes:
        """Bytes with their number in front."""
        return self._take(self.count(4))

    def values(self) -> TupleData:
        """TupleData. In one loop, because an UPDATE of a wide table has a lot of them."""
        payload = self.payload
        whole = len(payload)
        values: list[Value] = []
        count = self.count(2)
        at = self.at
        try:
            for _ in range(count):
                kind = payload[at]
                if kind in (_NULL, _UNCHANGED):
                    values.append(None if kind == _NULL else UNCHANGED)
                    at += 1
                    continue
                if kind != _TEXT and kind != _BINARY:
                    self.fail(f"a column of the unknown kind {kind:#04x} at byte {at}")
                (size,) = _size(payload, at + 1)
                start = at + 5
                end = start + size
                if size < 0 or end > whole:
                    self.fail(f"{size} bytes were to come at byte {start}, {whole - start} did")
                values.append(payload[start:end] if kind == _TEXT else Binary(payload[start:end]))
                at = end
        except (IndexError, StructError):
            self.fail(f"cut short: of {count} columns {len(values)} are there")
        self.at = at
        return tuple(values)
