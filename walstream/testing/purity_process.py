"""The process in which a fold is checked: it reads a job from its standard input and writes what it found."""

from __future__ import annotations

import os
import pickle
import sys
from typing import Any

from walstream.errors import ConfigError
from walstream.ledger.fold import import_fold

from .purity_runs import check, digests, text_at
from .purity_traps import audit_this_process


def main() -> None:
    """Do one job (see :func:`walstream.testing.purity.check_fold`)."""
    job: dict[str, Any] = pickle.load(sys.stdin.buffer)
    # What the fold prints goes to standard error: standard output is for the answer.
    answer_to = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with answer_to:
        pickle.dump(_answer(job), answer_to)


def _answer(job: dict[str, Any]) -> Any:
    try:
        fold = import_fold(job["fold"])
    except ConfigError as error:
        return error
    sessions = job["sessions"]
    if job["show"] is not None:
        return [], text_at(fold, sessions[0], job["show"], job["strides"][0])
    findings = []
    if job["everything"]:
        audit_this_process()
        findings = check(fold, sessions)
        if findings:
            return findings, []
    both = zip(sessions, job["strides"], strict=True)
    return findings, [digests(fold, each, stride, fine=job["fine"]) for each, stride in both]


if __name__ == "__main__":
    main()
