"""What the documentation names exists, and what exists is named: links, tests, commands, options, settings, exit codes.

Words go stale when nobody compares them with the code. Everything here is a comparison; nothing judges style.
"""

from __future__ import annotations

import ast
import functools
import importlib
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer
from pydantic import BaseModel

from walstream.cli import app
from walstream.cli.app import BROKEN_PIPE, INTERRUPTED
from walstream.cli.options import _SHARED
from walstream.config import ENV_PREFIX, Settings, load
from walstream.errors import ExitCode

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *DOCS.rglob("*.md")])

TEST_NAME = re.compile(r"tests/[\w/]+\.py(?:::\w+)*")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
RULES = 11


def relative(page: Path) -> str:
    return str(page.relative_to(ROOT))


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def fences(page: Path, *languages: str) -> Iterator[tuple[int, str]]:
    """The code blocks of a page in one of these languages, with the line they start at."""
    text = page.read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        if found[1] in languages:
            yield text.count("\n", 0, found.start()) + 2, found[2]


def section(page: str, title: str) -> str:
    """The text under a heading, up to the next one of the same level or above."""
    text = text_of(page)
    found = re.search(rf"^(#+) {re.escape(title)}$", text, re.MULTILINE)
    assert found, f"{page} has no section {title!r}"
    rest = text[found.end() :]
    end = re.search(rf"^#{{1,{len(found[1])}}} ", rest, re.MULTILINE)
    return rest[: end.start()] if end else rest


def table_rows(text: str) -> list[list[str]]:
    """The body rows of every table in ``text``, cell by cell."""
    rows = []
    body = False
    for line in text.splitlines():
        if not line.startswith("|"):
            body = False
        elif re.fullmatch(r"\|[\s:|-]+\|", line):
            body = True
        elif body:
            rows.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    return rows


def ticked(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


# -- links and anchors ---------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """Anchors of the headings, as GitHub makes them."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_relative_links_lead_somewhere(page: Path) -> None:
    lost = []
    for target in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            lost.append(target)
    assert lost == []


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_no_section_stands_twice(page: Path) -> None:
    titles = re.findall(r"^#+ .+$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    assert sorted(titles) == sorted(set(titles))


def test_every_decision_is_in_the_index() -> None:
    files = {path.name for path in (DOCS / "adr").glob("[0-9]*.md")}
    assert set(re.findall(r"\((\d{4}-[\w-]+\.md)\)", text_of("docs/adr/README.md"))) == files


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_files_named_in_backticks_exist(page: Path) -> None:
    named = set(re.findall(r"`((?:walstream|projectors|docs|tests)/[\w./-]+)`", page.read_text(encoding="utf-8")))
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


# -- tests that prove something ---------------------------------------------------------------------------


@functools.cache
def defined_in(file: Path) -> set[str]:
    """``test_x`` and ``TestY::test_z`` of a test file."""
    names = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names.add(node.name)
            names |= {f"{node.name}::{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
    return names


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_named_tests_exist(page: Path) -> None:
    missing = []
    for name in TEST_NAME.findall(page.read_text(encoding="utf-8")):
        path, _, test = name.partition("::")
        file = ROOT / path
        if not file.is_file() or (test and test not in defined_in(file)):
            missing.append(name)
    assert missing == []


def test_every_guarantee_names_its_proof() -> None:
    rows = table_rows(text_of("docs/guarantees.md"))
    assert len(rows) >= RULES
    assert [row[0] for row in rows if not TEST_NAME.search(row[-1])] == []


def test_every_rule_of_ingest_names_its_proof() -> None:
    rules = re.split(r"^### ", section("docs/architecture.md", "The rules of ingest"), flags=re.MULTILINE)[1:]
    assert [int(rule.split(".")[0]) for rule in rules] == list(range(1, RULES + 1))
    for rule in rules:
        title = rule.splitlines()[0]
        assert "**Left out:**" in rule, title
        proof = re.search(r"\*\*Proved by:\*\*(.+)", rule, re.DOTALL)
        assert proof, title
        assert TEST_NAME.search(proof[1]), title


# -- the command line ---------------------------------------------------------------------------


def commands() -> dict[str, Any]:
    """Every command by its words: ``status``, ``projectors list``, …"""

    def walk(command: Any, words: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
        if hasattr(command, "commands"):
            context = typer.Context(command)
            for name in command.list_commands(context):
                yield from walk(command.get_command(context, name), (*words, name))
        else:
            yield " ".join(words), command

    return dict(walk(typer.main.get_command(app), ()))


def options_of(command: Any) -> set[str]:
    return {
        name
        for parameter in command.params
        if parameter.param_type_name == "option"
        for name in (*parameter.opts, *parameter.secondary_opts)
        if name.startswith("--")
    }


COMMANDS = commands()
SHARED_OPTIONS = {option for option in options_of(COMMANDS["status"]) if option[2:].replace("-", "_") in _SHARED}


def calls(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Every call of walstream that a page shows: (as written, words after ``walstream``)."""
    text = page.read_text(encoding="utf-8")
    shown = re.findall(r"`(walstream [^`\n]+)`", FENCE.sub("", text))
    for _, block in fences(page, "sh", "console", "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            found = re.search(r"(?:^|&& |\$ |bin/)(walstream [^|>&#]+)", line)
            if found:
                shown.append(found[1])
    for call in shown:
        yield call, shlex.split(call.replace("…", " ").replace("\\|", "|"), comments=True)[1:]


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_commands_and_options_that_are_shown_exist(page: Path) -> None:
    wrong = []
    for call, words in calls(page):
        name = next((w for w in (" ".join(words[:2]), *words[:1]) if w in COMMANDS), None)
        groups = {each.split()[0] for each in COMMANDS}
        if name is None:
            if words and words[0].startswith("-"):
                known = words[0] in ("--version", "--help")
            elif words and words[0] in ("COMMAND", "|"):  # any command
                known = True
            else:
                known = not words or (("|" in call or len(words) == 1) and words[0] in groups)
            if not known:
                wrong.append(call)
            continue
        known_options = options_of(COMMANDS[name]) | {"--help"}
        used = [word.split("=")[0] for word in words if word.startswith("--")]
        wrong += [f"{call}: {option}" for option in used if option not in known_options]
    assert wrong == []


def test_operations_lists_every_command_with_its_own_options() -> None:
    rows = table_rows(section("docs/operations.md", "Commands"))
    listed = {ticked(row[0])[0].removeprefix("walstream ").split(" [")[0]: row for row in rows}
    for name in list(listed):
        words = name.split()
        listed[" ".join(word for word in words if word.islower() and word.isalpha())] = listed.pop(name)
    assert set(listed) == set(COMMANDS)
    assert len(rows) == len(listed)
    for name, row in listed.items():
        documented = {option for cell in row[2:] for option in re.findall(r"--[\w-]+", cell)}
        own = options_of(COMMANDS[name]) - SHARED_OPTIONS - {"--help", "--json", "--yes"}
        assert documented - {"--json", "--yes"} == own, name


def test_operations_lists_the_shared_options() -> None:
    assert set(re.findall(r"`(--[\w-]+)`", section("docs/operations.md", "Options that every command has"))) >= (
        SHARED_OPTIONS
    )


def test_operations_lists_every_exit_code() -> None:
    rows = table_rows(section("docs/operations.md", "Exit codes"))
    listed = {int(ticked(row[0])[0]): row[1].strip("`") for row in rows}
    assert set(listed) == {*map(int, ExitCode), INTERRUPTED, BROKEN_PIPE}
    for code in ExitCode:
        assert listed[int(code)] == code.name


# -- settings ---------------------------------------------------------------------------


def keys(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting by its dotted key, with its default."""
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from keys(inner, f"{prefix}{name}.")
        elif name == "projectors":
            (below,) = [each for each in inner.__args__ if isinstance(each, type) and issubclass(each, BaseModel)]  # type: ignore[union-attr]  # dict[str, ProjectorSettings]
            yield from keys(below, "projectors.NAME.")
        else:
            default = field.default_factory() if field.default_factory else field.default  # type: ignore[call-arg]  # pydantic allows factories with an argument; ours have none
            yield f"{prefix}{name}", default


def shown_default(value: Any) -> str:
    if value is None or value in ("", {}):
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def test_operations_lists_every_setting_with_its_default() -> None:
    rows = table_rows(section("docs/operations.md", "Settings"))
    listed = {ticked(row[0])[0]: (ticked(row[1]) or [""])[0] for row in rows}
    assert listed == {key: shown_default(default) for key, default in keys(Settings)}


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_configurations_that_are_shown_are_valid(page: Path, tmp_path: Path) -> None:
    for line, block in fences(page, "toml"):
        if "[project" in block:  # of the reader's pyproject.toml
            tomllib.loads(block)
            continue
        file = tmp_path / f"{line}.toml"
        file.write_text(block, encoding="utf-8")
        load(file=file, environ={})


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_environment_variables_that_are_named_exist(page: Path) -> None:
    known = {f"{ENV_PREFIX}{key.upper().replace('.', '__')}" for key, _ in keys(Settings)}
    others = {
        "WALSTREAM_CONFIG",
        "WALSTREAM_TEST_DSN",
        "WALSTREAM_TEST_IMAGE",
        "WALSTREAM_PG_BIN",
        "WALSTREAM_AUDIT_KEY",
    }
    others |= set(re.findall(r"\$\{(WALSTREAM_\w+)", text_of("compose.yaml")))
    named = set(re.findall(r"\bWALSTREAM_[A-Z_]+[A-Z]", page.read_text(encoding="utf-8")))
    assert named - known - others == set()


def test_operations_shows_the_grants_that_init_makes() -> None:
    from walstream.ledger.grants import approver_statements, eraser_statements, grant_statements, worker_statements

    shown = re.findall(r"^(?:GRANT|DO) .*", section("docs/operations.md", "Roles and grants"), re.MULTILINE)
    settings = Settings()
    assert shown == [
        *grant_statements(settings, "walstream"),
        *worker_statements(settings, "agent"),
        *approver_statements(settings, "approver"),
        *eraser_statements(settings, "eraser"),
    ]


# -- what `status` says ---------------------------------------------------------------------------


def test_fields_of_status_that_operations_explains_exist() -> None:
    from walstream.cli import standing

    parts = {
        "slot": standing.SlotStanding,
        "ingest": standing.IngestStanding,
        "projectors[]": standing.ProjectorStanding,
    }
    known = {f"{part}.{field.name}" for part, kind in parts.items() for field in fields(kind)}
    known |= {"order.head", "problems", "ledger.epoch", "ledger.slot_state", "violations.records"}
    rows = table_rows(section("docs/operations.md", "What to watch"))
    named = {name for row in rows for name in ticked(row[0])}
    assert named - known == set()
    assert named >= {"slot.wal_status", "slot.retained_bytes", "ingest.heartbeat_age", "projectors[].lag_events"}


# -- Python ---------------------------------------------------------------------------


PYTHON = [(page, line, block) for page in PAGES for line, block in fences(page, "python")]


@pytest.mark.parametrize(("page", "line", "block"), PYTHON, ids=[f"{relative(p)}:{n}" for p, n, _ in PYTHON])
def test_python_that_is_shown_compiles_and_imports(page: Path, line: int, block: str) -> None:
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    compile("\n" * (line - 1) + block, str(page), "exec", flags=flags)
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "walstream":
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                assert hasattr(module, alias.name), f"{node.module} has no {alias.name}"


def test_options_of_a_projector_are_all_described() -> None:
    from walstream import Projector

    rows = table_rows(section("docs/projectors.md", "Options"))
    listed = {name: row for row in rows for name in ticked(row[0])}
    assert set(listed) == set(Projector.__annotations__)
    for name, row in listed.items():
        default = getattr(Projector, name)
        if default not in ("", (), None):
            assert shown_default(default) in ticked(row[1]), name


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_json_that_is_shown_is_json(page: Path) -> None:
    for _, block in fences(page, "json"):
        for line in block.splitlines() if block.count("\n{") else [block]:
            json.loads(line)
