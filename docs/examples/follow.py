"""Events as an iterator, in any process: no slot, no cursor in the database, nothing to acknowledge.

python follow.py [OFFSET]     # what comes after OFFSET; from now on without it
"""

import sys

from walstream import subscribe

events = subscribe(after=int(sys.argv[1])) if len(sys.argv) > 1 else subscribe(after="latest")

try:
    with events:
        for event in events:
            print(event.offset, event.event_type, event.payload_text, flush=True)
except KeyboardInterrupt:
    pass
