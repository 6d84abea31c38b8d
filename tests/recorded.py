"""The recorded runs of real agents: test data that is not part of the repository."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from walstream.ledger.fold import FoldEvent

FOLDER = Path(
    os.environ.get("WALSTREAM_RECORDED_RUNS") or Path(__file__).resolve().parents[2] / "shared/data/recorded-runs"
)
RUNS = (
    "human-eval-fix",
    "marshmallow-text-actions",
    "marshmallow-tools",
    "marshmallow-tools-edited",
    "marshmallow-xml",
    "pydicom",
    "simple-function-calling",
    "test-repo",
)


def run_file(name: str) -> Path:
    """The JSON Lines file of a run; skips the test where the data is absent."""
    file = FOLDER / f"{name}.jsonl"
    if not file.is_file():
        pytest.skip(f"no recorded runs in {FOLDER}: set WALSTREAM_RECORDED_RUNS")
    return file


def run_files() -> list[Path]:
    """All of them; skips the test where the data is absent."""
    return [run_file(name) for name in RUNS]


def run_lines(name: str) -> Iterator[dict[str, Any]]:
    """Its events as they stand in the file."""
    for line in run_file(name).read_text(encoding="utf-8").splitlines():
        yield json.loads(line)


def run_events(name: str) -> list[FoldEvent]:
    """Its events for a fold, with the line's number as seq."""
    return [
        FoldEvent.of(seq, line["session_id"], line["agent_id"], line["event_type"], line["payload"])
        for seq, line in enumerate(run_lines(name), start=1)
    ]
