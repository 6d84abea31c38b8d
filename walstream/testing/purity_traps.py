"""Traps for what a pure function may not do: they see the calls of one function, and are gone when it has returned.

Python tells a profile function about every call that Python code makes, of C functions by the function itself; so the
clock is recognized however its function was imported or renamed. What C code calls by itself (``map(time.time, …)``) is
not seen there; in a process of its own, audit hooks (which Python never removes) see files, sockets and the like
whoever opens them. Whatever escapes both shows itself when the results of two runs differ.
"""

from __future__ import annotations

import datetime
import gc
import io
import os
import random
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any, Final, NamedTuple

# C functions by the module that holds them; None: all of them.
_C_FUNCTIONS: Final[dict[str, frozenset[str] | None]] = {
    **dict.fromkeys(
        (
            "posix",
            "nt",
            "_socket",
            "_ssl",
            "select",
            "signal",
            "_signal",
            "mmap",
            "fcntl",
            "_posixsubprocess",
            "_multiprocessing",
            "resource",
            "pwd",
            "grp",
            "_uuid",
            "_locale",
            "_sqlite3",
            "_ctypes",
            "psycopg2._psycopg",
            "faulthandler",
        )
    ),
    "time": None,
    "_io": frozenset({"open", "open_code"}),
    "io": frozenset({"open", "open_code"}),
    "builtins": frozenset({"id", "input", "breakpoint", "open"}),
    "_thread": frozenset({"start_new_thread", "start_new", "start_joinable_thread"}),
    "sys": frozenset({"getrefcount"}),
    "gc": None,
    "_random": None,
}
_HARMLESS: Final = frozenset(  # they look at nothing but their arguments
    {"fspath", "struct_time", "_path_splitroot", "_path_splitroot_ex", "_path_normpath"}
)

# Python functions by the package that they are in.
_PACKAGES: Final = frozenset(
    {
        "aiohttp",
        "asyncio",
        "asyncpg",
        "boto3",
        "botocore",
        "concurrent",
        "ftplib",
        "getpass",
        "glob",
        "http",
        "httpx",
        "multiprocessing",
        "psycopg",
        "psycopg2",
        "redis",
        "requests",
        "shutil",
        "smtplib",
        "socket",
        "sqlalchemy",
        "sqlite3",
        "ssl",
        "subprocess",
        "tempfile",
        "threading",
        "urllib3",
    }
)
_MODULES: Final = frozenset({"urllib.request"})

_AUDITED: Final = (
    "open",
    "os.",
    "socket.",
    "subprocess.",
    "shutil.",
    "tempfile.",
    "glob.",
    "urllib.",
    "http.",
    "sqlite3.",
    "ctypes.",
    "_thread.",
    "time.sleep",
    "fcntl.",
    "signal.",
    "webbrowser.",
)

_ENVIRONMENT: Final = {
    each.__code__
    for each in vars(type(os.environ)).values()
    if hasattr(each, "__code__") and each.__name__ != "__init__"
}
_IN_MEMORY: Final = (io.StringIO, io.BytesIO)
_CLOCKS: Final = frozenset({"now", "today", "utcnow"})
_SHARED_RANDOM: Final = getattr(random.random, "__self__", None)  # what the functions of the module are methods of
_STDLIB: Final = tuple({os.path.join(sysconfig.get_paths()[key], "") for key in ("stdlib", "platstdlib")})
_OWN: Final = os.path.dirname(__file__)


class Forbidden(NamedTuple):
    """A call that a pure function may not make.

    Attributes:
        what: the function, by the name under which it was called.
        place: ``file:line in function``, of the code that called it.
    """

    what: str
    place: str


class ForbiddenCall(BaseException):
    """Raised in place of the call. No ``Exception``, so that a fold that catches those does not go on."""


class Traps:
    """Where trapped calls are noted. The first one of a function counts: it is raised there."""

    def __init__(self) -> None:
        self.caught: Forbidden | None = None

    @contextmanager
    def set(self) -> Iterator[None]:
        """Trap whatever is called inside. What was there before is put back, whatever happens.

        Raises:
            ForbiddenCall: unless the code inside swallows it; ``caught`` says what it was.
        """
        self.caught = None
        before, collecting = sys.getprofile(), gc.isenabled()
        gc.disable()  # a finalizer of somebody else's object would run here, and close a file
        _audit.active = self
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(before)
            _audit.active = None
            if collecting:
                gc.enable()

    def _profile(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "c_call":
            name = _c_call(arg)
            if name is not None:
                self.catch(frame, name)
        elif event == "call":
            module = frame.f_globals.get("__name__") or ""
            code = frame.f_code
            if code in _ENVIRONMENT:
                self.catch(frame, "os.environ")
            elif module.partition(".")[0] in _PACKAGES or module in _MODULES:
                self.catch(frame, f"{module}.{code.co_qualname}")

    def catch(self, frame: FrameType, name: str) -> None:
        """Note the call and raise, unless an import does it."""
        found = _locate(frame, name)
        if found is not None:
            if self.caught is None:
                self.caught = found
            raise ForbiddenCall(f"{found.what} at {found.place}")


def _c_call(function: Any) -> str | None:
    """The name of a C function if it is forbidden."""
    owner = getattr(function, "__self__", None)
    name = getattr(function, "__name__", "")
    if isinstance(owner, ModuleType):
        module = owner.__name__
        names = _C_FUNCTIONS.get(module, frozenset())
        if (names is None or name in names) and name not in _HARMLESS:
            return f"{'os' if module in ('posix', 'nt') else module.removeprefix('_')}.{name}".replace("builtins.", "")
    elif isinstance(owner, type):
        if name in _CLOCKS and issubclass(owner, datetime.date):
            return f"{owner.__name__}.{name}"
    elif isinstance(owner, io.IOBase) and not isinstance(owner, _IN_MEMORY):
        # One that was opened before. What goes to the terminal is nobody's concern, as with `print`.
        if all(owner is not each for each in (sys.stdout, sys.stderr)):
            return f"{type(owner).__name__}.{name}"
    elif isinstance(owner, random.SystemRandom) or owner is _SHARED_RANDOM:
        # One with a seed of its own is pure; one that seeded itself gives another result the next time.
        return f"random.{name}"
    return None


def _locate(frame: FrameType | None, name: str) -> Forbidden | None:
    """Whose call it was: the innermost code that is not the standard library's. ``None``: of an import statement."""
    if _importing(frame):
        return None
    what = name
    at = frame
    while at is not None and is_stdlib(at.f_code.co_filename):
        what = f"{at.f_globals.get('__name__') or ''}.{at.f_code.co_qualname}"
        at = at.f_back
    if at is None or at.f_code.co_filename.startswith(_OWN + os.sep + "purity"):
        return Forbidden(name, "unknown")
    if what not in (name, f"random.Random.{name.rpartition('.')[2]}") and name != "os.environ":
        what = f"{what.replace('random.Random.', 'random.')} ({name})"
    elif name == "os.environ":
        what = name
    return Forbidden(what, f"{at.f_code.co_filename}:{at.f_lineno} in {at.f_code.co_qualname}")


def _importing(frame: FrameType | None) -> bool:
    """Whether an import is at work: it reads files, once, and hooks of others may take part in it."""
    while frame is not None and not frame.f_code.co_filename.startswith(_OWN + os.sep + "purity"):
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def is_stdlib(file: str) -> bool:
    """Whether code of this file belongs to Python itself."""
    return file.startswith("<frozen ") or (
        file.startswith(_STDLIB) and "site-packages" not in file and "dist-packages" not in file
    )


class _Audit:
    """The audit hook of a process that exists for one check. Outside of a trap it does nothing."""

    def __init__(self) -> None:
        self.active: Traps | None = None

    def __call__(self, event: str, _arguments: tuple[Any, ...]) -> None:
        traps = self.active
        if traps is not None and event.startswith(_AUDITED):
            traps.catch(sys._getframe(1), event)


_audit: Final = _Audit()


def audit_this_process() -> None:
    """Add the audit hook, for good: only for a process of our own."""
    sys.addaudithook(_audit)
