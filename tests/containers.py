"""Postgres in a container, where a Docker engine answers."""

from __future__ import annotations

import contextlib
import gc
import time
import warnings
from collections.abc import Iterator

import psycopg2
import pytest
from psycopg2.extensions import make_dsn

PASSWORD = "not a secret"
COMMAND = (
    "postgres -c wal_level=logical -c max_slot_wal_keep_size=8GB -c max_replication_slots=40 -c max_wal_senders=40"
    " -c max_prepared_transactions=20 -c fsync=off"
)
START_SECONDS = 120


def require_engine() -> None:
    """Skip the test, saying why, unless a Docker engine answers (``DOCKER_HOST`` names another one)."""
    docker = pytest.importorskip("docker", reason="needs the package `docker`")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # the package leaves its socket open when nobody answers
        try:
            docker.from_env(timeout=5).close()  # asks for the engine's version
            return
        except docker.errors.DockerException as error:
            reason = str(error)
        gc.collect()
    pytest.skip(f"no Docker engine answers: {reason}")


@contextlib.contextmanager
def postgres(image: str) -> Iterator[str]:
    """A container of ``image`` (any that takes the variables of the official one); yields the superuser's DSN."""
    from testcontainers.core.container import DockerContainer

    made = DockerContainer(image).with_env("POSTGRES_PASSWORD", PASSWORD).with_command(COMMAND).with_exposed_ports(5432)
    with made as running:
        dsn = make_dsn(
            host=running.get_container_host_ip(),
            port=running.get_exposed_port(5432),
            user="postgres",
            password=PASSWORD,
            dbname="postgres",
        )
        _await_connections(dsn)
        yield dsn


def _await_connections(dsn: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            psycopg2.connect(dsn, connect_timeout=5).close()
            return
        except psycopg2.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
