"""The functions that workers call, as they stand in the database, beside what they have to be.

They hold the names of the ledger's table and columns as text. So they are compared by their bodies: that notices a
table that was renamed, a column that was mapped anew, and a function of another release alike.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from .schema import fill, functions_template, installed_version, names

if TYPE_CHECKING:
    from psycopg2.extensions import cursor as Cursor

    from walstream.config import Settings

_FUNCTION: Final = re.compile(
    r"CREATE OR REPLACE FUNCTION \$namespace\.(\w+)\s*\(.*?AS \$walstream_body\$(.*?)\$walstream_body\$", re.DOTALL
)


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
