"""Carries out the steps of a chaos run: each fault once, from its beginning to the end of its cause."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable
from typing import Any, Final

import psycopg2.errors

from .plan import LEASE_SECONDS, Step
from .stage import SLOT, WORKERS, Stage

_OURS: Final = "FROM pg_stat_activity WHERE application_name LIKE 'walstream:%%' AND pid <> pg_backend_pid()"
_DROP_SLOT: Final = (
    "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
    f" WHERE slot_name = '{SLOT}' AND (active_pid IS NULL OR pg_terminate_backend(active_pid, 2000))"
)
_PUBLICATION: Final = (
    "SELECT pubinsert, pubupdate, pubdelete, pubtruncate, pubviaroot FROM pg_publication WHERE pubname = 'walstream'"
)


class Faults:
    """What can be done to a stage.

    Args:
        stage: with a consumer and a reader that run.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._kinds: dict[str, Callable[..., float]] = {
            name.removeprefix("_inject_"): getattr(self, name) for name in dir(self) if name.startswith("_inject_")
        }

    def inject(self, step: Step) -> float:
        """Carry out a step; return since when nothing but time stands between the stream and its recovery."""
        return self._kinds[step.kind](**step.choices)

    # -- processes -----------------------------------------------------------------------------------------------------

    def _inject_kill(self, who: str, seconds: float) -> float:
        self._stage.kill(who)
        time.sleep(seconds)
        self._stage.start(who)
        return time.monotonic()

    def _inject_stop(self, who: str, seconds: float) -> float:
        self._stage.signal(who, signal.SIGSTOP)
        time.sleep(seconds)
        self._stage.signal(who, signal.SIGCONT)
        return time.monotonic()

    def _inject_two_consumers(self, how: str, seconds: float) -> float:
        """The second one stands by when the first goes; it is the consumer from then on."""
        stage = self._stage
        stage.start("second")
        self._until(lambda: "standing by" in stage.process("second").output[-3000:], 20)
        time.sleep(seconds)
        began = time.monotonic()
        if how == "stop":
            stage.signal("consumer", signal.SIGSTOP)
            time.sleep(LEASE_SECONDS * 1.7)
            stage.signal("consumer", signal.SIGCONT)  # now there are two who believe that they are the one
            time.sleep(0.5)
            stage.kill("consumer")
        elif how == "end":
            leaving = stage.dismiss("consumer")
            leaving.terminate(60)
        else:
            stage.kill("consumer")
        stage.promote_second()
        return began

    def _inject_worker_kill(self, which: int, how: str, seconds: float) -> float:
        worker = WORKERS[which]
        if how == "stop":
            return self._inject_stop(worker, seconds)
        return self._inject_kill(worker, seconds)

    # -- connections and the server ------------------------------------------------------------------------------------

    def _inject_walsender(self) -> float:
        self._stage.execute(
            f"SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = '{SLOT}'"
        )
        return time.monotonic()

    def _inject_backend(self, which: int) -> float:
        pids = self._stage.execute(f"SELECT pid {_OURS} AND backend_type <> 'walsender' ORDER BY backend_start, pid")
        if pids:
            self._stage.execute("SELECT pg_terminate_backend(%s)", pids[which % len(pids)][0])
        return time.monotonic()

    def _inject_crash(self) -> float:
        self._stage.server.restart("immediate")
        return time.monotonic()

    # -- the network ---------------------------------------------------------------------------------------------------

    def _inject_cut(self) -> float:
        self._stage.network.cut()
        return time.monotonic()

    def _inject_stall(self, seconds: float) -> float:
        return self._while(self._stage.network.stall, seconds, self._stage.network.mend)

    def _inject_half_open(self, told: Any) -> float:
        self._stage.network.half_open(told)
        return time.monotonic()

    def _inject_slow(self, seconds: float, delay: float, rate: float) -> float:
        network = self._stage.network
        return self._while(lambda: network.slow(delay, rate), seconds, network.mend)

    # -- slot and publication ------------------------------------------------------------------------------------------

    def _inject_slot_dropped(self) -> float:
        stage = self._stage

        def drop() -> bool:
            self._inject_walsender()
            try:
                stage.execute(_DROP_SLOT)
            except psycopg2.errors.ObjectInUse:
                return False
            return True

        self._until(drop, 20)
        return time.monotonic()

    def _inject_slot_advanced(self, seconds: float) -> float:
        stage = self._stage
        stage.kill("consumer")
        time.sleep(seconds)

        def advance() -> bool:
            try:
                stage.execute(f"SELECT pg_replication_slot_advance('{SLOT}', pg_current_wal_lsn())")
            except psycopg2.errors.ObjectInUse:
                return False
            return True

        self._until(advance, 20)
        stage.start("consumer")
        return time.monotonic()

    def _inject_slot_invalidated(self) -> float:
        stage = self._stage
        stage.kill("consumer")

        def lose() -> bool:
            stage.execute("SELECT pg_logical_emit_message(false, 'chaos', 'x')")
            stage.execute("SELECT pg_switch_wal()")
            stage.execute("CHECKPOINT")
            return stage.execute(f"SELECT wal_status FROM pg_replication_slots WHERE slot_name = '{SLOT}'") == [
                ("lost",)
            ]

        self._until(lose, 30)
        stage.start("consumer")
        return time.monotonic()

    def _inject_publication_dropped(self, seconds: float) -> float:
        stage = self._stage
        (shape,) = stage.execute(_PUBLICATION)
        published = [
            name for name, there in zip(("insert", "update", "delete", "truncate"), shape, strict=False) if there
        ]
        stage.execute("DROP PUBLICATION walstream")
        time.sleep(seconds)
        with contextlib.suppress(psycopg2.errors.DuplicateObject):  # the consumer may have made it by itself
            stage.execute(
                f"CREATE PUBLICATION walstream FOR TABLE agent_events WITH (publish = '{', '.join(published)}',"
                f" publish_via_partition_root = {shape[-1]})"
            )
        return time.monotonic()

    def _inject_publication_emptied(self, seconds: float) -> float:
        stage = self._stage
        stage.execute("ALTER PUBLICATION walstream DROP TABLE agent_events")
        time.sleep(seconds)
        with contextlib.suppress(psycopg2.errors.DuplicateObject):
            stage.execute("ALTER PUBLICATION walstream ADD TABLE agent_events")
        return time.monotonic()

    # -- the disk ------------------------------------------------------------------------------------------------------

    def _inject_disk_full(self, seconds: float) -> float:
        return self._while(self._stage.fill_disk, seconds, self._stage.free_disk)

    # -- small parts ---------------------------------------------------------------------------------------------------

    def _while(self, begin: Callable[[], object], seconds: float, end: Callable[[], object]) -> float:
        begin()
        time.sleep(seconds)
        end()
        return time.monotonic()

    def _until(self, condition: Callable[[], bool], timeout: float) -> None:
        """Wait for a condition; when it does not come, the fault happens without it."""
        deadline = time.monotonic() + timeout
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.05)
