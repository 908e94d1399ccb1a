"""Every bound of the runtime, with its reason.

Bounds of one service stand in that service; what several depend on stands here.
"""

from waterclock_proto.events import EVENT_BYTES_MAX
from waterclock_proto.subjects import REQUESTS

WRITER_WINDOW = 1_000
"""Events of a writer that are on their way at once, and unacknowledged ones beyond which
``ready`` waits. 256 already reach full speed on loopback; more than a few thousand make the
server refuse."""
WRITER_WINDOW_MAX = 4_000
WRITER_WAITING_MAX = 100_000
"""Unacknowledged events of a writer whose service does not wait for ``ready``; about 60 MB.
More is a service that produces events without reading any, and it is stopped."""
# A configured window must be reached long before the service is stopped.
assert WRITER_WAITING_MAX > 10 * WRITER_WINDOW_MAX
WRITER_ACK_TIMEOUT_S = 2.0
"""After this the eldest unanswered event is published once more, to learn what became of it."""
WRITER_SWEEP_S = 0.1
"""How often unanswered and refused events are looked at; a refused one is tried again so often."""
TAPE_ROOM_BYTES = 64 * 1024 * 1024
"""With less room on the tape than this, or than an eighth of it, events go one at a time, so
that the refusal of one cannot let a smaller one overtake it. The room is looked at once a
second, and all writers together store less than half of it in that time."""
TAPE_LOOK_INTERVAL_S = 1.0

CONNECT_WAIT_S = 60.0
"""How long a starting service waits for the bus before it gives up and is restarted."""
CONNECT_TIMEOUT_S = 2
"""Of one try to connect; the library wants whole seconds."""
RECONNECT_WAIT_S = 0.1
PING_INTERVAL_S = 3
PINGS_OUTSTANDING_MAX = 2
"""A bus that vanished without closing its connections is given up after 6 to 9 s; one that
stood still for 5 s is not."""
PENDING_BYTES_MAX = 32 * 1024 * 1024
"""What the client buffers for a slow or absent bus; beyond it core messages are dropped and
counted, and events wait in their writer. As much again may be in the socket's own buffer."""
PENDING_BYTES_SPARE = 4 * 1024 * 1024
# The library itself waits when its buffer is full; ours is full before that.
assert PENDING_BYTES_SPARE > REQUESTS.max_msg_bytes > EVENT_BYTES_MAX
STORING_BYTES_MAX = 64 * 1024 * 1024
"""Unacknowledged submissions and answers. More are refused: the bus is away, or its disk full."""
DROPS_SAID_INTERVAL_S = 10.0

ANSWER_WAIT_S = 30.0
"""How long a question to the bus is repeated, its absence included, before it is given up."""
REQUEST_TIMEOUT_S = 5.0
"""Of one try of a JetStream API call; streams and consumers are made on disk."""
GET_TIMEOUT_S = 2.0
"""Of one try to read a message."""
ASK_AGAIN_S = 0.1
"""Between tries, where the bus answered that it cannot yet."""
GETS_AT_ONCE = 48
"""Of one call. Their answers must fit into what the bus buffers for a client (64 MiB), or it
cuts the client off as too slow."""
assert GETS_AT_ONCE * REQUESTS.max_msg_bytes < 64 * 1024 * 1024

TAPE_BATCH_MAX = 512
"""Messages handed over at once, so that a reader that catches up does not hold the loop."""
TAPE_HEARTBEAT_S = 0.5
TAPE_SILENCE_S = 2.0
"""No message and no heartbeat for so long: the reader makes itself a new consumer."""
TAPE_INACTIVE_S = 30.0
# A consumer must outlive the silence after which its reader looks for it.
assert TAPE_INACTIVE_S > 4 * TAPE_SILENCE_S > 8 * TAPE_HEARTBEAT_S
TAPE_MISSING_S = 5.0
"""A stream that is not there for so long does not exist any more."""

PULL_BATCH = 500
PULL_BYTES = 16 * 1024 * 1024
"""What one pull request may bring: bounds the memory of bodies that nobody has taken yet."""
# One body must fit, or the request would bring nothing for ever.
assert PULL_BYTES > 2 * REQUESTS.max_msg_bytes
PULL_EXPIRES_S = 20.0
PULL_HEARTBEAT_S = 1.0
PULL_SILENCE_S = 3.0
assert PULL_EXPIRES_S > PULL_SILENCE_S > 2 * PULL_HEARTBEAT_S
PULL_ACK_WAIT_S = 30.0
PULL_ACK_PENDING_MAX = 1_000
"""Admission holds at most so many undecided submissions; the rest waits in the stream."""

BEAT_INTERVAL_MS = 250
"""How often a worker says that it lives."""

SEAL_INTERVAL_S = 1.0
CLOCK_REPORT_INTERVAL_S = 10.0
CLOCK_SAMPLES_S = 60.0
"""How long a bracket of the bus's clock counts: a stepped clock is forgotten after a minute."""

STOP_GRACE_S = 10.0
"""From SIGTERM until what still runs is cancelled. Container runtimes kill after 10 s by
default, so compose sets its grace period above this."""
CLOSE_WAIT_S = 3.0
"""For acknowledgements that are still missing when a service ends."""

HEALTH_CLIENTS_MAX = 16
"""Scrapes and probes served at once; more are turned away."""
HEALTH_TIMEOUT_S = 5.0
"""For a client of the health server to send its request and to take the answer."""
LOOP_BEAT_S = 0.5
LOOP_STUCK_S = 5.0
"""The event loop did not turn for so long: the process is not alive."""
assert LOOP_STUCK_S > 4 * LOOP_BEAT_S

OWN_EVENTS_MAX = 8_192
"""Of its own events, so many are kept decoded until they are read back; more are decoded anew."""

GROUP_MIN = 16
"""Events that wait together from which on a batch pays: the bus spends some milliseconds on a
batch of any size, and about a quarter of one on a single write to a quick disk."""
GROUP_MAX = 256
"""Of one batch. The bus takes 1,000 at most."""
GROUP_BEGINS = 4
"""With so many on their way, those behind wait and become a batch."""
assert GROUP_BEGINS < GROUP_MIN < GROUP_MAX < 1_000

BODIES_KEPT_MAX = 4_096
BODIES_KEPT_BYTES_MAX = 32 * 1024 * 1024
BODY_KEPT_BYTES_MAX = 65_536
"""Of bodies that are kept so that nobody asks for them. Longer ones are worth a round trip."""
BODY_FEED_HEARTBEAT_S = 5.0
BODY_FEED_SILENCE_S = 16.0
assert BODY_FEED_SILENCE_S > 3 * BODY_FEED_HEARTBEAT_S
