"""What the SQL functions refuse, said in our words."""

from __future__ import annotations

from walstream.errors import ApprovalRefused, ConfigError, Fenced, JobRefused, LedgerError, WalstreamError

from .adapters import failure


def refusal(error: Exception, namespace: str, function: str, what: str, doing: str = "append") -> WalstreamError | None:
    """Our error for what a function refused; ``None`` for everything else, which stays the driver's.

    Args:
        namespace: the schema of walstream's own tables.
        function: which one was called (or which of walstream's tables was read).
        what: what it was about: a session, a job, a request.
        doing: what a login that lacks the grant may not do.
    """
    found = failure(error)
    if found is None:
        return None
    said = found.message.removeprefix("walstream: ")
    if found.state == "WS001":
        return Fenced(
            f"{what}: {said}",
            hint="roll back and stop: whoever has the job now goes on from what is in the ledger",
        )
    if found.state == "WS002":
        return LedgerError(
            f"{what}: {said}",
            hint="`walstream approvals list` lists what can be decided"
            if function == "decide_approval"
            else "the job was removed, or it is a job of another ledger",
        )
    if found.state == "WS003":
        return LedgerError(said, hint="`walstream events SESSION` shows a session's seqs")
    if found.state == "WS004":
        return JobRefused(said, hint="`walstream jobs show JOB` shows how it stands")
    if found.state == "WS005":
        return ApprovalRefused(said, hint="`walstream approvals show SEQ` shows how it stands")
    if found.state == "22P02" and "uuid" in said and found.inside:
        return LedgerError(f"{what}: {said}", hint="the ledger's session ids are UUIDs")
    if found.state == "23514" and "no partition" in said:
        return LedgerError(f"{what}: {said}", hint="`walstream partitions` makes partitions ahead of time")
    if found.inside:
        return None
    if found.state == "3F000":
        return ConfigError(f"walstream is not installed here: {said}", hint="run `walstream init`")
    if found.state in ("42883", "42P01") and f"{namespace}.{function}" in said:
        return ConfigError(
            f"the schema {namespace!r} has no {'function' if found.state == '42883' else 'table'} {function!r}",
            hint="run `walstream migrate`, which brings an older schema up to date",
        )
    if found.state == "42501":
        role = "--approver" if function == "decide_approval" else "--worker"
        return ConfigError(f"this role may not {doing}: {said}", hint=f"as the owner: `walstream init {role} ROLE`")
    return None
