"""Every bound of admission, with its reason. What services share stands in the runtime."""

from waterclock_proto.subjects import ANSWERS, DEADLINE_S_MAX, HOUR_S, REQUESTS
from waterclock_runtime.limits import PULL_ACK_PENDING_MAX, PULL_ACK_WAIT_S, STOP_GRACE_S

# What is remembered.

OPEN_REQUESTS_MAX = 100_000
"""Admitted and not ended, about 490 bytes each. Beyond it nothing is admitted (`backlog_full`):
a mesh that is so far behind would let most of them expire."""
ENDED_REQUESTS_MAX = 1_000_000
"""Ended and still known for idempotency, about 150 bytes each. Beyond it the oldest are forgotten
before their time, and their ids count as new ones."""
GENERATIONS = 16
"""Ended requests are forgotten in slices of a sixteenth, so that forgetting costs nothing."""
FORGET_AFTER_S = REQUESTS.max_age_s
"""After that not even the body could be read again, so the id is free."""
FINAL_KEPT_S = ANSWERS.max_age_s
RECEIPTS_AGAIN_US = 5_000_000
"""After an election receipts of submissions that were stored so lately are sent again."""
RECENT_DECISIONS = 4_096
"""Decided submissions whose event can be found again, to send a receipt once more."""
# Whatever the bus may still redeliver must be among them.
assert RECENT_DECISIONS > 2 * PULL_ACK_PENDING_MAX
CANCELLED_EARLY_MAX = 10_000
"""Cancels of ids that nobody has admitted yet; beyond it the oldest are forgotten."""
RANGES_MAX = 10_000
"""Runs of decided sequences. Each hole in REQUESTS (a message deleted by hand) costs one."""
WINDOWS_MAX = 16
"""Minutes of one tenant that are counted and not closed; more only pile up while nobody leads."""

# How much at a time.

BATCH_MAX = 256
"""Submissions decided together: one call to the budgets, a few milliseconds of work."""
BATCH_BYTES_MAX = 4_000_000
"""The same for large bodies, which take about a millisecond a megabyte."""
FOLD_BATCH_MAX = 64
"""Events folded in before others get their turn: a few milliseconds."""
ERRANDS_MAX = 4_096
ERRANDS_AT_ONCE = 16
"""Reads from streams (finals, events) that nobody's decision waits for."""
FINAL_LATE_S = 2.0
"""How long an answer may be missing after its end was read: the worker stores it a round trip
later, or never, if it was killed in between."""
FINAL_LOOK_AGAIN_S = 0.1

# Floods.

MALFORMED_EVENTS_PER_S = 10
"""Of one tenant; what comes beyond it within a second is folded into one event."""
FLOOD_HELD_MAX = 256
"""Malformed submissions held for folding; then they are written down, whatever the time is."""
FLOOD_HELD_S = 1.0
# Held submissions are unacknowledged: they must not use up what the bus delivers at once, nor
# come again while they are held.
assert FLOOD_HELD_MAX * 2 < PULL_ACK_PENDING_MAX
assert FLOOD_HELD_S * 10 < PULL_ACK_WAIT_S
CANCELS_UNKNOWN_PER_S = 100
"""Of one tenant, for ids that are not known: each makes an event, and anybody can invent ids."""
DELIVERED_PER_S = 10_000
"""Claims of one tenant read in a second; the rest is dropped and counted."""

# Budgets.

BUDGET_WAIT_MS = 50
"""A budget answer that takes longer than this costs more than it is worth."""
BREAKER_FAILURES = 2
BREAKER_PROBE_S = 1.0
RECONCILE_S = 60.0
"""What is open is written to Redis anew this often: whatever was lost there is there again."""
RECONCILE_CHUNK = 1_000
RELEASE_FLUSH_S = 0.1
OPEN_GRACE_S = 60
"""A submission counts as open so long after its deadline, unless its end is read before."""
CONCURRENCY_RETRY_MS = 1_000
"""Nobody knows when one of the tenant's own requests will end."""
LOAD_RETRY_MS = 1_000
"""Where the ladder names no time."""
BACKLOG_RETRY_MS = 5_000
PER_MINUTE_MAX = 100_000_000
"""Levels are kept in millionths of a sixtieth: this times 60 million stays below 2**53, the
largest integer that the budget script's numbers hold exactly."""
assert PER_MINUTE_MAX * 60_000_000 < 2**53

# Time.

ELECTION_WAIT_S = 30.0
"""After that admission says that it waits; it waits on, for the tape may be full."""
TICK_S = 0.1
TICKS_A_SECOND = 10
REQUESTS_LOOKED_AT_S = 60
"""How often admission asks which submissions have left REQUESTS by age."""
SNAPSHOT_S = 60
WINDOW_US = 60_000_000
WINDOW_GRACE_US = 2_000_000
"""A window is closed when so much has passed since its end, for events still on their way."""
NUMBERS_SAID_AGAIN_S = 24 * HOUR_S
"""A tenant's last number is written down again this often, so that it outlives the tape's age."""
READ_BACK_WAIT_S = 3.0
"""When leaving: how long own events may take to come back."""
SETTLE_WAIT_S = 1.0
"""When leaving: how long HTTP requests may wait for the decision that they came for."""
DRAIN_WAIT_S = 4.0
"""When leaving: how long answers that are being sent may take."""
# All that, a snapshot and the end of the server come before the runtime stops waiting.
assert SETTLE_WAIT_S + max(READ_BACK_WAIT_S, DRAIN_WAIT_S + 1.0) + 2.0 < STOP_GRACE_S
DISCARD_TIMES = 8
DISCARD_WAIT_S = 2.0
DISCARD_IDLE_S = 0.25
"""Of a body that is too large so many times the bound is read and thrown away, in so much time and
with pauses of at most so much, so that its sender sees the refusal and not a reset."""
ANSWER_GRACE_S = 5.0
"""The edge waits for a final answer so long after the deadline, then gives up by itself."""

# What admission promises to keep must be there while the longest deadline runs.
assert FORGET_AFTER_S >= DEADLINE_S_MAX
assert FINAL_KEPT_S <= FORGET_AFTER_S

# What a submission may say.

TEMPERATURE_MAX = 2
STOPS_MAX = 16
