"""The golden vectors' files: how they are written, read, and shown.

A file holds what one server of one major sent. Its lines are JSON: first the server, then for each scenario a head with
its options and the OIDs of its tables, followed by its messages: LSN and xid as the server gave them beside the
payload, the payload in hexadecimal, and the decoded form.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from walstream.protocol import messages as m
from walstream.protocol.decoder import Decoder

HERE = Path(__file__).parent
MAJORS = (14, 15, 16, 17, 18)
_LONG = 100  # bytes: a longer value stands in the expected form as its length and digest


@dataclass(frozen=True)
class Vector:
    """One captured message."""

    lsn: int
    xid: int
    payload: bytes
    expected: list[Any]


@dataclass(frozen=True)
class Capture:
    """What one scenario made one server say."""

    major: int
    scenario: str
    protocol_version: int
    tables: dict[int, str]
    vectors: list[Vector]

    def decoded(self) -> Iterator[tuple[Vector, m.Message]]:
        """Each vector with its message, decoded as one stream."""
        decoder = Decoder(self.protocol_version)
        for vector in self.vectors:
            yield vector, decoder.decode(vector.payload, vector.lsn)

    def decoders(self) -> Iterator[tuple[Vector, Decoder]]:
        """Each vector with a decoder in the state that it needs."""
        decoder = Decoder(self.protocol_version)
        for vector in self.vectors:
            yield vector, decoder
            decoder.decode(vector.payload)


def path(major: int) -> Path:
    return HERE / f"pg{major}.jsonl"


def load(major: int) -> list[Capture]:
    captures: list[Capture] = []
    with path(major).open(encoding="utf-8") as lines:
        for line in lines:
            item = json.loads(line)
            if "scenario" in item:
                tables = {int(oid): name for oid, name in item["tables"].items()}
                version = int(item["options"]["proto_version"])
                captures.append(Capture(major, item["scenario"], version, tables, []))
            elif "hex" in item:
                payload = bytes.fromhex(item["hex"])
                captures[-1].vectors.append(Vector(item["lsn"], item["xid"], payload, item["is"]))
    return captures


def load_all() -> list[Capture]:
    return [capture for major in MAJORS for capture in load(major)]


def save(major: int, version: str, captures: Iterable[tuple[Capture, dict[str, str]]]) -> None:
    with path(major).open("w", encoding="utf-8") as out:

        def line(**item: Any) -> None:
            out.write(json.dumps(item, ensure_ascii=False, separators=(",", ":")) + "\n")

        line(server=version)
        for capture, options in captures:
            line(scenario=capture.scenario, options=options, tables=capture.tables)
            for each in capture.vectors:
                line(lsn=each.lsn, xid=each.xid, hex=each.payload.hex(), **{"is": each.expected})


def render(message: m.Message) -> list[Any]:
    """The message as JSON can hold it: its letter, then its fields in order."""
    return [message.TAG, *(_render(getattr(message, field.name)) for field in fields(message))]


def _render(value: Any) -> Any:
    if isinstance(value, bytes):
        if len(value) > _LONG:
            return {"bytes": len(value), "sha256": hashlib.sha256(value).hexdigest()[:16]}
        return value.decode()
    if isinstance(value, m.Binary):
        return {"binary": value.data.hex()}
    if value is m.UNCHANGED:
        return {"unchanged": True}
    if isinstance(value, m.Column):
        return [value.is_key, value.name, value.type_oid, value.type_mod]
    if isinstance(value, tuple):
        return [_render(each) for each in value]
    return value


def outline(messages: Iterable[m.Message]) -> list[str]:
    """The messages without what differs from capture to capture (LSN, xid, OID, time), for people to read and write."""
    names: dict[int, str] = {}
    return [_line(message, names) for message in messages]


def _line(message: m.Message, names: dict[int, str]) -> str:
    name = names.get
    match message:
        case m.Relation():
            names[message.oid] = message.name
            columns = ", ".join(
                each.name + ("*" if each.is_key else "") + (f"[{each.type_mod}]" if each.type_mod >= 0 else "")
                for each in message.columns
            )
            return f"R {message.qualified} {message.replica_identity} ({columns})"
        case m.Type():
            return f"Y {message.namespace}.{message.name}"
        case m.Origin():
            return f"O {message.name}"
        case m.Insert():
            return f"I {name(message.relation_oid)} {_row(message.new)}"
        case m.Update(old=None):
            return f"U {name(message.relation_oid)} {_row(message.new)}"
        case m.Update(old=old, key_only=key_only) if old is not None:
            return f"U {name(message.relation_oid)} {'K' if key_only else 'O'}{_row(old)} {_row(message.new)}"
        case m.Delete():
            return f"D {name(message.relation_oid)} {'K' if message.key_only else 'O'}{_row(message.old)}"
        case m.Truncate():
            which = ", ".join(str(name(oid)) for oid in message.relation_oids)
            return f"T {which}{' cascade' * message.cascade}{' restart' * message.restart_identity}"
        case m.LogicalMessage():
            return f"M {message.prefix}={message.content.decode()}{' transactional' * message.transactional}"
        case m.BeginPrepare() | m.Prepare() | m.CommitPrepared() | m.RollbackPrepared() | m.StreamPrepare():
            return f"{message.TAG} {message.gid}"
        case _:
            return message.TAG


def _row(values: m.TupleData) -> str:
    return f"({', '.join(_shown(value) for value in values)})"


def _shown(value: m.Value) -> str:
    if value is None:
        return "NULL"
    if value is m.UNCHANGED:
        return "<unchanged>"
    if isinstance(value, m.Binary):
        return f"b:{value.data.hex()}"
    assert isinstance(value, bytes)
    return value.decode() if len(value) <= _LONG else f"<{len(value)} bytes>"
