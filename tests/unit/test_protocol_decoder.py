"""Rules of the decoder that no healthy server shows: what it refuses, and what it keeps between messages."""

from __future__ import annotations

import pickle
from struct import pack

import pytest

from walstream.errors import DecodeError
from walstream.protocol.decoder import Decoder
from walstream.protocol.ledger_row import decode_begin, decode_commit
from walstream.protocol.messages import (
    UNCHANGED,
    Binary,
    Commit,
    Insert,
    LogicalMessage,
    StreamAbort,
    StreamStart,
    StreamStop,
    Truncate,
    Update,
)

AT = 0x16_B374D848
BEGIN = b"B" + pack(">QqI", 1, 2, 3)
COMMIT = b"C" + pack(">BQQq", 0, 1, 2, 3)
START = b"S" + pack(">IB", 7, 1)
ROW = pack(">IcHcIc", 5, b"N", 1, b"t", 1, b"x")


def test_an_unknown_message_is_named_with_its_letter_and_place() -> None:
    """C11: fail fast; the message says what and where, and what may be the cause."""
    with pytest.raises(DecodeError, match="unknown message type 0x7a in message 'z' at LSN 16/B374D848") as error:
        Decoder(1).decode(b"z\0\0", AT)
    assert (error.value.tag, error.value.lsn) == ("z", AT)
    assert "newer pgoutput" in error.value.hint


def test_an_empty_message_is_refused() -> None:
    with pytest.raises(DecodeError, match="empty message at LSN 16/B374D848"):
        Decoder(1).decode(b"", AT)


def test_a_stray_stream_abort_is_tolerated_by_version_1() -> None:
    """PostgreSQL 18 can send one for a transaction that it found rolled back while decoding it."""
    assert Decoder(1).decode(b"A" + pack(">II", 7, 7)) == StreamAbort(7, 7)


@pytest.mark.parametrize("version", [1, 2, 3])
def test_place_and_time_of_an_abort_belong_to_version_4(version: int) -> None:
    payload = b"A" + pack(">IIQq", 7, 8, 9, 10)
    assert Decoder(4).decode(payload) == StreamAbort(7, 8, 9, 10)
    with pytest.raises(DecodeError, match="16 bytes left over"):
        Decoder(version).decode(payload)


@pytest.mark.parametrize(
    ("payload", "since"),
    [
        (START, 2),
        (b"c" + pack(">IBQQq", 7, 0, 1, 2, 3), 2),
        (b"p" + pack(">BQQqI", 0, 1, 2, 3, 4) + b"gid\0", 3),
    ],
)
def test_a_message_of_a_later_version_is_refused(payload: bytes, since: int) -> None:
    Decoder(since).decode(payload)
    with pytest.raises(DecodeError, match=f"not a message of protocol version {since - 1}"):
        Decoder(since - 1).decode(payload)


@pytest.mark.parametrize("version", [0, 5])
def test_there_are_four_versions(version: int) -> None:
    with pytest.raises(ValueError, match="1 to 4"):
        Decoder(version)


def test_changes_carry_an_xid_inside_a_block_only() -> None:
    decoder = Decoder(2)
    assert decoder.decode(b"I" + ROW) == Insert(5, (b"x",))
    assert decoder.decode(START) == StreamStart(7, True)
    assert decoder.decode(b"I" + pack(">I", 8) + ROW) == Insert(5, (b"x",), xid=8)
    assert decoder.decode(b"E") == StreamStop()
    assert decoder.decode(b"I" + ROW) == Insert(5, (b"x",))


@pytest.mark.parametrize("payload", [BEGIN, COMMIT, START, b"A" + pack(">II", 7, 7)])
def test_what_never_stands_inside_a_block_is_refused_there(payload: bytes) -> None:
    decoder = Decoder(2)
    decoder.decode(START)
    with pytest.raises(DecodeError, match="between Stream Start and Stream Stop"):
        decoder.decode(payload)


def test_a_block_cannot_end_before_it_began() -> None:
    with pytest.raises(DecodeError, match="no Stream Start"):
        Decoder(2).decode(b"E")


def test_a_refused_message_leaves_the_state_as_it_was() -> None:
    decoder = Decoder(2)
    for payload in (START[:-1], START + b"\0"):
        with pytest.raises(DecodeError):
            decoder.decode(payload)
        assert not decoder.in_block
    decoder.decode(START)
    with pytest.raises(DecodeError):
        decoder.decode(b"E\0")
    assert decoder.in_block


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"C" + pack(">BQQq", 1, 1, 2, 3), "flags 0x1"),
        (b"M" + pack(">BQ", 2, 1) + b"p\0" + pack(">I", 0), "flags 0x2"),
        (b"T" + pack(">IBI", 1, 4, 5), "flags 0x4"),
        (b"T" + pack(">IBI", 0x7FFFFFFF, 0, 5), "2147483647 relations were to come in 4 bytes"),
        (b"T" + pack(">iBI", -1, 0, 5), "a length of -1"),
        (b"I" + pack(">Ich", 5, b"N", -1), "a length of -1"),
        (b"I" + pack(">IcHci", 5, b"N", 1, b"t", -1), "-1 bytes were to come"),
        (b"I" + pack(">IcHcI", 5, b"N", 1, b"t", 0x7FFFFFFF), "2147483647 bytes were to come"),
        (b"I" + pack(">IcH", 5, b"N", 2) + b"n", "of 2 columns 1 are there"),
        (b"I" + pack(">IcH", 5, b"N", 1) + b"t\0\0", "of 1 columns 0 are there"),
        (b"I" + pack(">IcHc", 5, b"N", 1, b"q"), "unknown kind 0x71"),
        (b"I" + pack(">IcH", 5, b"K", 0), "'K' at byte 5 is none of N"),
        (b"D" + pack(">IcH", 5, b"N", 0), "none of K, O"),
        (b"U" + pack(">IcHcH", 5, b"K", 0, b"K", 0), "none of N"),
        (b"R" + pack(">I", 5) + b"s\0t\0x\0\0", "'x' at byte 9 is none of d, f, i, n"),
        (b"R" + pack(">I", 5) + b"s\0t", "no NUL byte ends the name at byte 7"),
        (b"O" + pack(">Q", 5) + b"caf\xe9\0", "the name at byte 9 is not UTF-8"),
    ],
)
def test_what_the_protocol_does_not_know_is_refused(payload: bytes, reason: str) -> None:
    with pytest.raises(DecodeError, match=f"{reason}.* in message '{chr(payload[0])}' at LSN 16/B374D848"):
        Decoder(1).decode(payload, AT)


def test_names_in_another_encoding_are_refused_with_the_setting_that_helps() -> None:
    """C03: without client_encoding = UTF8 a LATIN1 database sends LATIN1."""
    with pytest.raises(DecodeError) as error:
        Decoder(1).decode(b"O" + pack(">Q", 5) + b"caf\xe9\0")
    assert "client_encoding" in error.value.hint


def test_unchanged_toast_null_empty_and_binary_are_four_things() -> None:
    """C14, C17: an unchanged value is not NULL, and a binary one does not pass for text."""
    payload = b"U" + pack(">IcH", 5, b"N", 4) + b"u" + b"n" + b"t\0\0\0\0" + b"b\0\0\0\x01x"
    message = Decoder(1).decode(payload)
    assert isinstance(message, Update)
    assert message.new == (UNCHANGED, None, b"", Binary(b"x"))
    assert message.new[0] is UNCHANGED
    assert b"x" not in message.new
    assert pickle.loads(pickle.dumps(message)).new[0] is UNCHANGED


def test_truncate_and_message_flags() -> None:
    assert Decoder(1).decode(b"T" + pack(">IBII", 2, 3, 5, 6)) == Truncate((5, 6), True, True)
    assert Decoder(1).decode(b"T" + pack(">IB", 0, 0)) == Truncate((), False, False)
    payload = b"M" + pack(">BQ", 0, AT) + b"hb\0" + pack(">I", 2) + b"\0\xff"
    assert Decoder(1).decode(payload) == LogicalMessage(False, AT, "hb", b"\0\xff")


def test_begin_and_commit_have_a_fast_way_that_refuses_the_same() -> None:
    assert decode_begin(BEGIN) == (1, 2, 3)
    assert decode_commit(COMMIT) == (1, 2, 3)
    assert Decoder(1).decode(COMMIT) == Commit(1, 2, 3)
    with pytest.raises(DecodeError, match="flags 0x1"):
        decode_commit(b"C" + pack(">BQQq", 1, 1, 2, 3))
    with pytest.raises(DecodeError, match="another message was to come here in message 'C' at LSN 16/B374D848"):
        decode_begin(COMMIT, AT)
    with pytest.raises(DecodeError, match="another message was to come here in message 'B' at LSN 16/B374D848"):
        decode_commit(BEGIN, AT)


def test_times_before_2000_are_negative() -> None:
    assert decode_begin(b"B" + pack(">QqI", 1, -5, 3)) == (1, -5, 3)
