"""A straightforward fold of SQL's rows in order: what every rebuild has to come to."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg2.extensions
from psycopg2.extensions import connection as Connection

from walstream.config import Settings, quote
from walstream.event import parse_payload
from walstream.ledger.canonical import canonical
from walstream.ledger.fold import BUILTIN, Context, Fold, FoldEvent
from walstream.ledger.rebuild import context_at
from walstream.ledger.snapshots import SnapshotTable


class Oracle:
    """All rows of the ledger at one moment.

    Args:
        conn: where they are read.
    """

    def __init__(self, conn: Connection, settings: Settings, fold: Fold = BUILTIN) -> None:
        self._fold = fold
        self._rows: dict[str, list[FoldEvent]] = {}
        self._messages: dict[tuple[str, str], object] = {}
        seq, session_id, agent_id, event_type, payload, _ = map(quote, settings.ledger.columns.names())
        with conn.cursor(cursor_factory=psycopg2.extensions.cursor) as cur:
            cur.execute(
                f"SELECT {seq}, {session_id}::text, {agent_id}, {event_type},"
                f" {payload}::text FROM {settings.ledger.qualified} ORDER BY {seq}"
            )
            for seq, session, agent, event_type, payload in cur.fetchall():
                self._rows.setdefault(session, []).append(FoldEvent(seq, session, agent, event_type, payload.encode()))
            cur.execute(
                f"SELECT session_id::text, encode(digest, 'hex'), message::text FROM {settings.namespace}.messages"
            )
            for session, digest, message in cur.fetchall():
                self._messages[session, digest] = parse_payload(message.encode())

    @property
    def sessions(self) -> list[str]:
        return sorted(self._rows)

    def seqs(self, session: str) -> list[int]:
        return [event.seq for event in self._rows.get(session, [])]

    def contexts(self, session: str, upto: int | None = None) -> Iterator[tuple[int, bytes]]:
        """The canonical context at each seq."""
        context = self._fold.empty()
        for event in self._rows.get(session, []):
            if upto is not None and event.seq > upto:
                return
            self._fold.apply(context, self._expanded(event))
            yield event.seq, canonical(context)

    def context(self, session: str, upto: int | None = None) -> Context:
        context = self._fold.empty()
        for event in self._rows.get(session, []):
            if upto is None or event.seq <= upto:
                self._fold.apply(context, self._expanded(event))
        return context

    def _expanded(self, event: FoldEvent) -> FoldEvent:
        if event.event_type == "session.forked":
            parent = self.context(event.payload["parent_session"], event.payload["at_seq"])
            return event.with_payload({**event.payload, "context": parent})
        if event.event_type == "context.loaded" and "message_digests" in event.payload:
            payload = dict(event.payload)
            digests = payload.pop("message_digests")
            payload["messages"] = [self._messages[event.session_id, digest] for digest in digests]
            return event.with_payload(payload)
        return event


def check(conn: Connection, settings: Settings, fold: Fold = BUILTIN, *, every: int = 1) -> int:
    """Compare rebuilds of all sessions with the oracle: from zero, from the newest snapshot, and from each single one,
    at every seq (or every so many); return how many were from a snapshot.
    """
    oracle = Oracle(conn, settings, fold)
    table = SnapshotTable(settings, fold.version)
    from_snapshots = 0
    for session in oracle.sessions:
        expected = dict(oracle.contexts(session))
        seqs = list(expected)
        for place, seq in enumerate(seqs):
            if place % every and place < len(seqs) - 2:
                continue
            zero = context_at(conn, settings, fold, session, seq)
            assert canonical(zero) == expected[seq], (session, seq, "from zero")
            newest = context_at(conn, settings, fold, session, seq, snapshots=table)
            assert canonical(newest) == expected[seq], (session, seq, "from the newest")
        with conn.cursor(cursor_factory=psycopg2.extensions.cursor) as cur:
            for snapshot in list(table.usable(cur, session)):
                with table.rows_after(conn, session, snapshot, None) as rows:
                    if rows is None:
                        continue
                    context = snapshot.context
                    assert canonical(context) == expected[snapshot.upto_seq], (session, snapshot.upto_seq, "itself")
                    for event in rows:
                        fold.apply(context, oracle._expanded(event))
                        assert canonical(context) == expected[event.seq], (session, snapshot.upto_seq, event.seq)
                    from_snapshots += 1
        assert canonical(context_at(conn, settings, fold, session, None, snapshots=table)) == expected[seqs[-1]]
    return from_snapshots
