"""The body of a segment: whatever is encoded is decoded again, and whatever is damaged is refused."""

from __future__ import annotations

import random
import tracemalloc
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from walstream.errors import LedgerError
from walstream.order.segment import MAX_EVENTS, Segment, decode_body, encode_body, size_codes

INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
UINT64 = st.integers(0, (1 << 64) - 1)
SMALL = st.integers(0, 50_000)


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    sizes = draw(st.lists(st.integers(1, 40), min_size=1, max_size=40))
    count, pieces = sum(sizes), len(sizes)
    wide = draw(st.booleans())
    seqs = st.lists(INT64 if wide else SMALL, min_size=count, max_size=count)
    lsns = st.lists(UINT64 if wide else SMALL.map(lambda n: n * 8), min_size=pieces, max_size=pieces)
    times = st.lists(INT64 if wide else SMALL, min_size=pieces, max_size=pieces)
    return Segment(
        first_offset=draw(st.integers(1, 1 << 60)),
        seqs=draw(seqs),
        tx_sizes=sizes,
        commit_lsns=draw(lsns),
        commit_times=draw(times),
        sizes=draw(st.binary(min_size=count, max_size=count)),
        last_lsn=draw(UINT64),
        partial_inserts=draw(st.none() | st.integers(1, 1 << 31)),
        recovered=draw(st.booleans()),
        generation=draw(st.integers(0, 1 << 62)),
    )


def decode(body: bytes, like: Segment) -> Segment:
    return decode_body(
        body,
        first_offset=like.first_offset,
        events=like.events,
        last_lsn=like.last_lsn,
        partial_inserts=like.partial_inserts,
        recovered=like.recovered,
        generation=like.generation,
    )


def one_a_transaction(count: int, *, seed: int = 1) -> Segment:
    """A plausible drain: one event a transaction from several writers, some seqs out of order, some rolled back."""
    source = random.Random(seed)
    seqs, lsns, times = [], [], []
    seq, lsn, time = 1_000_000, 0x16_B374_D848, 824_000_000_000_000
    for _ in range(count):
        seq += source.choice((1, 1, 1, 1, 1, 2, -1, 3))
        lsn += 8 * source.randint(60, 90)
        time += source.randint(100, 1900)
        seqs.append(seq)
        lsns.append(lsn)
        times.append(time)
    return Segment(7, seqs, [1] * count, lsns, times, size_codes([290] * count), lsn + 48, None, False, 3)


@given(segments())
@settings(max_examples=60)
def test_what_is_encoded_is_decoded(segment: Segment) -> None:
    assert decode(encode_body(segment), segment) == segment


@pytest.mark.parametrize("count", [1, 2, 16, 17, 20_000])
def test_every_size(count: int) -> None:
    segment = one_a_transaction(count)
    assert decode(encode_body(segment), segment) == segment


def test_extremes_side_by_side() -> None:
    """Neighbours that are further apart than 64 bits, in both forms."""
    low, high = -(1 << 63), (1 << 63) - 1
    for count in (4, 40):
        half = count // 2
        segment = Segment(
            1,
            [low, high] * half,
            [1] * count,
            [0, (1 << 64) - 1] * half,
            [high, low] * half,
            bytes(count),
            0,
            1,
            True,
            0,
        )
        assert decode(encode_body(segment), segment) == segment


@given(segments(), st.data())
@settings(max_examples=40)
def test_a_truncated_body_is_refused(segment: Segment, data: st.DataObject) -> None:
    body = encode_body(segment)
    cut = data.draw(st.integers(0, len(body) - 1))
    with pytest.raises(LedgerError, match=f"offset {segment.first_offset} "):
        decode(body[:cut], segment)
    with pytest.raises(LedgerError):
        decode(body + b"\0", segment)


@given(segments(), st.data())
@settings(max_examples=40)
def test_a_damaged_body_is_refused(segment: Segment, data: st.DataObject) -> None:
    body = bytearray(encode_body(segment))
    body[data.draw(st.integers(0, len(body) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(LedgerError):
        decode(bytes(body), segment)


@given(segments(), st.data())
@settings(max_examples=120)
def test_a_forged_checksum_gives_a_segment_or_the_typed_error(segment: Segment, data: st.DataObject) -> None:
    """Behind the checksum, too, nothing but LedgerError may come out, and no segment that contradicts itself."""
    body = bytearray(encode_body(segment)[:-4])
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        decoded = decode(bytes(body) + zlib.crc32(body).to_bytes(4, "little"), segment)
    except LedgerError:
        return
    decoded.check()
    assert decode(encode_body(decoded), decoded) == decoded


def test_a_hostile_body_allocates_nothing_large() -> None:
    """A deflate bomb of 200 MB behind honest heads, and counts that lie."""
    honest = one_a_transaction(20_000)
    bomb = zlib.compressobj(9, zlib.DEFLATED, -15)
    planes = bomb.compress(bytes(200 << 20)) + bomb.flush()
    for count, complaint in ((_leb(20_000), "do not have"), (b"\xff\xff\xff\xff\x7f", "it says")):
        heads = count + count + b"\x0e\0\x02" + b"\x06\0" + b"\x0e\0\x02" + b"\x0e\0\x02" + b"\0\0"
        raw = b"\1" + heads + planes
        tracemalloc.start()
        try:
            with pytest.raises(LedgerError, match=complaint):
                decode(raw + zlib.crc32(raw).to_bytes(4, "little"), honest)
            assert tracemalloc.get_traced_memory()[1] < 16 << 20
        finally:
            tracemalloc.stop()


def test_a_body_for_another_number_of_events_is_refused() -> None:
    segment = one_a_transaction(100)
    body = encode_body(segment)
    segment.seqs = [*segment.seqs, 1]
    with pytest.raises(LedgerError, match="100 events"):
        decode(body, segment)


def test_an_unknown_form_is_refused() -> None:
    segment = one_a_transaction(1)
    raw = b"\x03" + encode_body(segment)[1:-4]
    with pytest.raises(LedgerError, match="form 3"):
        decode(raw + zlib.crc32(raw).to_bytes(4, "little"), segment)


def test_segments_that_contradict_themselves_are_not_written() -> None:
    good = one_a_transaction(3)
    for field, value in (
        ("seqs", []),
        ("seqs", [1, 2]),
        ("tx_sizes", [1, 1, 2]),
        ("tx_sizes", [3, 0, 0]),
        ("commit_lsns", [1, 2]),
        ("commit_times", [1, 2]),
        ("sizes", b"\1"),
        ("first_offset", 0),
        ("seqs", [1, 2, 1 << 63]),
        ("commit_lsns", [1, 2, -1]),
    ):
        broken = Segment(**{name: getattr(good, name) for name in Segment.__slots__} | {field: value})
        with pytest.raises(ValueError):
            encode_body(broken)
    many = MAX_EVENTS + 1
    with pytest.raises(ValueError, match="1 to"):
        encode_body(Segment(1, [1] * many, [1] * many, [0] * many, [0] * many, bytes(many), 0, None, False, 0))


def test_it_is_as_small_as_promised() -> None:
    """Sizes, not times: one event fits into a line, a long drain into three bytes an event, bulk into a fifth."""
    assert len(encode_body(one_a_transaction(1))) < 40
    assert len(encode_body(one_a_transaction(10_000))) < 3.5 * 10_000
    bulk = one_a_transaction(20)
    count = 10_000
    bulk.seqs, bulk.tx_sizes = list(range(5, 5 + count)), [500] * 20
    bulk.sizes = size_codes([290] * count)
    assert len(encode_body(bulk)) < 0.2 * count


def test_size_codes_bound_the_row() -> None:
    sizes = [0, 1, 290, 1023, 1024, 3700, 50 << 20]
    assert all((1 << code) - 1 >= size for code, size in zip(size_codes(sizes), sizes, strict=True))
    assert size_codes(sizes[:4]) == bytes([10]) * 4
    assert size_codes([]) == b""


def _leb(value: int) -> bytes:
    out = b""
    while value > 0x7F:
        out += bytes((value & 0x7F | 0x80,))
        value >>= 7
    return out + bytes((value,))
