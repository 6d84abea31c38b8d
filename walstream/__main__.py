"""``python -m walstream``: the same as the console script."""

from walstream.cli import main

main()
