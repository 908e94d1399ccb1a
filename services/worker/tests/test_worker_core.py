"""What each piece of news makes of an attempt."""

import pytest

from waterclock_proto.events import Cancelled, Completed, Dispatched, Expired, Failed
from waterclock_proto.requests import ChatMessage, Sampling, Submission
from waterclock_proto.stamps import Stamp
from waterclock_worker import core
from waterclock_worker.core import Attempt, EngineTimes
from waterclock_worker.engine import Finish

BOOT = "b" * 16
BUS = Stamp(wall_us=1_000_000, source="bus")


def at(us: int, source: str = "worker") -> Stamp:
    """A stamp ``us`` after the beginning, on one boot whose wall clock is 7 µs ahead of the bus."""
    return Stamp(wall_us=1_000_007 + us, source=source, boot=BOOT, mono_ns=us * 1000)  # pyright: ignore[reportArgumentType] - any source will do


def dispatched(**changes: object) -> Dispatched:
    fields: dict[str, object] = {
        "tenant": "acme",
        "id": "r1",
        "attempt": 1,
        "worker": "w-1",
        "pool": "en",
        "policy": "fcfs",
        "place": 0,
        "depth": 1,
        "requests_sequence": 5,
        "body_commitment": "0" * 64,
        "model": "sim-8b",
        "tier": "gold",
        "output_tokens_max": 16,
        "deadline_us": 99_000_000,
        "arrival": BUS,
        "received": at(100),
        "decided": at(150),
        "dispatched": at(400),
    }
    return Dispatched(**(fields | changes))  # pyright: ignore[reportArgumentType] - a table of fields


def running(why: core.Why = "") -> Attempt:
    attempt = Attempt(dispatched=dispatched(), taken=at(450), texts=[])
    core.started(attempt, at(500), "w-1")
    attempt.times = EngineTimes(
        queued=at(510, "engine"),
        scheduled=at(600, "engine"),
        first_token=at(900, "engine"),
        last_token=at(1500, "engine"),
    )
    attempt.why = why
    return attempt


@pytest.mark.parametrize(
    ("finish", "why", "expected"),
    [
        pytest.param("stop", "", Completed, id="done"),
        pytest.param("length", "", Completed, id="done at the cap"),
        pytest.param("stop", "cancel", Completed, id="done before the cancel took effect"),
        pytest.param("stop", "deadline", Completed, id="done before the deadline took effect"),
        pytest.param("stop", "drain", Completed, id="done while leaving"),
        pytest.param("stop", "lost", None, id="done after it was declared lost"),
        pytest.param("abort", "cancel", Cancelled, id="cancelled"),
        pytest.param("abort", "deadline", Expired, id="expired"),
        pytest.param("abort", "lost", None, id="aborted since lost"),
        pytest.param("abort", "drain", None, id="left to another worker"),
        pytest.param("abort", "", Failed, id="the engine stopped by itself"),
        pytest.param("error", "", Failed, id="engine error"),
        pytest.param("error", "lost", None, id="error after it was declared lost"),
        pytest.param("error", "cancel", Cancelled, id="error while cancelling"),
    ],
)
def test_the_last_word_of_the_engine(
    finish: Finish, why: core.Why, expected: type[Completed] | None
) -> None:
    attempt = running(why)
    end = core.ending(attempt, finish, "detail", ended=at(1600), worker="w-1")
    assert (None if end is None else type(end)) is expected
    assert attempt.phase == "over"
    assert core.ending(attempt, finish, "", ended=at(1700), worker="w-1") is None, "ends once"


@pytest.mark.parametrize(("why", "phase"), [("cancel", "queued"), ("deadline", "queued")])
def test_an_attempt_that_never_ran_ends_in_the_queue(why: core.Why, phase: str) -> None:
    attempt = Attempt(dispatched=dispatched(), taken=at(450), texts=[], why=why)
    end = core.ending(attempt, "abort", "", ended=at(460), worker="w-1")
    assert isinstance(end, Cancelled | Expired)
    assert end.phase == phase
    assert end.submitted is None


def test_the_first_token_is_said_once_with_the_engines_own_start() -> None:
    attempt = running()
    event = core.first_token(attempt, "w-1")
    assert event is not None
    assert event.scheduled == at(600, "engine")
    assert event.scheduled_not_before is None
    assert core.first_token(attempt, "w-1") is None


def test_an_engine_that_does_not_say_when_it_began_gets_bounds() -> None:
    attempt = running()
    attempt.times = EngineTimes(first_token=at(900))
    event = core.first_token(attempt, "w-1")
    assert event is not None
    assert event.scheduled is None
    assert event.scheduled_not_before == at(500)
    assert event.scheduled_not_after == at(900)


def test_the_final_answer_tells_queue_and_execution_apart() -> None:
    attempt = running()
    attempt.texts = ["a ", "b"]
    attempt.output_tokens = 2
    end = core.ending(attempt, "stop", "", ended=at(1600), worker="w-1")
    assert isinstance(end, Completed)
    final = core.final(attempt, end)
    assert final.text == "a b"
    timings = final.timings
    assert timings is not None
    # The bus says 1,000,000 and this boot began at 1,000,007: its axis position is kept.
    assert timings.queue_us == 607
    assert timings.exec_us == 1000
    assert timings.total_us == 1607 == sum(timings.segments.values())
    assert core.queue_us(attempt) == 607


def test_a_job_carries_what_the_engine_needs() -> None:
    attempt = running()
    submission = Submission(
        id="r1",
        messages=(ChatMessage(role="user", content="hi"),),
        sampling=Sampling(temperature="0.5", seed=3, stop=("x",)),
        ignore_eos=True,
    )
    job = core.make_job(attempt, submission, salt="s", tokens_estimate=1)
    assert job.job_id == "acme/r1/1"
    assert job.prompt == "user: hi"
    assert job.messages == [{"role": "user", "content": "hi"}]
    assert job.sampling == {"temperature": "0.5", "stop": ["x"]}
    assert (job.seed, job.ignore_eos, job.output_tokens_max) == (3, True, 16)


def heard(*events: tuple[str, int]) -> list[bool]:
    memory = core.Heard()
    return [memory.first_time(writer, counter) for writer, counter in events]


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        pytest.param([("s", 3), ("s", 4), ("s", 9)], [True, True, True], id="in order, with gaps"),
        pytest.param([("s", 4), ("s", 4)], [True, False], id="twice in a row"),
        pytest.param([("s", 4), ("s", 9), ("s", 4)], [True, True, False], id="twice, later"),
        pytest.param([("s", 9), ("s", 4), ("s", 4)], [True, True, False], id="overtaken"),
        pytest.param(
            [("s", 0), ("s", core.HEARD_EVENTS_MAX), ("s", 0), ("s", 1)],
            [True, True, False, True],
            id="from further back than a writer repeats",
        ),
        pytest.param([("s", 4), ("t", 4), ("t", 4)], [True, True, False], id="another scheduler"),
        pytest.param([("s", 1), ("s", 10**9), ("s", 1)], [True, True, False], id="far ahead"),
    ],
)  # fmt: skip
def test_a_repetition_of_the_schedulers_words_is_known(
    events: list[tuple[str, int]], expected: list[bool]
) -> None:
    assert heard(*events) == expected
