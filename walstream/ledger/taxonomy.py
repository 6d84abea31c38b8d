"""The payloads of the taxonomy's event types, as pydantic models.

They say what readers rely on: a call has an id, a window is a list of messages. Further members are welcome everywhere.
Types that are not listed here are plain JSON to walstream; an application can add models of its own::

    ledger = Ledger(types={**TAXONOMY, "note.added": NoteAdded})
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, StrictInt, ValidationError, model_validator

from walstream.errors import PayloadError


class Payload(BaseModel):
    """Base of them: members that a model does not name are kept."""

    model_config = ConfigDict(extra="allow")


class ContextLoaded(Payload):
    """``context.loaded``: the exact window that is sent to the model, in OpenAI's chat form.

    With ``store_messages=True`` each distinct message is stored once, and the event holds their digests.
    """

    messages: list[dict[str, Any]]

    @model_validator(mode="before")
    @classmethod
    def _digests_are_ours(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and "message_digests" in value:
            raise ValueError("the member message_digests is what walstream puts in the place of stored messages")
        return value


class ModelRequested(Payload):
    """``model.requested``: which model is asked, how, and a hash of the prompt."""

    model: str
    parameters: dict[str, Any] | None = None
    prompt_hash: str | None = None


class ModelResponded(Payload):
    """``model.responded``: the assistant's message (or the provider's raw ``response``), why it ended, what it cost."""

    message: dict[str, Any] | None = None
    response: Any = None
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None


class ToolInvoked(Payload):
    """``tool.invoked``: a tool is about to be executed. Append it, and commit, before it is."""

    call_id: str
    name: str | None = None
    arguments: Any = None
    idempotency_key: str | None = None


class ToolObserved(Payload):
    """``tool.observed``: the call came back, with a result or an error."""

    call_id: str
    result: Any = None
    error: Any = None


class ToolRetried(Payload):
    """``tool.retried``: a call that was in flight when its worker died is executed again, under the same key."""

    call_id: str
    attempt: StrictInt
    idempotency_key: str | None = None
    name: str | None = None
    arguments: Any = None


class ToolAbandoned(Payload):
    """``tool.abandoned``: a call that was in flight is given up."""

    call_id: str
    reason: str | None = None


class HandoffEmitted(Payload):
    """``handoff.emitted``: a task, or a message, for another agent."""

    to: str | None = None
    message: Any = None


class HandoffReceived(Payload):
    """``handoff.received``: the other agent has taken it."""

    message: Any = None


class ApprovalRequested(Payload):
    """``approval.requested``: a person is to decide whether the action may be done. ``request_approval`` appends it."""

    action: Any
    job_id: StrictInt | None = None
    deadline: str | None = None
    reason: str | None = None


class ApprovalGranted(Payload):
    """``approval.granted``: it may be done, or, if there is an ``edit``, that. ``decide_approval`` appends it."""

    request: StrictInt
    job_id: StrictInt | None = None
    by: str | None = None
    edit: Any = None
    reason: str | None = None


class ApprovalRejected(Payload):
    """``approval.rejected``: it may not be done. ``decide_approval`` appends it, or ``expire_approvals``."""

    request: StrictInt
    job_id: StrictInt | None = None
    by: str | None = None
    reason: str | None = None


class TaskCompleted(Payload):
    """``task.completed``: the session's task is done."""

    result: Any = None


class TaskFailed(Payload):
    """``task.failed``: it cannot be done."""

    error: Any = None


class SessionForked(Payload):
    """``session.forked``: this session goes on from a point of another one. ``Ledger.fork`` appends it."""

    parent_session: str
    at_seq: StrictInt


TAXONOMY: Final[Mapping[str, type[BaseModel]]] = MappingProxyType(
    {
        "context.loaded": ContextLoaded,
        "model.requested": ModelRequested,
        "model.responded": ModelResponded,
        "tool.invoked": ToolInvoked,
        "tool.observed": ToolObserved,
        "tool.retried": ToolRetried,
        "tool.abandoned": ToolAbandoned,
        "handoff.emitted": HandoffEmitted,
        "handoff.received": HandoffReceived,
        "approval.requested": ApprovalRequested,
        "approval.granted": ApprovalGranted,
        "approval.rejected": ApprovalRejected,
        "task.completed": TaskCompleted,
        "task.failed": TaskFailed,
        "session.forked": SessionForked,
    }
)
"""The models by event type."""


def payload_value(event_type: str, payload: Any, types: Mapping[str, type[BaseModel]]) -> Any:
    """What is to be stored of a payload: the value itself, checked against its type's model if there is one.

    A dict is stored as it was given; what a validator of the model makes of it is not. Of an instance of a model
    everything is stored but what was neither given nor has another default than ``None``.

    Raises:
        PayloadError: it does not fit its type.
    """
    model = types.get(event_type)
    if isinstance(payload, BaseModel):
        if model is not None and not isinstance(payload, model):
            raise PayloadError(
                f"the payload of {event_type} has to be a {model.__name__}, not a {type(payload).__name__}",
                hint="the model and the event type have to belong together",
            )
        value = payload.model_dump(by_alias=True)
        unsaid = [name for name in type(payload).model_fields if name not in payload.model_fields_set]
        for name in unsaid:
            field = type(payload).model_fields[name]
            key = field.serialization_alias or name
            if value.get(key) is None:
                value.pop(key, None)
        return value
    if model is not None:
        try:
            model.model_validate(payload)
        except ValidationError as error:
            lines = "; ".join(
                f"{'.'.join(map(str, each['loc'])) or 'payload'}: {each['msg']}"
                for each in error.errors(include_input=False, include_url=False, include_context=False)
            )
            raise PayloadError(
                f"this is no payload of {event_type}: {lines}",
                hint=f"walstream.payloads.{model.__name__} says what belongs in it"
                if model in TAXONOMY.values()
                else f"{model.__name__} says what belongs in it",
            ) from None
    return payload
