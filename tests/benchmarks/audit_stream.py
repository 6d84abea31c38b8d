"""The stream of the audit benchmark."""

from __future__ import annotations

import os

from walstream import Stream
from walstream.projectors.audit_sink import AuditSink

stream = Stream()
stream.add(AuditSink(os.environ["BENCHMARK_AUDIT"]))
