"""How the ledger's table is partitioned at present, and which of the next months are missing. Reads only.

A partition is known by its bounds, never by its name: an operator's own days or weeks count as well.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING, Any, Final

from walstream.config import LedgerTable, quote

from .partitions import Month, months

if TYPE_CHECKING:
    from psycopg2.extensions import cursor as Cursor

_TIMES: Final = ("timestamp with time zone", "timestamp without time zone", "date")
_BOUNDS: Final = re.compile(r"FOR VALUES FROM \((?:'(.*)'|(MINVALUE))\) TO \((?:'(.*)'|(MAXVALUE))\)", re.DOTALL)


@dataclass(frozen=True)
class Partition:
    """A direct partition of the ledger.

    Attributes:
        name: qualified and quoted.
        bounds: as the server prints them.
        default: it takes what no other one does.
        low, high: seconds since 1970 where it begins and ends, infinite at an open end; ``None`` unless the ledger is
            partitioned by time.
        rows: the planner's estimate; ``None`` if it was never analyzed.
        nbytes: with indexes and TOAST.
    """

    oid: int
    name: str
    bounds: str
    default: bool
    low: float | None
    high: float | None
    rows: int | None
    nbytes: int


@dataclass(frozen=True)
class Layout:
    """How the ledger's table is partitioned.

    Attributes:
        strategy: ``range``, ``list`` or ``hash``.
        key: its columns; an expression is ``""``.
        by_time: by ranges of the column that is mapped as ``created_at``, alone, and of a type of time.
        owner: of the table.
        present: today, in UTC, by the server's clock.
        now: seconds since 1970, by the same clock.
        month_later: the same a month from now.
    """

    strategy: str
    key: tuple[str, ...]
    by_time: bool
    owner: str
    partitions: tuple[Partition, ...]
    present: date
    now: float
    month_later: float

    @property
    def default(self) -> Partition | None:
        """The partition that takes what no other one does."""
        return next((each for each in self.partitions if each.default), None)

    def prepared_until(self) -> float | None:
        """Up to when, from now on without a hole, rows have a partition of their own; ``None`` if now has none."""
        until: float | None = None
        for each in sorted(self.partitions, key=lambda part: part.low if part.low is not None else 0.0):
            if each.low is None or each.high is None:
                continue
            if each.low <= (self.now if until is None else until) < each.high:
                until = each.high
        return until

    @property
    def month_is_prepared(self) -> bool:
        """Whether rows of the next month have partitions of their own. True for what is not partitioned by time."""
        until = self.prepared_until()
        return not self.by_time or (until is not None and until >= self.month_later)


def look(cur: Cursor, ledger: LedgerTable) -> Layout | None:
    """How the ledger's table is partitioned; ``None`` if it is not (or not there)."""
    cur.execute(
        """
        SELECT p.partstrat::text, pg_catalog.pg_get_userbyid(c.relowner)::text,
               ARRAY(SELECT coalesce(a.attname::text, '')
                       FROM unnest(p.partattrs::int2[]) WITH ORDINALITY AS k (number, place)
                       LEFT JOIN pg_catalog.pg_attribute AS a ON a.attrelid = c.oid AND a.attnum = k.number
                      ORDER BY k.place),
               (SELECT pg_catalog.format_type(a.atttypid, NULL) FROM pg_catalog.pg_attribute AS a
                 WHERE a.attrelid = c.oid AND a.attnum = p.partattrs[0]),
               (now() AT TIME ZONE 'UTC')::date, extract(epoch FROM now())::float8,
               extract(epoch FROM now() + interval '1 month')::float8
          FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
          JOIN pg_catalog.pg_partitioned_table AS p ON p.partrelid = c.oid
         WHERE n.nspname = %s AND c.relname = %s""",
        (ledger.namespace, ledger.table),
    )
    row: Any = cur.fetchone()
    if row is None:
        return None
    strategy, owner, key, kind, present, now, month_later = row
    by_time = strategy == "r" and tuple(key) == (ledger.columns.created_at,) and kind in _TIMES
    return Layout(
        {"r": "range", "l": "list", "h": "hash"}[strategy],
        tuple(key),
        by_time,
        owner,
        tuple(_partitions(cur, ledger, by_time)),
        present,
        now,
        month_later,
    )


def _partitions(cur: Cursor, ledger: LedgerTable, by_time: bool) -> list[Partition]:
    cur.execute(
        """
        SELECT c.oid::bigint, pg_catalog.format('%%I.%%I', n.nspname, c.relname),
               pg_catalog.pg_get_expr(c.relpartbound, c.oid), s.rows, s.nbytes
          FROM pg_catalog.pg_inherits AS i
          JOIN pg_catalog.pg_class AS c ON c.oid = i.inhrelid
          JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
          CROSS JOIN LATERAL (
               SELECT CASE WHEN bool_and(l.reltuples >= 0) THEN sum(l.reltuples)::bigint END AS rows,
                      coalesce(sum(pg_catalog.pg_total_relation_size(l.oid)), 0)::bigint AS nbytes
                 FROM pg_catalog.pg_partition_tree(c.oid) AS t JOIN pg_catalog.pg_class AS l ON l.oid = t.relid
                WHERE t.isleaf) AS s
         WHERE i.inhparent = pg_catalog.to_regclass(%s) ORDER BY c.relname""",
        (ledger.qualified,),
    )
    rows: list[Any] = cur.fetchall()
    ends = [_BOUNDS.fullmatch(row[2]) if by_time else None for row in rows]
    # The server reads what it printed itself, in the same session: infinity, years before Christ and all.
    cur.execute(
        "SELECT extract(epoch FROM e.low::timestamptz)::float8, extract(epoch FROM e.high::timestamptz)::float8"
        " FROM unnest(%s::text[], %s::text[]) WITH ORDINALITY AS e (low, high, place) ORDER BY e.place",
        (
            [None if end is None else "-infinity" if end[2] else end[1] for end in ends],
            [None if end is None else "infinity" if end[4] else end[3] for end in ends],
        ),
    )
    spans: list[Any] = cur.fetchall()
    found = [
        Partition(oid, name, bounds, bounds == "DEFAULT", low, high, estimate, nbytes)
        for (oid, name, bounds, estimate, nbytes), (low, high) in zip(rows, spans, strict=True)
    ]
    return sorted(found, key=lambda each: (each.default, each.low or 0.0, each.name))


def missing_months(cur: Cursor, layout: Layout, ahead: int) -> tuple[list[Month], dict[Month, list[str]]]:
    """Which of this month and the next ones have no partition, and which have some that do not cover them (with their
    names). Those that are covered, by whatever partitions, are in neither."""
    missing: list[Month] = []
    partly: dict[Month, list[str]] = {}
    for month in months(layout.present, ahead):
        cur.execute(
            "SELECT extract(epoch FROM %s::timestamptz)::float8, extract(epoch FROM %s::timestamptz)::float8",
            (month.low, month.high),
        )
        row: Any = cur.fetchone()
        low, high = row
        touching = [
            each
            for each in layout.partitions
            if each.low is not None and each.high is not None and each.low < high and low < each.high
        ]
        if not touching:
            missing.append(month)
            continue
        end = low
        for each in sorted(touching, key=lambda part: part.low or 0.0):
            assert each.low is not None
            assert each.high is not None
            if each.low <= end:
                end = max(end, each.high)
        if end < high:
            partly[month] = [each.name for each in touching]
    return missing, partly


def rows_in_default(cur: Cursor, ledger: LedgerTable, default: Partition, month: Month) -> int:
    """Rows of ``month`` that the default partition holds, because it had none of its own."""
    column = quote(ledger.columns.created_at).replace("%", "%%")
    cur.execute(
        f"SELECT count(*) FROM {default.name.replace('%', '%%')} WHERE {column} >= %s AND {column} < %s",
        (month.low, month.high),
    )
    row: Any = cur.fetchone()
    return int(row[0])
