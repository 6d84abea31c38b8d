"""``walstream migrate``: bring the schema up to what this release knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from walstream.errors import ConfigError

from . import console
from .options import Json, takes_settings
from .session import PATIENT, database

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection
    from psycopg2.extensions import cursor as Cursor

    from walstream.config import Settings


@dataclass(frozen=True)
class Due:
    """What is to be done.

    Attributes:
        version: of the schema now.
        target: of the schema afterwards.
        migrations: names of the files that are to run.
        functions: functions that are made anew because they do not fit; those that a migration brings are not counted.
        scripts: all of it as SQL, to be run in order in one transaction.
    """

    version: int
    target: int
    migrations: tuple[str, ...]
    functions: tuple[str, ...]
    scripts: tuple[str, ...]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(migrate)


@takes_settings
def migrate(
    settings: Settings,
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and change nothing.")] = False,
    sql: Annotated[bool, typer.Option("--sql", help="Print what is missing as a script for psql.")] = False,
    as_json: Json = False,
) -> None:
    """Bring walstream's tables and functions up to this release, in one transaction.

    Nothing is ever taken away that the release before needs, so it can be run while consumers and workers of that
    release are at work. `walstream run` never migrates. It is safe to repeat.
    """
    with database(settings, "migrate", PATIENT) as conn:
        if sql or dry_run:
            conn.autocommit = False
            with conn, conn.cursor() as cur:
                due = _due(conn, cur, settings)
            if sql:
                _print_script(due, as_json)
            else:
                _report(due, as_json, done=False, notes=[])
            return
        from .changing import changes

        hint = "run it as the owner of walstream's tables, or hand the output of `walstream migrate --sql` to a DBA"
        with changes(settings, conn, "migrate", hint) as cur:
            due = _due(conn, cur, settings)
            for script in due.scripts:
                cur.execute(script)
        notes = _lacking_grants(conn, settings) if due.scripts else []
    _report(due, as_json, done=True, notes=notes)


def _due(conn: Connection, cur: Cursor, settings: Settings) -> Due:
    """What is to be done here.

    Raises:
        ConfigError: walstream is not installed, or the ledger is not the table that was set up, or cannot be used.
    """
    from walstream.ledger import functions, schema
    from walstream.ledger.existing import check_existing
    from walstream.ledger.identity import read_identity
    from walstream.source.facts import role_facts
    from walstream.source.preflight import check_table
    from walstream.source.table_facts import table_facts

    version = schema.installed_version(cur, settings.namespace)
    if version == 0:
        raise ConfigError(
            f"walstream is not installed in this database: there is no schema {settings.namespace!r} of its tables",
            hint="run `walstream init`: it makes everything, at this release's version",
        )
    newest = schema.migrations()[-1].version
    if version > newest:
        return Due(version, version, (), (), ())
    table = check_table(settings, table_facts(conn, settings.ledger), role_facts(conn))
    identity = read_identity(cur, settings.namespace)
    if identity is not None and identity.table_oid != table.oid:
        raise ConfigError(
            f"{settings.ledger.qualified} is another table (OID {table.oid}) than the one that was set up (OID"
            f" {identity.table_oid})",
            hint="rename it back, correct [ledger] in the configuration, or accept the new one with `walstream adopt`",
        )
    if schema.brings_ledger(version):
        check_existing(cur, settings)
    pending = schema.pending(version)
    scripts = schema.statements(settings, version)
    stale: list[str] = []
    if version >= schema.LEDGER_VERSION:
        stale = functions.due(cur, settings)
        if stale and not schema.brings_ledger(version):
            scripts.append(schema.functions_sql(settings).strip())
    return Due(
        version, newest, tuple(f"{each.version:03d}_{each.name}" for each in pending), tuple(stale), tuple(scripts)
    )


def _lacking_grants(conn: Connection, settings: Settings) -> list[str]:
    """Logins of `walstream run` that were granted what the old version needed, and lack what the new one brought."""
    from walstream.config import quote
    from walstream.ledger.grants import run_checks

    wanted = [list(each) for each in zip(*run_checks(settings), strict=True)]
    with conn.cursor() as cur:
        cur.execute(
            """
            SELECT r.rolname::text FROM pg_catalog.pg_class AS c, pg_catalog.aclexplode(c.relacl) AS a
              JOIN pg_catalog.pg_roles AS r ON r.oid = a.grantee
             WHERE c.oid = pg_catalog.to_regclass(%s) AND a.privilege_type = 'UPDATE' AND a.grantee <> c.relowner
               AND EXISTS (SELECT FROM unnest(%s::text[], %s::text[], %s::text[]) AS w (name, privilege, col)
                            WHERE NOT CASE WHEN w.col IS NULL
                                           THEN pg_catalog.has_table_privilege(r.oid, w.name, w.privilege)
                                           ELSE pg_catalog.has_column_privilege(r.oid, w.name, w.col, w.privilege) END)
             ORDER BY 1""",
            (f"{quote(settings.namespace)}.ingest", *wanted),
        )
        found: list[Any] = cur.fetchall()
    return [f"{role} lacks grants on what is new: walstream init --grants {quote(role)}" for (role,) in found]


def _report(due: Due, as_json: bool, *, done: bool, notes: list[str]) -> None:
    if as_json:
        console.print_json(
            {
                "done": done,
                "from_version": due.version,
                "to_version": due.target,
                "migrations": list(due.migrations),
                "functions": list(due.functions),
                "notes": notes,
            }
        )
        return
    did = "" if done else "would be "
    if not due.scripts:
        from walstream.ledger.schema import migrations

        newest = migrations()[-1].version
        newer = f", of a newer release than this one, which knows {newest}" if due.version > newest else ""
        console.say(f"nothing to do: the schema has version {due.version}{newer}")
    for name in due.migrations:
        console.say(f"{did}applied: {name}")
    if due.functions:
        console.say(f"{did}made anew: functions {', '.join(due.functions)}")
    if due.version != due.target:
        console.say(f"the schema {'has' if done else 'would have'} version {due.target} (it had {due.version})")
    for note in notes:
        console.say(f"note: {note}")


def _print_script(due: Due, as_json: bool) -> None:
    if as_json:
        console.print_json({"sql": list(due.scripts)})
    elif not due.scripts:
        console.say("-- nothing to do")
    else:
        console.say(f"-- Brings walstream's schema from version {due.version} to {due.target}.")
        console.say("-- Run it with psql -v ON_ERROR_STOP=1 -f FILE, as the owner of walstream's tables.")
        for script in ("BEGIN;", *due.scripts, "COMMIT;"):
            console.say(script)
