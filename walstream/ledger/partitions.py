"""Partitions of the ledger: their names and bounds, which are missing, and the SQL that makes them.

A month is a month in UTC, whatever the session's time zone: its bounds are written with their offset, and its name is
made from the same date. A new partition is made beside the ledger and then attached, because that stops neither writers
nor readers of the other partitions: it waits for who uses the default partition, and for nobody else.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING, Any, Final, Literal

from walstream.config import LedgerTable, quote
from walstream.errors import ConfigError

from .schema import partitioned_sql

if TYPE_CHECKING:
    from psycopg2.extensions import cursor as Cursor

AHEAD: Final = 3
"""Months that are made ahead of the present one, unless somebody says otherwise."""

MOST_AHEAD: Final = 120
MOST_HASHED: Final = 1024
_NAME_BYTES: Final = 63  # NAMEDATALEN - 1
_TIMES: Final = ("timestamp with time zone", "timestamp without time zone", "date")
_BOUNDS: Final = re.compile(r"FOR VALUES FROM \((?:'(.*)'|(MINVALUE))\) TO \((?:'(.*)'|(MAXVALUE))\)", re.DOTALL)


@dataclass(frozen=True)
class PartitionBy:
    """What ``--partition-by`` says: by month of ``created_at``, or by hash of ``session_id`` into ``count`` parts."""

    kind: Literal["month", "hash"]
    count: int = 0

    @classmethod
    def parse(cls, text: str) -> PartitionBy:
        """Read ``month`` or ``hash:N``.

        Raises:
            ConfigError: it is neither.
        """
        if text == "month":
            return cls("month")
        found = re.fullmatch(r"hash:([1-9][0-9]{0,3})", text)
        if found and int(found[1]) <= MOST_HASHED:
            return cls("hash", int(found[1]))
        raise ConfigError(
            f"--partition-by {text}: not a way to partition a ledger",
            hint=f"month, or hash:N with N up to {MOST_HASHED}",
        )

    def __str__(self) -> str:
        return "month" if self.kind == "month" else f"hash:{self.count}"

    def matches(self, layout: Layout, ledger: LedgerTable) -> bool:
        """Whether a table that is there is partitioned in this way."""
        if self.kind == "month":
            return layout.by_time
        return (
            layout.strategy == "hash"
            and layout.key == (ledger.columns.session_id,)
            and len(layout.partitions) == self.count
        )


@dataclass(frozen=True)
class Month:
    """One month, in UTC."""

    first: date

    @property
    def following(self) -> Month:
        year, month = divmod(self.first.year * 12 + self.first.month, 12)
        return Month(date(year, month + 1, 1))

    @property
    def low(self) -> str:
        """Where it begins, as text that means the same in every session."""
        return f"{self.first.isoformat()} 00:00:00+00"

    @property
    def high(self) -> str:
        """Where it ends: the first moment that is not in it."""
        return self.following.low

    def __str__(self) -> str:
        return f"{self.first:%Y-%m}"


def months(present: date, ahead: int) -> list[Month]:
    """The month of ``present`` and those after it."""
    found = [Month(present.replace(day=1))]
    for _ in range(ahead):
        found.append(found[-1].following)
    return found


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


def partition_name(ledger: LedgerTable, suffix: str) -> str:
    """``agent_events_2026_12`` and the like, quoted for SQL, in the ledger's schema; shortened where it is too long."""
    stem = ledger.table.encode()[: _NAME_BYTES - len(suffix) - 1].decode(errors="ignore")
    return ledger.beside(f"{stem}_{suffix}")


def month_name(ledger: LedgerTable, month: Month) -> str:
    """The name of the partition of ``month``."""
    return partition_name(ledger, f"{month.first:%Y_%m}")


def attach_statements(ledger: LedgerTable, month: Month, owner: str | None = None) -> list[str]:
    """The statements that make the partition of ``month`` and attach it, for one transaction.

    Args:
        owner: whom it is to belong to, if not to who makes it.
    """
    name = month_name(ledger, month)
    return [*_beside(ledger, name, owner), _attach(ledger, month)]


def move_statements(
    ledger: LedgerTable,
    month: Month,
    default: Partition,
    columns: tuple[str, ...],
    owner: str | None = None,
    refresh: tuple[str, ...] = (),
) -> list[str]:
    """The same where the default partition holds rows of that month: they are moved, unseen by the stream, because they
    go into a table that is not part of the ledger yet. For one transaction; who writes or reads the default partition
    waits until it ends.

    Args:
        columns: all that are not generated.
        refresh: what :func:`refresh_statements` returned.
    """
    name, created_at = month_name(ledger, month), quote(ledger.columns.created_at)
    listed = ", ".join(map(quote, columns))
    return [
        f"LOCK TABLE {default.name} IN ACCESS EXCLUSIVE MODE;",
        *_beside(ledger, name, owner),
        f"WITH moved AS (\n    DELETE FROM {default.name} WHERE {created_at} >= '{month.low}' AND {created_at} <"
        f" '{month.high}' RETURNING *\n)\nINSERT INTO {name} ({listed}) SELECT {listed} FROM moved;",
        _attach(ledger, month),
        *refresh,
    ]


def refresh_statements(cur: Cursor, publication: str) -> tuple[str, ...]:
    """What has to follow the attachment of a table that rows were written to before, so that later ones are streamed.

    Before 15 a walsender that has met the table remembers that nobody publishes it, and an attachment does not make it
    look again; a publication that is written anew does (source: ``rel_sync_cache_relation_cb`` and
    ``publication_invalidation_cb`` in pgoutput.c, 14).
    """
    cur.execute(
        "SELECT pubviaroot FROM pg_catalog.pg_publication"
        " WHERE pubname = %s AND current_setting('server_version_num')::int < 150000",
        (publication,),
    )
    row: Any = cur.fetchone()
    if row is None:
        return ()
    via_root = "true" if row[0] else "false"
    return (f"ALTER PUBLICATION {quote(publication)} SET (publish_via_partition_root = {via_root});",)


def _beside(ledger: LedgerTable, name: str, owner: str | None) -> list[str]:
    like = "DEFAULTS INCLUDING CONSTRAINTS INCLUDING GENERATED INCLUDING STORAGE INCLUDING COMPRESSION"
    made = [f"CREATE TABLE {name} (LIKE {ledger.qualified} INCLUDING {like});"]
    return made if owner is None else [*made, f"ALTER TABLE {name} OWNER TO {quote(owner)};"]


def _attach(ledger: LedgerTable, month: Month) -> str:
    return (
        f"ALTER TABLE {ledger.qualified} ATTACH PARTITION {month_name(ledger, month)}\n"
        f"    FOR VALUES FROM ('{month.low}') TO ('{month.high}');"
    )


def table_statements(ledger: LedgerTable, by: PartitionBy, present: date) -> list[str]:
    """The statements that make the ledger's table partitioned, with its first partitions.

    Args:
        present: today, in UTC.
    """
    columns = ledger.columns
    if by.kind == "hash":
        made = [partitioned_sql(ledger, "HASH", columns.session_id)]
        made += [
            f"CREATE TABLE {partition_name(ledger, f'h{remainder}')} PARTITION OF {ledger.qualified}\n"
            f"    FOR VALUES WITH (MODULUS {by.count}, REMAINDER {remainder});"
            for remainder in range(by.count)
        ]
        return made
    made = [partitioned_sql(ledger, "RANGE", columns.created_at)]
    made += [
        f"CREATE TABLE {month_name(ledger, month)} PARTITION OF {ledger.qualified}\n"
        f"    FOR VALUES FROM ('{month.low}') TO ('{month.high}');"
        for month in months(present, AHEAD)
    ]
    # The safety net: a row whose month nobody has prepared is kept, instead of being an error for its agent.
    made.append(f"CREATE TABLE {partition_name(ledger, 'default')} PARTITION OF {ledger.qualified} DEFAULT;")
    return made
