"""How an error reaches the reader: message, hint, exit code; JSON where asked for; no traceback, no password."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from walstream.cli import console
from walstream.cli.app import Commands, app
from walstream.cli.options import Json, takes_settings
from walstream.config import Settings
from walstream.errors import ConfigError, ExitCode, SlotError, Unavailable, WalstreamError

runner = CliRunner()


def _app_that_raises(error: BaseException) -> typer.Typer:
    sample = typer.Typer(cls=Commands, pretty_exceptions_enable=False)

    @sample.callback()
    def frame() -> None:
        pass

    @sample.command()
    def work(_as_json: Json = False) -> None:
        raise error

    return sample


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (WalstreamError("a"), ExitCode.FAILED),
        (ConfigError("a"), ExitCode.CONFIG),
        (Unavailable("a"), ExitCode.UNAVAILABLE),
        (SlotError("a"), ExitCode.SLOT),
    ],
)
def test_an_expected_error_is_a_message_a_hint_and_its_exit_code(error: WalstreamError, code: ExitCode) -> None:
    error.args = ("the slot [walstream] is gone",)
    error.hint = "run walstream init"
    result = runner.invoke(_app_that_raises(error), ["work"])
    assert result.exit_code == code
    assert result.stdout == ""
    assert result.stderr == "error: the slot [walstream] is gone\n hint: run walstream init\n"


def test_with_json_the_error_is_one_object_on_stderr() -> None:
    result = runner.invoke(_app_that_raises(SlotError("gone", hint="run init")), ["work", "--json"])
    assert result.exit_code == ExitCode.SLOT
    assert result.stdout == ""
    assert json.loads(result.stderr) == {
        "error": "SlotError",
        "message": "gone",
        "hint": "run init",
        "exit_code": 5,
        "transient": False,
    }


def test_the_form_of_one_call_does_not_leak_into_the_next() -> None:
    runner.invoke(_app_that_raises(SlotError("gone")), ["work", "--json"])
    assert runner.invoke(_app_that_raises(SlotError("gone")), ["work"]).stderr == "error: gone\n"


def test_ctrl_c_is_quiet_and_130() -> None:
    result = runner.invoke(_app_that_raises(KeyboardInterrupt()), ["work"])
    assert (result.exit_code, result.output) == (130, "")


def test_an_unexpected_error_keeps_its_traceback() -> None:
    result = runner.invoke(_app_that_raises(ZeroDivisionError("fault")), ["work"])
    assert isinstance(result.exception, ZeroDivisionError)


def test_a_reader_that_goes_away_is_no_error() -> None:
    script = (
        "import sys, typer\n"
        "from walstream.cli.app import Commands\n"
        "app = typer.Typer(cls=Commands)\n"
        "@app.callback()\n"
        "def frame(): pass\n"
        "@app.command()\n"
        "def work():\n"
        "    while True: print('x' * 1000, flush=True)\n"
        "app()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, "work"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    with process:
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


def test_a_reader_that_goes_away_from_a_table_is_no_error() -> None:
    script = (
        "import sys, typer\n"
        "from walstream.cli import console\n"
        "from walstream.cli.app import Commands\n"
        "app = typer.Typer(cls=Commands)\n"
        "@app.callback()\n"
        "def frame(): pass\n"
        "@app.command()\n"
        "def work():\n"
        "    while True: console.out().print('x' * 100)\n"
        "app()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, "work"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


@pytest.mark.parametrize("words", [["status", "postgresql://me:s3cret@h/db"], ["tail", "--limit", "//me:s3cret@h/db"]])
def test_wrong_words_are_quoted_without_the_password(words: list[str]) -> None:
    result = runner.invoke(app, words, env={"COLUMNS": "200"})
    assert result.exit_code == ExitCode.USAGE
    assert "me:***@h/db" in result.stderr or "Input should be" in result.stderr
    assert "s3cret" not in result.output


@pytest.mark.parametrize("words", [["--bogus"], ["extra"], ["--interval", "soon"], ["--slot"]])
def test_with_json_wrong_words_are_one_object_too(words: list[str]) -> None:
    result = runner.invoke(app, ["status", "--json", *words])
    assert (result.exit_code, result.stdout) == (ExitCode.USAGE, "")
    error = json.loads(result.stderr)
    assert (error["error"], error["exit_code"], error["transient"]) == ("UsageError", 2, False)
    assert words[-1] in error["message"] or words[0] in error["message"]


@pytest.mark.parametrize(("no_colour", "coloured"), [("", True), ("1", False)])
def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch, no_colour: str, coloured: bool) -> None:
    written: list[str] = []
    monkeypatch.setenv("NO_COLOR", no_colour)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(typer, "echo", lambda text, **_: written.append(text))
    console.begin()
    console.show_error(ConfigError("a", hint="b"))
    assert ("\x1b" in "".join(written)) is coloured


@pytest.mark.parametrize("rate", ["inf", "nan", "-5"])
@pytest.mark.parametrize("command", [["import", "none.jsonl"], ["demo"]])
def test_a_rate_is_a_number(command: list[str], rate: str) -> None:
    result = runner.invoke(app, [*command, "--rate", rate])
    assert result.exit_code == ExitCode.USAGE, result
    assert "--rate" in result.stderr


@pytest.mark.parametrize("target", [".app:stream", "..:stream"])
def test_a_target_is_a_full_name(target: str) -> None:
    result = runner.invoke(app, ["run", target])
    assert result.exit_code == ExitCode.CONFIG, result
    assert "package.module:name" in result.stderr


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("host=a password=s3cret dbname=b", "host=a password=*** dbname=b"),
        (r"host=a password = 's3 \' cret' dbname=b", "host=a password = *** dbname=b"),
        ("postgresql://me:s3cret@h/db?sslpassword=s3cret&x=1", "postgresql://me:***@h/db?sslpassword=***&x=1"),
        ("postgresql://me:s3:c@ret@h/db", "postgresql://me:***@h/db"),
        ("postgresql://me@h:5432/db", "postgresql://me@h:5432/db"),
        ("password authentication failed for user me", "password authentication failed for user me"),
    ],
)
def test_a_password_is_never_shown(text: str, shown: str) -> None:
    assert console.redact(text) == shown
    result = runner.invoke(_app_that_raises(ConfigError(text, hint=text)), ["work"])
    assert result.stderr == f"error: {shown}\n hint: {shown}\n"


def _settings_of(arguments: list[str], monkeypatch: pytest.MonkeyPatch, directory: Path) -> tuple[Settings, str]:
    monkeypatch.chdir(directory)
    seen: list[tuple[Settings, str]] = []
    sample = typer.Typer(cls=Commands)

    @sample.callback()
    def frame() -> None:
        pass

    @sample.command()
    @takes_settings
    def work(settings: Settings, *, word: str = "none") -> None:
        seen.append((settings, word))

    result = runner.invoke(sample, ["work", *arguments])
    assert result.exit_code == 0, result.output
    return seen[0]


def test_flags_win_over_environment_over_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "walstream.toml").write_text('slot = "file"\npublication = "file"\nnamespace = "file"\n')
    monkeypatch.setenv("WALSTREAM_SLOT", "environment")
    monkeypatch.setenv("WALSTREAM_PUBLICATION", "environment")
    settings, word = _settings_of(["--slot", "flag", "--word", "w"], monkeypatch, tmp_path)
    assert (settings.slot, settings.publication, settings.namespace, word) == ("flag", "environment", "file", "w")


def test_a_table_may_be_named_with_its_schema(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert _settings_of(["--table", "app.steps"], monkeypatch, tmp_path)[0].ledger.qualified == '"app"."steps"'
    assert _settings_of(["--table", "steps"], monkeypatch, tmp_path)[0].ledger.qualified == '"public"."steps"'


def test_version_and_help() -> None:
    assert runner.invoke(app, ["--version"]).stdout.startswith("walstream ")
    assert "Usage" in runner.invoke(app, ["--help"]).stdout


def test_a_command_imports_no_other_one() -> None:
    script = (
        "import sys\n"
        "from walstream.cli import app\n"
        "app(['import', '--help'], standalone_mode=False)\n"
        "names = ('import_', 'doctor', 'worker', 'audit', 'demo')\n"
        "print([name for name in names if f'walstream.cli.{name}' in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "['import_']"


def test_a_word_that_is_no_command_is_compared_with_all_of_them() -> None:
    result = runner.invoke(app, ["sesions"])
    assert result.exit_code == ExitCode.USAGE
    assert "'sessions'" in result.stderr
