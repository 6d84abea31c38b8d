"""Event types of one's own: what the user says in between, and notes that the agent keeps for itself.

    walstream init
    python own_event_type.py
    walstream fold check --fold own_event_type:fold

With `fold = "own_event_type:fold"` in walstream.toml (or WALSTREAM_FOLD), every command and the snapshot writer use it.
"""

import os
import sys
import uuid

import psycopg2

from walstream import Fold, Ledger, add_message, rebuild_context, sendable

fold = Fold()


@fold.on("user.said")
def user_said(context, event):
    # Not context["messages"].append: a call that is still open gets its answer first, as a provider demands.
    add_message(context, {"role": "user", "content": event.payload["text"]})


@fold.on("note.added", version=2)  # raised when the function changed: snapshots of version 1 are no longer used
def note_added(context, event):
    context.setdefault("notes", []).append(event.payload["text"])


def main():
    session = sys.argv[1] if len(sys.argv) > 1 else str(uuid.uuid4())
    call = {"id": "call_1", "type": "function", "function": {"name": "search", "arguments": '{"for": "tests"}'}}
    ledger = Ledger()
    with psycopg2.connect(os.environ["WALSTREAM_DSN"]) as conn:
        for event_type, payload in (
            ("user.said", {"text": "Find the failing test."}),
            ("model.responded", {"message": {"role": "assistant", "content": None, "tool_calls": [call]}}),
            ("tool.invoked", {"call_id": "call_1", "name": "search", "arguments": {"for": "tests"}}),
            ("note.added", {"text": "there are 12 test files"}),
            ("user.said", {"text": "Never mind, run all of them."}),
        ):
            ledger.append(session, "agent", event_type, payload, on=conn)
        context = rebuild_context(conn, session, fold=fold)
    for message in sendable(context):
        print(f"{message['role']}: {message['content'] or [c['function']['name'] for c in message['tool_calls']]}")
    print(f"notes: {context['notes']}, fold version: {fold.version}")


if __name__ == "__main__":
    main()
