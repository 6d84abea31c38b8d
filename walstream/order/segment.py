"""A segment: a stretch of the commit order, and the bytes in which one row of ``commit_order`` keeps it.

Pure: no I/O. Offsets are dense, so a segment stores only where it begins; event *i* of it has the offset
``first_offset + i``.

The body (column ``commit_order.body``), all integers little-endian, ``uvarint`` = LEB128, ``svarint`` = zigzag LEB128::

    byte 0          form: 1 = columns, 2 = list. Another form takes another number; unknown ones are refused.
    uvarint         number of events
    uvarint         number of transaction pieces
    form 2          seqs, piece sizes, commit LSNs, commit times: first value and then the differences, each svarint;
                    size codes: one byte an event
    form 1          five column heads (seqs, piece sizes, commit LSNs, commit times, size codes), then one raw deflate
                    stream over the columns' planes
    last 4 bytes    CRC-32 of everything before

A column head is: one byte, bits 0 to 2 the element type (index into ``bBhHiIqQ``), bit 3 set if the elements are
differences of neighbours, bit 4 set if there are no elements because they are all the same; then svarint base; then,
for differences, svarint scale: the number that all of them are a multiple of (commit records are aligned to 8 bytes),
or, with bit 4, the difference itself. The planes of a column are the first bytes of all its elements, then the second
bytes, and so on: the high bytes are nearly always zero, and deflate makes nothing of long runs.
"""

from __future__ import annotations

import math
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import sub
from sys import byteorder
from typing import Final

from walstream.errors import LedgerError

MAX_EVENTS: Final = 1 << 17
"""Events in one segment, at the most: it bounds what decoding a body can allocate, whatever the body claims."""

SMALLEST_SIZE_CODE: Final = 10
"""Rows below 1 KiB share one size code: telling them apart saves no reader any memory, and costs bytes."""

_COLUMNS: Final = 1
_LIST: Final = 2
_LIST_LIMIT: Final = 16  # up to so many events the list is smaller than the columns' heads
_TYPES: Final = "bBhHiIqQ"
_WIDTHS: Final = tuple(array(code).itemsize for code in _TYPES)
_RANGES: Final = tuple(
    (-(1 << 8 * width - 1), (1 << 8 * width - 1) - 1) if code.islower() else (0, (1 << 8 * width) - 1)
    for code, width in zip(_TYPES, _WIDTHS, strict=True)
)
_DELTA: Final = 8
_CONSTANT: Final = 16
_CRC: Final = 4
_INT64: Final = (-(1 << 63), (1 << 63) - 1)
_UINT64: Final = (0, (1 << 64) - 1)
_POSITIVE: Final = (1, MAX_EVENTS)
_BYTE: Final = (0, 255)


@dataclass(slots=True)
class Segment:
    """A stretch of the commit order.

    A *piece* is the part of one transaction that lies in this segment: usually the whole of it.

    Attributes:
        first_offset: offset of the first event.
        seqs: each event's seq, in commit order.
        tx_sizes: events of each piece; they add up to the number of events.
        commit_lsns: for each piece where its commit record starts (0 for recovered events).
        commit_times: for each piece microseconds since 2000-01-01 UTC (0 = unknown).
        sizes: one byte an event, see :func:`size_codes`.
        last_lsn: where the *stream* stands after this segment: the end LSN of its last commit; or, while that commit
            goes on in the next segment, the LSN of the commit. A recovered segment repeats what stood before it.
        partial_inserts: ``None``, or how many rows of the commit at ``last_lsn`` are ordered, counted over all
            segments: a resend skips exactly that many (rule 5).
        recovered: found in the ledger by the reconciler, not delivered by the slot.
        generation: of the ingest that wrote it.
    """

    first_offset: int
    seqs: Sequence[int]
    tx_sizes: Sequence[int]
    commit_lsns: Sequence[int]
    commit_times: Sequence[int]
    sizes: bytes
    last_lsn: int
    partial_inserts: int | None
    recovered: bool
    generation: int

    @property
    def events(self) -> int:
        """Number of events."""
        return len(self.seqs)

    @property
    def next_offset(self) -> int:
        """Offset of the first event after this segment."""
        return self.first_offset + len(self.seqs)

    def check(self) -> None:
        """Raise ``ValueError`` if the parts do not fit together: such a segment must never be written."""
        count = len(self.seqs)
        pieces = len(self.tx_sizes)
        if not 1 <= count <= MAX_EVENTS:
            raise ValueError(f"a segment has 1 to {MAX_EVENTS} events, not {count}")
        if len(self.sizes) != count or len(self.commit_lsns) != pieces or len(self.commit_times) != pieces:
            raise ValueError("the columns of a segment differ in length")
        if min(self.tx_sizes, default=0) < 1 or sum(self.tx_sizes) != count:
            raise ValueError(f"the pieces of a segment hold {sum(self.tx_sizes)} events, the segment {count}")
        if self.first_offset < 1:
            raise ValueError(f"offsets start at 1, not at {self.first_offset}")


def size_codes(sizes: Sequence[int]) -> bytes:
    """Return the size codes of rows of so many bytes: the bit length, so that ``(1 << code) - 1`` bounds the row.

    ``sizes`` are bytes of text over all columns of the row (its insert message's length will do). A reader sums the
    bounds up before it fetches, which keeps its memory bounded (design: payloads of 50 MB).
    """
    if not sizes:
        return b""
    if max(sizes) < 1 << SMALLEST_SIZE_CODE:
        return bytes((SMALLEST_SIZE_CODE,)) * len(sizes)
    return bytes([max(SMALLEST_SIZE_CODE, size.bit_length()) for size in sizes])


def encode_body(segment: Segment) -> bytes:
    """Return the body of a segment, as the module's text describes it.

    Raises:
        ValueError: the segment's parts do not fit together, or a number does not fit its column's 64 bits.
    """
    segment.check()
    count = len(segment.seqs)
    numbers = (segment.seqs, segment.tx_sizes, segment.commit_lsns, segment.commit_times)
    try:
        for values, kind in zip(numbers, "qqQq", strict=True):
            array(kind, values)  # refuses what has more than 64 bits
    except OverflowError:
        raise ValueError(f"a number of the segment at offset {segment.first_offset} is out of range") from None
    if count <= _LIST_LIMIT:
        out = bytearray((_LIST,))
        _put_unsigned(out, count)
        _put_unsigned(out, len(segment.tx_sizes))
        for values in numbers:
            before = 0
            for value in values:
                _put_signed(out, value - before)
                before = value
        out += segment.sizes
    else:
        out = bytearray((_COLUMNS,))
        _put_unsigned(out, count)
        _put_unsigned(out, len(segment.tx_sizes))
        planes = [
            _put_column(out, segment.seqs, delta=True),
            _put_column(out, segment.tx_sizes, delta=False),
            _put_column(out, segment.commit_lsns, delta=True),
            _put_column(out, segment.commit_times, delta=True),
            _put_column(out, segment.sizes, delta=False),
        ]
        deflate = zlib.compressobj(1, zlib.DEFLATED, -15)
        out += deflate.compress(b"".join(planes))
        out += deflate.flush()
    out += zlib.crc32(out).to_bytes(_CRC, "little")
    return bytes(out)


def decode_body(
    body: bytes | memoryview,
    *,
    first_offset: int,
    events: int,
    last_lsn: int,
    partial_inserts: int | None,
    recovered: bool,
    generation: int,
) -> Segment:
    """Return the segment of which ``body`` is the body and the rest are the other columns of the row.

    Allocates no more than a segment of ``events`` events needs, whatever the body claims.

    Raises:
        LedgerError: the body is damaged, of an unknown form, or does not hold ``events`` events.
    """
    data = bytes(body)
    try:
        if len(data) <= _CRC or zlib.crc32(data[:-_CRC]) != int.from_bytes(data[-_CRC:], "little"):
            raise _DamagedError("its checksum is wrong")
        seqs, tx_sizes, commit_lsns, commit_times, sizes = _decode(data[:-_CRC], events)
        segment = Segment(
            first_offset,
            seqs,
            tx_sizes,
            commit_lsns,
            commit_times,
            sizes,
            last_lsn,
            partial_inserts,
            recovered,
            generation,
        )
        segment.check()
    except (_DamagedError, ValueError, zlib.error) as error:
        raise LedgerError(
            f"the commit order is damaged: the segment at offset {first_offset} cannot be read: {error}",
            hint="check the server's disk and logs; restore walstream's schema together with the ledger",
        ) from None
    return segment


class _DamagedError(Exception):
    pass


_Columns = tuple[list[int], list[int], list[int], list[int], bytes]


def _decode(data: bytes, events: int) -> _Columns:
    form = data[0]
    if form not in (_COLUMNS, _LIST):
        raise _DamagedError(f"form {form} is unknown here; a newer release wrote it, or nobody did")
    count, at = _get_unsigned(data, 1)
    pieces, at = _get_unsigned(data, at)
    if count != events or not 1 <= pieces <= count <= MAX_EVENTS:
        raise _DamagedError(f"it says {count} events in {pieces} pieces, its row {events}")
    return _decode_list(data, at, count, pieces) if form == _LIST else _decode_columns(data, at, count, pieces)


def _decode_list(data: bytes, at: int, count: int, pieces: int) -> _Columns:
    if len(data) < count + pieces:
        raise _DamagedError("it is cut off")
    columns = []
    for length, (low, high) in ((count, _INT64), (pieces, _POSITIVE), (pieces, _UINT64), (pieces, _INT64)):
        values = []
        value = 0
        for _ in range(length):
            step, at = _get_signed(data, at)
            value += step
            if not low <= value <= high:
                raise _DamagedError("a number is out of range")
            values.append(value)
        columns.append(values)
    if len(data) - at != count:
        raise _DamagedError("its length is wrong")
    return columns[0], columns[1], columns[2], columns[3], data[at:]


def _decode_columns(data: bytes, at: int, count: int, pieces: int) -> _Columns:
    heads = []
    length = 0
    for elements in (count, pieces, pieces, pieces, count):
        head, at = _Head.read(data, at, elements)
        heads.append(head)
        length += head.length
    inflate = zlib.decompressobj(-15)
    planes = inflate.decompress(data[at:], length) if length else b""
    if inflate.decompress(inflate.unconsumed_tail if length else data[at:], 1) or len(planes) != length:
        raise _DamagedError(f"its columns do not have {length} bytes")
    if not inflate.eof or inflate.unused_data:
        raise _DamagedError("its deflate stream does not end where the body ends")
    columns = []
    start = 0
    for head, bounds in zip(heads, (_INT64, _POSITIVE, _UINT64, _INT64, _BYTE), strict=True):
        columns.append(head.values(planes[start : start + head.length], bounds))
        start += head.length
    return columns[0], columns[1], columns[2], columns[3], bytes(columns[4])


@dataclass(slots=True)
class _Head:
    mode: int
    base: int
    scale: int
    count: int

    @classmethod
    def read(cls, data: bytes, at: int, count: int) -> tuple[_Head, int]:
        if at >= len(data):
            raise _DamagedError("it is cut off")
        mode = data[at]
        if mode >= 2 * _CONSTANT:
            raise _DamagedError(f"column mode {mode} is unknown")
        base, at = _get_signed(data, at + 1)
        scale = 1
        if mode & _DELTA:
            scale, at = _get_signed(data, at)
        return cls(mode, base, scale, count), at

    @property
    def length(self) -> int:
        """Bytes of this column's planes."""
        if self.mode & _CONSTANT:
            return 0
        return _WIDTHS[self.mode & 7] * (self.count - 1 if self.mode & _DELTA else self.count)

    def values(self, planes: bytes, bounds: tuple[int, int]) -> list[int]:
        count, base = self.count, self.base
        if self.mode & _CONSTANT:
            step = self.scale if self.mode & _DELTA else 0
            values = list(range(base, base + step * count, step)) if step else [base] * count
        else:
            values = _unshuffle(planes, self.mode & 7)
            if self.mode & _DELTA:
                if self.scale != 1:
                    scale = self.scale
                    values = [value * scale for value in values]
                values = list(accumulate(values, initial=base))
        if min(values) < bounds[0] or max(values) > bounds[1]:
            raise _DamagedError("a number is out of range")
        return values


def _put_column(out: bytearray, values: Sequence[int], *, delta: bool) -> bytes:
    """Append the column's head to ``out`` and return its planes."""
    base, scale = values[0], 1
    elements: Sequence[int] = values
    if delta:
        elements = list(map(sub, values[1:], values))
    first = elements[0] if elements else 0
    if elements.count(first) == len(elements):
        out.append(_CONSTANT | (_DELTA if delta else 0))
        _put_signed(out, base)
        if delta:
            _put_signed(out, first)
        return b""
    low, high = min(elements), max(elements)
    if delta:
        scale = math.gcd(*elements)
        if scale != 1:
            elements = [element // scale for element in elements]
            low, high = low // scale, high // scale
        if low < _INT64[0] or high > _INT64[1]:  # neighbours further apart than 64 bits: no differences then
            delta, elements, low, high = False, values, min(values), max(values)
    kind = next(index for index, (least, most) in enumerate(_RANGES) if least <= low and high <= most)
    out.append(kind | (_DELTA if delta else 0))
    _put_signed(out, base)
    if delta:
        _put_signed(out, scale)
    return _shuffle(elements, kind)


def _shuffle(values: Sequence[int], kind: int) -> bytes:
    numbers = array(_TYPES[kind], values)
    width = numbers.itemsize
    if byteorder == "big":
        numbers.byteswap()
    raw = numbers.tobytes()
    return raw if width == 1 else b"".join([raw[plane::width] for plane in range(width)])


def _unshuffle(planes: bytes, kind: int) -> list[int]:
    numbers = array(_TYPES[kind])
    width = numbers.itemsize
    count = len(planes) // width
    raw = bytearray(len(planes))
    for plane in range(width):
        raw[plane::width] = planes[plane * count : (plane + 1) * count]
    numbers.frombytes(bytes(raw))
    if byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()


def _put_unsigned(out: bytearray, value: int) -> None:
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def _put_signed(out: bytearray, value: int) -> None:
    _put_unsigned(out, value << 1 if value >= 0 else (-value << 1) - 1)


def _get_unsigned(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift <= 63:  # ten bytes: 65 bits and a sign is the widest that is ever written
        if at >= len(data):
            raise _DamagedError("it is cut off")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise _DamagedError("a number never ends")


def _get_signed(data: bytes, at: int) -> tuple[int, int]:
    value, at = _get_unsigned(data, at)
    return (-(value + 1) >> 1 if value & 1 else value >> 1), at
