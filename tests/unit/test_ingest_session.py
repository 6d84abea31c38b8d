"""The reading side of a session against a scripted stream: what is confirmed and when, back-pressure, liveness."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import ClassVar

import pytest

from tests.integration.streams import eventually
from walstream.config import Columns, Settings
from walstream.engine import liveness
from walstream.engine.ingest import IngestSession
from walstream.engine.intake import Burst, Intake, Resume
from walstream.engine.liveness import Look
from walstream.engine.orderer import Orderer
from walstream.errors import ConnectionLost, Fenced
from walstream.source.facts import WalsenderProgress
from walstream.testing import wire
from walstream.testing.scripted import ScriptedStream


class ScriptedOrderer(Orderer):
    """Orders when the test says so."""

    def __init__(self) -> None:
        self.confirmable = deque()
        self.error = None
        self.submitted: list[Burst] = []
        self.room = True
        self.busy = 0
        self.changed = threading.Event()

    def start(self) -> None: ...

    def stop(self, timeout: float) -> bool:
        return timeout > 0

    def submit(self, burst: object) -> None:
        assert isinstance(burst, Burst)
        self.submitted.append(burst)
        self.busy += 1

    @property
    def has_room(self) -> bool:
        return self.room

    @property
    def idle(self) -> bool:
        return self.busy == 0 and not self.confirmable

    def wait_for_room(self, timeout: float) -> None:
        self.changed.wait(timeout)

    def drain(self, timeout: float) -> bool:
        del timeout
        return True


class Bench:
    def __init__(self, settings: Settings, run: Callable[[IngestSession], None]) -> None:
        self.stream = ScriptedStream()
        self.orderer = ScriptedOrderer()
        self.canaries = 0
        self.walsender: WalsenderProgress | None = WalsenderProgress((0, "", ""), waits=False)
        self.flushed = 1_000_000
        intake = Intake(Columns(), lambda _: True, key_prefix="l:1", resume=Resume(), chunk_bytes=1 << 20)
        self.session = IngestSession(settings, self.stream, intake, self.orderer, self._canary)
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, args=(run,), daemon=True)
        self.thread.start()

    def _canary(self) -> Look | None:
        self.canaries += 1
        return Look(100 * self.canaries, self.flushed, self.walsender)

    def _run(self, run: Callable[[IngestSession], None]) -> None:
        try:
            run(self.session)
        except BaseException as error:
            self.error = error

    def transaction(self, lsn: int, seq: int) -> None:
        self.stream.feed(
            (wire.begin(lsn), lsn), (wire.relation(), 0), (wire.event(seq), lsn), (wire.commit(lsn, lsn + 30), lsn + 30)
        )


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(liveness, "LOOK_SECONDS", 0.3)
    made = Bench(Settings(liveness_seconds=1, drain_seconds=0), IngestSession.run)
    yield made
    made.session.stop()
    made.thread.join(60)
    assert not made.thread.is_alive()


def test_a_commit_is_confirmed_only_when_the_stream_has_passed_its_order(bench: Bench) -> None:
    """Rule 3: the order row of the commit at 130 lies before WAL position 500."""
    bench.transaction(100, 1)
    eventually(lambda: bench.orderer.submitted, "it is received")
    bench.orderer.confirmable.append((500, 130))
    bench.orderer.busy = 0
    bench.stream.keepalive(499)
    before = bench.stream.feedbacks
    eventually(lambda: bench.stream.feedbacks > before + 2, "a few turns")
    assert bench.stream.confirmed == 0
    bench.stream.keepalive(500)
    eventually(lambda: bench.stream.confirmed == 130, "the commit is confirmed")


def test_an_idle_position_is_confirmed_only_after_it_was_written_down(bench: Bench) -> None:
    """Rule 10."""
    bench.stream.keepalive(900)
    eventually(lambda: bench.session.idle_position == 900, "it is offered to be written down")
    assert bench.stream.confirmed == 0
    bench.session.persisted = 900, 950
    before = bench.stream.feedbacks
    eventually(lambda: bench.stream.feedbacks > before + 2, "a few turns")
    assert bench.stream.confirmed == 0, "what was written may be lost with the server until the stream has passed it"
    bench.stream.keepalive(950)
    eventually(lambda: bench.stream.confirmed == 900, "it is confirmed")


def test_nothing_idle_is_offered_while_something_is_outstanding(bench: Bench) -> None:
    bench.transaction(100, 1)
    eventually(lambda: bench.orderer.submitted, "it is received")
    bench.stream.keepalive(900)
    before = bench.stream.feedbacks
    eventually(lambda: bench.stream.feedbacks > before + 2, "a few turns")
    assert bench.session.idle_position < 130
    bench.orderer.busy = 0
    bench.stream.wakeup()
    eventually(lambda: bench.session.idle_position == 900, "now it is")
    bench.stream.feed((wire.begin(1000), 1000))
    eventually(lambda: bench.session.handed_over == 900, "a transaction begins")
    bench.stream.keepalive(1100)
    before = bench.stream.feedbacks
    eventually(lambda: bench.stream.feedbacks > before + 2, "a few turns")
    assert bench.session.idle_position == 900, "not in the middle of a transaction"


def test_without_room_it_reads_no_more_and_goes_on_with_feedback(bench: Bench) -> None:
    """C51: back-pressure by not reading, never by going silent."""
    bench.orderer.room = False
    bench.stream.wakeup()
    before = bench.stream.feedbacks
    eventually(lambda: bench.stream.feedbacks > before + 3, "feedback goes on")
    bench.transaction(100, 1)
    before = bench.stream.feedbacks
    eventually(lambda: bench.stream.feedbacks > before + 3, "feedback goes on")
    assert bench.orderer.submitted == []
    bench.orderer.room = True
    bench.orderer.changed.set()
    eventually(lambda: bench.orderer.submitted, "it reads again")


def test_it_does_not_wait_for_what_it_has_already() -> None:
    """A chunk is handed on as soon as it is full; what came with it lies in the driver's memory, not in the socket."""

    class Waiting(ScriptedStream):
        left: ClassVar[list[int]] = []

        def wait(self, timeout: float) -> None:
            self.left.append(len(self._messages))
            session.stop()
            super().wait(timeout)

    stream = Waiting([(wire.begin(100), 100), (wire.relation(), 0)])
    stream.feed(*((wire.event(seq), 100) for seq in range(1, 10)), (wire.commit(100, 130), 130))
    intake = Intake(Columns(), lambda _: True, key_prefix="l:1", resume=Resume(), chunk_bytes=100)
    orderer = ScriptedOrderer()
    session = IngestSession(Settings(drain_seconds=0), stream, intake, orderer, lambda: None)
    session.run()
    assert stream.left[0] == 0
    assert sum(len(burst.rows) for burst in orderer.submitted) == 9
    assert len(orderer.submitted) > 5, "in many chunks"


def test_a_silent_stream_gets_a_canary_and_is_then_given_up(bench: Bench) -> None:
    """C54."""
    eventually(lambda: bench.canaries == 1, "a canary")
    eventually(lambda: bench.error is not None, "it gives up")
    assert isinstance(bench.error, ConnectionLost)
    assert "nothing arrived" in str(bench.error)
    assert bench.stream.closed


def test_a_canary_that_comes_through_keeps_it_alive(bench: Bench) -> None:
    for position in (500, 600):
        seen = bench.canaries
        eventually(lambda seen=seen: bench.canaries > seen, "a canary")  # type: ignore[misc]
        bench.stream.keepalive(position)
    assert bench.error is None


def test_a_silent_walsender_that_is_seen_to_move_is_left_alone(bench: Bench) -> None:
    """A long transaction of other tables lets no canary through; to begin again would never end."""
    for position in range(3):
        bench.walsender = WalsenderProgress((position, "", ""), waits=False)
        seen = bench.canaries
        eventually(lambda seen=seen: bench.canaries > seen, "it is asked again")  # type: ignore[misc]
        assert bench.error is None
    eventually(lambda: bench.error is not None, "now it stands still, and is given up")
    assert isinstance(bench.error, ConnectionLost)


def test_a_walsender_that_is_gone_is_given_up_at_once(bench: Bench) -> None:
    bench.walsender = None
    began = time.monotonic()
    eventually(lambda: bench.error is not None, "it is given up")
    assert "its walsender is gone" in str(bench.error)
    assert bench.canaries == 1
    assert time.monotonic() - began < 60


def test_a_walsender_that_waits_behind_a_canary_does_not_reach_us(bench: Bench) -> None:
    bench.stream.patience = 3600
    bench.walsender = WalsenderProgress((7, "now", "streaming"), waits=True)
    bench.flushed = 99  # the canary of the first look is at 100, and not flushed yet: there is nothing to be sent
    eventually(lambda: bench.canaries >= 4, "it is asked again")
    assert not bench.stream.closed
    bench.flushed = 100
    eventually(lambda: bench.error is not None, "it is given up")
    assert isinstance(bench.error, ConnectionLost)
    assert "believes to have sent it" in str(bench.error)


def test_a_walsender_that_works_is_not_given_up_for_waiting_now_and_then(bench: Bench) -> None:
    """It decodes a huge transaction of other tables, and waits for a moment between two pieces of work."""
    bench.stream.patience = 3600
    for round in range(6):
        seen = bench.canaries
        bench.walsender = WalsenderProgress((7, "", "streaming"), waits=round % 2 == 0)
        eventually(lambda seen=seen: bench.canaries > seen, "it is asked again")  # type: ignore[misc]
    assert bench.error is None


def test_what_ends_the_orderer_or_a_chore_ends_the_session(bench: Bench) -> None:
    bench.session.fail(Fenced("replaced"))
    eventually(lambda: bench.error is not None, "it ends")
    assert isinstance(bench.error, Fenced)
