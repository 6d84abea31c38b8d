"""Configuration: one model, filled from flags, environment, ``walstream.toml`` and arguments, in that order.

Everything that ``Stream(...)`` takes and every flag of the command line is a field here, so that each setting is
described once. See docs/operations.md for the table.
"""

from __future__ import annotations

import hashlib
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import ErrorDetails

from .errors import ConfigError

DEFAULT_FILE: Final = Path("walstream.toml")
ENV_PREFIX: Final = "WALSTREAM_"

MiB: Final = 1024 * 1024

_NAME_LIMIT: Final = 63  # bytes of a channel's name (NAMEDATALEN - 1)

# libpq takes what stands before a slash for the host, and what comes behind the first @, so a password with one of them
# in it becomes a piece of the host, the port or the database's name; and those are shown in messages.
_BARE_IN_PASSWORD: Final = re.compile(r"postgres(?:ql)?://(?:[^?]*/[^?]*@|[^/?]*@[^/?]*@)")


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Columns(_Model):
    """What the ledger's table calls the six columns that walstream needs."""

    seq: str = "seq"
    session_id: str = "session_id"
    agent_id: str = "agent_id"
    event_type: str = "event_type"
    payload: str = "payload"
    created_at: str = "created_at"

    def names(self) -> tuple[str, str, str, str, str, str]:
        """The names in the fixed order of ``walstream.event.Row``."""
        return (self.seq, self.session_id, self.agent_id, self.event_type, self.payload, self.created_at)


class LedgerTable(_Model):
    """Where the ledger stands: the table and its mapping."""

    namespace: str = Field("public", min_length=1, description="schema of the table")
    table: str = Field("agent_events", min_length=1, description="name of the table")
    columns: Columns = Columns()
    snapshots: str = Field("agent_snapshots", description="table of the snapshots, in the same schema")
    jobs: str = Field("agent_jobs", description="table of the jobs, in the same schema")

    @property
    def qualified(self) -> str:
        """``"schema"."table"``, quoted for SQL."""
        return self.beside(self.table)

    def beside(self, table: str) -> str:
        """A table of the ledger's schema, quoted for SQL."""
        return f"{quote(self.namespace)}.{quote(table)}"


class ProjectorSettings(_Model):
    """Options of one projector, each of which overrides what its class says. ``None`` leaves the class's own."""

    start: Literal["earliest", "latest"] | int | None = Field(None, description="where a new projector begins")
    on_poison: Literal["park", "halt"] | None = Field(None, description="after the last attempt")
    max_attempts: int | None = Field(None, ge=1)
    lanes: int | None = Field(None, ge=1, le=256)
    batch: int | None = Field(None, ge=1, description="events handed over at once, at the most")
    deadline: float | None = Field(None, gt=0, description="seconds a transactional batch may take")
    options: dict[str, Any] = Field(default_factory=dict, description="passed to the projector as keyword arguments")


_UNITS: Final = {"kB": 1024, "MB": MiB, "GB": 1024 * MiB, "TB": 1024 * 1024 * MiB}
_SIZE: Final = re.compile(r"^([1-9][0-9]{0,8})(kB|MB|GB|TB)$")


class DropRule(_Model):
    """The one slot that ``walstream guard`` may drop, and from which amount of retained WAL on."""

    slot: str = Field(pattern=r"^[a-z0-9_]{1,63}$")
    above: int = Field(gt=0, description="bytes of retained WAL, or a text such as 40GB")
    active: bool = Field(False, description="also while somebody reads it: that session is ended")

    @field_validator("above", mode="before")
    @classmethod
    def _above_is_a_size(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        found = _SIZE.match(value)
        if found is None:
            raise ValueError("a size is a whole number and kB, MB, GB or TB")
        return int(found[1]) * _UNITS[found[2]]


class GuardSettings(_Model):
    """When the guard of the slot says what (docs/operations.md, "The guard")."""

    interval_seconds: float = Field(15.0, ge=0.1, description="between two looks")
    warn_share: float = Field(0.5, gt=0, le=1, description="of what the slot may keep")
    critical_share: float = Field(0.8, gt=0, le=1)
    warn_seconds: float = Field(14400.0, ge=0, description="until the slot is lost, at the present rate")
    critical_seconds: float = Field(1800.0, ge=0)
    transaction_seconds: float = Field(300.0, ge=0, description="a transaction open for longer is named as a cause")
    storm_factor: float = Field(5.0, ge=0, description="times its own recent past that are a storm; 0 is off")
    drop: DropRule | None = Field(None, description="a table {slot, above, active}; without it nothing is ever dropped")


class Settings(_Model):
    """All settings of one stream."""

    dsn: str = Field("", repr=False, description="libpq connection string or URI of the database that holds the ledger")
    replication_dsn: str | None = Field(
        None, repr=False, description="another one for the replication connection (past a pooler)"
    )
    namespace: str = Field("walstream", description="schema of walstream's own tables, one a stream")
    ledger: LedgerTable = LedgerTable()
    slot: str = Field("walstream", pattern=r"^[a-z0-9_]{1,63}$", description="name of the replication slot")
    publication: str = Field("walstream", min_length=1, max_length=63)
    environment: str = Field("default", min_length=1, description="production, staging, …: a copy must not pass for it")
    allow_unbounded_slot: bool = Field(False, description="run although max_slot_wal_keep_size is -1")
    violations: Literal["record", "halt", "ignore"] = Field(
        "record",
        description="when somebody changes the ledger: put it on record; ingest also halts; or nothing",
    )
    failover_slot: Literal["auto", "on", "off"] = Field(
        "auto", description="whether standbys may keep a copy of the slot (17 and newer); auto: where the server can"
    )
    recover_slot: Literal["auto", "never"] = Field(
        "auto", description="whether `run` makes a slot anew that was lost; what it missed is taken from the ledger"
    )

    buffer_bytes: int = Field(48 * MiB, ge=MiB, description="hot buffer: events kept in memory for projectors")
    pending_bytes: int = Field(16 * MiB, ge=MiB, description="received and not yet ordered, at the most")
    chunk_bytes: int = Field(
        4 * MiB, ge=64 * 1024, description="a segment's payload, at the most (a larger event is its own)"
    )
    lease_seconds: float = Field(10.0, ge=1, description="a silent ingest is replaced after this long")
    idle_persist_seconds: float = Field(30.0, ge=0.1, description="how often an idle position is written down")
    liveness_seconds: float = Field(5.0, ge=1, description="silence after which a canary must come through the stream")
    poll_seconds: float = Field(1.0, gt=0, description="readers look for new order this often when nobody wakes them")
    connect_timeout: int = Field(10, ge=2, description="seconds for a connection to be made")
    drain_seconds: float = Field(10.0, ge=0, description="at SIGTERM: time for projectors to finish their batch")
    retry_cap_seconds: float = Field(30.0, gt=0, description="longest pause between two attempts to reconnect")

    metrics_listen: str | None = Field(None, description="HOST:PORT for /metrics, /healthz, /readyz; off without it")
    fold: str | None = Field(None, description="`package.module:name` of the application's own fold, where it has one")
    guard: GuardSettings = GuardSettings()
    projectors: dict[str, ProjectorSettings] = Field(default_factory=dict)
    otlp_endpoint: str | None = Field(None, description="URL of an OpenTelemetry collector for metrics; off without it")

    @field_validator("dsn", "replication_dsn")
    @classmethod
    def _dsn_is_one_line(cls, value: str | None) -> str | None:
        if value and ("\0" in value or "\n" in value):
            raise ValueError("a connection string is one line")
        if value and _BARE_IN_PASSWORD.match(value):
            raise ValueError("user or password of a URI holds a / or an @, which have to be written %2F and %40")
        return value

    @field_validator("namespace")
    @classmethod
    def _namespace_is_a_name(cls, value: str) -> str:
        # It stands in every statement, and the driver reads `%` in those that have parameters. The ledger's own names
        # may hold it: the statements with them are written for it.
        if not 1 <= len(value.encode()) <= 63 or "%" in value or "\0" in value:
            raise ValueError("a schema's name has 1 to 63 bytes, and none of them is % or NUL")
        return value

    def require_dsn(self) -> str:
        """Return the connection string.

        Raises:
            ConfigError: none was given.
        """
        if not self.dsn:
            raise ConfigError(
                "no database was named",
                hint=f"give --dsn, set {ENV_PREFIX}DSN, or write dsn = '…' into {DEFAULT_FILE}",
            )
        return self.dsn


def load(
    flags: Mapping[str, Any] | None = None,
    *,
    file: Path | None = None,
    arguments: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """Merge the four sources into settings: flags win over environment over file over arguments.

    Args:
        flags: what the command line gave; ``None`` values count as absent.
        file: a TOML file; without it ``walstream.toml`` in the working directory is read if it is there.
        arguments: what the Python program passed to ``Stream(...)``.
        environ: instead of ``os.environ``.

    Raises:
        ConfigError: a file is missing or not TOML, a key is unknown, a value does not fit.
    """
    environ = os.environ if environ is None else environ
    if file is None and environ.get(f"{ENV_PREFIX}CONFIG"):
        file = Path(environ[f"{ENV_PREFIX}CONFIG"])
    merged: dict[str, Any] = {}
    layers: dict[str, Mapping[str, Any]] = {
        "the program": arguments or {},
        str(file or DEFAULT_FILE): _read_file(file),
        "the environment": _read_environment(environ),
        "the command line": flags or {},
    }
    for layer in layers.values():
        _merge(merged, {key: value for key, value in layer.items() if value is not None})
    try:
        return Settings.model_validate(merged)
    except ValidationError as error:
        lines = "; ".join(_told(each, layers) for each in error.errors(include_input=False))
        raise ConfigError(
            f"the configuration does not fit: {lines}",
            hint="the table of settings in docs/operations.md has every key, with its default",
        ) from None


def quote(identifier: str) -> str:
    """Quote an SQL identifier (documentation, 4.1.1 "Identifiers and Key Words").

    Raises:
        ConfigError: it holds a NUL character, which no identifier can.
    """
    if "\0" in identifier:
        raise ConfigError(f"{identifier!r} cannot be a name in SQL")
    return '"' + identifier.replace('"', '""') + '"'


def channel(namespace: str, what: str) -> str:
    """The channel of NOTIFY on which a stream announces something.

    Args:
        namespace: schema of walstream's own tables.
        what: ``commit_order`` for growth of the order, ``jobs`` for jobs that wait.
    """
    name = f"{namespace}.{what}"
    if len(name.encode()) > _NAME_LIMIT:
        # Names of that length are cut, and two streams would then hear each other.
        kept = "" if what == "commit_order" else f"{what}."
        name = f"walstream.{kept}{hashlib.sha256(namespace.encode()).hexdigest()[:32]}"
    return name


def _told(error: ErrorDetails, layers: Mapping[str, Mapping[str, Any]]) -> str:
    """One error: where it was said, which key, what is wrong with it."""
    path = [str(part) for part in error["loc"]]
    name = ".".join(path)
    where = next((where for where, layer in reversed(list(layers.items())) if _holds(layer, path)), "")
    if where == "the environment":
        name = ENV_PREFIX + "__".join(path).upper()
    elif where:
        name = f"{where}: {name}"
    if error["type"] != "extra_forbidden":
        return f"{name}: {error['msg']}"
    close = get_close_matches(path[-1], Settings.model_fields, 1) if len(path) == 1 else ()
    return f"{name}: there is no such key" + (f"; {close[0]!r} is one" if close else "")


def _holds(layer: Mapping[str, Any], path: Sequence[str]) -> bool:
    step: Any = layer
    for part in path:
        if not isinstance(step, Mapping) or step.get(part) is None:
            return False
        step = step[part]
    return True


def _merge(into: dict[str, Any], layer: Mapping[str, Any]) -> None:
    for key, value in layer.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        elif isinstance(value, Mapping):
            into[key] = {}
            _merge(into[key], value)
        else:
            into[key] = value


def _read_file(file: Path | None) -> dict[str, Any]:
    if file is None:
        if not DEFAULT_FILE.is_file():
            return {}
        file = DEFAULT_FILE
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read the configuration {file}: {error}") from None


def _read_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """``WALSTREAM_SLOT=…``; two underscores step into a table: ``WALSTREAM_LEDGER__TABLE=…``."""
    found: dict[str, Any] = {}
    known = Settings.model_fields
    for name, value in environ.items():
        if not name.startswith(ENV_PREFIX):
            continue
        path = name[len(ENV_PREFIX) :].lower().split("__")
        if path[0] not in known or not value:
            continue  # WALSTREAM_TEST_DSN, WALSTREAM_PG_BIN and the like are not settings of a stream
        step = found
        for part in path[:-1]:
            step = step.setdefault(part, {})
            if not isinstance(step, dict):
                raise ConfigError(f"{name} steps into {part!r}, which another variable sets as a whole")
        if isinstance(step.get(path[-1]), dict):
            raise ConfigError(f"{name} sets as a whole what another variable steps into")
        step[path[-1]] = value
    return found
