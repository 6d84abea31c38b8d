"""A stream with the audit sink, for tests that kill it: the directory and its options come from the environment."""

from __future__ import annotations

import os

from walstream import Stream
from walstream.projectors.audit_sink import AuditSink

stream = Stream()
stream.add(
    AuditSink(
        os.environ["AUDIT_DIRECTORY"],
        key=os.environ["AUDIT_KEY"],
        heads_to=os.environ["AUDIT_HEADS"],
        head_every=50,
        head_seconds=1,
        roll_bytes=int(os.environ.get("AUDIT_ROLL_BYTES", "20000")),
    )
)
