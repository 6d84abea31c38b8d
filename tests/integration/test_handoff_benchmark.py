"""The handoff benchmark: its arithmetic, and one run with very few handoffs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.benchmarks import handoff
from tests.benchmarks.handoff import Plan, percentiles, plan_of, show, summary


def test_percentiles_of_few_and_of_many() -> None:
    assert percentiles([3.0]) == {"p50_ms": 3.0, "p99_ms": 3.0}
    assert percentiles([5.0, 1.0, 3.0]) == {"p50_ms": 3.0, "p99_ms": 5.0}
    assert percentiles([float(n) for n in range(1, 1001)]) == {"p50_ms": 500.5, "p99_ms": 991.0}


def test_runs_are_summed_up_by_their_medians() -> None:
    runs = [
        {"p50_ms": p50, "n": 10, "client_cpu_ms": cpu, "from_sent": {"p50_ms": p50 + 1}}
        for p50, cpu in ((2.0, 0.5), (9.0, None), (3.0, 0.7))
    ]
    assert summary(runs) == {
        "p50_ms": 3.0,
        "n": 30,
        "client_cpu_ms": None,
        "spread": {"p50_ms": [2.0, 9.0]},
        "from_sent": {"p50_ms": 4.0, "spread": {"p50_ms": [3.0, 10.0]}},
    }


def test_the_command_line_makes_a_plan() -> None:
    assert plan_of([]) == (Plan((1, 50, 500), 20.0, 3, 3000, tuple(handoff.SHAPES)), False)
    assert plan_of(["--rates", "", "--jobs", "7", "--repeats", "2"])[0] == Plan((), 20.0, 2, 7, tuple(handoff.SHAPES))
    quick, as_json = plan_of(["--quick", "--rates", "5", "--json"])
    assert (quick.rates, quick.repeats, as_json) == ((5,), 1, True)


@pytest.mark.slow
def test_a_run_has_a_figure_for_every_contender(capsys: pytest.CaptureFixture[str]) -> None:
    found = handoff.measure(Plan((20,), 0.5, 1, 16, ("1 process of 8",)))
    contenders: dict[str, dict[str, Any]] = json.loads(json.dumps(found))["contenders"]
    timed = {name: each["rates"]["20"] for name, each in contenders.items() if "rates" in each}
    assert set(timed) == {"walstream", "polled every 100 ms", "procrastinate"}
    for values in timed.values():
        assert values["n"] == 10
        assert 0 < values["p50_ms"] <= values["p99_ms"]
        assert values["p50_ms"] < values["from_sent"]["p50_ms"]
    rates = {name: each["throughput"]["1 process of 8"] for name, each in contenders.items() if "throughput" in each}
    assert set(rates) == {"walstream", "walstream, jobs without events", "procrastinate"}
    assert all(values["jobs_per_second"] > 0 and values["n"] == 16 for values in rates.values())
    show(found)
    told = capsys.readouterr().out
    assert all(name in told for name in contenders)
