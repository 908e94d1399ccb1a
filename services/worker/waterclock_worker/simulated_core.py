"""Continuous batching as a function of time: no clock, no randomness, no text.

The model is vLLM's V1 scheduler, as far as it decides when a job waits and when it runs:

* Work is done in steps. A step computes at most ``batch_tokens_max`` tokens: first for running
  jobs in the order in which they were admitted, one token each if they decode, a chunk of the
  prompt if they do not; then for waiting jobs, first come, first served, while a place in the
  batch is free and the whole of their known tokens fits into the KV memory. A job at the head
  that does not fit holds up those behind it.
* Between two steps the loop takes in what has arrived (the *queued* stamp), applies aborts, and
  gives out tokens, in that order.
* A decoding job that finds no KV block takes those of the job admitted last, which loses all it
  has computed and goes back to the head of the queue. The oldest job is therefore never held up,
  and every job ends. Drafts take free memory only.
* Full blocks of prompts stay in memory under their keys after use, least recently used out
  first, and are shared by jobs with the same keys. The last prompt token is always computed.

Differences from vLLM: a job's KV for all its known tokens is taken at admission, not chunk by
chunk; two jobs that compute the same prefix at once share it from then on instead of keeping a
copy each; there is no priority and no watermark.

The caller drives it: ``submit`` and ``abort`` at any time, then ``step``, ``finish_step``,
``step``, and so on; ``step`` says how long the step should take, ``finish_step`` takes the time
at which it did end. All times are nanoseconds of one clock of the caller's choice, and never run
backwards; the same calls give the same answers.
"""

from collections import OrderedDict

from msgspec import Struct

from waterclock_worker.engine import Finish
from waterclock_worker.simulated_profiles import GpuProfile


class SimJob(Struct, frozen=True, kw_only=True, gc=False):
    job_id: str
    prompt_tokens: int
    output_tokens: int
    """How many it will make, unless it is aborted."""
    stops: bool = False
    """It then ends with ``stop``, otherwise with ``length``."""
    prefix: tuple[int, ...] = ()
    """Keys of the prompt's full KV blocks from its beginning; fewer are allowed, and none
    means no caching. Equal keys must mean equal tokens from the beginning to there."""
    seed: int = 0
    """Decides which drafts are right."""


class SimOutput(Struct, frozen=True, kw_only=True, gc=False):
    """What ``EngineOutput`` says, in numbers."""

    job_id: str
    at: int
    """Tokens given out before this output."""
    tokens: int
    finish: Finish | None
    queued_ns: int | None
    scheduled_ns: int | None
    first_token_ns: int | None
    last_token_ns: int | None
    cached_tokens: int
    preemptions: int


class _Sequence(Struct, eq=False):
    """A live job. ``shared`` leading keys of its prefix are held in the pool, and ``private``
    blocks besides; ``computed`` of its ``prompt_tokens + made`` known tokens are in them."""

    job: SimJob
    queued_ns: int | None = None
    scheduled_ns: int | None = None
    first_token_ns: int | None = None
    last_token_ns: int | None = None
    computed: int = 0
    made: int = 0
    shared: int = 0
    private: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    ended: bool = False


class StepPlan(Struct, frozen=True, kw_only=True, eq=False):
    number: int
    start_ns: int
    duration_ns: int
    decode_sequences: int
    prefill_tokens: int
    """Also what is computed again after a preemption."""
    kv_tokens_read: int
    scheduled: list[tuple[_Sequence, int]]
    """Who computes how many tokens; for ``finish_step`` only."""
    started: list[SimOutput]
    """Jobs whose execution starts with this step, if the profile reports that live."""


class KvPool:
    """KV memory in blocks. Each is blank, idle (free, but still holding a known prefix) or used."""

    __slots__ = ("_blank", "_holders", "_idle", "blocks")

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._blank = blocks
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._holders: dict[int, int] = {}

    @property
    def free(self) -> int:
        return self._blank + len(self._idle)

    @property
    def used(self) -> int:
        return self.blocks - self.free

    def take(self, blocks: int) -> None:
        """Take blocks for one job alone. The caller has seen that they are free."""
        blank = self._blank - blocks
        while blank < 0:
            self._idle.popitem(last=False)
            blank += 1
        self._blank = blank

    def give(self, blocks: int) -> None:
        self._blank += blocks

    def hold(self, keys: tuple[int, ...], limit: int) -> int:
        """Hold the leading ``keys`` that are known, at most ``limit``; returns how many."""
        held = 0
        for key in keys[:limit]:
            holders = self._holders.get(key)
            if holders is not None:
                self._holders[key] = holders + 1
            elif key in self._idle:
                del self._idle[key]
                self._holders[key] = 1
            else:
                break
            held += 1
        return held

    def publish(self, keys: tuple[int, ...]) -> None:
        """Turn private blocks of the caller into shared ones that it holds."""
        for key in keys:
            holders = self._holders.get(key)
            if holders is None:
                if key in self._idle:
                    del self._idle[key]
                    self._blank += 1
                self._holders[key] = 1
            else:
                self._holders[key] = holders + 1
                self._blank += 1  # The caller's copy is not needed any more.

    def drop(self, keys: tuple[int, ...]) -> None:
        """Hold these no longer. The end of a prompt is forgotten before its beginning."""
        for key in reversed(keys):
            holders = self._holders[key]
            if holders > 1:
                self._holders[key] = holders - 1
            else:
                del self._holders[key]
                self._idle[key] = None


class SimState:
    """Everything that the functions below read and change."""

    def __init__(self, profile: GpuProfile, *, seed: int = 0, speed_permille: int = 1000) -> None:
        """``speed_permille`` divides the duration of steps: 10,000 is ten times as fast."""
        if speed_permille < 1:
            raise ValueError(f"speed of {speed_permille} permille, at least 1 expected")
        self.profile = profile
        self.seed = seed
        self.speed_permille = speed_permille
        self.in_flight_max = profile.sequences_max
        """How many jobs may run at once, between 1 and the profile's ``sequences_max``."""
        self.speculation = True
        self.kv = KvPool(profile.kv_blocks)
        self.plan: StepPlan | None = None
        self.steps = 0
        self.live: dict[str, _Sequence] = {}
        self.arrived: list[_Sequence] = []
        self.waiting: OrderedDict[str, _Sequence] = OrderedDict()
        self.running: list[_Sequence] = []
        self.aborts: dict[str, None] = {}

    @property
    def is_idle(self) -> bool:
        return not self.live


def refusal(profile: GpuProfile, *, prompt_tokens: int, output_tokens: int) -> str | None:
    """Why a job of these lengths can never run under this profile, or None."""
    if prompt_tokens < 1 or output_tokens < 1:
        return (
            f"{prompt_tokens} prompt and {output_tokens} output tokens, at least 1 of each expected"
        )
    total = prompt_tokens + output_tokens
    if total > profile.context_tokens_max:
        return (
            f"{prompt_tokens} prompt and {output_tokens} output tokens are {total}, at most "
            f"{profile.context_tokens_max} fit; shorten the prompt or ask for less"
        )
    return None


def submit(state: SimState, job: SimJob, now_ns: int) -> None:
    """Hand over a job. During a step it has only arrived; the step's end queues it.

    Raises ValueError if a job of this id is live, or for one that :func:`refusal` names.
    """
    if job.job_id in state.live:
        raise ValueError(f"job {job.job_id} is live already; ids are never used twice")
    reason = refusal(
        state.profile, prompt_tokens=job.prompt_tokens, output_tokens=job.output_tokens
    )
    if reason is not None:
        raise ValueError(f"job {job.job_id}: {reason}")
    assert len(job.prefix) <= job.prompt_tokens // state.profile.kv_block_tokens
    sequence = _Sequence(job)
    state.live[job.job_id] = sequence
    if state.plan is None:
        sequence.queued_ns = now_ns
        state.waiting[job.job_id] = sequence
    else:
        state.arrived.append(sequence)


def abort(state: SimState, job_id: str) -> SimOutput | None:
    """End a job early. Returns its last output if that can be at once.

    During a step it cannot: then, and for ids that are not live, the answer is None, and the
    last output of a live job comes from ``finish_step``.
    """
    sequence = state.live.get(job_id)
    if sequence is None:
        return None
    if state.plan is not None:
        state.aborts[job_id] = None
        return None
    return _end(state, sequence, "abort")


def end_all(state: SimState, finish: Finish) -> list[SimOutput]:
    """End every live job at once; a step in progress is forgotten."""
    state.plan = None
    state.aborts.clear()
    state.arrived.clear()
    outputs = [_end(state, sequence, finish) for sequence in list(state.live.values())]
    assert state.kv.used == 0
    return outputs


def step(state: SimState, now_ns: int) -> StepPlan | None:
    """Begin a step, or answer None if there is nothing to do."""
    assert state.plan is None, "the step before has not ended"
    if not state.live:
        return None
    profile = state.profile
    block = profile.kv_block_tokens
    drafts_max = profile.draft_tokens if state.speculation else 0
    running = state.running
    waiting = state.waiting
    kv = state.kv
    budget = profile.batch_tokens_max
    scheduled: list[tuple[_Sequence, int]] = []
    decodes = 0
    prefill_tokens = 0
    kv_read = 0

    place = 0
    while place < len(running) and budget > 0:
        sequence = running[place]
        job = sequence.job
        todo = job.prompt_tokens + sequence.made - sequence.computed
        if todo > 1 or sequence.made == 0:
            count = min(todo, budget)
            prefill_tokens += count
        else:
            count = 1 + min(drafts_max, job.output_tokens - sequence.made - 1, budget - 1)
            held = sequence.shared + sequence.private
            grow = -((sequence.computed + count) // -block) - held
            if grow > kv.free:
                count = 1
                grow = -((sequence.computed + 1) // -block) - held
            while grow > kv.free and len(running) > place + 1:
                _preempt(state, running.pop())
            if grow > kv.free:
                # It was admitted last itself. An older job takes what it gives back.
                assert place > 0
                _preempt(state, running.pop())
                break
            if grow > 0:
                kv.take(grow)
                sequence.private += grow
            decodes += 1
            kv_read += sequence.computed
        scheduled.append((sequence, count))
        budget -= count
        place += 1

    started: list[SimOutput] = []
    cap = state.in_flight_max
    while waiting and budget > 0 and len(running) < cap:
        job_id, sequence = next(iter(waiting.items()))
        job = sequence.job
        known = job.prompt_tokens + sequence.made
        # The last known token must be computed, or there is nothing to sample from.
        shared = kv.hold(job.prefix, (known - 1) // block) if job.prefix else 0
        private = -(known // -block) - shared
        if private > kv.free:
            kv.drop(job.prefix[:shared])
            break
        kv.take(private)
        del waiting[job_id]
        running.append(sequence)
        sequence.shared = shared
        sequence.private = private
        sequence.computed = shared * block
        count = min(known - sequence.computed, budget)
        if sequence.scheduled_ns is None:
            sequence.scheduled_ns = now_ns
            sequence.cached_tokens = sequence.computed
            if profile.reports_scheduled:
                started.append(_output(sequence, 0, None))
        scheduled.append((sequence, count))
        prefill_tokens += count
        budget -= count

    assert scheduled, "the oldest job always has its memory and a place"
    duration_ns = 0
    if not profile.is_instant:
        tokens = profile.batch_tokens_max - budget
        duration_ns = (
            profile.step_ns
            + max(profile.weights_ns, profile.token_ns * tokens)
            + profile.sequence_ns * len(scheduled)
            + profile.kv_token_ns * kv_read
        )
        if profile.jitter_permille:
            spread = 2 * profile.jitter_permille + 1
            jitter = _mix(state.seed, state.steps) % spread - profile.jitter_permille
            duration_ns += duration_ns * jitter // 1000
        duration_ns = duration_ns * 1000 // state.speed_permille
    state.plan = StepPlan(
        number=state.steps,
        start_ns=now_ns,
        duration_ns=duration_ns,
        decode_sequences=decodes,
        prefill_tokens=prefill_tokens,
        kv_tokens_read=kv_read,
        scheduled=scheduled,
        started=started,
    )
    state.steps += 1
    return state.plan


def finish_step(state: SimState, plan: StepPlan, end_ns: int) -> list[SimOutput]:
    """End the step begun last. ``end_ns`` is when that is, whatever was planned."""
    assert plan is state.plan
    assert end_ns >= plan.start_ns
    state.plan = None
    for sequence in state.arrived:
        sequence.queued_ns = end_ns
        state.waiting[sequence.job.job_id] = sequence
    state.arrived.clear()

    outputs = [_end(state, state.live[job_id], "abort") for job_id in state.aborts]
    state.aborts.clear()

    any_ended = False
    kv = state.kv
    for sequence, count in plan.scheduled:
        if sequence.ended:
            continue
        job = sequence.job
        known = job.prompt_tokens + sequence.made
        todo = known - sequence.computed
        if count < todo:
            sequence.computed += count
            continue
        tokens = 1
        if count > todo:
            tokens += _accepted(state.profile, sequence, count - todo)
        sequence.computed = known + tokens - 1
        if sequence.shared < len(job.prefix):
            fresh = job.prefix[sequence.shared :]
            kv.publish(fresh)
            sequence.shared += len(fresh)
            sequence.private -= len(fresh)
        if sequence.first_token_ns is None:
            sequence.first_token_ns = end_ns
        sequence.last_token_ns = end_ns
        sequence.made += tokens
        if sequence.made < job.output_tokens:
            outputs.append(_output(sequence, tokens, None))
            continue
        any_ended = True
        kv.drop(job.prefix[: sequence.shared])
        kv.give(sequence.private)
        sequence.ended = True
        del state.live[job.job_id]
        outputs.append(_output(sequence, tokens, "stop" if job.stops else "length"))
    if any_ended:
        state.running = [sequence for sequence in state.running if not sequence.ended]
    return outputs


def _output(sequence: _Sequence, tokens: int, finish: Finish | None) -> SimOutput:
    return SimOutput(
        job_id=sequence.job.job_id,
        at=sequence.made - tokens,
        tokens=tokens,
        finish=finish,
        queued_ns=sequence.queued_ns,
        scheduled_ns=sequence.scheduled_ns,
        first_token_ns=sequence.first_token_ns,
        last_token_ns=sequence.last_token_ns,
        cached_tokens=sequence.cached_tokens,
        preemptions=sequence.preemptions,
    )


def _end(state: SimState, sequence: _Sequence, finish: Finish) -> SimOutput:
    job_id = sequence.job.job_id
    del state.live[job_id]
    if state.waiting.pop(job_id, None) is None and sequence in state.running:
        state.running.remove(sequence)
        _release(state.kv, sequence)
    sequence.ended = True
    return _output(sequence, 0, finish)


def _preempt(state: SimState, sequence: _Sequence) -> None:
    _release(state.kv, sequence)
    sequence.preemptions += 1
    job_id = sequence.job.job_id
    state.waiting[job_id] = sequence
    state.waiting.move_to_end(job_id, last=False)


def _release(kv: KvPool, sequence: _Sequence) -> None:
    kv.drop(sequence.job.prefix[: sequence.shared])
    kv.give(sequence.private)
    sequence.shared = 0
    sequence.private = 0


def _accepted(profile: GpuProfile, sequence: _Sequence, drafts: int) -> int:
    """Leading drafts that are right: fixed by the job and the place in its answer, so the
    answer's timing depends on the batch but its making does not."""
    for right in range(drafts):
        if _mix(sequence.job.seed, sequence.made + right) % 1000 >= profile.draft_accept_permille:
            return right
    return drafts


_MASK = (1 << 64) - 1


def _mix(seed: int, index: int) -> int:
    """SplitMix64 (Steele, Lea, Flood 2014): the ``index``-th number of the stream of ``seed``."""
    x = (seed + (index + 1) * 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
