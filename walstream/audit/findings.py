"""What the sink finds by itself: a row that is no longer what is on record, when its event is delivered again.

It is written down beside what ingest notices, so that all that follows a violation follows: a red line, the hook, the
policy, and a record of the chain. One row a finding, however often the event comes again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from psycopg2.extensions import connection as Connection

from walstream.order.table import own_table, query

KIND: Final = "changed"
VALUE_CHARACTERS: Final = 200
"""Of each value that is kept: a column can hold a document."""

# As for what the catalogue tells: which transaction it was is not known, only where the WAL stands now. Ordinals below
# zero are nobody else's.
_REPORT: Final = """
    WITH durable AS MATERIALIZED (SELECT set_config('synchronous_commit', 'local', true) AS level)
    INSERT INTO {table} (kind, commit_lsn, ordinal, seq, xid, detail, origin, keys, old_keys)
    SELECT %s, pg_current_wal_insert_lsn(), -f.place, f.seq, 0, f.detail, 'sink', f.keys, f.old_keys
      FROM jsonb_to_recordset(%s::jsonb) AS f (place integer, seq bigint, detail text, keys jsonb, old_keys jsonb),
           durable
     WHERE durable.level = 'local' ORDER BY f.place
    ON CONFLICT DO NOTHING RETURNING id"""


@dataclass(frozen=True, slots=True)
class Finding:
    """An event that was delivered again and is no longer what is on record.

    Attributes:
        columns: in which it differs: what each is on record, and what it is now (see ``record.differences``).
    """

    offset: int
    seq: int
    columns: Mapping[str, tuple[Any, Any]]

    @property
    def document(self) -> dict[str, Any]:
        """What a record of it says, where it cannot be written down beside the others."""
        return {"what": KIND, "offset": self.offset, "seq": self.seq, "columns": list(self.columns)}

    def row(self, place: int) -> dict[str, Any]:
        """As the table has it."""
        kept = {name: (_kept(before), _kept(now)) for name, (before, now) in self.columns.items()}
        return {
            "place": place,
            "seq": self.seq,
            "detail": f"not what is on record, found when it was delivered again: {', '.join(self.columns)}",
            "keys": {"offset": str(self.offset), **{name: now for name, (_, now) in kept.items()}},
            "old_keys": {name: before for name, (before, _) in kept.items()},
        }


def report(connection: Connection, namespace: str, found: Sequence[Finding]) -> None:
    """Write findings down, durably and in one statement; those that are there already stay as they are.

    Raises:
        WalstreamError: of the connection.
    """
    rows = [finding.row(place) for place, finding in enumerate(found, 1)]
    query(
        connection,
        _REPORT.format(table=own_table(namespace, "violations")),
        (KIND, json.dumps(rows)),
        doing="writing down rows that are no longer what is on record",
    )


def _kept(value: Any) -> Any:
    cut = isinstance(value, str) and len(value) > VALUE_CHARACTERS
    return f"{value[:VALUE_CHARACTERS]}…" if cut else value
