"""Three agents and one approval: a planner splits a task, a researcher finds an offer, a buyer asks before it pays.

walstream run three_agents:stream               # the consumer, with the router
walstream worker three_agents:planner           # each in a terminal of its own, or several of each
walstream worker three_agents:researcher
walstream worker three_agents:buyer
python three_agents.py "a chair"                # hands the task to the planner, and waits for the outcome
walstream approvals list                        # the buyer's request
walstream approvals approve SEQ                 # or: edit SEQ --json-edit '{"buy": "a chair", "price": 70}'
"""

import sys
import uuid

import psycopg2

from walstream import Ledger, Stream, Worker, subscribe
from walstream.projectors.handoff_router import HandoffRouter

stream = Stream()
stream.add(HandoffRouter(agents=("planner", "researcher", "buyer")))

planner = Worker(agent="planner")
researcher = Worker(agent="researcher")
buyer = Worker(agent="buyer")


@planner.handle
def plan(_context, job, ledger):
    task = job.handoff.payload["message"]
    ledger.append("model.responded", {"message": {"role": "assistant", "content": f"Find an offer for {task}."}})
    ledger.hand_off("researcher", task)


@researcher.handle
async def search(_context, job, ledger):
    item = job.handoff.payload["message"]
    # Into the ledger first, then out into the world: whoever takes the job after a crash finds the call in flight.
    ledger.append_now("tool.invoked", {"call_id": "search-1", "name": "search", "arguments": {"item": item}})
    offer = {"buy": item, "price": 80}
    ledger.append("tool.observed", {"call_id": "search-1", "result": offer})
    ledger.hand_off("buyer", offer)


@buyer.handle
def buy(_context, job, ledger):
    asked = ledger.approval
    if asked is None:
        ledger.request_approval(job.handoff.payload["message"], reason="everything that costs money")
        return  # the job waits for a person; this worker does not
    if asked.granted:
        action = asked.approved_action
        # The order and the completion commit together, so there is one order, whatever dies.
        ledger.on_completion(
            lambda cur: cur.execute(
                "INSERT INTO orders (job_id, item, price) VALUES (%s, %s, %s)",
                (job.job_id, action["buy"], action["price"]),
            )
        )
        ledger.append("task.completed", {"result": f"ordered {action['buy']} for {action['price']}"})
    else:
        ledger.append("task.failed", {"error": f"not bought: {asked.reason or 'no reason given'}"})


def main(task):
    session = str(uuid.uuid4())
    conn = psycopg2.connect(stream.settings().require_dsn())
    with conn, conn.cursor() as cur:
        cur.execute("CREATE TABLE IF NOT EXISTS orders (job_id bigint, item text, price numeric)")
        Ledger(stream.settings()).append(
            session, "person", "handoff.emitted", {"to": "planner", "message": task}, key="task", on=conn
        )
    print(f"session {session}", flush=True)
    with subscribe("approval.requested", "task.completed", "task.failed", sessions=[session]) as events:
        for event in events:
            if event.event_type == "approval.requested":
                print(f"walstream approvals approve {event.seq}", flush=True)
            else:
                print(event.payload.get("result") or event.payload["error"], flush=True)
                return


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "a chair")
