"""The payloads of the taxonomy's event types, as pydantic models, for whom they serve (docs/ledger.md, "Append")."""

from walstream.ledger.taxonomy import (
    TAXONOMY,
    ContextLoaded,
    HandoffEmitted,
    HandoffReceived,
    ModelRequested,
    ModelResponded,
    Payload,
    SessionForked,
    TaskCompleted,
    TaskFailed,
    ToolAbandoned,
    ToolInvoked,
    ToolObserved,
    ToolRetried,
)

__all__ = [
    "TAXONOMY",
    "ContextLoaded",
    "HandoffEmitted",
    "HandoffReceived",
    "ModelRequested",
    "ModelResponded",
    "Payload",
    "SessionForked",
    "TaskCompleted",
    "TaskFailed",
    "ToolAbandoned",
    "ToolInvoked",
    "ToolObserved",
    "ToolRetried",
]
