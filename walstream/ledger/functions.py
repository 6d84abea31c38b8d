"""The functions that workers call, as they stand in the database, beside what they have to be.

They hold the names of the ledger's table and columns as text. So they are compared by their bodies: that notices a
table that was renamed, a column that was mapped anew, and a function of another release alike.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from .schema import JOBS_VERSION, fill, functions_template, installed_version, names

if TYPE_CHECKING:
    from psycopg2.extensions import cursor as Cursor

    from walstream.config import Settings

_FUNCTION: Final = re.compile(
    r"CREATE OR REPLACE FUNCTION \$namespace\.(\w+)\s*\(.*?AS \$walstream_body\$(.*?)\$walstream_body\$", re.DOTALL
)

_GUARD: Final = """
SELECT (SELECT bool_or(t.tgenabled IN ('O', 'A')) FROM pg_catalog.pg_trigger AS t
          JOIN pg_catalog.pg_proc AS p ON p.oid = t.tgfoid JOIN pg_catalog.pg_namespace AS n ON n.oid = p.pronamespace
         WHERE t.tgrelid = jobs.oid AND p.proname = %s AND n.nspname = %s)
  FROM pg_catalog.pg_class AS jobs WHERE jobs.oid = pg_catalog.to_regclass(%s)"""
_GUARDS: Final = "check_job_status"  # the function that the trigger calls


def bodies(settings: Settings, version: int | None = None) -> dict[str, str]:
    """The body of each function of a schema's version (of the newest one if not given), under the configured names."""
    wanted = names(settings)
    return {name: fill(body, wanted) for name, body in _FUNCTION.findall(functions_template(version))}


def stale(cur: Cursor, settings: Settings) -> list[str]:
    """Names of the functions that are missing, or are not what this release makes under the configured names.

    Those that only a later version of the schema brings are not missed. Reads catalogues that everybody may read, and
    the version. Only sensible where the schema has one that brings functions, and that this release knows.
    """
    wanted = bodies(settings, installed_version(cur, settings.namespace))
    cur.execute(
        "SELECT p.proname::text, p.prosrc FROM pg_catalog.pg_proc AS p"
        " JOIN pg_catalog.pg_namespace AS n ON n.oid = p.pronamespace WHERE n.nspname = %s",
        (settings.namespace,),
    )
    # A script that went through a mailbox or an editor may have other line breaks: they mean nothing here.
    there = {(name, body.replace("\r\n", "\n")) for name, body in cur.fetchall()}
    return [name for name, body in wanted.items() if (name, body) not in there]


def unguarded(cur: Cursor, settings: Settings) -> str | None:
    """What keeps the trigger on the jobs from holding everybody to their state machine: ``missing`` or ``disabled``.

    ``None`` if nothing does, or if there is no table of jobs. Making the functions anew makes the trigger anew.
    """
    if installed_version(cur, settings.namespace) < JOBS_VERSION:
        return None
    cur.execute(_GUARD, (_GUARDS, settings.namespace, settings.ledger.beside(settings.ledger.jobs)))
    row = cur.fetchone()
    if row is None or row[0]:
        return None
    return "missing" if row[0] is None else "disabled"


def due(cur: Cursor, settings: Settings) -> list[str]:
    """Names of the functions that are to be made anew: those that are :func:`stale`, and one whose trigger is gone."""
    names = stale(cur, settings)
    return [*names, _GUARDS] if _GUARDS not in names and unguarded(cur, settings) else names
