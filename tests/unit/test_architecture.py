"""The rooms of the house and the doors between them.

``ALLOWED`` is the whole truth about which part of walstream may import which. Imports are read from the syntax tree,
so that those inside functions and under ``TYPE_CHECKING`` count like any other.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LEAVES = ("lsn", "errors", "event", "config", "figures", "metrics")
PUBLIC = "walstream"  # the names of walstream/__init__.py

# room -> what it may import of ours. A dotted entry opens that one module; `*` opens everything.
ALLOWED: dict[str, tuple[str, ...]] = {
    "lsn": ("errors",),
    "errors": (),
    "event": ("errors",),
    "config": ("errors",),
    "figures": (),
    "interpreter": (),
    "metrics": (),
    "protocol": LEAVES,
    "source": (*LEAVES, "protocol"),
    "order": (*LEAVES, "protocol", "source.connection", "source.failures"),
    "ledger": (*LEAVES, "protocol", "source.connection"),
    # The guard judges the very facts that `run`, `init` and `doctor` judge: what a slot is, is read in one place.
    "guard": (*LEAVES, "protocol", "source.connection", "source.facts", "source.failures", "source.slots"),
    "audit": (*LEAVES, "order", "source.connection", "source.failures"),
    "engine": (*LEAVES, "protocol", "order", "ledger", "source.connection", "source.failures"),
    "worker": (
        *(*LEAVES, "ledger", "order.wake", "source.connection", "source.failures"),
        *("engine.event_loop", "engine.leadership", "engine.retry", "engine.waiting_for_server"),
        *("monitoring.health", "monitoring.reporting"),
    ),
    # An HTTP server is no leaf, and what it serves comes from several rooms: it is given functions, and knows none of
    # them.
    "monitoring": LEAVES,
    PUBLIC: (*LEAVES, "audit", "engine", "ledger", "stream", "worker"),
    "payloads": ("ledger",),
    "stream": (*LEAVES, "engine", "interpreter", "wiring"),
    "wiring": (*LEAVES, "engine", "source", "guard", "monitoring"),
    "plugins": (*LEAVES, "engine", "stream", "worker"),
    "__main__": ("cli",),
    "projectors": (PUBLIC,),
    "postgres": LEAVES,
    "testing": (*LEAVES, PUBLIC, "engine", "ledger"),
    "cli": ("*",),
    "demo": ("*",),
}

# Other people's packages that only some rooms may know. Whatever is not named here is free, except to `protocol`.
THIRD_PARTY: dict[str, tuple[str, ...]] = {
    "psycopg2": (
        "source",
        "order",
        "ledger",
        "guard",
        "engine",
        "audit",
        "wiring",
        "worker",
        "projectors",
        "postgres",
        "cli",
        "demo",
        PUBLIC,
    ),
    "prometheus_client": ("monitoring",),
    "opentelemetry": ("monitoring",),
    "typer": ("cli",),
    "click": ("cli",),
    "rich": ("cli", "demo"),
    "pydantic": ("config", "ledger", "worker"),
}

REPLICATION_NAMES = {
    "LogicalReplicationConnection",
    "PhysicalReplicationConnection",
    "ReplicationConnection",
    "ReplicationCursor",
    "ReplicationMessage",
    "StopReplication",
}

MAX_LINES = 400
VAGUE_NAMES = {"utils", "util", "common", "types", "helpers", "misc"}


def modules(root: Path) -> Iterator[tuple[str, Path]]:
    """Every module of ours as (its name below ``walstream``, file); the package itself is ``walstream``."""
    for folder, prefix in ((root / "walstream", ()), (root / "projectors", ("projectors",))):
        for path in sorted(folder.rglob("*.py")):
            parts = (*prefix, *path.relative_to(folder).with_suffix("").parts)
            if parts[-1] == "__init__":
                parts = parts[:-1]
            yield ".".join(parts) or PUBLIC, path


def imports(name: str, path: Path) -> Iterator[tuple[int, str]]:
    """Every import of ``path`` as (line, absolute dotted name of the module or of the name imported from it)."""
    here = ("walstream", *([] if name == PUBLIC else name.split(".")))
    package = here if path.name == "__init__.py" else here[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            stem = ".".join((*base, *((node.module,) if node.module else ())))
            for alias in node.names:
                yield node.lineno, f"{stem}.{alias.name}"


def room_of(target: str) -> str:
    """The room that an absolute import of ours leads to; a name of ``walstream/__init__.py`` leads to ``walstream``."""
    parts = target.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in ALLOWED else PUBLIC


def may_import(room: str, target: str) -> bool:
    """Whether code in ``room`` may import ``target``."""
    top = target.split(".")[0]
    if top != "walstream":
        if room == "protocol":
            return top in sys.stdlib_module_names
        return room in THIRD_PARTY.get(top, (room,))
    reached = room_of(target)
    if reached == room:
        return True
    below = target.removeprefix("walstream.")
    doors = ALLOWED[room]
    return "*" in doors or reached in doors or any(f"{below}.".startswith(f"{door}.") for door in doors if "." in door)


def violations(root: Path) -> list[str]:
    found = []
    for name, path in modules(root):
        room = name.split(".")[0]
        if room not in ALLOWED:
            found.append(f"{path.relative_to(root)}: the room {room!r} is not in the table")
            continue
        for line, target in imports(name, path):
            if not may_import(room, target):
                found.append(f"{path.relative_to(root)}:{line}: {room} may not import {target}")
    return found


def test_imports_go_through_the_allowed_doors() -> None:
    assert violations(ROOT) == []


def test_every_room_of_the_table_exists() -> None:
    assert set(ALLOWED) - {name.split(".")[0] for name, _ in modules(ROOT)} == set()


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("walstream/protocol/decoder.py", "from ..source import slots"),
        ("walstream/protocol/decoder.py", "import orjson"),
        ("walstream/order/reader.py", "from walstream.source.slots import drop"),
        ("walstream/order/reader.py", "from walstream.source import slots"),
        ("walstream/order/reader.py", "from walstream.ledger import schema"),
        ("walstream/engine/ingest.py", "def late():\n    from ..source.stream import ReplicationStream"),
        ("walstream/engine/ingest.py", "from walstream import Stream"),
        ("walstream/engine/ingest.py", "from walstream.cli import options"),
        ("walstream/source/slots.py", "import rich.table"),
        ("walstream/errors.py", "from .event import Event"),
        ("walstream/postgres/server.py", "from ..source.connection import connect"),
        ("projectors/audit.py", "from walstream.engine import projector"),
        ("projectors/audit.py", "from walstream.event import Event"),
        ("walstream/leftover.py", "import os"),
    ],
)
def test_a_forbidden_import_is_found(tmp_path: Path, file: str, line: str) -> None:
    for folder in ("walstream", "projectors"):
        (tmp_path / folder).mkdir()
    target = tmp_path / file
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(line)
    assert len(violations(tmp_path)) == 1


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("walstream/order/reader.py", "from walstream.source.connection import connect"),
        ("walstream/order/reader.py", "from walstream.source import connection"),
        ("walstream/order/reader.py", "import psycopg2, struct"),
        ("walstream/protocol/decoder.py", "import struct\nfrom ..errors import DecodeError"),
        ("projectors/audit.py", "from walstream import Event\nimport hashlib"),
        ("walstream/cli/run.py", "from walstream.source.stream import ReplicationStream\nimport typer"),
    ],
)
def test_an_allowed_import_is_not(tmp_path: Path, file: str, line: str) -> None:
    target = tmp_path / file
    target.parent.mkdir(parents=True)
    target.write_text(line)
    assert violations(tmp_path) == []


def test_replication_classes_of_psycopg2_stay_in_source() -> None:
    found = []
    for name, path in modules(ROOT):
        if name.split(".")[0] == "source":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            named = None
            if isinstance(node, ast.Name):
                named = node.id
            elif isinstance(node, ast.Attribute):
                named = node.attr
            elif isinstance(node, ast.alias):
                named = node.name
            if named in REPLICATION_NAMES:
                found.append(f"{path.relative_to(ROOT)}: {named}")
    assert found == []


def test_modules_are_short_and_named_for_what_they_are() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for _, path in modules(ROOT)}
    assert {str(path.relative_to(ROOT)): n for path, n in lengths.items() if n >= MAX_LINES} == {}
    assert [str(path.relative_to(ROOT)) for path in lengths if path.stem in VAGUE_NAMES] == []
