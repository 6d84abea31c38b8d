"""What an append-only ledger should never show, as the stream tells it. Pure.

A migration that touches every row makes millions of changes in one transaction. The first thousand are told one by
one; what comes after them in stretches of ten thousand, which keep the seqs and leave the rest out. Where a stretch
begins depends on the transaction alone, so that a resend gives the same ones: they are told apart by the transaction's
LSN and the number of their first change in it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from walstream.event import ERASED_PAYLOAD, Commit
from walstream.protocol.messages import UNCHANGED, Delete, Relation, Truncate, TupleData, Update, Value

Origin = Literal["stream", "catalogue"]

ONE_BY_ONE: Final = 1_000
STRETCH: Final = 10_000
VALUE_BYTES: Final = 200
"""Of each value of a key that is kept: a replica identity can be a column that holds a document."""

_BYTES: Final = 500  # of one in memory, about
_BYTES_OF_A_SEQ: Final = 8


@dataclass(frozen=True, slots=True)
class Violation:
    """One change of the ledger, or a stretch of many.

    Attributes:
        kind: ``duplicate-seq``, ``update``, ``delete``, ``truncate``; of the catalogue, see ``catalogue_watch``.
        commit_lsn: of its transaction; for what the catalogue told, where the WAL stood then.
        ordinal: which change of its transaction, so that a resend writes the same key.
        seq: of the row, if it is one.
        xid: of the transaction, 32 bits; 0 if it is not known.
        time_us: of the commit, since 2000-01-01; 0 if it is not known.
        keys, old_keys: columns that tell the row, as it is now and as it was: as text, ``None`` for NULL.
        changes: how many it stands for.
        seqs: of a stretch, as far as they are known.
        declarable: whether an erasure that names seq (or seqs) and transaction explains it: a row that went, or whose
            payload was redacted.
    """

    kind: str
    commit_lsn: int
    ordinal: int
    seq: int | None
    xid: int
    detail: str
    time_us: int = 0
    keys: dict[str, str | None] | None = None
    old_keys: dict[str, str | None] | None = None
    changes: int = 1
    seqs: Sequence[int] | None = None
    declarable: bool = False
    origin: Origin = "stream"

    @property
    def nbytes(self) -> int:
        """About how much memory it takes: it waits for the orderer like rows do, and must not without a bound."""
        return _BYTES + _BYTES_OF_A_SEQ * len(self.seqs or ())


@dataclass(slots=True)
class _Stretch:
    """Many changes of one kind."""

    ordinal: int
    detail: str
    changes: int = 0
    seqs: array[int] = field(default_factory=lambda: array("q"))


class ChangeLog:
    """The changes of one transaction that are no inserts.

    Args:
        commit: the transaction.
        columns: what the ledger's are called, in the order of ``walstream.config.Columns.names``.
    """

    def __init__(self, commit: Commit, columns: Sequence[str]) -> None:
        self._commit = commit
        self._seq, *others = columns
        self._payload = others[3]
        self._told = {self._seq, *others[:3], *others[4:]}
        self._count = 0
        self._stretches: dict[tuple[str, bool], _Stretch] = {}

    def update(self, relation: Relation, message: Update) -> Iterator[Violation]:
        """An UPDATE; yields what is to be told by now."""
        self._count += 1
        before = message.old or message.new
        seq = seq_in(relation, before, self._seq)
        same_row = seq is not None and (message.old is None or seq_in(relation, message.new, self._seq) == seq)
        redacts = same_row and self._redacts(relation, message)
        if self._count > ONE_BY_ONE:
            yield from self._stretch("update", relation, seq if same_row else None, declarable=redacts)
            return
        detail = f"UPDATE {relation.qualified}"
        if message.old is not None and not message.key_only and (changed := _changed(relation, message)):
            detail += f": {', '.join(changed)}"
        keys = self._keys(relation, message.new)
        old_keys = None if message.old is None else self._keys(relation, message.old)
        yield self._one("update", seq, detail, keys, old_keys, declarable=redacts)

    def delete(self, relation: Relation, message: Delete) -> Iterator[Violation]:
        """A DELETE; yields what is to be told by now."""
        self._count += 1
        seq = seq_in(relation, message.old, self._seq)
        if self._count > ONE_BY_ONE:
            yield from self._stretch("delete", relation, seq, declarable=True)
            return
        keys = self._keys(relation, message.old)
        yield self._one("delete", seq, f"DELETE {relation.qualified}", None, keys, declarable=seq is not None)

    def truncate(self, relations: Sequence[Relation], message: Truncate) -> Iterator[Violation]:
        """A TRUNCATE of these, of which each is the ledger or a part of it."""
        more = ", RESTART IDENTITY" if message.restart_identity else ""
        for relation in relations:
            self._count += 1
            yield self._one("truncate", None, f"TRUNCATE {relation.qualified}{more}", None, None)

    def end(self) -> Iterator[Violation]:
        """The transaction is over; yields what was not told yet."""
        for (kind, declarable), stretch in self._stretches.items():
            yield self._made(kind, stretch, declarable)
        self._stretches.clear()

    def _stretch(self, kind: str, relation: Relation, seq: int | None, *, declarable: bool) -> Iterator[Violation]:
        if (self._count - ONE_BY_ONE - 1) % STRETCH == 0:
            yield from self.end()
        stretch = self._stretches.get((kind, declarable))
        if stretch is None:
            detail = f"{kind.upper()} {relation.qualified}: many in one transaction"
            stretch = self._stretches[kind, declarable] = _Stretch(self._count, detail)
        stretch.changes += 1
        if seq is not None:
            stretch.seqs.append(seq)

    def _made(self, kind: str, stretch: _Stretch, declarable: bool) -> Violation:
        commit = self._commit
        return Violation(
            kind,
            commit.lsn,
            stretch.ordinal,
            None,
            commit.xid,
            stretch.detail,
            commit.time_us,
            changes=stretch.changes,
            seqs=stretch.seqs,
            declarable=declarable,
        )

    def _one(
        self,
        kind: str,
        seq: int | None,
        detail: str,
        keys: dict[str, str | None] | None,
        old_keys: dict[str, str | None] | None,
        *,
        declarable: bool = False,
    ) -> Violation:
        commit = self._commit
        return Violation(
            kind,
            commit.lsn,
            self._count,
            seq,
            commit.xid,
            detail,
            commit.time_us,
            keys,
            old_keys,
            declarable=declarable,
        )

    def _redacts(self, relation: Relation, message: Update) -> bool:
        """Whether it leaves of a payload what an erasure leaves, and nothing else, as far as the stream tells."""
        if message.old is not None and not message.key_only and _changed(relation, message) != [self._payload]:
            return False
        return any(
            column.name == self._payload and value == ERASED_PAYLOAD
            for column, value in zip(relation.columns, message.new, strict=False)
        )

    def _keys(self, relation: Relation, values: TupleData) -> dict[str, str | None]:
        """The columns that tell a row. Of a ``K`` tuple only the key's are real; with all columns as the identity those
        that the ledger is mapped to. What was not sent (``u``) is not there, and never NULL."""
        whole = relation.replica_identity == "f"
        found: dict[str, str | None] = {}
        for column, value in zip(relation.columns, values, strict=False):
            if (column.name in self._told if whole else column.is_key) and value is not UNCHANGED:
                found[column.name] = _text(value)
        return found


def seq_in(relation: Relation, values: TupleData, name: str) -> int | None:
    """The seq of a changed row, as far as its tuple tells."""
    for column, value in zip(relation.columns, values, strict=False):
        if column.name == name:
            return int(value) if isinstance(value, bytes) and value.lstrip(b"-").isdigit() else None
    return None


def without_declared(violation: Violation, declared: set[tuple[int, int]]) -> Violation | None:
    """What is left of a violation when what an erasure declares is taken out of it.

    Args:
        declared: (xid, seq) of rows that were removed or redacted by declaration.
    """
    if not declared or not violation.declarable:
        return violation
    if violation.seqs is None:
        explained = violation.seq is not None and (violation.xid, violation.seq) in declared
        return None if explained else violation
    left = array("q", (seq for seq in violation.seqs if (violation.xid, seq) not in declared))
    changes = violation.changes - (len(violation.seqs) - len(left))
    if not changes:
        return None
    return Violation(
        violation.kind,
        violation.commit_lsn,
        violation.ordinal,
        None,
        violation.xid,
        violation.detail,
        violation.time_us,
        changes=changes,
        seqs=left,
        declarable=True,
    )


def ranges_of(seqs: Sequence[int]) -> list[list[int]]:
    """Seqs as ranges ``[first, last]``, ascending."""
    made: list[list[int]] = []
    for seq in sorted(set(seqs)):
        if made and seq == made[-1][1] + 1:
            made[-1][1] = seq
        else:
            made.append([seq, seq])
    return made


def _changed(relation: Relation, message: Update) -> list[str]:
    """The columns that an UPDATE changed, where the whole old row was sent. ``u`` is a value that it did not touch."""
    assert message.old is not None
    return [
        column.name
        for column, old, new in zip(relation.columns, message.old, message.new, strict=False)
        if new is not UNCHANGED and new != old
    ]


def _text(value: Value) -> Any:
    if not isinstance(value, bytes):
        return None if value is None else "(binary)"
    text = value[:VALUE_BYTES].decode(errors="ignore")
    return text if len(value) <= VALUE_BYTES else f"{text}…"
