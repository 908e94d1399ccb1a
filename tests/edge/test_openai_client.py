"""OpenAI's own client, unchanged, against the edge; scheduler and worker are FakeMesh."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from admission_host import API_KEYS, MESH_KEY, MODEL, AdmissionHost
from broker_process import BrokerProcess
from fake_mesh import FakeMesh, Plan

# Plain dictionaries, as people write them; the library wants typed ones.
MESSAGES: Any = [{"role": "user", "content": "tell me"}]


@pytest.fixture(scope="module")
def edge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, AdmissionHost]]:
    """A bus and an admission for all tests here: they use ids of their own."""
    folder = tmp_path_factory.mktemp("edge")
    broker = BrokerProcess(folder / "broker").start()
    try:
        with AdmissionHost(folder / "admission", broker.url) as host:
            yield broker.url, host
    finally:
        broker.stop()


@pytest.fixture
async def mesh(edge: tuple[str, AdmissionHost]) -> AsyncIterator[FakeMesh]:
    async with FakeMesh(edge[0], MESH_KEY) as fake:
        yield fake


@pytest.fixture
async def client(edge: tuple[str, AdmissionHost], mesh: FakeMesh) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(
        base_url=f"{edge[1].base_url}/v1", api_key=API_KEYS["acme"], max_retries=0, timeout=20
    ) as made:
        yield made


async def test_a_chat_completion_comes_back_whole(client: AsyncOpenAI, mesh: FakeMesh) -> None:
    raw = await client.chat.completions.with_raw_response.create(
        model=MODEL, messages=MESSAGES, temperature=0.7, max_tokens=32, user="somebody"
    )
    answer = raw.parse()
    assert answer.choices[0].message.content == "Hello, world"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == MODEL
    assert answer.usage is not None
    assert answer.usage.total_tokens == 10
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    assert raw.headers["x-queue-time-ms"] == "12.345"
    assert raw.headers["x-exec-time-ms"] == "67.890"
    assert raw.headers["x-served-model"] == MODEL
    assert raw.headers["x-waterclock-receipt-type"] == "unsigned"
    sent = mesh.seen.bodies[mesh.seen.ids[0]]
    assert sent.sampling is not None
    assert sent.sampling.temperature == "0.7"
    assert mesh.seen.admitted[0].edge_accepted is not None


async def test_a_stream_brings_its_pieces_and_its_usage(client: AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == "Hello, world"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 3
    assert chunks[-1].model_extra is not None
    ours = chunks[-1].model_extra["waterclock"]
    assert ours["queue_ms"] == 12.345
    assert ours["exec_ms"] == 67.89
    assert ours["segments"]["prefill_ms"] == 60.0


async def test_the_older_completions_api_works_too(client: AsyncOpenAI) -> None:
    answer = await client.completions.create(model=MODEL, prompt="tell me")
    assert answer.choices[0].text == "Hello, world"
    stream = await client.completions.create(model=MODEL, prompt="tell me", stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "Hello, world"


async def test_models_are_the_tenants(client: AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == [MODEL]
    assert (await client.models.retrieve(MODEL)).id == MODEL
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("another")


async def test_an_unknown_key_is_refused(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.AuthenticationError) as refused:
        await client.with_options(api_key="wrong").chat.completions.create(
            model=MODEL, messages=MESSAGES
        )
    assert refused.value.code == "invalid_api_key"


async def test_an_unknown_model_is_not_found(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        await client.chat.completions.create(model="another", messages=MESSAGES)
    assert refused.value.code == "model_not_found"
    assert refused.value.param == "model"


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"n": 2}, "n"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"logprobs": True}, "logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"extra_body": {"top_k": 5}}, "top_k"),
        ({"temperature": 3}, "temperature"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"extra_body": {"waterclock": {"language": "xx"}}}, "waterclock.language"),
    ],
)
async def test_what_is_not_done_here_is_refused_by_name(
    client: AsyncOpenAI, parameters: dict, param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(model=MODEL, messages=MESSAGES, **parameters)
    assert refused.value.param == param


async def test_harmless_parameters_pass(client: AsyncOpenAI, mesh: FakeMesh) -> None:
    answer = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": [{"type": "text", "text": "tell me"}]}],
        n=1,
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        seed=-5,
        stop="\n",
        top_p=0.9,
        max_completion_tokens=9,
        presence_penalty=0,
        extra_body={"waterclock": {"deadline_ms": 5000, "language": "en", "session": "s"}},
    )
    assert answer.choices[0].message.content == "Hello, world"
    sent = mesh.seen.bodies[mesh.seen.ids[0]]
    assert (sent.deadline_ms, sent.language, sent.session, sent.max_tokens) == (
        5000,
        "en",
        "s",
        9,
    )


async def test_a_deadline_that_passes_in_the_queue_is_a_gateway_timeout(
    client: AsyncOpenAI, mesh: FakeMesh
) -> None:
    mesh.plan = lambda _a, _b: Plan(end="expired")
    with pytest.raises(openai.InternalServerError) as refused:
        await client.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert refused.value.status_code == 504
    assert refused.value.code == "deadline_expired"


async def test_an_engine_that_fails_is_a_server_error(client: AsyncOpenAI, mesh: FakeMesh) -> None:
    mesh.plan = lambda _a, _b: Plan(end="failed", detail="the engine said no")
    with pytest.raises(openai.InternalServerError) as refused:
        await client.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert refused.value.status_code == 500
    assert "the engine said no" in refused.value.message


async def test_a_refusal_by_the_scheduler_comes_before_the_first_byte(
    client: AsyncOpenAI, mesh: FakeMesh
) -> None:
    mesh.plan = lambda _a, _b: Plan(end="rejected", retry_after_ms=2500)
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError) as refused:
            await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=stream)
        assert refused.value.status_code == 503
        assert refused.value.response.headers["retry-after"] == "3"
        assert refused.value.response.headers["retry-after-ms"] == "2500"


async def test_load_is_shed_at_the_door_and_the_client_comes_again_by_itself(
    client: AsyncOpenAI, mesh: FakeMesh
) -> None:
    mesh.set_rung(refuse=True, retry_after_ms=400)
    await asyncio.sleep(0.2)
    with pytest.raises(openai.InternalServerError) as refused:
        await client.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert refused.value.code == "load_shed"
    assert mesh.seen.admitted == []
    began_s = time.monotonic()

    async def relax() -> None:
        await asyncio.sleep(0.3)
        mesh.set_rung(refuse=False)

    relaxing = asyncio.create_task(relax())
    answer = await client.with_options(max_retries=2).chat.completions.create(
        model=MODEL, messages=MESSAGES
    )
    await relaxing
    assert answer.choices[0].message.content == "Hello, world"
    assert time.monotonic() - began_s >= 0.4


async def test_a_client_that_goes_away_cancels_its_request(
    client: AsyncOpenAI, mesh: FakeMesh
) -> None:
    never = asyncio.Event()
    mesh.plan = lambda _a, _b: Plan(before_first=never)
    call = asyncio.create_task(client.chat.completions.create(model=MODEL, messages=MESSAGES))
    await mesh.until(lambda seen: seen.admitted)
    call.cancel()
    await mesh.until(lambda seen: seen.cancels)
    assert mesh.seen.cancels[0].id == mesh.seen.ids[0]
    assert mesh.seen.cancels[0].reason == "disconnect"


async def test_a_stream_that_is_closed_cancels_its_request(
    client: AsyncOpenAI, mesh: FakeMesh
) -> None:
    never = asyncio.Event()
    mesh.plan = lambda _a, _b: Plan(before_end=never)
    stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    await stream.close()
    await mesh.until(lambda seen: seen.cancels)
    assert mesh.seen.cancels[0].reason == "disconnect"


async def test_a_retry_after_the_first_byte_is_never_silent(
    client: AsyncOpenAI, mesh: FakeMesh
) -> None:
    mesh.plan = lambda _a, _b: Plan(restart_after=2, piece_delay_s=0.05)
    stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
    texts: list[str] = []

    async def read() -> None:
        async for chunk in stream:
            texts.append(chunk.choices[0].delta.content or "")  # noqa: PERF401 - it ends in an error

    with pytest.raises(openai.APIError) as broken:
        await read()
    assert broken.value.code == "attempt_lost"
    assert "".join(texts) == "Hello, "


async def test_a_retry_before_the_first_byte_is_nobodys_business(
    client: AsyncOpenAI, mesh: FakeMesh
) -> None:
    mesh.plan = lambda _a, _b: Plan(restart_after=0)
    stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
    texts = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(texts) == "Hello, world"


async def test_lost_deltas_are_made_good_by_the_final(client: AsyncOpenAI, mesh: FakeMesh) -> None:
    mesh.plan = lambda _a, _b: Plan(lose_pieces=(1,))
    stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
    texts = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(texts) == "Hello, world"


async def test_the_same_key_and_body_bring_the_same_answer_and_run_once(
    client: AsyncOpenAI, mesh: FakeMesh
) -> None:
    headers = {"Idempotency-Key": "order-17"}
    first = await client.chat.completions.create(
        model=MODEL, messages=MESSAGES, extra_headers=headers
    )
    again = await client.chat.completions.create(
        model=MODEL, messages=MESSAGES, extra_headers=headers
    )
    assert first.id == again.id == "chatcmpl-order-17"
    assert again.choices[0].message.content == "Hello, world"
    assert mesh.seen.ids == ["order-17"]
    with pytest.raises(openai.ConflictError) as refused:
        await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "something else"}],
            extra_headers=headers,
        )
    assert refused.value.code == "id_reused"


async def test_two_clients_with_one_key_get_one_answer(client: AsyncOpenAI, mesh: FakeMesh) -> None:
    go = asyncio.Event()
    mesh.plan = lambda _a, _b: Plan(before_first=go)
    calls = [
        asyncio.create_task(
            client.chat.completions.create(
                model=MODEL, messages=MESSAGES, extra_headers={"X-Request-Id": "twice"}
            )
        )
        for _ in range(3)
    ]
    await mesh.until(lambda seen: seen.admitted)
    await asyncio.sleep(0.1)
    # One of the three gives up; the others still want it.
    calls[0].cancel()
    await asyncio.sleep(0.1)
    go.set()
    answers = await asyncio.gather(*calls[1:])
    assert [a.choices[0].message.content for a in answers] == ["Hello, world"] * 2
    assert mesh.seen.ids == ["twice"]
    assert mesh.seen.cancels == []


async def test_the_budget_of_requests_is_a_429_with_the_time_to_wait(
    broker: BrokerProcess, tmp_path: Path
) -> None:
    tenants = {"acme": {"requests_per_minute": 120}}
    with AdmissionHost(tmp_path / "admission", broker.url, tenants=tenants) as host:
        await _use_up(host, broker.url)


async def _use_up(host: AdmissionHost, bus_url: str) -> None:
    async with (
        FakeMesh(bus_url, MESH_KEY),
        AsyncOpenAI(
            base_url=f"{host.base_url}/v1", api_key=API_KEYS["acme"], max_retries=0
        ) as client,
    ):
        refused: openai.RateLimitError | None = None
        for _ in range(130):
            try:
                await client.chat.completions.create(model=MODEL, messages=MESSAGES)
            except openai.RateLimitError as error:
                refused = error
                break
        assert refused is not None
        assert refused.code == "rate_limit_exceeded"
        assert refused.response.headers["retry-after"] == "1"
        assert 0 < int(refused.response.headers["retry-after-ms"]) <= 500
        # The client waits as it was told, and is served.
        answer = await client.with_options(max_retries=3).chat.completions.create(
            model=MODEL, messages=MESSAGES
        )
        assert answer.choices[0].message.content == "Hello, world"
