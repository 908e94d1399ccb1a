"""Loads against a simulated mesh, on a clock that is moved by hand."""

import asyncio
from collections.abc import Callable, Iterable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from waterclock.arrivals import Planned
from waterclock.load import LoadOptions, Progress, run_load
from waterclock.load_result import LoadResult, milliseconds, quantiles, render_load
from waterclock_producer import Producer, Submission
from waterclock_producer.fake import Answer, FakeMesh, ManualClock


def planned(at_ms: int, tenant: str = "acme", **fields) -> Planned:
    fields = {"language": "en", "text": lambda: "hi", "max_tokens": 8, **fields}
    return Planned(at_us=at_ms * 1000, tenant=tenant, **fields)


class Meshes:
    """A simulated mesh for each tenant, on one clock."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.answer: Callable[[Submission], Answer] = lambda _: Answer(exec_us=50_000)
        self.of: dict[str, FakeMesh] = {}

    def connect(self, tenant: str) -> Producer:
        mesh = self.of.setdefault(tenant, FakeMesh(tenant, clock=self.clock, answer=self._decide))
        return Producer(mesh, tenant=tenant, clock=self.clock)

    def _decide(self, submission: Submission) -> Answer:
        return self.answer(submission)

    async def load(self, plan: Iterable[Planned], **options) -> LoadResult:
        run = run_load(
            LoadOptions(plan=plan, run="t", **options),
            options.pop("progress", None),
            connect=self.connect,
            clock=self.clock,
        )
        return await self.clock.drive(asyncio.ensure_future(run))


@pytest.fixture
def meshes():
    meshes = Meshes(ManualClock())
    yield meshes
    assert [violation for mesh in meshes.of.values() for violation in mesh.violations] == []


async def test_an_open_loop_sends_at_the_planned_times(meshes: Meshes) -> None:
    result = await meshes.load([planned(100 * n) for n in range(10)])
    assert (result.mode, result.sent, result.outcomes) == ("open", 10, {"completed": 10})
    assert result.sending_us == 900_000
    assert result.duration_us == 950_000
    assert result.sent_milli_per_s == 10_000
    assert result.completed_milli_per_s == 10_526
    assert result.lateness is not None
    assert result.lateness.max_us == 0
    assert result.latency is not None
    assert (result.latency.min_us, result.latency.max_us) == (50_000, 50_000)
    assert (result.receipts, result.problems) == ({"admitted": 10}, [])


async def test_a_late_sender_makes_latencies_longer_and_hides_nothing(meshes: Meshes) -> None:
    meshes.answer = lambda _: Answer(exec_us=1_000_000)
    result = await meshes.load([planned(0), planned(0), planned(0)], in_flight_max=1)
    assert result.latency is not None
    assert result.latency_from_send is not None
    assert result.lateness is not None
    # The second was meant to go with the first, and waited for its end.
    assert (result.latency.min_us, result.latency.p50_us) == (1_000_000, 2_000_000)
    assert result.latency.max_us == 3_000_000
    assert result.latency_from_send.max_us == 1_000_000
    assert (result.lateness.p50_us, result.lateness.max_us) == (1_000_000, 2_000_000)


async def test_making_a_long_text_counts_as_lateness(meshes: Meshes) -> None:
    def slowly() -> str:
        meshes.clock._now_ns += 70_000_000
        return "hi"

    result = await meshes.load([planned(0, text=slowly), planned(10)])
    assert result.lateness is not None
    assert result.lateness.max_us == 50_000  # Prepared before its time, but not soon enough.


async def test_a_closed_loop_keeps_so_many_in_flight(meshes: Meshes) -> None:
    open_now: list[int] = []

    def answer(_: Submission) -> Answer:
        (mesh,) = meshes.of.values()
        open_now.append(1 + sum(r.final is None for r in mesh._requests.values()))
        return Answer(exec_us=100_000)

    meshes.answer = answer
    result = await meshes.load([planned(0) for _ in range(12)], in_flight=3)
    assert max(open_now) == 3
    assert (result.mode, result.outcomes) == ("closed", {"completed": 12})
    assert result.duration_us == 400_000
    assert result.latency is not None
    assert result.latency.max_us == 100_000


async def test_all_outcomes_are_counted_once(meshes: Meshes) -> None:
    answers = {
        "t-000000": Answer(reject="load_shed", retry_after_ms=5),
        "t-000001": Answer(outcome="failed"),
        "t-000002": Answer(outcome="expired", texts=()),
        "t-000003": Answer(),
    }
    meshes.answer = lambda submission: answers[submission.id]
    plan = [*(planned(n) for n in range(4)), planned(4, max_tokens=0)]
    result = await meshes.load(plan)
    assert result.outcomes == {
        "completed": 1,
        "expired": 1,
        "failed": 1,
        "invalid": 1,
        "rejected": 1,
    }
    assert (result.sent, result.reasons) == (4, {"load_shed": 1})
    assert result.receipts == {"admitted": 3, "rejected": 1}
    assert result.problems == [
        "1 requests break the protocol and were not sent",
        "1 requests failed",
    ]


async def test_what_never_ends_is_lost_and_named(meshes: Meshes) -> None:
    meshes.answer = lambda submission: Answer(lost=submission.id.endswith("1"))
    result = await meshes.load([planned(n) for n in range(3)], drain_s=2, ask_again_s=1)
    assert result.outcomes == {"completed": 2, "lost": 1}
    assert result.lost == ["acme/t-000001"]
    assert result.problems == ["1 requests have no end"]
    assert "PROBLEM: 1 requests have no end" in render_load(result)
    assert "acme/t-000001" in render_load(result)


async def test_an_answer_that_got_lost_is_asked_for_and_counts(meshes: Meshes) -> None:
    meshes.connect("acme")
    meshes.of["acme"].finals_to_lose = 1
    result = await meshes.load([planned(0), planned(1)], drain_s=1)
    assert (result.outcomes, result.recovered) == ({"completed": 2}, 1)
    assert result.problems == []


async def test_a_missing_receipt_is_a_problem(meshes: Meshes) -> None:
    meshes.connect("acme")
    meshes.of["acme"].receipts_to_lose = 1
    result = await meshes.load([planned(0), planned(1)])
    assert result.receipts == {"admitted": 1, "missing": 1}
    assert result.problems == ["1 requests have no receipt"]


async def test_a_contradicting_receipt_is_a_problem(meshes: Meshes) -> None:
    meshes.connect("acme")
    meshes.of["acme"].wrong_commitments = True
    result = await meshes.load([planned(0)])
    assert result.problems == ["1 receipts contradict what was submitted"]


async def test_what_the_bus_does_not_store_is_not_stored(meshes: Meshes) -> None:
    meshes.connect("acme")
    meshes.of["acme"].nobody_listens = True
    result = await meshes.load([planned(0)])
    assert (result.outcomes, result.receipts) == ({"not_stored": 1}, {})


async def test_a_duration_ends_the_sending_and_not_the_waiting(meshes: Meshes) -> None:
    meshes.answer = lambda _: Answer(exec_us=5_000_000)
    result = await meshes.load([planned(100 * n) for n in range(100)], duration_s_max=2)
    assert (result.sent, result.unsent, result.stopped_by) == (20, 80, "duration")
    assert result.outcomes == {"completed": 20}


async def test_stopping_by_hand(meshes: Meshes) -> None:
    stop = asyncio.Event()
    seen: list[Progress] = []

    def progress(now: Progress) -> None:
        seen.append(now)
        if now.sent >= 5:
            stop.set()

    run = run_load(
        LoadOptions(plan=(planned(100 * n) for n in range(100)), run="t"),
        progress,
        stop=stop,
        connect=meshes.connect,
        clock=meshes.clock,
    )
    result = await meshes.clock.drive(asyncio.ensure_future(run))
    assert result.stopped_by == "request"
    assert 5 <= result.sent < 10
    assert result.unsent == 100 - result.sent
    assert [p.sent for p in seen] == sorted(p.sent for p in seen)
    assert (seen[-1].open, seen[-1].sent) == (0, result.sent)


async def test_several_tenants_phases_and_languages_are_told_apart(meshes: Meshes) -> None:
    def answer(submission: Submission) -> Answer:
        return Answer(exec_us=10_000 * len(submission.prompt or ""))

    meshes.answer = answer
    plan = [
        planned(0, "acme", tier="gold", phase="steady", text=lambda: "a"),
        planned(1, "globex", tier="standard", phase="burst", text=lambda: "bb", language="zh"),
        planned(2, "globex", tier="standard", phase="burst", text=lambda: "ccc", language="zh"),
    ]
    result = await meshes.load(plan)
    assert sorted(meshes.of) == ["acme", "globex"]
    assert sorted(result.groups) == [
        "language:en",
        "language:zh",
        "phase:burst",
        "phase:steady",
        "tenant:acme",
        "tenant:globex",
        "tier:gold",
        "tier:standard",
    ]
    latency = result.groups["tenant:globex"].latency
    assert latency is not None
    assert (latency.count, latency.min_us, latency.max_us) == (2, 20_000, 30_000)


async def test_deadlines_missed_at_the_client_are_counted(meshes: Meshes) -> None:
    meshes.answer = lambda _: Answer(exec_us=300_000)
    result = await meshes.load([planned(0, deadline_ms=200), planned(0, deadline_ms=300)])
    assert (result.outcomes, result.deadlines_missed) == ({"completed": 2}, 1)


async def test_ids_are_of_the_run_and_the_submission_is_what_was_planned(meshes: Meshes) -> None:
    await meshes.load([planned(0, deadline_ms=9000, session="s")])
    (submission,) = meshes.of["acme"].submissions
    assert (submission.id, submission.prompt, submission.session) == ("t-000000", "hi", "s")
    assert (submission.deadline_ms, submission.max_tokens) == (9000, 8)
    assert submission.sent_us is not None


async def test_the_result_is_whole_numbers_and_names(meshes: Meshes) -> None:
    secret = "what nobody else may read"
    result = await meshes.load([planned(0, text=lambda: secret)])
    encoded = result.to_json()
    assert secret not in encoded.decode()
    assert secret not in render_load(result)

    def only_whole(value: object) -> bool:
        if isinstance(value, dict):
            return all(map(only_whole, value.values()))
        if isinstance(value, list):
            return all(map(only_whole, value))
        return not isinstance(value, float)

    assert only_whole(msgspec.json.decode(encoded))
    assert msgspec.json.decode(encoded, type=LoadResult) == result


async def test_nothing_to_send(meshes: Meshes) -> None:
    result = await meshes.load([])
    assert (result.sent, result.outcomes, result.latency) == (0, {}, None)
    assert "No problem found." in render_load(result)


@pytest.mark.parametrize(
    ("options", "found"),
    [({"in_flight": 0}, "0 found"), ({"in_flight_max": 0}, "0 found")],
)
async def test_bounds_that_cannot_be(options: dict, found: str) -> None:
    with pytest.raises(ValueError, match=found):
        await run_load(LoadOptions(plan=[], **options))


async def test_a_tenant_without_login_is_named() -> None:
    with pytest.raises(ValueError, match="globex"):
        await run_load(LoadOptions(plan=[planned(0, "globex")], url="nats://127.0.0.1:1"))


@pytest.mark.parametrize(
    ("values", "p50", "p90", "p99", "p999"),
    [
        ([7], 7, 7, 7, 7),
        ([1, 2], 1, 2, 2, 2),
        (list(range(1, 101)), 50, 90, 99, 100),
        (list(range(1, 1001)), 500, 900, 990, 999),
        (list(range(1, 1002)), 501, 901, 991, 1000),
    ],
)
def test_percentiles_are_nearest_rank(
    values: list[int], p50: int, p90: int, p99: int, p999: int
) -> None:
    found = quantiles(values[::-1])
    assert found is not None
    assert (found.p50_us, found.p90_us, found.p99_us, found.p999_us) == (p50, p90, p99, p999)


@given(st.lists(st.integers(-(10**12), 10**12), min_size=1, max_size=200))
def test_a_percentile_is_a_value_that_enough_others_do_not_exceed(values: list[int]) -> None:
    found = quantiles(values)
    assert found is not None
    for permille, value in ((500, found.p50_us), (990, found.p99_us), (999, found.p999_us)):
        assert value in values
        assert 1000 * sum(other <= value for other in values) >= permille * len(values)
        assert 1000 * sum(other < value for other in values) < permille * len(values)


@pytest.mark.parametrize(
    ("duration_us", "text"),
    [(0, "0.000"), (5, "0.005"), (1_234_567, "1,234.567"), (-1, "-0.001"), (-2500, "-2.500")],
)
def test_milliseconds_lose_nothing(duration_us: int, text: str) -> None:
    assert milliseconds(duration_us) == text
