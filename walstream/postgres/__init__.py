"""A Postgres server of one's own, for the demo and for tests."""

from .server import PostgresServer

__all__ = ["PostgresServer"]
