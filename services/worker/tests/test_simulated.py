"""The simulated engine in time: on a clock that is moved by hand."""

import asyncio
from collections.abc import Coroutine
from contextlib import aclosing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from waterclock_worker.engine import EngineJob, EngineOutput, PushEngine
from waterclock_worker.simulated import DEBT_NS_MAX, STALL_NS, LoopClock, SimulatedEngine
from waterclock_worker.simulated_profiles import PROFILES, GpuProfile

from .hand_clock import HandClock

MS = 1_000_000
START = 1_000_000_000

TEN_MS = GpuProfile(
    name="ten-ms",
    model="m",
    sequences_max=2,
    batch_tokens_max=64,
    context_tokens_max=256,
    kv_blocks=64,
    step_ns=10 * MS,
    output_tokens_median=20,
)


def job(name: str, **change: Any) -> EngineJob:
    standard = EngineJob(
        job_id=f"t/{name}/1",
        prompt="What time is it?",
        model="m",
        prompt_tokens_estimate=5,
        output_tokens_max=3,
        ignore_eos=True,
    )
    return replace(standard, **change)


class Mesh:
    """An engine, its clock, and all that its sinks were given."""

    def __init__(self, profile: GpuProfile = TEN_MS, **options: Any) -> None:
        self.clock = HandClock(START)
        self.engine = SimulatedEngine(profile, clock=self.clock, **options)
        self.got: dict[str, list[EngineOutput]] = {}
        await_now(self.engine.start())

    def submit(self, name: str, **change: Any) -> None:
        outputs = self.got.setdefault(name, [])
        self.engine.submit(job(name, **change), outputs.append)

    def last(self, name: str) -> EngineOutput:
        output = self.got[name][-1]
        assert output.finish is not None
        return output

    def text(self, name: str) -> str:
        return "".join(output.text for output in self.got[name])


def await_now(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that does not wait for anything."""
    with pytest.raises(StopIteration) as stop:
        coroutine.send(None)
    return stop.value.value


def health(mesh: Mesh) -> Any:
    return await_now(mesh.engine.health())


# --- time


def test_stamps_are_the_edges_of_the_steps() -> None:
    mesh = Mesh()
    mesh.submit("a")
    mesh.clock.run()
    scheduled, first, second, third = mesh.got["a"]
    assert (scheduled.tokens, scheduled.stamps.scheduled_ns) == (0, START)
    assert scheduled.stamps.first_token_ns is None
    assert first.stamps.queued_ns == START
    assert [output.stamps.last_token_ns for output in (first, second, third)] == [
        START + 10 * MS,
        START + 20 * MS,
        START + 30 * MS,
    ]
    assert third.stamps.first_token_ns == START + 10 * MS
    assert third.finish == "length"
    assert len(third.text.split()) == third.tokens == 1
    assert third.prompt_tokens == 5
    assert third.model_served == "m"


def test_execution_start_is_told_when_it_happens_if_the_profile_says_so() -> None:
    for reports in (True, False):
        mesh = Mesh(replace(TEN_MS, reports_scheduled=reports))
        assert mesh.engine.capabilities.reports_scheduled == reports
        mesh.submit("a")
        mesh.clock.advance(9 * MS)
        assert len(mesh.got["a"]) == reports


def test_a_job_that_arrives_during_a_step_is_queued_at_its_end() -> None:
    mesh = Mesh()
    mesh.submit("a")
    mesh.clock.advance(4 * MS)
    mesh.submit("b")
    mesh.clock.run()
    stamps = mesh.last("b").stamps
    assert stamps.queued_ns == stamps.scheduled_ns == START + 10 * MS
    assert stamps.last_token_ns == START + 40 * MS


def test_timers_that_fire_late_do_not_slow_a_run_of_steps_and_stamps_tell_the_truth() -> None:
    mesh = Mesh()
    mesh.clock.shift_ns = MS
    mesh.submit("a", output_tokens_max=100)
    mesh.clock.run()
    stamps = [output.stamps.last_token_ns for output in mesh.got["a"][1:]]
    assert stamps == [START + 10 * MS * step + MS for step in range(1, 101)]
    assert mesh.engine.lag_ns == MS
    assert mesh.engine.steps_late == 0


def test_timers_that_fire_early_do_not_shorten_a_step() -> None:
    mesh = Mesh()
    mesh.clock.shift_ns = -MS // 2
    mesh.submit("a")
    mesh.clock.run()
    stamps = [output.stamps.last_token_ns for output in mesh.got["a"][1:]]
    assert stamps == [START + 10 * MS, START + 20 * MS, START + 30 * MS]


def test_time_lost_in_a_long_stall_of_the_loop_is_not_caught_up() -> None:
    mesh = Mesh()
    mesh.submit("a", output_tokens_max=5)
    mesh.clock.advance(9 * MS)
    mesh.clock.block(1000 * MS)
    mesh.clock.run()
    stamps = [output.stamps.last_token_ns for output in mesh.got["a"][1:]]
    assert DEBT_NS_MAX == 20 * MS
    stall_end = START + 1009 * MS
    # Two steps' worth of debt is repaid, the other 98 are gone.
    assert stamps == [stall_end, stall_end, stall_end, stall_end + 10 * MS, stall_end + 20 * MS]
    assert mesh.engine.steps_late == 1


def test_after_a_pause_the_first_step_takes_its_full_time() -> None:
    mesh = Mesh()
    mesh.submit("a")
    mesh.clock.run()
    mesh.clock.block(500 * MS)
    now_ns = mesh.clock.now_ns()
    mesh.submit("b", output_tokens_max=1)
    mesh.clock.run()
    assert mesh.last("b").stamps.queued_ns == now_ns
    assert mesh.last("b").stamps.first_token_ns == now_ns + 10 * MS


@given(st.lists(st.integers(0, 30 * MS), max_size=30), st.integers(0, 9))
def test_the_same_calls_at_the_same_times_give_the_same_outputs(
    gaps_ns: list[int], seed: int
) -> None:
    def play() -> dict[str, list[EngineOutput]]:
        mesh = Mesh(replace(TEN_MS, jitter_permille=300), seed=seed)
        for number, gap_ns in enumerate(gaps_ns):
            mesh.submit(str(number), ignore_eos=False, output_tokens_max=9)
            mesh.clock.advance(gap_ns)
            if number % 5 == 4:
                mesh.engine.abort_soon(f"t/{number - 2}/1")
        mesh.clock.run()
        return mesh.got

    assert play() == play()


# --- answers


def test_an_answer_does_not_depend_on_the_batch_or_the_speed() -> None:
    alone = Mesh()
    alone.submit("a", output_tokens_max=40)
    alone.clock.run()
    speculating = replace(TEN_MS, draft_tokens=3, draft_accept_permille=600, kv_blocks=16)
    crowded = Mesh(speculating, speed_permille=7000)
    for name in "bac":
        crowded.submit(name, output_tokens_max=40)
    crowded.clock.run()
    assert alone.text("a") == crowded.text("a")
    assert len(crowded.got["a"]) < len(alone.got["a"])


def test_a_chinese_prompt_gets_a_chinese_answer() -> None:
    mesh = Mesh()
    mesh.submit("a", prompt="现在几点？")
    mesh.clock.run()
    assert len(mesh.text("a")) == 3
    assert mesh.text("a") > "\u3400"


def test_length_is_drawn_by_prompt_and_seed_unless_it_is_fixed() -> None:
    mesh = Mesh()
    changes = [{"seed": n} for n in range(25)] + [{"prompt": f"Question {n}"} for n in range(25)]
    for number, change in enumerate(changes):
        mesh.submit(str(number), ignore_eos=False, output_tokens_max=60, **change)
    mesh.clock.run()
    tokens = [sum(output.tokens for output in outputs) for outputs in mesh.got.values()]
    assert len(set(tokens[:25])) > 10
    assert len(set(tokens[25:])) > 10
    for name, count in zip(mesh.got, tokens, strict=True):
        assert 1 <= count <= 60
        if mesh.last(name).finish == "stop":
            continue
        assert (mesh.last(name).finish, count) == ("length", 60)
    assert {mesh.last(name).finish for name in mesh.got} == {"stop", "length"}


def test_without_an_estimate_the_prompt_is_counted() -> None:
    mesh = Mesh()
    mesh.submit("a", prompt_tokens_estimate=0, prompt="w" * 41)
    mesh.clock.run()
    assert mesh.last("a").prompt_tokens == 11


@pytest.mark.parametrize(
    ("change", "cached"),
    [
        pytest.param({}, 32, id="same prefix"),
        pytest.param({"cache_salt": "other tenant"}, 0, id="other salt"),
        pytest.param({"prompt": "y" + "x" * 200}, 0, id="other beginning"),
        pytest.param({"prompt": "x" * 100 + "y" * 101}, 16, id="half the prefix"),
    ],
)
def test_a_prefix_is_cached_by_text_and_salt(change: dict[str, str], cached: int) -> None:
    mesh = Mesh()
    common = {"prompt": "x" * 201, "prompt_tokens_estimate": 50, "cache_salt": "tenant"}
    mesh.submit("prewarm", **{**common, "prompt": "x" * 150, "output_tokens_max": 1})
    mesh.clock.run()
    assert mesh.last("prewarm").cached_tokens == 0
    mesh.submit("a", **(common | change))
    mesh.clock.run()
    assert mesh.last("a").cached_tokens == cached


def test_half_a_surrogate_pair_breaks_nothing() -> None:
    mesh = Mesh()
    mesh.submit("a", prompt="\ud800" * 100, cache_salt="\udfff", prompt_tokens_estimate=0)
    mesh.clock.run()
    assert mesh.last("a").finish == "length"


# --- refusals


@pytest.mark.parametrize(
    ("change", "failure", "detail"),
    [
        pytest.param({"model": "other"}, "bad_request", "'other'", id="model"),
        pytest.param({"output_tokens_max": 252}, "bad_request", "at most 256", id="too long"),
        pytest.param({"output_tokens_max": 0}, "bad_request", "at least 1", id="no answer"),
        pytest.param({"prompt_tokens_estimate": -1}, "bad_request", "at least 1", id="negative"),
        pytest.param(
            {"output_tokens_max": 252, "ignore_eos": False},
            "bad_request",
            "at most 256",
            id="may become too long",
        ),
    ],
)
def test_what_cannot_run_ends_with_an_error(
    change: dict[str, Any], failure: str, detail: str
) -> None:
    mesh = Mesh()
    mesh.submit("a", **change)
    assert mesh.got["a"] == []  # never from within submit
    mesh.clock.run()
    (output,) = mesh.got["a"]
    assert (output.finish, output.failure) == ("error", failure)
    assert detail in output.detail
    assert health(mesh).in_flight == 0


def test_a_live_id_is_refused_and_the_live_job_goes_on() -> None:
    mesh = Mesh()
    mesh.submit("a")
    with pytest.raises(ValueError, match="t/a/1 is live already"):
        mesh.engine.submit(job("a"), print)
    mesh.clock.run()
    assert mesh.last("a").finish == "length"


# --- cancelling


def test_a_job_is_cancelled_in_every_phase() -> None:
    mesh = Mesh(replace(TEN_MS, batch_tokens_max=4, sequences_max=1))
    mesh.submit("decoding", prompt_tokens_estimate=1, output_tokens_max=99)
    mesh.submit("waiting")
    mesh.clock.advance(25 * MS)
    mesh.engine.abort_soon("t/waiting/1")
    mesh.engine.abort_soon("t/decoding/1")
    mesh.submit("prefilling", prompt_tokens_estimate=100)
    mesh.clock.advance(35 * MS)
    mesh.engine.abort_soon("t/prefilling/1")
    mesh.clock.run()
    for name in mesh.got:
        output = mesh.last(name)
        assert (output.finish, output.tokens, output.text) == ("abort", 0, "")
        assert sum(one.finish is not None for one in mesh.got[name]) == 1
    assert mesh.last("waiting").stamps.scheduled_ns is None
    assert mesh.last("decoding").stamps.last_token_ns == START + 20 * MS
    assert mesh.last("prefilling").stamps.scheduled_ns == START + 30 * MS
    assert mesh.last("prefilling").stamps.first_token_ns is None
    assert health(mesh).kv_used_permille == 0


def test_a_job_that_no_step_has_seen_is_cancelled_outside_of_abort() -> None:
    mesh = Mesh()
    mesh.submit("a")
    mesh.engine.abort_soon("t/a/1")
    assert mesh.got["a"] == []
    mesh.clock.run()
    (output,) = mesh.got["a"]
    assert (output.finish, output.stamps.queued_ns) == ("abort", START)


@pytest.mark.parametrize("name", ["t/a/1", "t/never/1"])
def test_cancelling_what_has_ended_gives_nothing(name: str) -> None:
    mesh = Mesh()
    mesh.submit("a")
    mesh.clock.run()
    before = list(mesh.got["a"])
    mesh.engine.abort_soon(name)
    mesh.engine.abort_soon(name)
    mesh.clock.run()
    assert mesh.got["a"] == before


def test_a_sink_may_submit_and_abort() -> None:
    mesh = Mesh()

    def sink(output: EngineOutput) -> None:
        if output.finish is not None:
            mesh.engine.abort_soon("t/b/1")
            mesh.submit("c")

    mesh.submit("b", output_tokens_max=99)
    mesh.engine.submit(job("a"), sink)
    mesh.clock.run()
    assert mesh.last("b").finish == "abort"
    assert mesh.last("c").finish == "length"


def test_a_sink_that_raises_takes_nothing_from_the_others() -> None:
    mesh = Mesh()

    def sink(output: EngineOutput) -> None:
        raise RuntimeError("a bug in a sink")

    mesh.engine.submit(job("bad", output_tokens_max=1), sink)
    mesh.submit("good")
    for _ in range(2):  # for the start of its execution and for its end
        with pytest.raises(RuntimeError, match="a bug in a sink"):
            mesh.clock.run()
    mesh.clock.run()
    assert sum(output.tokens for output in mesh.got["good"]) == 3


# --- limits, health and faults


def test_fewer_run_at_once_after_the_cap_is_lowered() -> None:
    mesh = Mesh(replace(TEN_MS, sequences_max=4))
    mesh.engine.set_in_flight_max(1)
    for name in "abcdef":
        mesh.submit(name)
    mesh.clock.advance(5 * MS)
    assert (health(mesh).running, health(mesh).waiting, health(mesh).in_flight) == (1, 5, 6)
    mesh.engine.set_in_flight_max(99)
    mesh.clock.advance(10 * MS)
    assert (health(mesh).running, health(mesh).waiting) == (4, 2)
    mesh.clock.run()


def test_a_cap_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Mesh().engine.set_in_flight_max(0)


def test_speculation_can_be_switched_where_there_is_any() -> None:
    mesh = Mesh(replace(TEN_MS, draft_tokens=3, draft_accept_permille=1000))
    assert mesh.engine.capabilities.speculation_switchable
    mesh.engine.set_speculation(False)
    mesh.submit("a", output_tokens_max=9)
    mesh.clock.advance(35 * MS)
    assert [output.tokens for output in mesh.got["a"]] == [0, 1, 1, 1]
    mesh.engine.set_speculation(True)
    mesh.clock.run()
    # The fourth step had begun before the switch.
    assert [output.tokens for output in mesh.got["a"]] == [0, 1, 1, 1, 1, 4, 1]
    assert not Mesh().engine.capabilities.speculation_switchable


def test_a_frozen_engine_takes_jobs_and_becomes_stalled() -> None:
    mesh = Mesh()
    mesh.submit("a")
    mesh.clock.advance(15 * MS)
    mesh.engine.freeze()
    mesh.submit("b")
    mesh.clock.advance(STALL_NS)
    assert health(mesh).status == "ok"
    mesh.clock.advance(STALL_NS)
    assert (health(mesh).status, health(mesh).in_flight) == ("stalled", 2)
    assert "2 jobs are live" in health(mesh).detail
    assert health(mesh).progress_ns == START + 10 * MS
    mesh.engine.thaw()
    mesh.clock.run()
    assert mesh.last("a").finish == mesh.last("b").finish == "length"
    assert health(mesh).status == "ok"


def test_an_idle_engine_is_never_stalled() -> None:
    mesh = Mesh()
    mesh.submit("a")
    mesh.clock.run()
    mesh.clock.advance(10 * STALL_NS)
    assert health(mesh).status == "ok"
    mesh.submit("b")
    assert health(mesh).status == "ok"


def test_an_engine_that_breaks_down_ends_every_job_and_takes_no_more() -> None:
    mesh = Mesh()
    for name in "abc":
        mesh.submit(name)
    mesh.clock.advance(15 * MS)
    mesh.engine.break_down("simulated loss of the GPU")
    mesh.submit("d")
    mesh.clock.run()
    for name in "abcd":
        assert (mesh.last(name).finish, mesh.last(name).failure) == ("error", "engine_dead")
    assert "simulated loss" in mesh.last("a").detail
    assert mesh.last("a").stamps.first_token_ns == START + 10 * MS
    assert health(mesh).status == "dead"


def test_stopping_ends_every_job_at_once_and_may_be_repeated() -> None:
    mesh = Mesh()
    for name in "abc":
        mesh.submit(name)
    mesh.clock.advance(15 * MS)
    await_now(mesh.engine.stop())
    await_now(mesh.engine.stop())
    for name in "abc":
        assert mesh.last(name).finish == "abort"
    mesh.submit("d")
    mesh.clock.run()
    assert mesh.last("d").failure == "engine_dead"
    assert health(mesh).status == "stopped"
    with pytest.raises(RuntimeError, match="stopped"):
        await_now(mesh.engine.start())


def test_steps_without_duration_are_never_late() -> None:
    mesh = Mesh(replace(PROFILES["instant"], model="m"))
    mesh.submit("a", output_tokens_max=9)
    for _ in range(9):
        mesh.clock.block(DEBT_NS_MAX // 2)
        mesh.clock.fire()
    assert mesh.got["a"]
    assert mesh.engine.lag_ns == DEBT_NS_MAX // 2
    assert mesh.engine.steps_late == 0


# --- the stream


def test_closing_a_stream_frees_the_engine_at_the_end_of_the_step() -> None:
    async def close(how: str) -> None:
        mesh = Mesh()
        stream = mesh.engine.generate(job("a", output_tokens_max=200))
        reader = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        mesh.clock.advance(15 * MS)
        await reader
        if how == "closed":
            await stream.aclose()
        else:
            reader = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            reader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader
        mesh.clock.advance(5 * MS)
        assert health(mesh).in_flight == 0
        assert health(mesh).kv_used_permille == 0
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    asyncio.run(close("closed"))
    asyncio.run(close("cancelled"))


def test_outputs_that_wait_for_the_reader_are_merged() -> None:
    async def read() -> list[EngineOutput]:
        mesh = Mesh()
        outputs: list[EngineOutput] = []
        async with aclosing(mesh.engine.generate(job("a", output_tokens_max=30))) as stream:
            reader = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            mesh.clock.advance(15 * MS)
            outputs.append(await reader)
            mesh.clock.run()
            outputs += [output async for output in stream]
        pushed = Mesh()
        pushed.submit("a", output_tokens_max=30)
        pushed.clock.run()
        assert "".join(output.text for output in outputs) == pushed.text("a")
        assert outputs[-1].stamps == pushed.last("a").stamps
        return outputs

    outputs = asyncio.run(read())
    assert [output.tokens for output in outputs] == [1, 29]
    assert outputs[-1].finish == "length"


def test_a_stream_that_is_closed_while_another_task_reads_it_ends_for_that_task() -> None:
    async def close() -> None:
        mesh = Mesh()
        stream = mesh.engine.generate(job("a"))

        async def read() -> list[EngineOutput]:
            return [output async for output in stream]

        reader = asyncio.ensure_future(read())
        await asyncio.sleep(0)
        await stream.aclose()
        assert await reader == []
        mesh.clock.run()
        assert health(mesh).in_flight == 0

    asyncio.run(close())


def test_the_engine_fills_the_contract_for_calling_back() -> None:
    engine = SimulatedEngine(PROFILES["instant"])
    assert isinstance(engine, PushEngine)
    assert engine.capabilities.simulated


def test_the_real_clock_is_monotonic_and_its_timers_do_not_fire_before_their_turn() -> None:
    async def wait() -> tuple[list[str], int]:
        clock = LoopClock()
        fired: list[str] = []
        begun_ns = clock.now_ns()
        done = asyncio.get_running_loop().create_future()
        clock.call_in(2 * MS, lambda: done.set_result(fired.append("later")))
        clock.call_in(0, lambda: fired.append("soon"))
        clock.call_in(0, lambda: fired.append("never")).cancel()
        assert fired == []
        await done
        return fired, clock.now_ns() - begun_ns

    fired, waited_ns = asyncio.run(wait())
    assert fired == ["soon", "later"]
    assert waited_ns >= 2 * MS
