"""Where violations are written down: the table that the audit sink reads them from, and ``walstream status``.

Ingest writes it under its generation, and the audit sink what it finds by itself; a trigger lets them take turns, so
that ids are committed in their order, and whoever has read one has read all before it. The commit waits for this
server's disk, because what was read ends in a file that no crash takes back.

What an erasure declares is no violation. It is looked up once the transaction is visible (rule 2): then so is the
declaration, which is of the same transaction.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

from walstream.config import quote
from walstream.errors import ConfigError, LedgerError
from walstream.ledger.schema import ALARM_VERSION, ERASURES_VERSION, FINDINGS_VERSION
from walstream.lsn import format_lsn

from .backlog import Noticed
from .leadership import Lease
from .unwatched import record_unwatched
from .violations import Violation, ranges_of, without_declared

if TYPE_CHECKING:
    from psycopg2.extensions import cursor as Cursor

Policy = Literal["record", "halt", "ignore"]

_BYTES_OF_A_STATEMENT: Final = 8 * 1024 * 1024

# Of a transaction that is finished only 32 bits of its id are known here; it is the newest one with these bits.
# The range that begins last before the seq is looked at first: of one erasure there can be a hundred thousand, none of
# which overlap, and each of them is asked about.
_DECLARED: Final = """
    SELECT v.xid, v.seq
      FROM (SELECT a.xid, a.seq, s.next - ((s.next - a.xid) & 4294967295) AS whole
              FROM unnest(%s::bigint[], %s::bigint[]) AS a (xid, seq),
                   (SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint AS next) AS s) AS v
     CROSS JOIN LATERAL (
        SELECT e.last_seq FROM {schema}.erasures AS e
         WHERE e.xid = v.whole AND e.first_seq <= v.seq ORDER BY e.first_seq DESC LIMIT 1) AS near
     WHERE near.last_seq >= v.seq
        OR EXISTS (SELECT FROM {schema}.erasures AS e
                    WHERE e.xid = v.whole AND v.seq BETWEEN e.first_seq AND e.last_seq)"""

_RECORD: Final = """
    WITH durable AS MATERIALIZED (SELECT set_config('synchronous_commit', 'local', true) AS level)
    INSERT INTO {schema}.violations (kind, commit_lsn, ordinal, seq, xid, detail{more})
    SELECT v.kind, v.commit_lsn, v.ordinal, v.seq, v.xid, v.detail{values}
      FROM jsonb_to_recordset(%s::jsonb)
           AS v (place integer, kind text, commit_lsn pg_lsn, ordinal integer, seq bigint, xid bigint, detail text,
                 origin text, time_us bigint, keys jsonb, old_keys jsonb, changes bigint, seqs jsonb),
           {schema}.generation AS g CROSS JOIN durable
     WHERE g.generation = %s AND durable.level = 'local' ORDER BY v.place FOR SHARE OF g
    ON CONFLICT DO NOTHING{returning}"""

_NOTICED: Final = """
    WITH durable AS MATERIALIZED (SELECT set_config('synchronous_commit', 'local', true) AS level),
         fence AS MATERIALIZED (
             SELECT g.generation FROM {schema}.generation AS g CROSS JOIN durable
              WHERE g.generation = %(generation)s AND durable.level = 'local' FOR SHARE OF g),
         gone AS (DELETE FROM {schema}.ledger_catalogue WHERE what = ANY (%(gone)s) AND EXISTS (SELECT FROM fence)),
         seen AS (INSERT INTO {schema}.ledger_catalogue (what, facts)
                  SELECT e.key, e.value FROM fence CROSS JOIN jsonb_each(%(seen)s::jsonb) AS e
                  ON CONFLICT (what) DO UPDATE SET facts = excluded.facts, seen_at = now())
    INSERT INTO {schema}.violations (kind, commit_lsn, ordinal, detail, origin)
    SELECT v.kind, v.commit_lsn, v.ordinal, v.detail, v.origin
      FROM fence CROSS JOIN jsonb_to_recordset(%(rows)s::jsonb)
           AS v (place integer, kind text, commit_lsn pg_lsn, ordinal integer, detail text, origin text)
     ORDER BY v.place"""

_MORE: Final = ", origin, committed_at, keys, old_keys, changes, seqs"
_VALUES: Final = """, v.origin,
           CASE WHEN v.time_us <> 0
                THEN timestamptz '2000-01-01 00:00:00+00' + v.time_us * interval '1 microsecond' END,
           v.keys, v.old_keys, v.changes, v.seqs"""


class LedgerTouched(LedgerError):
    """Somebody changed the ledger, and ingest halts for that. It looks again by itself: an acknowledgement ends it."""

    transient = True


class ViolationStore:
    """Writes violations under the lease of ingest.

    Args:
        namespace: walstream's schema.
        lease: of this ingest; after a take-over nothing is written any more.
        policy: ``halt`` ends the session of ingest behind each, until they are acknowledged; ``ignore`` writes nothing.
    """

    def __init__(self, namespace: str, lease: Lease, policy: Policy = "record") -> None:
        self._schema = quote(namespace)
        self._lease = lease
        self._policy = policy
        self._version = 0

    def record(self, cur: Cursor, violations: Sequence[Violation]) -> int:
        """Write them down; return how many changes were not on record before, and no erasure explains.

        Raises:
            LedgerTouched: there was one, and the policy is to halt.
        """
        if self._policy == "ignore":
            return 0
        if self._version < ALARM_VERSION:  # it may be migrated while this runs, and then has to be used
            cur.execute(f"SELECT max(version) FROM {self._schema}.migrations")
            row: Any = cur.fetchone()
            self._version = row[0]
        recorded = 0
        for some in _parts(violations):
            declared = self._declared(cur, some) if self._version >= ERASURES_VERSION else set()
            left = [kept for each in some if (kept := without_declared(each, declared)) is not None]
            if left:
                recorded += self._write(cur, left)
        if recorded and self._policy == "halt":
            raise _touched(recorded)
        return recorded

    def record_noticed(self, cur: Cursor, noticed: Noticed) -> int:
        """Write down what the catalogue told, together with what it says now: so each is written once.

        Raises:
            LedgerTouched: something is not acknowledged, this or what the audit sink found, and the policy is to halt.
        """
        values = {
            "generation": self._lease.generation,
            "gone": noticed.gone,
            "seen": json.dumps(dict(noticed.seen)),
            "rows": json.dumps([_row(place, each) for place, each in enumerate(noticed.violations)]),
        }
        cur.execute(_NOTICED.format(schema=self._schema), values)
        recorded = max(0, cur.rowcount)
        self.refuse_if_open(cur)
        return recorded

    def record_unwatched(self, cur: Cursor) -> int:
        """Write down that the slot was moved by somebody else, or made anew; return how many such stretches are new."""
        if self._policy == "ignore":
            return 0
        cur.execute(f"SELECT max(version) FROM {self._schema}.migrations")
        row: Any = cur.fetchone()
        return record_unwatched(cur, self._schema, self._lease.generation) if row[0] >= FINDINGS_VERSION else 0

    def refuse_if_open(self, cur: Cursor) -> None:
        """Where the policy is to halt: check that all violations are acknowledged.

        Raises:
            LedgerTouched: they are not.
            ConfigError: the schema is too old to know.
        """
        if self._policy != "halt":
            return
        cur.execute(f"SELECT max(version) FROM {self._schema}.migrations")
        row: Any = cur.fetchone()
        if row[0] < ALARM_VERSION:
            raise ConfigError(
                "violations = 'halt' needs to know which violations were acknowledged, and the schema is older",
                hint="run `walstream migrate`",
            )
        cur.execute(f"SELECT coalesce(sum(changes), 0) FROM {self._schema}.violations WHERE acknowledged_at IS NULL")
        row = cur.fetchone()
        if row[0]:
            raise _touched(int(row[0]))

    def _declared(self, cur: Cursor, violations: Sequence[Violation]) -> set[tuple[int, int]]:
        """(xid, seq) of what was erased by declaration."""
        asked = [
            (each.xid, seq)
            for each in violations
            if each.declarable
            for seq in ((each.seq,) if each.seqs is None else each.seqs)
            if seq is not None
        ]
        if not asked:
            return set()
        cur.execute(_DECLARED.format(schema=self._schema), ([xid for xid, _ in asked], [seq for _, seq in asked]))
        return {(int(xid), int(seq)) for xid, seq in cur.fetchall()}

    def _write(self, cur: Cursor, violations: Sequence[Violation]) -> int:
        whole = self._version >= ALARM_VERSION
        statement = _RECORD.format(
            schema=self._schema,
            more=_MORE if whole else "",
            values=_VALUES if whole else "",
            returning=" RETURNING changes" if whole else " RETURNING 1",
        )
        rows = [_row(place, each) for place, each in enumerate(violations)]
        cur.execute(statement, (json.dumps(rows), self._lease.generation))
        return sum(int(changes) for (changes,) in cur.fetchall())


def _touched(changes: int) -> LedgerTouched:
    what = "1 change" if changes == 1 else f"{changes:,} changes"
    return LedgerTouched(
        f"{what} of the ledger that nobody declared: ingest halts (violations = 'halt')",
        hint="see `walstream audit violations`; it goes on after `walstream audit acknowledge`",
    )


def _parts(violations: Sequence[Violation]) -> list[list[Violation]]:
    """So many in one statement as memory allows; the lease must not run out over them."""
    parts: list[list[Violation]] = [[]]
    size = 0
    for each in violations:
        if size >= _BYTES_OF_A_STATEMENT:
            parts.append([])
            size = 0
        parts[-1].append(each)
        size += each.nbytes
    return parts


def _row(place: int, violation: Violation) -> dict[str, Any]:
    return {
        "place": place,
        "kind": violation.kind,
        "commit_lsn": format_lsn(violation.commit_lsn),
        "ordinal": violation.ordinal,
        "seq": violation.seq,
        "xid": violation.xid,
        "detail": violation.detail,
        "origin": violation.origin,
        "time_us": violation.time_us,
        "keys": violation.keys,
        "old_keys": violation.old_keys,
        "changes": violation.changes,
        "seqs": None if violation.seqs is None else ranges_of(violation.seqs),
    }
