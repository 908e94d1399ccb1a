"""The simulated engine: the batching model of ``simulated_core`` run against a real clock.

It makes filler words, never an answer, and says so (``EngineCapabilities.simulated``). What is
real about it is time: jobs wait, batch, get preempted and cached as the profile's GPU would
have them, and stamps are readings of the clock at the moment a step began or ended.

**Timers.** An event loop sleeps in whole milliseconds: asyncio's epoll rounds up, so a step ends
up to 1 ms late; uvloop's timers can fire up to 1 ms early (libuv/libuv#4773), in which case this
engine waits again, so that no step ends before its time. A step that ended late is followed by one
that much shorter, so that a run of steps neither drifts nor slows down; the stamps tell what
happened. After a stall of the loop of more than ``DEBT_NS_MAX`` the rest of the time is lost, as it
would be on a GPU that nobody feeds. So steps much shorter than 1 ms come in bursts of 1 ms, which
blurs single stamps by as much but no average.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Literal, Protocol

from msgspec import Struct
from msgspec.structs import replace

from waterclock_worker.engine import (
    EngineCapabilities,
    EngineHealth,
    EngineJob,
    EngineOutput,
    EngineStamps,
    Failure,
    Finish,
    Sink,
)
from waterclock_worker.simulated_core import (
    SimJob,
    SimOutput,
    SimState,
    abort,
    end_all,
    finish_step,
    refusal,
    step,
    submit,
)
from waterclock_worker.simulated_profiles import GpuProfile
from waterclock_worker.simulated_text import (
    Script,
    answer_seed,
    answer_text,
    output_tokens_of,
    prefix_keys,
    prompt_tokens_of,
    script_of,
)

DEBT_NS_MAX = 20_000_000
"""How far steps may lag behind their plan and still catch up: some timer misses and a garbage
collection, not a process that was stopped."""
STALL_NS = 5_000_000_000
"""A step this late makes the engine ``stalled``: well above any step of the presets."""


class Timer(Protocol):
    def cancel(self) -> None: ...


class StepClock(Protocol):
    """Where time comes from; tests move it by hand."""

    def now_ns(self) -> int: ...

    def call_in(self, delay_ns: int, callback: Callable[[], None]) -> Timer:
        """Call back after ``delay_ns``, or on the next turn of the loop if that is 0."""
        ...


class LoopClock:
    """CLOCK_MONOTONIC, and the timers of the running event loop."""

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def call_in(self, delay_ns: int, callback: Callable[[], None]) -> Timer:
        loop = asyncio.get_running_loop()
        if delay_ns <= 0:
            return loop.call_soon(callback)
        return loop.call_later(delay_ns / 1_000_000_000, callback)


class _Live(Struct, eq=False):
    sink: Sink
    script: Script
    seed: int
    prompt_tokens: int


class SimulatedEngine:
    """A :class:`~waterclock_worker.engine.PushEngine` without a model.

    ``prompt_tokens_estimate`` is taken for the truth if it is given. Without ``ignore_eos`` the
    length of an answer is drawn from the profile's distribution by prompt, model and seed. Sampling
    parameters are carried and ignored. Every answer is a function of (prompt, model, seed,
    lengths), however its tokens were batched.
    """

    def __init__(
        self,
        profile: GpuProfile,
        *,
        model: str | None = None,
        seed: int = 0,
        speed_permille: int = 1000,
        clock: StepClock | None = None,
    ) -> None:
        """``model`` is the name to serve, the profile's own by default; ``seed`` decides the
        jitter of steps; at ``speed_permille`` 10,000 steps take a tenth of their time."""
        self._profile = profile
        self._model = profile.model if model is None else model
        self._clock: StepClock = LoopClock() if clock is None else clock
        self._state = SimState(profile, seed=seed, speed_permille=speed_permille)
        self._live: dict[str, _Live] = {}
        self._posted: list[tuple[Sink, EngineOutput]] = []
        self._due_ns = 0
        self._timer: Timer | None = None
        self._frozen = False
        self._status: Literal["starting", "ok", "stalled", "dead", "stopped"] = "starting"
        self._detail = ""
        self._progress_ns: int | None = None
        self.lag_ns = 0
        """How much later than planned the last step ended."""
        self.steps_late = 0
        """Steps that ended more than ``DEBT_NS_MAX`` late, so that time was lost. If it keeps
        growing, this host is too slow for the profile and speed."""

    @property
    def capabilities(self) -> EngineCapabilities:
        profile = self._profile
        return EngineCapabilities(
            name=f"simulated {profile.name}",
            simulated=True,
            models=(self._model,),
            context_tokens_max=profile.context_tokens_max,
            in_flight_max=profile.sequences_max,
            reports_scheduled=profile.reports_scheduled,
            same_clock=True,
            honours_priority=False,
            templates_chat=False,
            prefix_cache=profile.prefix_cache,
            speculation_switchable=profile.draft_tokens > 0,
        )

    async def start(self) -> None:
        if self._status != "starting":
            raise RuntimeError(f"engine is {self._status}; make a new one to start again")
        self._status = "ok"

    async def stop(self) -> None:
        if self._status != "dead":
            self._status = "stopped"
        self._end_all("abort", None)
        self._flush()

    def generate(self, job: EngineJob) -> "SimulatedStream":
        return SimulatedStream(self, job)

    def submit(self, job: EngineJob, sink: Sink) -> None:
        job_id = job.job_id
        if job_id in self._live:
            raise ValueError(f"job {job_id} is live already; ids are never used twice")
        if self._status != "ok":
            self._refuse(sink, "engine_dead", f"the engine is {self._status}; start another")
            return
        if job.model != self._model:
            detail = f"model {job.model!r} is not served here, only {self._model!r} is"
            self._refuse(sink, "bad_request", detail)
            return
        profile = self._profile
        prompt = job.prompt
        prompt_tokens = job.prompt_tokens_estimate or prompt_tokens_of(prompt)
        output_tokens = job.output_tokens_max
        # What is asked for must fit, not what will be drawn: no engine knows that beforehand.
        reason = refusal(profile, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
        if reason is not None:
            self._refuse(sink, "bad_request", reason)
            return
        seed = answer_seed(prompt, job.model, job.seed or 0)
        stops = False
        if not job.ignore_eos:
            output_tokens, stops = output_tokens_of(
                seed, median=profile.output_tokens_median, tokens_max=output_tokens
            )
        prefix: tuple[int, ...] = ()
        if profile.prefix_cache:
            prefix = prefix_keys(
                prompt,
                salt=job.cache_salt,
                model=job.model,
                blocks=prompt_tokens // profile.kv_block_tokens,
                block_tokens=profile.kv_block_tokens,
            )
        now_ns = self._clock.now_ns()
        if not self._live:
            self._due_ns = now_ns
        submit(
            self._state,
            SimJob(
                job_id=job_id,
                prompt_tokens=prompt_tokens,
                output_tokens=output_tokens,
                stops=stops,
                prefix=prefix,
                seed=seed,
            ),
            now_ns,
        )
        self._live[job_id] = _Live(sink, script_of(prompt), seed, prompt_tokens)
        if self._timer is None:
            self._wake()

    async def abort(self, job_id: str) -> None:
        self.abort_soon(job_id)

    def abort_soon(self, job_id: str) -> None:
        """``abort`` for callers that cannot await."""
        output = abort(self._state, job_id)
        if output is not None:
            live = self._live.pop(job_id)
            self._post(live.sink, self._render(live, output, None))

    def set_in_flight_max(self, n: int) -> None:
        if n < 1:
            raise ValueError(f"in-flight maximum of {n}, at least 1 expected")
        self._state.in_flight_max = min(n, self._profile.sequences_max)

    def set_speculation(self, on: bool) -> None:
        self._state.speculation = on

    async def health(self) -> EngineHealth:
        state = self._state
        status = self._status
        detail = self._detail
        late_ns = self._clock.now_ns() - self._due_ns if self._live else 0
        if status == "ok" and late_ns > STALL_NS:
            detail = f"{len(self._live)} jobs are live, and a step is {late_ns // 10**6} ms late"
            status = "stalled"
        return EngineHealth(
            status=status,
            in_flight=len(self._live) + len(self._posted),
            running=len(state.running),
            waiting=len(state.waiting) + len(state.arrived),
            kv_used_permille=1000 * state.kv.used // state.kv.blocks,
            progress_ns=self._progress_ns,
            detail=detail,
        )

    def freeze(self) -> None:
        """Simulate an engine that hangs: jobs are taken, and nothing comes of them."""
        self._frozen = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def thaw(self) -> None:
        self._frozen = False
        if self._timer is None and self._live:
            self._wake()

    def break_down(self, detail: str) -> None:
        """Simulate an engine that dies: every live job ends with ``engine_dead``."""
        self._status = "dead"
        self._detail = detail
        self._end_all("error", "engine_dead")

    def _wake(self) -> None:
        if not self._frozen:
            self._timer = self._clock.call_in(0, self._tick)

    def _tick(self) -> None:
        """End a step that is due, begin the next, and only then give out what the first made:
        readers of tokens cost the next step's time, as beside a GPU, not time between steps."""
        clock = self._clock
        state = self._state
        now_ns = clock.now_ns()
        plan = state.plan
        due_ns = now_ns
        outputs: list[SimOutput] = []
        if plan is not None:
            lag_ns = now_ns - self._due_ns
            if lag_ns < 0:
                self._timer = clock.call_in(-lag_ns, self._tick)
                return
            outputs = finish_step(state, plan, now_ns)
            self._progress_ns = now_ns
            self.lag_ns = lag_ns
            if lag_ns > DEBT_NS_MAX:
                self.steps_late += 1
                lag_ns = DEBT_NS_MAX
            due_ns = now_ns - lag_ns
        plan = step(state, now_ns)
        if plan is None:
            self._timer = None
        else:
            if plan.duration_ns == 0:
                due_ns = now_ns
            self._due_ns = due_ns + plan.duration_ns
            self._timer = clock.call_in(max(self._due_ns - now_ns, 0), self._tick)
            if plan.started:
                outputs += plan.started
        self._deliver(outputs)

    def _deliver(self, outputs: list[SimOutput]) -> None:
        live = self._live
        made: list[tuple[Sink, EngineOutput]] = []
        for output in outputs:
            job = live.pop(output.job_id) if output.finish else live[output.job_id]
            made.append((job.sink, self._render(job, output, None)))
        _hand_out(made)

    def _render(self, live: _Live, output: SimOutput, failure: Failure | None) -> EngineOutput:
        tokens = output.tokens
        return EngineOutput(
            text=answer_text(live.script, live.seed, at=output.at, tokens=tokens) if tokens else "",
            tokens=tokens,
            finish=output.finish,
            stamps=EngineStamps(
                queued_ns=output.queued_ns,
                scheduled_ns=output.scheduled_ns,
                first_token_ns=output.first_token_ns,
                last_token_ns=output.last_token_ns,
            ),
            prompt_tokens=live.prompt_tokens,
            cached_tokens=output.cached_tokens,
            preemptions=output.preemptions,
            model_served=self._model,
            failure=failure,
            detail=self._detail,
        )

    def _refuse(self, sink: Sink, failure: Failure, detail: str) -> None:
        output = EngineOutput(
            finish="error", model_served=self._model, failure=failure, detail=detail
        )
        self._post(sink, output)

    def _end_all(self, finish: Finish, failure: Failure | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for output in end_all(self._state, finish):
            live = self._live.pop(output.job_id)
            self._post(live.sink, self._render(live, output, failure))

    def _post(self, sink: Sink, output: EngineOutput) -> None:
        """Give out a last output that belongs to no step, on the loop's next turn."""
        self._posted.append((sink, output))
        if len(self._posted) == 1:
            self._clock.call_in(0, self._flush)

    def _flush(self) -> None:
        posted = self._posted
        self._posted = []
        _hand_out(posted)


def _hand_out(made: list[tuple[Sink, EngineOutput]]) -> None:
    broken: Exception | None = None
    for sink, output in made:
        try:
            sink(output)
        except Exception as error:  # noqa: BLE001  # Raised again, once the others have theirs.
            broken = error
    if broken is not None:
        raise broken


class SimulatedStream:
    """The outputs of one job as an async iterator; holds at most one, merged with what follows."""

    __slots__ = ("_begun", "_ended", "_engine", "_job", "_pending", "_waiter")

    def __init__(self, engine: SimulatedEngine, job: EngineJob) -> None:
        self._engine = engine
        self._job = job
        self._pending: EngineOutput | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._begun = False
        self._ended = False

    def __aiter__(self) -> "SimulatedStream":
        return self

    async def __anext__(self) -> EngineOutput:
        if self._ended:
            raise StopAsyncIteration
        if not self._begun:
            self._engine.submit(self._job, self._push)
            self._begun = True
        output = self._pending
        if output is None:
            waiter = asyncio.get_running_loop().create_future()
            self._waiter = waiter
            try:
                await waiter
            except asyncio.CancelledError:
                await self.aclose()
                raise
            output = self._pending
            if output is None:  # aclose() by another task
                raise StopAsyncIteration
        self._pending = None
        if output.finish is not None:
            self._ended = True
        return output

    async def aclose(self) -> None:
        if self._ended:
            return
        self._ended = True
        self._pending = None
        if self._begun:
            self._engine.abort_soon(self._job.job_id)
        self._release_reader()

    def _push(self, output: EngineOutput) -> None:
        if self._ended:
            return
        pending = self._pending
        self._pending = output if pending is None else _merged(pending, output)
        self._release_reader()

    def _release_reader(self) -> None:
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)


def _merged(earlier: EngineOutput, later: EngineOutput) -> EngineOutput:
    return replace(later, text=earlier.text + later.text, tokens=earlier.tokens + later.tokens)
