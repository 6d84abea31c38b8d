"""Following a chain: each record's digests, its link to the one before, numbers and offsets without a hole. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Final

import orjson

from .record import CHAIN, ERASURE, HEADER_AT, NO_HASH, PAYLOAD_MARK, VIOLATION, NoRecord, Record, parse

TAKEN_OVER: Final = frozenset({VIOLATION, ERASURE})
"""Kinds of records that have an id in the database."""

_BEGINNING: Final = b'{"hash":"%b","header":{"prev":"%b","sha256":"%b","n":%d,"kind":"event","offset":%d,"seq":'
_MARK_LENGTH: Final = len(PAYLOAD_MARK)
_SEARCH_FROM: Final = 233  # behind the digests


class Broken(Exception):
    """A record that does not follow from the one before.

    Attributes:
        index: of the line, in those that were given.
        n, offset: of the record that should stand there; the offset is the next event's.
        seq: what the line says it is, if it says so.
        sound: it is a whole record with right digests, only not the one that belongs there.
    """

    def __init__(
        self, reason: str, index: int, n: int, offset: int | None, seq: int | None = None, *, sound: bool = False
    ) -> None:
        super().__init__(reason)
        self.sound = sound
        self.index = index
        self.n = n
        self.offset = offset
        self.seq = seq


@dataclass(slots=True)
class Link:
    """Where a chain stands.

    Attributes:
        n, hash: of the last record.
        offset: of the last event; ``None`` before the first one, if it is not known where they begin.
        begins: offset of the first event since the link was made.
        blanked: records without a payload, and the record that each says declares it.
        erasures: what each record of an erasure declares: first and last number of records.
        hashes: of the records that were asked for.
        events: how many had an offset.
        ids: the highest id in the database of what was taken over from there, by kind (violations, erasures).
        violations, changes: records of violations, and how many changes of the ledger they stand for.
        declared: erasures that are on record as a whole: a large one is several records, of which the last says so.
    """

    n: int = 0
    hash: bytes = NO_HASH
    offset: int | None = None
    begins: int | None = None
    blanked: list[tuple[int, int]] = field(default_factory=list)
    erasures: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    hashes: dict[int, bytes] = field(default_factory=dict)
    events: int = 0
    ids: dict[str, int] = field(default_factory=dict)
    violations: int = 0
    changes: int = 0
    declared: int = 0

    @classmethod
    def before(cls, first: Record) -> Link:
        """The link that ``first`` claims to follow: for a stretch whose beginning is judged elsewhere."""
        return cls(first.n - 1, first.prev, None if first.offset is None else first.offset - 1)

    def follow(self, lines: Sequence[bytes], wanted: Collection[int] = ()) -> None:
        """Check ``lines`` (without line breaks) and stand behind the last of them.

        Args:
            wanted: numbers of records whose hash is to be kept in ``hashes``.

        Raises:
            Broken: the first line that does not follow. The link then stands behind the one before it.
        """
        digest_of = sha256
        n, prev, offset, events = self.n, self.hash, self.offset, self.events
        for index, line in enumerate(lines):
            # The short way, for what nearly every line is: an event with its payload, one further than the one before.
            # What its digests come to, and what has to stand beside them, is put together and compared at once.
            end = line.find(PAYLOAD_MARK, _SEARCH_FROM)
            if end > 0 and offset is not None:
                own = digest_of(line[HEADER_AT : end + 1]).hexdigest().encode()
                payload = digest_of(line[end + _MARK_LENGTH : -1]).hexdigest().encode()
                if line.startswith(_BEGINNING % (own, prev, payload, n + 1, offset + 1)) and line[-1:] == b"}":
                    n += 1
                    offset += 1
                    events += 1
                    prev = own
                    if n in wanted:
                        self.hashes[n] = own
                    continue
            # The long way says what is wrong, if anything is.
            self.n, self.hash, self.offset, self.events = n, prev, offset, events
            self._follow_one(line, index)
            n, prev, offset, events = self.n, self.hash, self.offset, self.events
            if n in wanted:
                self.hashes[n] = prev
        self.n, self.hash, self.offset, self.events = n, prev, offset, events

    def _follow_one(self, line: bytes, index: int) -> None:
        expected = None if self.offset is None else self.offset + 1

        def broken(reason: str, seq: int | None = None, *, sound: bool = True) -> Broken:
            return Broken(reason, index, self.n + 1, expected, seq, sound=sound)

        try:
            record = parse(line)
        except NoRecord as error:
            raise broken(str(error), sound=False) from None
        fault = record.fault()
        if fault is not None:
            raise broken(fault, record.seq, sound=False)
        if record.n != self.n + 1:
            raise broken(f"number {self.n + 1} is to come, and this is number {record.n}", record.seq)
        if record.prev != self.hash:
            raise broken("it does not follow from the record before: another one stood there", record.seq)
        if record.offset is not None:
            if expected is not None and record.offset != expected:
                raise broken(f"offset {expected} is to come, and this is offset {record.offset}", record.seq)
            self.offset = record.offset
            self.events += 1
            if self.begins is None:
                self.begins = record.offset
        elif record.kind == CHAIN:
            if record.n != 1:
                raise broken("a chain begins inside of another one")
            self.begins = first_offset_of(record)
            self.offset = self.begins - 1
        elif record.kind == ERASURE:
            self.erasures[record.n] = ranges_declared(record)
            self.declared += "id" in record.fields()
        elif record.kind == VIOLATION:
            self.violations += 1
            self.changes += changes_told(record)
        if record.kind in TAKEN_OVER:
            note_id(self.ids, record)
        if record.erased_by is not None:
            self.blanked.append((record.n, record.erased_by))
        self.n, self.hash = record.n, record.hash


def note_id(ids: dict[str, int], record: Record) -> None:
    """Keep the highest id of each kind that is taken over from the database."""
    try:
        id_ = record.fields().get("id")
    except (NoRecord, AttributeError):
        return
    if isinstance(id_, int):
        ids[record.kind] = max(id_, ids.get(record.kind, 0))


def ranges_declared(record: Record) -> list[tuple[int, int]]:
    """The records whose payload an erasure declares removed."""
    try:
        return [(int(first), int(last)) for first, last in orjson.loads(record.payload or b"{}")["records"]]
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
        return []


def changes_told(record: Record) -> int:
    """How many changes of the ledger a violation stands for."""
    try:
        told = orjson.loads(record.payload or b"{}").get("changes", 1)
    except (orjson.JSONDecodeError, AttributeError):
        told = 1
    return told if isinstance(told, int) and told >= 1 else 1


def first_offset_of(record: Record) -> int:
    """The offset that the first event of a chain has, by the record that begins it."""
    try:
        first = orjson.loads(record.payload or b"{}").get("first_offset")
    except (orjson.JSONDecodeError, AttributeError):
        first = None
    return first if isinstance(first, int) and first >= 1 else 1
