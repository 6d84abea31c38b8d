"""Other clients of a logical slot, as far as they are installed here. They decode every message and count inserts; what
they have no notion of (an order, a cursor, visibility) they need not do.

So far pg-logical-replication for Node: where `node` runs and finds the package (in a folder that NODE_PATH names).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from psycopg2.extensions import parse_dsn

from tests.benchmarks.draining import Drained, drained_in
from tests.benchmarks.filled_ledger import PUBLICATION, SLOT, FilledLedger
from tests.benchmarks.peak_memory import peak_mb
from tests.benchmarks.processes import cpu_seconds_of

_CLIENTS: Final = Path(__file__).parent / "clients"
_PATIENCE: Final = 120.0
_LOOK: Final = 0.02


def contenders(ledger: FilledLedger, *, tcp: bool, tell: Callable[[str], None]) -> dict[str, Callable[[], Drained]]:
    """Those that can run here; of the others ``tell`` is told why not."""
    found: dict[str, Callable[[], Drained]] = {}
    node = shutil.which("node")
    if node and _succeeds([node, "-e", "require('pg-logical-replication')"]):
        command = [node, str(_CLIENTS / "pg_logical_replication.js")]
        found["pg-logical-replication (Node)"] = partial(_drain, ledger, command, tcp=tcp)
    else:
        tell("pg-logical-replication is left out: node does not run here, or does not find it")
    return found


def _succeeds(command: Sequence[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=30, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _drain(ledger: FilledLedger, command: Sequence[str], *, tcp: bool) -> Drained:
    """One run.

    Raises:
        RuntimeError: the client failed, or takes too long.
    """
    ledger.reset()
    words = parse_dsn(ledger.dsn(tcp=tcp))
    connection = {"host": words["host"], "port": words["port"], "database": words["dbname"], "user": words["user"]}
    if "password" in words:
        connection["password"] = words["password"]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [*command, json.dumps(connection), SLOT, PUBLICATION, str(ledger.events)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # some have processes of their own
        )
        try:
            began, sender = ledger.started()
            until = time.monotonic() + _PATIENCE
            cpu: float | None = None
            rss: float | None = None
            ended, status, usage = 0, 0, None
            while not ended:
                rss = peak_mb(process.pid) or rss
                ended, status, usage = os.wait4(process.pid, os.WNOHANG)
                cpu = cpu_seconds_of(sender) or cpu
                if time.monotonic() > until:
                    raise RuntimeError(f"{command[-1]} has not drained {ledger.events} events in {_PATIENCE:.0f} s")
                time.sleep(_LOOK)
            moment = time.time()
            process.returncode = os.waitstatus_to_exitcode(status)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if process.returncode is None:
                process.wait()
        log.seek(0)
        said = log.read()[-2000:].decode(errors="replace")
    if process.returncode != 0 or usage is None:
        raise RuntimeError(f"{command[-1]} ended with {process.returncode}: {said}")
    return drained_in(moment - began, usage, rss, cpu)
