"""What the golden vectors are captured from. This file: transactions that are sent after their commit."""

from __future__ import annotations

from .scenario import AGENT_EVENTS, LEAF, LEDGER, SESSION, SHAPE, Scenario, event, said, tx
from .scenarios_open import OPEN

_ODD = "größe 漢字 🐘 \u0001"

COMMITTED: tuple[Scenario, ...] = (
    Scenario(
        "times",
        LEDGER,
        (
            event(1, "inf", at="infinity"),
            event(2, "-inf", at="-infinity"),
            event(3, "bc", at="4713-01-01 00:00:00+00 BC"),
            event(4, "era", at="0001-12-31 23:40:28+00 BC"),
            event(5, "far", at="294276-12-31 23:59:59.999999+00"),
            event(6, "now"),
        ),
        (
            *tx(SHAPE, f"I agent_events {said(1, 'inf', at='infinity')}"),
            *tx(f"I agent_events {said(2, '-inf', at='-infinity')}"),
            *tx(f"I agent_events {said(3, 'bc', at='4713-01-01 00:00:00+00 BC')}"),
            *tx(f"I agent_events {said(4, 'era', at='0001-12-31 23:40:28+00 BC')}"),
            *tx(f"I agent_events {said(5, 'far', at='294276-12-31 23:59:59.999999+00')}"),
            *tx(f"I agent_events {said(6, 'now')}"),
        ),
    ),
    Scenario(
        "text",
        LEDGER,
        (
            event(1, _ODD, '{"k": "é\\u2028", "n": 9007199254740993, "d": 1.10}'),
            "INSERT INTO agent_events SELECT g, session_id, agent_id, '', '[]', created_at"
            " FROM agent_events, generate_series(2, 3) g",
        ),
        (
            *tx(SHAPE, "I agent_events " + said(1, _ODD, '{"d": 1.10, "k": "é\u2028", "n": 9007199254740993}')),
            *tx(f"I agent_events {said(2, '', '[]')}", f"I agent_events {said(3, '', '[]')}"),
        ),
    ),
    Scenario(
        "changes",
        (
            AGENT_EVENTS,
            "ALTER TABLE agent_events ALTER payload SET STORAGE EXTERNAL",
            "CREATE TABLE other (a int, b text)",
            "CREATE PUBLICATION p FOR TABLE agent_events, other",
        ),
        (
            event(1, "big", '{"k": "' + "x" * 2100 + '"}'),
            "UPDATE agent_events SET event_type = 'redacted'",
            "UPDATE agent_events SET seq = 2",
            "DELETE FROM agent_events",
            "INSERT INTO other VALUES (1, NULL), (NULL, '')",
            "TRUNCATE agent_events, other",
            "TRUNCATE agent_events RESTART IDENTITY CASCADE",
        ),
        (
            *tx(SHAPE, f"I agent_events {said(1, 'big', '<2109 bytes>')}"),
            *tx(f"U agent_events {said(1, 'redacted', '<unchanged>')}"),
            *tx("U agent_events K(1, NULL, NULL, NULL, NULL, NULL) " + said(2, "redacted", "<unchanged>")),
            *tx("D agent_events K(2, NULL, NULL, NULL, NULL, NULL)"),
            *tx("R public.other d (a, b)", "I other (1, NULL)", "I other (NULL, )"),
            *tx(SHAPE, "R public.other d (a, b)", "T agent_events, other"),
            *tx(SHAPE, "T agent_events cascade restart"),
        ),
    ),
    Scenario(
        "identities",
        (
            'CREATE TABLE "Full" (a int, b text); ALTER TABLE "Full" REPLICA IDENTITY FULL',
            "CREATE TABLE idx (a int, b int NOT NULL UNIQUE); ALTER TABLE idx REPLICA IDENTITY USING INDEX idx_b_key",
            "CREATE TABLE non (a int PRIMARY KEY, b text); ALTER TABLE non REPLICA IDENTITY NOTHING",
            'CREATE PUBLICATION p FOR TABLE "Full", idx, non',
        ),
        (
            'INSERT INTO "Full" VALUES (1, NULL)',
            "UPDATE \"Full\" SET b = 'x'",
            'DELETE FROM "Full"',
            "INSERT INTO idx VALUES (1, 2)",
            "UPDATE idx SET b = 3",
            "DELETE FROM idx",
            "INSERT INTO non VALUES (1, 'n')",
        ),
        (
            *tx("R public.Full f (a*, b*)", "I Full (1, NULL)"),
            *tx("U Full O(1, NULL) (1, x)"),
            *tx("D Full O(1, x)"),
            *tx("R public.idx i (a, b*)", "I idx (1, 2)"),
            *tx("U idx K(NULL, 2) (1, 3)"),
            *tx("D idx K(NULL, 3)"),
            *tx("R public.non n (a, b)", "I non (1, n)"),
        ),
    ),
    Scenario(
        "types and origin",
        (
            AGENT_EVENTS,
            "CREATE TYPE ev AS ENUM ('a', 'b')",
            "CREATE DOMAIN money_ish AS numeric(10, 2)",
            "ALTER TABLE agent_events ADD kind ev, ADD cost money_ish, ADD tags text[]",
            "CREATE PUBLICATION p FOR TABLE agent_events",
        ),
        (
            f"INSERT INTO agent_events VALUES (1, '{SESSION}', 'a', 't', '[]', 'epoch', 'b', 1.5, '{{x,y z,NULL}}')",
            # The second session has committed nothing yet. In one that has, the time of its last commit is sent again.
            "SELECT pg_replication_origin_create('walstream golden')",
            (1, "SELECT pg_replication_origin_session_setup('walstream golden')"),
            (1, f"INSERT INTO agent_events VALUES (2, '{SESSION}', 'a', 't', '[]', 'epoch')"),
            (1, "SELECT pg_replication_origin_session_reset()"),
            "SELECT pg_replication_origin_drop('walstream golden')",
        ),
        (
            *tx(
                "Y public.ev",
                "Y pg_catalog.numeric",
                SHAPE.replace("created_at", "created_at, kind, cost, tags"),
                f'I agent_events (1, {SESSION}, a, t, [], 1970-01-01 00:00:00+00, b, 1.50, {{x,"y z",NULL}})',
            ),
            *tx(
                "O walstream golden",
                f"I agent_events (2, {SESSION}, a, t, [], 1970-01-01 00:00:00+00, NULL, NULL, NULL)",
            ),
        ),
    ),
    Scenario(
        "messages",
        LEDGER,
        (
            "SELECT pg_logical_emit_message(false, 'hb', 'x')",
            "SELECT pg_logical_emit_message(true, 'hb', 'y')",
            "SELECT pg_logical_emit_message(true, '', ''::bytea)",
            event(1, "e"),
        ),
        (
            "M hb=x",
            *tx("M hb=y transactional"),
            *tx("M = transactional"),
            *tx(SHAPE, f"I agent_events {said(1, 'e')}"),
        ),
        options={"proto_version": "1", "messages": "true"},
    ),
    Scenario(
        "messages not asked for",
        LEDGER,
        (
            "SELECT pg_logical_emit_message(false, 'hb', 'x')",
            "SELECT pg_logical_emit_message(true, 'hb', 'y')",
            event(1, "e"),
        ),
        tx(SHAPE, f"I agent_events {said(1, 'e')}"),
    ),
    Scenario(
        "leaves",
        (
            AGENT_EVENTS.replace("seq bigserial PRIMARY KEY", "seq bigserial") + " PARTITION BY RANGE (created_at)",
            "CREATE TABLE leaf PARTITION OF agent_events FOR VALUES FROM ('2024-01-01+00') TO ('2025-01-01+00')",
            "CREATE PUBLICATION p FOR TABLE agent_events",
        ),
        (event(1, "leaf"), "TRUNCATE leaf", "TRUNCATE agent_events"),
        (*tx(LEAF, f"I leaf {said(1, 'leaf')}"), *tx(LEAF, "T leaf"), *tx(LEAF, "T leaf")),
    ),
    Scenario(
        "root",
        (
            AGENT_EVENTS.replace("seq bigserial PRIMARY KEY", "seq bigserial") + " PARTITION BY RANGE (created_at)",
            "CREATE TABLE leaf PARTITION OF agent_events FOR VALUES FROM ('2024-01-01+00') TO ('2025-01-01+00')",
            "CREATE PUBLICATION p FOR TABLE agent_events WITH (publish_via_partition_root = true)",
        ),
        (event(1, "root"), "TRUNCATE leaf", "TRUNCATE agent_events", "ALTER TABLE agent_events DETACH PARTITION leaf"),
        (
            *tx(SHAPE.replace("*", ""), LEAF, f"I agent_events {said(1, 'root')}"),
            *tx(SHAPE.replace("*", ""), "T agent_events"),
        ),
    ),
    Scenario(
        "binary",
        (
            AGENT_EVENTS,
            "ALTER TABLE agent_events ADD note json, ADD acl aclitem",
            "CREATE PUBLICATION p FOR TABLE agent_events",
        ),
        (
            f"INSERT INTO agent_events VALUES (7, '{SESSION}', 'a', 't', '{{}}', '2000-01-01 00:00:01+00', '{{}}',"
            " 'postgres=r/postgres')",
        ),
        tx(
            SHAPE.replace("created_at", "created_at, note, acl"),
            "I agent_events (b:0000000000000007, b:11111111222233334444555555555555, b:61, b:74, b:017b7d,"
            " b:00000000000f4240, b:7b7d, postgres=r/postgres)",
        ),
        options={"proto_version": "1", "binary": "true"},
    ),
    Scenario(
        "new shapes",
        LEDGER,
        (
            event(1, "one"),
            "ALTER TABLE agent_events ADD trace_id text DEFAULT 'd'",
            event(2, "two"),
            "ALTER TABLE agent_events RENAME payload TO body",
            event(3, "three"),
            "ALTER TABLE agent_events ALTER event_type TYPE varchar(40)",
            event(4, "four"),
            "ALTER TABLE agent_events DROP trace_id",
            event(5, "five"),
            "ALTER TABLE agent_events RENAME TO agent_events_old",
            event(6, "six").replace("agent_events", "agent_events_old"),
        ),
        (
            *tx(SHAPE, f"I agent_events {said(1, 'one')}"),
            *tx(SHAPE.replace("created_at", "created_at, trace_id"), f"I agent_events {said(2, 'two')[:-1]}, d)"),
            *tx(
                SHAPE.replace("created_at", "created_at, trace_id").replace("payload", "body"),
                f"I agent_events {said(3, 'three')[:-1]}, d)",
            ),
            *tx(
                SHAPE.replace("created_at", "created_at, trace_id")
                .replace("payload", "body")
                .replace("event_type", "event_type[44]"),
                f"I agent_events {said(4, 'four')[:-1]}, d)",
            ),
            *tx(
                SHAPE.replace("payload", "body").replace("event_type", "event_type[44]"),
                f"I agent_events {said(5, 'five')}",
            ),
            *tx(
                SHAPE.replace("payload", "body")
                .replace("event_type", "event_type[44]")
                .replace("agent_events", "agent_events_old"),
                f"I agent_events_old {said(6, 'six')}",
            ),
        ),
    ),
    Scenario(
        "savepoints",
        LEDGER,
        (
            f"BEGIN; {event(1, 'keep')}; SAVEPOINT s; {event(2, 'rb')}; ROLLBACK TO s; {event(3, 'keep')}; COMMIT",
            f"BEGIN; {event(4, 'rb')}; ROLLBACK",
            event(5, "after"),
        ),
        (
            *tx(SHAPE, f"I agent_events {said(1, 'keep')}", f"I agent_events {said(3, 'keep')}"),
            *tx(f"I agent_events {said(5, 'after')}"),
        ),
    ),
    Scenario(
        "commit order",
        LEDGER,
        ((1, "BEGIN"), (1, event(1, "early")), event(2, "mid"), event(3, "mid"), (1, event(4, "late")), (1, "COMMIT")),
        (
            *tx(SHAPE, f"I agent_events {said(2, 'mid')}"),
            *tx(f"I agent_events {said(3, 'mid')}"),
            *tx(f"I agent_events {said(1, 'early')}", f"I agent_events {said(4, 'late')}"),
        ),
    ),
    Scenario(
        "column list",
        (AGENT_EVENTS, "CREATE PUBLICATION p FOR TABLE agent_events (seq, payload)"),
        (event(1, "e"),),
        tx("R public.agent_events d (seq*, payload)", "I agent_events (1, {})"),
        since=15,
    ),
    Scenario(
        "generated column",
        (
            AGENT_EVENTS,
            "ALTER TABLE agent_events ADD size int GENERATED ALWAYS AS (length(agent_id)) STORED",
            "CREATE PUBLICATION p FOR TABLE agent_events WITH (publish_generated_columns = stored)",
        ),
        (
            event(1, "e").replace(
                "INTO agent_events", "INTO agent_events (seq, session_id, agent_id, event_type, payload, created_at)"
            ),
        ),
        tx(SHAPE.replace("created_at", "created_at, size"), f"I agent_events {said(1, 'e')[:-1]}, 7)"),
        since=18,
    ),
    Scenario(
        "LATIN1",
        (
            'CREATE SCHEMA "Mañana"',
            'CREATE TABLE "Mañana"."façade" ("clé" text)',
            'CREATE PUBLICATION p FOR TABLE "Mañana"."façade"',
        ),
        ('INSERT INTO "Mañana"."façade" VALUES (\'café\')',),
        tx("R Mañana.façade d (clé)", "I façade (café)"),
        create="ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0",
    ),
    Scenario(
        "nothing of ours",
        (AGENT_EVENTS, "CREATE TABLE other (a int)", "CREATE PUBLICATION p FOR TABLE agent_events"),
        ("INSERT INTO other VALUES (1)", event(1, "e")),
        tx(SHAPE, f"I agent_events {said(1, 'e')}"),
    ),
)

SCENARIOS = COMMITTED + OPEN
