"""What pgoutput says, one frozen class a message.

Positions are integers (``walstream.lsn``). Times are microseconds since 2000-01-01 UTC by the server's clock; 0 in
Begin and Commit means unknown (a transaction with a replication origin). ``xid`` of a change is the id of the
(sub)transaction that made it, and is sent inside a stream block only: elsewhere it is ``None``.

Source: PostgreSQL documentation, "Logical Replication Message Formats" (55.9), whose names the classes keep.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, Final, Protocol, TypeAlias


class Unchanged(Enum):
    """The type of :data:`UNCHANGED`."""

    UNCHANGED = "unchanged"

    def __repr__(self) -> str:
        return "UNCHANGED"


UNCHANGED: Final = Unchanged.UNCHANGED
"""A TOASTed value that an UPDATE did not touch and that is therefore not in the WAL: neither NULL nor a value."""


@dataclass(frozen=True, slots=True)
class Binary:
    """A value in the type's binary format (option ``binary``). Deliberately no ``bytes``: it must not pass for text."""

    data: bytes


Value: TypeAlias = bytes | Binary | Unchanged | None
"""One column: text as bytes in the client's encoding, binary, unchanged TOAST, or ``None`` for NULL. With
``key_only``, ``None`` of a column outside of the key means "not sent"."""

TupleData: TypeAlias = tuple[Value, ...]
"""The columns of one row, in the order of the relation's ``columns``."""


class Received(Protocol):
    """A message as it comes from the server: pgoutput's bytes, and where they stand in the WAL (0/0 for relation
    messages). ``psycopg2.extras.ReplicationMessage`` is one."""

    @property
    def payload(self) -> bytes: ...
    @property
    def data_start(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Begin:
    """Start of a transaction. ``final_lsn``: where its commit record starts."""

    TAG: ClassVar[str] = "B"
    final_lsn: int
    commit_time_us: int
    xid: int


@dataclass(frozen=True, slots=True)
class Commit:
    """End of a transaction. ``end_lsn`` may be acknowledged; ``commit_lsn`` is the ``final_lsn`` of its Begin."""

    TAG: ClassVar[str] = "C"
    commit_lsn: int
    end_lsn: int
    commit_time_us: int


@dataclass(frozen=True, slots=True)
class Origin:
    """The transaction was replicated from elsewhere. ``commit_lsn``: its position on that other server."""

    TAG: ClassVar[str] = "O"
    commit_lsn: int
    name: str


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a relation. ``is_key``: part of the replica identity. ``type_mod``: ``atttypmod``, -1 if none."""

    is_key: bool
    name: str
    type_oid: int
    type_mod: int


@dataclass(frozen=True, slots=True)
class Relation:
    """The shape of a table from here on, until the next one with the same ``oid``.

    ``replica_identity``: ``d`` default, ``n`` nothing, ``f`` full, ``i`` index (``pg_class.relreplident``).
    """

    TAG: ClassVar[str] = "R"
    oid: int
    namespace: str
    name: str
    replica_identity: str
    columns: tuple[Column, ...]
    xid: int | None = None

    @property
    def qualified(self) -> str:
        """``schema.table`` for people; not quoted for SQL."""
        return f"{self.namespace}.{self.name}"


@dataclass(frozen=True, slots=True)
class Type:
    """The name of a type that is not built in. For a domain: the name of the type below it."""

    TAG: ClassVar[str] = "Y"
    oid: int
    namespace: str
    name: str
    xid: int | None = None


@dataclass(frozen=True, slots=True)
class Insert:
    TAG: ClassVar[str] = "I"
    relation_oid: int
    new: TupleData
    xid: int | None = None


@dataclass(frozen=True, slots=True)
class Update:
    """``old``: the old row (replica identity full), or, with ``key_only``, its key, sent if that changed; or None."""

    TAG: ClassVar[str] = "U"
    relation_oid: int
    new: TupleData
    old: TupleData | None = None
    key_only: bool = False
    xid: int | None = None


@dataclass(frozen=True, slots=True)
class Delete:
    """``old``: the old row (replica identity full), or, with ``key_only``, its key: then no other column is real."""

    TAG: ClassVar[str] = "D"
    relation_oid: int
    old: TupleData
    key_only: bool
    xid: int | None = None


@dataclass(frozen=True, slots=True)
class Truncate:
    TAG: ClassVar[str] = "T"
    relation_oids: tuple[int, ...]
    cascade: bool
    restart_identity: bool
    xid: int | None = None


@dataclass(frozen=True, slots=True)
class LogicalMessage:
    """What ``pg_logical_emit_message`` wrote. One that is not transactional stands outside of Begin and Commit."""

    TAG: ClassVar[str] = "M"
    transactional: bool
    lsn: int
    prefix: str
    content: bytes
    xid: int | None = None


@dataclass(frozen=True, slots=True)
class StreamStart:
    """A block of changes of a transaction that is still open. ``first``: its first block."""

    TAG: ClassVar[str] = "S"
    xid: int
    first: bool


@dataclass(frozen=True, slots=True)
class StreamStop:
    """End of a block."""

    TAG: ClassVar[str] = "E"


@dataclass(frozen=True, slots=True)
class StreamCommit:
    """A transaction that came in blocks has committed."""

    TAG: ClassVar[str] = "c"
    xid: int
    commit_lsn: int
    end_lsn: int
    commit_time_us: int


@dataclass(frozen=True, slots=True)
class StreamAbort:
    """A transaction that came in blocks (``sub_xid == xid``), or one of its subtransactions, was rolled back.

    Position and time are sent from protocol 4 on with ``streaming 'parallel'`` only; else ``None``.
    """

    TAG: ClassVar[str] = "A"
    xid: int
    sub_xid: int
    abort_lsn: int | None = None
    abort_time_us: int | None = None


@dataclass(frozen=True, slots=True)
class BeginPrepare:
    """Start of a transaction that will be prepared (slot with ``two_phase``)."""

    TAG: ClassVar[str] = "b"
    prepare_lsn: int
    end_lsn: int
    prepare_time_us: int
    xid: int
    gid: str


@dataclass(frozen=True, slots=True)
class Prepare:
    """The transaction is prepared: neither committed nor rolled back."""

    TAG: ClassVar[str] = "P"
    prepare_lsn: int
    end_lsn: int
    prepare_time_us: int
    xid: int
    gid: str


@dataclass(frozen=True, slots=True)
class CommitPrepared:
    TAG: ClassVar[str] = "K"
    commit_lsn: int
    end_lsn: int
    commit_time_us: int
    xid: int
    gid: str


@dataclass(frozen=True, slots=True)
class RollbackPrepared:
    """``prepare_end_lsn``: end of the PREPARE; ``end_lsn``: end of the ROLLBACK PREPARED."""

    TAG: ClassVar[str] = "r"
    prepare_end_lsn: int
    end_lsn: int
    prepare_time_us: int
    rollback_time_us: int
    xid: int
    gid: str


@dataclass(frozen=True, slots=True)
class StreamPrepare:
    """A transaction that came in blocks is prepared."""

    TAG: ClassVar[str] = "p"
    prepare_lsn: int
    end_lsn: int
    prepare_time_us: int
    xid: int
    gid: str


Message: TypeAlias = (
    Begin
    | Commit
    | Origin
    | Relation
    | Type
    | Insert
    | Update
    | Delete
    | Truncate
    | LogicalMessage
    | StreamStart
    | StreamStop
    | StreamCommit
    | StreamAbort
    | BeginPrepare
    | Prepare
    | CommitPrepared
    | RollbackPrepared
    | StreamPrepare
)
