"""A function that is called for each handoff, in commit order.

walstream run first_projector:stream
"""

from walstream import Event, Stream

stream = Stream()  # the database comes from WALSTREAM_DSN or walstream.toml


@stream.on("handoff.emitted")
def route(event: Event) -> None:
    print(f"{event.offset}: {event.agent_id} hands over to {event.payload['to']}", flush=True)


if __name__ == "__main__":
    raise SystemExit(stream.run())
