"""A small agent that survives `kill -9`: whenever it is started, it goes on where the one before died.

    walstream init
    python agent_loop.py

It pays invoices from an account that stands in the same database. Kill it wherever you like, as often as you like, or
start two of them at once: each invoice is paid once, and the ledger says what was tried when.
"""

import json
import os
import sys
import uuid

import psycopg2

from walstream import Draft, Ledger, idempotency_key, recover

AGENT = "payer"
SESSION = sys.argv[1] if len(sys.argv) > 1 else str(uuid.uuid5(uuid.NAMESPACE_URL, "agent_loop.py"))
INVOICES = [["acme", 120], ["globex", 75], ["initech", 310]]

TABLES = """
SELECT pg_advisory_xact_lock(1);  -- two that start at once: one makes the tables
CREATE TABLE IF NOT EXISTS accounts (name text PRIMARY KEY, balance bigint NOT NULL);
CREATE TABLE IF NOT EXISTS payments (id bigserial PRIMARY KEY, session text, invoice text, amount bigint);
INSERT INTO accounts VALUES ('ours', 1000000), ('acme', 0), ('globex', 0), ('initech', 0) ON CONFLICT DO NOTHING;
"""

ledger = Ledger()


def main() -> None:
    conn = psycopg2.connect(os.environ["WALSTREAM_DSN"], application_name="agent_loop")
    with conn, conn.cursor() as cur:
        cur.execute(TABLES)
    task = {"role": "user", "content": f"Pay these invoices: {json.dumps(INVOICES)}"}
    with conn:
        # With a key: the second start appends nothing.
        ledger.append(SESSION, AGENT, "context.loaded", {"messages": [task]}, key="begin", on=conn)

    # Inside of this block the session is ours: a second agent waits here until we are done, or dead.
    with recover(conn, SESSION, wait=60) as recovery:
        for call in recovery.calls:  # begun, and nobody knows how far it got
            again = recovery.retry(call)
            conn.commit()  # first the ledger says that it is tried again, then it is tried
            print(f"attempt {again.attempt} of {again.call_id}", flush=True)
            execute(conn, again.call_id, again.name, again.arguments, again.idempotency_key)
        context = recovery.context
        while context["outcome"] is None:
            turn(conn, context["messages"])
            context = recovery.context
        print(f"paid: {context['outcome']['payload']['result']}", flush=True)
    conn.close()


def turn(conn, messages) -> None:
    """Ask the model, and do what it wants."""
    with conn:
        ledger.append(SESSION, AGENT, "model.requested", {"model": "stub"}, on=conn)
    message = model(messages)
    calls = message.get("tool_calls", [])
    with conn:
        # What it wants to do is in the ledger before any of it is done.
        append = [event("model.responded", message=message)]
        append += [
            event("tool.invoked", call_id=call["id"], idempotency_key=key_of(call), **call["function"])
            for call in calls
        ]
        append += [] if calls else [event("task.completed", result=message["content"])]
        ledger.append_batch(append, on=conn)
    for call in calls:
        execute(conn, call["id"], call["function"]["name"], call["function"]["arguments"], key_of(call))


def execute(conn, call_id, name, arguments, key) -> None:
    """Run a tool. What it does in this database and the event that says so commit together, or not at all."""
    with conn, conn.cursor() as cur:
        result = TOOLS[name](cur, **json.loads(arguments))
        # A tool outside of the database gets `key`, and knows by it that it has done this before.
        answer = {"call_id": call_id, "result": result}
        if not ledger.append(SESSION, AGENT, "tool.observed", answer, key=key, on=cur).appended:
            conn.rollback()  # somebody else was faster; his effect counts, ours never happened


def pay(cur, invoice, amount):
    cur.execute("UPDATE accounts SET balance = balance - %s WHERE name = 'ours'", (amount,))
    cur.execute("UPDATE accounts SET balance = balance + %s WHERE name = %s", (amount, invoice))
    cur.execute("INSERT INTO payments (session, invoice, amount) VALUES (%s, %s, %s)", (SESSION, invoice, amount))
    return f"paid {amount} to {invoice}"


TOOLS = {"pay": pay}


def model(messages):
    """Stands in for a language model. It wants two payments at once, sees the results, and goes on."""
    invoices = json.loads(messages[0]["content"].partition(": ")[2])
    paid = sum(message["role"] == "tool" for message in messages)
    if paid == len(invoices):
        return {"role": "assistant", "content": ", ".join(invoice for invoice, _ in invoices)}
    calls = [
        {
            "id": f"call_{number}",
            "type": "function",
            "function": {"name": "pay", "arguments": json.dumps({"invoice": invoice, "amount": amount})},
        }
        for number, (invoice, amount) in list(enumerate(invoices))[paid : paid + 2]
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def key_of(call):
    return idempotency_key(SESSION, call["id"])


def event(event_type, **payload):
    return Draft(SESSION, AGENT, event_type, payload)


if __name__ == "__main__":
    main()
