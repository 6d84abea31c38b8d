"""Other clients of a logical slot, as far as they are installed here. They decode every message and count inserts; what
they have no notion of (an order, a cursor, visibility) they need not do.

- pg-logical-replication for Node: where `node` runs and finds the package (in a folder that NODE_PATH names).
- walbox, pgoutput-decoder and pypgoutput: where an interpreter has them. Some want another Python than this one;
  BENCH_PYTHONS names interpreters to look into (with a colon between two), in place of this one.
- psycopg2 with wal2json: where the server has that plugin.

Those in Python are slow, so they drain only the first 30,000 events.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import psycopg2
from psycopg2.extensions import parse_dsn

from tests.benchmarks.draining import Drained, drained_in
from tests.benchmarks.filled_ledger import PUBLICATION, SLOT, FilledLedger
from tests.benchmarks.peak_memory import peak_mb
from tests.benchmarks.processes import cpu_seconds_of

_CLIENTS: Final = Path(__file__).parent / "clients"
_PATIENCE: Final = 120.0
_SLOW: Final = 30_000  # events
_TRIAL: Final = 50  # events, to see whether it can read them at all
_LOOK: Final = 0.02


@dataclass(frozen=True, slots=True)
class Peer:
    """A client in Python: its script in `clients/`, and the module that it needs."""

    name: str
    script: str
    module: str
    plugin: str = "pgoutput"


PEERS: Final = (
    Peer("walbox (asyncio)", "drain_walbox.py", "walbox"),
    Peer("pgoutput-decoder (Rust)", "drain_pgoutput_decoder.py", "pgoutput_decoder"),
    Peer("pypgoutput", "drain_pypgoutput.py", "pypgoutput"),
    Peer("psycopg2 + wal2json", "drain_wal2json.py", "psycopg2", "wal2json"),
)


def contenders(ledger: FilledLedger, *, tcp: bool, tell: Callable[[str], None]) -> dict[str, Callable[[], Drained]]:
    """Those that can run here; of the others ``tell`` is told why not."""
    found: dict[str, Callable[[], Drained]] = {}

    def add(name: str, command: Sequence[str], **more: Any) -> None:
        try:
            _drain(ledger, command, tcp=tcp, **{**more, "most": _TRIAL})
        except RuntimeError as error:
            tell(f"{name} is left out: {error}")
        else:
            found[name] = partial(_drain, ledger, command, tcp=tcp, **more)

    node = shutil.which("node")
    if node and _succeeds([node, "-e", "require('pg-logical-replication')"]):
        add("pg-logical-replication (Node)", [node, str(_CLIENTS / "pg_logical_replication.js")])
    else:
        tell("pg-logical-replication is left out: node does not run here, or does not find it")
    pythons = os.environ.get("BENCH_PYTHONS", sys.executable).split(os.pathsep)
    for peer in PEERS:
        python = next((each for each in pythons if _succeeds([each, "-c", f"import {peer.module}"])), None)
        if python is None:
            tell(f"{peer.name} is left out: no interpreter here has {peer.module} (see BENCH_PYTHONS)")
        elif why := _refused(ledger, peer.plugin):
            tell(f"{peer.name} is left out: {why}")
        else:
            add(peer.name, [python, str(_CLIENTS / peer.script)], plugin=peer.plugin, most=_SLOW)
    return found


def _refused(ledger: FilledLedger, plugin: str) -> str:
    """Why the server makes no slot with this plugin; empty if it does. It lacks it, or does not allow it
    (``output_plugin_libraries`` of newer releases)."""
    try:
        ledger.reset(plugin)
    except (psycopg2.errors.UndefinedFile, psycopg2.errors.InsufficientPrivilege) as error:
        return str(error.diag.message_primary)
    return ""


def _succeeds(command: Sequence[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=30, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _drain(
    ledger: FilledLedger, command: Sequence[str], *, tcp: bool, plugin: str = "pgoutput", most: int | None = None
) -> Drained:
    """One run.

    Args:
        plugin: what the client reads.
        most: so many events are enough.

    Raises:
        RuntimeError: the client failed, or takes too long.
    """
    ledger.reset(plugin)
    events = min(ledger.events, most or ledger.events)
    words = parse_dsn(ledger.dsn(tcp=tcp))
    connection = {"host": words["host"], "port": words["port"], "database": words["dbname"], "user": words["user"]}
    if "password" in words:
        connection["password"] = words["password"]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [*command, json.dumps(connection), SLOT, PUBLICATION, str(events)],
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
                    raise RuntimeError(f"{Path(command[-1]).name} has not drained {events} events in {_PATIENCE:.0f} s")
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
        raise RuntimeError(f"{Path(command[-1]).name} ended with {process.returncode}: {said}")
    return drained_in(moment - began, usage, rss, cpu, share=events / ledger.events)
