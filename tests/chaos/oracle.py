"""What is true, computed with SQL over the ledger: lost, doubled, out of order, not dense."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from walstream.order.segment import decode_body

Query = Callable[..., list[tuple[Any, ...]]]


@dataclass(frozen=True)
class Verdict:
    """Counts that all have to be 0, and how many events there were."""

    events: int
    not_ordered: int  # committed rows without an offset
    ordered_twice: int
    not_dense: int  # segments that do not begin where the one before ended
    lost: int  # committed rows that the transactional projector never saw
    doubled: int
    out_of_order: int
    keys_missing: int  # committed rows whose key the external projector never sent

    @property
    def clean(self) -> bool:
        return not any(
            (
                self.not_ordered,
                self.ordered_twice,
                self.not_dense,
                self.lost,
                self.doubled,
                self.out_of_order,
                self.keys_missing,
            )
        )


def judge(query: Query, *, namespace: str = "walstream", key_file: Path | None = None) -> Verdict:
    """Compare the ledger with the order, the table ``seen`` and the file of keys."""
    ledger = {seq for (seq,) in query("SELECT seq FROM agent_events")}
    ordered: list[int] = []
    not_dense = 0
    for first, events, last_lsn, partial, recovered, generation, body in query(
        "SELECT first_offset, events, last_lsn - '0/0', partial_inserts, recovered, generation, body"
        f" FROM {namespace}.commit_order ORDER BY first_offset"
    ):
        if first != len(ordered) + 1:
            not_dense += 1
        ordered += decode_body(
            bytes(body),
            first_offset=first,
            events=events,
            last_lsn=int(last_lsn),
            partial_inserts=partial,
            recovered=recovered,
            generation=generation,
        ).seqs
    seen = query("SELECT event_offset, seq, session_id FROM seen ORDER BY id")
    times = Counter(seq for _, seq, _ in seen)
    by_offset = dict(enumerate(ordered, 1))
    keys_missing = 0
    if key_file is not None:
        sent = {int(line.rsplit(":", 1)[1]) for line in key_file.read_text().splitlines() if ":" in line}
        keys_missing = len(ledger - sent)
    return Verdict(
        events=len(ledger),
        not_ordered=len(ledger - set(ordered)),
        ordered_twice=len(ordered) - len(set(ordered)),
        not_dense=not_dense,
        lost=len(ledger - set(times)),
        doubled=sum(1 for count in times.values() if count > 1),
        out_of_order=sum(1 for one, two in pairwise(seen) if two[0] <= one[0])
        + sum(1 for offset, seq, _ in seen if by_offset.get(offset) != seq),
        keys_missing=keys_missing,
    )


def settle(query: Query, *, timeout: float = 60, key_file: Path | None = None) -> Verdict:
    """Wait until everything is delivered, or for ``timeout`` seconds; then judge."""
    deadline = time.monotonic() + timeout
    while True:
        verdict = None
        if query("SELECT to_regclass('seen')") == [(None,)]:
            assert time.monotonic() < deadline, "the consumer never began"
            time.sleep(0.1)
            continue
        counts = query("SELECT (SELECT count(*) FROM agent_events), (SELECT count(*) FROM seen)")[0]
        if counts[1] >= counts[0]:
            verdict = judge(query, key_file=key_file)
            if verdict.clean:
                return verdict
        if time.monotonic() > deadline:
            return verdict or judge(query, key_file=key_file)
        time.sleep(0.1)
