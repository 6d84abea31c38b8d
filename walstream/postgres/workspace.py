"""The folder of one server, and the promise that nothing outlives its owner.

A folder is owned by the process that holds a lock on a file in it; the kernel drops the lock when that process dies,
however it dies. Two things look after the rest: a watchdog, a shell that waits for the end of a pipe that only the
owner holds, ends the server at once; and whoever makes the next folder sweeps those that nobody owns (the machine
went down, the watchdog was killed too).
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from .binaries import Account, place_for

_PREFIX: Final = "walstream-pg-"
_OWNED: Final = "owned"  # locked by the owner
_KEPT: Final = "kept"  # stands there once the server is meant to outlive its owner
_SOCKETS: Final = "s"

# A socket's path has to fit into sun_path: 108 bytes with its NUL on Linux, 104 on macOS and the BSDs (unix(4)).
_LONGEST_SOCKET: Final = 103

# $1 is the data directory, $2 the workspace, $3 the folder of the sockets. The owner says `over` when there is nothing
# left to do; the end of the pipe without a word means that it died. SIGQUIT is the server's own "immediate shutdown".
_WATCHDOG: Final = """
read -r word
[ "$word" = over ] && exit 0
if read -r pid < "$1/postmaster.pid"; then
    kill -s QUIT "$pid"
    n=0
    while kill -s 0 "$pid" && [ $n -lt 100 ]; do sleep 0.1; n=$((n + 1)); done
fi
rm -rf -- "$2" "$3"
"""


def run_as(account: Account | None) -> dict[str, Any]:
    """Return the arguments of :mod:`subprocess` that make a child run as ``account``."""
    if account is None:
        return {}
    return {"user": account.uid, "group": account.gid, "extra_groups": []}


class Workspace:
    """A folder in the temp directory that belongs to ``account`` and that this process owns.

    Attributes:
        path: the folder.
        data: where the server's data directory goes.
        sockets: the folder for its socket, closed to everybody else; elsewhere if the path would be too long.
        log: what the server reports.
    """

    def __init__(self, account: Account | None) -> None:
        place = place_for(account)
        sweep(place)
        self._account = account
        self.path = self._folder(place)
        self.data = self.path / "data"
        self.log = self.path / "log"
        self.sockets = self._socket_folder()
        self._lock = os.open(self.path / "new", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        (self.path / "new").rename(self.path / _OWNED)  # locked before a sweep can see it
        self._watchdog: subprocess.Popen[bytes] | None = subprocess.Popen(
            ["/bin/sh", "-c", _WATCHDOG, "walstream-watchdog", self.data, self.path, self.sockets],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,  # Ctrl-C in the terminal is the owner's to answer
            **run_as(account),
        )

    def remove(self) -> None:
        """Remove the folder, which no server uses any more."""
        shutil.rmtree(self.path, ignore_errors=True)
        shutil.rmtree(self.sockets, ignore_errors=True)
        self._let_go()

    def keep(self) -> None:
        """Leave the folder and its server where they are when this process ends."""
        (self.path / _KEPT).touch()
        self._let_go()

    def _let_go(self) -> None:
        watchdog, self._watchdog = self._watchdog, None
        if watchdog is None:
            return
        try:
            watchdog.communicate(b"over\n", timeout=5)
        except (OSError, subprocess.TimeoutExpired):
            watchdog.kill()
            watchdog.wait()
        os.close(self._lock)

    def _socket_folder(self) -> Path:
        folder = self.path / _SOCKETS
        if len(os.fsencode(folder / ".s.PGSQL.65535")) <= _LONGEST_SOCKET:
            folder.mkdir(mode=0o700)
            self._give(folder)
            return folder
        elsewhere = self._folder(Path("/tmp"))
        folder.symlink_to(elsewhere)  # so that a sweep finds it
        return elsewhere

    def _folder(self, place: Path) -> Path:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
        self._give(folder)
        return folder

    def _give(self, folder: Path) -> None:
        if self._account is not None:
            os.chown(folder, self._account.uid, self._account.gid)


def sweep(place: Path) -> None:
    """End the servers and remove the folders in ``place`` whose owner is dead and that nobody meant to keep."""
    for folder in place.glob(f"{_PREFIX}*"):
        try:
            lock = os.open(folder / _OWNED, os.O_RDWR)
        except OSError:
            continue  # somebody else's, or just being made, or just being removed
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not (folder / _KEPT).exists():
                _end(postmaster_pid(folder / "data"))
                shutil.rmtree((folder / _SOCKETS).resolve(), ignore_errors=True)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            pass  # its owner lives
        finally:
            os.close(lock)


def postmaster_pid(data: Path) -> int | None:
    """Return the process id of the server that runs on ``data``, or ``None`` if none does.

    A server that was killed leaves its pid file behind (first line: the pid, see ``LOCK_FILE_LINE_PID`` in Postgres's
    ``miscadmin.h``), and the number may be another process's by now: its command line has to name ``data``.
    """
    try:
        pid = int((data / "postmaster.pid").read_text().splitlines()[0])
    except (OSError, ValueError, IndexError):
        return None
    return pid if os.fsencode(data) in _command_line(pid) else None


def forget_dead_postmaster(data: Path, sockets: Path) -> None:
    """Keep a dead server's pid from stopping the next one.

    Where process 1 reaps no orphans (many containers), a killed postmaster stays a zombie whose pid looks alive, and
    the next one refuses to start. The pid file is not removed, because Postgres reads from its other lines whether
    children of the dead one still use the shared memory: only the number becomes one that no process has.
    """
    file = data / "postmaster.pid"
    if file.exists() and postmaster_pid(data) is None:
        _, _, rest = file.read_text().partition("\n")
        file.write_text(f"{2**31 - 1}\n{rest}")
        for lock in sockets.glob("*.lock"):  # beside the socket, with the same pid in it
            lock.unlink()


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        if Path("/proc/self").exists():
            return b""
    told = subprocess.run(["ps", "-o", "command=", "-p", str(pid)], capture_output=True, check=False)  # macOS, BSD
    return told.stdout


def _end(pid: int | None) -> None:
    if pid is None:
        return
    for number, patience in ((signal.SIGQUIT, 10.0), (signal.SIGKILL, 2.0)):
        try:
            os.kill(pid, number)
            deadline = time.monotonic() + patience
            while time.monotonic() < deadline:
                os.kill(pid, 0)
                time.sleep(0.05)
        except ProcessLookupError:
            return
