"""pgoutput, versions 1 to 4: bytes in, messages out. No I/O, no catalog, no opinion about what a change means.

Source: PostgreSQL documentation, "Logical Replication Message Formats" (55.9) and "Logical Streaming Replication
Protocol" (55.5). The rules:

- A payload is one message: a letter, then fields in network byte order. Names end with a NUL byte; values carry their
  length. All of it must be there and nothing may follow.
- An LSN is 64 bits; a time is signed, in microseconds since 2000-01-01 UTC; an xid and an OID are 32 bits, unsigned.
- Version 1: B C O R Y I U D T, and M if asked for. Version 2 adds S E c A (large transactions in blocks while they are
  open), 3 adds b P K r p (two-phase commit), 4 adds position and time to A, with ``streaming 'parallel'`` only.
  There are two exceptions to "adds". A slot made with ``two_phase`` sends b P K r under every version. And
  PostgreSQL 18 can send an A under version 1, for a transaction that was rolled back while it was being decoded.
- Between S and E each R Y I U D T M has an xid right after its letter. O has none. B, C, b, P, K, r, c, A and p never
  stand in there. That is the only state this decoder keeps.
- R comes before the first change of each new shape of a table, with LSN 0. An empty namespace means ``pg_catalog``.
- A tuple is a count and then, for each column, ``n`` (NULL, or not part of the key in a K tuple), ``u`` (unchanged
  TOAST), ``t`` (text) or ``b`` (binary; only with the option ``binary``).
- Flags that the documentation calls unused must be 0, as in Postgres' own subscriber.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from walstream.errors import DecodeError

from .fields import Fields
from .messages import (
    Begin,
    BeginPrepare,
    Column,
    Commit,
    CommitPrepared,
    Delete,
    Insert,
    LogicalMessage,
    Message,
    Origin,
    Prepare,
    Relation,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    StreamStop,
    Truncate,
    Type,
    Update,
)
from .tags import (
    BEGIN,
    BEGIN_PREPARE,
    COMMIT,
    COMMIT_PREPARED,
    DELETE,
    INSERT,
    MESSAGE,
    ORIGIN,
    PREPARE,
    RELATION,
    ROLLBACK_PREPARED,
    STREAM_ABORT,
    STREAM_COMMIT,
    STREAM_PREPARE,
    STREAM_START,
    STREAM_STOP,
    TRUNCATE,
    TYPE,
    UPDATE,
)

PROTOCOL_VERSIONS: Final = range(1, 5)

# Letters of the tuples inside I, U and D: new row, old key, old row.
_NEW: Final = frozenset("N")
_BEFORE: Final = frozenset("KO")
_ANY: Final = frozenset("KON")

_CASCADE, _RESTART_IDENTITY = 1, 2  # Truncate's flags
_REPLICA_IDENTITIES: Final = frozenset("dnfi")
_NOT_IN_A_BLOCK: Final = frozenset(b"BCbPKrScAp")
_NEEDS_VERSION_2: Final = frozenset(b"SEc")


class Decoder:
    """Turns the payloads of one replication connection into messages; a new connection needs a new one.

    Attributes:
        protocol_version: the ``proto_version`` that the stream was started with.
        in_block: whether the last message left us between a Stream Start and its Stream Stop.
    """

    __slots__ = ("in_block", "protocol_version")

    def __init__(self, protocol_version: int = 1) -> None:
        """Raises:
        ValueError: there is no such protocol version.
        """
        if protocol_version not in PROTOCOL_VERSIONS:
            raise ValueError(f"pgoutput's protocol versions are 1 to 4, not {protocol_version}")
        self.protocol_version = protocol_version
        self.in_block = False

    def decode(self, payload: bytes, lsn: int = 0) -> Message:
        """Return the one message that ``payload`` is.

        Args:
            payload: what followed the XLogData header, or a row of ``pg_logical_slot_get_binary_changes``.
            lsn: where it stands in the WAL, for the error only.

        Raises:
            DecodeError: it is cut short, has bytes left over, has an unknown letter, or cannot stand here. The state
                is then unchanged.
        """
        if not payload:
            raise DecodeError("an empty message", lsn=lsn)
        tag = payload[0]
        read = _READERS.get(tag)
        if read is None:
            raise DecodeError(
                f"unknown message type {tag:#04x}",
                tag=chr(tag),
                lsn=lsn,
                hint="the server speaks a newer pgoutput, or the slot's plugin is another; nothing was acknowledged",
            )
        if self.in_block:
            if tag in _NOT_IN_A_BLOCK:
                raise DecodeError("not allowed between Stream Start and Stream Stop", tag=chr(tag), lsn=lsn)
        elif tag == STREAM_STOP:
            raise DecodeError("no Stream Start came before it", tag="E", lsn=lsn)
        if (tag in _NEEDS_VERSION_2 and self.protocol_version < 2) or (
            tag == STREAM_PREPARE and self.protocol_version < 3
        ):
            raise DecodeError(f"not a message of protocol version {self.protocol_version}", tag=chr(tag), lsn=lsn)
        fields = Fields(payload, lsn, self.in_block, self.protocol_version)
        message = read(fields)
        fields.end()
        if tag == STREAM_START:
            self.in_block = True
        elif tag == STREAM_STOP:
            self.in_block = False
        return message


def _begin_message(f: Fields) -> Begin:
    return Begin(f.lsn64(), f.time(), f.xid())


def _commit_message(f: Fields) -> Commit:
    f.flags(0)
    return Commit(f.lsn64(), f.lsn64(), f.time())


def _origin(f: Fields) -> Origin:
    return Origin(f.lsn64(), f.name())


def _relation(f: Fields) -> Relation:
    xid = f.block_xid()
    oid, namespace, name, identity = f.oid(), f.name() or "pg_catalog", f.name(), f.char(_REPLICA_IDENTITIES)
    columns = tuple([Column(f.flags(1) == 1, f.name(), f.oid(), f.signed(4)) for _ in range(f.count(2))])
    return Relation(oid, namespace, name, identity, columns, xid)


def _type(f: Fields) -> Type:
    xid = f.block_xid()
    return Type(f.oid(), f.name() or "pg_catalog", f.name(), xid)


def _insert(f: Fields) -> Insert:
    xid = f.block_xid()
    oid = f.oid()
    f.char(_NEW)
    return Insert(oid, f.values(), xid)


def _update(f: Fields) -> Update:
    xid = f.block_xid()
    oid = f.oid()
    part = f.char(_ANY)
    old = None
    if part != "N":
        old = f.values()
        f.char(_NEW)
    return Update(oid, f.values(), old, part == "K", xid)


def _delete(f: Fields) -> Delete:
    xid = f.block_xid()
    oid = f.oid()
    part = f.char(_BEFORE)
    return Delete(oid, f.values(), part == "K", xid)


def _truncate(f: Fields) -> Truncate:
    xid = f.block_xid()
    relations = f.count(4)
    flags = f.flags(_CASCADE | _RESTART_IDENTITY)
    # Judged before anything is made: a damaged count must not make a list of two billion.
    if relations * 4 != len(f.payload) - f.at:
        f.fail(f"{relations} relations were to come in {len(f.payload) - f.at} bytes")
    oids = tuple([f.oid() for _ in range(relations)])
    return Truncate(oids, bool(flags & _CASCADE), bool(flags & _RESTART_IDENTITY), xid)


def _message(f: Fields) -> LogicalMessage:
    xid = f.block_xid()
    flags = f.flags(1)
    lsn, prefix, content = f.lsn64(), f.name(), f.sized()
    return LogicalMessage(flags == 1, lsn, prefix, content, xid)


def _stream_start(f: Fields) -> StreamStart:
    return StreamStart(f.xid(), f.flags(1) == 1)


def _stream_stop(_: Fields) -> StreamStop:
    return StreamStop()


def _stream_commit(f: Fields) -> StreamCommit:
    xid = f.xid()
    f.flags(0)
    return StreamCommit(xid, f.lsn64(), f.lsn64(), f.time())


def _stream_abort(f: Fields) -> StreamAbort:
    xid, sub_xid = f.xid(), f.xid()
    # Whether position and time follow depends on the option `streaming` too, so the length decides.
    if f.version < 4 or f.at == len(f.payload):
        return StreamAbort(xid, sub_xid)
    return StreamAbort(xid, sub_xid, f.lsn64(), f.time())


def _begin_prepare(f: Fields) -> BeginPrepare:
    return BeginPrepare(f.lsn64(), f.lsn64(), f.time(), f.xid(), f.name())


def _prepare(f: Fields) -> Prepare:
    f.flags(0)
    return Prepare(f.lsn64(), f.lsn64(), f.time(), f.xid(), f.name())


def _commit_prepared(f: Fields) -> CommitPrepared:
    f.flags(0)
    return CommitPrepared(f.lsn64(), f.lsn64(), f.time(), f.xid(), f.name())


def _rollback_prepared(f: Fields) -> RollbackPrepared:
    f.flags(0)
    return RollbackPrepared(f.lsn64(), f.lsn64(), f.time(), f.time(), f.xid(), f.name())


def _stream_prepare(f: Fields) -> StreamPrepare:
    f.flags(0)
    return StreamPrepare(f.lsn64(), f.lsn64(), f.time(), f.xid(), f.name())


_READERS: Final[Mapping[int, Callable[[Fields], Message]]] = {
    BEGIN: _begin_message,
    COMMIT: _commit_message,
    ORIGIN: _origin,
    RELATION: _relation,
    TYPE: _type,
    INSERT: _insert,
    UPDATE: _update,
    DELETE: _delete,
    TRUNCATE: _truncate,
    MESSAGE: _message,
    STREAM_START: _stream_start,
    STREAM_STOP: _stream_stop,
    STREAM_COMMIT: _stream_commit,
    STREAM_ABORT: _stream_abort,
    BEGIN_PREPARE: _begin_prepare,
    PREPARE: _prepare,
    COMMIT_PREPARED: _commit_prepared,
    ROLLBACK_PREPARED: _rollback_prepared,
    STREAM_PREPARE: _stream_prepare,
}
