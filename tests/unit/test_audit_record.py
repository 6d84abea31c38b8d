"""Records: exact bytes, two digests, and a chain that breaks where it was touched."""

from __future__ import annotations

import json
from hashlib import sha256

import pytest

from tests.audit_files import event
from walstream.audit.chain import Broken, Link
from walstream.audit.record import ERASURE, NO_HASH, NoRecord, Pen, differences, parse, without_payload

NOW = b'"2026-01-02T03:04:05.678+00:00"'
AWKWARD = [
    '{"n": 1.10, "m": 1e400, "big": 123456789012345678901234567890123456789012345678901234567890}',
    '{"nul": "\\u0000", "pair": "\\ud83d\\ude00", "text": "é 漢 \u2028"}',
    '{"a":\n  1,\r\n "b": "x"}',
    '{"payload": "},\\"payload\\":1", "x": 1},"payload":',
    "null",
    '"},\\"erased\\":5}"',
    "[" * 3000 + "]" * 3000,
    '{"n": -0.0, "e": 1E+2}',
]


def lines_of(*payloads: str) -> list[bytes]:
    pen = Pen()
    return [pen.event(event(n, payload=payload), NOW).rstrip(b"\n") for n, payload in enumerate(payloads, 1)]


@pytest.mark.parametrize("payload", AWKWARD)
def test_a_payload_is_kept_byte_for_byte(payload: str) -> None:
    line = lines_of(payload)[0]
    assert b"\n" not in line
    record = parse(line)
    assert record.payload == payload.encode()
    assert record.sha256.decode() == sha256(payload.encode()).hexdigest()
    assert record.fault() is None
    Link(offset=0).follow([line])


def test_a_line_is_json_and_names_everything() -> None:
    pen = Pen()
    extras = (("tenant", "payload"), (b"t-1", None))
    line = pen.event(event(3, payload='{"n": 1.50}', session='quote " here', extras=extras), NOW)
    found = json.loads(line)
    assert found["payload"] == {"n": 1.5}
    assert {name: found["header"][name] for name in found["header"] if name != "sha256"} == {
        "prev": "0" * 64,
        "n": 1,
        "kind": "event",
        "offset": 3,
        "seq": 30,
        "key": "11111111-2222-3333-4444-555555555555:1:30",
        "session_id": 'quote " here',
        "agent_id": "a",
        "event_type": "t",
        "created_at": "2026-01-02 03:04:05.678901+00",
        "committed_at": "2025-12-25T17:46:40.000003+00:00",
        "lsn": "0/C0",
        "xid": 7,
        "recovered": False,
        "extras": {"tenant": "t-1", "payload": None},
        "recorded_at": "2026-01-02T03:04:05.678+00:00",
    }
    record = parse(line.rstrip(b"\n"))
    assert json.loads(record.header) == found["header"]
    assert found["hash"] == sha256(record.header).hexdigest()


def test_a_payload_that_was_removed_leaves_the_chain_as_it_was() -> None:
    lines = lines_of(*AWKWARD)
    blanked = [without_payload(line, 99) for line in lines]
    link = Link(offset=0)
    link.follow(blanked)
    assert (link.n, link.hash) == (len(lines), parse(lines[-1]).hash)
    assert link.blanked == [(n, 99) for n in range(1, len(lines) + 1)]
    assert parse(blanked[0]).payload is None
    assert AWKWARD[0].encode() not in blanked[0]
    assert json.loads(blanked[0])["erased"] == 99


def flipped(line: bytes, position: int) -> bytes:
    return line[:position] + bytes([line[position] ^ 1]) + line[position + 1 :]


def test_any_bit_of_any_byte_is_noticed() -> None:
    lines = lines_of('{"n": 1.10}', '{"text": "a\\nb"}', '{"x":\n1}')
    for index, line in enumerate(lines):
        for position in range(len(line)):
            changed = [*lines]
            changed[index] = flipped(line, position)
            with pytest.raises(Broken) as caught:
                Link(offset=0).follow(changed)
            assert caught.value.index == index, position


@pytest.mark.parametrize(
    ("change", "index", "reason"),
    [
        (lambda lines: [lines[0], lines[2], lines[1], lines[3]], 1, "number 2 is to come, and this is number 3"),
        (lambda lines: [lines[0], *lines[2:]], 1, "number 2 is to come"),
        (lambda lines: [lines[0], lines[0], *lines[1:]], 1, "number 2 is to come, and this is number 1"),
    ],
    ids=["swapped", "dropped", "doubled"],
)
def test_records_that_are_not_where_they_were_are_noticed(change: object, index: int, reason: str) -> None:
    assert callable(change)
    with pytest.raises(Broken, match=reason) as caught:
        Link(offset=0).follow(change(lines_of("1", "2", "3", "4")))
    assert caught.value.index == index


def test_a_hole_in_the_offsets_is_noticed_though_the_chain_holds() -> None:
    pen = Pen()
    lines = [pen.event(event(offset), NOW).rstrip(b"\n") for offset in (1, 2, 4)]
    with pytest.raises(Broken, match="offset 3 is to come, and this is offset 4") as caught:
        Link(offset=0).follow(lines)
    assert (caught.value.n, caught.value.offset, caught.value.seq) == (3, 3, 40)


def test_another_record_under_a_right_number_is_noticed() -> None:
    other = Pen(1, sha256(b"another chain").hexdigest().encode())
    with pytest.raises(Broken, match="does not follow from the record before"):
        Link(offset=0).follow([lines_of("1")[0], other.event(event(2), NOW).rstrip(b"\n")])


def test_records_of_other_kinds_stand_between_events() -> None:
    pen = Pen()
    lines = [
        pen.event(event(1), NOW),
        pen.other("violation", {"what": "changed"}, NOW),
        pen.other("gone", {"reason": "retention"}, NOW, place=(2, 20)),
        pen.other(ERASURE, {"records": [[1, 1]]}, NOW, xid=5, lsn="0/1"),
        pen.event(event(3), NOW),
    ]
    link = Link(offset=0)
    link.follow([line.rstrip(b"\n") for line in lines])
    assert (link.n, link.offset, link.events, link.erasures) == (5, 3, 3, {4: [(1, 1)]})
    assert parse(lines[3].rstrip(b"\n")).fields()["lsn"] == "0/1"


@pytest.mark.parametrize("line", [b"", b"{}", b"\0" * 300, lines_of("1")[0][:-1], lines_of("1")[0] + b" "])
def test_what_is_no_record_is_refused(line: bytes) -> None:
    with pytest.raises(NoRecord):
        parse(line)


def test_differences_are_named_by_column() -> None:
    pen = Pen()
    record = parse(pen.event(event(1, extras=(("tenant", "old"), (b"1", b"x"))), NOW).rstrip(b"\n"))

    def changed(**columns: object) -> list[str]:
        return list(differences(record.fields(), record.sha256, event(1, **columns)))  # type: ignore[arg-type]

    assert changed() == []
    assert changed(payload='{"n": 1.5}') == ["payload"]
    assert changed(session="other", agent="other") == ["session_id", "agent_id"]
    assert changed(extras=(("tenant", "new"), (b"2", b"y"))) == ["tenant"]
    assert record.prev == NO_HASH
    # What was said, and columns of the application's own, may have to be erased: of them it is the digests.
    other = event(1, agent="other", payload='{"n": 2}', extras=(("tenant",), (None,)))
    assert differences(record.fields(), record.sha256, other) == {
        "agent_id": ("a", "other"),
        "payload": tuple(sha256(text).hexdigest() for text in (b'{"n": 1.50}', b'{"n": 2}')),
        "tenant": (sha256(b"1").hexdigest(), None),
    }
