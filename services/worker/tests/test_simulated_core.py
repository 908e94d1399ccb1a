"""The batching model: its timing in small cases, and its laws over random histories."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waterclock_worker.simulated_core import (
    KvPool,
    SimJob,
    SimOutput,
    SimState,
    StepPlan,
    abort,
    end_all,
    finish_step,
    step,
    submit,
)
from waterclock_worker.simulated_profiles import PROFILES, GpuProfile


def profile(
    *,
    sequences: int = 4,
    tokens: int = 100,
    context: int = 64,
    blocks: int = 64,
    step_ns: int = 1000,
    drafts: int = 0,
    accept: int = 0,
    jitter: int = 0,
) -> GpuProfile:
    return GpuProfile(
        name="small",
        model="m",
        sequences_max=sequences,
        batch_tokens_max=tokens,
        context_tokens_max=context,
        kv_blocks=blocks,
        kv_block_tokens=4,
        step_ns=step_ns,
        draft_tokens=drafts,
        draft_accept_permille=accept,
        jitter_permille=jitter,
    )


def job(name: str, prompt: int = 4, output: int = 2, prefix: tuple[int, ...] = ()) -> SimJob:
    return SimJob(job_id=name, prompt_tokens=prompt, output_tokens=output, prefix=prefix)


def run(state: SimState, now_ns: int, steps: int = 1) -> tuple[int, list[SimOutput]]:
    """Run at most ``steps`` steps as planned; returns when the last one ended and what it gave."""
    outputs: list[SimOutput] = []
    for _ in range(steps):
        plan = step(state, now_ns)
        if plan is None:
            break
        now_ns += plan.duration_ns
        outputs += finish_step(state, plan, now_ns)
    return now_ns, outputs


def last(outputs: list[SimOutput], job_id: str) -> SimOutput:
    (output,) = (output for output in outputs if output.job_id == job_id and output.finish)
    return output


def begun(state: SimState, now_ns: int) -> StepPlan:
    plan = step(state, now_ns)
    assert plan is not None
    return plan


# --- times


def test_a_job_alone_is_stamped_at_the_edges_of_its_steps() -> None:
    state = SimState(profile())
    submit(state, job("a", output=3), 50)
    now_ns, outputs = run(state, 60, steps=9)
    assert now_ns == 3060
    assert [output.tokens for output in outputs] == [1, 1, 1]
    end = last(outputs, "a")
    assert (end.queued_ns, end.scheduled_ns) == (50, 60)
    assert (end.first_token_ns, end.last_token_ns) == (1060, 3060)
    assert end.finish == "length"


def test_what_arrives_during_a_step_is_queued_when_the_step_ends() -> None:
    state = SimState(profile())
    submit(state, job("a"), 0)
    plan = begun(state, 0)
    submit(state, job("b", output=1), 10)
    finish_step(state, plan, 1000)
    _, outputs = run(state, 1005)
    end = last(outputs, "b")
    assert (end.queued_ns, end.scheduled_ns, end.first_token_ns) == (1000, 1005, 2005)


def test_a_step_that_ends_late_is_stamped_late() -> None:
    state = SimState(profile())
    submit(state, job("a", output=1), 0)
    plan = begun(state, 0)
    assert plan.duration_ns == 1000
    (output,) = finish_step(state, plan, 7000)
    assert output.first_token_ns == 7000


@pytest.mark.parametrize(
    ("prompt", "budget", "steps"),
    [
        pytest.param(10, 10, 1, id="fits"),
        pytest.param(11, 10, 2, id="one token over"),
        pytest.param(25, 10, 3, id="three chunks"),
    ],
)
def test_a_long_prompt_takes_several_steps(prompt: int, budget: int, steps: int) -> None:
    state = SimState(profile(tokens=budget))
    submit(state, job("a", prompt=prompt, output=1), 0)
    now_ns, outputs = run(state, 0, steps=9)
    assert now_ns == 1000 * steps
    assert last(outputs, "a").scheduled_ns == 0


def test_decoding_comes_before_prefill_and_leaves_it_less_budget() -> None:
    state = SimState(profile(tokens=10))
    submit(state, job("a", prompt=4, output=9), 0)
    now_ns, _ = run(state, 0)
    submit(state, job("b", prompt=18, output=1), now_ns)
    chunks = []
    for _ in range(2):
        plan = begun(state, now_ns)
        chunks.append((plan.decode_sequences, plan.prefill_tokens))
        now_ns += 1000
        finish_step(state, plan, now_ns)
    assert chunks == [(1, 9), (1, 9)]
    assert "b" not in state.live


def test_a_step_takes_as_long_as_the_roofline_says() -> None:
    gpu = GpuProfile(
        name="p",
        model="m",
        sequences_max=4,
        batch_tokens_max=100,
        context_tokens_max=64,
        kv_blocks=64,
        step_ns=7,
        weights_ns=500,
        token_ns=100,
        sequence_ns=10,
        kv_token_ns=3,
    )
    state = SimState(gpu)
    submit(state, job("a", prompt=20, output=2), 0)
    submit(state, job("b", prompt=10, output=2), 0)
    prefill = begun(state, 0)
    assert prefill.duration_ns == 7 + 100 * 30 + 10 * 2
    finish_step(state, prefill, prefill.duration_ns)
    decode = begun(state, prefill.duration_ns)
    # Two tokens cost less than the weights, which have to be read anyway.
    assert decode.duration_ns == 7 + 500 + 10 * 2 + 3 * 30


@given(st.integers(0, 2**64 - 1), st.integers(0, 1000))
def test_jitter_stays_within_its_bounds(seed: int, jitter: int) -> None:
    state = SimState(profile(jitter=jitter, step_ns=1_000_000), seed=seed)
    submit(state, job("a", output=20), 0)
    for number in range(20):
        plan = begun(state, number)
        assert abs(plan.duration_ns - 1_000_000) <= 1000 * jitter
        finish_step(state, plan, number + 1)


def test_jitter_spreads_and_depends_on_the_seed() -> None:
    def durations(seed: int) -> list[int]:
        state = SimState(profile(jitter=50, step_ns=1_000_000), seed=seed)
        submit(state, job("a", output=50), 0)
        found = []
        for number in range(50):
            plan = begun(state, number)
            found.append(plan.duration_ns)
            finish_step(state, plan, number + 1)
        return found

    assert durations(1) == durations(1)
    assert durations(1) != durations(2)
    assert min(durations(1)) < 960_000
    assert max(durations(1)) > 1_040_000


@pytest.mark.parametrize(("speed", "duration"), [(1000, 1000), (10_000, 100), (500, 2000)])
def test_speed_divides_the_steps(speed: int, duration: int) -> None:
    state = SimState(profile(), speed_permille=speed)
    submit(state, job("a"), 0)
    assert begun(state, 0).duration_ns == duration


# --- who runs


def test_waiting_is_first_come_first_served_up_to_the_cap() -> None:
    state = SimState(profile(sequences=2))
    for name in "abc":
        submit(state, job(name, output=1 if name == "b" else 3), 0)
    assert [output.job_id for output in begun(state, 0).started] == ["a", "b"]
    assert state.plan is not None
    finish_step(state, state.plan, 1000)
    assert [output.job_id for output in begun(state, 1000).started] == ["c"]


def test_a_lower_cap_drains_and_interrupts_nobody() -> None:
    state = SimState(profile(sequences=4))
    for name in "abcdef":
        submit(state, job(name, output=2 if name in "ab" else 4), 0)
    now_ns, _ = run(state, 0)
    assert len(state.running) == 4
    state.in_flight_max = 2
    now_ns, _ = run(state, now_ns)
    assert [sequence.job.job_id for sequence in state.running] == ["c", "d"]
    now_ns, _ = run(state, now_ns)
    assert len(state.running) == 2
    state.in_flight_max = 3
    run(state, now_ns)
    # c and d made their fourth token in this step, e came in beside them.
    assert [sequence.job.job_id for sequence in state.running] == ["e"]


def test_a_job_that_does_not_fit_holds_up_the_smaller_one_behind_it() -> None:
    state = SimState(profile(context=32, blocks=8))
    submit(state, job("a", prompt=20, output=1), 0)
    submit(state, job("b", prompt=16, output=1), 0)
    submit(state, job("c", prompt=4, output=1), 0)
    assert [output.job_id for output in begun(state, 0).started] == ["a"]


def test_the_latest_gives_its_memory_to_older_jobs_and_begins_again() -> None:
    # 8 blocks of 4: two jobs of 12 tokens hold 3 each, and grow to 8 together at 16 tokens.
    state = SimState(profile(context=32, blocks=8))
    submit(state, job("a", prompt=12, output=20), 0)
    submit(state, job("b", prompt=12, output=12), 0)
    _, outputs = run(state, 0, steps=50)
    assert state.is_idle
    assert last(outputs, "a").preemptions == 0
    b = last(outputs, "b")
    assert b.preemptions >= 1
    assert (b.scheduled_ns, b.first_token_ns) == (0, 1000)
    assert sum(output.tokens for output in outputs if output.job_id == "b") == 12
    assert [output.at for output in outputs if output.job_id == "b"] == list(range(12))
    assert state.kv.used == 0


def test_what_was_preempted_comes_before_what_waits() -> None:
    state = SimState(profile(context=32, blocks=8))
    for name in "ab":
        submit(state, job(name, prompt=12, output=8), 0)
    submit(state, job("c", prompt=12, output=1), 0)
    now_ns = 0
    while "b" not in state.waiting or not state.running:
        now_ns, _ = run(state, now_ns)
    assert list(state.waiting) == ["b", "c"]


# --- prefix cache


def cached(state: SimState, now_ns: int, name: str, prompt: int, prefix: tuple[int, ...]) -> int:
    submit(state, job(name, prompt=prompt, output=1, prefix=prefix), now_ns)
    _, outputs = run(state, now_ns, steps=9)
    return last(outputs, name).cached_tokens


def test_the_same_prefix_is_computed_once() -> None:
    state = SimState(profile())
    assert cached(state, 0, "a", 12, (1, 2, 3)) == 0
    assert cached(state, 10**6, "b", 15, (1, 2, 3)) == 12
    assert cached(state, 10**7, "c", 15, (1, 2, 4)) == 8
    assert cached(state, 10**8, "d", 15, (9, 2, 3)) == 0
    assert state.kv.used == 0


def test_the_last_prompt_token_is_always_computed() -> None:
    state = SimState(profile())
    assert cached(state, 0, "a", 12, (1, 2, 3)) == 0
    assert cached(state, 10**6, "b", 12, (1, 2, 3)) == 8


def test_a_live_prefix_is_shared_and_its_memory_counted_once() -> None:
    state = SimState(profile())
    submit(state, job("a", prompt=13, output=9, prefix=(1, 2, 3)), 0)
    now_ns, _ = run(state, 0)
    submit(state, job("b", prompt=13, output=9, prefix=(1, 2, 3)), now_ns)
    run(state, now_ns)
    assert state.kv.used == 3 + 1 + 1


def test_two_that_compute_the_same_prefix_at_once_share_it_afterwards() -> None:
    state = SimState(profile())
    for name in "ab":
        submit(state, job(name, prompt=13, output=9, prefix=(1, 2, 3)), 0)
    begun(state, 0)
    assert state.kv.used == 4 + 4
    assert state.plan is not None
    finish_step(state, state.plan, 1000)
    assert state.kv.used == 3 + 1 + 1


def test_memory_is_taken_from_the_prefix_that_was_longest_unused() -> None:
    state = SimState(profile(context=32, blocks=8))
    for number, (name, prefix) in enumerate([("a", (1, 2)), ("b", (11, 12))]):
        assert cached(state, number * 10**6, name, 8, prefix) == 0
    assert cached(state, 10**7, "a2", 9, (1, 2)) == 8  # now b is the oldest
    assert cached(state, 10**8, "c", 20, ()) == 0  # takes one block more than are blank
    assert cached(state, 10**9, "b2", 9, (11, 12)) == 4  # its end went first
    assert cached(state, 10**10, "a3", 9, (1, 2)) == 8


def test_a_cached_prefix_shortens_the_prefill() -> None:
    state = SimState(profile(tokens=8))
    submit(state, job("a", prompt=20, output=1, prefix=(1, 2, 3, 4, 5)), 0)
    assert run(state, 0, steps=9)[0] == 3000
    submit(state, job("b", prompt=21, output=1, prefix=(1, 2, 3, 4, 5)), 10_000)
    assert run(state, 10_000, steps=9)[0] == 11_000


# --- speculation


def test_speculation_makes_the_same_tokens_in_fewer_steps() -> None:
    def steps(*, on: bool, accept: int) -> list[int]:
        state = SimState(profile(drafts=3, accept=accept))
        state.speculation = on
        submit(state, job("a", output=21), 0)
        _, outputs = run(state, 0, steps=99)
        assert sum(output.tokens for output in outputs) == 21
        return [output.tokens for output in outputs]

    assert steps(on=False, accept=1000) == [1] * 21
    assert steps(on=True, accept=0) == [1] * 21
    assert steps(on=True, accept=1000) == [1, 4, 4, 4, 4, 4]
    assert len(steps(on=True, accept=500)) in range(8, 18)


def test_drafts_take_nobody_s_memory() -> None:
    state = SimState(profile(context=32, blocks=8, drafts=3, accept=1000))
    for name in "ab":
        submit(state, job(name, prompt=16, output=9), 0)
    now_ns, _ = run(state, 0)
    assert state.kv.free == 0
    # Neither can grow: the older one preempts for its own token, and not for the drafts.
    plan = begun(state, now_ns)
    assert [(sequence.job.job_id, count) for sequence, count in plan.scheduled] == [("a", 1)]
    assert list(state.waiting) == ["b"]
    finish_step(state, plan, now_ns + 1000)
    assert [count for _, count in begun(state, now_ns + 1000).scheduled] == [3 + 1]


# --- aborts


def test_a_job_that_waits_is_aborted_at_once_between_steps() -> None:
    state = SimState(profile())
    submit(state, job("a"), 5)
    output = abort(state, "a")
    assert output is not None
    assert (output.finish, output.queued_ns, output.scheduled_ns) == ("abort", 5, None)
    assert step(state, 10) is None


def test_a_job_that_has_only_arrived_is_aborted_when_the_step_ends() -> None:
    state = SimState(profile())
    submit(state, job("a"), 0)
    plan = begun(state, 0)
    submit(state, job("b"), 10)
    assert abort(state, "b") is None
    end = last(finish_step(state, plan, 1000), "b")
    assert (end.finish, end.queued_ns, end.scheduled_ns) == ("abort", 1000, None)


def test_a_job_in_prefill_is_aborted_without_a_token() -> None:
    state = SimState(profile(tokens=5))
    submit(state, job("a", prompt=20), 0)
    now_ns, _ = run(state, 0)
    plan = begun(state, now_ns)
    assert abort(state, "a") is None
    (end,) = finish_step(state, plan, 2000)
    assert (end.finish, end.scheduled_ns, end.first_token_ns) == ("abort", 0, None)
    assert state.kv.used == 0


def test_a_decoding_job_loses_the_token_of_the_step_that_it_is_aborted_in() -> None:
    state = SimState(profile())
    submit(state, job("a", output=9), 0)
    now_ns, _ = run(state, 0, steps=2)
    plan = begun(state, now_ns)
    abort(state, "a")
    (end,) = finish_step(state, plan, 3000)
    assert (end.finish, end.at, end.tokens, end.last_token_ns) == ("abort", 2, 0, 2000)


def test_abort_wins_over_the_last_token_of_the_same_step() -> None:
    state = SimState(profile())
    submit(state, job("a", output=1), 0)
    plan = begun(state, 0)
    abort(state, "a")
    (end,) = finish_step(state, plan, 1000)
    assert (end.finish, end.tokens) == ("abort", 0)


def test_a_preempted_job_is_aborted_while_it_waits_again() -> None:
    state = SimState(profile(context=32, blocks=8))
    for name in "ab":
        submit(state, job(name, prompt=12, output=8), 0)
    now_ns = 0
    while "b" not in state.waiting or state.running == []:
        now_ns, _ = run(state, now_ns)
    end = abort(state, "b")
    assert end is not None
    assert end.preemptions == 1
    assert end.first_token_ns is not None
    run(state, now_ns, steps=99)
    assert state.is_idle
    assert state.kv.used == 0


@pytest.mark.parametrize("name", ["a", "never seen"])
def test_aborting_what_has_ended_does_nothing(name: str) -> None:
    state = SimState(profile())
    submit(state, job("a", output=1), 0)
    run(state, 0, steps=9)
    assert abort(state, name) is None
    assert step(state, 9000) is None


def test_an_abort_may_be_repeated() -> None:
    state = SimState(profile())
    submit(state, job("a"), 0)
    plan = begun(state, 0)
    abort(state, "a")
    abort(state, "a")
    assert len(finish_step(state, plan, 1000)) == 1


def test_all_can_be_ended_in_the_middle_of_a_step() -> None:
    state = SimState(profile(sequences=1))
    submit(state, job("a"), 0)
    submit(state, job("b"), 0)
    begun(state, 0)
    submit(state, job("c"), 5)
    abort(state, "b")
    outputs = end_all(state, "error")
    assert sorted(output.job_id for output in outputs) == ["a", "b", "c"]
    assert {output.finish for output in outputs} == {"error"}
    assert step(state, 10) is None


# --- refusals


@pytest.mark.parametrize(
    ("prompt", "output", "fits"),
    [
        pytest.param(60, 4, True, id="exactly the context"),
        pytest.param(60, 5, False, id="one token over"),
        pytest.param(0, 5, False, id="no prompt"),
        pytest.param(5, 0, False, id="no answer"),
    ],
)
def test_only_what_fits_is_taken(prompt: int, output: int, *, fits: bool) -> None:
    state = SimState(profile(context=64))
    if fits:
        submit(state, job("a", prompt=prompt, output=output), 0)
        run(state, 0, steps=99)
        assert state.is_idle
    else:
        with pytest.raises(ValueError, match="tokens"):
            submit(state, job("a", prompt=prompt, output=output), 0)
        assert state.is_idle


def test_an_id_is_live_once() -> None:
    state = SimState(profile())
    submit(state, job("a"), 0)
    with pytest.raises(ValueError, match="live already"):
        submit(state, job("a"), 0)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"blocks": 4}, id="a context larger than the memory"),
        pytest.param({"sequences": 0}, id="no place to run"),
        pytest.param({"step_ns": -1}, id="negative time"),
        pytest.param({"jitter": 1001}, id="more than the whole"),
    ],
)
def test_a_profile_that_cannot_work_is_refused(change: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="profile small"):
        profile(**change)


def test_presets_are_what_the_data_sheets_give() -> None:
    a10g = PROFILES["a10g-8b"]
    # 16.06 GB over 80 % of 600 GB/s; 16.06 GFLOP a token over half of 70 TFLOPS.
    assert a10g.weights_ns == 33_458_333
    assert a10g.token_ns == 458_857
    assert a10g.kv_blocks * a10g.kv_block_tokens == 30_816
    h200 = PROFILES["h200-8b"]
    assert h200.weights_ns == 4_182_291
    assert h200.token_ns == 32_477
    assert PROFILES["instant"].is_instant
    assert [name for name, preset in PROFILES.items() if preset.is_instant] == ["instant"]


# --- laws


@dataclass
class History:
    """Random submissions, aborts, caps and steps, and what came of them."""

    state: SimState
    now_ns: int = 0
    jobs: dict[str, SimJob] = field(default_factory=dict)
    outputs: list[SimOutput] = field(default_factory=list)
    aborted: set[str] = field(default_factory=set)

    def submit(self, prompt: int, output: int, keys: int, family: int) -> None:
        name = str(len(self.jobs))
        output = min(output, self.state.profile.context_tokens_max - prompt)
        keys = min(keys, prompt // self.state.profile.kv_block_tokens)
        self.jobs[name] = SimJob(
            job_id=name,
            prompt_tokens=prompt,
            output_tokens=output,
            prefix=tuple(100 * family + number for number in range(keys)),
            seed=family,
        )
        submit(self.state, self.jobs[name], self.now_ns)

    def abort(self, number: int) -> None:
        name = str(number)
        ended = {output.job_id for output in self.outputs if output.finish}
        if name in self.jobs and name not in ended:
            self.aborted.add(name)
        output = abort(self.state, name)
        if output is not None:
            self.outputs.append(output)

    def turn(self, late_ns: int) -> None:
        """End the step in progress, or begin one."""
        state = self.state
        if state.plan is None:
            before = len(state.running)
            plan = step(state, self.now_ns)
            if plan is not None:
                self.outputs += plan.started
                tokens = sum(count for _, count in plan.scheduled)
                assert 1 <= tokens <= state.profile.batch_tokens_max
                assert len(state.running) <= max(before, state.in_flight_max)
        else:
            plan = state.plan
            self.now_ns = max(self.now_ns, plan.start_ns + plan.duration_ns) + late_ns
            self.outputs += finish_step(state, plan, self.now_ns)
        private = sum(sequence.private for sequence in state.running)
        shared = {
            key for sequence in state.running for key in sequence.job.prefix[: sequence.shared]
        }
        assert state.kv.used == private + len(shared) <= state.kv.blocks

    def drain(self) -> None:
        # Every second turn ends a step, and every step computes at least a token of the oldest
        # job, which nothing takes its memory from.
        for _ in range(4 * sum(j.prompt_tokens + j.output_tokens for j in self.jobs.values()) + 4):
            if self.state.is_idle and self.state.plan is None:
                return
            self.turn(0)
        raise AssertionError("jobs are live that never end")


moves = st.lists(
    st.one_of(
        st.tuples(
            st.just("submit"),
            st.integers(1, 30),
            st.integers(1, 30),
            st.integers(0, 7),
            st.integers(0, 2),
        ),
        st.tuples(st.just("abort"), st.integers(0, 15)),
        st.tuples(st.just("turn"), st.integers(0, 50)),
        st.tuples(st.just("turn"), st.just(0)),
        st.tuples(st.just("cap"), st.integers(1, 6)),
        st.tuples(st.just("speculation"), st.booleans()),
        st.tuples(st.just("wait"), st.integers(0, 3000)),
    ),
    max_size=60,
)

profiles = st.builds(
    profile,
    sequences=st.integers(1, 6),
    tokens=st.integers(1, 40),
    context=st.just(40),
    blocks=st.integers(10, 30),
    drafts=st.integers(0, 3),
    accept=st.integers(0, 1000),
    jitter=st.integers(0, 1000),
)


def play(gpu: GpuProfile, script: list[tuple], seed: int = 0) -> History:
    history = History(SimState(gpu, seed=seed))
    for move, *values in script:
        match move:
            case "submit":
                history.submit(*values)
            case "abort":
                history.abort(*values)
            case "turn":
                history.turn(*values)
            case "cap":
                history.state.in_flight_max = min(*values, gpu.sequences_max)
            case "speculation":
                history.state.speculation = values[0]
            case "wait":
                # A step in progress may end later than planned, not the clock run back.
                history.now_ns += values[0]
    history.drain()
    return history


def by_job(history: History) -> Iterator[tuple[SimJob, list[SimOutput]]]:
    for name, one in history.jobs.items():
        yield one, [output for output in history.outputs if output.job_id == name]


@given(profiles, moves)
def test_every_job_has_exactly_one_last_output_and_it_is_the_last(
    gpu: GpuProfile, script: list[tuple]
) -> None:
    for _, outputs in by_job(play(gpu, script)):
        assert [output.finish is not None for output in outputs[:-1]] == [False] * (
            len(outputs) - 1
        )
        assert outputs[-1].finish is not None


@given(profiles, moves)
def test_tokens_given_out_are_the_tokens_declared(gpu: GpuProfile, script: list[tuple]) -> None:
    history = play(gpu, script)
    for one, outputs in by_job(history):
        made = 0
        for output in outputs:
            assert output.at == made
            made += output.tokens
        if outputs[-1].finish == "abort":
            assert one.job_id in history.aborted
            assert made < one.output_tokens
        else:
            assert made == one.output_tokens


@given(profiles, moves)
def test_stamps_are_ordered_and_once_known_they_stay(gpu: GpuProfile, script: list[tuple]) -> None:
    for _, outputs in by_job(play(gpu, script)):
        known: list[int | None] = [None, None, None]
        newest = -1
        for output in outputs:
            stamps = [output.queued_ns, output.scheduled_ns, output.first_token_ns]
            reached = [stamp for stamp in [*stamps, output.last_token_ns] if stamp is not None]
            assert reached == sorted(reached)
            for before, now in zip(known, stamps, strict=True):
                assert before is None or before == now
            assert output.last_token_ns is None or output.last_token_ns >= newest
            newest = output.last_token_ns or newest
            known = list(stamps)
            if output.tokens:
                assert None not in stamps
        assert outputs[-1].queued_ns is not None


@given(profiles, moves)
def test_memory_comes_back(gpu: GpuProfile, script: list[tuple]) -> None:
    state = play(gpu, script).state
    assert state.kv.used == 0
    assert state.kv.free == gpu.kv_blocks
    assert not any([state.live, state.waiting, state.running, state.arrived, state.aborts])


@given(profiles, moves)
def test_execution_starts_in_the_order_of_the_queue(gpu: GpuProfile, script: list[tuple]) -> None:
    started = [
        int(output.job_id)
        for output in play(gpu, script).outputs
        if output.scheduled_ns is not None and output.tokens == 0 and output.finish is None
    ]
    assert started == sorted(started)


@given(profiles, moves, st.integers(0, 2**64 - 1))
def test_the_same_history_gives_the_same_outputs(
    gpu: GpuProfile, script: list[tuple], seed: int
) -> None:
    assert play(gpu, script, seed).outputs == play(gpu, script, seed).outputs


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 6)), max_size=40))
def test_the_pool_counts_every_block_once(jobs: list[tuple[int, int]]) -> None:
    pool = KvPool(8)
    held: list[tuple[int, ...]] = []
    for family, count in jobs:
        keys = tuple(10 * family + number for number in range(count))
        shared = pool.hold(keys, len(keys))
        if len(keys) - shared > pool.free:
            pool.drop(keys[:shared])
            if held:
                pool.drop(held.pop(0))
            continue
        pool.take(len(keys) - shared)
        pool.publish(keys[shared:])
        held.append(keys)
        assert pool.used == len({key for keys in held for key in keys})
    for keys in held:
        pool.drop(keys)
    assert pool.used == 0
    assert pool.free == 8
