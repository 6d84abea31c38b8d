"""The proof of the handoffs: each has one job, that one was completed, and it had its effect once.

The ledger says which handoffs there are. Jobs, effects (rows without any key that could hide a second one) and the
``handoff.received`` are compared with them in SQL. Latency is the time from the commit's own timestamp to the first
line of the handler, as the worker noted it in its journal, outside of the database; of several attempts the first one
that got so far counts.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from psycopg2.extensions import cursor as Cursor

ROUTER: Final = "handoff router"


@dataclass(slots=True)
class Latency:
    """Milliseconds from a commit to a handler."""

    events: int = 0
    p50_ms: float | None = None
    p99_ms: float | None = None
    max_ms: float | None = None


@dataclass(slots=True)
class Handoffs:
    """How many of everything there are.

    Attributes:
        emitted: ``handoff.emitted`` in the ledger.
        jobs: that came from them.
        completed: of these jobs.
        effects: rows that completed turns left.
        received: ``handoff.received`` in the ledger.
        begun: how often a handler was called. What exceeds the effects died, or failed on purpose.
        interrupted: handoffs that were claimed more than once.
        latency: of all handoffs whose handler was called.
        undisturbed: of those that met neither a dead consumer nor a dead worker of their agent.
    """

    emitted: int = 0
    jobs: int = 0
    completed: int = 0
    effects: int = 0
    received: int = 0
    begun: int = 0
    interrupted: int = 0
    latency: Latency = field(default_factory=Latency)
    undisturbed: Latency = field(default_factory=Latency)

    def as_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "handoffs": self.emitted,
            "jobs": self.jobs,
            "jobs_completed": self.completed,
            "effects": self.effects,
            "handoffs_received": self.received,
            "turns_begun": self.begun,
            "handoffs_claimed_again": self.interrupted,
            "handoff_p50_ms": self.latency.p50_ms,
            "handoff_p99_ms": self.latency.p99_ms,
            "handoff_max_ms": self.latency.max_ms,
            "undisturbed_handoffs": asdict(self.undisturbed),
        }


_EMITTED: Final = "event_type = 'handoff.emitted'"

# What is routed has a job or is a dead letter. The replay of recorded runs has nobody to do the jobs.
ROUTED: Final = {
    ROUTER: (
        "SELECT event_seq AS seq FROM agent_jobs UNION ALL"
        " SELECT event_seq FROM walstream.dead_letters WHERE rerouted_at IS NULL",
        _EMITTED,
    )
}
WORKED: Final = {
    "completed jobs": ("SELECT event_seq AS seq FROM agent_jobs WHERE status = 'COMPLETED'", _EMITTED),
    "effects of turns": ("SELECT event_seq AS seq FROM demo_effects", _EMITTED),
    "received events": (
        "SELECT (payload::jsonb ->> 'handoff')::bigint AS seq FROM proof_ledger WHERE event_type = 'handoff.received'",
        _EMITTED,
    ),
}

TABLES: Final = """\
CREATE TEMPORARY TABLE proof_turns (seq bigint, token bigint, agent text, began_us bigint) ON COMMIT DROP;
"""

_NUMBERS: Final = """\
SELECT (SELECT count(*) FROM proof_ledger WHERE event_type = 'handoff.emitted'),
       (SELECT count(*) FROM agent_jobs),
       (SELECT count(*) FROM agent_jobs WHERE status = 'COMPLETED'),
       (SELECT count(*) FROM demo_effects),
       (SELECT count(*) FROM proof_ledger WHERE event_type = 'handoff.received'),
       (SELECT count(*) FROM proof_turns),
       (SELECT count(*) FROM agent_jobs WHERE attempts > 1)"""

_LATENCY: Final = """\
WITH firsts AS (SELECT DISTINCT ON (seq) seq, token, agent, began_us FROM proof_turns ORDER BY seq, began_us),
     commits AS (SELECT seq, min(committed_us) AS committed_us FROM demo_deliveries GROUP BY seq),
     handed AS (SELECT * FROM firsts JOIN commits USING (seq) WHERE committed_us IS NOT NULL)
SELECT count(*),
       percentile_cont(0.50) WITHIN GROUP (ORDER BY began_us - committed_us),
       percentile_cont(0.99) WITHIN GROUP (ORDER BY began_us - committed_us),
       max(began_us - committed_us)
  FROM handed"""

# Token 2 and more in a first line: the worker before died between its claim and the handler.
_UNDISTURBED: Final = (
    _LATENCY
    + """
 WHERE token = 1
   AND NOT EXISTS (SELECT FROM proof_outages AS o WHERE o.who IN ('consumer', handed.agent)
                      AND committed_us <= o.to_us AND began_us >= o.from_us)"""
)


def count_handoffs(cur: Cursor) -> Handoffs:
    """Count everything, in a transaction that has the proof's temporary tables."""
    cur.execute(_NUMBERS)
    emitted, jobs, completed, effects, received, begun, interrupted = map(int, cur.fetchone() or ())
    latency, undisturbed = latency_of(cur, _LATENCY), latency_of(cur, _UNDISTURBED)
    return Handoffs(emitted, jobs, completed, effects, received, begun, interrupted, latency, undisturbed)


def latency_of(cur: Cursor, query: str) -> Latency:
    """Run ``query`` (a number, and three times in microseconds)."""
    cur.execute(query)
    events, *microseconds = cur.fetchone() or (0, None, None, None)
    return Latency(int(events), *(None if us is None else round(float(us) / 1000, 3) for us in microseconds))
