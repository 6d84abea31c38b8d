"""walstream's own tables: numbered SQL files, applied in order and written down in ``migrations``.

The files are the only source: ``install`` runs them and ``statements`` prints them, so a schema made by a DBA from the
printed script and one made by ``walstream init`` are identical. Migrations only ever add; what a release no longer
needs is dropped one release later, so that two neighbouring releases run on one schema while they are exchanged.
``walstream run`` never migrates: it checks (:func:`require_schema`) and names the command.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING, Final

from walstream.config import LedgerTable, Settings, channel, quote
from walstream.errors import ConfigError
from walstream.event import ERASED_ERROR, ERASED_PAYLOAD

from .existing import check_existing
from .identity import literal

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection
    from psycopg2.extensions import cursor as Cursor

REQUIRED_VERSION: Final = 1
"""The oldest schema that this release's stream runs on. Newer ones are accepted (see above)."""

LEDGER_VERSION: Final = 2
"""What append, snapshots and everything else that a worker uses need."""

JOBS_VERSION: Final = 3
"""What jobs need: their state machine, the functions that move them, and dead letters."""

APPROVALS_VERSION: Final = 4
"""What approvals need: their table, and the functions that ask and decide."""

PRUNING_VERSION: Final = 5
"""What forgetting finished jobs needs, and a router that knows of forgotten ones."""

ERASURES_VERSION: Final = 6
"""What `walstream erase` needs: declarations that say which transaction made them, and of which session."""

ALARM_VERSION: Final = 7
"""What the tamper alarm needs: violations that the audit sink can read one by one, and what the catalogue said."""

RECOVERIES_VERSION: Final = 8
"""What writing down needs that the slot did not deliver something."""

FINDINGS_VERSION: Final = 9
"""What an erasure needs to know of which events an error tells, and the audit sink for violations that it finds."""

_PLACEHOLDER: Final = re.compile(r"\$([a-z_]+)")
_FILE: Final = re.compile(r"^(\d{3})_(\w+)\.sql$")


@dataclass(frozen=True)
class Migration:
    """One numbered file.

    Attributes:
        version: its number, from 1, without gaps.
        name: what stands behind the number in the file's name.
        template: its SQL, with ``$namespace``, ``$table`` and the like where names belong (see :func:`names`).
    """

    version: int
    name: str
    template: str

    def sql(self, settings: Settings) -> str:
        """Its SQL under the names of the configuration."""
        return fill(self.template, names(settings))

    def record(self, namespace: str) -> str:
        """The statement that writes down that it was applied."""
        return f"INSERT INTO {quote(namespace)}.migrations (version, name) VALUES ({self.version}, '{self.name}');"


def names(settings: Settings) -> dict[str, str]:
    """What the names in the SQL files stand for: quoted identifiers, and (``…_name``) the same as string literals."""
    return dict(names_of(settings.ledger, settings.namespace))


def parameter_names(settings: Settings) -> Mapping[str, str]:
    """The same for SQL that is executed with parameters: a ``%`` in a name is doubled."""
    return _parameter_names(settings.ledger, settings.namespace)


@lru_cache(maxsize=64)  # every statement of a worker asks
def names_of(ledger: LedgerTable, namespace: str) -> Mapping[str, str]:
    """What :func:`names` says, of the settings that count; not to be changed."""
    named = {"namespace": quote(namespace), **_tables(ledger)}
    texts = {f"{name}_name": literal(value) for name, value in named.items()}
    texts["jobs_channel_name"] = literal(channel(namespace, "jobs"))
    texts["erased_payload_name"] = literal(ERASED_PAYLOAD.decode())
    texts["erased_error_name"] = literal(ERASED_ERROR)
    return {**_columns(ledger), **named, **texts}


@lru_cache(maxsize=64)
def _parameter_names(ledger: LedgerTable, namespace: str) -> Mapping[str, str]:
    return {name: value.replace("%", "%%") for name, value in names_of(ledger, namespace).items()}


def _columns(ledger: LedgerTable) -> dict[str, str]:
    return {name: quote(getattr(ledger.columns, name)) for name in type(ledger.columns).model_fields}


def _tables(ledger: LedgerTable) -> dict[str, str]:
    return {
        "table": ledger.qualified,
        "snapshots": ledger.beside(ledger.snapshots),
        "jobs": ledger.beside(ledger.jobs),
    }


def fill(template: str, names: Mapping[str, str]) -> str:
    """Replace each ``$name`` by its (quoted) value, in one pass: a value that holds a ``$`` is not looked at again.

    A ``$word`` that is not in ``names`` stays: function bodies are quoted with such words.
    """
    return _PLACEHOLDER.sub(lambda match: names.get(match[1], match[0]), template)


@cache
def migrations() -> tuple[Migration, ...]:
    """All migrations that this release knows, in order."""
    found = [
        Migration(int(match[1]), match[2], entry.read_text(encoding="utf-8"))
        for entry in files(__package__).joinpath("sql").iterdir()
        if (match := _FILE.match(entry.name))
    ]
    return tuple(sorted(found, key=lambda migration: migration.version))


def ledger_sql(ledger: LedgerTable) -> str:
    """The statements that make the ledger's own table, under the names of the configuration."""
    return fill(_template("ledger.sql"), {**_columns(ledger), **_tables(ledger)})


def partitioned_sql(ledger: LedgerTable, method: str, key: str) -> str:
    """The same for a table that is partitioned by RANGE, LIST or HASH (``method``) of the column ``key``."""
    partitioning = {"partition_method": method, "partition_key": quote(key)}
    template = _template("ledger_partitioned.sql")
    return fill(template, {**_columns(ledger), **_tables(ledger), **partitioning}).strip()


def functions_sql(settings: Settings, version: int | None = None) -> str:
    """The statements that make (or make anew) the functions that workers call; idempotent.

    Args:
        version: of the schema that they are for; the newest that this release knows if not given.
    """
    return fill(functions_template(version), names(settings))


def functions_template(version: int | None = None) -> str:
    """The same with ``$namespace``, ``$table`` and the like where names belong."""
    parts = (
        ("functions.sql", LEDGER_VERSION),
        ("jobs.sql", JOBS_VERSION),
        ("approvals.sql", APPROVALS_VERSION),
        ("pruning.sql", PRUNING_VERSION),
        ("erasing.sql", ERASURES_VERSION),
        ("violations.sql", FINDINGS_VERSION),
    )
    return "".join(_template(file) for file, needed in parts if version is None or version >= needed)


def _template(file: str) -> str:
    return files(__package__).joinpath("sql", file).read_text(encoding="utf-8")


def installed_version(cur: Cursor, namespace: str) -> int:
    """The schema's version in the database; 0 if it is not there.

    Raises:
        ConfigError: a schema of that name is there and is somebody else's, or this role may not read it.
    """
    cur.execute(
        """
        SELECT current_user::text,
               pg_catalog.has_schema_privilege(n.oid, 'USAGE') AND pg_catalog.has_table_privilege(c.oid, 'SELECT'),
               (SELECT array_agg(a.attname::text) FROM pg_catalog.pg_attribute AS a
                 WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped)
          FROM (SELECT %s::text AS name) AS wanted
          LEFT JOIN pg_catalog.pg_namespace AS n ON n.nspname = wanted.name
          LEFT JOIN pg_catalog.pg_class AS c
                 ON c.relnamespace = n.oid AND c.relname = 'migrations' AND c.relkind = 'r'""",
        (namespace,),
    )
    row = cur.fetchone()
    assert row is not None
    role, readable, columns = row
    if columns is None:
        return 0
    if set(columns) != {"version", "name", "applied_at"}:
        raise ConfigError(
            f"the schema {namespace!r} holds a table `migrations` that is not walstream's",
            hint="choose another schema for walstream's own tables: --namespace NAME",
        )
    if not readable:
        raise ConfigError(
            f"{role} may not read walstream's tables in schema {namespace!r}",
            hint=f"as their owner: walstream init --grants {role}",
        )
    cur.execute(f"SELECT coalesce(max(version), 0) FROM {quote(namespace)}.migrations")
    row = cur.fetchone()
    assert row is not None
    return int(row[0])


def require_schema(conn: Connection, settings: Settings, needed: int = REQUIRED_VERSION) -> int:
    """Check that the schema is there and new enough; return its version.

    Args:
        needed: the version that what is to be done needs; the oldest one that the stream itself runs on if not given.

    Raises:
        ConfigError: it is not; the hint names the command to run.
    """
    with conn.cursor() as cur:
        version = installed_version(cur, settings.namespace)
    if version == 0:
        raise ConfigError(
            f"walstream is not installed in this database: there is no schema {settings.namespace!r} of its tables",
            hint="run `walstream init` (or hand the output of `walstream init --sql` to a DBA)",
        )
    if version < needed:
        raise ConfigError(
            f"the schema {settings.namespace!r} has version {version}, and this needs version {needed}",
            hint="run `walstream migrate` with this release; nothing else changes the schema",
        )
    return version


def pending(version: int, upto: int | None = None) -> tuple[Migration, ...]:
    """The migrations that a schema of ``version`` lacks, all or those up to a version."""
    return tuple(each for each in migrations() if each.version > version and (upto is None or each.version <= upto))


def brings_ledger(version: int, upto: int | None = None) -> bool:
    """Whether what a schema of ``version`` lacks holds the tables and functions of :data:`LEDGER_VERSION`."""
    return any(each.version >= LEDGER_VERSION for each in pending(version, upto))


def statements(settings: Settings, version: int = 0, upto: int | None = None) -> list[str]:
    """What brings a schema of ``version`` up to date (or up to a version), as scripts to run in order and in one
    transaction. The ledger's table has to be there before."""
    lacking = pending(version, upto)
    scripts = [f"CREATE SCHEMA IF NOT EXISTS {quote(settings.namespace)};"] if lacking else []
    for migration in lacking:
        scripts += [migration.sql(settings).strip(), migration.record(settings.namespace)]
    if brings_ledger(version, upto):
        scripts.append(functions_sql(settings, lacking[-1].version).strip())
    return scripts


def line_up(cur: Cursor, namespace: str) -> None:
    """Wait until nobody else sets this schema up; holds until the end of the caller's transaction."""
    cur.execute(
        "SELECT pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtextextended(%s, 0))", (f"walstream:{namespace}",)
    )


def install(conn: Connection, settings: Settings, upto: int | None = None) -> int:
    """Bring the schema up to date (or up to a version) in one transaction; return how many migrations ran.

    Safe to call by several processes at once. The ledger's table has to be there before.

    Raises:
        ConfigError: a schema of that name is somebody else's, or a table of snapshots or jobs is.
    """
    autocommit = conn.autocommit
    if not autocommit:
        conn.rollback()  # whatever the caller read before must not hold an older view of the schema
    conn.autocommit = False
    try:
        with conn, conn.cursor() as cur:
            line_up(cur, settings.namespace)
            version = installed_version(cur, settings.namespace)
            if brings_ledger(version, upto):
                check_existing(cur, settings)
            for script in statements(settings, version, upto):
                cur.execute(script)
            return len(pending(version, upto))
    finally:
        conn.autocommit = autocommit
