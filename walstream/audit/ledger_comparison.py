"""Comparing a trail with the ledger, row by row: what is missing there, what is altered, what is there besides."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Final

from psycopg2.extensions import connection as Connection

from walstream.config import Settings
from walstream.errors import LedgerError
from walstream.event import ERASED_PAYLOAD, Row
from walstream.order.erasures import erased_among
from walstream.order.ledger_rows import LedgerRows
from walstream.order.table import own_table, query, segments_with_seqs_between, spelled

from .order_facts import seqs_between
from .record import EVENT, NoRecord, Record, parse
from .segments import MiB, Segment, read_lines
from .verifying import Finding

CHUNK: Final = 5_000
_CHUNK_BYTES: Final = 16 * MiB
_SCAN: Final = 50_000
_PAGE_BITS: Final = 16
_SHOWN: Final = 1_000  # findings that are kept; all are counted
_PATIENCE: Final = 5.0


@dataclass(slots=True)
class Comparison:
    """What became of the comparison.

    Attributes:
        compared: records of events.
        same: rows that are what is on record, byte for byte.
        missing, altered, extra, misplaced: how many rows are gone without a declared erasure, say something else, are
            in the ledger and not on record, and how many offsets belong to another row in the order.
        erased: rows that a declared erasure covers: they are gone, or their payload is.
        behind: rows that have an offset behind the end of the trail: the sink has not got to them.
        unordered: rows without an offset, while nobody ingests.
        findings: the first of them, in the order of offsets.
    """

    compared: int = 0
    same: int = 0
    missing: int = 0
    altered: int = 0
    extra: int = 0
    misplaced: int = 0
    erased: int = 0
    behind: int = 0
    unordered: int = 0
    findings: list[Finding] = field(default_factory=list)

    def add(self, finding: Finding) -> None:
        """Count a finding, and keep it if it is one of the first."""
        if finding.kind == "missing":
            self.missing += 1
        elif finding.kind == "altered":
            self.altered += 1
        elif finding.kind == "extra":
            self.extra += 1
        else:
            self.misplaced += 1
        if len(self.findings) < _SHOWN:
            self.findings.append(finding)


class LedgerComparison:
    """Compares the records of some segments with the ledger of a stream.

    Args:
        connection: in autocommit, made by :func:`walstream.source.connection.connect`.
        settings: of the stream.
        segments: in their order.
        first, last: only these offsets; rows that are in the ledger besides are then not looked for.
        progress: told how many records more were compared.
    """

    def __init__(
        self,
        connection: Connection,
        settings: Settings,
        segments: Sequence[Segment],
        *,
        first: int | None = None,
        last: int | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self._connection = connection
        self._settings = settings
        self._segments = segments
        self._first, self._last = first, last
        self._progress = progress or (lambda _count: None)
        self._rows = LedgerRows(connection, settings.ledger)
        self._seen = _Seqs()
        self._from = self._to = 0
        self.result = Comparison()

    def run(self) -> Comparison:
        """Compare.

        Raises:
            WalstreamError: of the connection, or a ledger that is no longer one.
            OSError: a segment cannot be read.
        """
        for chunk in self._chunks():
            self._compare(chunk)
            self._progress(len(chunk))
        if self._first is None and self._last is None and self._to:
            self._look_for_others()
        return self.result

    def _chunks(self) -> Iterator[list[tuple[str, Record]]]:
        chunk: list[tuple[str, Record]] = []
        nbytes = 0
        for segment in self._segments:
            for lines in read_lines(segment.path):
                for line in lines:
                    try:
                        record = parse(line)
                    except NoRecord:
                        continue  # what is wrong with the chain was said already
                    if record.offset is None or not self._wanted(record.offset):
                        continue
                    chunk.append((segment.path.name, record))
                    nbytes += len(line)
                    if len(chunk) == CHUNK or nbytes >= _CHUNK_BYTES:
                        yield chunk
                        chunk, nbytes = [], 0
        if chunk:
            yield chunk

    def _wanted(self, offset: int) -> bool:
        return (self._first is None or offset >= self._first) and (self._last is None or offset <= self._last)

    # -- what is on record ------------------------------------------------------------------------------------------

    def _compare(self, chunk: Sequence[tuple[str, Record]]) -> None:
        self._from = self._from or (chunk[0][1].offset or 0)
        self._to = chunk[-1][1].offset or 0
        seqs = [record.seq or 0 for _, record in chunk]
        for seq in seqs:
            self._seen.add(seq)
        self._compare_order(chunk)
        rows = self._fetch(seqs)
        blank = {record.seq for _, record in chunk if record.payload is None}
        gone = self._declared(
            [seq for seq in seqs if seq not in rows or seq in blank or rows[seq][4] == ERASED_PAYLOAD]
        )
        for name, record in chunk:
            row = rows.get(record.seq or 0)
            where = (name, record.n, record.offset, record.seq)
            if record.kind != EVENT:
                self.result.erased += 1
                continue
            self.result.compared += 1
            if row is None:
                if record.seq in gone:
                    self.result.erased += 1
                elif record.seq not in self._twice:
                    self.result.add(
                        Finding("missing", "the ledger has no such row, and no erasure declares it", *where)
                    )
                continue
            changed = _changed(record, row)
            if not changed:
                self.result.same += 1
            elif changed == ["payload"] and record.seq in gone and row[4] == ERASED_PAYLOAD:
                self.result.erased += 1
            else:
                self.result.add(Finding("altered", f"the ledger says another {', '.join(changed)}", *where))

    def _fetch(self, seqs: Sequence[int]) -> dict[int, Row]:
        """Rows by seq. A seq that two rows carry is narrowed down to, and is a finding of its own."""
        self._twice: set[int] = set()
        found: dict[int, Row] = {}
        stack: list[Sequence[int]] = [seqs]
        while stack:
            some = stack.pop()
            try:
                found.update(self._rows.fetch(some))
            except LedgerError as error:
                if len(some) > 1:
                    half = len(some) // 2
                    stack += [some[half:], some[:half]]
                    continue
                self._twice.add(some[0])
                self.result.add(Finding("extra", str(error), seq=some[0]))
        return found

    def _compare_order(self, chunk: Sequence[tuple[str, Record]]) -> None:
        first, last = chunk[0][1].offset or 0, chunk[-1][1].offset or 0
        ordered = dict(seqs_between(self._connection, self._settings.namespace, first, last))
        for name, record in chunk:
            found = ordered.get(record.offset or 0)
            if found != record.seq:
                what = "the order does not reach it" if found is None else f"the order has seq {found} there"
                self.result.add(Finding("order", what, name, record.n, record.offset, record.seq))

    def _declared(self, seqs: Sequence[int]) -> set[int]:
        return set(erased_among(self._connection, self._settings.namespace, seqs))

    # -- what is there besides --------------------------------------------------------------------------------------

    def _look_for_others(self) -> None:
        """Rows of the ledger that are not on record, though their offset should be, or that have none."""
        namespace = self._settings.namespace
        seq_column = spelled('"' + self._settings.ledger.columns.seq.replace('"', '""') + '"')
        after = query(
            self._connection,
            f"SELECT coalesce(max(floor_seq), -9223372036854775808) FROM {own_table(namespace, 'identity')}",
            doing="reading the identity",
        )[0][0]
        without: list[int] = []
        while True:
            rows = query(
                self._connection,
                f"SELECT {seq_column} FROM {spelled(self._settings.ledger.qualified)} WHERE {seq_column} > %s"
                f" ORDER BY {seq_column} LIMIT {_SCAN}",
                (after,),
                doing=f"reading the seqs of {self._settings.ledger.qualified}",
            )
            others = [seq for (seq,) in rows if seq not in self._seen]
            if others:
                without += self._place(others)
            if len(rows) < _SCAN:
                break
            after = rows[-1][0]
        self._judge_unordered(without)

    def _place(self, seqs: Sequence[int]) -> list[int]:
        """Judge rows that are not on record by their offsets; return those that have none."""
        offsets: dict[int, int] = {}
        wanted = set(seqs)
        for segment in segments_with_seqs_between(self._connection, self._settings.namespace, seqs[0], seqs[-1]):
            places = enumerate(segment.seqs, segment.first_offset)
            offsets.update({seq: offset for offset, seq in places if seq in wanted})
        for seq, offset in sorted(offsets.items(), key=lambda pair: pair[1]):
            if offset > self._to:
                self.result.behind += 1
            elif offset >= self._from:
                self.result.add(
                    Finding("extra", "the row has this offset, and another one is on record", None, None, offset, seq)
                )
        return [seq for seq in seqs if seq not in offsets]

    def _judge_unordered(self, seqs: list[int]) -> None:
        """Rows without an offset: a moment ago that is no wonder, but ingest has to get to them."""
        until = time.monotonic() + _PATIENCE
        while seqs and self._ingests() and time.monotonic() < until:
            time.sleep(0.2)
            seqs = self._place(seqs)
        if seqs and not self._ingests():
            self.result.unordered += len(seqs)
            return
        for seq in seqs:
            self.result.add(Finding("extra", "the row has no place in the commit order", seq=seq))

    def _ingests(self) -> bool:
        rows = query(
            self._connection,
            f"SELECT coalesce(bool_or(lease_until > clock_timestamp()), false)"
            f" FROM {own_table(self._settings.namespace, 'ingest')}",
            doing="looking whether somebody ingests",
        )
        return bool(rows[0][0])


def _changed(record: Record, row: Row) -> list[str]:
    fields = record.fields()
    pairs = {
        "session_id": (fields.get("session_id"), row[1].decode()),
        "agent_id": (fields.get("agent_id"), row[2].decode()),
        "event_type": (fields.get("event_type"), row[3].decode()),
        "created_at": (fields.get("created_at"), None if row[5] is None else row[5].decode()),
    }
    found = [name for name, (recorded, now) in pairs.items() if recorded != now]
    if record.payload is None:
        if sha256(row[4]).hexdigest().encode() != record.sha256:
            found.append("payload")
    elif record.payload != row[4]:
        found.append("payload")
    recorded_extras = fields.get("extras") or {}
    if row[6] is not None:
        for name, value in zip(*row[6], strict=True):
            text = None if value is None else value.decode()
            if name in recorded_extras and recorded_extras[name] != text:
                found.append(name)
    return found


class _Seqs:
    """A set of seqs, in a bit each where they are dense."""

    def __init__(self) -> None:
        self._pages: dict[int, bytearray] = {}

    def add(self, seq: int) -> None:
        page = self._pages.get(seq >> _PAGE_BITS)
        if page is None:
            page = self._pages[seq >> _PAGE_BITS] = bytearray(1 << _PAGE_BITS >> 3)
        low = seq & ((1 << _PAGE_BITS) - 1)
        page[low >> 3] |= 1 << (low & 7)

    def __contains__(self, seq: int) -> bool:
        page = self._pages.get(seq >> _PAGE_BITS)
        low = seq & ((1 << _PAGE_BITS) - 1)
        return page is not None and bool(page[low >> 3] >> (low & 7) & 1)
