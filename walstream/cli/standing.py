"""How the stream stands: slot, ingest, order and projectors, read at one moment, and what of it needs a person."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

from walstream.config import Settings, quote
from walstream.engine.episodes import Episode, latest
from walstream.guard.policy import Verdict, judge
from walstream.guard.reading import SlotReader
from walstream.ledger.identity import Identity, read_identity

from .approvals import OpenApprovals, count_open
from .handoffs import count_dead
from .jobs import JobCount, count_jobs
from .violations import OpenViolations
from .violations import count_open as open_violations

if TYPE_CHECKING:
    from psycopg2.extensions import connection as Connection
    from psycopg2.extensions import cursor as Cursor

# A lease counts while its time runs and its holder's backend is there. Of another role's backend only the id can be
# seen (documentation, 28.2 "The Cumulative Statistics System"), so a start that is NULL is taken for the right one.
ALIVE: Final = """
    {row}.owner IS NOT NULL AND {row}.lease_until > pg_catalog.clock_timestamp()
    AND EXISTS (SELECT 1 FROM pg_catalog.pg_stat_activity AS a
                 WHERE a.pid = {row}.control_pid
                   AND (a.backend_start IS NULL OR a.backend_start = {row}.control_start))"""


@dataclass(frozen=True)
class SlotStanding:
    """The slot. ``None`` means that the server does not say.

    Attributes:
        retained_bytes: WAL that the server keeps for it, from ``restart_lsn`` on.
        distance_bytes: from what is confirmed to the end of the WAL; what ingest still has to read, or ignore.
        safe_bytes: WAL that may still be written before the slot can be lost.
        limit: ``max_slot_wal_keep_size`` as text; ``-1`` is no limit.
        state: what the guard makes of it: ``ok``, ``warn``, ``critical`` or ``lost``.
        forecast_seconds: until it is lost at the present rate, as far as one look can tell.
    """

    name: str
    exists: bool
    active_pid: int | None = None
    wal_status: str | None = None
    invalidation: str | None = None
    restart_lsn: str | None = None
    confirmed_lsn: str | None = None
    retained_bytes: int | None = None
    distance_bytes: int | None = None
    safe_bytes: int | None = None
    limit: str = ""
    state: str = "lost"
    forecast_seconds: float | None = None


@dataclass(frozen=True)
class IngestStanding:
    """The process that writes the order."""

    state: str
    owner: str | None
    generation: int
    heartbeat_age: float | None
    confirmed_lsn: str | None
    events: int
    recovered: int
    violations: int
    error: str | None


@dataclass(frozen=True)
class ProjectorStanding:
    """One projector.

    Attributes:
        state: what its runner wrote last (``hot``, ``cold``, ``retrying``, ``halted``, …); ``not running`` if no live
            process holds it.
        offset: the last event that is done in every lane.
        lag_seconds: age of the commit of the next event; 0.0 if there is none, ``None`` if its time is not known.
    """

    name: str
    kind: str
    desired: str
    state: str
    offset: int
    lag_events: int
    lag_seconds: float | None
    parked: int
    lanes: int
    owner: str | None
    error: str | None
    error_offset: int | None


@dataclass(frozen=True)
class Standing:
    """All of it."""

    identity: Identity
    head: int
    slot: SlotStanding
    ingest: IngestStanding
    projectors: tuple[ProjectorStanding, ...]
    problems: tuple[str, ...] = field(default=())
    jobs: tuple[JobCount, ...] = field(default=())
    approvals: OpenApprovals = field(default=OpenApprovals())
    violations: OpenViolations = field(default=OpenViolations())
    recoveries: tuple[Episode, ...] = field(default=())

    def document(self) -> dict[str, Any]:
        """For ``--json``."""
        identity = self.identity
        return {
            "ledger": {
                "id": identity.ledger_id,
                "environment": identity.environment,
                "epoch": identity.epoch,
                "table": f"{identity.table_namespace}.{identity.table_name}",
                "publication": identity.publication,
                "floor_seq": identity.floor_seq,
                "slot_state": identity.slot_state,
            },
            "slot": asdict(self.slot),
            "ingest": asdict(self.ingest),
            "order": {"head": self.head},
            "projectors": [asdict(projector) for projector in self.projectors],
            "jobs": [asdict(jobs) for jobs in self.jobs],
            "approvals": asdict(self.approvals),
            "violations": asdict(self.violations),
            "recoveries": [each.document() for each in self.recoveries],
            "problems": list(self.problems),
        }


def read(conn: Connection, settings: Settings) -> Standing | None:
    """Read it on a connection in autocommit; ``None`` if the identity was never written."""
    with conn.cursor() as cur:
        identity = read_identity(cur, settings.namespace)
        if identity is None:
            return None
        verdict = _judged(conn, settings, identity.slot)
        slot = _slot(cur, identity.slot, verdict)
        ingest = _ingest(cur, settings.namespace)
        # Cursors before the head: a cursor is never ahead of an order that was read after it.
        rows = _projector_rows(cur, settings.namespace)
        cur.execute(
            f"SELECT first_offset + events - 1 FROM {quote(settings.namespace)}.commit_order"
            " ORDER BY first_offset DESC LIMIT 1"
        )
        row = cur.fetchone()
        head = 0 if row is None else int(row[0])
    projectors = tuple(_projector(conn, settings, row, head) for row in rows)
    problems = _problems(identity, verdict, ingest, projectors)
    if dead := count_dead(conn, settings):
        problems.append(f"handoffs without a job, which wait for a person: {dead} (`walstream handoffs dead`)")
    violations = open_violations(conn, settings)
    if violations.records:
        problems.insert(0, violations.problem)
    jobs, approvals = count_jobs(conn, settings), count_open(conn, settings)
    recoveries = tuple(latest(conn, settings))
    return Standing(identity, head, slot, ingest, projectors, tuple(problems), jobs, approvals, violations, recoveries)


def _judged(conn: Connection, settings: Settings, name: str) -> Verdict:
    """What the guard's policy makes of the slot, by one look."""
    reading = SlotReader(name).look(conn).slots[0]
    return judge(reading, settings.guard, allow_unbounded=settings.allow_unbounded_slot)


def _slot(cur: Cursor, name: str, verdict: Verdict) -> SlotStanding:
    cur.execute(
        """
        SELECT active_pid, wal_status, to_jsonb(s) ->> 'invalidation_reason', restart_lsn::text,
               confirmed_flush_lsn::text,
               pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn)::bigint,
               pg_wal_lsn_diff(pg_current_wal_lsn(), confirmed_flush_lsn)::bigint,
               safe_wal_size, current_setting('max_slot_wal_keep_size')
          FROM pg_catalog.pg_replication_slots AS s WHERE slot_name = %s""",
        (name,),
    )
    row = cur.fetchone()
    if row is None:
        return SlotStanding(name, exists=False)
    return replace(SlotStanding(name, True, *row), state=verdict.state.word, forecast_seconds=verdict.forecast)


def _ingest(cur: Cursor, namespace: str) -> IngestStanding:
    cur.execute(
        f"""
        SELECT state, owner, generation,
               extract(epoch FROM pg_catalog.clock_timestamp() - heartbeat_at)::float8,
               confirmed_lsn::text, events, recovered, violations, error, {ALIVE.format(row="i")}
          FROM {quote(namespace)}.ingest AS i"""
    )
    row = cur.fetchone()
    assert row is not None
    *columns, alive = row
    if not alive and columns[0] != "failed":
        columns[0] = "stopped" if columns[1] is None else "gone"
    return IngestStanding(*columns)


def _projector_rows(cur: Cursor, namespace: str) -> list[tuple[Any, ...]]:
    schema = quote(namespace)
    cur.execute(
        f"""
        SELECT p.name, p.kind, p.desired, p.state, {ALIVE.format(row="p")},
               (SELECT min(c.position) FROM {schema}.cursors AS c WHERE c.projector = p.name),
               (SELECT count(*) FROM {schema}.parked AS k WHERE k.projector = p.name),
               p.lanes, p.owner, p.error, p.error_offset
          FROM {schema}.projectors AS p ORDER BY p.name"""
    )
    return cur.fetchall()


def _projector(conn: Connection, settings: Settings, row: tuple[Any, ...], head: int) -> ProjectorStanding:
    name, kind, desired, state, alive, position, parked, lanes, owner, error, error_offset = row
    offset = position or 0
    lag = max(0, head - offset)
    if not alive and state != "halted":
        state = "paused" if desired == "paused" else "not running"
    return ProjectorStanding(
        name,
        kind,
        desired,
        state,
        offset,
        lag,
        _age_of(conn, settings, offset + 1) if lag else 0.0,
        parked,
        lanes,
        owner if alive else None,
        error,
        error_offset,
    )


def _age_of(conn: Connection, settings: Settings, offset: int) -> float | None:
    """Seconds since the event at ``offset`` committed, by the server's clock; ``None`` if nothing tells.

    The commit's time stands in the order. A recovered event has none there; the row's own ``created_at`` is the time
    its transaction began, and comes close.
    """
    from walstream.order.table import COLUMNS, order_table, query, segment_of, spelled

    rows = query(
        conn,
        f"SELECT {COLUMNS} FROM {order_table(settings.namespace)} WHERE first_offset <= %s"
        " ORDER BY first_offset DESC LIMIT 1",
        (offset,),
        doing=f"reading the order at offset {offset}",
    )
    if not rows:
        return None
    segment = segment_of(rows[0])
    index = offset - segment.first_offset
    if index >= len(segment.seqs):
        return None
    piece = next(i for i, end in enumerate(accumulate(segment.tx_sizes)) if index < end)
    if time_us := segment.commit_times[piece]:
        ((now_us,),) = query(
            conn,
            "SELECT (extract(epoch FROM clock_timestamp() - timestamptz '2000-01-01 00:00:00+00') * 1000000)::bigint",
            doing="reading the server's clock",
        )
        return max(0.0, float(now_us - time_us) / 1e6)
    ledger = settings.ledger
    created_at, seq = spelled(quote(ledger.columns.created_at)), spelled(quote(ledger.columns.seq))
    ages = query(
        conn,
        f"SELECT extract(epoch FROM clock_timestamp() - {created_at})::float8 FROM {spelled(ledger.qualified)}"
        f" WHERE {seq} = %s AND isfinite({created_at})",
        (segment.seqs[index],),
        doing=f"reading the ledger's row {segment.seqs[index]}",
    )
    return max(0.0, float(ages[0][0])) if ages else None


def _problems(
    identity: Identity, verdict: Verdict, ingest: IngestStanding, projectors: tuple[ProjectorStanding, ...]
) -> list[str]:
    found = []
    working = ingest.state not in {"failed", "stopped", "gone"}
    if ingest.state == "recovering":
        found.append(f"the slot {verdict.reading.name} is being made anew: {ingest.error}")
    elif identity.slot_state != "ready":
        found.append(
            f"set-up is not complete (state {identity.slot_state}): run `walstream init`, or `walstream run`, which"
            " goes on with it"
        )
    else:
        found += [
            f"{finding.found}; to do: {finding.remedy}"
            for finding in verdict.findings
            if working or finding.cause != "nobody_connected"  # that nobody ingests is said below
        ]
    if ingest.state == "halted":
        found.append(f"ingest halts: {ingest.error}")
    if ingest.state == "failed":
        found.append(f"ingest failed: {ingest.error}")
    elif ingest.state in {"stopped", "gone"}:
        found.append("no ingest is running: start `walstream run`")
    for projector in projectors:
        if projector.state == "halted":
            at = f" at offset {projector.error_offset}" if projector.error_offset is not None else ""
            found.append(f"projector {projector.name} halted{at}: {projector.error}")
        elif projector.state == "hung":
            found.append(f"projector {projector.name} is hung: {projector.error}")
        elif projector.state == "not running":
            found.append(f"projector {projector.name}: no process runs it")
        if projector.parked:
            found.append(
                f"projector {projector.name}: events parked behind a failure: {projector.parked:,}"
                " (see `walstream parked list`)"
            )
    return found
