"""``walstream audit``: verify, read and export what the audit sink has put on record; make a key for its heads."""

from __future__ import annotations

from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from walstream.errors import ConfigError, ExitCode

from . import console, violations
from .options import Json, takes_settings
from .session import PATIENT, installed

if TYPE_CHECKING:
    from walstream.audit.heads import Head
    from walstream.audit.keys import Verifier
    from walstream.audit.ledger_comparison import Comparison
    from walstream.audit.reading import Wanted
    from walstream.audit.verifying import Finding, Report
    from walstream.config import Settings

SINK: Final = "audit-sink"
_FINDINGS_SHOWN: Final = 20

Where = Annotated[
    Path | None,
    typer.Argument(
        metavar="[DIRECTORY]",
        help="The sink's directory; the one in the configuration if not given.",
        show_default=False,
    ),
]
From = Annotated[
    int | None, typer.Option("--from", metavar="OFFSET", min=1, help="From this offset on.", show_default=False)
]
To = Annotated[int | None, typer.Option("--to", metavar="OFFSET", min=1, help="Up to this offset.", show_default=False)]
SessionId = Annotated[
    str | None, typer.Option("--session", metavar="ID", help="Only this session.", show_default=False)
]
Agent = Annotated[str | None, typer.Option("--agent", metavar="ID", help="Only this agent.", show_default=False)]
Types = Annotated[
    list[str] | None,
    typer.Option("--type", metavar="TYPE", help="Only this event type; can be repeated.", show_default=False),
]
Since = Annotated[
    str | None,
    typer.Option("--since", metavar="TIME", help="Committed at this time or later (ISO 8601).", show_default=False),
]
Until = Annotated[
    str | None, typer.Option("--until", metavar="TIME", help="Committed before this time.", show_default=False)
]


def register(app: typer.Typer) -> None:
    """Add the command and those below it."""
    group = typer.Typer(help="What the audit sink has put on record.", no_args_is_help=True)
    group.command()(verify)
    group.command()(show)
    group.command()(export)
    group.command()(keygen)
    violations.register(group)
    app.add_typer(group, name="audit")


@takes_settings
def verify(
    settings: Settings,
    directory: Where = None,
    *,
    ledger: Annotated[bool, typer.Option("--ledger", help="Compare every record with the ledger as well.")] = False,
    first: From = None,
    last: To = None,
    key: Annotated[
        Path | None,
        typer.Option(
            "--key", metavar="FILE", help="The public key of the heads; the sink's if not given.", show_default=False
        ),
    ] = None,
    heads: Annotated[
        list[str] | None,
        typer.Option(
            "--heads",
            metavar="PLACE",
            help="Heads in a second place: a file, a directory, or table:NAME; the sink's if not given.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Verify chain, signatures and offsets; with --ledger also that the ledger still says the same.

    The first difference is named by segment, record, offset and seq. Exit code 1 if there is one. Violations and
    erasures on record are counted, and with a database violations that nobody has acknowledged: they are no difference.
    """
    from walstream.audit.ledger_comparison import LedgerComparison
    from walstream.audit.verifying import about_how_many, chosen_segments
    from walstream.audit.verifying import verify as verify_trail

    from .progress import FillBar

    where = _directory(settings, directory)
    verifier = _verifier(settings, key)
    others = _other_heads(settings, heads)
    compared: Comparison | None = None
    with FillBar() as bar:
        bar.begin("records", about_how_many(chosen_segments(where, first, last)))
        try:
            report = verify_trail(
                where, verifier=verifier, other_heads=others, first=first, last=last, progress=bar.advance
            )
            if ledger:
                bar.begin("compared with the ledger", report.events)
                with installed(settings, "audit", None, PATIENT) as conn:
                    segments = chosen_segments(where, first, last)
                    compared = LedgerComparison(
                        conn, settings, segments, first=first, last=last, progress=bar.advance
                    ).run()
        except OSError as error:
            raise ConfigError(f"{error.filename or where} cannot be read: {error.strerror}") from None
    findings = [*report.findings, *(compared.findings if compared else ())]
    unacknowledged = violations.open_if_known(settings)
    if isinstance(unacknowledged, str):
        report.notes.append(f"violations that nobody has acknowledged could not be counted: {unacknowledged}")
        unacknowledged = None
    if as_json:
        document = {
            **asdict(report),
            "unacknowledged": None if unacknowledged is None else unacknowledged.records,
            "ledger": asdict(compared) if compared else None,
        }
        console.print_json({"directory": where, "verified": not findings, **document})
    else:
        _show_verified(where, report, unacknowledged, compared, findings)
    if findings:
        raise typer.Exit(ExitCode.FAILED)


@takes_settings
def show(
    settings: Settings,
    directory: Where = None,
    *,
    session: SessionId = None,
    agent: Agent = None,
    types: Types = None,
    first: From = None,
    last: To = None,
    since: Since = None,
    until: Until = None,
    kinds: Annotated[
        list[str] | None,
        typer.Option(
            "--kind",
            metavar="KIND",
            help="Only records of this kind, such as violation; can be repeated.",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="At most so many.", show_default=False)] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", callback=console.ask_for_json, is_eager=True, help="The records as they stand, one a line."
        ),
    ] = False,
) -> None:
    """Show records, in the order of the chain."""
    wanted = replace(_wanted(session, agent, types, first, last, since, until), kinds=tuple(kinds or ()))
    for shown, (line, record, fields) in enumerate(_records(settings, directory, wanted)):
        if limit is not None and shown == limit:
            console.note(f"the first {limit} are shown; --limit shows more")
            break
        if as_json:
            console.say(line.decode())
        else:
            from .shown import one_line

            payload = "(erased)" if record.payload is None else one_line(record.payload.decode())
            at = str(fields.get("committed_at") or fields.get("recorded_at"))[:23].replace("T", " ")
            names = " ".join(
                one_line(str(fields[name])) for name in ("session_id", "agent_id", "event_type") if name in fields
            )
            console.say(f"{record.offset or '-':>10} {record.seq or '-':>10} {at} {names or record.kind} {payload}")


@takes_settings
def export(
    settings: Settings,
    directory: Where = None,
    *,
    parquet: Annotated[
        Path | None, typer.Option("--parquet", metavar="FILE", help="The file to write.", show_default=False)
    ] = None,
    session: SessionId = None,
    agent: Agent = None,
    types: Types = None,
    first: From = None,
    last: To = None,
    since: Since = None,
    until: Until = None,
    as_json: Json = False,
) -> None:
    """Write records to a Parquet file, for analysis."""
    from walstream.audit.export import write_parquet

    from .progress import FillBar

    if parquet is None:
        raise typer.BadParameter("say where to: --parquet FILE")
    wanted = _wanted(session, agent, types, first, last, since, until)
    with FillBar() as bar:
        bar.begin("records", None)
        count = write_parquet(iter(_records(settings, directory, wanted)), parquet, bar.advance)
    if as_json:
        console.print_json({"file": parquet, "records": count})
    else:
        console.say(f"{count:,} records are in {parquet}")


def keygen(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Of the private key; the public one gets .pub.", show_default=False)
    ],
    *,
    as_json: Json = False,
) -> None:
    """Make a key pair for heads. The private key belongs to the sink alone, the public one to whoever verifies."""
    from walstream.audit.keys import generate

    public, key_id = generate(file)
    if as_json:
        console.print_json({"private": file, "public": public, "id": key_id})
    else:
        console.say(f"key {key_id}: {file} signs, {public} verifies")


# -- what they share ---------------------------------------------------------------------------------------------------


def _options(settings: Settings) -> dict[str, Any]:
    """The sink's options in the configuration."""
    configured = settings.projectors.get(SINK)
    return configured.options if configured else {}


def _directory(settings: Settings, given: Path | None) -> Path:
    configured = _options(settings).get("directory")
    if given is not None:
        return given
    if configured is None:
        raise ConfigError(
            "no audit directory was named",
            hint=f"give it, or set it in the configuration: [projectors.{SINK}] options = {{ directory = '…' }}",
        )
    return Path(configured)


def _verifier(settings: Settings, key: Path | None) -> Verifier | None:
    from walstream.audit.keys import load_signer, load_verifier

    configured = _options(settings).get("key")
    if key is not None:
        return load_verifier(key)
    if configured is not None:
        public = Path(f"{configured}.pub")  # whoever verifies need not be able to read the other one
        return load_verifier(public if public.exists() else configured)
    signer = load_signer(None)
    return signer.verifier if signer else None


def _other_heads(settings: Settings, places: list[str] | None) -> list[Head]:
    from walstream.audit.head_places import heads_of_table, table_called
    from walstream.audit.heads import read_heads

    configured = _options(settings).get("heads_to") or []
    if not places:
        places = [configured] if isinstance(configured, str) else list(configured)
    found: list[Head] = []
    for place in places:
        if place == "stdout":
            continue  # wherever that went, it has to be named
        if place.startswith("table:"):
            found += heads_of_table(settings, table_called(place))
            continue
        try:
            found += read_heads(Path(place))
        except OSError as error:
            raise ConfigError(f"the heads in {place} cannot be read: {error.strerror}") from None
    return found


def _wanted(
    session: str | None,
    agent: str | None,
    types: list[str] | None,
    first: int | None,
    last: int | None,
    since: str | None,
    until: str | None,
) -> Wanted:
    from walstream.audit.reading import Wanted

    return Wanted(first, last, session, agent, tuple(types or ()), (), _time("--since", since), _time("--until", until))


def _time(option: str, text: str | None) -> datetime | None:
    if text is None:
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is no time; write it like 2026-01-31T12:00:00Z", param_hint=option
        ) from None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def _records(settings: Settings, directory: Path | None, wanted: Wanted) -> Any:
    from walstream.audit.reading import read
    from walstream.audit.record import NoRecord
    from walstream.audit.segments import DamagedFile
    from walstream.audit.verifying import chosen_segments
    from walstream.errors import LedgerError

    where = _directory(settings, directory)
    try:
        yield from read(chosen_segments(where, wanted.first, wanted.last), wanted)
    except (NoRecord, DamagedFile) as error:
        raise LedgerError(f"{where} is damaged: {error}", hint="run `walstream audit verify`") from None
    except OSError as error:
        raise ConfigError(f"{error.filename or where} cannot be read: {error.strerror}") from None


def _show_verified(
    where: Path,
    report: Report,
    unacknowledged: violations.OpenViolations | None,
    compared: Comparison | None,
    findings: list[Finding],
) -> None:
    for index, finding in enumerate(findings[:_FINDINGS_SHOWN]):
        console.say(f"{'FIRST DIFFERENCE' if not index else 'also'}: {_in_words(finding)}")
    if len(findings) > _FINDINGS_SHOWN:
        console.say(f"and {len(findings) - _FINDINGS_SHOWN} more; --json has them")
    for note in report.notes:
        console.note(f"note: {note}")
    console.say(
        f"{where}: records {report.first_n:,} to {report.last_n:,}, offsets {report.first_offset or 0:,} to"
        f" {report.last_offset or 0:,}; {report.heads:,} heads, {report.signed:,} with a good signature, vouch for all"
        f" up to record {report.vouched_n:,}"
    )
    left = "" if unacknowledged is None else f"; in the database {unacknowledged.records:,} are not acknowledged"
    console.say(
        f"on record: violations: {report.violations:,} ({report.changes:,} changes of the ledger){left}; declared"
        f" erasures: {report.erasures:,} ({report.blanked:,} payloads)"
    )
    if compared is not None:
        console.say(
            f"ledger: {compared.same:,} of {compared.compared:,} rows are the same, {compared.missing:,} are missing,"
            f" {compared.altered:,} altered, {compared.extra:,} extra, {compared.misplaced:,} in another place;"
            f" {compared.erased:,} are gone by declaration, {compared.behind:,} are not on record yet"
        )
        if compared.unordered:
            console.note(f"note: {compared.unordered:,} rows have no offset yet, and nobody ingests")
    console.say("verified" if not findings else "NOT verified")


def _in_words(finding: Finding) -> str:
    place = {"segment": finding.segment, "record": finding.n, "offset": finding.offset, "seq": finding.seq}
    named = ", ".join(f"{name} {value}" for name, value in place.items() if value is not None)
    return f"{finding.kind}: {finding.what}" + (f" ({named})" if named else "")
