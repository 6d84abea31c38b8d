"""Tell another system about finished tasks, over HTTP.

It can be told twice about one: the process may die after the request and before the cursor has moved. So the key of the
event, the same each time, goes along. A target that is away is nobody's fault and is waited for; an answer that says
"your request is wrong" is the event's fault: after three tries its session is parked, and all others flow.

    WEBHOOK_URL=https://example.com/hooks walstream run webhook:stream
"""

import os
import urllib.error
import urllib.request

from walstream import Event, RetryLater, Stream

stream = Stream()


@stream.on("task.completed", name="webhook", outward=True, lanes=4)
def tell(event: Event) -> None:
    request = urllib.request.Request(
        os.environ["WEBHOOK_URL"],
        data=event.payload_bytes,
        headers={"Content-Type": "application/json", "Idempotency-Key": event.key},
    )
    try:
        urllib.request.urlopen(request, timeout=10).close()
    except urllib.error.HTTPError as error:
        if error.code < 500:
            raise
        raise RetryLater(f"the webhook answers {error.code}") from error
    except OSError as error:
        raise RetryLater(f"the webhook is away: {error}") from error


if __name__ == "__main__":
    raise SystemExit(stream.run())
