"""Workers for the demo that do their turns and leave no effect, so that nobody can see how far they are."""

from __future__ import annotations

from tests.demo_lossy import never
from walstream.demo.workers import worker_of

researcher = worker_of("researcher", never)
writer = worker_of("writer", never)
reviewer = worker_of("reviewer", never)
