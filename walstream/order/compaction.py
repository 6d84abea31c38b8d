"""Compaction: many small segments become one, without any reader noticing.

At low rates a segment holds one event, and its row about a hundred bytes. Merged, an event costs two or three. A run of
neighbours is replaced by one row with the same first offset in one statement, fenced like every write of the order
(rule 7). So a crash leaves either the one form or the other, and so does every reader's snapshot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import psycopg2
from psycopg2.errors import NotNullViolation
from psycopg2.extensions import connection as Connection

from walstream.errors import Fenced, LedgerError
from walstream.lsn import format_lsn
from walstream.order.segment import Segment, encode_body
from walstream.order.table import COLUMNS, order_table, own_table, query, segment_of
from walstream.source.failures import classify

SMALL: Final = 1_000
"""A segment of fewer events is worth merging."""

TARGET: Final = 10_000
"""A merged segment holds about so many: small enough to read for the sake of one event, large enough to compress."""

_PAGE: Final = 2_000

# The tail is never touched: it says where the stream stands, and ingest appends behind it. If not exactly the rows
# that were read are there to be deleted, NULL in a column that takes none undoes the whole statement.
_REPLACE: Final = """WITH fence AS MATERIALIZED
   (SELECT generation FROM {generation} WHERE generation = %(generation)s FOR SHARE),
 gone AS
   (DELETE FROM {order} WHERE first_offset BETWEEN %(first)s AND %(last)s AND EXISTS (SELECT FROM fence)
    AND %(last)s < (SELECT max(first_offset) FROM {order}) RETURNING events)
 INSERT INTO {order}
   (first_offset, events, last_lsn, partial_inserts, min_seq, max_seq, recovered, generation, body)
 SELECT %(first)s,
        (SELECT CASE WHEN count(*) = %(segments)s AND sum(events) = %(events)s THEN %(events)s END FROM gone),
        %(last_lsn)s::pg_lsn, %(partial_inserts)s, %(min_seq)s, %(max_seq)s, %(recovered)s, generation, %(body)s
   FROM fence"""


def merge(segments: Sequence[Segment]) -> Segment:
    """Return neighbouring segments as one. Pure.

    Pieces of one transaction that meet become one piece.

    Raises:
        ValueError: they are no neighbours, or some are recovered and some are not.
    """
    first, last = segments[0], segments[-1]
    seqs: list[int] = []
    tx_sizes: list[int] = []
    commit_lsns: list[int] = []
    commit_times: list[int] = []
    for segment in segments:
        if segment.first_offset != first.first_offset + len(seqs) or segment.recovered != first.recovered:
            raise ValueError(f"the segments at {first.first_offset} and {segment.first_offset} cannot be merged")
        start = 0
        if commit_lsns and commit_lsns[-1] == segment.commit_lsns[0] != 0:  # it goes on
            tx_sizes[-1] += segment.tx_sizes[0]
            start = 1
        tx_sizes += segment.tx_sizes[start:]
        commit_lsns += segment.commit_lsns[start:]
        commit_times += segment.commit_times[start:]
        seqs += segment.seqs
    return Segment(
        first.first_offset,
        seqs,
        tx_sizes,
        commit_lsns,
        commit_times,
        b"".join(segment.sizes for segment in segments),
        last.last_lsn,
        last.partial_inserts,
        first.recovered,
        last.generation,
    )


class Compactor:
    """Merges small segments, a little at a time. Remembers what is compact already.

    Args:
        connection: in autocommit; it may be the writer's (asynchronous commits lose nothing here).
        namespace: schema of walstream's tables.
        generation: of the ingest on whose behalf it works.
        small: segments of fewer events are merged.
        target: up to so many events in one.
        min_run: fewer neighbours than this wait for more, so that an event is not rewritten again and again.
    """

    def __init__(
        self,
        connection: Connection,
        namespace: str,
        generation: int,
        *,
        small: int = SMALL,
        target: int = TARGET,
        min_run: int = 64,
    ) -> None:
        if min_run < 2 or target < small:
            raise ValueError("a run has at least two segments, and their target is not below what is small")
        self._connection = connection
        self._namespace = namespace
        self._generation = generation
        self._small = small
        self._target = target
        self._min_run = min_run
        self._from = 0  # everything before this offset is compact
        names = {"order": order_table(namespace), "generation": own_table(namespace, "generation")}
        self._replace = _REPLACE.format(**names)

    @property
    def connection(self) -> Connection:
        """The connection that it works on."""
        return self._connection

    def run(self, max_merges: int = 10) -> int:
        """Merge up to ``max_merges`` runs; return how many it were. To be called now and then, while ingest is quiet.

        Raises:
            Fenced: another process took over.
            LedgerError: the order is damaged.
            WalstreamError: of the connection. The order is intact: a run is merged as a whole or not at all.
        """
        merges = 0
        for first, last in self._runs():
            self._merge(first, last)
            merges += 1
            if merges == max_merges:
                break
        return merges

    def _runs(self) -> Iterator[tuple[int, int]]:
        """First and last segment of each run that is worth merging, the newest segment never among them."""
        run: list[int] = []  # first offsets
        held = 0
        kind: bool | None = None
        for first, events, recovered in self._segments():
            fits = events < self._small and recovered == kind and held + events <= self._target
            if not fits:
                if len(run) >= self._min_run or (len(run) > 1 and held + events > self._target):
                    yield run[0], run[-1]
                run, held = [], 0
                self._from = first  # a run that was too short is closed by now: nothing will be added to it
            if events < self._small:
                run.append(first)
                held += events
            kind = recovered
        if len(run) >= self._min_run:
            yield run[0], run[-1]

    def _segments(self) -> Iterator[tuple[Any, ...]]:
        order = order_table(self._namespace)
        after = self._from - 1
        while True:
            page = query(
                self._connection,
                f"SELECT first_offset, events, recovered FROM {order} WHERE first_offset > %s"
                f" AND first_offset < (SELECT max(first_offset) FROM {order}) ORDER BY first_offset LIMIT %s",
                (after, _PAGE),
                doing="looking for small segments of the order",
            )
            yield from page
            if len(page) < _PAGE:
                return
            after = page[-1][0]

    def _merge(self, first: int, last: int) -> None:
        doing = f"merging the order's segments at offsets {first} to {last}"
        rows = query(
            self._connection,
            f"SELECT {COLUMNS} FROM {order_table(self._namespace)} WHERE first_offset BETWEEN %s AND %s"
            " ORDER BY first_offset",
            (first, last),
            doing=doing,
        )
        try:
            merged = merge([segment_of(row) for row in rows])
        except (ValueError, IndexError) as error:
            raise LedgerError(f"the commit order has a gap or an overlap: {doing}: {error}") from error
        values: dict[str, Any] = {
            "generation": self._generation,
            "first": first,
            "last": last,
            "segments": len(rows),
            "events": merged.events,
            "last_lsn": format_lsn(merged.last_lsn),
            "partial_inserts": merged.partial_inserts,
            "min_seq": min(merged.seqs),
            "max_seq": max(merged.seqs),
            "recovered": merged.recovered,
            "body": psycopg2.Binary(encode_body(merged)),
        }
        try:
            with self._connection.cursor() as cursor:
                cursor.execute(self._replace, values)
                written = cursor.rowcount
        except NotNullViolation:
            self._from = 0  # somebody else compacts: look again another time
            return
        except psycopg2.Error as error:
            raise classify(error, doing=doing) from error
        if written != 1:
            raise Fenced(
                f"generation {self._generation} of ingest was replaced; the order was not compacted",
                hint="another walstream took over this ledger; this one stands by",
            )
