"""Every bound of the runtime, with its reason.

Bounds of one service stand in that service; what several depend on stands here.
"""

WRITER_WINDOW = 1_000
"""Unacknowledged events a writer may have. 256 already reach full speed on loopback; more
than a few thousand make the server refuse."""
WRITER_ACK_TIMEOUT_S = 2.0
"""After this an event is published again, byte for byte."""
WRITER_SWEEP_S = 0.1
WRITER_BURST = 512
"""Events republished at a time after a break, so that the server is not flooded."""

CONNECT_WAIT_S = 60.0
"""How long a starting service waits for the bus before it gives up and is restarted."""
RECONNECT_WAIT_S = 0.1
PING_INTERVAL_S = 5
PINGS_OUTSTANDING_MAX = 2
REQUEST_TIMEOUT_S = 5.0
PENDING_BYTES_MAX = 32 * 1024 * 1024
"""What the client buffers for a slow or absent bus; beyond it core messages are dropped and
counted, and events wait in their writer."""

TAPE_HEARTBEAT_S = 0.5
TAPE_SILENCE_S = 2.0
"""No message and no heartbeat for so long: the reader makes itself a new consumer."""
TAPE_INACTIVE_S = 30.0
# A consumer must outlive the silence after which its reader looks for it.
assert TAPE_INACTIVE_S > 4 * TAPE_SILENCE_S > 8 * TAPE_HEARTBEAT_S

PULL_BATCH = 500
PULL_EXPIRES_S = 20.0
PULL_HEARTBEAT_S = 1.0
PULL_SILENCE_S = 3.0
PULL_ACK_WAIT_S = 30.0
PULL_ACK_PENDING_MAX = 1_000
"""Admission holds at most so many undecided submissions; the rest waits in the stream."""

BODY_TIMEOUT_S = 2.0
BODY_TRIES = 5

BEAT_INTERVAL_MS = 250
"""How often a worker says that it lives."""

SEAL_INTERVAL_S = 1.0
CLOCK_REPORT_INTERVAL_S = 10.0

STOP_GRACE_S = 10.0
"""From SIGTERM until what still runs is cancelled. Container runtimes kill after 10 s by
default, so compose sets its grace period above this."""
