"""`walstream run` under a login that has REPLICATION and the documented grants, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from psycopg2.extensions import make_dsn

from tests.cli_calls import call, ok
from tests.conftest import Database, Server
from tests.integration.streams import Installed, Recorder, eventually
from walstream import Context, Event, Projector
from walstream.order.compaction import Compactor
from walstream.source.connection import connect


class Counter(Projector):
    """Counts in a table of its own, which was granted to the login."""

    name = "counter"
    transactional = True

    def project(self, events: Sequence[Event], ctx: Context) -> None:
        ctx.cursor.execute("UPDATE public.counts SET n = n + %s", (len(events),))


class Failing(Projector):
    """Cannot project one type, so that its session is parked."""

    name = "failing"
    max_attempts = 1

    def project(self, events: Sequence[Event], ctx: Context) -> None:
        del ctx
        if any(event.event_type == "bad" for event in events):
            raise ValueError("this one is bad")


@pytest.fixture
def login(database: Database, server: Server) -> Iterator[str]:
    name = f"walstream_{database.name[-8:]}"
    server.execute(f"CREATE ROLE {name} LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE REPLICATION PASSWORD 'irrelevant'")
    yield name
    database.execute(f"DROP OWNED BY {name}")
    server.execute(f"DROP ROLE {name}")


def test_everything_that_run_does_works_with_the_grants(database: Database, login: str) -> None:
    stream = Installed(database, "--grants", login)
    database.execute("CREATE TABLE public.counts (n bigint); INSERT INTO public.counts VALUES (0)")
    database.execute(f"GRANT SELECT, UPDATE ON public.counts TO {login}")
    dsn = make_dsn(database.dsn, user=login, password="irrelevant")
    assert ok("doctor", "--slot", stream.settings.slot, "--json", dsn=dsn).json["ok"]

    recorder = Recorder()
    with stream.host(Counter(), recorder, Failing(), dsn=dsn):
        stream.insert("good", "bad", *["good"] * 40)
        stream.wait_ordered()
        eventually(lambda: database.execute("SELECT n FROM public.counts") == [(42,)], "the counter has them all")
        eventually(lambda: database.execute("SELECT 1 FROM walstream.parked"), "the bad one is parked")
        # A seq that comes twice is a violation.
        database.execute("DELETE FROM agent_events WHERE seq = 1; INSERT INTO walstream.erasures VALUES (1, 1, 'test')")
        database.execute(
            "INSERT INTO agent_events (seq, session_id, agent_id, event_type, payload)"
            " VALUES (1, gen_random_uuid(), 'a', 'again', '{}')"
        )
        eventually(lambda: database.execute("SELECT 1 FROM walstream.violations"), "the violation is recorded")
        status = call("status", "--json", dsn=dsn)
        assert (status.exit_code, status.json["problems"]) == (0, [])

    # A run merges small segments once there are 64 of them: no need to wait for so many.
    conn = connect(dsn, application_name="test")
    generation = database.execute("SELECT generation FROM walstream.generation")[0][0]
    assert Compactor(conn, "walstream", generation, min_run=2).run() > 0
    conn.close()

    # Rows that the slot missed are recovered, and a restart goes on where it stood.
    stream.insert("missed")
    database.execute("SELECT pg_replication_slot_advance(%s, pg_current_wal_lsn())", stream.settings.slot)
    with stream.host(Counter(), Failing(), dsn=dsn):
        stream.insert("seen")
        stream.wait_ordered()
        eventually(lambda: database.execute("SELECT n FROM public.counts") == [(44,)], "the counter has them all")
        ok("parked", "discard", "failing", "2", "--yes", dsn=dsn)
        ok("projectors", "pause", "failing", dsn=dsn)


def test_a_login_without_one_of_the_grants_is_told_which(database: Database, login: str) -> None:
    stream = Installed(database, "--grants", login)
    database.execute(f"REVOKE UPDATE ON walstream.generation FROM {login}")
    dsn = make_dsn(database.dsn, user=login, password="irrelevant")
    called = call("doctor", "--slot", stream.settings.slot, "--json", dsn=dsn)
    (grants,) = [check for check in called.json["checks"] if check["check"] == "grants"]
    assert 'UPDATE on "walstream".generation' in grants["found"]
