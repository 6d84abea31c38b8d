"""The hot loop: Begin, Commit, and the ledger's own inserts, straight from bytes to what the engine needs.

An insert costs one generated function with as few Python operations as can check every byte count. What makes it lean:

- A short value is read by one ``unpack`` together with the header of the column behind it; its length picks the
  ready-made unpacker. Columns of fixed width in between (``uuid``) ride along.
- Each header (kind, length) is read before it is judged: an absurd length makes the next read fail or the sum of all
  lengths differ from the size of the message. So there is one test at the end instead of one a column.
- Whatever is unusual (a NULL, a long name, any damage) raises inside, and the general decoder looks at the message
  again: it returns the row if the message is good, and says exactly what is wrong if it is not.

Columns are found by name in the relation message (a new one comes before the first row of each new shape).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from struct import Struct
from struct import error as StructError
from typing import Any, Final, NoReturn, Protocol, cast

from walstream.errors import DecodeError, LedgerError
from walstream.event import Row

from .decoder import Decoder
from .messages import UNCHANGED, Binary, Insert, Relation, Value
from .tags import BEGIN, COMMIT, INSERT

__all__ = [
    "BEGIN",
    "COMMIT",
    "INSERT",
    "RowDecoder",
    "compile_row_decoder",
    "compile_seq_decoder",
    "decode_begin",
    "decode_commit",
    "unpack_begin",
    "unpack_commit",
]

# Type OIDs (pg_type.dat). User types start at 16384 (FirstNormalObjectId): a domain over an integer is one.
_INTEGERS: Final = frozenset({20, 21, 23})  # int8, int2, int4
_FIRST_USER_OID: Final = 16384
_WIDTHS: Final = {2950: 36}  # uuid: its text always has 36 characters

_NUMBER: Final = re.compile(rb"-?[0-9]+")

_SHORT: Final = 255  # values up to this many bytes have a ready-made unpacker
_SHORT_SEQ: Final = 20  # -9223372036854775808
_SEQS: Final = range(-(1 << 63), 1 << 63)

_TEXT: Final = 0x74  # `t`
_NULL: Final = 0x6E  # `n`

_begin = Struct(">BQqI").unpack
_commit = Struct(">BBQQq").unpack

unpack_begin: Final = Struct(">xQqI").unpack
"""(final_lsn, commit_time_us, xid) of what is a Begin message by its letter; ``struct.error`` if its length is not."""
unpack_commit: Final = Struct(">xBQQq").unpack
"""(flags, commit_lsn, end_lsn, commit_time_us) of a Commit message, in the same way."""

_Unpack = Callable[..., tuple[Any, ...]]


class RowDecoder(Protocol):
    """Turns an Insert message of protocol 1 on one relation into a row."""

    def __call__(self, payload: bytes, lsn: int = 0, /) -> Row:
        """Args:
            payload: the whole message, letter included.
            lsn: where it stands in the WAL, for the error only.

        Raises:
            DecodeError: not one whole Insert message of this relation, or not in text format.
            LedgerError: a column that an event needs is NULL, or ``seq`` is no integer.
        """


def decode_begin(payload: bytes, lsn: int = 0) -> tuple[int, int, int]:
    """Return ``(final_lsn, commit_time_us, xid)`` of a Begin message, without making an object of it.

    Raises:
        DecodeError: it is not a whole Begin message and nothing else.
    """
    try:
        tag, final_lsn, time_us, xid = _begin(payload)
    except StructError:
        _refuse(payload, lsn)
    if tag != BEGIN:
        _refuse(payload, lsn)
    return final_lsn, time_us, xid


def decode_commit(payload: bytes, lsn: int = 0) -> tuple[int, int, int]:
    """Return ``(commit_lsn, end_lsn, commit_time_us)`` of a Commit message, without making an object of it.

    Raises:
        DecodeError: it is not a whole Commit message and nothing else.
    """
    try:
        tag, flags, commit_lsn, end_lsn, time_us = _commit(payload)
    except StructError:
        _refuse(payload, lsn)
    if tag != COMMIT or flags:
        _refuse(payload, lsn)
    return commit_lsn, end_lsn, time_us


def _refuse(payload: bytes, lsn: int) -> NoReturn:
    """Say what is wrong with a message; if it is a good one, it is not the one that was to come."""
    message = Decoder(1).decode(payload, lsn)
    raise DecodeError("another message was to come here", tag=message.TAG, lsn=lsn)


def compile_row_decoder(relation: Relation, columns: tuple[str, ...]) -> RowDecoder:
    """Generate the decoder for the inserts of one relation.

    Args:
        relation: the newest message with this OID.
        columns: the names of seq, session_id, agent_id, event_type, payload and created_at in this ledger, in this
            order. All other columns become the row's extras.

    Raises:
        LedgerError: a column is missing, or the one for ``seq`` is no integer.
        ValueError: ``columns`` are not six.
    """
    if len(columns) != 6:
        raise ValueError(f"a ledger has six columns, not {len(columns)}")
    table = relation.qualified
    by_name = {column.name: index for index, column in enumerate(relation.columns)}
    for name in columns:
        if name not in by_name:
            raise _gone(name, relation)
    places = tuple(by_name[name] for name in columns)
    seq_type = relation.columns[places[0]].type_oid
    if seq_type not in _INTEGERS and seq_type < _FIRST_USER_OID:
        raise LedgerError(
            f"column {columns[0]!r} of the ledger {table} numbers the events and must be an integer (smallint, integer "
            f"or bigint); its type has the OID {seq_type}",
            hint=f"see what it is with: SELECT {seq_type}::regtype",
        )
    return _generate(relation, places, _General(relation, places))


def compile_seq_decoder(relation: Relation, seq: str) -> Callable[[bytes, int], int]:
    """Return a decoder of the number alone, for a relation that does not have (or no longer calls so) the rest.

    Raises:
        LedgerError: there is no such column.
    """
    names = [column.name for column in relation.columns]
    if seq not in names:
        raise _gone(seq, relation)
    general = _General(relation, (names.index(seq),) * 6)

    def decode(payload: bytes, lsn: int) -> int:
        return general(payload, lsn)[0]

    return decode


def _gone(name: str, relation: Relation) -> LedgerError:
    has = ", ".join(column.name for column in relation.columns) or "none"
    return LedgerError(
        f"column {name!r} of the ledger {relation.qualified} is not in the stream; it has {has}",
        hint="it was dropped or renamed, or the publication's column list leaves it out: map the column in "
        "walstream.toml ([ledger.columns]), rename it back, or widen the publication",
    )


class _General:
    """The same without speed: for what is unusual, and to say what is wrong."""

    def __init__(self, relation: Relation, places: tuple[int, ...]) -> None:
        self.relation = relation
        self.places = places
        self.others = tuple(i for i in range(len(relation.columns)) if i not in places)
        self.names = tuple(relation.columns[i].name for i in self.others)

    def __call__(self, payload: bytes, lsn: int) -> Row:
        message = Decoder(1).decode(payload, lsn)
        table = self.relation.qualified
        if not isinstance(message, Insert):
            raise DecodeError(f"an Insert into {table} was to come here", tag=message.TAG, lsn=lsn)
        if message.relation_oid != self.relation.oid:
            raise DecodeError(f"this row belongs to relation {message.relation_oid}, not to {table}", tag="I", lsn=lsn)
        if len(message.new) != len(self.relation.columns):
            raise DecodeError(
                f"{len(message.new)} values for the {len(self.relation.columns)} columns of {table}", tag="I", lsn=lsn
            )
        values = [self._text(i, value, lsn) for i, value in enumerate(message.new)]
        seq, session_id, agent_id, event_type, payload_text = (self._required(i, values, lsn) for i in self.places[:5])
        extras = (self.names, tuple(values[i] for i in self.others)) if self.others else None
        return self._seq(seq, lsn), session_id, agent_id, event_type, payload_text, values[self.places[5]], extras

    def _text(self, index: int, value: Value, lsn: int) -> bytes | None:
        if isinstance(value, Binary):
            raise DecodeError(
                f"column {self.relation.columns[index].name!r} of {self.relation.qualified} is in binary format",
                tag="I",
                lsn=lsn,
                hint="the stream was started with the option `binary`, which walstream never sets: take it away",
            )
        if value is UNCHANGED:
            raise DecodeError(
                f"column {self.relation.columns[index].name!r} of {self.relation.qualified} has no value in an Insert",
                tag="I",
                lsn=lsn,
            )
        return value

    def _required(self, index: int, values: list[bytes | None], lsn: int) -> bytes:
        value = values[index]
        if value is None:
            seq = values[self.places[0]]
            raise LedgerError(
                f"column {self.relation.columns[index].name!r} of the ledger {self.relation.qualified} is NULL in the "
                f"row with seq {'NULL' if seq is None else seq.decode('utf-8', 'replace')}{_at(lsn)}",
                hint="an event needs it: set the column NOT NULL, or map another one in walstream.toml "
                "([ledger.columns])",
            )
        return value

    def _seq(self, text: bytes, lsn: int) -> int:
        # int() would also take blanks, underscores and a plus sign, which Postgres never writes.
        column = f"column {self.relation.columns[self.places[0]].name!r} of the ledger {self.relation.qualified}"
        if not _NUMBER.fullmatch(text):
            raise LedgerError(f"{column} is no integer: {text[:40]!r}{_at(lsn)}")
        seq = int(text) if len(text) <= _SHORT_SEQ else _SEQS.stop
        if seq not in _SEQS:
            raise LedgerError(f"{column} has {text[:40].decode()}, which is more than 64 bits hold{_at(lsn)}")
        return seq


def _at(lsn: int) -> str:
    return f", at LSN {lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}" if lsn else ""


@cache
def _unpackers(before: str, after: str, longest: int) -> tuple[_Unpack, ...]:
    """``unpack_from`` for a value of 0, 1, … ``longest`` bytes between two fixed formats."""
    return tuple([Struct(f">{before}{n}s{after}").unpack_from for n in range(longest + 1)])


def _generate(relation: Relation, places: tuple[int, ...], general: _General) -> RowDecoder:
    """Write the function's source and compile it. Only numbers from the relation go into it, never a name.

    For the ledger of the design, whose session_id is a uuid, it is this (116 is ``t``; ``n``: length of the next value;
    ``o``: where it starts; each ``link`` reads a value that is not long together with the header behind it)::

        head, o, unpack = starts[p[12]]
        h, v0, k1, n1, v1, k2, n = unpack(p)
        s = n + 5
        v2, k3, n = link2[n](p, o)
        o += s
        s = n + 5
        v3, k4, n = link3[n](p, o)
        o += s
        e = o + n
        v4 = p[o:e]
        k5, n = link4(p, e)
        o = e + 5
        e = o + n
        v5 = p[o:e]
        o = e
        if o == len(p) and (v0.isdigit() or …) and k1 == 116 and n1 == 36 and k2 == 116 and h == head and …:
            return int(v0), v1, v2, v3, v4, v5, None
    """
    count = len(relation.columns)
    required = frozenset(places)
    head = bytes([INSERT]) + relation.oid.to_bytes(4, "big") + b"N" + count.to_bytes(2, "big")
    scope: dict[str, Any] = {
        "general": general,
        "names": general.names,
        "header": Struct(">BI").unpack_from,
        "errors": (StructError, IndexError, ValueError),
    }
    lines: list[str] = []
    number = f"v{places[0]}"  # int() would also take blanks, underscores and a plus sign, which Postgres never writes
    tests = ["o == len(p)", f"({number}.isdigit() or ({number}[:1] == b'-' and {number}[1:].isdigit()))"]
    if relation.columns[places[0]].type_oid not in _INTEGERS:
        tests.append(f"len({number}) < 19")  # a domain may be over `numeric`, which holds more than 64 bits

    def link(first: int) -> tuple[str, list[str], int, int]:
        """What one unpack can read from the header of column ``first`` on: its format, its variables, its size, and
        the column whose value comes next (its length then is in ``n``)."""
        layout, size, at = "", 0, first
        names: list[str] = []
        while at < count and at in required:
            width = _WIDTHS.get(relation.columns[at].type_oid)
            tests.append(f"k{at} == {_TEXT}")
            if width is None:
                return f"{layout}BI", [*names, f"k{at}", "n"], size + 5, at
            tests.append(f"n{at} == {width}")
            layout += f"BI{width}s"
            names += [f"k{at}", f"n{at}", f"v{at}"]
            size += 5 + width
            at += 1
        return layout, names, size, at

    # The message's own head and the first columns as far as their sizes are known. Where the first one is short (as
    # seq mostly is), the last byte of its length picks an unpacker that reads its value too, and the length with the
    # head: both must be equal to what belongs to that unpacker.
    if 0 in required and places[4] != 0 and relation.columns[0].type_oid not in _WIDTHS:
        layout, names, size, index = link(1)
        first = len(head) + 5
        unpackers = _unpackers(f"{first}s", layout, _SHORT_SEQ if places[0] == 0 else _SHORT)
        scope["starts"] = tuple(
            [(head + b"t" + n.to_bytes(4, "big"), first + n + size, unpack) for n, unpack in enumerate(unpackers)]
        )
        lines.append(f"head, o, unpack = starts[p[{first - 1}]]")
        lines.append(f"{', '.join(['h', 'v0', *names])} = unpack(p)")
    else:
        layout, names, size, index = link(0)
        scope["start"] = Struct(f">{len(head)}s{layout}").unpack_from
        scope["head"] = head
        lines.append(f"{', '.join(['h', *names])}, = start(p)")
        lines.append(f"o = {len(head) + size}")
    tests.append("h == head")
    while index < count:
        if index not in required:
            lines += [
                f"if p[o] == {_NULL}:",
                f"    v{index} = None",
                "    o += 1",
                "else:",
                "    k, n = header(p, o)",
                f"    if k != {_TEXT}:",
                "        raise ValueError",
                "    o += 5",
                "    e = o + n",
                f"    v{index} = p[o:e]",
                "    o = e",
            ]
            layout, names, size, following = link(index + 1)
            if names:
                scope[f"link{index}"] = Struct(f">{layout}").unpack_from
                lines += [f"{', '.join(names)} = link{index}(p, o)", f"o += {size}"]
            index = following
            continue
        layout, names, size, following = link(index + 1)
        if not names:
            lines += ["e = o + n", f"v{index} = p[o:e]", "o = e"]
        elif index == places[4]:
            scope[f"link{index}"] = Struct(f">{layout}").unpack_from
            lines += ["e = o + n", f"v{index} = p[o:e]"]
            lines += [f"{', '.join(names)} = link{index}(p, e)", f"o = e + {size}"]
        else:
            longest = _SHORT_SEQ if index == places[0] else _SHORT
            scope[f"link{index}"] = _unpackers("", layout, longest)
            lines += [f"s = n + {size}", f"{', '.join([f'v{index}', *names])} = link{index}[n](p, o)", "o += s"]
        index = following

    extras = "None"
    if general.others:
        extras = f"(names, ({''.join(f'v{i}, ' for i in general.others)}))"
    row = ", ".join([f"int(v{places[0]})", *(f"v{i}" for i in places[1:]), extras])
    source = "\n".join(
        [
            "def decode(p, lsn=0, /):",
            "    try:",
            *("        " + line for line in lines),
            f"        if {' and '.join(tests)}:",
            f"            return {row}",
            "    except errors:",
            "        pass",
            "    return general(p, lsn)",
        ]
    )
    exec(compile(source, f"<row decoder of relation {relation.oid}>", "exec"), scope)
    return cast(RowDecoder, scope["decode"])
