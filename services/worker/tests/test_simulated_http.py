"""The OpenAI chat API straight on an engine: called as ASGI, without a socket."""

import asyncio
from collections.abc import MutableMapping
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from waterclock_worker.engine import EngineStamps
from waterclock_worker.engine_http import BODY_BYTES_MAX, Metrics, build_app, timings
from waterclock_worker.simulated import SimulatedEngine
from waterclock_worker.simulated_profiles import PROFILES

HELLO = {
    "model": "instant",
    "messages": [{"role": "user", "content": "What time is it?"}],
    "max_tokens": 5,
    "ignore_eos": True,
}


class Client:
    """One request at an ASGI application; ``leave`` is the client hanging up."""

    def __init__(self, app: Any, method: str, path: str, body: bytes, **headers: str) -> None:
        self._app = app
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()],
        }
        half = len(body) // 2
        self._events = [
            {"type": "http.request", "body": body[:half], "more_body": True},
            {"type": "http.request", "body": body[half:], "more_body": False},
        ]
        self._gone = asyncio.Event()
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.body = b""
        self.pieces: list[bytes] = []
        self.complete = False

    async def ask(self) -> "Client":
        async with asyncio.timeout(20):
            await self._app(self._scope, self._receive, self._send)
        return self

    def leave(self) -> None:
        self._gone.set()

    async def _receive(self) -> MutableMapping[str, Any]:
        if self._events:
            return self._events.pop(0)
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, event: MutableMapping[str, Any]) -> None:
        if event["type"] == "http.response.start":
            assert self.status == 0
            self.status = event["status"]
            self.headers = dict(event["headers"])
            return
        assert self.status
        assert not self.complete
        self.pieces.append(event["body"])
        self.body += event["body"]
        self.complete = not event.get("more_body", False)

    def json(self) -> Any:
        return msgspec.json.decode(self.body)

    def chunks(self) -> list[Any]:
        """The server-sent events; the last must be [DONE]."""
        *events, done, nothing = self.body.decode().split("\n\n")
        assert (done, nothing) == ("data: [DONE]", "")
        return [msgspec.json.decode(event.removeprefix("data: ")) for event in events]


async def post(engine: Any, body: Any, *, metrics: bool = False, **headers: str) -> Client:
    raw = body if isinstance(body, bytes) else msgspec.json.encode(body)
    app = build_app(engine, metrics=metrics)
    client = await Client(app, "POST", "/v1/chat/completions", raw, **headers).ask()
    assert (await engine.health()).in_flight == 0
    return client


async def instant(**change: Any) -> SimulatedEngine:
    engine = SimulatedEngine(replace(PROFILES["instant"], **change))
    await engine.start()
    return engine


async def test_an_answer_is_whole_with_its_usage() -> None:
    client = await post(await instant(), HELLO, x_request_id="from-the-client")
    assert client.status == 200
    assert int(client.headers[b"content-length"]) == len(client.body)
    answer = client.json()
    assert answer["object"] == "chat.completion"
    assert answer["id"] == "chatcmpl-from-the-client"
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length"
    assert len(choice["message"]["content"].split()) == 5
    assert answer["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 5,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert "metrics" not in answer


async def test_a_streamed_answer_is_the_same_text_in_pieces() -> None:
    engine = await instant()
    whole = (await post(engine, HELLO)).json()
    client = await post(engine, {**HELLO, "stream": True})
    assert client.headers[b"content-type"].startswith(b"text/event-stream")
    chunks = client.chunks()
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    text = "".join(delta["content"] for delta in deltas)
    assert text == whole["choices"][0]["message"]["content"]
    finishes = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert finishes == [None] * (len(chunks) - 1) + ["length"]
    assert not any("usage" in chunk for chunk in chunks)


async def test_a_stream_is_sent_as_it_is_made() -> None:
    client = await post(await instant(), {**HELLO, "stream": True, "max_tokens": 50})
    # Tokens that are made while others are being sent are merged.
    assert 10 < len(client.pieces) <= 50 + 1


async def test_usage_comes_last_where_it_is_asked_for() -> None:
    body = {**HELLO, "stream": True, "stream_options": {"include_usage": True}}
    chunks = (await post(await instant(), body, metrics=True)).chunks()
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 5
    metrics = chunks[-1]["metrics"]
    assert set(metrics) == {
        "queue_time_ms",
        "time_to_first_token_ms",
        "generation_time_ms",
        "mean_itl_ms",
        "tokens_per_second",
    }
    assert metrics["generation_time_ms"] >= 4 * metrics["mean_itl_ms"] * 0.999
    assert metrics["queue_time_ms"] >= 0


async def test_the_first_token_is_timed_from_scheduling_as_vllm_does() -> None:
    stamps = EngineStamps(
        queued_ns=1_000_000,
        scheduled_ns=6_000_000,
        first_token_ns=8_000_000,
        last_token_ns=18_000_000,
    )
    assert timings(stamps, 6) == Metrics(
        queue_time_ms=5.0,
        time_to_first_token_ms=2.0,
        generation_time_ms=10.0,
        mean_itl_ms=2.0,
        tokens_per_second=500.0,
    )
    assert timings(EngineStamps(queued_ns=1), 0) == Metrics(None, None, None, None, None)


async def test_content_may_come_in_parts() -> None:
    engine = await instant()
    parts = [{"type": "text", "text": "What time "}, {"type": "text", "text": "is it?"}]
    body = {**HELLO, "messages": [{"role": "user", "content": parts}]}
    whole = (await post(engine, HELLO)).json()
    assert (await post(engine, body)).json()["choices"] == whole["choices"]


async def test_without_a_maximum_an_answer_has_a_default_one() -> None:
    body = {"model": "instant", "messages": HELLO["messages"], "ignore_eos": True}
    assert (await post(await instant(), body)).json()["usage"]["completion_tokens"] == 512
    small = await instant(context_tokens_max=64)
    assert (await post(small, body)).json()["usage"]["completion_tokens"] == 60


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        pytest.param({"model": "other"}, 404, "'other'", id="model"),
        pytest.param({"n": 2}, 400, "n: 1 expected", id="several answers"),
        pytest.param({"messages": "hello"}, 400, "$.messages", id="not a chat"),
        pytest.param({"max_tokens": 0}, 400, "at least 1", id="no answer"),
        pytest.param({"max_completion_tokens": 0}, 400, "at least 1", id="no answer, new name"),
        pytest.param({"max_tokens": 1 << 20}, 400, "at most", id="longer than the context"),
        pytest.param(
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "image_url",
            id="a picture",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_cannot_be_answered_has_a_status(
    change: dict[str, Any], status: int, words: str, *, stream: bool
) -> None:
    client = await post(await instant(), {**HELLO, **change, "stream": stream})
    assert client.status == status
    assert client.complete
    error = client.json()["error"]
    assert error["code"] == status
    assert words in error["message"]


@pytest.mark.parametrize(
    ("body", "status"), [(b"{", 400), (b"\xff", 400), (b" " * (BODY_BYTES_MAX + 1), 413)]
)
async def test_what_cannot_be_read_has_a_status(body: bytes, status: int) -> None:
    assert (await post(await instant(), body)).status == status


async def test_a_dead_engine_is_unavailable() -> None:
    engine = await instant()
    engine.break_down("simulated loss of the GPU")
    client = await post(engine, {**HELLO, "stream": True})
    assert (client.status, client.json()["error"]["type"]) == (503, "ServiceUnavailableError")
    health = await Client(build_app(engine), "GET", "/health", b"").ask()
    assert (health.status, health.json()["status"]) == (503, "dead")


async def test_an_error_after_the_first_byte_comes_as_a_chunk() -> None:
    engine = await instant()
    body = msgspec.json.encode({**HELLO, "stream": True, "max_tokens": 10_000})
    client = Client(build_app(engine), "POST", "/v1/chat/completions", body)
    asking = asyncio.ensure_future(client.ask())
    while not client.pieces:  # noqa: ASYNC110 - only the answer tells
        await asyncio.sleep(0)
    engine.break_down("simulated loss of the GPU")
    await asking
    assert client.status == 200
    error = client.chunks()[-1]["error"]
    assert error["code"] == 503
    assert client.complete


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_aborts_its_job(*, stream: bool) -> None:
    engine = await instant()
    body = msgspec.json.encode({**HELLO, "stream": stream, "max_tokens": 1_000_000})
    client = Client(build_app(engine), "POST", "/v1/chat/completions", body)
    asking = asyncio.ensure_future(client.ask())
    while (await engine.health()).running == 0:  # noqa: ASYNC110 - nothing else tells
        await asyncio.sleep(0)
    client.leave()
    await asking
    assert (await engine.health()).in_flight == 0
    assert (await engine.health()).kv_used_permille == 0


async def test_a_client_that_leaves_before_it_has_asked_leaves_nothing() -> None:
    engine = await instant()
    client = Client(build_app(engine), "POST", "/v1/chat/completions", b"")
    client._events = client._events[:1]
    client.leave()
    await client.ask()
    assert client.status == 0


async def test_models_and_health() -> None:
    app = build_app(await instant())
    models = (await Client(app, "GET", "/v1/models", b"").ask()).json()
    assert [(model["id"], model["max_model_len"]) for model in models["data"]] == [
        ("instant", 1 << 20)
    ]
    assert (await Client(app, "GET", "/health", b"").ask()).status == 200
    assert (await Client(app, "GET", "/v1/chat/completions", b"").ask()).status == 405
    assert (await Client(app, "GET", "/nothing", b"").ask()).status == 404
