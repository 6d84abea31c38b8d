"""Scenarios in which the stream speaks of transactions before they commit: two-phase commit, and blocks."""

from __future__ import annotations

from .scenario import AGENT_EVENTS, LEDGER, READ, SESSION, SHAPE, Scenario, event, said, tx

BLOCKS = ("SET logical_decoding_work_mem = '64kB'",)


def many(first: int, count: int, kind: str) -> str:
    return (
        f"INSERT INTO agent_events SELECT g, '{SESSION}', 'planner', '{kind}',"
        " jsonb_build_object('k', repeat('x', 60)),"
        f" '2024-02-03 04:05:06+00' FROM generate_series({first}, {first + count - 1}) g"
    )


OPEN: tuple[Scenario, ...] = (
    Scenario(
        "prepared, ordinary slot",
        LEDGER,
        (
            f"BEGIN; {event(1, 'prep')}; PREPARE TRANSACTION 'walstream golden'",
            event(2, "later"),
            READ,
            "COMMIT PREPARED 'walstream golden'",
        ),
        (*tx(SHAPE, f"I agent_events {said(2, 'later')}"), *tx(SHAPE, f"I agent_events {said(1, 'prep')}")),
    ),
    Scenario(
        "prepared, slot with two_phase, protocol 1",
        LEDGER,
        (
            f"BEGIN; {event(1, 'prep')}; PREPARE TRANSACTION 'walstream golden'",
            READ,
            "COMMIT PREPARED 'walstream golden'",
            READ,
            f"BEGIN; {event(2, 'rb')}; PREPARE TRANSACTION 'walstream golden'",
            READ,
            "ROLLBACK PREPARED 'walstream golden'",
        ),
        (
            "b walstream golden",
            SHAPE,
            f"I agent_events {said(1, 'prep')}",
            "P walstream golden",
            "K walstream golden",
            "b walstream golden",
            SHAPE,
            f"I agent_events {said(2, 'rb')}",
            "P walstream golden",
            "r walstream golden",
        ),
        since=15,
        two_phase=True,
    ),
    Scenario(
        "two-phase, protocol 3",
        LEDGER,
        (
            f"BEGIN; {event(1, 'prep')}; PREPARE TRANSACTION 'walstream golden'",
            "COMMIT PREPARED 'walstream golden'",
            f"BEGIN; {event(2, 'rb')}; PREPARE TRANSACTION 'walstream golden'",
            "ROLLBACK PREPARED 'walstream golden'",
        ),
        letters="bRIPK(bIPr)?",
        options={"proto_version": "3", "two_phase": "on"},
        since=15,
        two_phase=True,
    ),
    Scenario(
        "blocks",
        (
            AGENT_EVENTS,
            "CREATE TYPE ev AS ENUM ('a', 'b')",
            "CREATE TABLE other (a int PRIMARY KEY, b ev)",
            "CREATE PUBLICATION p FOR TABLE agent_events, other",
        ),
        (
            f"BEGIN; {many(1, 400, 'keep')}; INSERT INTO other VALUES (1, 'a'); UPDATE other SET b = 'b';"
            " DELETE FROM other; SELECT pg_logical_emit_message(true, 'm', 'in a block');"
            f" TRUNCATE other; SAVEPOINT s; {many(601, 400, 'rb')}; ROLLBACK TO s; {event(1001, 'last')}; COMMIT",
            f"BEGIN; {many(2001, 400, 'rb')}; ROLLBACK",
            event(3001, "small"),
        ),
        letters="(SR?(I|Y|R|U|D|M|T)+E)+A(S(R|I)+E)*c(S(R|I)+E)*A?BR?IC",
        options={"proto_version": "2", "streaming": "on", "messages": "on"},
        session=BLOCKS,
    ),
    Scenario(
        "blocks, parallel",
        LEDGER,
        (
            f"BEGIN; {many(1, 400, 'keep')}; SAVEPOINT s; {many(601, 200, 'rb')}; ROLLBACK TO s; COMMIT",
            f"BEGIN; {many(2001, 400, 'rb')}; ROLLBACK",
        ),
        letters="(SR?I+E)+A(SR?I+E)*c(SR?I+E)*A?",
        options={"proto_version": "4", "streaming": "parallel"},
        since=16,
        session=BLOCKS,
    ),
    Scenario(
        "blocks with an origin",
        LEDGER,
        (
            "SELECT pg_replication_origin_create('walstream golden')",
            (1, "SELECT pg_replication_origin_session_setup('walstream golden')"),
            (1, many(1, 400, "keep")),
            (1, "SELECT pg_replication_origin_session_reset()"),
            "SELECT pg_replication_origin_drop('walstream golden')",
        ),
        letters="S.*E.*c",
        options={"proto_version": "2", "streaming": "on"},
        session=BLOCKS,
    ),
    Scenario(
        "blocks, two-phase",
        LEDGER,
        (
            f"BEGIN; {many(1, 400, 'prep')}; PREPARE TRANSACTION 'walstream golden'",
            READ,
            "COMMIT PREPARED 'walstream golden'",
        ),
        letters="(SR?I+E)+pK",
        options={"proto_version": "3", "streaming": "on", "two_phase": "on"},
        since=15,
        two_phase=True,
        session=BLOCKS,
    ),
)
