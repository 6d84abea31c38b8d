"""What ``--json`` prints: the figures of one benchmark, by whose name, and of which machine.

Figures without their machine are worth nothing, and a program (`plot` is one) has to see what it was given.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from typing import Any

from walstream.postgres import PostgresServer

Figures = dict[str, Any]


def machine() -> Figures:
    """What it is measured on. To be called before anything is: the load is that of others."""
    return {
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "postgres": PostgresServer().version,
        "python": platform.python_version(),
    }


def described(of: Figures) -> str:
    """The machine in a line."""
    return f"PostgreSQL {of['postgres']}, Python {of['python']}, {of['cores']} cores, load {of['load']:g} before"


def write(benchmark: str, of: Figures, found: Figures) -> None:
    """Print the document.

    Args:
        benchmark: its name on the command line.
        of: the :func:`machine`.
        found: what was measured.
    """
    json.dump({"benchmark": benchmark, "machine": of, **found}, sys.stdout, indent=2)
    print()
