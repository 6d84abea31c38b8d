"""A record: one line of a segment, and the two digests that make it part of a chain. Pure; docs/audit.md specifies it.

    {"hash":"H","header":{"prev":"P","sha256":"D","n":N,"kind":"K",…},"payload":TEXT}

``H`` is SHA-256 over the bytes of the header as they stand there, ``P`` the hash of the record before, ``D`` SHA-256
over the payload's exact text. The payload itself is under no hash but ``D``: it can be taken away later, and the chain
still verifies. Instead of ``"payload":TEXT`` a line has

- ``"payload_text":"…"``, a JSON string, if the text has line breaks (the type ``json`` keeps them);
- ``"erased":M``, if the payload was removed, as record number ``M`` (of the kind ``erasure``) declares.

The keys ``prev``, ``sha256``, ``n`` and ``kind`` come first and in this order, so that whoever checks millions of
records finds them without parsing. Kinds with an offset have ``offset`` and ``seq`` next.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any, Final

import orjson

from walstream.event import Event
from walstream.lsn import format_lsn

FORMAT: Final = 1

CHAIN: Final = "chain"
"""The first record of a chain: which ledger it is of, and the offset that its first event has."""
EVENT: Final = "event"
GONE: Final = "gone"
"""An offset whose row was removed by a declared erasure before it could be recorded."""
VIOLATION: Final = "violation"
ERASURE: Final = "erasure"
"""A declared removal of what is on record: blanked lines refer to it."""

NO_HASH: Final = b"0" * 64
"""What the first record has for ``prev``."""

_FIXED: Final = re.compile(
    rb'\{"hash":"([0-9a-f]{64})","header":\{"prev":"([0-9a-f]{64})","sha256":"([0-9a-f]{64})",'
    rb'"n":([1-9][0-9]{0,18}),"kind":"([a-z-]{1,32})"(?:,"offset":([1-9][0-9]{0,18}),"seq":(-?[0-9]{1,19}))?[,}]'
)
HEADER_AT: Final = 84
"""Where the header begins in every line."""
# Each can follow the header's end only: inside of a string its quotes would be escaped, and no object in a header is
# followed by a key of these names.
PAYLOAD_MARK: Final = b'},"payload":'
_TEXT_MARK: Final = b'},"payload_text":'
_ERASED_MARK: Final = b'},"erased":'


_OF_A_TIME: Final = b"0123456789-+:. "
_LF: Final = ord("\n")  # as numbers: to look for bytes in bytes takes Python four times as long
_CR: Final = ord("\r")
_NAMES_KEPT: Final = 10_000


class NoRecord(ValueError):
    """A line that is no record."""


@dataclass(frozen=True, slots=True)
class Record:
    """A line, taken apart but not checked.

    Attributes:
        hash, prev, sha256: as the line has them, in hexadecimal.
        n: number in the chain, from 1.
        kind: see the constants of this module.
        offset, seq: of the event; ``None`` for kinds that have none.
        header: the bytes that ``hash`` is over.
        payload: the exact text; ``None`` if it was removed.
        erased_by: number of the record that declares the removal.
    """

    hash: bytes
    prev: bytes
    sha256: bytes
    n: int
    kind: str
    offset: int | None
    seq: int | None
    header: bytes
    payload: bytes | None
    erased_by: int | None

    def fields(self) -> dict[str, Any]:
        """The header, parsed.

        Raises:
            NoRecord: it is no JSON.
        """
        try:
            found: dict[str, Any] = orjson.loads(self.header)
        except orjson.JSONDecodeError as error:
            raise NoRecord(f"the header is no JSON: {error}") from error
        return found

    def fault(self) -> str | None:
        """What is wrong with it by itself, or ``None``: the hash over the header, the digest of the payload."""
        if sha256(self.header).hexdigest().encode() != self.hash:
            return "its header is not what its hash was made over"
        if self.payload is not None and sha256(self.payload).hexdigest().encode() != self.sha256:
            return "its payload is not what its digest was made over"
        return None


def parse(line: bytes) -> Record:
    """Take a line (without its line break) apart.

    Raises:
        NoRecord: it has not the form of a record.
    """
    fixed = _FIXED.match(line)
    if fixed is None:
        raise NoRecord(f"it has not the form of a record: {line[:80]!r}")
    hash_, prev, digest, n, kind, offset, seq = fixed.groups()
    payload: bytes | None = None
    erased_by: int | None = None
    if (end := line.find(PAYLOAD_MARK)) > 0:
        payload = line[end + len(PAYLOAD_MARK) : -1]
    elif (end := line.find(_TEXT_MARK)) > 0:
        payload = _text(line[end + len(_TEXT_MARK) : -1])
    elif (end := line.find(_ERASED_MARK)) > 0:
        number = line[end + len(_ERASED_MARK) : -1]
        if not number.isdigit():
            raise NoRecord("what it says about its erasure is no number")
        erased_by = int(number)
    else:
        raise NoRecord("it has neither a payload nor a note that it was erased")
    if not line.endswith(b"}"):
        raise NoRecord("it does not end where a record ends")
    return Record(
        hash_,
        prev,
        digest,
        int(n),
        kind.decode(),
        None if offset is None else int(offset),
        None if seq is None else int(seq),
        line[HEADER_AT : end + 1],
        payload,
        erased_by,
    )


def _text(raw: bytes) -> bytes:
    try:
        text = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise NoRecord(f"its payload's text is no JSON string: {error}") from error
    if not isinstance(text, str):
        raise NoRecord("its payload's text is no string")
    return text.encode()


def recorded_now() -> bytes:
    """The time of the sink's clock, as a JSON string: ``recorded_at`` of what is recorded now."""
    return orjson.dumps(datetime.now(UTC).isoformat(timespec="milliseconds"))


class Pen:
    """Makes lines, each chained to the one before.

    Args:
        n, hash: number and hash of the last record there is; 0 and :data:`NO_HASH` before the first.
    """

    def __init__(self, n: int = 0, hash: bytes = NO_HASH) -> None:
        self.n = n
        self.hash = hash
        self._commit: object = None
        self._commit_fields = b""
        self._key_prefix = b""
        self._names: dict[tuple[bytes, bytes, bytes], bytes] = {}

    def event(self, event: Event, recorded_at: bytes) -> bytes:
        """The line of an event.

        Args:
            recorded_at: a JSON string.
        """
        row, commit = event.row, event.commit
        if commit is not self._commit:
            self._commit, self._commit_fields = commit, _commit_fields(event)
            self._key_prefix = orjson.dumps(commit.key_prefix)[:-1]
        who = self._names.get(row[1:4])
        if who is None:
            who = self._remember(row[1:4])
        created = row[5]
        if created is None:
            at = b"null"
        elif created.strip(_OF_A_TIME):  # a mapped column can be of another type, and hold anything
            at = orjson.dumps(created.decode())
        else:
            at = b'"%b"' % created
        # `extras` is never the last: see PAYLOAD_MARK.
        return self._line(
            b'"kind":"event","offset":%d,"seq":%d,"key":%b:%d",%b,"created_at":%b%b%b,"recorded_at":%b'
            % (
                event.offset,
                row[0],
                self._key_prefix,
                row[0],
                who,
                at,
                self._commit_fields,
                b"" if row[6] is None else b',"extras":' + orjson.dumps(event.extras),
                recorded_at,
            ),
            row[4],
        )

    def _remember(self, names: tuple[bytes, bytes, bytes]) -> bytes:
        if len(self._names) >= _NAMES_KEPT:
            self._names.clear()
        session, agent, event_type = (orjson.dumps(name.decode()) for name in names)
        made = self._names[names] = b'"session_id":%b,"agent_id":%b,"event_type":%b' % (session, agent, event_type)
        return made

    def other(
        self, kind: str, payload: Any, recorded_at: bytes, *, place: tuple[int, int] | None = None, **fields: Any
    ) -> bytes:
        """The line of a record that is no event.

        Args:
            payload: becomes JSON.
            place: offset and seq, for kinds that stand for an event.
            fields: further ones of the header, strings and numbers only.
        """
        where = b"" if place is None else b',"offset":%d,"seq":%d' % place
        more = b"," + orjson.dumps(fields)[1:-1] if fields else b""
        rest = b'"kind":"%b"%b%b,"recorded_at":%b' % (kind.encode(), where, more, recorded_at)
        return self._line(rest, orjson.dumps(payload))

    def _line(self, rest: bytes, payload: bytes) -> bytes:
        n = self.n + 1
        header = b'{"prev":"%b","sha256":"%b","n":%d,%b}' % (
            self.hash,
            sha256(payload).hexdigest().encode(),
            n,
            rest,
        )
        own = sha256(header).hexdigest().encode()
        self.n, self.hash = n, own
        if _LF in payload or _CR in payload:
            return b'{"hash":"%b","header":%b,"payload_text":%b}\n' % (own, header, orjson.dumps(payload.decode()))
        return b'{"hash":"%b","header":%b,"payload":%b}\n' % (own, header, payload)


def _commit_fields(event: Event) -> bytes:
    commit, when = event.commit, event.committed_at
    return b',"committed_at":%b,"lsn":%b,"xid":%b,"recovered":%b' % (
        b"null" if when is None else b'"%b"' % when.isoformat(timespec="microseconds").encode(),
        b'"%b"' % format_lsn(commit.lsn).encode() if commit.lsn else b"null",
        b"%d" % commit.xid if commit.xid else b"null",
        b"true" if commit.recovered else b"false",
    )


def without_payload(line: bytes, erasure: int) -> bytes:
    """The line of a record whose payload is removed; hash and header stay as they are.

    Args:
        line: without its line break.
        erasure: number of the record that declares it.

    Raises:
        NoRecord: it is no record.
    """
    record = parse(line)
    return b'{"hash":"%b","header":%b,"erased":%d}' % (record.hash, record.header, erasure)


def differences(fields: Mapping[str, Any], payload_digest: bytes, event: Event) -> dict[str, tuple[Any, Any]]:
    """The columns in which ``event`` is not what is on record: what each is there, and what it is now. Of the payload,
    and of columns of the application's own, it is the digests: what they hold can have to be erased.

    A column that only one of them has counts for nothing: the table may have been given it, or lost it, since.

    Args:
        fields: the record's header.
        payload_digest: the one in it.
    """
    row = event.row
    own = {
        "session_id": row[1].decode(),
        "agent_id": row[2].decode(),
        "event_type": row[3].decode(),
        "created_at": event.created_at_text,
    }
    found = {name: (fields.get(name), value) for name, value in own.items() if fields.get(name) != value}
    digest = sha256(row[4]).hexdigest().encode()
    if digest != payload_digest:
        found["payload"] = payload_digest.decode(), digest.decode()
    recorded: Mapping[str, Any] = fields.get("extras") or {}
    extras = event.extras
    found.update(
        (name, (_digest(recorded[name]), _digest(extras[name])))
        for name in extras
        if name in recorded and recorded[name] != extras[name]
    )
    return found


def _digest(value: str | None) -> str | None:
    return None if value is None else sha256(value.encode()).hexdigest()


def is_another(fields: Mapping[str, Any], event: Event) -> bool:
    """Whether a record and an event of the same offset and seq, which differ, are two events and not one that was
    changed: they were committed at different places of the WAL, or the ledger is in another epoch since.

    Args:
        fields: the record's header.
    """
    lsn, key = fields.get("lsn"), fields.get("key")
    moved = lsn is not None and event.commit.lsn > 0 and lsn != format_lsn(event.commit.lsn)
    return moved or (key is not None and key != f"{event.commit.key_prefix}:{event.seq}")
