"""Tables of the source design that were there before walstream: taken over if they fit, refused by name if not.

``agent_snapshots`` and ``agent_jobs`` are names that an application may have used already, for the same thing or for
another. What is missing is added by the migration; what contradicts it is found here, before anything is changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from walstream.config import LedgerTable, Settings, quote
from walstream.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection

    from psycopg2.extensions import cursor as Cursor

_TEXT: Final = ("text", "character varying")
_INTEGER: Final = ("bigint", "integer", "smallint")
_TIME: Final = ("timestamp with time zone",)
_LIKE_THE_LEDGER: Final = ("session_id",)  # stands for the type of the ledger's own column

_SNAPSHOTS: Final = {
    "session_id": _LIKE_THE_LEDGER,
    "upto_seq": ("bigint",),
    "context": ("jsonb",),
    "created_at": _TIME,
    "upto_offset": ("bigint",),
    "settled_seq": ("bigint",),
    "unsettled": ("integer", "bigint"),
    "fold_version": _TEXT,
    "digest": ("bytea",),
    "quarantined_at": _TIME,
    "quarantine_note": _TEXT,
}
_JOBS: Final = {
    "job_id": _INTEGER,
    "session_id": _LIKE_THE_LEDGER,
    "status": _TEXT,
    "lease_owner": _TEXT,
    "lease_expires_at": _TIME,
    "fencing_token": _INTEGER,
    "created_at": _TIME,
}
_JOBS_LATER: Final = {  # what migration 003 adds
    "agent_id": _TEXT,
    "event_seq": ("bigint",),
    "priority": _INTEGER,
    "attempts": _INTEGER,
    "max_delivery_attempts": _INTEGER,
    "next_try": _TIME,
    "hops": _INTEGER,
    "error": _TEXT,
    "finished_at": _TIME,
    "updated_at": _TIME,
}


@dataclass(frozen=True)
class _Wanted:
    """What one of the tables has to look like.

    Attributes:
        setting: the key of the configuration that names it.
        columns: name to the types that will do.
        present: columns that have to be there; the others are added.
        key: columns of its primary key.
        keyless: it may have no primary key yet.
    """

    setting: str
    columns: dict[str, tuple[str, ...]]
    present: tuple[str, ...]
    key: tuple[str, ...]
    keyless: bool


_WANTED: Final = (
    _Wanted(
        "snapshots", _SNAPSHOTS, ("session_id", "upto_seq", "context", "created_at"), ("session_id", "upto_seq"), True
    ),
    _Wanted("jobs", _JOBS | _JOBS_LATER, ("job_id", "session_id"), ("job_id",), False),
)
_KEPT: Final = {"append_keys": ("session_id", "key", "seq"), "messages": ("session_id", "digest", "message")}


def check_existing(cur: Cursor, settings: Settings) -> None:
    """Check that the tables of snapshots and jobs can be made, or be taken over as they are.

    Raises:
        ConfigError: one of them is somebody else's, or unlike what walstream needs; names the setting to change.
    """
    ledger = settings.ledger
    own = _columns(cur, ledger.qualified)
    # Without a ledger, it is made with the type of the source design.
    session_type = own[ledger.columns.session_id][0] if ledger.columns.session_id in own else "uuid"
    for wanted in _WANTED:
        name = getattr(ledger, wanted.setting)
        problems = list(_problems(cur, ledger, name, wanted, session_type))
        if problems:
            raise ConfigError(
                f"{ledger.beside(name)} is there already and is not a table of {wanted.setting} that walstream can use:"
                f" {'; '.join(problems)}",
                hint=f"name another table by ledger.{wanted.setting} in the configuration"
                f" (WALSTREAM_LEDGER__{wanted.setting.upper()}), or change or rename the one that is there",
            )
    for name in _KEPT:  # they stay behind at a teardown
        columns = _columns(cur, f"{quote(settings.namespace)}.{name}")
        if columns and columns.get("session_id", ("",))[0] != session_type:
            raise ConfigError(
                f"{quote(settings.namespace)}.{name} is there already, and its session_id is not {session_type} as in"
                f" {ledger.qualified}: it belongs to another ledger",
                hint="choose another schema for walstream's own tables: --namespace NAME",
            )


def missing_columns(cur: Cursor, ledger: LedgerTable, *, with_jobs: bool) -> dict[str, list[str]]:
    """For each of the two tables (by its setting), the columns that it lacks; all of them where it is not there.

    Args:
        with_jobs: the schema has the version that brought the state machine of jobs, and its columns.
    """
    found = {}
    for wanted in _WANTED:
        columns = _columns(cur, ledger.beside(getattr(ledger, wanted.setting)))
        later: Collection[str] = () if with_jobs or wanted.setting != "jobs" else _JOBS_LATER
        if lacking := [name for name in wanted.columns if name not in columns and name not in later]:
            found[wanted.setting] = lacking
    return found


def _problems(cur: Cursor, ledger: LedgerTable, name: str, wanted: _Wanted, session_type: str) -> Any:
    qualified = ledger.beside(name)
    cur.execute(
        "SELECT c.relkind::text, (SELECT array_agg(a.attname::text ORDER BY k.place)"
        "  FROM pg_catalog.pg_constraint AS p, unnest(p.conkey) WITH ORDINALITY AS k (number, place)"
        "  JOIN pg_catalog.pg_attribute AS a ON a.attnum = k.number"
        "  WHERE p.conrelid = c.oid AND p.contype = 'p' AND a.attrelid = c.oid)"
        " FROM pg_catalog.pg_class AS c WHERE c.oid = pg_catalog.to_regclass(%s)",
        (qualified,),
    )
    row: Any = cur.fetchone()
    if row is None:
        return
    kind, key = row
    if qualified == ledger.qualified:
        yield "it is the ledger itself"
        return
    if kind not in ("r", "p"):
        yield "it is not a table"
        return
    if kind == "p" and wanted.setting == "jobs":
        yield "it is partitioned, and one job for each handoff cannot be kept to there"
        return
    columns = _columns(cur, qualified)
    for column, types in wanted.columns.items():
        allowed = (session_type,) if types == _LIKE_THE_LEDGER else types
        if column in columns:
            if columns[column][0] not in allowed:
                yield f"{column} is {columns[column][0]}, not {allowed[0]}"
        elif column in wanted.present:
            yield f"it has no column {column}"
    for column, (_, nullable, defaulted) in columns.items():
        if column not in wanted.columns and not nullable and not defaulted:
            yield f"its own column {column} is NOT NULL and has no default"
    if key != list(wanted.key) and not (key is None and wanted.keyless):
        yield f"its primary key is {'(' + ', '.join(key) + ')' if key else 'missing'}, not ({', '.join(wanted.key)})"


def _columns(cur: Cursor, qualified: str) -> dict[str, tuple[str, bool, bool]]:
    """Name to type, whether it may be NULL, and whether it gets a value by itself; empty if there is no such table."""
    cur.execute(
        "SELECT attname::text, pg_catalog.format_type(atttypid, NULL), NOT attnotnull,"
        " atthasdef OR attidentity <> '' OR attgenerated <> ''"
        " FROM pg_catalog.pg_attribute WHERE attrelid = pg_catalog.to_regclass(%s) AND attnum > 0 AND NOT attisdropped"
        " ORDER BY attnum",
        (qualified,),
    )
    return {name: (kind, nullable, defaulted) for name, kind, nullable, defaulted in cur.fetchall()}
