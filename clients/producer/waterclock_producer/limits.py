"""Every bound of the producer, with its reason."""

IN_FLIGHT_MAX = 65_536
"""Requests without an end that one producer holds; each costs its body and some 2 KiB."""

STORED_WITHIN_S = 30
"""How long the bus may take to acknowledge a submission, repetitions included."""
RESEND_FIRST_MS = 2_000
"""After how long without acknowledgement the same bytes are sent again. A repetition that was not
needed is one more numbered submission, so this is far above a slow disk's acknowledgement."""
RESEND_MS_MAX = 8_000
assert RESEND_FIRST_MS + RESEND_MS_MAX < STORED_WITHIN_S * 1000

RESUME_TRIES_MAX = 8
"""How often the outcome of one request is asked for again after a refusal to say it."""
RESUME_AGAIN_MS = 1_000
"""Pause before that, where the refusal names none."""

RECEIPT_GRACE_MS = 60_000
"""How long a request that has ended waits for its receipt. Receipt and final come from different
services, so either may be first; one that was sent while nobody listened never comes."""
GONE_GRACE_MS = 2_000
"""How long a final may take that is no longer kept, before the answer is given up as gone."""

RECEIPTS_IN_MEMORY_MAX = 20_000
"""Newest receipts that stay in memory, about 2 KiB each. A folder keeps all of them."""

TICK_MS = 50
"""How often what is due is looked at."""

CONNECT_WITHIN_S = 10
RECONNECT_WAIT_MS = 250
RECONNECT_WAIT_MS_MAX = 4_000
PING_INTERVAL_S = 5
"""A connection that does not answer three of these is taken for dead."""
FLUSH_WITHIN_S = 10
PENDING_OUT_BYTES_MAX = 8 * 1024 * 1024
"""Bytes on their way to the socket before a publish waits."""
PENDING_IN_MESSAGES_MAX = 524_288
PENDING_IN_BYTES_MAX = 256 * 1024 * 1024
"""Messages received and not yet handled, for each subscription. What exceeds it is dropped by the
client library; the producer then asks again for everything that is open."""
