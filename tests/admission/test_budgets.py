"""Budgets in a real Valkey, and without it."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest
import structlog

from admission_host import MESH_KEY, AdmissionHost, TestProducer, check_decisions, eventually
from broker_process import BrokerProcess
from fake_mesh import FakeMesh, Plan
from valkey_process import ValkeyProcess
from waterclock_admission import limits
from waterclock_admission.allowances import Allowances
from waterclock_admission.budgets import OUTCOMES, Budgets
from waterclock_admission.core import Ask, Terms

START_US = 1_800_000_000_000_000


def terms(tenant: str, requests: int = 0, tokens: int = 0, concurrency: int = 0) -> Terms:
    return Terms(
        tenant=tenant,
        tier="gold",
        contract_sha256="0" * 64,
        models={},
        model_default="",
        deadline_ms_default=1000,
        requests_per_minute=requests,
        tokens_per_minute=tokens,
        concurrency=concurrency,
    )


TERMS = {
    one.tenant: one
    for one in (
        terms("a", requests=7),
        terms("b", requests=60, tokens=1000, concurrency=3),
        terms("c", tokens=limits.PER_MINUTE_MAX),
        terms("d", concurrency=2),
    )
}


def ask(tenant: str, member: str, *, tokens: int = 1, repeats: int = -1) -> Ask:
    return Ask(
        tenant=tenant,
        member=member,
        tokens=tokens,
        expires_us=time.time_ns() // 1000 + 60_000_000,
        repeats=repeats,
    )


MakeHost = Callable[..., AdmissionHost]


@pytest.fixture
async def budgets(valkey: ValkeyProcess) -> AsyncIterator[Budgets]:
    made = Budgets(
        TERMS,
        url=valkey.url,
        prefix="test",
        now_us=lambda: time.time_ns() // 1000,
        log=structlog.get_logger(),
    )
    await made.open([])
    assert not made.degraded
    yield made
    await made.close()


async def run_script(
    budgets: Budgets, asks: list[Ask], releases: list[tuple[str, str]], now_us: int
) -> tuple[list[tuple[str, int]], dict[str, list[int]]]:
    """The script itself, at a moment of the test's choosing."""
    tenants = list(dict.fromkeys([*(a.tenant for a in asks), *(t for t, _ in releases)]))
    places = {tenant: place for place, tenant in enumerate(tenants, start=1)}
    call = {
        "tenants": [
            [TERMS[t].requests_per_minute, TERMS[t].tokens_per_minute, TERMS[t].concurrency]
            for t in tenants
        ],
        "asks": [
            [places[a.tenant], a.member, a.tokens, a.expires_us // 1000, a.repeats + 1]
            for a in asks
        ],
        "releases": [[places[tenant], member] for tenant, member in releases],
    }
    found = await budgets._run(tenants, msgspec.json.encode(call), now_us, whole=True)
    answers = [(str(OUTCOMES[found[2 * n]]), found[2 * n + 1]) for n in range(len(asks))]
    at = 2 * len(asks)
    levels = {t: found[at + 3 * n : at + 3 * n + 3] for n, t in enumerate(tenants)}
    return answers, levels


@pytest.mark.parametrize("seed", range(3))
async def test_the_script_and_the_mirror_count_alike_to_the_unit(
    budgets: Budgets, seed: int
) -> None:
    chance = random.Random(seed)
    mirror = Allowances(TERMS)
    now_us = START_US
    seen: set[str] = set()
    for _ in range(400):
        now_us += chance.choice([0, 1, 999, 1000, 1_000_000, 5_000_000, 70_000_000, -2_000])
        releases = [(chance.choice("abcd"), str(chance.randint(1, 60))) for _ in range(2)]
        asks: list[Ask] = []
        for place in range(chance.randint(1, 6)):
            asks.append(  # noqa: PERF401 - each depends on those before
                Ask(
                    tenant=chance.choice("abcd"),
                    member=str(chance.randint(1, 60)),
                    tokens=chance.randint(1, 700),
                    expires_us=now_us + chance.randint(1, 20_000_000),
                    repeats=chance.choice([-1, -1, chance.randrange(place)]) if place else -1,
                )
            )
        for tenant, member in releases:
            mirror.release(tenant, member)
            mirror.level(tenant, now_us)
        expected = [(a.outcome, a.retry_after_ms) for a in mirror.ask(asks, now_us)]
        found, levels = await run_script(budgets, asks, releases, now_us)
        assert found == expected
        seen.update(outcome for outcome, _ in found)
        for tenant in {a.tenant for a in asks}:
            level = mirror.level(tenant, now_us)
            assert levels[tenant] == [level.requests, level.tokens, level.at_us]
    assert seen == set(OUTCOMES)


async def test_a_batch_is_answered_at_once_and_in_order(budgets: Budgets) -> None:
    answers = await budgets.ask(
        [ask("d", "1"), ask("d", "2"), ask("d", "3"), ask("a", "4"), ask("d", "5", repeats=0)]
    )
    assert [a.outcome for a in answers] == [
        "granted",
        "granted",
        "concurrency",
        "granted",
        "repeated",
    ]
    assert answers[2].retry_after_ms == limits.CONCURRENCY_RETRY_MS
    budgets.release("d", "1")
    assert [a.outcome for a in await budgets.ask([ask("d", "3")])] == ["granted"]


async def test_what_was_charged_before_a_crash_is_not_charged_again(
    budgets: Budgets, valkey: ValkeyProcess
) -> None:
    await budgets.ask([ask("a", str(place)) for place in range(7)])
    after = Budgets(
        TERMS,
        url=valkey.url,
        prefix="test",
        now_us=lambda: time.time_ns() // 1000,
        log=structlog.get_logger(),
    )
    # The fold knows five of them; the other two were granted, and their events were lost.
    await after.open([("a", str(place), START_US * 2) for place in range(5)])
    try:
        answers = await after.ask([ask("a", "0"), ask("a", "x")])
        assert [a.outcome for a in answers] == ["granted", "requests_per_minute"]
    finally:
        await after.close()


@pytest.mark.parametrize("how", ["pause", "kill"])
async def test_without_valkey_the_mirror_goes_on_and_comes_back(
    budgets: Budgets, valkey: ValkeyProcess, how: str
) -> None:
    await budgets.ask([ask("d", "1"), ask("a", "2")])
    (valkey.pause if how == "pause" else valkey.kill)()
    began_s = time.monotonic()
    for place in range(limits.BREAKER_FAILURES):
        answers = await budgets.ask([ask("d", f"x{place}")])
        # One more is open already, so the second of these is one too many.
        assert answers[0].outcome == ("granted", "concurrency")[place]
    assert budgets.degraded
    assert time.monotonic() - began_s < 1.0
    began_s = time.monotonic()
    for _ in range(100):
        assert (await budgets.ask([ask("d", "y")]))[0].outcome == "concurrency"
    assert time.monotonic() - began_s < 0.5
    # What is used meanwhile stays used.
    for place in range(20):
        await budgets.ask([ask("a", f"z{place}")])
    (valkey.resume if how == "pause" else valkey.start)()
    await eventually(lambda: not budgets.degraded)
    answers = await budgets.ask([ask("d", "w"), ask("a", "w")])
    assert [a.outcome for a in answers] == ["concurrency", "requests_per_minute"]
    budgets.release("d", "1")
    assert (await budgets.ask([ask("d", "w")]))[0].outcome == "granted"


async def test_a_valkey_that_was_started_again_empty_is_filled(
    budgets: Budgets, valkey: ValkeyProcess
) -> None:
    await budgets.ask([ask("d", "1"), ask("d", "2")])
    valkey.restart()
    # The connection broke, so the mirror answers; or the script is sent anew.
    for _ in range(5):
        assert (await budgets.ask([ask("d", "3")]))[0].outcome == "concurrency"
        await asyncio.sleep(0.02)
    await eventually(lambda: not budgets.degraded)
    assert (await budgets.ask([ask("d", "3")]))[0].outcome == "concurrency"


async def submit_many(producer: TestProducer, prefix: str, count: int) -> list[Any]:
    return [await producer.submit(f"{prefix}{place}") for place in range(count)]


async def test_admission_keeps_to_the_budgets_with_valkey_and_without(
    broker: BrokerProcess, valkey: ValkeyProcess, make_host: MakeHost
) -> None:
    options = {"redis_url": valkey.url, "tenants": {"acme": {"concurrency": 5}}}
    host = make_host(**options)
    await asyncio.to_thread(host.start)
    go = asyncio.Event()
    async with TestProducer(broker.url) as producer, FakeMesh(broker.url, MESH_KEY) as mesh:
        mesh.plan = lambda _a, _b: Plan(before_first=go)
        receipts = await submit_many(producer, "with-", 8)
        assert [r.outcome for r in receipts] == ["admitted"] * 5 + ["rejected"] * 3
        assert {r.reason for r in receipts[5:]} == {"concurrency"}
        assert receipts[5].retry_after_ms == limits.CONCURRENCY_RETRY_MS
        go.set()
        await eventually(lambda: len(producer.answers) >= 5)
        go.clear()
        await asyncio.sleep(0.2)
        valkey.pause()
        receipts = await submit_many(producer, "without-", 8)
        assert [r.outcome for r in receipts] == ["admitted"] * 5 + ["rejected"] * 3
        assert await host.metric("waterclock_admission_budgets_degraded") == 1
        assert "budgets" in await host.health()
        valkey.resume()

        async def is_back() -> bool:
            return await host.metric("waterclock_admission_budgets_degraded") == 0

        await eventually(is_back)
        assert (await producer.submit("still-full")).reason == "concurrency"
        go.set()
        await eventually(lambda: len(producer.answers) >= 10)
        await asyncio.sleep(0.2)
        receipts = await submit_many(producer, "later-", 3)
        assert [r.outcome for r in receipts] == ["admitted"] * 3
        await check_decisions(producer.bus)
    assert await asyncio.to_thread(host.stop) == 0


async def test_a_restart_of_admission_forgets_no_open_request(
    broker: BrokerProcess, valkey: ValkeyProcess, make_host: MakeHost
) -> None:
    options = {"redis_url": valkey.url, "tenants": {"acme": {"concurrency": 3}}}
    host = make_host(**options)
    await asyncio.to_thread(host.start)
    never = asyncio.Event()
    async with TestProducer(broker.url) as producer, FakeMesh(broker.url, MESH_KEY) as mesh:
        mesh.plan = lambda _a, _b: Plan(before_first=never)
        await submit_many(producer, "r", 3)
        await asyncio.to_thread(host.kill)
        valkey.restart()
        await asyncio.to_thread(host.start)
        assert (await producer.submit("one-more")).reason == "concurrency"
    assert await asyncio.to_thread(host.stop) == 0
