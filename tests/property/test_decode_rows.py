"""The compiled row decoder: for any shape of table the same as the general decoder, and nothing but typed errors."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.golden.vectors import load_all
from walstream.errors import DecodeError, LedgerError
from walstream.event import Row
from walstream.protocol.decoder import Decoder
from walstream.protocol.ledger_row import compile_row_decoder
from walstream.protocol.messages import UNCHANGED, Binary, Column, Insert, Relation, Value

LEDGER = ("seq", "session_id", "agent_id", "event_type", "payload", "created_at")
_TYPES = {"seq": (20, 21, 23, 16500), "session_id": (2950, 25), "payload": (3802, 114, 25)}
_UUID = b"11111111-2222-3333-4444-555555555555"


def insert_message(oid: int, values: tuple[Value, ...]) -> bytes:
    """What a server sends for an inserted row."""
    out = b"I" + oid.to_bytes(4, "big") + b"N" + len(values).to_bytes(2, "big")
    for value in values:
        if value is None:
            out += b"n"
        elif value is UNCHANGED:
            out += b"u"
        else:
            kind, data = (b"b", value.data) if isinstance(value, Binary) else (b"t", value)
            assert isinstance(data, bytes)
            out += kind + len(data).to_bytes(4, "big") + data
    return out


@st.composite
def relations(draw: st.DrawFn) -> Relation:
    """A ledger whose columns stand in any order, with others before, between and behind them."""
    others = [f"x{i}" for i in range(draw(st.integers(0, 4)))]
    names = draw(st.permutations([*LEDGER, *others]))
    columns = [Column(n == "seq", n, draw(st.sampled_from(_TYPES.get(n, (25, 2950, 16, 1184)))), -1) for n in names]
    return Relation(draw(st.integers(0, (1 << 32) - 1)), "public", "agent_events", "d", tuple(columns))


def _values(
    draw: Callable[[st.SearchStrategy[Any]], Any], relation: Relation, text: st.SearchStrategy[Any]
) -> tuple[Value, ...]:
    out: list[Value] = []
    for column in relation.columns:
        if column.name == "seq":
            out.append(str(draw(st.integers(-(1 << 63), (1 << 63) - 1))).encode())
        elif column.type_oid == 2950:
            out.append(_UUID)
        elif column.name in LEDGER[:5]:
            out.append(draw(text))
        else:
            out.append(draw(st.none() | text))
    return tuple(out)


_TEXT = st.binary(max_size=40) | st.integers(200, 400).map(lambda n: b"x" * n) | st.just(b"y" * 70_000)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_shape_of_table_gives_its_columns_by_name(data: st.DataObject) -> None:
    relation = data.draw(relations())
    decode = compile_row_decoder(relation, LEDGER)
    values = _values(data.draw, relation, _TEXT)
    by_name = dict(zip([c.name for c in relation.columns], values, strict=True))
    others = tuple(c.name for c in relation.columns if c.name not in LEDGER)
    seq, *rest = (by_name[name] for name in LEDGER)
    assert isinstance(seq, bytes)
    extras = (others, tuple(by_name[name] for name in others)) if others else None
    payload = insert_message(relation.oid, values)
    assert decode(payload) == (int(seq), *rest, extras)
    for length in range(min(len(payload), 500)):
        _expect(decode, payload[:length], None)
    _expect(decode, payload[:-1], None)
    _expect(decode, payload + b"\0", None)


_ANY = st.none() | st.just(UNCHANGED) | st.binary(max_size=40) | st.binary(max_size=9).map(Binary)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_what_an_event_cannot_be_made_of_is_refused(data: st.DataObject) -> None:
    relation = data.draw(relations())
    decode = compile_row_decoder(relation, LEDGER)
    values = tuple(data.draw(_ANY) for _ in relation.columns)
    _expect(decode, insert_message(relation.oid, values), _slowly(relation, values))


def _slowly(relation: Relation, values: tuple[Value, ...]) -> Row | None:
    """The row these values are, written down the obvious way; ``None`` if they are none."""
    by_name = dict(zip([c.name for c in relation.columns], values, strict=True))
    if any(value is UNCHANGED or isinstance(value, Binary) for value in values):
        return None
    if any(by_name[name] is None for name in LEDGER[:5]):
        return None
    others = tuple(c.name for c in relation.columns if c.name not in LEDGER)
    six: list[Any] = [by_name[name] for name in LEDGER]
    try:
        six[0] = int(six[0])
    except ValueError:
        return None
    extras: Any = (others, tuple(by_name[name] for name in others)) if others else None
    return (*six, extras)


def _expect(decode: Any, payload: bytes, row: Row | None) -> None:
    if row is None:
        with pytest.raises((DecodeError, LedgerError), match="1/2"):
            decode(payload, 0x1_00000002)
    else:
        assert decode(payload, 0x1_00000002) == row


def _mutate(dice: random.Random, payload: bytes) -> bytes:
    out = bytearray(payload)
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        at = dice.randrange(len(out) + 1)
        match dice.randrange(6):
            case 0:
                del out[at:]
            case 1:
                del out[at : at + dice.randrange(1, 9)]
            case 2:
                out[at:at] = dice.randbytes(dice.randrange(1, 9))
            case 3:
                out[at : at + 4] = dice.choice((b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\0\0\0\0", b"\x80\0\0\0"))
            case _:
                if at < len(out):
                    out[at] ^= 1 << dice.randrange(8)
    return bytes(out)


_ROUNDS = 30  # mutations of each vector; some 40,000 in all


def test_damaged_messages_raise_typed_errors_only_and_both_decoders_agree() -> None:
    """Whatever happens to the bytes: a message, or DecodeError; a row, or DecodeError or LedgerError. And a damaged
    insert that is still a good message must be the same row by the fast way and by the general one."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")  # pytest shows it when this fails
    dice = random.Random(seed)
    for capture in load_all():
        relations_: dict[int, Relation] = {}
        rows: dict[int, Any] = {}
        for vector, decoder in capture.decoders():
            state = decoder.in_block
            message = decoder.decode(vector.payload)
            if isinstance(message, Relation):
                relations_[message.oid] = message
                rows.pop(message.oid, None)
                if {column.name for column in message.columns} >= set(LEDGER):
                    rows[message.oid] = compile_row_decoder(message, LEDGER)
            for _ in range(_ROUNDS):
                payload = _mutate(dice, vector.payload)
                decoder.in_block = state
                with contextlib.suppress(DecodeError):
                    decoder.decode(payload, 1)
                if isinstance(message, Insert) and message.xid is None and message.relation_oid in rows:
                    relation = relations_[message.relation_oid]
                    _expect(rows[relation.oid], payload, _row(relation, payload))
            decoder.in_block = state


def _row(relation: Relation, payload: bytes) -> Row | None:
    try:
        message = Decoder(1).decode(payload)
    except DecodeError:
        return None
    if not isinstance(message, Insert) or message.relation_oid != relation.oid:
        return None
    if len(message.new) != len(relation.columns):
        return None
    return _slowly(relation, message.new)
