"""Which seqs can no longer appear: the settled part of the ledger.

A seq is drawn by the column's default, inside an INSERT. By then the INSERT's transaction holds RowExclusiveLock on the
table that it names (documentation, 13.3.1 "Table-Level Locks"), and it keeps it until it ends, prepared or not. At a
commit its rows become visible before its locks are released. So:

1. Look up the last number M that the sequence has given.
2. Then look who holds such a lock on the ledger or on a partition of it. Whoever drew a number up to M and has not
   ended is among them: the lock was there before the number.
3. As soon as none of these transactions holds its lock any more, each number up to M that will ever be a row is one
   that every later statement sees.

M is what the *sequence* says, and not the highest seq that was seen in a row: that one may have been chosen by whoever
inserted it, far above numbers that are yet to be drawn.

None of this holds where sessions keep numbers in stock (CACHE), where a number does not come from one plain sequence
that counts upwards, or where rows stand in inheritance children that nobody knows; then nothing is ever settled, and
whoever asks has to count. Nor does it hold for who draws a number first and inserts it later, under no lock at all.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Final

from psycopg2.extensions import cursor as Cursor

from walstream.config import Settings

_FACTS: Final = """
WITH ledger AS (
    SELECT c.oid FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
     WHERE n.nspname = %(schema)s AND c.relname = %(table)s AND c.relkind IN ('r', 'p')
), tables AS (
    SELECT oid FROM ledger
     UNION
    SELECT t.relid::oid FROM ledger, pg_catalog.pg_partition_tree(pg_catalog.pg_partition_root(ledger.oid)) AS t
), columns AS (
    SELECT a.attrelid, a.attnum, d.oid AS default_oid, pg_catalog.pg_get_expr(d.adbin, d.adrelid) AS expression
      FROM tables JOIN pg_catalog.pg_attribute a ON a.attrelid = tables.oid AND a.attname = %(seq)s
      LEFT JOIN pg_catalog.pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
), sources AS (
    SELECT p.refobjid AS oid FROM columns c
      JOIN pg_catalog.pg_depend p ON p.classid = 'pg_catalog.pg_attrdef'::regclass AND p.objid = c.default_oid
       AND p.refclassid = 'pg_catalog.pg_class'::regclass
      JOIN pg_catalog.pg_class s ON s.oid = p.refobjid AND s.relkind = 'S'
     UNION
    SELECT p.objid FROM columns c
      JOIN pg_catalog.pg_depend p ON p.refclassid = 'pg_catalog.pg_class'::regclass AND p.refobjid = c.attrelid
       AND p.refobjsubid = c.attnum AND p.classid = 'pg_catalog.pg_class'::regclass AND p.deptype = 'i'
)
SELECT ARRAY(SELECT oid::bigint FROM tables ORDER BY 1),
       (SELECT min(s.oid::bigint) FROM sources s JOIN pg_catalog.pg_sequence q ON q.seqrelid = s.oid
        HAVING count(*) = 1
           AND bool_and(q.seqcache = 1 AND q.seqincrement > 0 AND NOT q.seqcycle)
           AND bool_and(pg_catalog.has_sequence_privilege(s.oid, 'SELECT, USAGE'))
           AND NOT EXISTS (SELECT FROM columns WHERE expression !~ '^nextval\\(''[^()]*''::regclass\\)$')
           AND NOT EXISTS (SELECT FROM tables t JOIN pg_catalog.pg_class c ON c.oid = t.oid AND c.relkind = 'r'
                             JOIN pg_catalog.pg_inherits i ON i.inhparent = t.oid)),
       pg_catalog.current_setting('transaction_isolation') = 'read committed'
"""

_HOLDERS: Final = """
SELECT DISTINCT l.virtualtransaction FROM pg_catalog.pg_locks AS l
 WHERE l.locktype = 'relation' AND l.granted AND l.relation::bigint = ANY (%s)
   AND l.database = (SELECT d.oid FROM pg_catalog.pg_database AS d WHERE d.datname = pg_catalog.current_database())
   AND l.mode IN ('RowExclusiveLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')
   AND l.pid IS DISTINCT FROM pg_catalog.pg_backend_pid()
"""

_INTERVAL: Final = 0.05  # seconds between two looks at all locks of the server


@dataclass(frozen=True, slots=True)
class _Facts:
    tables: frozenset[int]
    sequence: int | None  # None: nothing can be settled
    read_committed: bool


@dataclass(frozen=True, slots=True)
class _Note:
    """The last number that the sequence had given, and who may still have drawn one up to it."""

    number: int
    facts: _Facts
    holders: frozenset[str]


class Settling:
    """Follows the settled part over one connection, whose loss ends what is known (make another one then: after a
    restart of the server the same name stands for another transaction).

    Args:
        settings: of the stream.
        interval: seconds in which it looks at most once.

    Attributes:
        mark: each seq up to here that a default drew is visible, if it ever will be, to every statement that begins
            from now on; 0 while nothing is known, and where nothing can be known.
    """

    def __init__(self, settings: Settings, *, interval: float = _INTERVAL) -> None:
        ledger = settings.ledger
        self._names = {"schema": ledger.namespace, "table": ledger.table, "seq": ledger.columns.seq}
        self._interval = interval
        self._looked_at = float("-inf")
        self._sequence: int | None = None
        self._note: _Note | None = None
        self._next = 0  # what the mark becomes with the next transaction
        self.mark = 0

    def advance(self, cur: Cursor) -> int:
        """Find out what has settled since the last call; return :attr:`mark`. Call it once a transaction."""
        if self._next > self.mark:
            if self._read_facts(cur).sequence == self._sequence:
                self.mark = self._next
            self._next = self.mark
        if time.monotonic() - self._looked_at < self._interval:
            return self.mark
        self._looked_at = time.monotonic()
        if self._was_set_back(cur):
            self._note = self._sequence = None
            self.mark = self._next = 0
        if self._note is not None:
            self._look_again(cur, self._note)
        if self._note is None:
            self._take_note(cur)
        return self.mark

    def _take_note(self, cur: Cursor) -> None:
        if self._sequence is None:
            self._sequence = self._read_facts(cur).sequence
            if self._sequence is None:
                return
        # The number first, and only then what it is judged by: partitions, the sequence's options, holders.
        number = self._last_number(cur, self._sequence)
        if number is None or number <= max(self.mark, self._next):
            return
        facts = self._read_facts(cur)
        if facts.sequence != self._sequence:
            self._sequence = None
            return
        note = _Note(number, facts, self._holders(cur, facts.tables))
        if note.holders:
            self._note = note
        else:
            self._settled(note, facts)

    def _was_set_back(self, cur: Cursor) -> bool:
        """Whether the sequence gives numbers again that were past (``setval``, ``RESTART``)."""
        highest = max(self.mark, self._next, 0 if self._note is None else self._note.number)
        if self._sequence is None or not highest:
            return False
        number = self._last_number(cur, self._sequence)
        return number is None or number < highest

    def _last_number(self, cur: Cursor, sequence: int) -> int | None:
        cur.execute(
            "SELECT pg_catalog.pg_sequence_last_value(s.oid) FROM pg_catalog.pg_class AS s WHERE s.oid = %s",
            (sequence,),
        )
        row: Any = cur.fetchone()
        return None if row is None or row[0] is None else int(row[0])

    def _look_again(self, cur: Cursor, note: _Note) -> None:
        facts = self._read_facts(cur)
        if facts.sequence != self._sequence:
            self._note = self._sequence = None
        elif not note.holders & self._holders(cur, facts.tables | note.facts.tables):
            self._note = None
            self._settled(note, facts)

    def _settled(self, note: _Note, facts: _Facts) -> None:
        # Under REPEATABLE READ the later statements of this transaction see no more than its first one did, and what
        # they read of the catalogs is as old.
        if facts.read_committed:
            self.mark = self._next = note.number
        else:
            self._next = note.number

    def _holders(self, cur: Cursor, tables: frozenset[int]) -> frozenset[str]:
        cur.execute(_HOLDERS, (list(tables),))
        return frozenset(row[0] for row in cur.fetchall())

    def _read_facts(self, cur: Cursor) -> _Facts:
        cur.execute(_FACTS, self._names)
        row: Any = cur.fetchone()
        tables, sequence, read_committed = row
        return _Facts(frozenset(tables), None if sequence is None else int(sequence), bool(read_committed))
