"""What a failure of Postgres means: one table from the server's words to *retry*, *stop*, and the remedy.

Two kinds of failure reach us. One carries an SQLSTATE (documentation, appendix A "PostgreSQL Error Codes"); that
decides, with the text only where one code serves several faults. The other carries none: everything that fails while a
connection is being made, and a replication stream whose server went away, which psycopg2 reports as a bare
``DatabaseError`` ("error with status PGRES_COPY_BOTH and no message from the libpq"). There the text is all there is.

Whatever the table does not know ends the process: an unknown failure that is retried for ever is a stream that stands
still behind a green light. (A server that speaks another language than English while somebody logs in is such a case:
the text of a failed login follows the *server's* ``lc_messages``.)
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import psycopg2

from walstream.errors import (
    ConfigError,
    ConnectionLost,
    DecodeError,
    LedgerError,
    SlotError,
    SlotGone,
    Unavailable,
    WalstreamError,
)
from walstream.lsn import parse_lsn


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of failure.

    Attributes:
        name: a short name, for logs and tests.
        error: what it becomes; whether it is transient is that class's attribute.
        hint: the remedy an operator reads.
        states: SQLSTATEs, or their first two characters for a whole class.
        text: with an SQLSTATE, what the text must contain as well (a regular expression); empty means anything.
        bare: without an SQLSTATE, what the text must contain; empty means that it never comes without one.
    """

    name: str
    error: type[WalstreamError]
    hint: str = ""
    states: tuple[str, ...] = ()
    text: str = ""
    bare: str = ""

    def covers(self, state: str | None, text: str) -> bool:
        """Whether a failure with this SQLSTATE (``None``: none) and text is of this kind."""
        if state is None:
            return bool(self.bare) and re.search(self.bare, text, re.IGNORECASE) is not None
        if not any(state.startswith(prefix) for prefix in self.states):
            return False
        return not self.text or re.search(self.text, text, re.IGNORECASE) is not None


_ROLE_HINT: Final = (
    "give the login REPLICATION (`ALTER ROLE … REPLICATION`; on RDS and Aurora `GRANT rds_replication TO …`) "
    "and let pg_hba.conf accept it"
)
_INIT_HINT: Final = "run `walstream init`, and check `namespace`, `ledger` and the database in the DSN"

# The first that covers the failure wins, so the particular stands before the general.
KINDS: Final[tuple[Kind, ...]] = (
    # -- poolers in the path ------------------------------------------------------------------------------------------
    Kind(
        "pooler",
        ConfigError,
        "a connection pooler is in the path and refuses session settings or replication: give walstream the address of "
        "Postgres itself (replication_dsn for the stream alone), or a session-mode pool that lets `options` through",
        states=("08P01",),
        text="unsupported startup parameter|replication connections",
        bare=r"unsupported startup parameter|not allowed in transaction pooling|bouncer config error",
    ),
    # -- who we are ---------------------------------------------------------------------------------------------------
    Kind(
        "row security",
        ConfigError,
        "row security is on for this table and this role is subject to it; walstream reads with row_security = off, so "
        "that a policy fails loudly instead of hiding rows, because logical decoding sees them all. Use a role with "
        "BYPASSRLS, or the table's owner (without FORCE ROW LEVEL SECURITY)",
        states=("42501",),
        text="row-level security",
    ),
    Kind(
        "replication privilege",
        ConfigError,
        _ROLE_HINT,
        states=("42501", "28000"),
        text="replication|wal sender|walsender|reserved for roles",
        bare=r"to start wal ?sender|must be superuser or replication role|role .* is not permitted to .*replication",
    ),
    Kind(
        "password",
        ConfigError,
        "check user and password (DSN, PGPASSWORD, ~/.pgpass or service file)",
        states=("28P01",),
        bare=r"password authentication failed|no password supplied|empty password returned|authentication failed|"
        r"authentication method|SASL|SCRAM|tenant or user not found|no such user|channel binding",
    ),
    Kind(
        "pg_hba",
        ConfigError,
        "pg_hba.conf has no line for this host, user and database; a replication connection to one database is matched "
        "by the database's name, and `no encryption` in the message asks for sslmode=require",
        states=("28000",),
        text="pg_hba",
        bare=r"no pg_hba\.conf entry|pg_hba\.conf rejects",
    ),
    Kind(
        "role",
        ConfigError,
        "check the user name in the DSN; the role must exist and have LOGIN",
        states=("28",),
        bare=r"role \".*\" does not exist|is not permitted to log in|no PostgreSQL user name specified",
    ),
    Kind(
        "database",
        ConfigError,
        "check the database name in the DSN, and CONNECT on it",
        states=("3D000",),
        bare=r"database \".*\" does not exist|no such database|is not currently accepting connections|"
        r"permission denied for database|cannot connect to invalid database",
    ),
    Kind(
        "tls",
        ConfigError,
        "check sslmode, sslrootcert, sslcert and sslkey against what the server offers",
        bare=r"server does not support SSL|certificate verify failed|server certificate for|root certificate file|"
        r"private key file|certificate file|sslmode value|sslnegotiation|unrecognized SSL error|"
        r"SSL error: (?!unexpected eof|syscall)|tlsv1 alert|certificate authentication|no encryption",
    ),
    Kind(
        "connection options",
        ConfigError,
        "a setting in `options` (DSN or PGOPTIONS), or one that walstream pins, is refused by this server",
        bare=r"unrecognized configuration parameter|invalid value for parameter|permission denied to set parameter|"
        r"parameter \".*\" cannot be|invalid command-line argument|invalid connection option|invalid port number|"
        r"invalid integer value|socket .*Permission denied",
    ),
    # -- the server is away -------------------------------------------------------------------------------------------
    Kind(
        "starting or stopping",
        Unavailable,
        "the server is starting, stopping or recovering; walstream tries again by itself",
        states=("57P03",),
        bare=r"the database system is |not yet accepting connections|recovery state",
    ),
    Kind(
        "terminated",
        ConnectionLost,
        "an administrator or a restart ended the session; if it keeps happening, look at the server's log and at "
        "`wal_status` of the slot",
        states=("57P01", "57P02"),
        bare="terminating connection",
    ),
    Kind(
        "session timeout",
        ConnectionLost,
        "a timeout of the server ended the session (idle_in_transaction_session_timeout, idle_session_timeout, "
        "transaction_timeout)",
        states=("25P03", "25P04", "57P05"),
    ),
    Kind(
        "too many connections",
        Unavailable,
        "raise max_connections, max_wal_senders or the role's CONNECTION LIMIT, or end what is not needed",
        states=("53300",),
        bare=r"too many clients|remaining connection slots|too many connections|max_wal_senders|max client connections",
    ),
    Kind(
        "no answer",
        Unavailable,
        "check host and port, that the server runs, and the network between",
        bare=r"connection refused|could not translate host name|timeout expired|timed out|no route to host|"
        r"is unreachable|connection to server .* failed: no such file or directory|is the server running|"
        r"session is (not )?read-only|server is (not )?in hot standby|server_login_retry|server login has been failing|"
        r"query_wait_timeout|cannot connect to server|name resolution|nodename nor servname",
    ),
    Kind(
        "connection lost",
        ConnectionLost,
        "the connection broke; walstream connects again by itself",
        states=("08",),
        bare=r"PGRES_|no COPY in progress|no message from the libpq|server closed the connection|connection reset|"
        r"broken pipe|SSL SYSCALL|"
        r"unexpected eof|SSL connection has been closed|could not (receive|send) data|no connection to the server|"
        r"connection (is |already |has been )?(closed|not open)|cursor already closed|lost synchronization|"
        r"connection not open|EOF detected|insufficient data|replication timeout|bad file descriptor",
    ),
    # -- the slot -----------------------------------------------------------------------------------------------------
    Kind(
        "slot busy",
        Unavailable,
        "another session reads this slot; if it is not a walstream that stands by, find it with `SELECT * FROM "
        "pg_stat_activity WHERE pid = …`",
        states=("55006",),
    ),
    Kind(
        "slot missing",
        SlotGone,
        "the slot is gone; `walstream init` makes a new one, and the reconciler takes the events in between from the "
        "ledger itself",
        states=("42704",),
        text="replication slot",
    ),
    Kind(
        "slot of another database",
        SlotError,
        "name this database's own slot, or connect to the database in which the slot was made",
        states=("55000",),
        text="was not created in this database",
    ),
    Kind(
        "slot lost",
        SlotGone,
        "the server gave up the slot's WAL (max_slot_wal_keep_size, or the slot was invalidated): drop it and run "
        "`walstream init`; the reconciler takes what the slot did not deliver from the ledger itself",
        states=("55000", "58P01"),
        text="invalidated|can no longer (get|access)|cannot read from (logical )?replication slot|already been removed|"
        "exceeded the maximum reserved size",
    ),
    Kind(
        "slot of another plugin",
        SlotError,
        "this slot was not made with pgoutput: name another slot, or drop it and run `walstream init`",
        states=("22023",),
        text="option .* is unknown",
    ),
    Kind(
        "slots in use",
        ConfigError,
        "raise max_replication_slots, or drop a slot that nobody reads (`SELECT slot_name, active FROM "
        "pg_replication_slots`)",
        states=("53400",),
    ),
    Kind(
        "slot exists",
        SlotError,
        "a slot of this name exists already; name another, or drop it with `SELECT pg_drop_replication_slot(…)`",
        states=("42710",),
        text="replication slot",
    ),
    Kind(
        "publication",
        ConfigError,
        "if the publication is missing, run `walstream init`. If it exists, it was created after the slot's position, "
        "and the changes in between cannot be decoded through it: drop the slot and run `walstream init` (the "
        "reconciler takes the events in between from the ledger), or step over them with `SELECT "
        "pg_replication_slot_advance(…, pg_current_wal_lsn())`",
        states=("42704",),
        text="publication",
    ),
    Kind(
        "wal_level",
        ConfigError,
        "set wal_level = logical and restart the server (a parameter group on managed Postgres: "
        "rds.logical_replication = 1, cloudsql.logical_decoding = on)",
        states=("55000",),
        text="wal_level",
    ),
    Kind(
        "standby",
        Unavailable,
        "this server is a read-only standby: connect to the primary (target_session_attrs=read-write)",
        states=("25006", "55000"),
        text="read-only transaction|recovery is in progress|in recovery|during recovery",
    ),
    Kind(
        "stream options",
        ConfigError,
        "this server does not know an option that walstream sends; PostgreSQL 14 or newer is needed",
        states=("22023", "0A000", "XX000"),
        text="proto_version|protocol|pgoutput option|conflicting or redundant options|in the startup callback",
    ),
    Kind(
        "undecodable",
        DecodeError,
        "the server itself cannot decode this change, and every retry will fail at the same place. Nothing was "
        "acknowledged. After the cause is understood, `walstream slot skip` steps over that one transaction: what of "
        "it can be read is taken from the ledger, what cannot is given up, and that is on record",
        states=("54000", "22021", "22P05", "XX"),
        text="output plugin|associated LSN",
    ),
    # -- ordinary SQL -------------------------------------------------------------------------------------------------
    Kind("lock timeout", Unavailable, "another session holds the lock; see pg_locks", states=("55P03",)),
    Kind("conflict", Unavailable, "a concurrent transaction was in the way; the same is tried again", states=("40",)),
    Kind(
        "cancelled", Unavailable, "a timeout (statement_timeout) or a person cancelled the statement", states=("57014",)
    ),
    Kind(
        "resources",
        Unavailable,
        "the server is out of disk space, memory, processes or the like",
        states=("53", "58030"),
        # What a server says that cannot even start a process for the connection, and what libpq makes of that if it
        # has just asked for TLS.
        bare=r"could not fork new process|error response during SSL exchange",
    ),
    Kind(
        "privilege",
        ConfigError,
        "a privilege is missing: docs/operations.md, "
        '"Roles and grants", has what each command needs, and `walstream init --grants ROLE` what `walstream run` does',
        states=("42501",),
    ),
    Kind("not set up", ConfigError, _INIT_HINT, states=("42P01", "3F000", "42703", "42883", "42704")),
    Kind("damaged", LedgerError, "the server reports damaged data; see its log", states=("XX001", "XX002")),
)

_LSN_IN_CONTEXT = re.compile(r"associated LSN ([0-9A-F]+/[0-9A-F]+)")


def kind_of(error: BaseException) -> Kind | None:
    """The kind of failure that ``error`` is, or ``None`` if the table does not know it."""
    state = error.pgcode if isinstance(error, psycopg2.Error) else None
    text = str(error)
    for kind in KINDS:
        if kind.covers(state, text):
            return kind
    return None


def classify(error: BaseException, *, doing: str) -> WalstreamError:
    """Return ``error`` as one of ours: transient or final, with the remedy.

    Args:
        error: what the driver (or a socket) raised. One of ours comes back as it is.
        doing: what was being done, to begin the message with: ``"reading slot walstream"``.
    """
    if isinstance(error, WalstreamError):
        return error
    message = f"{doing}: {_words(error)}"
    kind = kind_of(error)
    if kind is not None:
        if issubclass(kind.error, DecodeError):
            found = _LSN_IN_CONTEXT.search(str(error))
            return kind.error(message, lsn=parse_lsn(found[1]) if found else 0, hint=kind.hint)
        return kind.error(message, hint=kind.hint)
    if isinstance(error, OSError):
        return ConnectionLost(message, hint="the network or the system failed; walstream connects again by itself")
    state = error.pgcode if isinstance(error, psycopg2.Error) else None
    named = f" (SQLSTATE {state})" if state else f" ({type(error).__name__})"
    return WalstreamError(message + named, hint="walstream does not know this failure, and so it stops here")


def _words(error: BaseException) -> str:
    """The server's words on one line: message, detail and context, without the driver's decoration."""
    if isinstance(error, psycopg2.Error) and error.pgcode is not None and error.diag.message_primary:
        parts = [error.diag.message_primary, error.diag.message_detail, error.diag.context]
    else:
        parts = [str(error)]
    return "; ".join(" ".join(part.split()) for part in parts if part) or type(error).__name__


def younger_publication(words: str, slot: str) -> SlotGone:
    """The error where the publication was not there at the position that the slot reads.

    Args:
        words: how the server put it.
        slot: its name.
    """
    return SlotGone(
        f"{words}. If it is there now, it is younger than the slot's position: decoding uses the catalogues as "
        "they were when each change was made",
        hint=f"SELECT pg_drop_replication_slot('{slot}'), then `walstream init`; the reconciler takes what "
        "the slot could not deliver from the ledger",
    )
