"""A table that is always in step with the ledger: tokens used by each agent.

What is written through ``ctx.cursor`` commits in the transaction that moves the projector on. Whatever is killed, the
table is what one pass over the ledger would have made of it.

    walstream run token_usage:stream
"""

from collections import Counter
from collections.abc import Sequence

from walstream import Context, Event, Projector, Stream


class TokenUsage(Projector):
    name = "token-usage"
    events = ("model.responded",)
    transactional = True
    tables = ("token_usage",)

    def setup(self, ctx: Context) -> None:
        ctx.cursor.execute("CREATE TABLE IF NOT EXISTS token_usage (agent_id text PRIMARY KEY, tokens bigint NOT NULL)")

    def project(self, events: Sequence[Event], ctx: Context) -> None:
        used: Counter[str] = Counter()
        for event in events:
            used[event.agent_id] += event.payload["tokens"]
        for agent_id, tokens in sorted(used.items()):  # sorted: rows are always locked in the same order
            ctx.cursor.execute(
                "INSERT INTO token_usage AS held VALUES (%s, %s)"
                " ON CONFLICT (agent_id) DO UPDATE SET tokens = held.tokens + excluded.tokens",
                (agent_id, tokens),
            )


stream = Stream()
stream.add(TokenUsage())

if __name__ == "__main__":
    raise SystemExit(stream.run())
