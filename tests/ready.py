"""Walstream's tables in a test's database: made once for each set of names, and copied from there.

Hundreds of tests begin with them, and to copy the files of a database takes a third of the time that it takes to make
it and run the migrations.
"""

from __future__ import annotations

import atexit
import secrets

from tests.conftest import Database, RunningServer
from walstream.config import Settings, quote
from walstream.ledger import schema

_templates: dict[tuple[str, str], Database] = {}


def make_tables(database: Database, settings: Settings) -> None:
    """The ledger's table and walstream's own, under the names of ``settings``, in a database without them."""
    if database.made:
        _make(database, settings)
    else:
        database.create(template=_template(database, settings).name)


def _template(database: Database, settings: Settings) -> Database:
    server = database.server
    key = (server.dsn(), f"{settings.namespace!r} {settings.ledger!r}")
    if key not in _templates:
        made = Database(server, f"t_ready_{secrets.token_hex(4)}")
        _make(made, settings)
        made.disconnect()  # what somebody is connected to cannot be copied
        if isinstance(server, RunningServer):  # one of our own goes away with all that is in it
            atexit.register(made.drop)
        _templates[key] = made
    return _templates[key]


def _make(database: Database, settings: Settings) -> None:
    database.execute(f"CREATE SCHEMA IF NOT EXISTS {quote(settings.ledger.namespace)}")
    database.execute(schema.ledger_sql(settings.ledger))
    schema.install(database.connect(), settings)
