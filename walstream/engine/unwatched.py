"""Stretches of the WAL that nobody watched: the slot stands past what was read of it, or is another one than before.

Events are taken from the ledger then. What somebody did to rows besides is nowhere to be read: where changes are
published for the tamper alarm, that there is such a stretch is a violation itself, and `audit verify --ledger` has to
say what became of the rows. The statement finds it before the first position of this session is written down, and its
key is the place in the WAL: a start that is cut short finds the same.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from psycopg2.errors import InsufficientPrivilege

if TYPE_CHECKING:
    from psycopg2.extensions import cursor as Cursor

log = logging.getLogger("walstream.ingest")

ORDINAL: Final = -1_000_000_000
"""Beside a place of the WAL; no change of a transaction, and nothing that the audit sink finds, has this number."""

# Whoever steps over a change (`walstream slot skip`) moves the slot, and has a violation of his own (`gap`).
_RECORD: Final = """
    WITH durable AS MATERIALIZED (SELECT set_config('synchronous_commit', 'local', true) AS level),
    fence AS MATERIALIZED (
        SELECT g.generation FROM {schema}.generation AS g CROSS JOIN durable
         WHERE g.generation = %(generation)s AND durable.level = 'local' FOR SHARE OF g),
    watched AS MATERIALIZED (
        SELECT s.slot_name, s.confirmed_flush_lsn AS stands,
               greatest(n.confirmed_lsn, (SELECT o.last_lsn FROM {schema}.commit_order AS o WHERE NOT o.recovered
                                           ORDER BY o.first_offset DESC LIMIT 1)) AS known
          FROM {schema}.identity AS i CROSS JOIN {schema}.ingest AS n CROSS JOIN fence
          JOIN pg_catalog.pg_replication_slots AS s ON s.slot_name = i.slot
          JOIN pg_catalog.pg_publication AS p ON p.pubname = i.publication AND (p.pubupdate OR p.pubdelete)),
    found AS (
        SELECT w.stands AS lsn,
               format('slot %%s stands at %%s, and was read up to %%s: somebody else has moved it',
                      w.slot_name, w.stands, w.known) AS what
          FROM watched AS w
         WHERE w.stands > w.known
           AND NOT EXISTS (SELECT FROM {schema}.violations AS v
                            WHERE v.kind = 'gap' AND v.commit_lsn BETWEEN w.known AND w.stands)
        UNION ALL
        SELECT r.slot_lsn, format('slot %%s was made anew, and sends from %%s on (%%s)', w.slot_name, r.slot_lsn,
                                  left(r.cause, 300))
          FROM watched AS w CROSS JOIN {schema}.recoveries AS r
         WHERE r.id = (SELECT max(m.id) FROM {schema}.recoveries AS m WHERE m.kind IN ('birth', 'rebirth'))
           AND r.slot_lsn IS NOT NULL
           AND (r.kind = 'rebirth' OR EXISTS (SELECT FROM {schema}.recoveries AS b
                                               WHERE b.id < r.id AND b.kind IN ('birth', 'rebirth'))))
    INSERT INTO {schema}.violations (kind, commit_lsn, ordinal, detail, origin)
    SELECT 'slot', f.lsn, {ordinal}, f.what || '. What was done to rows before, besides appending, was not sent',
           'catalogue'
      FROM found AS f
    ON CONFLICT DO NOTHING RETURNING detail"""


def record_unwatched(cur: Cursor, schema: str, generation: int) -> int:
    """Write down what is not on record yet of such stretches; return how many.

    Args:
        cur: of a connection in autocommit, whose schema has the version for it.
        schema: walstream's, quoted.
        generation: of the lease.

    Raises:
        psycopg2.Error: of the connection.
    """
    try:
        cur.execute(_RECORD.format(schema=schema.replace("%", "%%"), ordinal=ORDINAL), {"generation": generation})
    except InsufficientPrivilege as error:
        log.warning("whether the slot was moved or made anew is not put on record: %s", error.diag.message_primary)
        return 0
    details = [str(detail) for (detail,) in cur.fetchall()]
    for detail in details:
        log.error("%s; `walstream audit verify --ledger` says what became of the rows", detail)
    return len(details)
