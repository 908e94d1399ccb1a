"""The contract of ``waterclock_worker.engine`` as a suite for every engine.

A test file subclasses :class:`EngineContract`, whose class must be named ``Test…`` to be found::

    class TestMyEngine(EngineContract):
        def make_engine(self) -> Engine:
            return MyEngine(...)

It runs in real time, so nothing here says how long anything takes; what depends on an engine's
inside is tested beside that engine.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest
from msgspec.structs import replace

from waterclock_worker.engine import (
    Engine,
    EngineCapabilities,
    EngineHealth,
    EngineJob,
    EngineOutput,
    EngineStamps,
    EngineStream,
    PushEngine,
)

_ids = itertools.count()


class EngineContract:
    """What the worker relies upon. Override the attributes where an engine needs it."""

    patience_s = 30
    """Everything must end within this; far more than it takes."""
    long_tokens = 2000
    """Length of an answer that is still being made when its first tokens are read; it and its
    prompt must fit into the context."""
    repeatable = True
    """The same job gives the same text again."""

    def make_engine(self) -> Engine:
        raise NotImplementedError

    # --- what the tests below use

    def job(self, engine: Engine, tokens: int = 4, *, name: str = "", seed: int = 7) -> EngineJob:
        return EngineJob(
            job_id=f"contract/{name or next(_ids)}/1",
            prompt="How long does water take to leave a vessel?",
            model=engine.capabilities.models[0],
            prompt_tokens_estimate=12,
            output_tokens_max=tokens,
            ignore_eos=True,
            seed=seed,
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Engine]:
        engine = self.make_engine()
        async with asyncio.timeout(self.patience_s):
            await engine.start()
            try:
                yield engine
            finally:
                await engine.stop()

    # --- answers

    @pytest.mark.parametrize("tokens", [1, 2, 17])
    async def test_an_answer_is_as_long_as_asked_for(self, tokens: int) -> None:
        async with self.running() as engine:
            outputs = await read(engine, self.job(engine, tokens))
        assert sum(output.tokens for output in outputs) == tokens
        last = outputs[-1]
        assert last.finish == "length"
        assert last.failure is None
        assert last.detail == ""
        assert last.prompt_tokens >= 1
        assert 0 <= last.cached_tokens < last.prompt_tokens
        assert last.model_served == engine.capabilities.models[0]

    async def test_only_the_last_output_has_a_finish_and_iteration_ends_there(self) -> None:
        async with self.running() as engine:
            stream = engine.generate(self.job(engine, 5))
            outputs = [output async for output in stream]
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
        assert [output.finish is not None for output in outputs[:-1]] == [False] * (
            len(outputs) - 1
        )
        assert outputs[-1].finish is not None

    async def test_an_answer_that_may_stop_is_no_longer_than_allowed(self) -> None:
        async with self.running() as engine:
            job = replace(self.job(engine, 40), ignore_eos=False)
            outputs = await read(engine, job)
        tokens = sum(output.tokens for output in outputs)
        assert 0 <= tokens <= 40
        assert outputs[-1].finish == "stop" or (outputs[-1].finish, tokens) == ("length", 40)

    async def test_the_same_job_gives_the_same_text(self) -> None:
        if not self.repeatable:
            return
        async with self.running() as engine:
            texts = [
                "".join(output.text for output in await read(engine, self.job(engine, 12)))
                for _ in range(2)
            ]
        assert texts[0] == texts[1] != ""

    async def test_many_jobs_at_once_each_get_their_own_answer(self) -> None:
        async with self.running() as engine:
            jobs = [self.job(engine, 1 + number % 7) for number in range(40)]
            answers = await asyncio.gather(*(read(engine, job) for job in jobs))
            assert (await settled(engine)).in_flight == 0
        for job, outputs in zip(jobs, answers, strict=True):
            assert sum(output.tokens for output in outputs) == job.output_tokens_max
            assert outputs[-1].finish == "length"

    async def test_a_slow_reader_loses_nothing(self) -> None:
        async with self.running() as engine:
            quick = await read(engine, self.job(engine, 30))
            slow: list[EngineOutput] = []
            async with aclosing(engine.generate(self.job(engine, 30))) as stream:
                async for output in stream:
                    slow.append(output)
                    await turns(50)
        assert sum(output.tokens for output in slow) == 30
        if self.repeatable:
            assert "".join(o.text for o in slow) == "".join(o.text for o in quick)

    # --- stamps

    async def test_stamps_are_complete_ordered_and_stay(self) -> None:
        async with self.running() as engine:
            outputs = await read(engine, self.job(engine, 9))
        for output in outputs:
            check_order(output.stamps)
        for before, after in itertools.pairwise(output.stamps for output in outputs):
            for name in ("queued_ns", "scheduled_ns", "first_token_ns"):
                assert getattr(before, name) in (None, getattr(after, name))
            assert (before.last_token_ns or 0) <= (after.last_token_ns or 0)
        last = outputs[-1].stamps
        assert None not in (
            last.queued_ns,
            last.scheduled_ns,
            last.first_token_ns,
            last.last_token_ns,
        )
        assert last.error_us >= 0

    async def test_stamps_lie_between_handing_over_and_the_last_output(self) -> None:
        async with self.running() as engine:
            before_ns = time.monotonic_ns()
            outputs = await read(engine, self.job(engine, 9))
            after_ns = time.monotonic_ns()
            same_clock = engine.capabilities.same_clock
        stamps = outputs[-1].stamps
        assert stamps.queued_ns is not None
        assert stamps.last_token_ns is not None
        if same_clock:
            error_ns = 1000 * stamps.error_us
            assert before_ns - error_ns <= stamps.queued_ns
            assert stamps.last_token_ns <= after_ns + error_ns

    async def test_execution_start_is_told_live_where_that_is_promised(self) -> None:
        async with self.running() as engine:
            outputs = await read(engine, self.job(engine, 3))
            promised = engine.capabilities.reports_scheduled
        # A reader that is slower than the engine finds it merged with the first token.
        first = outputs[0]
        assert first.stamps.scheduled_ns is not None
        if not promised:
            assert first.tokens >= 1

    # --- limits

    async def test_no_more_run_at_once_than_allowed(self) -> None:
        async with self.running() as engine:
            engine.set_in_flight_max(1)
            jobs = [self.job(engine, 5) for _ in range(4)]
            answers = await asyncio.gather(*(read(engine, job) for job in jobs))
        spans = sorted(span(outputs[-1].stamps) for outputs in answers)
        for (_, end_ns), (start_ns, _) in itertools.pairwise(spans):
            assert end_ns <= start_ns + 2000 * answers[0][-1].stamps.error_us

    async def test_a_higher_cap_lets_waiting_jobs_in(self) -> None:
        async with self.running() as engine:
            engine.set_in_flight_max(1)
            long = self.job(engine, self.long_tokens)
            async with aclosing(engine.generate(long)) as stream:
                await first_tokens(stream)
                waiting = asyncio.ensure_future(read(engine, self.job(engine, 3)))
                await turns(5)
                engine.set_in_flight_max(10**6)  # as many as the engine can
                assert (await waiting)[-1].finish == "length"

    @pytest.mark.parametrize("n", [0, -1])
    async def test_a_cap_below_one_is_refused(self, n: int) -> None:
        async with self.running() as engine:
            with pytest.raises(ValueError, match="at least 1"):
                engine.set_in_flight_max(n)

    async def test_what_can_never_run_ends_as_a_bad_request(self) -> None:
        async with self.running() as engine:
            context = engine.capabilities.context_tokens_max
            job = self.job(engine, context + 1)
            (output,) = await read(engine, job)
            assert (output.finish, output.failure, output.tokens) == ("error", "bad_request", 0)
            assert output.detail
            assert job.prompt not in output.detail
            assert output.stamps.first_token_ns is None
            assert (await read(engine, self.job(engine, 2)))[-1].finish == "length"

    async def test_a_model_that_is_not_served_is_a_bad_request(self) -> None:
        async with self.running() as engine:
            job = replace(self.job(engine), model="no such model")
            (output,) = await read(engine, job)
        assert (output.finish, output.failure) == ("error", "bad_request")

    async def test_an_id_that_is_live_is_refused_and_its_job_goes_on(self) -> None:
        async with self.running() as engine:
            job = self.job(engine, self.long_tokens)
            async with aclosing(engine.generate(job)) as stream:
                await first_tokens(stream)
                with pytest.raises(ValueError, match="live"):
                    await anext(engine.generate(job))
                await engine.abort(job.job_id)
                assert (await rest(stream))[-1].finish == "abort"

    async def test_speculation_may_be_switched_at_any_time(self) -> None:
        async with self.running() as engine:
            job = self.job(engine, 20)
            async with aclosing(engine.generate(job)) as stream:
                tokens = 0
                async for output in stream:
                    tokens += output.tokens
                    engine.set_speculation(tokens % 2 == 0)
        assert tokens == 20

    # --- cancelling

    async def test_a_waiting_job_is_cancelled_before_it_starts(self) -> None:
        async with self.running() as engine:
            engine.set_in_flight_max(1)
            long = self.job(engine, self.long_tokens)
            waiting = self.job(engine)
            async with aclosing(engine.generate(long)) as stream:
                await first_tokens(stream)
                reader = asyncio.ensure_future(read(engine, waiting))
                await turns(5)
                await engine.abort(waiting.job_id)
                outputs = await reader
        assert [output.tokens for output in outputs] == [0] * len(outputs)
        assert outputs[-1].finish == "abort"
        assert outputs[-1].stamps.scheduled_ns is None

    async def test_a_job_is_cancelled_right_after_it_was_handed_over(self) -> None:
        async with self.running() as engine:
            job = self.job(engine, self.long_tokens)
            reader = asyncio.ensure_future(read(engine, job))
            await asyncio.sleep(0)
            await engine.abort(job.job_id)
            outputs = await reader
            assert outputs[-1].finish == "abort"
            assert sum(output.tokens for output in outputs) < self.long_tokens
            assert (await settled(engine)).in_flight == 0

    async def test_a_decoding_job_is_cancelled(self) -> None:
        async with self.running() as engine:
            job = self.job(engine, self.long_tokens)
            async with aclosing(engine.generate(job)) as stream:
                await first_tokens(stream)
                await engine.abort(job.job_id)
                await engine.abort(job.job_id)
                outputs = await rest(stream)
            assert outputs[-1].finish == "abort"
            assert sum(output.tokens for output in outputs) < self.long_tokens - 1
            check_order(outputs[-1].stamps)
            assert (await settled(engine)).in_flight == 0

    async def test_cancelling_what_has_ended_changes_nothing(self) -> None:
        async with self.running() as engine:
            job = self.job(engine, 2)
            assert (await read(engine, job))[-1].finish == "length"
            await engine.abort(job.job_id)
            await engine.abort("contract/never/1")
            assert (await read(engine, self.job(engine, 2)))[-1].finish == "length"

    async def test_before_the_first_read_there_is_nothing_to_cancel(self) -> None:
        async with self.running() as engine:
            job = self.job(engine, 2)
            stream = engine.generate(job)
            await engine.abort(job.job_id)
            assert (await rest(stream))[-1].finish == "length"

    async def test_closing_a_stream_cancels_its_job(self) -> None:
        async with self.running() as engine:
            stream = engine.generate(self.job(engine, self.long_tokens))
            await first_tokens(stream)
            await stream.aclose()
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
            assert (await settled(engine)).in_flight == 0

    async def test_closing_a_stream_that_was_never_read_does_nothing(self) -> None:
        async with self.running() as engine:
            stream = engine.generate(self.job(engine))
            await stream.aclose()
            await stream.aclose()
            assert (await settled(engine)).in_flight == 0

    async def test_cancelling_the_reading_task_cancels_the_job(self) -> None:
        async with self.running() as engine:
            begun = asyncio.Event()

            async def consume() -> None:
                async with aclosing(engine.generate(self.job(engine, self.long_tokens))) as stream:
                    async for _ in stream:
                        begun.set()

            reader = asyncio.ensure_future(consume())
            await begun.wait()
            reader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader
            assert (await settled(engine)).in_flight == 0

    # --- the engine's own life

    async def test_health_counts_what_is_in_flight(self) -> None:
        async with self.running() as engine:
            assert (await engine.health()).in_flight == 0
            async with aclosing(engine.generate(self.job(engine, self.long_tokens))) as stream:
                await first_tokens(stream)
                health = await engine.health()
                assert (health.status, health.in_flight) == ("ok", 1)
                assert health.progress_ns is not None

    async def test_capabilities_stay_the_same(self) -> None:
        async with self.running() as engine:
            before = engine.capabilities
            assert before.in_flight_max >= 1
            assert before.models
            engine.set_in_flight_max(1)
            engine.set_speculation(False)
            assert engine.capabilities == before

    async def test_stopping_ends_every_job_and_no_other_is_taken(self) -> None:
        async with self.running() as engine:
            stream = engine.generate(self.job(engine, self.long_tokens))
            await first_tokens(stream)
            await engine.stop()
            await engine.stop()
            assert (await rest(stream))[-1].finish == "abort"
            (output,) = await read(engine, self.job(engine))
            assert (output.finish, output.failure) == ("error", "engine_dead")
            assert (await engine.health()).status == "stopped"


# --- reading


async def read(engine: Engine, job: EngineJob) -> list[EngineOutput]:
    async with aclosing(engine.generate(job)) as stream:
        return await rest(stream)


async def rest(stream: EngineStream) -> list[EngineOutput]:
    return [output async for output in stream]


async def first_tokens(stream: EngineStream) -> EngineOutput:
    """Read until there is a token; fails if the answer is complete by then."""
    async for output in stream:
        assert output.finish is None, "a longer answer expected: raise long_tokens"
        if output.tokens:
            return output
    raise AssertionError("the stream ended without a last output")


async def settled(engine: Engine) -> EngineHealth:
    """Health once nothing is in flight, which an engine may need a step for."""
    # Nothing tells when; running() bounds it.
    while (health := await engine.health()).in_flight:  # noqa: ASYNC110
        await asyncio.sleep(0)
    return health


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def span(stamps: EngineStamps) -> tuple[int, int]:
    assert stamps.scheduled_ns is not None
    assert stamps.last_token_ns is not None
    return stamps.scheduled_ns, stamps.last_token_ns


def check_order(stamps: EngineStamps) -> None:
    reached = [
        stamp
        for stamp in (
            stamps.queued_ns,
            stamps.scheduled_ns,
            stamps.first_token_ns,
            stamps.last_token_ns,
        )
        if stamp is not None
    ]
    assert 0 not in reached
    assert reached == sorted(reached)


# --- the contract for calling back, put through the same suite


class PushedStream:
    """A stream over ``submit``, which checks the promises made to a sink."""

    def __init__(self, engine: PushEngine, job: EngineJob) -> None:
        self._engine = engine
        self._job = job
        self._outputs: asyncio.Queue[EngineOutput] = asyncio.Queue()
        self._inside = False
        self._begun = False
        self._given = False
        self._ended = False

    def __aiter__(self) -> "PushedStream":
        return self

    async def __anext__(self) -> EngineOutput:
        if self._ended:
            raise StopAsyncIteration
        if not self._begun:
            self._inside = True
            self._engine.submit(self._job, self._sink)
            self._inside = False
            self._begun = True
        output = await self._outputs.get()
        self._ended = output.finish is not None
        return output

    async def aclose(self) -> None:
        if self._begun and not self._ended:
            self._inside = True
            await self._engine.abort(self._job.job_id)
            self._inside = False
        self._ended = True

    def _sink(self, output: EngineOutput) -> None:
        assert not self._inside, "called from within submit or abort"
        assert not self._given, "called after the last output"
        self._given = output.finish is not None
        self._outputs.put_nowait(output)


class Pushed:
    """An engine whose ``generate`` goes through ``submit``."""

    def __init__(self, engine: PushEngine) -> None:
        self._engine = engine

    @property
    def capabilities(self) -> EngineCapabilities:
        return self._engine.capabilities

    async def start(self) -> None:
        await self._engine.start()

    async def stop(self) -> None:
        await self._engine.stop()

    def generate(self, job: EngineJob) -> PushedStream:
        return PushedStream(self._engine, job)

    async def abort(self, job_id: str) -> None:
        await self._engine.abort(job_id)

    def set_in_flight_max(self, n: int) -> None:
        self._engine.set_in_flight_max(n)

    def set_speculation(self, on: bool) -> None:
        self._engine.set_speculation(on)

    async def health(self) -> EngineHealth:
        return await self._engine.health()
