"""Rows of the ledger by seq, byte for byte as the stream would have sent them.

pgoutput renders a value with its type's output function, under the session's settings. A plain SELECT in text format
does the same, so the columns are selected as they are and never decoded here: ``col::text`` would not do, since that is
a cast (``true`` for ``t``, a ``char(9)`` without its blanks). Which columns: all but dropped and generated ones, as
pgoutput sends them (source: ``logicalrep_write_attrs`` and ``column_in_column_list``, PostgreSQL 14 to 18).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Final

import psycopg2
from psycopg2.errors import UndefinedColumn, UndefinedTable
from psycopg2.extensions import BYTES, register_type
from psycopg2.extensions import connection as Connection
from psycopg2.extensions import cursor as Cursor

from walstream.config import LedgerTable, quote
from walstream.errors import LedgerError
from walstream.event import Row
from walstream.order.large_rows import payload_in_pieces
from walstream.order.table import array_literal, query, spelled
from walstream.source.failures import classify

_INTEGERS: Final = frozenset({20, 21, 23})
"""Type OIDs of int8, int2, int4 (pg_type.dat). The driver makes ints of them, by type and not by column."""

FINGERPRINT: Final = """(SELECT c.oid::text || ':' || c.relnatts
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
   WHERE n.nspname = %s AND c.relname = %s)"""
"""SQL that changes when the table named by its two parameters is another one, or gets a column. (A column that is
dropped or renamed is noticed by the query that asks for it, and one of another type by what comes.)"""


@dataclass(frozen=True, slots=True)
class _Shape:
    fingerprint: str | None
    names: tuple[str, ...]  # all columns, in the table's order
    extras: tuple[str, ...]
    select: str
    select_light: str  # the same with NULL for the payload
    types: tuple[int, ...]  # of the selected columns, to notice when they change


class LedgerRows:
    """Fetches rows of one ledger on one connection."""

    def __init__(self, connection: Connection, ledger: LedgerTable) -> None:
        self._connection = connection
        self._ledger = ledger
        self._known: _Shape | None = None

    def expect(self, fingerprint: str | None) -> None:
        """Look at the columns again before the next fetch if the table is not the one of this fingerprint.

        A fingerprint that was read together with the order is current for all events of that order: whoever changes
        the table's columns waits for their transactions.
        """
        if self._known is not None and self._known.fingerprint != fingerprint:
            self._known = None

    def fetch(self, seqs: Sequence[int]) -> dict[int, Row]:
        """Return the rows of ``seqs`` that exist.

        Raises:
            LedgerError: a mapped column is gone, or NULL where an event needs it, or two rows carry one seq.
            WalstreamError: of the connection.
        """
        shape = self._known or self._look()
        found = self._select(shape, seqs)
        if found is None:  # the table was changed a moment ago
            found = self._select(self._look(), seqs)
        if found is None:
            raise LedgerError(f"the columns of {self._ledger.qualified} change while they are read")
        rows = {row[0]: row for row in found}
        if len(rows) != len(found):
            twice = Counter(row[0] for row in found).most_common(1)[0][0]
            raise LedgerError(
                f"two rows of {self._ledger.qualified} carry {self._ledger.columns.seq} = {twice}: which of them the "
                "event is cannot be told",
                hint="an append-only ledger gives a seq once. Find both rows (on a partitioned table a unique key "
                "over more columns does not prevent it), and remove or renumber the one that came later",
            )
        return rows

    def fetch_large(self, seq: int) -> dict[int, Row]:
        """As :meth:`fetch` for one row whose payload is very large, with little more memory than that payload.

        Raises:
            LedgerError, WalstreamError: see there.
        """
        shape = self._known or self._look()
        try:
            with self._connection.cursor() as cursor:
                cursor.execute("BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY")
                try:
                    found = self._select(shape, [seq], light=True)
                    payload = payload_in_pieces(self._connection, self._ledger, seq) if found else b""
                finally:
                    cursor.execute("ROLLBACK")
        except psycopg2.Error as error:
            raise classify(error, doing=f"reading {self._ledger.qualified} by {self._ledger.columns.seq}") from error
        if found is None or len(found) > 1:
            return self.fetch(
                [seq]
            )  # the table was changed a moment ago, or the seq is there twice: it knows what to do
        return {row[0]: (*row[:4], payload, *row[5:]) for row in found}

    def _select(self, shape: _Shape, seqs: Sequence[int], *, light: bool = False) -> list[Row] | None:
        """The rows, or ``None`` if the table no longer has this shape."""
        select = shape.select_light if light else shape.select
        lowest, highest = min(seqs), max(seqs)
        values: tuple[object, ...]
        if highest - lowest == len(seqs) - 1:  # they are all there is between the two
            condition, values = "BETWEEN %s AND %s", (lowest, highest)
        else:
            condition, values = "= ANY(%s::bigint[])", (array_literal(seqs),)
        try:
            with self._connection.cursor() as cursor:
                self._as_bytes(cursor, shape.types)
                cursor.execute(f"{select} {condition}", values)
                if _types(cursor) != shape.types:
                    return None
                found: list[Any] = cursor.fetchall()
        except (UndefinedColumn, UndefinedTable):
            return None
        except psycopg2.Error as error:
            raise classify(error, doing=f"reading {self._ledger.qualified} by {self._ledger.columns.seq}") from error
        for place in (1, 2, 3) if light else (1, 2, 3, 4):
            if None in map(itemgetter(place), found):
                raise self._hole(next(row[0] for row in found if row[place] is None), place)
        if shape.extras:
            names = shape.extras
            return [(*row[:6], (names, row[6:])) for row in found]
        return found

    def _hole(self, seq: int, place: int) -> LedgerError:
        return LedgerError(
            f"column {self._ledger.columns.names()[place]!r} of the ledger {self._ledger.qualified} is NULL in the row"
            f" with seq {seq}",
            hint="an event needs it: give the row a value and set the column NOT NULL, or map another one in"
            " walstream.toml ([ledger.columns])",
        )

    def _look(self) -> _Shape:
        ledger = self._ledger
        columns = query(
            self._connection,
            f"""SELECT a.attname, {FINGERPRINT} FROM pg_attribute a
                  JOIN pg_class c ON c.oid = a.attrelid JOIN pg_namespace n ON n.oid = c.relnamespace
                 WHERE n.nspname = %s AND c.relname = %s AND a.attnum > 0 AND NOT a.attisdropped
                   AND a.attgenerated = '' ORDER BY a.attnum""",
            (ledger.namespace, ledger.table) * 2,
            doing=f"reading the columns of {ledger.qualified}",
        )
        if not columns:
            raise LedgerError(
                f"the ledger {ledger.qualified} does not exist", hint="check `ledger` in the configuration"
            )
        names = tuple(name for name, _ in columns)
        mapped = ledger.columns.names()
        gone = [name for name in mapped if name not in names]
        if gone:
            raise LedgerError(
                f"the ledger {ledger.qualified} has no column {', '.join(map(repr, gone))}",
                hint=f"it has {', '.join(names)}; map them under [ledger.columns]",
            )
        extras = tuple(name for name in names if name not in mapped)
        self._known = self._shape(columns[0][1], names, extras)
        return self._known

    def _shape(self, fingerprint: str | None, names: tuple[str, ...], extras: tuple[str, ...]) -> _Shape:
        mapped = self._ledger.columns.names()
        wanted = [spelled(quote(name)) for name in (*mapped, *extras)]
        origin = f"FROM {spelled(self._ledger.qualified)}"
        doing = f"looking at the types of {self._ledger.qualified}"
        try:
            with self._connection.cursor() as cursor:
                cursor.execute(f"SELECT {', '.join(wanted)} {origin} WHERE false", ())
                types = _types(cursor)
                if types[0] not in _INTEGERS:
                    raise LedgerError(
                        f"{self._ledger.qualified}.{quote(mapped[0])} is no integer, so it cannot be the ledger's seq",
                        hint="map another column under [ledger.columns]",
                    )
                # For an integer the cast to text is its output function; any other integer column but seq takes it.
                casts = wanted[:1]
                casts += [
                    f"{name}::text" if kind in _INTEGERS else name
                    for name, kind in zip(wanted[1:], types[1:], strict=True)
                ]
                if not extras:
                    casts.append("NULL::text")  # the last field of a Row, so that what is fetched is a Row already
                selected = f"SELECT {', '.join(casts)} {origin}"
                nothing = f"CASE WHEN false THEN {casts[4]} END"  # of the payload's type
                light = f"SELECT {', '.join([*casts[:4], nothing, *casts[5:]])} {origin}"
                cursor.execute(f"{selected} WHERE false", ())
                types = _types(cursor)
        except psycopg2.Error as error:
            raise classify(error, doing=doing) from error
        where = f" WHERE {wanted[0]}"
        return _Shape(fingerprint, names, extras, selected + where, light + where, types)

    def _as_bytes(self, cursor: Cursor, types: Sequence[int]) -> None:
        register_type(BYTES, cursor)  # makes the cursor's own table of types
        casts: Any = cursor.string_types
        casts.update((kind, BYTES) for kind in types if kind not in _INTEGERS)


def _types(cursor: Cursor) -> tuple[int, ...]:
    return tuple(column[1] for column in cursor.description or ())
