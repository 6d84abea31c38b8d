"""``python -m walstream.cli``: the same as the console script."""

from .app import main

main()
