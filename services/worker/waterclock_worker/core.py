"""What an attempt is, and what each piece of news makes of it. Pure: time is an argument.

An attempt is *taken* when its dispatch is read, *running* once the engine has it, and *over*
when its terminal event was made or it was lost. Whatever comes after that changes nothing.
"""

from typing import Literal, TypedDict

from msgspec import Struct

from waterclock_proto.events import (
    Cancelled,
    Completed,
    Dispatched,
    Expired,
    Failed,
    FirstToken,
    Started,
    Terminal,
)
from waterclock_proto.names import FailReason
from waterclock_proto.requests import ChatMessage, Final, Submission, Timings, Usage
from waterclock_proto.segments import measure
from waterclock_proto.stamps import Stamp
from waterclock_worker.engine import EngineJob

DETAIL_LENGTH_MAX = 512
HEARD_EVENTS_MAX = 8_192
"""Twice the largest window that a writer may be configured to have, and some."""
_HEARD_BITS = (1 << HEARD_EVENTS_MAX) - 1

Key = tuple[str, str]
"""(tenant, request id)."""
Why = Literal["", "cancel", "deadline", "lost", "drain"]
"""Why the engine was told to stop."""


class EngineTimes(Struct, frozen=True, kw_only=True):
    """The engine's moments as stamps; None where it was not reached or nobody knows."""

    queued: Stamp | None = None
    scheduled: Stamp | None = None
    first_token: Stamp | None = None
    last_token: Stamp | None = None


UNTIMED = EngineTimes()


class Attempt(Struct, kw_only=True):
    """One attempt at one request on this worker. Mutable; owned by the service."""

    dispatched: Dispatched
    taken: Stamp
    phase: Literal["taken", "running", "over"] = "taken"
    why: Why = ""
    submitted: Stamp | None = None
    times: EngineTimes = UNTIMED
    said_first: bool = False
    texts: list[str] = []
    deltas: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    model_served: str = ""

    @property
    def key(self) -> Key:
        return (self.dispatched.tenant, self.dispatched.id)

    @property
    def job_id(self) -> str:
        d = self.dispatched
        return f"{d.tenant}/{d.id}/{d.attempt}"


class CannotRun(Exception):
    """The body is not what was dispatched; becomes a ``failed`` event."""

    def __init__(self, reason: FailReason, detail: str) -> None:
        super().__init__(detail)
        self.reason: FailReason = reason
        self.detail = detail


class Heard:
    """Which events of the present scheduler were read, so that a repetition of one is known.

    A writer says again, byte for byte, what the bus did not acknowledge; whatever it says twice
    lies within its window. What is further behind its newest event counts as a repetition.
    """

    __slots__ = ("_mask", "_newest", "_writer")

    def __init__(self) -> None:
        self._writer = ""
        self._newest = -1
        self._mask = 0

    def first_time(self, writer: str, counter: int) -> bool:
        """Note an event; False for one that was noted before.

        Another writer begins anew: of the one before it nothing counts any more.
        """
        if writer != self._writer:
            self._writer, self._newest, self._mask = writer, counter, 1
            return True
        ahead = counter - self._newest
        if ahead > 0:
            kept = self._mask << ahead if ahead < HEARD_EVENTS_MAX else 0
            self._mask = (kept | 1) & _HEARD_BITS
            self._newest = counter
            return True
        if -ahead >= HEARD_EVENTS_MAX or self._mask >> -ahead & 1:
            return False
        self._mask |= 1 << -ahead
        return True


def make_job(
    attempt: Attempt, submission: Submission, *, salt: str, tokens_estimate: int
) -> EngineJob:
    """The engine's view of a dispatched request."""
    dispatched = attempt.dispatched
    sampling = submission.sampling
    named: dict[str, object] = {}
    if sampling is not None:
        for name in ("temperature", "top_p"):
            value = getattr(sampling, name)
            if value is not None:
                named[name] = value
        if sampling.stop:
            named["stop"] = list(sampling.stop)
    return EngineJob(
        job_id=attempt.job_id,
        prompt=render_prompt(submission),
        messages=(
            None
            if submission.messages is None
            else [{"role": m.role, "content": m.content} for m in submission.messages]
        ),
        model=dispatched.model,
        prompt_tokens_estimate=tokens_estimate,
        output_tokens_max=dispatched.output_tokens_max,
        ignore_eos=submission.ignore_eos,
        cache_salt=salt,
        seed=None if sampling is None else sampling.seed,
        sampling=named or None,
    )


def render_prompt(submission: Submission) -> str:
    """The text of a chat for engines that do not template themselves."""
    if submission.prompt is not None:
        return submission.prompt
    messages: tuple[ChatMessage, ...] = submission.messages or ()
    return "\n".join(f"{message.role}: {message.content}" for message in messages)


def started(attempt: Attempt, submitted: Stamp, worker: str) -> Started:
    """The engine was given the attempt; from here on it is running."""
    attempt.phase = "running"
    attempt.submitted = submitted
    d = attempt.dispatched
    return Started(
        tenant=d.tenant,
        id=d.id,
        attempt=d.attempt,
        worker=worker,
        taken=attempt.taken,
        submitted=submitted,
    )


def first_token(attempt: Attempt, worker: str) -> FirstToken | None:
    """The event for the first token, once, as soon as its stamp is known."""
    if attempt.said_first or attempt.times.first_token is None:
        return None
    attempt.said_first = True
    d = attempt.dispatched
    # Without the engine's own word the start lies between our call and the first token.
    unknown = attempt.times.scheduled is None
    return FirstToken(
        tenant=d.tenant,
        id=d.id,
        attempt=d.attempt,
        worker=worker,
        queued=attempt.times.queued,
        scheduled=attempt.times.scheduled,
        scheduled_not_before=attempt.submitted if unknown else None,
        scheduled_not_after=attempt.times.first_token if unknown else None,
        first_token=attempt.times.first_token,
    )


def ending(
    attempt: Attempt,
    finish: Literal["stop", "length", "abort", "error"],
    detail: str,
    *,
    ended: Stamp,
    worker: str,
) -> Terminal | None:
    """The terminal event that the engine's last word makes; None if it is not ours any more."""
    lost = attempt.why in ("lost", "drain") and finish not in ("stop", "length")
    if attempt.phase == "over" or attempt.why == "lost" or lost:
        attempt.phase = "over"
        return None
    ran = attempt.phase == "running"
    attempt.phase = "over"
    common = _common(attempt, ended, worker)
    if finish in ("stop", "length"):
        return Completed(**common, finish_reason=finish)
    if attempt.why == "cancel":
        return Cancelled(**common, phase="running" if ran else "queued")
    if attempt.why == "deadline":
        return Expired(**common, phase="running" if ran else "queued")
    return Failed(**common, reason="engine_error", detail=detail[:DETAIL_LENGTH_MAX])


def failing(
    attempt: Attempt, reason: FailReason, detail: str, *, ended: Stamp, worker: str
) -> Failed | None:
    """The attempt ends before the engine had it."""
    if attempt.phase == "over" or attempt.why in ("lost", "drain"):
        attempt.phase = "over"
        return None
    attempt.phase = "over"
    return Failed(
        **_common(attempt, ended, worker), reason=reason, detail=detail[:DETAIL_LENGTH_MAX]
    )


def final(attempt: Attempt, terminal: Terminal) -> Final:
    """What the producer gets, with the worker's own reading of where the time went."""
    d = attempt.dispatched
    measured = measure(
        (
            ("edge_accepted", d.edge_accepted),
            ("arrival", d.arrival),
            ("received", d.received),
            ("decided", d.decided),
            ("dispatched", d.dispatched),
            ("submitted", attempt.submitted),
            ("scheduled", attempt.times.scheduled),
            ("first_token", attempt.times.first_token),
            ("last_token", attempt.times.last_token),
            ("ended", terminal.ended),
        )
    )
    return Final(
        tenant=d.tenant,
        id=d.id,
        attempt=d.attempt,
        outcome=terminal.OUTCOME,
        finish_reason=terminal.finish_reason if isinstance(terminal, Completed) else None,
        fail_reason=terminal.reason if isinstance(terminal, Failed) else None,
        detail=terminal.detail if isinstance(terminal, Failed) else "",
        text="".join(attempt.texts),
        model_served=attempt.model_served,
        usage=Usage(
            prompt_tokens=attempt.prompt_tokens,
            completion_tokens=attempt.output_tokens,
            cached_tokens=attempt.cached_tokens,
        ),
        timings=Timings(
            arrival_us=measured.start_us,
            queue_us=measured.queue_us,
            exec_us=measured.exec_us,
            total_us=measured.total_us,
            segments=measured.segments,
        ),
    )


class _Common(TypedDict):
    tenant: str
    id: str
    attempt: int
    worker: str
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    preemptions: int
    model_served: str
    submitted: Stamp | None
    queued: Stamp | None
    scheduled: Stamp | None
    first_token: Stamp | None
    last_token: Stamp | None
    ended: Stamp


def queue_us(attempt: Attempt) -> int | None:
    """Arrival to execution start, as soon as the latter is known."""
    scheduled = attempt.times.scheduled
    if scheduled is None:
        return None
    d = attempt.dispatched
    return measure(
        (
            ("edge_accepted", d.edge_accepted),
            ("arrival", d.arrival),
            ("received", d.received),
            ("scheduled", scheduled),
            ("ended", scheduled),
        )
    ).queue_us


def _common(attempt: Attempt, ended: Stamp, worker: str) -> _Common:
    d = attempt.dispatched
    return {
        "tenant": d.tenant,
        "id": d.id,
        "attempt": d.attempt,
        "worker": worker,
        "prompt_tokens": attempt.prompt_tokens,
        "output_tokens": attempt.output_tokens,
        "cached_tokens": attempt.cached_tokens,
        "preemptions": attempt.preemptions,
        "model_served": attempt.model_served,
        "submitted": attempt.submitted,
        "queued": attempt.times.queued,
        "scheduled": attempt.times.scheduled,
        "first_token": attempt.times.first_token,
        "last_token": attempt.times.last_token,
        "ended": ended,
    }
