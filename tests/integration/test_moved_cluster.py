"""A ledger that is dumped and restored into another cluster goes on there, once somebody has said so."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

from tests.cli_calls import call, ok
from tests.conftest import Database
from tests.integration.streams import Installed
from walstream.errors import ExitCode, SlotError
from walstream.postgres import PostgresServer
from walstream.wiring import make_host


def test_dump_and_restore(own_server: Callable[..., PostgresServer]) -> None:
    old, new = own_server(), own_server()
    for server in (old, new):
        server.execute("CREATE DATABASE moved")
    before = Installed(Database(old, "moved", made=True))
    with before.host():
        before.insert("one", "two", "three")
        # The old WAL is far longer than the new one will be: its positions mean nothing there.
        old.execute("SELECT pg_logical_emit_message(false, 'fill', repeat('x', 30000000))")
        before.insert("four")
        assert before.wait_ordered() == [1, 2, 3, 4]
    dump = subprocess.run(
        [str(old.bin_dir / "pg_dump"), "-d", old.dsn("moved")], capture_output=True, text=True, check=True
    ).stdout
    subprocess.run(
        [str(new.bin_dir / "psql"), "-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", new.dsn("moved")],
        input=dump,
        capture_output=True,
        text=True,
        check=True,
    )
    database = Database(new, "moved", made=True)
    slot = ("--slot", before.settings.slot)

    host = make_host(before.settings.model_copy(update={"dsn": database.dsn}), [])
    with pytest.raises(SlotError, match="another history"):
        host.start()
    called = call("init", *slot, dsn=database.dsn)
    assert called.exit_code == ExitCode.CONFIG
    assert "walstream adopt" in called.stderr

    adopted = ok("adopt", *slot, "--same-epoch", "--yes", "--json", dsn=database.dsn).json
    assert [change["what"] for change in adopted["changes"]][:1] == ["system_identifier"]
    assert "position" in [change["what"] for change in adopted["changes"]]
    # Slots are in no dump: `run` makes one.
    after: Installed = object.__new__(Installed)
    after.place, after.settings = database, before.settings.model_copy(update={"dsn": database.dsn})
    with after.host():
        after.insert("five", "six")
        assert sorted(after.wait_ordered()) == [1, 2, 3, 4, 5, 6]
        after.insert("seven")
        assert after.wait_ordered()[-1] == 7
    assert after.ordered()[:4] == [1, 2, 3, 4], "what had an offset has kept it"
    assert database.execute("SELECT kind, cause ~ 'there is no slot' FROM walstream.recoveries ORDER BY id") == [
        ("birth", False),
        ("rebirth", True),
    ]
