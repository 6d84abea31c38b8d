"""The proof: what the ledger holds, compared in SQL with what every projector and worker made of it.

The ledger is the truth. The order (decoded from ``commit_order``) and the file are loaded into temporary tables next
to it, and everything after that is a query. ``lost`` and ``duplicated`` are sums over all comparisons: an event that
the order and the file both miss counts twice.

Latency is the time from the commit's own timestamp (which the server takes when it writes the commit record, before
that record is flushed) to the moment the projector's handler got the event, both by this machine's clock. Nothing is
left out: an event that committed while the consumer was dead waited for its restart, and counts with all of that.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from walstream.config import LedgerTable, Settings, quote
from walstream.errors import LedgerError
from walstream.ledger.json_lines import parse_event
from walstream.lsn import parse_lsn
from walstream.order.segment import decode_body

from .handoffs import ROUTED, TABLES, WORKED, Handoffs, Latency, count_handoffs, latency_of
from .journal import Begun

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection
    from psycopg2.extensions import cursor as Cursor


_PLACE: Final = re.compile(rb'\{"offset":([0-9]+),"seq":(-?[0-9]+),')  # how JsonLinesFile begins a line


@dataclass(slots=True)
class Comparison:
    """One projector's effects against the ledger.

    Attributes:
        lost: events of the ledger that it does not show.
        duplicated: showings beyond the first.
        foreign: what it shows and the ledger does not hold (a rolled-back event, say).
    """

    lost: int = 0
    duplicated: int = 0
    foreign: int = 0


@dataclass(slots=True)
class Proof:
    """What was found. :attr:`holds` is the verdict.

    Attributes:
        written: rows in the ledger.
        claimed: events that have to be in it: those that agents committed themselves, by their own account, and those
            that workers had to write in the sessions that were handed to them.
        offsets: ledger rows that have an offset.
        gaps: offsets between the first and the last that nobody has.
        delivered: ledger rows that reached the handlers.
        out_of_order: deliveries that came after one with a higher offset.
        altered: lines of the file that differ from their row.
        late_seqs: events that committed after one with a higher seq: the order is not the sequence's.
        transactions: that the events came in.
        comparisons: by what was compared with the ledger.
    """

    written: int = 0
    claimed: int = 0
    offsets: int = 0
    gaps: int = 0
    delivered: int = 0
    out_of_order: int = 0
    altered: int = 0
    late_seqs: int = 0
    sessions: int = 0
    transactions: int = 0
    comparisons: dict[str, Comparison] = field(default_factory=dict)
    latency: Latency = field(default_factory=Latency)
    undisturbed: Latency = field(default_factory=Latency)
    handoffs: Handoffs = field(default_factory=Handoffs)

    @property
    def lost(self) -> int:
        """Events that some comparison misses; also rows that have to be in the ledger and are not."""
        return sum(c.lost for c in self.comparisons.values()) + max(0, self.claimed - self.written)

    @property
    def duplicated(self) -> int:
        """Showings beyond the first."""
        return sum(c.duplicated for c in self.comparisons.values())

    @property
    def holds(self) -> bool:
        """Whether every event was delivered once, in order, unaltered, every handoff ran to completion once, and
        nothing else did."""
        wrong = self.lost + self.duplicated + self.gaps + self.out_of_order + self.altered
        return wrong + sum(c.foreign for c in self.comparisons.values()) == 0 and self.written == self.claimed

    def as_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "written": self.written,
            "offsets": self.offsets,
            "delivered": self.delivered,
            "lost": self.lost,
            "duplicated": self.duplicated,
            "p50_ms": self.latency.p50_ms,
            "p99_ms": self.latency.p99_ms,
            "max_ms": self.latency.max_ms,
            "holds": self.holds,
            "claimed": self.claimed,
            "gaps": self.gaps,
            "out_of_order": self.out_of_order,
            "altered": self.altered,
            "foreign": sum(c.foreign for c in self.comparisons.values()),
            "late_seqs": self.late_seqs,
            "sessions": self.sessions,
            "transactions": self.transactions,
            "projectors": {name: asdict(comparison) for name, comparison in self.comparisons.items()},
            "undisturbed": asdict(self.undisturbed),
            **self.handoffs.as_json(),
        }


_TABLES: Final = """\
CREATE TEMPORARY TABLE proof_ledger ON COMMIT DROP AS
    SELECT $seq AS seq, $session_id::text AS session_id, $agent_id::text AS agent_id, $event_type::text AS event_type,
           $payload::text AS payload FROM $table;
CREATE TEMPORARY TABLE proof_order (event_offset bigint, seq bigint, commit_lsn bigint) ON COMMIT DROP;
CREATE TEMPORARY TABLE proof_file (
    line bigint, event_offset bigint, seq bigint, session_id text, agent_id text, event_type text, payload text
) ON COMMIT DROP;
CREATE TEMPORARY TABLE proof_outages (who text, from_us bigint, to_us bigint) ON COMMIT DROP;
"""

# $shown is a relation with a column seq: what somebody shows. $wanted: the part of the ledger it has to show.
_COMPARE: Final = """\
WITH shown AS (SELECT seq, count(*) AS times FROM ($shown) AS shown_rows GROUP BY seq),
     wanted AS (SELECT seq FROM proof_ledger WHERE $wanted)
SELECT count(*) FILTER (WHERE shown.seq IS NULL),
       coalesce(sum(shown.times - 1), 0),
       count(*) FILTER (WHERE wanted.seq IS NULL)
  FROM wanted FULL JOIN shown USING (seq)"""

_COMPARE_COUNTS: Final = """\
WITH wanted AS (SELECT session_id, event_type, count(*) AS events FROM proof_ledger GROUP BY 1, 2)
SELECT coalesce(sum(greatest(coalesce(wanted.events, 0) - coalesce(shown.events, 0), 0)), 0),
       coalesce(sum(greatest(coalesce(shown.events, 0) - wanted.events, 0)) FILTER (WHERE wanted.events > 0), 0),
       coalesce(sum(shown.events) FILTER (WHERE wanted.events IS NULL), 0)
  FROM wanted FULL JOIN event_counts AS shown USING (session_id, event_type)"""

_NUMBERS: Final = """\
SELECT (SELECT count(*) FROM proof_ledger),
       (SELECT count(DISTINCT session_id) FROM proof_ledger),
       (SELECT count(*) FROM proof_ledger WHERE seq IN (SELECT seq FROM proof_order)),
       (SELECT coalesce(max(event_offset), 0) - count(DISTINCT event_offset) FROM proof_order),
       (SELECT count(*) FROM proof_ledger WHERE seq IN (SELECT seq FROM demo_deliveries)),
       (SELECT count(*) FROM (
           SELECT event_offset < lag(event_offset) OVER (ORDER BY delivery) AS back FROM demo_deliveries
        ) AS steps WHERE back),
       (SELECT count(*) FROM proof_file AS f JOIN proof_ledger AS e USING (seq)
         WHERE (f.session_id, f.agent_id, f.event_type, f.payload)
            IS DISTINCT FROM (e.session_id, e.agent_id, e.event_type, e.payload)),
       (SELECT count(*) FROM (
           SELECT seq < max(seq) OVER (ORDER BY event_offset ROWS UNBOUNDED PRECEDING) AS late FROM proof_order
        ) AS steps WHERE late),
       (SELECT count(DISTINCT commit_lsn) FROM proof_order)"""

_LATENCY: Final = """\
SELECT count(*),
       percentile_cont(0.50) WITHIN GROUP (ORDER BY handled_us - committed_us),
       percentile_cont(0.99) WITHIN GROUP (ORDER BY handled_us - committed_us),
       max(handled_us - committed_us)
  FROM demo_deliveries WHERE committed_us IS NOT NULL"""

_UNDISTURBED: Final = (
    _LATENCY
    + """
   AND NOT EXISTS (SELECT FROM proof_outages
                    WHERE who = 'consumer' AND committed_us <= to_us AND handled_us >= from_us)"""
)


def prove(
    connection: Connection,
    settings: Settings,
    file: Path,
    *,
    claimed: int,
    turns: Iterable[Begun] | None = None,
    outages: Sequence[tuple[str, int, int]] = (),
) -> Proof:
    """Compare everything with the ledger, in one snapshot.

    Args:
        connection: not in autocommit mode; its search path finds the demo's tables.
        file: the append-only file that the consumer wrote.
        claimed: how many events have to be in the ledger.
        turns: what workers noted; ``None`` if there were none to work on handoffs.
        outages: who was killed (``consumer``, or an agent), when, and when it was back, in microseconds since 1970.
    """
    connection.rollback()
    connection.set_session(isolation_level="REPEATABLE READ")
    proof = Proof(claimed=claimed)
    with connection, connection.cursor() as cur:
        cur.execute(_for_ledger(_TABLES, settings.ledger) + TABLES)
        _copy(cur, "proof_order", _offsets(cur, settings))
        _copy(cur, "proof_file", _lines(file))
        _copy(cur, "proof_outages", outages)
        _copy(cur, "proof_turns", ((turn.seq, turn.token, turn.agent, turn.at_us) for turn in turns or ()))
        for table in ("proof_ledger", "proof_order", "proof_file", "proof_turns"):
            cur.execute(f"ANALYZE {table}")
        cur.execute(_NUMBERS)
        numbers = cur.fetchone() or ()
        (
            proof.written,
            proof.sessions,
            proof.offsets,
            proof.gaps,
            proof.delivered,
            proof.out_of_order,
            proof.altered,
            proof.late_seqs,
            proof.transactions,
        ) = map(int, numbers)
        shown = {
            "commit order": ("SELECT seq FROM proof_order", "true"),
            "delivery log": ("SELECT seq FROM demo_deliveries", "true"),
            "file": ("SELECT seq FROM proof_file", "true"),
            **ROUTED,
            **(WORKED if turns is not None else {}),
        }
        for name, (relation, wanted) in shown.items():
            cur.execute(_COMPARE.replace("$shown", relation).replace("$wanted", wanted))
            proof.comparisons[name] = Comparison(*map(int, cur.fetchone() or ()))
        cur.execute(_COMPARE_COUNTS)
        proof.comparisons["event counter"] = Comparison(*map(int, cur.fetchone() or ()))
        proof.latency = latency_of(cur, _LATENCY)
        proof.undisturbed = latency_of(cur, _UNDISTURBED)
        proof.handoffs = count_handoffs(cur)
    return proof


def _for_ledger(sql: str, ledger: LedgerTable) -> str:
    for name in sorted(type(ledger.columns).model_fields, key=len, reverse=True):
        sql = sql.replace(f"${name}", quote(getattr(ledger.columns, name)))
    return sql.replace("$table", ledger.qualified)


def _offsets(cur: Cursor, settings: Settings) -> Iterator[tuple[int, int, int]]:
    cur.execute(
        "SELECT first_offset, events, last_lsn::text, partial_inserts, recovered, generation, body"
        f" FROM {quote(settings.namespace)}.commit_order ORDER BY first_offset"
    )
    for first, events, last_lsn, partial, recovered, generation, body in cur.fetchall():
        segment = decode_body(
            body,
            first_offset=first,
            events=events,
            last_lsn=parse_lsn(last_lsn),
            partial_inserts=partial,
            recovered=recovered,
            generation=generation,
        )
        pieces = zip(segment.commit_lsns, segment.tx_sizes, strict=True)
        commits = [lsn for lsn, size in pieces for _ in range(size)]
        yield from zip(range(first, first + events), segment.seqs, commits, strict=True)


def _lines(file: Path) -> Iterator[tuple[Any, ...]]:
    if not file.exists():
        return
    with file.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            event = parse_event(line)
            place = _PLACE.match(line)  # no parser: a payload may be deeper than one goes
            if place is None:
                raise LedgerError(f"{file}:{number}: a line that does not begin with offset and seq")
            yield (number, int(place[1]), int(place[2]), *event)


def _copy(cur: Cursor, table: str, rows: Iterable[Sequence[Any]]) -> None:
    """Load ``rows`` in COPY's text format (documentation, COPY, "Text Format")."""
    data = io.StringIO()
    for row in rows:
        data.write("\t".join(str(value).translate(_ESCAPES) for value in row) + "\n")
    data.seek(0)
    cur.copy_expert(f"COPY {table} FROM STDIN", data)


_ESCAPES: Final = str.maketrans({"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"})
