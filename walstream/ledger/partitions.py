"""Partitions of the ledger: their names and bounds, and the SQL that makes them.

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

    from .partition_layout import Layout, Partition

AHEAD: Final = 3
"""Months that are made ahead of the present one, unless somebody says otherwise."""

MOST_AHEAD: Final = 120
MOST_HASHED: Final = 1024
_NAME_BYTES: Final = 63  # NAMEDATALEN - 1


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


def partition_name(ledger: LedgerTable, suffix: str) -> str:
    """``agent_events_2026_12`` and the like, quoted for SQL, in the ledger's schema; shortened where it is too long."""
    stem = ledger.table.encode()[: _NAME_BYTES - len(suffix) - 1].decode(errors="ignore")
    return ledger.beside(f"{stem}_{suffix}")


def month_name(ledger: LedgerTable, month: Month) -> str:
    """The name of the partition of ``month``."""
    return partition_name(ledger, f"{month.first:%Y_%m}")


def attach_statements(
    ledger: LedgerTable, month: Month, owner: str | None = None, *, hold_writers: bool = False
) -> list[str]:
    """The statements that make the partition of ``month`` and attach it, for one transaction.

    Args:
        owner: whom it is to belong to, if not to who makes it.
        hold_writers: rows of that month may come at this very moment. Who has chosen the default partition for such a
            row already, and waits for it, would find that it does not fit there any more, and get an error.
    """
    held = [_hold_writers(ledger)] if hold_writers else []
    return [*held, *_beside(ledger, month_name(ledger, month), owner), _attach(ledger, month)]


def move_statements(
    ledger: LedgerTable,
    month: Month,
    default: Partition,
    columns: tuple[str, ...],
    owner: str | None = None,
    refresh: tuple[str, ...] = (),
    lift: str | None = None,
) -> list[str]:
    """The same where the default partition holds rows of that month: they are moved, unseen by the stream, because they
    go into a table that is not part of the ledger yet. For one transaction; who writes to the ledger, or reads its
    default partition, waits until it ends.

    Args:
        columns: all that are not generated.
        refresh: what :func:`refresh_statements` returned.
        lift: what lets rows of the default partition go, where the ledger is append-only.
    """
    name, created_at = month_name(ledger, month), quote(ledger.columns.created_at)
    listed = ", ".join(map(quote, columns))
    return [
        _hold_writers(ledger),
        f"LOCK TABLE {default.name} IN ACCESS EXCLUSIVE MODE;",
        *_beside(ledger, name, owner),
        *([] if lift is None else [lift]),
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


def _hold_writers(ledger: LedgerTable) -> str:
    # ONLY: at the root they wait before they have chosen a partition.
    return f"LOCK TABLE ONLY {ledger.qualified} IN SHARE ROW EXCLUSIVE MODE;"


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
