"""Findings about the ledger: table, publication, slot, walstream's own tables, and what was left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from walstream.config import quote
from walstream.figures import size
from walstream.ledger.grants import run_checks

from . import failover, widening
from .checks import INIT, Exam, Finding, identity_findings, judged
from .plan import check_columns


def table(exam: Exam) -> Iterator[Finding]:
    from walstream.source.preflight import check_table, table_gone

    settings, facts = exam.settings, exam.table
    if facts is None:
        oid = None if exam.identity is None else exam.identity.table_oid
        gone = table_gone(settings, exam.conn, oid)
        yield Finding("ledger", "failed", str(gone), INIT if oid is None else gone.hint)
        return

    def judge() -> None:
        check_columns(settings, check_table(settings, facts, exam.role))

    parts = f", {len(facts.leaves)} partitions" if facts.partitioned else ""
    yield judged("ledger", f"{settings.ledger.qualified}{parts}", judge)
    if exam.identity is not None and exam.identity.table_oid != facts.oid:
        yield Finding(
            "table identity",
            "failed",
            f"{settings.ledger.qualified} has the OID {facts.oid}, and the ledger that was set up"
            f" {exam.identity.table_oid}: the table was swapped or recreated",
            "rename it back, or add the new one to the publication and run `walstream adopt`",
        )
    if facts.row_security and not facts.row_security_applies:
        yield Finding("row security", "ok", f"on, and {exam.role.name} sees every row all the same")
    sequence = facts.seq_sequence
    if sequence is not None and sequence.cycle:
        yield Finding(
            "sequence",
            "warning",
            f"{sequence.name} begins again at its end: a seq that comes twice is a violation, and no event",
            f"ALTER SEQUENCE {sequence.name} NO CYCLE;",
        )


def publication(exam: Exam) -> Iterator[Finding]:
    from walstream.source.preflight import check_publication

    settings, facts = exam.settings, exam.publication
    if facts is None:
        yield Finding("publication", "failed", f"there is no publication {quote(settings.publication)}", INIT)
        return
    operations = ", ".join(facts.operations) or "nothing"
    if exam.table is not None:
        table_facts = exam.table
        yield judged(
            "publication",
            f"{settings.publication}: {operations}{', via the partition root' if facts.via_root else ''}",
            lambda: check_publication(settings, facts, table_facts),
        )
    name = quote(settings.publication)
    others = [f"{each.namespace}.{each.name}" for each in facts.tables if not _is_ledger(exam, each.oid)]
    if facts.all_tables or others:
        what = "all tables" if facts.all_tables else ", ".join(others[:5]) + (", …" if len(others) > 5 else "")
        yield Finding(
            "publication contents",
            "warning",
            f"{settings.publication} also publishes {what}: it is sent here and thrown away",
            f"DROP PUBLICATION {name}; then {INIT}"
            if facts.all_tables
            else f"ALTER PUBLICATION {name} SET TABLE {settings.ledger.qualified};",
        )


def _is_ledger(exam: Exam, oid: int) -> bool:
    return exam.table is not None and (oid == exam.table.oid or any(oid == leaf for leaf, _, _ in exam.table.leaves))


def replica_identity(exam: Exam) -> Iterator[Finding]:
    """With UPDATE or DELETE published and no identity, the server refuses them in the application's own session."""
    from walstream.source.replica_identity import without_identity

    facts, published = exam.table, exam.publication
    if facts is None or published is None:
        return
    needs = [operation for operation in ("update", "delete") if operation in published.operations]
    bare = without_identity(exam.conn, [facts.oid]) if needs else []
    if not needs:
        yield Finding("replica identity", "ok", "not needed: neither update nor delete is published")
    elif not bare:
        yield Finding("replica identity", "ok", f"there, for {' and '.join(needs)}")
    else:
        name = quote(exam.settings.publication)
        yield Finding(
            "replica identity",
            "failed",
            f"{', '.join(bare)} has none, and {' and '.join(needs)} is published: the server refuses it in every"
            " session of the application",
            f"ALTER PUBLICATION {name} SET (publish = 'insert, truncate'); or ALTER TABLE"
            f" {bare[0]} REPLICA IDENTITY USING INDEX …",
        )


def tamper_alarm(exam: Exam) -> Iterator[Finding]:
    """Whether the audit sink, where it is configured, is told of changes."""
    if exam.publication is None or not widening.is_wanted(exam.settings, asked=False):
        return
    lacking = widening.missing(exam.publication)
    if lacking:
        yield Finding(
            "tamper alarm",
            "warning",
            f"{exam.settings.publication} does not publish {', '.join(lacking)}: the audit sink does not notice who"
            " changes the ledger",
            INIT,
        )
    else:
        yield Finding("tamper alarm", "ok", "every change of the ledger is published")


def slot(exam: Exam) -> Iterator[Finding]:
    from walstream.source.preflight import check_slot

    settings, facts = exam.settings, exam.slot
    if facts is None:
        fix = INIT if exam.identity is None else f"{INIT} (it makes a new one, and finds in the ledger what was missed)"
        yield Finding("slot", "failed", f"there is no slot {settings.slot}", fix)
        return
    unbounded_is_judged_elsewhere = settings.model_copy(update={"allow_unbounded_slot": True})
    held = f", held by {facts.holder}" if facts.holder else ", nobody reads it"
    retained = size(facts.retained_bytes(exam.server.wal_end))
    yield judged(
        "slot",
        f"{settings.slot}: {facts.wal_status or 'status unknown'}, {retained} retained{held}",
        lambda: check_slot(unbounded_is_judged_elsewhere, facts, exam.server),
    )
    if facts.wal_status == "unreserved":
        yield Finding(
            "slot status",
            "warning",
            f"{settings.slot} is about to be lost at the next checkpoint",
            "start `walstream run` now, or raise max_slot_wal_keep_size",
        )


def privileges(exam: Exam) -> Iterator[Finding]:
    """What ``run`` needs on walstream's own tables."""
    if exam.version == 0:
        return
    namespace = quote(exam.settings.namespace)
    lacking = exam.rows(
        # CASE, because a name in a schema that may not be used cannot even be looked up. A table that is not there is
        # named by another check.
        "SELECT w.name, w.privilege || coalesce(' (' || w.col || ')', '')"
        " FROM unnest(%s::text[], %s::text[], %s::text[]) AS w (name, privilege, col)"
        " WHERE CASE WHEN NOT pg_catalog.has_schema_privilege(%s, 'USAGE') THEN true"
        " WHEN w.col IS NULL"
        " THEN NOT pg_catalog.has_table_privilege(pg_catalog.to_regclass(w.name)::oid, w.privilege)"
        " ELSE NOT pg_catalog.has_column_privilege(pg_catalog.to_regclass(w.name)::oid, w.col, w.privilege) END",
        *map(list, zip(*run_checks(exam.settings, exam.version or 1), strict=True)),
        exam.settings.namespace,
    )
    role = quote(exam.role.name)
    if lacking:
        yield Finding(
            "grants",
            "failed",
            f"{exam.role.name} lacks " + ", ".join(f"{privilege} on {name}" for name, privilege in lacking),
            f"walstream init --grants {role}, as the owner of schema {namespace}",
        )
    else:
        yield Finding("grants", "ok", f"{exam.role.name} may read and write walstream's tables")


def append_only(exam: Exam) -> Iterator[Finding]:
    from walstream.ledger.append_only import standing

    if exam.version == 0 or exam.table is None:
        return
    with exam.conn.cursor() as cur:
        found = standing(cur, exam.settings)
    name, fix = exam.settings.ledger.qualified, f"{INIT} --append-only, as the owner of the table"
    if found.whole:
        yield Finding("append-only", "ok", f"rows of {name} are changed and removed by declaration only")
    elif not found.asked:
        yield Finding("append-only", "ok", f"not enforced ({INIT} --append-only)")
    else:
        lacking = [
            *(f"no trigger that always fires on {table}" for table in found.unguarded[:5]),
            *(f"{role} may change rows" for role in found.roles),
        ]
        yield Finding("append-only", "warning", "; ".join(lacking), fix)


def leftovers(exam: Exam) -> Iterator[Finding]:
    from walstream.source.tail_publication import leftovers as left_publications

    names = left_publications(exam.conn)
    if names:
        fix = " ".join(f"DROP PUBLICATION {quote(name)};" for name in names)
        yield Finding("leftovers of tail", "warning", f"publications {', '.join(names)}", fix)
    else:
        yield Finding("leftovers of tail", "ok", "none")


def commit_timestamps(exam: Exam) -> Iterator[Finding]:
    on = exam.server.settings.get("track_commit_timestamp") == "on"
    order = "their commit" if on else "their seq (on would order them by commit; it needs a restart)"
    yield Finding(
        "track_commit_timestamp", "ok", f"{'on' if on else 'off'}: rows that the slot missed are ordered by {order}"
    )


CHECKS: Final[tuple[Callable[[Exam], Iterator[Finding]], ...]] = (
    identity_findings,
    privileges,
    table,
    publication,
    replica_identity,
    tamper_alarm,
    append_only,
    slot,
    failover.findings,
    commit_timestamps,
    leftovers,
)
