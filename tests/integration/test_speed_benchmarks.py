"""The benchmarks of speed work: small ones of each, for what they tell and not for how fast they are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import __main__ as entry
from tests.benchmarks import ceiling, drain, mock_walsender, peers
from tests.benchmarks.draining import by_walstream
from tests.benchmarks.filled_ledger import FilledLedger
from tests.benchmarks.peak_memory import peak_mb, peak_mb_in
from tests.benchmarks.shapes import SHAPES, filling

EVENTS = 1200


@pytest.fixture(scope="module")
def filled() -> Iterator[FilledLedger]:
    """A ledger of shape B."""
    with FilledLedger(SHAPES["B"], EVENTS) as ledger:
        yield ledger


def test_events_have_the_shape_that_they_are_called_by(filled: FilledLedger) -> None:
    sizes = filled.execute("SELECT min(length(payload::text)), max(length(payload::text)), count(*) FROM agent_events")
    assert sizes == [(290, 290, EVENTS)]
    transactions = filled.execute("SELECT count(DISTINCT xmin::text) FROM agent_events")
    assert transactions == [(3,)], "500, 500 and the rest"


def test_other_clients_that_cannot_run_here_are_left_out_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_PYTHONS", sys.executable)
    told: list[str] = []
    with FilledLedger(SHAPES["A"], 60) as ledger:
        found = peers.contenders(ledger, tcp=False, tell=told.append)
        reasons = {name: why for name, _, why in (each.partition(" is left out: ") for each in told)}
        assert all(reasons.values())
        for name in ("pg-logical-replication", *(peer.name for peer in peers.PEERS)):
            assert any(name in those for those in (reasons, found, [each.partition(" (")[0] for each in found])), name
        for contender in found.values():
            assert contender().seconds > 0


def test_a_ledger_can_have_five_million_events() -> None:
    """Numbers of digests no longer fit four bytes there."""
    shape = SHAPES["B"]
    with FilledLedger(shape, 1) as ledger:
        ledger.execute(filling(shape, 2, first=5_000_000))
        ((longest, count),) = ledger.execute("SELECT max(length(payload::text)), count(*) FROM agent_events")
    assert (longest, count) == (290, 3)


def test_a_played_stream_is_ordered_and_handled_like_a_real_one(filled: FilledLedger, tmp_path: Path) -> None:
    by_walstream(filled)
    query = "SELECT sum(events), max(last_lsn), array_agg(recovered) @> '{true}' FROM walstream.commit_order"
    real = filled.execute(query)
    filled.reset()
    recording = tmp_path / "recording"
    messages = mock_walsender.record(filled, recording)
    assert messages == EVENTS + 2 * 3 + 1, "inserts, Begin and Commit of three transactions, and the relation"
    run, step = ceiling.once(filled, recording)
    assert filled.execute(query) == real == [(EVENTS, real[0][1], False)]
    assert run.client_cpu > 0
    assert {"walstream-ingest", "walstream-orderer"} <= run.threads.keys()
    assert step > 0


def test_cold_it_has_the_same_events(filled: FilledLedger) -> None:
    by_walstream(filled)
    run = by_walstream(filled, cold=True)
    assert run.seconds > 0
    assert "walstream-ingest" not in run.threads
    positions = filled.execute("SELECT position FROM walstream.cursors")
    assert positions == [(EVENTS,)]


@pytest.mark.slow
def test_contenders_drain_the_same_and_are_told_as_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["drain", "--shapes", "D", "--events", "1000", "--runs", "1", "--without-others", "--json"]
    monkeypatch.setattr(sys, "argv", ["benchmarks", *words])
    assert entry.main() == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["benchmark"] == "drain"
    assert {"cores", "load", "postgres", "python"} <= found["machine"].keys()
    figures = found["shapes"]["D"]["unix"]
    assert len(figures) == 4
    for each in figures.values():
        assert {"events_per_s", "ratio", "client_cpu_us", "rss_mb", "runs"} <= each.keys()
        assert len(each["ratios"]) == each["runs"] == 1
    best = max(each["ratio"] for name, each in figures.items() if name.startswith(drain.FIRST))
    assert best == 1, "the better one of the two counts as 1"


def test_the_peak_of_a_client_is_its_own_and_not_that_of_who_started_it() -> None:
    if not Path("/proc/self/status").exists():
        pytest.skip("there is no /proc")
    own = peak_mb(os.getpid())
    assert own is not None
    client = subprocess.Popen(["sleep", "60"])
    try:
        peak = peak_mb(client.pid)
    finally:
        client.kill()
        _, _, usage = os.wait4(client.pid, 0)
        client.returncode = 0
    assert peak is not None
    assert 0 < peak < own / 4 < peak_mb_in(usage)
    assert peak_mb(client.pid) is None


def test_a_ratio_above_the_limit_is_an_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {
        "client_cpu_us": 5.0, "spread": [5.0, 5.0], "ratio_to_loop": 10.0, "loop_us": 0.5, "rss_mb": 90.0,
        "threads_us": {}, "events": 1, "messages": 1, "runs": 1,
    }  # fmt: skip
    monkeypatch.setattr(ceiling, "measure", lambda *_: figures)
    assert ceiling.main(["--shapes", "B", "--limit", "10"]) == 0
    assert ceiling.main(["--shapes", "B", "--limit", "9.9"]) == 1
    assert ceiling.main(["--shapes", "B"]) == 0


def test_an_unknown_name_says_what_there_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks", "fast"])
    assert entry.main() == 2
    told = capsys.readouterr().err
    for name in ("drain", "latency", "catchup", "sustained", "scale", "ceiling"):
        assert name in told


@pytest.mark.parametrize("name", [name for name in entry.NAMES if name != "plot"])
def test_each_can_be_quick_and_be_told_as_json(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks", name, "--help"])
    with pytest.raises(SystemExit) as ended:
        entry.main()
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert f"python -m tests.benchmarks {name}" in told
    assert "--quick" in told
    assert "--json" in told


def test_decoding_is_told_as_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks", "decode", "--quick", "--json"])
    assert entry.main() == 0
    found = json.loads(capsys.readouterr().out)
    assert found["benchmark"] == "decode"
    assert {"cores", "load", "postgres", "python"} <= found["machine"].keys()
    assert found["microseconds"].keys() >= {"insert, row decoder", "begin", "commit"}
