"""Whether the ledger is append-only: what `walstream init --append-only` asks for (docs/ledger.md, "Append-only")."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Final

from psycopg2.extensions import cursor as Cursor

from walstream.config import Settings, quote

from .schema import names

_LOOK: Final = """
WITH tables AS (
    SELECT c.oid, c.relowner, c.relacl FROM pg_catalog.pg_class AS c
     WHERE c.oid = pg_catalog.to_regclass(%(table)s)
        OR c.oid IN (SELECT relid FROM pg_catalog.pg_partition_tree(pg_catalog.to_regclass(%(table)s)))
)
SELECT t.oid::regclass::text,
       ARRAY(SELECT g.tgenabled::text FROM pg_catalog.pg_trigger AS g
              WHERE g.tgrelid = t.oid AND g.tgname = ANY (%(triggers)s)),
       ARRAY(SELECT DISTINCT CASE x.grantee WHEN 0 THEN 'PUBLIC' ELSE pg_catalog.pg_get_userbyid(x.grantee)::text END
               FROM (SELECT a.grantee, a.privilege_type FROM pg_catalog.aclexplode(t.relacl) AS a
                      UNION ALL
                     SELECT a.grantee, a.privilege_type
                       FROM pg_catalog.pg_attribute AS c, pg_catalog.aclexplode(c.attacl) AS a WHERE c.attrelid = t.oid
                    ) AS x
              WHERE x.grantee <> t.relowner AND x.privilege_type IN ('UPDATE', 'DELETE', 'TRUNCATE') ORDER BY 1)
  FROM tables AS t ORDER BY 1"""


@dataclass(frozen=True, slots=True)
class Standing:
    """How the ledger's table and its partitions are guarded.

    Attributes:
        asked: somebody made it append-only: a trigger is there.
        unguarded: tables in which a trigger is missing, or does not always fire.
        roles: that may change rows, besides the owner.
    """

    asked: bool
    unguarded: tuple[str, ...]
    roles: tuple[str, ...]

    @property
    def whole(self) -> bool:
        """Whether nothing is missing."""
        return self.asked and not self.unguarded and not self.roles


def standing(cur: Cursor, settings: Settings) -> Standing:
    """How it stands. Reads catalogues that everybody may read."""
    triggers = trigger_names(settings)
    cur.execute(_LOOK, {"table": settings.ledger.qualified, "triggers": list(triggers)})
    rows: list[Any] = cur.fetchall()
    roles = sorted({role for _, _, found in rows for role in found})
    unguarded = [name for name, enabled, _ in rows if sorted(enabled) != ["A"] * len(triggers)]
    return Standing(any(enabled for _, enabled, _ in rows), tuple(unguarded), tuple(roles))


def statement(settings: Settings) -> str:
    """What makes it append-only, or what is new of it."""
    return f"SELECT {quote(settings.namespace)}.make_append_only();"


def lift_statement(settings: Settings, partition: str) -> str:
    """What lets rows of one partition go; :func:`statement` guards it again."""
    return f"ALTER TABLE {partition} DISABLE TRIGGER {quote(trigger_names(settings)[0])};"


def trigger_names(settings: Settings) -> tuple[str, str]:
    """The names of the triggers: for rows, and for TRUNCATE."""
    digest = hashlib.md5(names(settings)["namespace"].encode(), usedforsecurity=False).hexdigest()
    return f"append_only_{digest}", f"append_only_truncate_{digest}"
