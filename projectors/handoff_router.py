"""Routes handoffs: one job for each, in the transaction that moves the router on; a dead letter for what has no way.

from walstream import Stream
from walstream.projectors.handoff_router import HandoffRouter

stream = Stream("postgresql:///app")
stream.add(HandoffRouter(agents=("planner", "researcher", "writer"), default="planner"))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import psycopg2
from psycopg2.extensions import cursor as Cursor

from walstream import ConfigError, Context, Event, Jobs, PayloadError, Projector

TARGETS: Final = ("to", "target", "agent")
"""The members of a payload that may name the next agent. The first of them that is there, and not null, counts."""

_LONGEST_NAME: Final = 255

_STANDING: Final = """
    SELECT coalesce((SELECT j.job_id FROM {jobs} AS j WHERE j.event_seq = %(seq)s),
                    (SELECT p.job_id FROM {namespace}.pruned_jobs AS p WHERE p.event_seq = %(seq)s)),
           -- Whoever emitted it was at work on the newest job of its session that somebody has taken.
           (SELECT j.hops FROM {jobs} AS j
             WHERE j.session_id = %(session)s AND j.fencing_token > 0 AND j.event_seq IS DISTINCT FROM %(seq)s
             ORDER BY j.job_id DESC LIMIT 1)"""

_SUBMIT: Final = """
    WITH letter AS (
        UPDATE {namespace}.dead_letters SET rerouted_at = clock_timestamp()
         WHERE event_seq = %(seq)s AND rerouted_at IS NULL
    )
    SELECT s.job_id, s.created
      FROM {namespace}.submit_job(%(session)s, %(agent)s, event_seq => %(seq)s, hops => %(hops)s,
                                  priority => %(priority)s) AS s"""

_BURY: Final = """
    INSERT INTO {namespace}.dead_letters AS held (event_seq, session_id, reason)
    VALUES (%(seq)s, %(session)s, %(reason)s)
        ON CONFLICT (event_seq) DO UPDATE SET reason = excluded.reason WHERE held.rerouted_at IS NULL"""

_LOOK: Final = """
    SELECT current_user::text,
           EXISTS (SELECT FROM pg_catalog.pg_proc AS p WHERE p.proname = 'submit_job' AND p.pronamespace = n.oid)
           AND to_regclass(%(letters)s) IS NOT NULL AND to_regclass(%(pruned)s) IS NOT NULL
      FROM pg_catalog.pg_namespace AS n WHERE n.nspname = %(schema)s"""
_MAY: Final = """
    SELECT has_table_privilege(%(jobs)s, 'SELECT') AND has_table_privilege(%(letters)s, 'SELECT')
           AND has_table_privilege(%(letters)s, 'INSERT') AND has_table_privilege(%(letters)s, 'UPDATE')
           AND has_table_privilege(%(pruned)s, 'SELECT')
           AND (SELECT bool_and(has_function_privilege(p.oid, 'EXECUTE'))
                  FROM pg_catalog.pg_proc AS p JOIN pg_catalog.pg_namespace AS n ON n.oid = p.pronamespace
                 WHERE p.proname = 'submit_job' AND n.nspname = %(schema)s)"""


@dataclass(frozen=True)
class Routed:
    """What became of one handoff.

    Attributes:
        event_seq: which one.
        agent: who gets it; ``None`` if it has a job already, or none.
        job_id: its job; ``None`` if it is a dead letter.
        created: whether the job was made now. If not, it was there: the handoff came again.
        reason: why it is a dead letter; ``None`` if it has a job.
    """

    event_seq: int
    agent: str | None = None
    job_id: int | None = None
    created: bool = False
    reason: str | None = None


class Unroutable(Exception):
    """A handoff has no way, for the reason that the message tells."""


class HandoffRouter(Projector):
    """Submits one job for each ``handoff.emitted``, to the agent that its payload names under ``to`` (or ``target``, or
    ``agent``) or that a rule names. A job is identified by its event, so a handoff has one however often it comes.

    What cannot be routed becomes a row in ``walstream.dead_letters``, with its reason, and holds nobody up.
    ``walstream handoffs dead`` shows them, and ``walstream handoffs reroute`` routes them again.

    The rules, in their order; names are compared exactly:

    1. what ``rule`` returns, if it is not ``None``;
    2. ``routes``, by the name in the payload;
    3. the name itself, if it is one of ``agents``;
    4. ``event_types``, by the type of the event;
    5. ``default``.

    Args:
        agents: the names that are served. Without it every name is.
        routes: name in a payload to the agent that gets the job.
        event_types: event type to agent. Events of these types are routed as handoffs are.
        default: who gets what no other rule routes.
        max_hops: how many handoffs may follow from one another; what comes after is a dead letter. 0: no limit.
        rule: a function of the event that returns an agent's name, or ``None`` to leave it to the other rules. It must
            be quick, and do nothing else: it runs in the router's transaction.

    Raises:
        ConfigError: an option makes no sense.
    """

    name = "handoff-router"
    transactional = True
    outward = True
    # A worker's claim waits for the disk, and so for the job that it claims, which was written before it.
    synchronous_commit = False
    events: Sequence[str] = ("handoff.emitted",)

    def __init__(
        self,
        *,
        agents: Sequence[str] | None = None,
        routes: Mapping[str, str] | None = None,
        event_types: Mapping[str, str] | None = None,
        default: str | None = None,
        max_hops: int = 32,
        rule: Callable[[Event], str | None] | None = None,
    ) -> None:
        self.agents = None if agents is None else frozenset(_names("agents", agents))
        self.routes = dict(routes or {})
        self.event_types = dict(event_types or {})
        self.default = default
        self.max_hops = max_hops
        self.rule = rule
        self.events = tuple(dict.fromkeys((*HandoffRouter.events, *self.event_types)))
        if type(max_hops) is not int or max_hops < 0:
            raise _wrong(f"max_hops is {max_hops!r}: a number of handoffs is wanted, or 0 for no limit")
        if rule is not None and not callable(rule):
            raise _wrong(f"rule is {rule!r}: a function of the event is wanted")
        for option, names in (
            ("routes", self.routes.values()),
            ("event_types", self.event_types.values()),
            ("default", () if default is None else (default,)),
        ):
            for agent in _names(option, tuple(names)):
                if self.agents is not None and agent not in self.agents:
                    raise _wrong(f"{option} leads to {agent!r}, which is not among agents")

    def setup(self, ctx: Context) -> None:
        values = {**_places(ctx), "schema": ctx.settings.namespace}
        cur = ctx.cursor
        cur.execute(_LOOK, values)
        role, there = cur.fetchone() or ("", False)
        if not there:
            raise ConfigError(
                f"{self.name}: the schema {ctx.settings.namespace!r} has not all that a router needs yet",
                hint="run `walstream migrate` with this release",
            )
        cur.execute(_MAY, values)
        if cur.fetchone() != (True,):
            raise ConfigError(
                f"{self.name}: {role} may not read jobs, submit one, or write dead letters",
                hint=f"as their owner: walstream init --grants {role}",
            )

    def project(self, events: Sequence[Event], ctx: Context) -> None:
        if ctx.rebuilding:
            return
        for event in events:
            self.route(event, ctx)

    def route(self, event: Event, ctx: Context, *, to: str | None = None) -> Routed:
        """Route one event in the transaction of ``ctx``: a job, a dead letter, or nothing if it has a job already.

        Args:
            to: the agent that a person chose. No rule is asked then, and the chain's hops are counted anew.

        Raises:
            psycopg2.Error: of a statement; the transaction is then only good for a rollback.
        """
        statements = _Statements(ctx)
        job_id, hops = statements.standing(event)
        if job_id is not None:
            # Routed before, maybe by other rules, and maybe finished long ago: nothing about it is decided anew.
            return Routed(event.seq, job_id=job_id)
        try:
            agent = self.agent_for(event) if to is None else agent_name(to)
            payload = _payload(event)
            hops = 1 if to is not None else max(hops or 0, _hops(payload)) + 1
            if self.max_hops and hops > self.max_hops:
                raise Unroutable(
                    f"it would be handoff {hops} in a row, and {self.max_hops} are allowed: {_shown(agent)} was to get"
                    f" it from {_shown(event.agent_id)}"
                )
            job_id, created = statements.submit(event, _session(payload), agent, hops, _priority(payload))
            if created:
                ctx.notify(Jobs(ctx.settings).channel, agent)  # its workers need not wait for their next look
        except Unroutable as error:
            reason = str(error)
            statements.bury(event, reason)
            ctx.log.warning("handoff seq %d of session %s is a dead letter: %s", event.seq, event.session_id, reason)
            return Routed(event.seq, reason=reason)
        return Routed(event.seq, agent, job_id, created)

    def agent_for(self, event: Event) -> str:
        """Return who gets ``event`` by the rules.

        Raises:
            Unroutable: nobody does.
        """
        if self.rule is not None:
            chosen = self.rule(event)
            if chosen is not None:
                if self.agents is not None and chosen not in self.agents:
                    raise Unroutable(f"the rule sends it to {_shown(chosen)}, which nobody serves")
                return agent_name(chosen)
        target, why = None, "its payload names no agent under 'to', 'target' or 'agent'"
        try:
            target = _target(_payload(event))
        except Unroutable as error:
            why = str(error)
        if target is not None:
            if target in self.routes:
                return self.routes[target]
            if self.agents is None or target in self.agents:
                return target
            why = f"nobody serves the agent {_shown(target)}, and no rule matches"
        fallback = self.event_types.get(event.event_type, self.default)
        if fallback is None:
            raise Unroutable(why)
        return fallback


class _Statements:
    """The router's SQL, in the transaction of a context, under the names of its settings."""

    def __init__(self, ctx: Context) -> None:
        places = _places(ctx)
        self._cursor: Cursor = ctx.cursor
        self._names = {name: value.replace("%", "%%") for name, value in places.items()}

    def standing(self, event: Event) -> tuple[int | None, int | None]:
        """The event's job, and the hops of the job that it was emitted from, as far as there are any."""
        self._execute(_STANDING, {"seq": event.seq, "session": event.session_id})
        row = self._cursor.fetchone()
        assert row is not None
        return row[0], row[1]

    def submit(self, event: Event, session: str | None, agent: str, hops: int, priority: int) -> tuple[int, bool]:
        """Submit the job; return it, and whether it is new.

        Raises:
            Unroutable: the payload named a session, and the ledger can have none of that name.
        """
        values = {
            "seq": event.seq,
            "session": session or event.session_id,
            "agent": agent,
            "hops": hops,
            "priority": priority,
        }
        if session is None:
            self._execute(_SUBMIT, values)
        else:
            self._cursor.execute("SAVEPOINT handoff_router")
            try:
                self._execute(_SUBMIT, values)
            except (psycopg2.DataError, ValueError) as error:  # no uuid; a NUL, which the driver refuses
                self._cursor.execute("ROLLBACK TO SAVEPOINT handoff_router")
                raise Unroutable(
                    f"its payload names the session {_shown(session)}, which is no session's id here"
                ) from error
        row = self._cursor.fetchone()
        assert row is not None
        if session is not None:
            self._cursor.execute("RELEASE SAVEPOINT handoff_router")
        return int(row[0]), bool(row[1])

    def bury(self, event: Event, reason: str) -> None:
        """Write a dead letter. One that is there gets the new reason."""
        self._execute(_BURY, {"seq": event.seq, "session": event.session_id, "reason": reason})

    def _execute(self, template: str, values: Mapping[str, Any]) -> None:
        self._cursor.execute(template.format(**self._names), values)


def _places(ctx: Context) -> dict[str, str]:
    """The tables as SQL names them."""
    ledger = ctx.settings.ledger
    namespace = '"' + ctx.settings.namespace.replace('"', '""') + '"'
    return {
        "namespace": namespace,
        "jobs": ledger.beside(ledger.jobs),
        "letters": f"{namespace}.dead_letters",
        "pruned": f"{namespace}.pruned_jobs",
    }


def _payload(event: Event) -> Mapping[str, Any]:
    """The payload; empty if it is no object.

    Raises:
        Unroutable: it cannot be read. It would never be, so trying again, or parking the session, helps nobody.
    """
    try:
        payload = event.payload
    except PayloadError as error:
        raise Unroutable(f"its payload cannot be read: {error}") from error
    return payload if isinstance(payload, dict) else {}


def _target(payload: Mapping[str, Any]) -> str | None:
    """The agent that a payload names; ``None`` if it names none.

    Raises:
        Unroutable: what it names is no name.
    """
    for member in TARGETS:
        if payload.get(member) is not None:
            return agent_name(payload[member])
    return None


def agent_name(name: Any) -> str:
    """Return ``name`` if it can be an agent's.

    Raises:
        Unroutable: it cannot.
    """
    if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME or not name.isprintable():
        raise Unroutable(f"{_shown(name)} is no agent's name: a text of 1 to {_LONGEST_NAME} printable characters is")
    return name


def _session(payload: Mapping[str, Any]) -> str | None:
    """The session that the payload wants the job to work in; ``None`` for the event's own.

    Raises:
        Unroutable: what it names is no text.
    """
    session = payload.get("session_id")
    if session is None:
        return None
    if not isinstance(session, str) or not session:
        raise Unroutable(f"its payload names the session {_shown(session)}, which is no text")
    return session


def _hops(payload: Mapping[str, Any]) -> int:
    """How many handoffs came before this one, as far as the payload says so."""
    hops = payload.get("hops")
    return min(hops, 2**31 - 2) if type(hops) is int and hops > 0 else 0


def _priority(payload: Mapping[str, Any]) -> int:
    """How urgent the payload says that it is; as urgent as anything, 0, if it says nothing, or no whole number."""
    priority = payload.get("priority")
    return max(-(2**31), min(priority, 2**31 - 1)) if type(priority) is int else 0


def _shown(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def _names(option: str, names: Sequence[str]) -> Sequence[str]:
    if isinstance(names, str):
        raise _wrong(f"{option} is the text {names!r}: a list of names is wanted")
    for name in names:
        try:
            agent_name(name)
        except Unroutable as error:
            raise _wrong(f"{option}: {error}") from error
    return names


def _wrong(text: str) -> ConfigError:
    return ConfigError(
        f"handoff-router: {text}", hint="correct [projectors.handoff-router.options], or the arguments in your program"
    )
