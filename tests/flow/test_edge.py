"""OpenAI's own client through the whole mesh: answers, errors, budgets, and what is on record."""

import asyncio
import base64
import contextlib
import hashlib
import hmac
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from drill import Drill, drilled
from drill_mesh import MODEL, tenant
from flow_plan import SLOW, flow_plan
from open_load import MARK_EN, MARK_ZH
from tape_recount import Request, measure

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = f"Tell me how a {MARK_EN} keeps the time."
CHAT: Any = [{"role": "user", "content": PROMPT}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def drill(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Drill]:
    plan = flow_plan(
        single=tenant(concurrency=1),
        poor=tenant(tokens_per_minute=600),
        rare=tenant(requests_per_minute=30),
    )
    async with drilled(tmp_path_factory.mktemp("mesh"), plan) as running:
        yield running


@contextlib.asynccontextmanager
async def client_of(drill: Drill, name: str, **options: Any) -> AsyncIterator[AsyncOpenAI]:
    options.setdefault("max_retries", 0)
    client = AsyncOpenAI(
        base_url=f"{drill.mesh.http_url}/v1",
        api_key=drill.mesh.access.tenants[name].api_key,
        timeout=15,
        **options,
    )
    async with client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def acme(drill: Drill) -> AsyncIterator[AsyncOpenAI]:
    async with client_of(drill, "acme") as client:
        yield client


def request_of(drill: Drill, request_id: str, name: str = "acme") -> Request:
    return drill.checker.recount.requests[name, request_id]


def receipt_in(headers: Any) -> dict[str, Any]:
    text = headers["x-waterclock-receipt"]
    return json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))


async def test_an_answer_says_where_its_time_went_and_the_record_agrees(
    drill: Drill, acme: AsyncOpenAI
) -> None:
    raw = await acme.chat.completions.with_raw_response.create(
        model=MODEL, messages=CHAT, max_tokens=8, extra_body={"ignore_eos": True}
    )
    answer = raw.parse()
    assert len(str(answer.choices[0].message.content).split()) == 8
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    assert answer.model == raw.headers["x-served-model"] == MODEL
    await drill.check()
    request = request_of(drill, raw.headers["x-request-id"])
    measured = measure(request)
    assert measured is not None
    assert measured.exec_us is not None
    assert in_us(raw.headers["x-exec-time-ms"]) == measured.exec_us
    assert in_us(raw.headers["x-queue-time-ms"]) == measured.total_us - measured.exec_us
    # The edge accepted it before the bus stored it, and the record has both.
    assert measured.segments["edge"] > 0
    accepted, arrival = request.admitted["edge_accepted"], request.admitted["arrival"]
    assert (accepted["source"], arrival["source"]) == ("edge", "bus")
    assert accepted["wall_us"] < arrival["wall_us"]


async def test_the_receipt_header_names_bytes_on_the_tape_and_proves_the_body(
    drill: Drill, acme: AsyncOpenAI
) -> None:
    raw = await acme.chat.completions.with_raw_response.create(
        model=MODEL, messages=CHAT, max_tokens=3
    )
    assert raw.headers["x-waterclock-receipt-type"] == "unsigned"
    receipt = receipt_in(raw.headers)
    (stored,) = [
        stored
        for stored in await drill.watch.stream("EVENTS", receipt["sequence"])
        if stored.sequence == receipt["sequence"]
    ]
    assert hashlib.sha256(stored.payload).hexdigest() == receipt["event_sha256"]
    assert stored.stored_ns == receipt["stored_ns"]
    (message,) = [
        message
        for message in await drill.watch.stream("REQUESTS", receipt["requests_sequence"])
        if message.sequence == receipt["requests_sequence"]
    ]
    assert message.subject == "wc.edge.acme"
    commitment = json.loads(stored.payload)["data"]["body_commitment"]
    salt = bytes.fromhex(receipt["salt"])
    assert hmac.new(salt, message.payload, hashlib.sha256).hexdigest() == commitment


async def test_a_stream_ends_with_its_times(drill: Drill, acme: AsyncOpenAI) -> None:
    raw = await acme.chat.completions.with_raw_response.create(
        model=MODEL,
        messages=[{"role": "user", "content": f"请说明{MARK_ZH}怎样计时,为什么没有人修理。"}],
        max_tokens=20,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    assert "x-queue-time-ms" in raw.headers
    assert raw.headers["x-served-model"] == MODEL
    texts: list[str] = []
    last: Any = None
    async for chunk in raw.parse():
        texts += [choice.delta.content or "" for choice in chunk.choices]
        last = chunk
    assert len(texts) > 5
    assert last.usage.completion_tokens == 20
    ours = last.model_extra["waterclock"]
    await drill.check()
    request = request_of(drill, raw.headers["x-request-id"])
    measured = measure(request)
    assert measured is not None
    assert measured.exec_us is not None
    assert round(ours["exec_ms"] * 1000) == measured.exec_us
    segments = {f"{name}_ms": us for name, us in measured.segments.items()}
    assert {name: round(ms * 1000) for name, ms in ours["segments"].items()} == segments
    assert request.attempts[1]["pool"] == "zh"


async def test_the_older_api_and_the_list_of_models(drill: Drill, acme: AsyncOpenAI) -> None:
    answer = await acme.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=5, extra_body={"ignore_eos": True}
    )
    assert len(answer.choices[0].text.split()) == 5
    assert {model.id async for model in acme.models.list()} == {MODEL, SLOW}
    await drill.check()


@pytest.mark.parametrize(
    ("fields", "error", "code"),
    [
        pytest.param({"model": "gpt-0"}, openai.NotFoundError, "model_not_found", id="model"),
        pytest.param({"n": 3}, openai.BadRequestError, "unsupported_parameter", id="n"),
        pytest.param(
            {"extra_body": {"whatever": 1}}, openai.BadRequestError, "unknown_parameter", id="field"
        ),
        pytest.param({"max_tokens": 0}, openai.BadRequestError, None, id="no tokens"),
        pytest.param(
            {"messages": [{"role": "user", "content": "word " * 40_000}]},
            openai.BadRequestError,
            "context_length_exceeded",
            id="too long",
        ),
        pytest.param(
            {"messages": [{"role": "user", "content": "x" * 1_100_000}]},
            openai.APIStatusError,
            "body_too_large",
            id="too large",
        ),
    ],
)
async def test_what_is_wrong_is_named(
    drill: Drill, acme: AsyncOpenAI, fields: dict[str, Any], error: type[Exception], code: str
) -> None:
    given: dict[str, Any] = {"model": MODEL, "messages": CHAT} | fields
    with pytest.raises(error) as caught:
        await acme.chat.completions.create(**given)
    found = caught.value
    assert isinstance(found, openai.APIStatusError)
    assert found.code == code
    assert found.response.headers["x-request-id"]
    assert len(found.message) > 15
    await drill.check()


async def test_without_a_known_key_nobody_is_let_in(drill: Drill) -> None:
    for key in ("wc-nobody", drill.mesh.access.tenants["acme"].password):
        async with AsyncOpenAI(
            base_url=f"{drill.mesh.http_url}/v1", api_key=key, max_retries=0
        ) as stranger:
            with pytest.raises(openai.AuthenticationError):
                await stranger.chat.completions.create(model=MODEL, messages=CHAT)


async def test_closing_a_stream_cancels_the_request(drill: Drill, acme: AsyncOpenAI) -> None:
    raw = await acme.chat.completions.with_raw_response.create(
        model=SLOW, messages=CHAT, max_tokens=600, stream=True, extra_body={"ignore_eos": True}
    )
    stream = raw.parse()
    seen = 0
    async for _ in stream:
        seen += 1
        if seen == 5:
            break
    await stream.close()
    await drill.check()
    request = request_of(drill, raw.headers["x-request-id"])
    assert request.end_kind == "cancelled"
    assert request.end is not None
    assert 0 < request.end["output_tokens"] < 600
    (cancel,) = [
        json.loads(stored.payload)["data"]
        for stored in await drill.watch.stream("EVENTS", request.sequence)
        if stored.subject.startswith("wc.event.cancel_requested.acme")
        and request.id.encode() in stored.payload
    ]
    assert cancel["reason"] == "disconnect"


async def test_going_away_before_the_answer_cancels_as_well(
    drill: Drill, acme: AsyncOpenAI
) -> None:
    call = asyncio.create_task(
        acme.chat.completions.create(
            model=SLOW,
            messages=CHAT,
            max_tokens=600,
            extra_body={"ignore_eos": True},
            extra_headers={"X-Request-Id": "gone-1"},
        )
    )
    await asyncio.sleep(0.5)
    call.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await call
    await drill.check()
    assert request_of(drill, "gone-1").end_kind == "cancelled"


async def test_a_deadline_that_passes_is_a_timeout(drill: Drill, acme: AsyncOpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        await acme.chat.completions.create(
            model=SLOW,
            messages=CHAT,
            max_tokens=600,
            extra_body={"ignore_eos": True, "waterclock": {"deadline_ms": 300}},
            extra_headers={"X-Request-Id": "late-1"},
        )
    assert caught.value.status_code == 504
    await drill.check()
    assert request_of(drill, "late-1").end_kind == "expired"


async def test_one_key_of_idempotency_runs_once(drill: Drill, acme: AsyncOpenAI) -> None:
    before = await drill.before()
    answers = [
        await acme.chat.completions.create(
            model=MODEL,
            messages=CHAT,
            max_tokens=9,
            extra_headers={"Idempotency-Key": "pay-the-harbour-pilot"},
        )
        for _ in range(3)
    ]
    assert len({answer.choices[0].message.content for answer in answers}) == 1
    report = await drill.check()
    assert report.requests == before.requests + 1
    with pytest.raises(openai.APIStatusError) as caught:
        await acme.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "another"}],
            extra_headers={"Idempotency-Key": "pay-the-harbour-pilot"},
        )
    assert caught.value.status_code in (409, 422)


async def test_who_may_have_one_at_a_time_waits_as_told_and_gets_through(drill: Drill) -> None:
    """The client that OpenAI ships honours Retry-After by itself."""
    async with client_of(drill, "single") as one, client_of(drill, "single", max_retries=5) as two:
        first = asyncio.create_task(
            one.chat.completions.create(
                model=SLOW, messages=CHAT, max_tokens=120, extra_body={"ignore_eos": True}
            )
        )
        await asyncio.sleep(0.25)
        with pytest.raises(openai.RateLimitError) as caught:
            await one.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=2)
        headers = caught.value.response.headers
        assert headers["x-waterclock-reason"] == "concurrency"
        assert int(headers["retry-after"]) == 1
        began_s = time.monotonic()
        second = await two.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=2)
        assert second.choices[0].message.content
        assert time.monotonic() - began_s >= 0.5
        assert (await first).choices[0].message.content
    await drill.check()


async def test_tokens_that_are_used_up_come_back_when_it_was_said(drill: Drill) -> None:
    async with client_of(drill, "poor") as client:
        answers = 0
        while True:
            try:
                await client.chat.completions.create(
                    model=MODEL, messages=CHAT, max_tokens=100, extra_body={"ignore_eos": True}
                )
                answers += 1
            except openai.RateLimitError as error:
                headers = error.response.headers
                break
        assert answers in (4, 5)
        assert headers["x-waterclock-reason"] == "tokens_per_minute"
        wait_s = int(headers["retry-after"])
        assert 1 <= wait_s <= 11
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=601)
        assert caught.value.response.headers["x-waterclock-reason"] == "over_budget_ceiling"
    await drill.check()


async def test_requests_that_are_used_up_come_back_when_it_was_said(drill: Drill) -> None:
    async with client_of(drill, "rare") as client:

        async def call() -> None:
            await client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=1)

        headers: Any = {}
        for _ in range(60):
            try:
                await call()
            except openai.RateLimitError as error:
                headers = error.response.headers
                break
        assert headers["x-waterclock-reason"] == "requests_per_minute"
        # Thirty a minute are one every two seconds.
        wait_ms = int(headers["retry-after-ms"])
        assert 0 < wait_ms <= 2_000
        await asyncio.sleep(wait_ms / 1000)
        await call()
    report = await drill.check()
    assert report.reasons["requests_per_minute"] == 1


def in_us(milliseconds: str) -> int:
    whole, _, fraction = milliseconds.partition(".")
    return int(whole) * 1000 + int(fraction)
