"""The command line: one file per command, and the place where everything is wired together. Nobody imports it."""

from .app import app, main

__all__ = ["app", "main"]
