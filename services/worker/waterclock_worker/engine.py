"""The contract between the worker and whatever makes tokens.

An engine runs jobs and says when each of them was queued, scheduled, and given its first and
last token. vLLM in process, an OpenAI-compatible server and the simulated engine all fill this
contract, and ``tests/engine_contract.py`` is the same contract as a suite that any of them
must pass.

Who owns what:

* The **worker** owns the queue, the deadlines, the retries and the ids. It hands over a job
  when it wants it to run now, and not more jobs than ``in_flight_max``; an engine may queue, but
  that queue is meant to be short.
* The **engine** owns the job from the first ``__anext__`` (or from ``submit``) until its last
  output. It retries nothing: a job that fails ends with a last output that says so.
* Stamps are readings of CLOCK_MONOTONIC on the engine's host, in integer nanoseconds, and stay
  what the engine read. ``None`` means *not reached* or *not known*, and zero is never used for it.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Literal, Protocol, runtime_checkable

from msgspec import Struct

Finish = Literal["stop", "length", "abort", "error"]
"""Why an answer ended.

* ``stop``: the model ended it (end token, stop string, vLLM's repetition guard).
* ``length``: ``output_tokens_max`` or the context is used up.
* ``abort``: :meth:`Engine.abort`, a closed stream or :meth:`Engine.stop` ended it.
* ``error``: see ``EngineOutput.failure`` and ``EngineOutput.detail``.
"""

Failure = Literal["bad_request", "overloaded", "failed", "engine_dead"]
"""What the worker can do about an ``error``; few and fixed, so it may label a metric.

* ``bad_request``: this engine will never run this job (too long, unknown model, bad sampling
  parameter). Do not retry.
* ``overloaded``: the engine's own admission limit. Retry later or elsewhere.
* ``failed``: this attempt is lost, the engine may be well. Retry.
* ``engine_dead``: the engine will not come back without a restart. Retry elsewhere.
"""

Message = Mapping[str, object]
"""One chat message as the producer sent it, in the form of the OpenAI chat API."""


class EngineJob(Struct, frozen=True, kw_only=True, gc=False):
    """One attempt at one answer."""

    job_id: str
    """``<tenant>/<id>/<attempt>``: fresh for every attempt and never used again, since vLLM
    takes two live jobs of one id for one when it aborts."""
    prompt: str
    """Rendered text; always given, also beside ``messages``."""
    messages: Sequence[Message] | None = None
    """The chat as it was sent, for engines with ``templates_chat``; they prefer it."""
    model: str
    """The model to run, as named in ``EngineCapabilities.models``; no other will do."""
    prompt_tokens_estimate: int = 0
    """Tokens of the prompt as the caller guesses them; 0 means no guess. What the engine
    counted is in ``EngineOutput.prompt_tokens``."""
    output_tokens_max: int
    ignore_eos: bool = False
    """Make exactly ``output_tokens_max`` tokens (vLLM's own name for it)."""
    cache_salt: str = ""
    """Jobs of different salts share no cached prefix; "" is a salt too."""
    priority: int = 0
    """Lower runs first, in engines with ``honours_priority``; others ignore it silently."""
    seed: int | None = None
    sampling: Mapping[str, object] | None = None
    """Temperature and the like, by the names of the OpenAI API. An engine ends the job with
    ``bad_request`` if it knows a parameter and refuses its value."""


class EngineStamps(Struct, frozen=True, kw_only=True, gc=False):
    """When a job was where, in nanoseconds of CLOCK_MONOTONIC on the engine's host.

    Stamps that are not ``None`` are ordered: queued <= scheduled <= first token <= last token.
    An engine whose own stamps are not (vLLM has such cases) gives ``None`` for those it cannot
    vouch for. From one output of a job to the next, a stamp may become known and ``last_token_ns``
    may grow; nothing else changes.
    """

    queued_ns: int | None = None
    """The engine's scheduler took the job into its queue. That happens between two steps, so a
    job that arrives during a step has waited before this stamp, and the worker must take
    the time of its own call for the beginning of the wait."""
    scheduled_ns: int | None = None
    """Execution start: the beginning of the step that admitted the job for the first time. A
    later preemption does not move it."""
    first_token_ns: int | None = None
    """End of the step that made the first token."""
    last_token_ns: int | None = None
    """End of the step that made the newest token so far."""
    error_us: int = 0
    """How far each stamp may lie from what the engine read, in microseconds: 1 where it went
    through float seconds (vLLM), 0 where it never left integers."""


UNSTAMPED = EngineStamps()


class EngineOutput(Struct, frozen=True, kw_only=True, gc=False):
    """News about a job: new text, a stamp that has become known, or the end."""

    text: str = ""
    """What is new. All texts of a job, joined, are its answer."""
    tokens: int = 0
    """Tokens that are new with this output. One output may carry several (speculation, or a
    reader slower than the engine) or none; count tokens, never outputs."""
    finish: Finish | None = None
    """Set on the last output of a job and on no other."""
    stamps: EngineStamps = UNSTAMPED
    prompt_tokens: int = 0
    """As the engine counted; 0 until it is known."""
    cached_tokens: int = 0
    """Of these, how many were taken from the prefix cache at the first scheduling."""
    preemptions: int = 0
    """How often the job has lost its place and began again, so far."""
    model_served: str = ""
    failure: Failure | None = None
    """Set if and only if ``finish`` is ``error``."""
    detail: str = ""
    """What was expected, found, and can be done about it; for logs, never with prompt or answer
    in it. Empty unless ``finish`` is ``error``."""


class EngineCapabilities(Struct, frozen=True, kw_only=True):
    """What does not change while an engine runs."""

    name: str
    """Kind and version or profile, for logs and receipts: ``vllm 0.33.0``."""
    simulated: bool
    """True if no model runs; whatever is measured on it is then a simulation's result."""
    models: tuple[str, ...]
    context_tokens_max: int
    """Most tokens of prompt and answer together."""
    in_flight_max: int
    """Most jobs that can run at once; ``set_in_flight_max`` cannot go above it."""
    reports_scheduled: bool
    """``scheduled_ns`` comes in an output of its own (``tokens == 0``) when it happens. Without
    this it comes with the first token, and a job aborted before that never gets it."""
    same_clock: bool
    """Stamps are of this host's CLOCK_MONOTONIC, so they can be compared with ours."""
    honours_priority: bool
    templates_chat: bool
    prefix_cache: bool
    speculation_switchable: bool


class EngineHealth(Struct, frozen=True, kw_only=True):
    """How an engine is, as far as it can tell."""

    status: Literal["starting", "ok", "stalled", "dead", "stopped"]
    """``stalled``: it has work, and for too long nothing came of it. A frozen engine can look
    healthy from outside, so an adapter judges by progress, never by a process being there."""
    in_flight: int
    """Jobs handed over whose last output has not been delivered: exact."""
    running: int | None = None
    """Of these, admitted to the batch, as of the last step; ``None`` if unknown."""
    waiting: int | None = None
    kv_used_permille: int | None = None
    """Share of the KV memory that live jobs hold; cached but free memory counts as free."""
    progress_ns: int | None = None
    """When the last step ended, on CLOCK_MONOTONIC; ``None`` before the first."""
    detail: str = ""


class EngineStream(Protocol):
    """The outputs of one job. Every async generator of :class:`EngineOutput` is one."""

    def __aiter__(self) -> AsyncIterator[EngineOutput]: ...

    async def __anext__(self) -> EngineOutput: ...

    async def aclose(self) -> object:
        """Abort the job if its last output is still to come, and give no more outputs."""
        ...


class Engine(Protocol):
    """Runs jobs. All methods are called on one event loop, the one that ``start`` ran on."""

    @property
    def capabilities(self) -> EngineCapabilities:
        """Valid once ``start`` has returned."""
        ...

    async def start(self) -> None:
        """Load what is needed and return when jobs can be taken. Called once."""
        ...

    async def stop(self) -> None:
        """End every live job with ``abort``, and release everything. May be repeated.

        Last outputs are delivered also then. Jobs handed over afterwards end with ``error``,
        ``engine_dead``.
        """
        ...

    def generate(self, job: EngineJob) -> EngineStream:
        """Run a job.

        * The job is handed over by the first ``__anext__``; until then the engine does not know
          it and an ``abort`` finds nothing.
        * Outputs come in order; exactly one has ``finish`` set, it is the last, and iteration ends
          after it. That holds in every phase and for every failure: what goes wrong with a
          *job* arrives as an output, never as an exception.
        * Outputs that the reader has not taken yet may be merged: texts joined, tokens added,
          newest stamps kept. So a slow reader costs memory for its text only, and never slows the
          engine or another job.
        * A job over the present ``in_flight_max`` waits. The wait lies before ``scheduled_ns``.
        * Closing the stream, or cancelling the task that iterates, aborts the job. A stream
          that is merely dropped may run on until it is garbage collected: always iterate within
          ``contextlib.aclosing``, and call ``abort`` afterwards, which costs nothing if the
          job has ended (vllm-project/vllm#57061 is a leak without it).

        Raises, from the first ``__anext__``: ValueError if a job of this id is live. That is a
        bug of the caller; the live job is not touched.
        """
        ...

    async def abort(self, job_id: str) -> None:
        """End a job early, in whatever phase it is.

        It takes effect at the next step boundary, and may return before that. The stream then
        gives one last output with ``finish == "abort"``, unless the job had already ended
        otherwise: an abort never adds a second end, and never takes one back. Tokens of the
        step in progress are not given out. Unknown and ended ids are ignored; may be repeated.
        """
        ...

    def set_in_flight_max(self, n: int) -> None:
        """Let at most ``n`` jobs run at once from now on, between 1 and the capability.

        More is taken as the capability. Jobs that run already are not interrupted: a lower
        cap is reached as they end. Raises ValueError below 1.
        """
        ...

    def set_speculation(self, on: bool) -> None:
        """Use speculative decoding or not, from the next step on.

        Without ``speculation_switchable`` this does nothing.
        """
        ...

    async def health(self) -> EngineHealth:
        """Answer within a second, also when the engine does not."""
        ...


Sink = Callable[[EngineOutput], None]
"""Takes the outputs of one job. It must be quick and must not raise."""


@runtime_checkable
class PushEngine(Engine, Protocol):
    """An engine that can also call back, without a task or a queue for each job.

    For engines that live on the worker's own loop. ``generate`` is then built upon ``submit``
    and costs about twice as much a job, so the worker prefers ``submit`` where it exists::

        if isinstance(engine, PushEngine): engine.submit(job, sink)
    """

    def submit(self, job: EngineJob, sink: Sink) -> None:
        """Hand over a job; ``sink`` gets what the stream of ``generate`` would give.

        The sink is called on the event loop, once an output, never from within ``submit`` or
        ``abort`` themselves, and not again after the last output. Outputs are not merged. It
        may call ``submit`` and ``abort``. One that raises loses that output; the others get
        theirs, and then the exception surfaces in the loop's exception handler.

        Raises ValueError if a job of this id is live.
        """
        ...
