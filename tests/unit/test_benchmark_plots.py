"""Charts of benchmarks are drawn from what ``--json`` printed: their labels, and what is said where they cannot be."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import plot
from tests.benchmarks.draining import Drained, summary
from walstream.errors import ExitCode

ROOT = Path(__file__).resolve().parents[2]
MACHINE = {"cores": 2, "load": 0.05, "postgres": "18.6", "python": "3.11.7"}


def drained(*seconds: float) -> list[Drained]:
    return [Drained(each, client_cpu=1.0, walsender_cpu=None, rss_mb=60.0) for each in seconds]


def percentiles(p50: float, missing: int = 0, held: int = 1000) -> dict[str, Any]:
    return {"p50": p50, "p99": p50 * 3, "p999": p50 * 9, "missing": missing, "held_per_second": held}


def cost(shape: str, events: int, projectors: int, sessions: int, us: float) -> dict[str, Any]:
    return {"shape": shape, "events": events, "projectors": projectors, "sessions": sessions, "client_cpu_us": us}


def stretch(rate: float, held: int, lag: float, after: float, **more: int) -> dict[str, Any]:
    return {"rate": rate, "held_per_second": held, "lag_s": lag, "rss_mb": 80, "after_s": after, **more}


DRAIN = {
    "benchmark": "drain",
    "shapes": {
        "A": {
            "unix": summary(
                {"pg_recvlogical": drained(1.0, 1.5), "walstream": drained(0.5, 1.0)}, 1000, first="pg_recvlogical"
            ),
            "tcp": summary({"pg_recvlogical": drained(1.0), "walstream": drained(4.0)}, 1000, first="pg_recvlogical"),
        }
    },
}
LATENCY = {
    "benchmark": "latency",
    "ways": {
        "in process": {"200": percentiles(1.5, held=200), "5000": percentiles(2.5, held=4100)},
        "polling every 100 ms": {"200": percentiles(50.0, missing=3, held=200)},
    },
}
SCALE = {
    "benchmark": "scale",
    "events": {
        "A 100,000": cost("A", 100_000, 1, 1000, 9.0),
        "A 5,000,000": cost("A", 5_000_000, 1, 1000, 9.5),
        "B 100,000": cost("B", 100_000, 1, 1000, 4.0),
    },
    "projectors": {"50": cost("B", 100_000, 50, 1000, 40.0)},
    "sessions": {"1": cost("B", 100_000, 1, 1, 4.0)},
}
SUSTAINED = {
    "benchmark": "sustained",
    "lasting_s": 0.0,
    "bound_s": 1.0,
    "stretches": [
        stretch(1000.0, 1000, 0.0, 10.0, beside_recvlogical=1000),
        stretch(0.0, 7000, 3.0, 20.0, beside_recvlogical=8000),
    ],
}
SOAK = {
    "benchmark": "sustained",
    "lasting_s": 120.0,
    "bound_s": 1.0,
    "stretches": [stretch(200.0, 200, 0.003, 60.0), stretch(200.0, 201, 0.0, 120.0)],
}
LABELS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "drain": (
        DRAIN,
        ["A: 290 bytes, one a transaction, Unix socket", "one a transaction, TCP", "walstream", "1.75", "0.25",
         "pg_recvlogical in the same round; median and range of 2 rounds"],
    ),
    "latency": (
        LATENCY,
        ["in process", "(3 events never found)", "p50", "p99.9", "(4,100 held)", "insert sent to handler entered, ms"],
    ),
    "scale": (SCALE, ["5M", "B: 290 bytes, 500 a transaction", "processor time, µs an event", "projectors"]),
    "sustained": (SUSTAINED, ["appends a second, held", "lag at the end, ms", "all", "resident memory, MB"]),
    "soak": (SOAK, ["appends a second", "lag, ms", "resident memory, MB", "minutes since the start"]),
}  # fmt: skip


def recorded(folder: Path, name: str, found: dict[str, Any]) -> Path:
    file = folder / f"{name}.json"
    file.write_text(json.dumps({"machine": MACHINE, **found}))
    return file


def test_a_client_that_drained_a_part_is_counted_by_that_part() -> None:
    some = Drained(1.0, client_cpu=0.5, walsender_cpu=0.1, rss_mb=60.0, share=0.25)
    found = summary({"pg_recvlogical": drained(1.0), "slow": [some]}, 1000, first="pg_recvlogical")
    assert {name: found["slow"][name] for name in ("events", "events_per_s", "ratio", "client_cpu_us")} == {
        "events": 250,
        "events_per_s": 250,
        "ratio": 0.25,
        "client_cpu_us": 2000.0,
    }
    assert found["slow"]["walsender_cpu_us"] == 400.0


@pytest.fixture
def _matplotlib() -> None:
    pytest.importorskip("matplotlib", reason="charts need matplotlib: pip install -e '.[bench]'")


@pytest.mark.usefixtures("_matplotlib")
@pytest.mark.parametrize("name", LABELS)
def test_a_chart_holds_its_labels_and_is_the_same_again(name: str, tmp_path: Path) -> None:
    found, labels = LABELS[name]
    file = recorded(tmp_path, name, found)
    assert plot.main([str(file), "--to", str(tmp_path / "once")]) == 0
    drawn = (tmp_path / "once" / f"{name}.svg").read_text(encoding="utf-8")
    for label in [*labels, "PostgreSQL 18.6, Python 3.11.7, 2 cores, load 0.05 before"]:
        assert f"{label}</text>" in drawn, label
    assert "fill: #ffffff" in drawn, "readable on a dark page"
    assert plot.main([str(file), "--to", str(tmp_path / "again")]) == 0
    assert (tmp_path / "again" / f"{name}.svg").read_text(encoding="utf-8") == drawn


@pytest.mark.usefixtures("_matplotlib")
def test_all_results_are_drawn_at_once_as_png_where_that_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [recorded(tmp_path, name, LABELS[name][0]) for name in ("latency", "soak")]
    assert plot.main([*map(str, files), "--to", str(tmp_path), "--png"]) == 0
    made = [tmp_path / "latency.png", tmp_path / "soak.png"]
    assert capsys.readouterr().out.splitlines() == [str(file) for file in made]
    assert [file.read_bytes()[:4] for file in made] == [b"\x89PNG"] * 2


@pytest.mark.usefixtures("_matplotlib")
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no JSON", "Expecting value"),
        ("[]", "is not the result of a benchmark"),
        ('{"benchmark": "ceiling"}', "is of ceiling, which has no chart"),
        (json.dumps({"machine": MACHINE, **LATENCY, "ways": {"in process": {"200": {}}}}), "has no 'missing'"),
    ],
)
def test_what_is_no_result_is_named(text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "other.json"
    file.write_text(text)
    assert plot.main([str(file), "--to", str(tmp_path)]) == ExitCode.CONFIG
    told = capsys.readouterr().err
    assert str(file) in told
    assert said in told
    assert "--json" in told, "what to run"
    assert list(tmp_path.iterdir()) == [file]


def test_without_the_library_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "tests.benchmarks.charts", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert plot.main([str(recorded(tmp_path, "drain", DRAIN)), "--to", str(tmp_path)]) == ExitCode.CONFIG
    assert "pip install -e '.[bench]'" in capsys.readouterr().err
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert [each.partition(">")[0] for each in project["optional-dependencies"]["bench"]] == ["matplotlib"]
