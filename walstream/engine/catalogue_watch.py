"""What the stream cannot tell: the catalogue is looked at, and compared with what it said before.

A partition that is dropped or detached takes its rows along without a word in the stream; so does TRUNCATE of a
partition that is published under its root's name, ALTER TABLE that rewrites a column, a table that is swapped, a
publication that is narrowed. What was seen last is kept in the database, so that changes while nobody ran are found at
the next start. A difference is a violation, and is written down in one statement with what is seen now: each once.

What is no alarm: partitions and columns that are added, walstream's own triggers, and a partition that goes after its
rows were declared erased.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from walstream.config import Settings, quote
from walstream.errors import LedgerError
from walstream.ledger.schema import ALARM_VERSION
from walstream.lsn import parse_lsn
from walstream.metrics import METRICS
from walstream.source.failures import classify

from .backlog import Noticed
from .catalogue_facts import Facts, present, read_facts, rows_of
from .violations import Violation

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection
    from psycopg2.extensions import cursor as Cursor

log = logging.getLogger("walstream.ingest")

OPEN: Final = "ledger_violations_open"
_ROWS_SECONDS: Final = 60.0
_PATIENCE: Final = 10.0  # for the orderer, which may wait for a transaction to become visible


@dataclass(frozen=True, slots=True)
class Difference:
    """Something that is not as it was.

    Attributes:
        kind: ``swapped``, ``renamed``, ``dropped``, ``detached``, ``emptied``, ``rewritten``, ``unlogged``,
            ``columns``, ``publication``, ``trigger``, ``rule``.
        rows: first and last seq that went with it, if rows did.
    """

    kind: str
    detail: str
    rows: tuple[int, int] | None = None


class CatalogueWatch:
    """Looks at the catalogue.

    Args:
        settings: name table and publication.
        table_oid: the ledger's table, as it was set up.
        submit: hands what was noticed to the orderer, which alone writes violations.
    """

    def __init__(self, settings: Settings, table_oid: int, submit: Callable[[Noticed], None]) -> None:
        self._settings = settings
        self._table_oid = table_oid
        self._submit = submit
        self._schema = quote(settings.namespace)
        self._rows_due = 0.0
        self._told = ""
        self._said = False

    def look(self, connection: Connection) -> None:
        """Look once, and wait until what was found is written down.

        Raises:
            WalstreamError: of the connection.
        """
        try:
            with connection.cursor() as cur:
                cur.execute(f"SELECT max(version) FROM {self._schema}.migrations")
                if _value(cur) < ALARM_VERSION:
                    return
                cur.execute(f"SELECT count(*) FROM {self._schema}.violations WHERE acknowledged_at IS NULL")
                open_ = _value(cur)
                METRICS.set(OPEN, open_)
                if self._settings.violations == "ignore":
                    return
                noticed = self._compare(cur)
                if noticed is None and open_ and self._settings.violations == "halt":
                    noticed = Noticed([], {}, [])  # of the audit sink: the orderer halts for it
        except Exception as raised:
            error = classify(raised, doing="looking at the ledger's catalogue")
            if error.transient:
                raise error from raised
            if str(error) != self._told:  # a look that cannot be had is no reason to end ingest
                self._told = str(error)
                log.warning("the tamper alarm does not see the catalogue: %s", error)
            return
        if noticed is not None:
            self._submit(noticed)
            noticed.done.wait(_PATIENCE)

    def _compare(self, cur: Cursor) -> Noticed | None:
        cur.execute(f"SELECT what, facts FROM {self._schema}.ledger_catalogue")
        before: Facts = dict(cur.fetchall())
        now = read_facts(cur, self._settings, self._table_oid)
        self._say(now)
        self._add_rows(cur, before, now)
        missing = [int(what.partition(":")[2]) for what in before if what.startswith("relation:") and what not in now]
        found = list(differences(before, now, present(cur, missing), self._table_oid)) if before else []
        found = [each for each in found if each.rows is None or not self._is_declared(cur, each.rows)]
        seen = {what: facts for what, facts in now.items() if before.get(what) != facts}
        gone = [what for what in before if what not in now]
        if not (found or seen or gone):
            return None
        for each in found:
            log.error("the ledger was touched (%s): %s", each.kind, each.detail)
        cur.execute("SELECT pg_current_wal_insert_lsn()::text")
        lsn = parse_lsn(_value(cur))
        violations = [
            Violation(each.kind, lsn, number, None, 0, each.detail, origin="catalogue")
            for number, each in enumerate(found, 1)
        ]
        return Noticed(violations, seen, gone)

    def _say(self, now: Facts) -> None:
        """Once: which operations are published, and so seen."""
        if not self._said and (published := now.get("publication")):
            log.info("publication %s publishes %s", published["name"], ", ".join(published["operations"]))
            self._said = True

    def _add_rows(self, cur: Cursor, before: Facts, now: Facts) -> None:
        """First and last seq of each table that holds rows: read now and then, and when it is another one."""
        due = time.monotonic() >= self._rows_due
        for what, facts in now.items():
            if not what.startswith("relation:") or not facts["filenode"]:
                continue
            old = before.get(what)
            if due or old is None or old["filenode"] != facts["filenode"]:
                facts["rows"] = rows_of(cur, self._settings, int(what.partition(":")[2]))
            else:
                facts["rows"] = old.get("rows")
        if due:
            self._rows_due = time.monotonic() + _ROWS_SECONDS

    def _is_declared(self, cur: Cursor, rows: tuple[int, int]) -> bool:
        """Whether first and last row are declared erased: a month that goes is declared as a whole."""
        cur.execute(
            f"SELECT bool_and(EXISTS (SELECT FROM {self._schema}.erasures AS e"
            " WHERE e.first_seq <= s AND e.last_seq >= s)) FROM unnest(%s::bigint[]) AS s",
            (list(rows),),
        )
        return bool(_value(cur))


def differences(before: Facts, now: Facts, existing: set[int], table_oid: int) -> Iterator[Difference]:
    """What is not as it was. Pure.

    Args:
        existing: of the tables that belong to the ledger no more, those that are still there.
        table_oid: the ledger's own table.
    """
    for what, old in before.items():
        new = now.get(what)
        kind = what.partition(":")[0]
        if kind == "relation":
            yield from _of_relation(int(what.partition(":")[2]), old, new, existing, table_oid)
        elif kind == "columns":
            yield from _of_columns(old, new) if new is not None else ()
        elif kind == "publication":
            yield from _of_publication(old, new, now)
        elif f"relation:{old['relation']}" not in now:
            continue  # it went with its table
        elif new is None:
            yield Difference(kind, f"{kind} {old['name']} of {old['on']} was dropped")
        elif new != old:
            state = " and does not fire any more" if new["enabled"] == "D" != old["enabled"] else ""
            yield Difference(kind, f"{kind} {old['name']} of {old['on']} was changed{state}: {new['definition']}")
    for what, new in now.items():
        kind = what.partition(":")[0]
        if kind in ("trigger", "rule") and what not in before and not (new.get("ours") or new.get("cloned")):
            yield Difference(kind, f"{kind} {new['name']} of {new['on']} was added: {new['definition']}")


def _of_relation(
    oid: int, old: Mapping[str, Any], new: Mapping[str, Any] | None, existing: set[int], table_oid: int
) -> Iterator[Difference]:
    rows = old.get("rows")
    held = (int(rows[0]), int(rows[1])) if rows else None
    which = f" with rows from seq {held[0]} to {held[1]}" if held else ""
    if new is None:
        if old["parent"] is None and oid == table_oid:
            yield Difference("dropped", f"the ledger's table {old['name']} (OID {oid}){which} was dropped")
        elif old["parent"] is None:
            yield Difference(
                "swapped", f"the ledger is the table with OID {table_oid} now; it was {old['name']} ({oid})"
            )
        elif rows is not None:
            kind = "detached" if oid in existing else "dropped"
            yield Difference(kind, f"partition {old['name']}{which} was {kind}", held)
        return
    if old.get("attached") is not None and new["attached"] != old["attached"]:
        yield Difference(
            "detached",
            f"partition {new['name']} was detached and attached again: what was done to its rows meanwhile, or in the"
            " same transaction, was not sent",
        )
    if old["parent"] is None and new["name"] != old["name"]:
        yield Difference("renamed", f"the ledger's table {old['name']} (OID {oid}) is called {new['name']} now")
    if new["persistence"] != old["persistence"]:
        yield Difference("unlogged", f"{new['name']} is unlogged: what is written to it is not streamed")
    elif new["filenode"] != old["filenode"] and rows is not None:
        if new.get("rows") is None:
            yield Difference("emptied", f"{new['name']}{which} is empty (TRUNCATE)", held)
        else:
            yield Difference(
                "rewritten", f"{new['name']} was written anew as a whole (ALTER TABLE, VACUUM FULL, CLUSTER, TRUNCATE)"
            )


def _of_columns(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Difference]:
    for name, type_ in old.items():
        if name not in new:
            yield Difference("columns", f"column {name} ({type_}) is gone")
        elif new[name] != type_:
            yield Difference("columns", f"column {name} is {new[name]} now, and was {type_}")


def _of_publication(old: Mapping[str, Any], new: Mapping[str, Any] | None, now: Facts) -> Iterator[Difference]:
    if new is None:
        yield Difference("publication", f"publication {old['name']} is gone, or does not hold the ledger any more")
        return
    lacking = [operation for operation in old["operations"] if operation not in new["operations"]]
    if lacking:
        yield Difference("publication", f"publication {old['name']} does not publish {', '.join(lacking)} any more")
    for part, words in (("filter", "only rows with"), ("columns", "only the columns")):
        if new[part] and new[part] != old[part]:
            yield Difference("publication", f"publication {old['name']} sends {words} {new[part]}")
    if all(new[part] == old[part] for part in ("operations", "filter", "columns")) and _was_put_back(old, new, now):
        yield Difference(
            "publication",
            f"publication {old['name']} was changed and publishes what it did before: what was done to the ledger"
            " meanwhile, or in the same transaction, may not have been sent",
        )


def _was_put_back(old: Mapping[str, Any], new: Mapping[str, Any], now: Facts) -> bool:
    """Whether the publication, or a table's place in it, is another row of the catalogue than it was."""
    if old.get("version") is None:  # it was seen by a release that did not look
        return False
    entries, before = new["entries"] or {}, old["entries"] or {}
    return bool(
        old["version"] != new["version"]
        or any(entries.get(oid) != row and f"relation:{oid}" in now for oid, row in before.items())
    )


def _value(cur: Cursor) -> Any:
    row = cur.fetchone()
    if row is None:
        raise LedgerError("the server gave no answer where there always is one")
    return row[0]
