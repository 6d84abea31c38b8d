"""Messages that were damaged on their way: no exception other than DecodeError (of a row that is none, LedgerError), no
endless loop, and no wrong value.

A wrong value is one that the bytes do not say. So whatever is decoded is written down again by an encoder that knows
nothing of the decoder, and must be the very bytes that came; and a row that the compiled decoder makes must be the one
that stands in the message as the general decoder sees it, its number written in digits. (Damage that leaves a message
that the server could have sent is no damage that a decoder could notice; TCP and TLS do.)
"""

from __future__ import annotations

import itertools
import random
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.golden.vectors import Capture, load_all
from walstream.errors import DecodeError, LedgerError
from walstream.protocol.decoder import PROTOCOL_VERSIONS, Decoder
from walstream.protocol.ledger_row import (
    RowDecoder,
    compile_row_decoder,
    compile_seq_decoder,
    decode_begin,
    decode_commit,
)
from walstream.protocol.messages import Begin, Binary, Commit, Insert, Message, Relation

from .pgoutput_encoder import encode

LEDGER = ("seq", "session_id", "agent_id", "event_type", "payload", "created_at")
_TAGS = b"BCORYIUDTMSEcAbPKrp"
_NONE = Relation(0, "", "", "d", ())
_NUMBER = re.compile(rb"-?[0-9]+")
_BATCH = 500
_SECONDS_A_BATCH = 10.0  # of this process's own time, so that a busy machine fails nothing; some 0.01 is usual
_SIZES = (b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\0\0\0\0", b"\x80\0\0\0", b"\0\0\0\1", b"\xff\xff", b"\0\0")


def mutate(dice: random.Random, payload: bytes, other: bytes) -> bytes:
    """Damage of one to four kinds, one after the other; ``other`` is a message to take pieces from."""
    out = bytearray(payload)
    for _ in range(dice.choice((1, 1, 1, 2, 3, 4))):
        at = dice.randrange(len(out) + 1)
        match dice.randrange(10):
            case 0:
                del out[at:]
            case 1:
                del out[at : at + dice.randrange(1, 9)]
            case 2:
                out[at:at] = dice.randbytes(dice.randrange(1, 9))
            case 3:
                size = dice.choice(_SIZES)
                out[at : at + len(size)] = size
            case 4:
                out[:1] = bytes([dice.choice(_TAGS)])
            case 5:
                start = dice.randrange(len(other) + 1)
                out[at : at + dice.randrange(12)] = other[start : start + dice.randrange(1, 30)]
            case 6:
                out[at : at + 1] = bytes([dice.choice(b"nutbKON\0\1 -_+09")])
            case _:
                if at < len(out):
                    out[at] ^= 1 << dice.randrange(8)
    return bytes(out)


class Sample:
    """A captured message, and what surrounds it.

    Attributes:
        relation: of the row, if it is an insert into a ledger.
        row: the compiled decoder of that.
    """

    def __init__(
        self, payload: bytes, in_block: bool, version: int, relation: Relation, row: RowDecoder | None
    ) -> None:
        self.payload = payload
        self.in_block = in_block
        self.version = version
        self.row = row
        self.relation = relation


def samples(captures: list[Capture]) -> Iterator[Sample]:
    """Every message that the five majors sent."""
    for capture in captures:
        relations: dict[int, Relation] = {}
        for vector, decoder in capture.decoders():
            in_block = decoder.in_block
            message = decoder.decode(vector.payload)
            decoder.in_block = in_block
            row, relation = None, _NONE
            if isinstance(message, Relation):
                relations[message.oid] = message
            elif isinstance(message, Insert) and message.xid is None:
                relation = relations[message.relation_oid]
                if {column.name for column in relation.columns} >= set(LEDGER):
                    row = compile_row_decoder(relation, LEDGER)
            yield Sample(vector.payload, in_block, capture.protocol_version, relation, row)


class Tally:
    """What became of the messages."""

    def __init__(self) -> None:
        self.tried = self.refused = self.decoded = self.rows = self.compiled = 0


def check(payload: bytes, sample: Sample, version: int, in_block: bool, tally: Tally) -> None:
    """Everything that can decode ``payload``, and everything that must hold of what it makes."""
    decoder = Decoder(version)
    decoder.in_block = in_block
    message: Message | None = None
    try:
        message = decoder.decode(payload, 0x1_00000002)
    except DecodeError:
        assert decoder.in_block is in_block, "an error leaves the state as it was"
        tally.refused += 1
    if message is not None:
        tally.decoded += 1
        assert payload in (encode(message), encode(message, empty_namespace=True)), message
    _check_quick(payload, message if version == 1 and not in_block else _plain(payload))
    if sample.row is not None:
        _check_row(payload, sample, tally)
    if isinstance(message, Relation) and tally.decoded % 10 == 0:
        _check_compiler(message, tally)


def _plain(payload: bytes) -> Message | None:
    """As the engine reads it: protocol 1, outside of a block."""
    try:
        return Decoder(1).decode(payload)
    except DecodeError:
        return None


def _check_quick(payload: bytes, message: Message | None) -> None:
    """The decoders of Begin and Commit that make no object."""
    expected: tuple[int, int, int] | None
    for decode, expected in (
        (
            decode_begin,
            (message.final_lsn, message.commit_time_us, message.xid) if isinstance(message, Begin) else None,
        ),
        (
            decode_commit,
            (message.commit_lsn, message.end_lsn, message.commit_time_us) if isinstance(message, Commit) else None,
        ),
    ):
        try:
            got = decode(payload, 1)
        except DecodeError:
            assert expected is None
        else:
            assert got == expected


def _check_row(payload: bytes, sample: Sample, tally: Tally) -> None:
    relation = sample.relation
    assert sample.row is not None
    try:
        row = sample.row(payload, 1)
    except (DecodeError, LedgerError):
        row = None
    message = _plain(payload)
    expected = None
    if isinstance(message, Insert) and message.relation_oid == relation.oid:
        expected = _row_in(message, relation)
    assert row == expected
    if row is not None:
        tally.rows += 1
        assert compile_seq_decoder(relation, "seq")(payload, 1) == row[0]


def _row_in(message: Insert, relation: Relation) -> tuple[Any, ...] | None:
    """The row that a message holds, the obvious way; ``None`` if it holds none."""
    if len(message.new) != len(relation.columns):
        return None
    if any(value is not None and not isinstance(value, bytes) for value in message.new):
        return None  # binary, or unchanged TOAST
    named = dict(zip([column.name for column in relation.columns], message.new, strict=True))
    seq, *rest = (named[name] for name in LEDGER)
    if seq is None or None in rest[:4]:
        return None
    assert isinstance(seq, bytes)
    if not _NUMBER.fullmatch(seq):
        return None
    others = tuple(column.name for column in relation.columns if column.name not in LEDGER)
    extras = (others, tuple(named[name] for name in others)) if others else None
    return (int(seq), *rest, extras)


def _check_compiler(relation: Relation, tally: Tally) -> None:
    """A damaged relation that is still a message: a decoder can be made of it and works, or LedgerError."""
    try:
        decode = compile_row_decoder(relation, LEDGER)
    except LedgerError:
        return
    tally.compiled += 1
    values = tuple(b"11111111-2222-3333-4444-555555555555" if c.name != "seq" else b"7" for c in relation.columns)
    message = Insert(relation.oid, values)
    assert decode(encode(message)) == _row_in(message, relation)
    binary = Insert(relation.oid, (*values[:-1], Binary(b"7")))
    with pytest.raises(DecodeError):
        decode(encode(binary))


def fuzz(messages: int, seed: int) -> Tally:
    """Damage so many messages and check what becomes of them."""
    print(f"seed {seed}")  # pytest shows it when this fails
    dice = random.Random(seed)
    every = list(samples(load_all()))
    tally = Tally()
    began = time.process_time()
    for sample in itertools.cycle(every):
        version, in_block = sample.version, sample.in_block
        if dice.random() < 0.2:
            version, in_block = dice.choice(PROTOCOL_VERSIONS), dice.random() < 0.5
        check(mutate(dice, sample.payload, dice.choice(every).payload), sample, version, in_block, tally)
        tally.tried += 1
        if tally.tried % _BATCH == 0:
            assert time.process_time() - began < _SECONDS_A_BATCH, "a message takes for ever"
            began = time.process_time()
        if tally.tried == messages:
            return tally
    raise AssertionError("there are no messages")


def test_the_encoder_writes_what_the_servers_sent() -> None:
    """Else it would prove nothing about damaged ones."""
    seen = set()
    for sample in samples(load_all()):
        decoder = Decoder(sample.version)
        decoder.in_block = sample.in_block
        message = decoder.decode(sample.payload)
        assert sample.payload in (encode(message), encode(message, empty_namespace=True))
        seen.add(message.TAG)
    assert seen == {chr(tag) for tag in _TAGS}


def test_twenty_thousand_damaged_messages() -> None:
    tally = fuzz(20_000, random.randrange(1 << 32))
    assert tally.decoded > 1_000, "some damage leaves a message"
    assert tally.refused > 5_000
    assert tally.rows > 100
    assert tally.compiled > 3


@pytest.mark.slow
def test_a_million_damaged_messages() -> None:
    tally = fuzz(1_000_000, random.randrange(1 << 32))
    assert tally.decoded > 50_000
    assert tally.rows > 5_000
    assert tally.compiled > 150


@pytest.mark.parametrize("text", [b" 7", b"7 ", b"+7", b"1_0", b"\x0c7", b"7\n", b"", b"-", b"0x1"])
def test_a_number_is_written_in_digits(text: bytes) -> None:
    """Python's ``int`` takes more than Postgres writes: of a damaged number it would make another one."""
    relation = next(each.relation for each in samples(load_all()) if each.row and len(each.relation.columns) == 6)
    rest = (b"11111111-2222-3333-4444-555555555555", b"a", b"e", b"{}", b"2026-01-01 00:00:00+00")
    values = dict(zip(LEDGER, (text, *rest), strict=True))
    payload = encode(Insert(relation.oid, tuple(values[column.name] for column in relation.columns)))
    with pytest.raises((DecodeError, LedgerError)):
        compile_row_decoder(relation, LEDGER)(payload, 1)
