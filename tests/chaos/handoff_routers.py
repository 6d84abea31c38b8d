"""A stream with two routers of different names, which submit the same handoffs, to be killed."""

from __future__ import annotations

import os

from walstream import Stream
from walstream.config import ProjectorSettings
from walstream.projectors.handoff_router import HandoffRouter


class SecondRouter(HandoffRouter):
    """The same rules once more."""

    name = "second-router"


_small = {name: ProjectorSettings(batch=5) for name in ("handoff-router", "second-router")}

stream = Stream(os.environ["WALSTREAM_DSN"], projectors=_small)
stream.add(HandoffRouter(agents=("writer",), max_hops=0))
stream.add(SecondRouter(agents=("writer",), max_hops=0))
