"""Exit codes and transience are promises to scripts and to the reconnecting loop: they change knowingly or never."""

from __future__ import annotations

import pytest

from walstream import errors
from walstream.errors import ExitCode, WalstreamError

PROMISED: dict[type[WalstreamError], tuple[int, bool]] = {
    errors.WalstreamError: (1, False),
    errors.ConfigError: (3, False),
    errors.PublicationGone: (3, False),
    errors.Unavailable: (4, True),
    errors.ConnectionLost: (4, True),
    errors.Stalled: (4, True),
    errors.SlotError: (5, False),
    errors.SlotGone: (5, False),
    errors.DecodeError: (6, False),
    errors.LedgerError: (6, False),
    errors.RowMissing: (6, False),
    errors.PayloadError: (6, False),
    errors.UnknownSession: (3, False),
    errors.RecoveryBusy: (4, True),
    errors.CallSettled: (1, False),
    errors.JobRefused: (1, False),
    errors.ApprovalRefused: (1, False),
    errors.Fenced: (8, False),
    errors.ProjectorHalted: (7, False),
    errors.GiveUp: (1, False),
    errors.RetryLater: (1, False),
}


def test_every_error_is_promised() -> None:
    defined = {each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, WalstreamError)}
    assert defined == set(PROMISED)


@pytest.mark.parametrize("kind", PROMISED)
def test_exit_code_and_transience(kind: type[WalstreamError]) -> None:
    assert (int(kind.exit_code), kind.transient) == PROMISED[kind]


def test_exit_codes_are_told_apart_and_fit_a_shell() -> None:
    assert [int(code) for code in ExitCode] == list(range(9))


def test_the_remedy_stands_beside_the_message() -> None:
    error = errors.SlotError("slot 'agents' is lost", hint="run `walstream init`")
    assert str(error) == "slot 'agents' is lost"
    assert error.hint == "run `walstream init`"
    assert WalstreamError("x").hint == ""


def test_a_decode_error_names_tag_and_lsn() -> None:
    error = errors.DecodeError("3 bytes are missing", tag="I", lsn=0x16B374D848)
    assert str(error) == "3 bytes are missing in message 'I' at LSN 16/B374D848"
    assert (error.reason, error.tag, error.lsn) == ("3 bytes are missing", "I", 0x16B374D848)
    assert str(errors.DecodeError("an empty message")) == "an empty message"


def test_a_projector_may_ask_for_a_delay() -> None:
    assert errors.RetryLater().delay is None
    assert errors.RetryLater("the broker is away", delay=2.5).delay == 2.5
