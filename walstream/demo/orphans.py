"""No process of the demo outlives it: one that is killed with SIGKILL cannot stop its children, so they look."""

from __future__ import annotations

import os
import threading
import time
from typing import Final

from walstream.config import ENV_PREFIX

PARENT_VARIABLE: Final = f"{ENV_PREFIX}DEMO_PARENT"
"""Environment variable with the demo's process id: a child whose parent is another one was orphaned, and ends."""


def end_with_the_demo() -> None:
    """End this process when the demo's is gone. Does nothing in a process that no demo started."""
    named = os.environ.get(PARENT_VARIABLE)
    if not named:
        return
    parent = int(named)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()
