"""From messages to transactions: what ingest does with each message of the stream, without any I/O.

Rules kept here (numbers: docs/architecture.md, "The rules of ingest"):

- 5: a transaction larger than a chunk is handed on in pieces; a resend skips exactly the inserts that have an offset.
- 6: what is no insert into the ledger (UPDATE, DELETE, TRUNCATE) is a violation, never an event. Its transaction is
  a piece, although one without rows: it has to be visible (rule 2) and is confirmed (rule 3) like any other.
- Decoding follows the newest relation message of a table (by name, column by column), and the ledger is followed by
  its OID: a table that merely carries its name is not the ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from struct import error as StructError

from walstream.config import Columns
from walstream.errors import DecodeError, LedgerError, WalstreamError
from walstream.event import Commit, Row
from walstream.lsn import format_lsn
from walstream.protocol.decoder import Decoder
from walstream.protocol.ledger_row import (
    BEGIN,
    COMMIT,
    INSERT,
    RowDecoder,
    compile_row_decoder,
    compile_seq_decoder,
    decode_begin,
    decode_commit,
    unpack_begin,
    unpack_commit,
)
from walstream.protocol.messages import Delete, Received, Relation, Truncate, Update

from .violations import ChangeLog, Violation

Piece = tuple[Commit, int, int, int]
"""(commit, rows, end LSN or 0 if the commit goes on, ledger inserts of that commit up to here)."""

_ALL = 1 << 62
_STRIPPED_BYTES = 500


@dataclass(frozen=True, slots=True)
class Resume:
    """Where the order ends. What the slot sends again up to there is skipped.

    Attributes:
        lsn: end of the last ordered commit; or, if it is ordered in part, that commit's own LSN.
        inserts: how many of its ledger inserts are done; 0 if the commit is complete.
    """

    lsn: int = 0
    inserts: int = 0


@dataclass(slots=True)
class Burst:
    """What one round of reading brought: whole transactions, or pieces of a large one, in commit order."""

    rows: list[Row] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)
    nbytes: int = 0
    stripped: dict[int, int] = field(default_factory=dict)
    """Rows (by index) that were too large to be kept, with their size in bytes: projectors read them cold."""


class Intake:
    """Turns the payloads of one stream into bursts.

    Args:
        columns: what the ledger's columns are called.
        resolve: tells whether a relation is the ledger (or a partition of it). Asked once for each relation message;
            may raise :class:`LedgerError` if the table that should be the ledger no longer is.
        key_prefix: ``ledger:epoch``.
        resume: where the order ends.
        chunk_bytes: a transaction is handed on in pieces of about this many bytes of messages.
        mapped_now: whether the table *as it is now* has the columns that it is mapped to. A row whose relation lacks
            one is then of a former shape: its seq is ordered, and the rest is read from the table.
    """

    def __init__(
        self,
        columns: Columns,
        resolve: Callable[[Relation], bool],
        *,
        key_prefix: str,
        resume: Resume,
        chunk_bytes: int,
        mapped_now: Callable[[], bool] = lambda: False,
    ) -> None:
        self._columns = columns.names()
        self._resolve = resolve
        self._mapped_now = mapped_now
        self._key_prefix = key_prefix
        self._resume = resume
        self._chunk = chunk_bytes
        self._decoder = Decoder(1)
        self._decoders: dict[bytes, RowDecoder] = {}
        self._ledgers: dict[int, Relation] = {}
        self._ignored: set[bytes] = set()
        self._former: dict[bytes, Callable[[bytes, int], int]] = {}

        self._burst = Burst()
        self._commit: Commit | None = None
        self._start = 0  # index of the open transaction's first row in the burst
        self._inserts = 0  # ledger inserts of the open transaction that were skipped or handed on
        self._told = 0  # index of the open transaction's first violation in the burst
        self._changes: ChangeLog | None = None  # what it did besides inserting
        self._skip = 0
        self._tx_bytes = 0
        self._cut_off = False  # a piece of the open transaction was handed on already
        self._ordinary = True  # the open transaction has nothing but new inserts in one piece
        self.passed = 0
        """End LSN of the newest commit that was received whole."""

    @property
    def in_transaction(self) -> bool:
        """Whether a Begin was received whose Commit was not."""
        return self._commit is not None

    def consume(self, messages: Iterator[Received]) -> None:
        """Take messages until there are no more, or until a chunk is full and should be handed on before more is read.

        Raises:
            DecodeError: not what the protocol says.
            LedgerError: the ledger's shape no longer fits its mapping.
        """
        while (message := self._consume_ordinary(messages)) is not None:
            if not self.handle(message.payload, message.data_start):
                return

    def _consume_ordinary(self, messages: Iterator[Received]) -> Received | None:
        """Take messages up to the first that is not quite ordinary, and return that.

        It says nothing that :meth:`handle` does not say; it is the same in one loop over local names, because nearly
        all that a server sends is a transaction that begins, inserts and commits.
        """
        decoder_of, chunk, key_prefix, ordered = self._decoders.get, self._chunk, self._key_prefix, self._resume.lsn
        burst = self._burst
        rows, pieces = burst.rows, burst.pieces
        commit, start, tx_bytes, nbytes, passed = self._commit, self._start, self._tx_bytes, burst.nbytes, self.passed
        try:
            for message in messages:
                payload = message.payload
                tag = payload[0] if payload else 0
                try:
                    if tag == INSERT:
                        size = len(payload)
                        decode = decoder_of(payload[1:5])
                        if decode is None or self._skip or tx_bytes + size >= chunk:
                            return message
                        rows.append(decode(payload))
                        tx_bytes += size
                    elif tag == BEGIN:
                        final_lsn, time_us, xid = unpack_begin(payload)
                        if commit is not None or len(rows) != start or final_lsn <= ordered:
                            return message
                        commit = Commit(final_lsn, time_us, xid, key_prefix)
                    elif tag == COMMIT:
                        flags, commit_lsn, end_lsn, _ = unpack_commit(payload)
                        if flags or commit is None or commit.lsn != commit_lsn or not self._ordinary:
                            return message
                        count = len(rows) - start
                        if count:
                            pieces.append((commit, count, end_lsn, count))
                            nbytes += tx_bytes
                            start += count
                            tx_bytes = 0
                        commit = None
                        passed = end_lsn
                        if nbytes >= chunk:
                            return None
                    else:
                        return message
                except (WalstreamError, StructError):
                    return message  # to be decoded again, and to say where it stands
        finally:
            self._commit, self._start, self._tx_bytes = commit, start, tx_bytes
            burst.nbytes, self.passed = nbytes, passed
        return None

    def handle(self, payload: bytes, lsn: int) -> bool:
        """Take one message; ``False`` when a chunk is full and should be handed on before more is read.

        Raises: as :meth:`consume`.
        """
        tag = payload[0] if payload else 0
        if tag == INSERT:
            decode = self._decoders.get(payload[1:5])
            if decode is None:
                return self._insert_otherwise(payload, lsn)
            if self._skip:
                self._skip -= 1
                self._inserts += 1
                return True
            row = decode(payload, lsn)
            size = len(payload)
            if size >= self._chunk:
                self._strip(row, size)
                return False
            self._burst.rows.append(row)
            self._tx_bytes += size
            if self._tx_bytes >= self._chunk:
                self._cut()
                return False
            return True
        if tag == BEGIN:
            self._begin(*decode_begin(payload, lsn), lsn)
            return True
        if tag == COMMIT:
            return self._end(*decode_commit(payload, lsn), lsn)
        return self._control(payload, lsn)

    def take(self) -> Burst | None:
        """Hand over what is complete (or cut off), and keep the open transaction's rows."""
        burst = self._burst
        if not burst.pieces:
            return None
        rest, told = burst.rows[self._start :], burst.violations[self._told :]
        if rest:
            del burst.rows[self._start :]
        if told:
            del burst.violations[self._told :]
        fresh = Burst(rows=rest, violations=told)
        if burst.stripped:
            fresh.stripped = {i - self._start: n for i, n in burst.stripped.items() if i >= self._start}
            burst.stripped = {i: n for i, n in burst.stripped.items() if i < self._start}
        self._burst = fresh
        self._start = self._told = 0
        return burst

    def _begin(self, final_lsn: int, time_us: int, xid: int, lsn: int) -> None:
        if self._commit is not None or len(self._burst.rows) != self._start:
            raise DecodeError("a transaction begins inside another, or after rows of none", tag="B", lsn=lsn)
        self._commit = Commit(final_lsn, time_us, xid, self._key_prefix)
        resume = self._resume
        if final_lsn <= resume.lsn:
            self._skip = _ALL if final_lsn < resume.lsn else resume.inserts
            self._cut_off = final_lsn == resume.lsn and resume.inserts > 0
            self._ordinary = False

    def _end(self, commit_lsn: int, end_lsn: int, _time_us: int, lsn: int) -> bool:
        commit = self._commit
        if commit is None or commit.lsn != commit_lsn:
            raise DecodeError("a commit without its begin", tag="C", lsn=lsn)
        burst = self._burst
        if self._changes is not None:
            self._tell(self._changes.end())
        rows = len(burst.rows) - self._start
        if rows or self._cut_off or self._changes is not None:
            burst.pieces.append((commit, rows, end_lsn, self._inserts + rows))
            burst.nbytes += self._tx_bytes
        self._start, self._told = len(burst.rows), len(burst.violations)
        self._commit = self._changes = None
        self._inserts = self._tx_bytes = self._skip = 0
        self._cut_off, self._ordinary = False, True
        self.passed = end_lsn
        return burst.nbytes < self._chunk

    def _strip(self, row: Row, size: int) -> None:
        """Keep a very large row without its payload: it is in the ledger, and a cold read fetches it from there."""
        burst = self._burst
        burst.stripped[len(burst.rows)] = size
        burst.rows.append((*row[:4], b"", row[5], None))
        self._tx_bytes += _STRIPPED_BYTES
        self._cut()

    def _cut(self) -> None:
        commit = self._commit
        if commit is None:
            raise DecodeError("an insert outside any transaction", tag="I")
        burst = self._burst
        rows = len(burst.rows) - self._start
        self._inserts += rows
        burst.pieces.append((commit, rows, 0, self._inserts))
        burst.nbytes += self._tx_bytes
        self._start, self._told = len(burst.rows), len(burst.violations)
        self._tx_bytes = 0
        self._cut_off, self._ordinary = True, False

    def _insert_otherwise(self, payload: bytes, lsn: int) -> bool:
        """An insert elsewhere, or into the ledger in a former shape."""
        key = payload[1:5]
        seq_of = self._former.get(key)
        if seq_of is None:
            if key not in self._ignored:
                raise DecodeError("an insert into a relation that was never described", tag="I", lsn=lsn)
            return True
        if self._skip:
            self._skip -= 1
            self._inserts += 1
            return True
        self._strip((seq_of(payload, lsn), b"", b"", b"", b"", None, None), len(payload))
        return False

    def _control(self, payload: bytes, lsn: int) -> bool:
        message = self._decoder.decode(payload, lsn)
        if isinstance(message, Relation):
            self._describe(message, lsn)
            return True
        if not isinstance(message, Update | Delete | Truncate):
            return True
        oids = message.relation_oids if isinstance(message, Truncate) else (message.relation_oid,)
        relations = [self._ledgers[oid] for oid in oids if oid in self._ledgers]
        log = self._change_log() if relations else None
        if log is None:
            return True
        if isinstance(message, Truncate):
            self._tell(log.truncate(relations, message))
        elif isinstance(message, Update):
            self._tell(log.update(relations[0], message))
        else:
            self._tell(log.delete(relations[0], message))
        if self._tx_bytes >= self._chunk:
            self._cut()
            return False
        return True

    def _describe(self, relation: Relation, lsn: int) -> None:
        key = relation.oid.to_bytes(4, "big")
        self._decoders.pop(key, None)
        self._former.pop(key, None)
        if not self._resolve(relation):
            self._ledgers.pop(relation.oid, None)
            self._ignored.add(key)
            return
        try:
            self._decoders[key] = compile_row_decoder(relation, self._columns)
        except LedgerError as error:
            if not self._mapped_now():
                where = lsn or (self._commit.lsn if self._commit else 0)  # relation messages themselves carry 0/0
                raise LedgerError(
                    f"{error} (at LSN {format_lsn(where)}; nothing from there on was acknowledged)", hint=error.hint
                ) from error
            self._former[key] = compile_seq_decoder(relation, self._columns[0])
        self._ledgers[relation.oid] = relation
        self._ignored.discard(key)

    def _change_log(self) -> ChangeLog | None:
        """Where the open transaction's changes are written down; ``None`` if they are on record already."""
        commit = self._commit
        if commit is None or self._skip >= _ALL >> 1:
            return None
        if self._changes is None:
            self._changes = ChangeLog(commit, self._columns)
            self._ordinary = False
        return self._changes

    def _tell(self, violations: Iterable[Violation]) -> None:
        for violation in violations:
            self._burst.violations.append(violation)
            self._tx_bytes += violation.nbytes
