"""Every bound of the scheduler that is not a setting, with its reason."""

from typing import Final

from waterclock_runtime.limits import BEAT_INTERVAL_MS, WRITER_WINDOW_MAX

COUNTERS_REMEMBERED: Final = 8_192
"""How far behind a writer's newest counter a repetition is still recognised; what lies further
back counts as a repetition."""
# A writer repeats what is on its way, and no more than its window is at once.
assert COUNTERS_REMEMBERED > WRITER_WINDOW_MAX

WRITERS_MAX: Final = 2_048
"""Writers whose counters are remembered. When full, the half that was silent longest goes."""
ENDED_MAX: Final = 32_768
"""Ended requests that are remembered, so that a late event about one is not taken for news.
When full, the older half is forgotten."""
CANCELS_MAX: Final = 8_192
"""Cancels of requests that are not admitted yet. When full, the older half is forgotten."""
CANCEL_KEPT_US: Final = 600_000_000
"""A cancel that came so long before its request, on the bus's clock, was not meant for it."""
OUTPUT_PAIRS_MAX: Final = 4_096
"""Pairs of model and tenant whose output lengths are kept. When full, the half that learned
nothing for longest goes."""
OUTPUTS_REMEMBERED: Final = 64
"""Output lengths kept for each pair: enough for a median, few enough to follow a change."""

TICK_MS: Final = 50
"""How often deadlines, leases and the ladder are looked at when nothing happens."""
LOOP_GAP_MS: Final = 1_000
"""A longer silence of the scheduler's own loop says nothing about the workers: their leases
begin anew."""
# A loop that merely ran one tick late must not pardon dead workers.
assert LOOP_GAP_MS > 4 * TICK_MS
BUS_DELAY_MS_MAX: Final = 500
"""What a heartbeat may take on its way before it counts as lost."""
PULSE_MS: Final = 500
DEAF_MS: Final = 1_500
"""The scheduler hears its own pulse. Hearing nothing at all for so long means that the bus is
away, whatever the connection says; no lease ends then."""
assert DEAF_MS > 2 * PULSE_MS
LEASE_MS_MIN: Final = max(
    2 * BEAT_INTERVAL_MS + BUS_DELAY_MS_MAX, DEAF_MS + BEAT_INTERVAL_MS + 2 * TICK_MS
)
"""A lease must outlive two lost heartbeats, or a busy worker loses its work. And the scheduler must
know that it is deaf before it takes the silence for its workers' death: a bus that stands still
stops the beats, the last of which may be older than the last pulse that was heard."""
LIVES_ENDED_MAX: Final = 1_024
"""Lives of workers that a newer life of the same name ended; their late beats are ignored."""

BODIES_AT_ONCE: Final = 64
BODIES_BYTES_AT_ONCE: Final = 8 * 1024 * 1024
BODIES_TASKS_MAX: Final = 4
"""Bodies of at most 64 requests or 8 MiB are read together, four such groups at a time: the
memory that reading takes is bounded, whatever the producers send."""

TEXT_HEAD_CHARS: Final = 800
TEXT_TAIL_CHARS: Final = 400
"""What language detection looks at. A megabyte of text says no more, and takes a thousand
times as long."""

BACKLOG_CEILING: Final = 200_000
"""What a pool's backlog may be set to: each waiting request holds about 3 KiB of memory."""

LINE_BLOCK: Final = 512
"""Items a block of a line is split into; moving so many pointers costs less than a comparison
in Python."""
