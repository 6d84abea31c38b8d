"""Closed segments in object storage: copied, read back, and only then archived; S3 is a server on this machine."""

from __future__ import annotations

import importlib
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.audit_files import event, events, record, settle
from walstream.audit import packing
from walstream.audit.manifest import Manifest
from walstream.audit.segments import segments_in
from walstream.audit.verifying import verify
from walstream.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::pytest.PytestUnraisableExceptionWarning")

ROLL = {"batch": 10, "roll_bytes": 8_000}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "audit"


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, Any]]:
    """Options of s3fs for a server with a bucket ``trail``."""
    servers = pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = servers.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    try:
        host, port = server.get_host_and_port()
        options: dict[str, Any] = {"key": "k", "secret": "s", "endpoint_url": f"http://{host}:{port}"}
        files = importlib.import_module("fsspec").filesystem("s3", **options)
        files.mkdir("trail")
        yield options
    finally:
        server.stop()


def archived(directory: Path) -> list[str | None]:
    manifest = Manifest.read(directory)
    assert manifest is not None
    return [closed.archived for closed in manifest.segments]


def test_closed_segments_are_copied_to_s3(directory: Path, tmp_path: Path, s3: dict[str, Any]) -> None:
    options: dict[str, Any] = {"archive": "s3://trail/audit", "archive_options": s3}
    record(directory, events(1, 80), **ROLL, **options)
    settle(directory, event(80), **options)
    closed = segments_in(directory)[:-1]
    assert len(closed) > 2
    manifest = Manifest.read(directory)
    assert manifest is not None
    folder = f"s3://trail/audit/{manifest.chain[:16]}"
    assert archived(directory) == [f"{folder}/{segment.path.name}" for segment in closed]
    # What is there is a trail as well: with the newest segment and the heads beside it, it verifies.
    copy = tmp_path / "copy"
    shutil.copytree(directory, copy)
    for segment in segments_in(copy)[:-1]:
        segment.path.unlink()
    files = importlib.import_module("fsspec").filesystem("s3", **s3)
    files.get(f"{folder}/*", f"{copy}/")
    assert verify(copy).findings == []
    assert verify(copy).events == 80


def test_a_segment_that_stands_in_the_archive_only_is_told(directory: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"archive": str(tmp_path / "archive")}
    record(directory, events(1, 80), **ROLL, **options)
    settle(directory, event(80), **options)
    oldest = segments_in(directory)[0]
    oldest.path.unlink()
    report = verify(directory)
    assert [each.kind for each in report.findings] == ["chain"]
    assert report.notes[0].startswith(f"{oldest.path.name} is not here; a copy stands at file://{tmp_path}/archive/")


def test_an_archive_that_is_away_holds_nothing_up(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(packing, "PAUSE", 0.0)
    archive = tmp_path / "archive"
    archive.write_text("a file is no folder")
    options: dict[str, Any] = {"archive": str(archive)}
    record(directory, events(1, 80), **ROLL, **options)
    with pytest.raises(AssertionError, match="never settled"):
        settle(directory, event(80), tries=20, **options)
    assert set(archived(directory)) <= {None}
    assert "is not archived yet" in caplog.text
    assert [segment.plain for segment in segments_in(directory)[:-1]] == [None] * (len(segments_in(directory)) - 1)
    assert verify(directory).findings == []
    archive.unlink()
    settle(directory, event(80), **options)
    assert all(archived(directory))


def test_a_copy_that_is_not_the_same_does_not_count(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(packing, "PAUSE", 0.0)
    local = importlib.import_module("fsspec.implementations.local").LocalFileSystem
    put = local.put_file

    def damaging(self: Any, source: str, target: str, **rest: Any) -> None:
        put(self, source, target, **rest)
        Path(target).chmod(0o644)
        Path(target).write_bytes(Path(target).read_bytes()[:-1])

    options: dict[str, Any] = {"archive": str(tmp_path / "archive")}
    monkeypatch.setattr(local, "put_file", damaging)
    record(directory, events(1, 80), **ROLL, **options)
    with pytest.raises(AssertionError, match="never settled"):
        settle(directory, event(80), tries=10, **options)
    assert not any(archived(directory))
    assert "is not what was uploaded" in caplog.text
    monkeypatch.setattr(local, "put_file", put)
    settle(directory, event(80), **options)
    assert all(archived(directory))


def test_an_archive_that_nobody_knows_is_refused(directory: Path) -> None:
    with pytest.raises(ConfigError, match="the archive nowhere://bucket cannot be used"):
        record(directory, events(1, 2), archive="nowhere://bucket")
