"""The oracle of a chaos run: SQL over the ledger, compared with all that the projectors left behind."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from walstream.order.segment import decode_body

from .cast import AGENT, POISON
from .oracle import Query

_LINE: Final = re.compile(r"(\d+) (\d+) (\S+) (\S+) ([01]) \.")
TABLES: Final = ("plain", "laned", "far", "poisoned")
FILES: Final = ("external", "slow")
PROJECTORS: Final = 10  # those, the file with its own end, router, snapshots, and the audit trail

# What each handoff to the workers has to have exactly one of: kind of complaint, where, and how many there are.
_HANDOFFS: Final = (
    ("doubled", "jobs of handoffs", "SELECT event_seq, count(*) FROM agent_jobs GROUP BY 1"),
    (
        "lost",
        "completed jobs of handoffs",
        "SELECT event_seq, count(*) FROM agent_jobs WHERE status = 'COMPLETED' GROUP BY 1",
    ),
    (
        "doubled",
        "completions of handoffs",
        "SELECT j.event_seq, count(*) FROM turns JOIN agent_jobs AS j USING (job_id) GROUP BY 1",
    ),
    (
        "doubled",
        "results of handoffs",
        "SELECT j.event_seq, count(*) FROM agent_events AS r JOIN agent_jobs AS j"
        " ON (r.payload ->> 'job')::bigint = j.job_id WHERE r.event_type = 'task.completed' GROUP BY 1",
    ),
)
_NOT_ONE: Final = (
    "SELECT h.seq FROM agent_events AS h LEFT JOIN ({}) AS c (seq, times) USING (seq)"
    " WHERE h.event_type = 'handoff.emitted' AND h.payload ->> 'to' = %s AND c.times IS DISTINCT FROM 1 ORDER BY 1"
)


@dataclass(slots=True)
class Delivered:
    """One delivery, or one place of the order."""

    offset: int
    seq: int
    session: str
    recovered: bool
    key: str = ""


@dataclass(slots=True)
class Verdict:
    """Counts over all projectors, and a sentence for each thing that is wrong."""

    events: int = 0
    lost: int = 0
    doubled: int = 0
    out_of_order: int = 0
    dense: bool = True
    recovered: int = 0
    redelivered: int = 0
    parked: int = 0
    findings: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return self.dense and not (self.lost or self.doubled or self.out_of_order or self.findings)

    def complain(self, kind: str, where: str, what: list[Any]) -> None:
        """Count what is wrong somewhere, and name the first of it."""
        if what:
            setattr(self, kind, getattr(self, kind) + len(what))
            shown = ", ".join(map(str, what[:5]))
            self.findings.append(f"{where}: {kind.replace('_', ' ')}: {len(what)}, such as {shown}")


class Ledger:
    """What is true.

    Attributes:
        sessions: the session of each committed seq.
        order: the places of the order, by offset.
    """

    def __init__(self, query: Query) -> None:
        self.query = query
        self.sessions: dict[int, str] = dict(query("SELECT seq, session_id::text FROM agent_events"))
        self.order: list[Delivered] = []
        self.gaps: list[int] = []
        for first, events, last_lsn, partial, recovered, generation, body in query(
            "SELECT first_offset, events, last_lsn - '0/0', partial_inserts, recovered, generation, body"
            " FROM walstream.commit_order ORDER BY first_offset"
        ):
            if first != len(self.order) + 1:
                self.gaps.append(first)
            segment = decode_body(
                bytes(body),
                first_offset=first,
                events=events,
                last_lsn=int(last_lsn),
                partial_inserts=partial,
                recovered=recovered,
                generation=generation,
            )
            for seq in segment.seqs:
                self.order.append(Delivered(len(self.order) + 1, seq, self.sessions.get(seq, ""), recovered))


def judge(query: Query, folder: Path, appended: set[str]) -> Verdict:
    """Compare everything with the ledger.

    Args:
        folder: where external projectors wrote.
        appended: keys under which the ledger has to hold an event, once.
    """
    ledger = Ledger(query)
    verdict = Verdict(events=len(ledger.sessions))
    _order(ledger, verdict)
    for table in TABLES:
        rows = query(f"SELECT event_offset, seq, session_id, recovered FROM {table} ORDER BY id")
        exactly_once(ledger, verdict, table, [Delivered(*row) for row in rows])
    for name in FILES:
        _at_least_once(ledger, verdict, name, lines(folder / name))
    _own_end(ledger, verdict, folder / "events.jsonl")
    keys: dict[str, int] = dict(query("SELECT key, seq FROM walstream.append_keys WHERE key LIKE 'chaos-%%'"))
    verdict.complain("lost", "keys of append", sorted(appended - set(keys)))
    verdict.complain("lost", "events of keys", [key for key, seq in keys.items() if seq not in ledger.sessions])
    for kind, where, times in _HANDOFFS:
        verdict.complain(kind, where, [seq for (seq,) in query(_NOT_ONE.format(times), AGENT)])
    # That the publication was touched is on record because it was.
    violations = query("SELECT kind, seq, detail FROM walstream.violations WHERE kind <> 'publication' LIMIT 5")
    if violations:
        verdict.findings.append(f"violations are recorded although nobody changed a row: {violations}")
    return verdict


def _order(ledger: Ledger, verdict: Verdict) -> None:
    times = Counter(place.seq for place in ledger.order)
    verdict.dense = not ledger.gaps
    verdict.complain("out_of_order", "segments that do not follow", ledger.gaps)
    verdict.recovered = sum(place.recovered for place in ledger.order)
    verdict.complain("lost", "the order: rows without an offset", sorted(set(ledger.sessions) - set(times)))
    verdict.complain("doubled", "the order", [seq for seq, count in times.items() if count > 1])
    verdict.complain("out_of_order", "the order: sessions", _backwards(ledger.order))


def exactly_once(ledger: Ledger, verdict: Verdict, where: str, got: list[Delivered]) -> None:
    """Count what is wrong with deliveries that have to be one an event, in order."""
    times = Counter(each.seq for each in got)
    verdict.complain("lost", where, sorted(set(ledger.sessions) - set(times)))
    verdict.complain("doubled", where, [seq for seq, count in times.items() if count > 1])
    verdict.complain("out_of_order", where, _misplaced(ledger, got) + _backwards(got))
    if where not in ("laned", "poisoned"):  # which keep the order within a session only
        verdict.complain("out_of_order", f"{where}: offsets", _falling([each.offset for each in got]))


def _at_least_once(ledger: Ledger, verdict: Verdict, where: str, got: list[Delivered]) -> None:
    keys: dict[int, str] = {}
    verdict.complain("lost", where, sorted(set(ledger.sessions) - {each.seq for each in got}))
    verdict.complain(
        "doubled",
        f"{where}: keys of one event",
        [each.seq for each in got if keys.setdefault(each.seq, each.key) != each.key],
    )
    first: dict[int, Delivered] = {}
    for each in got:
        first.setdefault(each.offset, each)
    verdict.redelivered += len(got) - len(first)
    verdict.complain("out_of_order", where, _misplaced(ledger, got) + _backwards(list(first.values())))
    verdict.complain("out_of_order", f"{where}: offsets", _falling(list(first)))


def _own_end(ledger: Ledger, verdict: Verdict, path: Path) -> None:
    got = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        event = json.loads(line)
        got.append(Delivered(event["offset"], event["seq"], event["session_id"], event["recovered"]))
    exactly_once(ledger, verdict, path.name, got)


def lines(path: Path) -> list[Delivered]:
    """What an external projector wrote, without lines that a kill tore."""
    found = []
    for line in path.read_text().split("\n") if path.exists() else ():
        whole = _LINE.fullmatch(line)
        if whole is not None:
            found.append(Delivered(int(whole[1]), int(whole[2]), whole[3], whole[5] == "1", whole[4]))
    return found


def _misplaced(ledger: Ledger, got: list[Delivered]) -> list[int]:
    """Seqs that were delivered under an offset, or as a session's, that is not theirs."""
    order = ledger.order
    return [
        each.seq
        for each in got
        if not 0 < each.offset <= len(order)
        or (order[each.offset - 1].seq, order[each.offset - 1].recovered) != (each.seq, each.recovered)
        or ledger.sessions.get(each.seq) != each.session
    ]


def _backwards(got: list[Delivered]) -> list[int]:
    """Seqs that come after a later one of their session, unless the slot never delivered them.

    (Each session of the load is written by one writer, or through ``append``; so it commits in the order of seq.)
    """
    latest: dict[str, int] = {}
    found = []
    for each in got:
        if each.recovered:
            continue
        if each.seq < latest.get(each.session, -1):
            found.append(each.seq)
        latest[each.session] = max(each.seq, latest.get(each.session, -1))
    return found


def _falling(offsets: list[int]) -> list[int]:
    return [two for one, two in pairwise(offsets) if two <= one]


def parked_as_it_should(query: Query) -> list[str]:
    """While the poison is not stomached: whose events are parked, and which are not. Sentences of what is wrong."""
    poisoned: dict[str, int] = dict(
        query("SELECT session_id::text, min(seq) FROM agent_events WHERE event_type = %s GROUP BY 1", POISON)
    )
    parked = {session for (session,) in query("SELECT DISTINCT session_id FROM walstream.parked")}
    found = []
    if parked != set(poisoned):
        found.append(f"parked sessions: {len(parked)}, and those with poison: {len(poisoned)}")
    others = query("SELECT DISTINCT projector FROM walstream.parked WHERE projector <> 'poisoned'")
    if others:
        found.append(f"projectors that have no trouble parked events: {others}")
    early = query(
        "SELECT p.seq FROM poisoned AS p JOIN agent_events AS e USING (seq) JOIN (SELECT session_id, min(seq) AS bad"
        " FROM agent_events WHERE event_type = %s GROUP BY 1) AS b ON b.session_id = e.session_id AND p.seq >= b.bad",
        POISON,
    )
    if early:
        found.append(f"events that came before the poison of their session was stomached: {early[:5]}")
    return found
