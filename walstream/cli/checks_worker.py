"""Findings about what a worker appends through and what a rebuild relies on: functions, tables, the seq, partitions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from walstream.config import quote
from walstream.errors import ConfigError
from walstream.figures import size
from walstream.ledger import functions, partition_layout, schema
from walstream.ledger.existing import check_existing, missing_columns

from .checks import Exam, Finding

MIGRATE: Final = "walstream migrate"


def version(exam: Exam) -> Iterator[Finding]:
    newest = schema.migrations()[-1].version
    if exam.version and exam.version < newest:
        lost = "workers cannot append" if exam.version < schema.LEDGER_VERSION else "there are no jobs"
        yield Finding(
            "schema",
            "warning",
            f"version {exam.version}, and this release knows {newest}: the stream works, and {lost}",
            MIGRATE,
        )


def tables(exam: Exam) -> Iterator[Finding]:
    """Snapshots and jobs, in the ledger's schema."""
    if not _has_functions(exam):
        return
    ledger = exam.settings.ledger
    with exam.conn.cursor() as cur:
        try:
            check_existing(cur, exam.settings)
        except ConfigError as error:
            yield Finding("snapshots and jobs", "failed", str(error), error.hint)
            return
        missing = missing_columns(cur, ledger, with_jobs=(exam.version or 0) >= schema.JOBS_VERSION)
    if not missing:
        yield Finding("snapshots and jobs", "ok", f"{ledger.beside(ledger.snapshots)}, {ledger.beside(ledger.jobs)}")
    for setting, columns in missing.items():
        name = ledger.beside(getattr(ledger, setting))
        yield Finding(
            "snapshots and jobs",
            "failed",
            f"{name}, which ledger.{setting} names, has no column {', '.join(columns)} (or is not there)",
            f"if it was renamed, correct ledger.{setting} in the configuration, or rename it back",
        )


def job_status(exam: Exam) -> Iterator[Finding]:
    """Whether everybody who writes jobs is held to their state machine, also who does it without the functions."""
    if (exam.version or 0) < schema.JOBS_VERSION:
        return
    with exam.conn.cursor() as cur:
        why = functions.unguarded(cur, exam.settings)
    jobs = exam.settings.ledger.beside(exam.settings.ledger.jobs)
    if why is None:
        yield Finding("job status", "ok", f"a trigger on {jobs} holds everybody to the state machine")
    else:
        yield Finding(
            "job status",
            "failed",
            f"the trigger on {jobs} is {why}: nothing keeps anybody from giving a job a status that no worker knows, or"
            " from finishing one that somebody is at",
            MIGRATE,
        )


def append_functions(exam: Exam) -> Iterator[Finding]:
    """They hold the names of table and columns as they were configured when they were made."""
    if not _has_functions(exam):
        return
    settings = exam.settings
    newest = schema.migrations()[-1].version
    if exam.version is not None and exam.version > newest:
        yield Finding("append functions", "ok", f"of a newer release (schema version {exam.version}); not compared")
    else:
        with exam.conn.cursor() as cur:
            stale = functions.stale(cur, settings)
        if stale:
            yield Finding(
                "append functions",
                "failed",
                f"{', '.join(stale)} in schema {settings.namespace}: missing, or not made for"
                f" {settings.ledger.qualified} and its columns as they are configured now, or of another release",
                MIGRATE,
            )
        else:
            yield Finding("append functions", "ok", f"there, for {settings.ledger.qualified} as it is configured")
    yield from _open_functions(exam)
    yield from _powers_of_the_owner(exam)


def _open_functions(exam: Exam) -> Iterator[Finding]:
    open_ones = exam.rows(
        "SELECT DISTINCT p.oid::regprocedure::text FROM pg_catalog.pg_proc AS p"
        " JOIN pg_catalog.pg_namespace AS n ON n.oid = p.pronamespace"
        " CROSS JOIN LATERAL pg_catalog.aclexplode(coalesce(p.proacl, pg_catalog.acldefault('f', p.proowner))) AS a"
        " WHERE n.nspname = %s AND a.grantee = 0 AND a.privilege_type = 'EXECUTE' ORDER BY 1",
        exam.settings.namespace,
    )
    if open_ones:
        names = [name for (name,) in open_ones]
        yield Finding(
            "append privileges",
            "warning",
            f"everybody may call {', '.join(names)}: whoever can use the schema can write the ledger",
            f"REVOKE EXECUTE ON FUNCTION {', '.join(names)} FROM PUBLIC;",
        )


def _powers_of_the_owner(exam: Exam) -> Iterator[Finding]:
    """The functions work with their owner's rights (SECURITY DEFINER), whoever calls them."""
    ledger = exam.settings.ledger
    lacking = exam.rows(
        """
        SELECT p.owner, w.name, w.privilege
          FROM (SELECT DISTINCT pg_catalog.pg_get_userbyid(p.proowner)::text AS owner FROM pg_catalog.pg_proc AS p
                  JOIN pg_catalog.pg_namespace AS n ON n.oid = p.pronamespace
                 WHERE n.nspname = %s AND p.prosecdef) AS p,
               unnest(%s::text[], %s::text[]) AS w (name, privilege)
         WHERE NOT CASE w.privilege WHEN 'USAGE' THEN pg_catalog.has_sequence_privilege(p.owner, w.name, 'USAGE')
                   ELSE pg_catalog.has_table_privilege(p.owner, w.name, w.privilege) END""",
        exam.settings.namespace,
        *_needs_of_append(exam),
    )
    for owner, name, privilege in lacking:
        yield Finding(
            "append privileges",
            "failed",
            f"{owner}, the owner of the functions, lacks {privilege} on {name}: no worker can append",
            f"GRANT {privilege} ON {'SEQUENCE ' if privilege == 'USAGE' else ''}{name} TO {quote(owner)};",
        )
    if not lacking and exam.table is not None:
        yield Finding("append privileges", "ok", f"the functions may write {ledger.qualified}")


def _needs_of_append(exam: Exam) -> tuple[list[str], list[str]]:
    if exam.table is None:
        return [], []
    names, privileges = [exam.settings.ledger.qualified] * 2, ["INSERT", "SELECT"]
    sequence = _default_sequence(exam)
    if sequence is not None and sequence[1] == "default":  # an identity's sequence needs no grant
        names.append(sequence[0])
        privileges.append("USAGE")
    return names, privileges


def seq_default(exam: Exam) -> Iterator[Finding]:
    """Whether a rebuild can know that no lower seq is still to come (docs/ledger.md, "Snapshots")."""
    if exam.table is None or exam.table.column(exam.settings.ledger.columns.seq) is None:
        return
    column = f"{exam.settings.ledger.qualified}.{quote(exam.settings.ledger.columns.seq)}"
    sequence = _default_sequence(exam)
    if sequence is None:
        yield Finding(
            "sequence",
            "warning",
            f"{column} gets no value from a sequence by default: writers have to number the rows themselves, append"
            " cannot, and a rebuild counts the whole session each time to be sure that no lower seq came later",
            f"CREATE SEQUENCE …; ALTER TABLE {exam.settings.ledger.qualified} ALTER COLUMN"
            f" {quote(exam.settings.ledger.columns.seq)} SET DEFAULT nextval('…');",
        )
    elif sequence[2] > 1:
        yield Finding(
            "sequence",
            "warning",
            f"{sequence[0]} has CACHE {sequence[2]}: a session can insert a low seq long after others passed it. The"
            " search for missed rows has to look at more, and a rebuild counts the whole session each time",
            f"ALTER SEQUENCE {sequence[0]} CACHE 1;",
        )
    else:
        yield Finding("sequence", "ok", f"{column} is numbered by {sequence[0]}")


def _default_sequence(exam: Exam) -> tuple[Any, ...] | None:
    """The sequence that numbers the rows: its name, whether by ``identity`` or ``default``, and its cache."""
    found = exam.rows(
        """
        SELECT pg_catalog.format('%%I.%%I', n.nspname, s.relname),
               CASE WHEN a.attidentity <> '' THEN 'identity' ELSE 'default' END, q.seqcache::bigint
          FROM pg_catalog.pg_attribute AS a
          LEFT JOIN pg_catalog.pg_attrdef AS d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
          JOIN pg_catalog.pg_depend AS p
            ON a.attidentity <> '' AND p.refclassid = 'pg_catalog.pg_class'::regclass AND p.refobjid = a.attrelid
               AND p.refobjsubid = a.attnum AND p.classid = 'pg_catalog.pg_class'::regclass AND p.deptype = 'i'
            OR a.attidentity = '' AND p.classid = 'pg_catalog.pg_attrdef'::regclass AND p.objid = d.oid
               AND p.refclassid = 'pg_catalog.pg_class'::regclass
          JOIN pg_catalog.pg_sequence AS q
            ON q.seqrelid = CASE WHEN a.attidentity <> '' THEN p.objid ELSE p.refobjid END
          JOIN pg_catalog.pg_class AS s ON s.oid = q.seqrelid
          JOIN pg_catalog.pg_namespace AS n ON n.oid = s.relnamespace
         WHERE a.attrelid = pg_catalog.to_regclass(%s) AND a.attname = %s""",
        exam.settings.ledger.qualified,
        exam.settings.ledger.columns.seq,
    )
    return found[0] if found else None


def partitions_ahead(exam: Exam) -> Iterator[Finding]:
    with exam.conn.cursor() as cur:
        layout = partition_layout.look(cur, exam.settings.ledger)
    if layout is None or not layout.by_time:
        return
    default, until = layout.default, layout.prepared_until()
    if layout.month_is_prepared:
        yield Finding("partitions ahead", "ok", "at least a month is prepared")
    elif default is not None:
        yield Finding(
            "partitions ahead",
            "warning",
            "less than a month is prepared: rows of later months go into the default partition, from which they have to"
            " be moved before their months can be made",
            "walstream partitions --ahead 3, and by cron from now on",
        )
    else:
        yield Finding(
            "partitions ahead",
            "warning" if until is not None else "failed",
            "less than a month is prepared, and there is no default partition: agents will not be able to append then"
            if until is not None
            else "there is no partition for rows of this moment: agents cannot append",
            "walstream partitions --ahead 3, and by cron from now on",
        )
    if default is not None:
        ((used,),) = exam.rows("SELECT pg_catalog.pg_relation_size(%s::bigint::oid::regclass) > 0", default.oid)
        if used:
            yield Finding(
                "default partition",
                "warning",
                f"{default.name} holds rows ({size(default.nbytes)} with its indexes): their months had no partition"
                " when they came, or never will have one",
                "walstream partitions --ahead 3 says which months are concerned, and how the rows are moved",
            )


def _has_functions(exam: Exam) -> bool:
    return exam.version is not None and exam.version >= schema.LEDGER_VERSION


CHECKS: Final[tuple[Callable[[Exam], Iterator[Finding]], ...]] = (
    version,
    tables,
    job_status,
    append_functions,
    seq_default,
    partitions_ahead,
)
