"""An engine behind the OpenAI chat API, with nothing of the mesh in between.

It is the other side of a comparison: the same engine, asked through the mesh and directly. Run by
``python -m waterclock_worker.engine_http --profile h200-8b``. No authentication, no limits, no
record of anything: for a loopback or a test network.

What it speaks is the part of vLLM's server that the worker's HTTP engine needs:

* ``POST /v1/chat/completions``, with and without ``stream``; also vLLM's ``ignore_eos``,
  ``cache_salt`` and ``priority``. ``n`` is 1 and messages are text. Errors before the first byte
  have a status (400, 404, 413, 500, 503), later ones come as a chunk with an ``error``.
* ``usage`` in the answer, or in a last chunk if ``stream_options.include_usage`` is set. With
  ``--metrics``, vLLM's ``metrics`` come beside it (``--enable-per-request-metrics`` there), in
  milliseconds. As in vLLM, ``time_to_first_token_ms`` begins at scheduling, without the queue.
* ``GET /v1/models`` and ``GET /health``.

A client that disconnects aborts its job. Starlette and uvicorn are imported only when they are
needed; a worker runs without them.
"""

import argparse
import asyncio
import contextlib
import importlib
import itertools
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Generator, MutableMapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from waterclock_proto.requests import estimate_prompt_tokens
from waterclock_worker.engine import (
    Engine,
    EngineJob,
    EngineOutput,
    EngineStamps,
    EngineStream,
    Failure,
)
from waterclock_worker.simulated import SimulatedEngine
from waterclock_worker.simulated_profiles import PROFILES

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

BODY_BYTES_MAX = 8 << 20
"""More than any prompt that fits a context of a million tokens."""
OUTPUT_TOKENS_DEFAULT = 512
"""Where the request names no maximum: what the mesh's admission takes by default."""
DRAIN_S = 5
"""From SIGTERM: how long answers may go on; what is left then ends with ``abort``."""
ABORT_S = 5
"""How long answers may then take to end; several of an engine's longest steps."""

Scope = MutableMapping[str, Any]
Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]

STATUS: dict[Failure, int] = {
    "bad_request": 400,
    "overloaded": 503,
    "failed": 500,
    "engine_dead": 503,
}
ERROR_TYPE = {
    400: "BadRequestError",
    404: "NotFoundError",
    413: "BadRequestError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}


# --- the wire


class Part(Struct, frozen=True):
    type: str
    text: str = ""


class ChatMessage(Struct, frozen=True):
    role: str
    content: str | list[Part] | None = None


class StreamOptions(Struct, frozen=True):
    include_usage: bool = False


class ChatRequest(Struct, frozen=True):
    """The fields that are read. Others are ignored, as servers of this API do."""

    model: str
    messages: list[ChatMessage]
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool = False
    cache_salt: str | None = None
    priority: int = 0


class PromptDetails(Struct, frozen=True):
    cached_tokens: int


class Usage(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class Metrics(Struct, frozen=True):
    """vLLM's names and units; null where the job did not get so far."""

    queue_time_ms: float | None
    time_to_first_token_ms: float | None
    generation_time_ms: float | None
    mean_itl_ms: float | None
    tokens_per_second: float | None


class Delta(Struct, frozen=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChunkChoice(Struct, frozen=True):
    index: int
    delta: Delta
    finish_reason: str | None


class Chunk(Struct, frozen=True):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType = UNSET
    metrics: Metrics | UnsetType = UNSET


class AnswerMessage(Struct, frozen=True):
    role: str
    content: str


class Choice(Struct, frozen=True):
    index: int
    message: AnswerMessage
    finish_reason: str | None


class Answer(Struct, frozen=True):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    metrics: Metrics | UnsetType = UNSET


class ErrorDetail(Struct, frozen=True):
    message: str
    type: str
    code: int


class ErrorAnswer(Struct, frozen=True):
    error: ErrorDetail


class ModelCard(Struct, frozen=True):
    id: str
    object: Literal["model"]
    owned_by: str
    max_model_len: int


class ModelList(Struct, frozen=True):
    object: Literal["list"]
    data: list[ModelCard]


class Refused(Exception):
    """A request that gets an answer of this status and no job."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(ChatRequest).decode


# --- the server


def build_app(engine: Engine, *, metrics: bool = False) -> "Starlette":
    """The ASGI application for an engine, which the caller starts and stops."""
    from starlette.applications import Starlette
    from starlette.responses import Response
    from starlette.routing import Route

    async def models(_: "Request") -> "Response":
        capabilities = engine.capabilities
        cards = [
            ModelCard(name, "model", capabilities.name, capabilities.context_tokens_max)
            for name in capabilities.models
        ]
        return Response(_encode(ModelList("list", cards)), media_type="application/json")

    async def health(_: "Request") -> "Response":
        state = await engine.health()
        return Response(
            _encode(state),
            status_code=200 if state.status == "ok" else 503,
            media_type="application/json",
        )

    chat = ChatEndpoint(engine, metrics=metrics)
    return Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/models", models, methods=["GET"]),
            Route("/health", health, methods=["GET"]),
        ]
    )


class ChatEndpoint:
    """``POST /v1/chat/completions``, straight on ASGI: what it costs is what is compared with."""

    def __init__(self, engine: Engine, *, metrics: bool) -> None:
        self._engine = engine
        self._metrics = metrics
        self._run = f"{time.time_ns():x}"
        self._numbers = itertools.count()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        job_id = f"http/{self._run}-{next(self._numbers)}/1"
        try:
            request = _read(await _body(receive))
            job = self._job(job_id, request)
        except Refused as refused:
            await _send_error(send, refused.status, str(refused))
            return
        except ClientGone:
            return
        answer_id = f"chatcmpl-{_request_id(scope) or job_id.split('/')[1]}"
        gone = asyncio.ensure_future(self._abort_when_gone(receive, job_id))
        try:
            async with aclosing(self._engine.generate(job)) as stream:
                if request.stream:
                    options = request.stream_options or StreamOptions()
                    await self._chunks(
                        send, stream, answer_id, job.model, usage=options.include_usage
                    )
                else:
                    await self._whole(send, stream, answer_id, job.model)
        finally:
            gone.cancel()
            await self._engine.abort(job_id)

    async def _abort_when_gone(self, receive: Receive, job_id: str) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        await self._engine.abort(job_id)

    def _job(self, job_id: str, request: ChatRequest) -> EngineJob:
        capabilities = self._engine.capabilities
        if request.model not in capabilities.models:
            raise Refused(
                404, f"model {request.model!r} is not served, only {list(capabilities.models)} is"
            )
        if request.n not in (None, 1):
            raise Refused(400, f"n: 1 expected, {request.n} found; ask several times")
        contents = [_text(message) for message in request.messages]
        estimate = estimate_prompt_tokens("\n".join(contents))
        tokens_max = request.max_completion_tokens
        if tokens_max is None:
            tokens_max = request.max_tokens
        if tokens_max is None:
            room = capabilities.context_tokens_max - estimate
            tokens_max = max(1, min(OUTPUT_TOKENS_DEFAULT, room))
        sampling: dict[str, object] = {
            name: value
            for name in ("temperature", "top_p", "stop")
            if (value := getattr(request, name)) is not None
        }
        return EngineJob(
            job_id=job_id,
            prompt="\n".join(
                f"{message.role}: {content}"
                for message, content in zip(request.messages, contents, strict=True)
            ),
            messages=[
                {"role": message.role, "content": content}
                for message, content in zip(request.messages, contents, strict=True)
            ],
            model=request.model,
            prompt_tokens_estimate=estimate,
            output_tokens_max=tokens_max,
            ignore_eos=request.ignore_eos,
            cache_salt=request.cache_salt or "",
            priority=request.priority,
            seed=request.seed,
            sampling=sampling or None,
        )

    async def _whole(self, send: Send, stream: EngineStream, answer_id: str, model: str) -> None:
        texts: list[str] = []
        tokens = 0
        last = EngineOutput()
        async for output in stream:
            texts.append(output.text)
            tokens += output.tokens
            last = output
        if last.failure is not None:
            await _send_error(send, STATUS[last.failure], last.detail)
            return
        answer = Answer(
            id=answer_id,
            object="chat.completion",
            created=time.time_ns() // 1_000_000_000,
            model=last.model_served or model,
            choices=[Choice(0, AnswerMessage("assistant", "".join(texts)), last.finish)],
            usage=_usage(last, tokens),
            metrics=timings(last.stamps, tokens) if self._metrics else UNSET,
        )
        await _send_json(send, 200, _encode(answer))

    async def _chunks(
        self, send: Send, stream: EngineStream, answer_id: str, model: str, *, usage: bool
    ) -> None:
        created = time.time_ns() // 1_000_000_000
        tokens = 0
        begun = False
        last = EngineOutput()

        def chunk(delta: Delta, finish: str | None) -> bytes:
            choice = ChunkChoice(0, delta, finish)
            return _event(Chunk(answer_id, "chat.completion.chunk", created, model, [choice]))

        async for output in stream:
            last = output
            tokens += output.tokens
            if output.failure is not None:
                if not begun:
                    await _send_error(send, STATUS[output.failure], output.detail)
                    return
                error = _error(STATUS[output.failure], output.detail)
                await _send_events(send, _event(error) + b"data: [DONE]\n\n", more=False)
                return
            if not output.text and output.finish is None:
                continue
            events = b""
            if not begun:
                begun = True
                model = output.model_served or model
                await send(
                    {
                        "type": "http.response.start",
                        "status": 200,
                        "headers": [
                            (b"content-type", b"text/event-stream; charset=utf-8"),
                            (b"cache-control", b"no-store"),
                        ],
                    }
                )
                events = chunk(Delta(role="assistant", content=""), None)
            events += chunk(Delta(content=output.text), output.finish)
            await _send_events(send, events, more=True)
        end = b"data: [DONE]\n\n"
        if usage:
            end = (
                _event(
                    Chunk(
                        answer_id,
                        "chat.completion.chunk",
                        created,
                        model,
                        [],
                        _usage(last, tokens),
                        timings(last.stamps, tokens) if self._metrics else UNSET,
                    )
                )
                + end
            )
        await _send_events(send, end, more=False)


# --- reading


class ClientGone(Exception):
    """The client went away before its request was complete."""


async def _body(receive: Receive) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        event = await receive()
        if event["type"] == "http.disconnect":
            raise ClientGone
        part: bytes = event.get("body", b"")
        size += len(part)
        if size > BODY_BYTES_MAX:
            raise Refused(413, f"a body of at most {BODY_BYTES_MAX} bytes expected, more found")
        parts.append(part)
        if not event.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


def _read(body: bytes) -> ChatRequest:
    try:
        return _decode(body)
    except msgspec.DecodeError as error:
        raise Refused(400, f"a chat request as JSON expected: {error}") from error


def _text(message: ChatMessage) -> str:
    content = message.content
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.type != "text":
            raise Refused(400, f"content parts of type text expected, {part.type!r} found")
    return "".join(part.text for part in content)


def _request_id(scope: Scope) -> str:
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    for name, value in headers:
        if name == b"x-request-id":
            return value.decode("latin-1")
    return ""


# --- writing


def _usage(last: EngineOutput, tokens: int) -> Usage:
    return Usage(
        prompt_tokens=last.prompt_tokens,
        completion_tokens=tokens,
        total_tokens=last.prompt_tokens + tokens,
        prompt_tokens_details=PromptDetails(last.cached_tokens),
    )


def timings(stamps: EngineStamps, tokens: int) -> Metrics:
    def between(start_ns: int | None, end_ns: int | None) -> float | None:
        return None if start_ns is None or end_ns is None else (end_ns - start_ns) / 1e6

    generation_ms = between(stamps.first_token_ns, stamps.last_token_ns)
    whole_ms = between(stamps.scheduled_ns, stamps.last_token_ns)
    return Metrics(
        queue_time_ms=between(stamps.queued_ns, stamps.scheduled_ns),
        time_to_first_token_ms=between(stamps.scheduled_ns, stamps.first_token_ns),
        generation_time_ms=generation_ms,
        mean_itl_ms=None if generation_ms is None or tokens < 2 else generation_ms / (tokens - 1),
        tokens_per_second=None if not whole_ms else 1000 * tokens / whole_ms,
    )


def _error(status: int, detail: str) -> ErrorAnswer:
    return ErrorAnswer(ErrorDetail(detail, ERROR_TYPE[status], status))


async def _send_error(send: Send, status: int, detail: str) -> None:
    await _send_json(send, status, _encode(_error(status, detail)))


async def _send_json(send: Send, status: int, body: bytes) -> None:
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
            ],
        }
    )
    await send({"type": "http.response.body", "body": body, "more_body": False})


def _event(content: Struct) -> bytes:
    return b"data: " + _encode(content) + b"\n\n"


async def _send_events(send: Send, events: bytes, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": events, "more_body": more})


# --- the process


async def serve(engine: Engine, listening: socket.socket, *, metrics: bool = False) -> None:
    """Serve until SIGTERM or SIGINT, and let what has begun by then end."""
    import uvicorn

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Generator[None]:
            # uvicorn's own would end the process before the engine can be stopped.
            yield

    await engine.start()
    server = Server(
        uvicorn.Config(
            build_app(engine, metrics=metrics),
            http="httptools",
            lifespan="off",
            access_log=False,
            proxy_headers=False,
            log_level="warning",
            timeout_graceful_shutdown=DRAIN_S + ABORT_S,
        )
    )

    loop = asyncio.get_running_loop()
    stops: list[asyncio.Future[None]] = []

    def stop() -> None:
        stops.append(asyncio.ensure_future(engine.stop()))

    def end() -> None:
        server.should_exit = True
        loop.call_later(DRAIN_S, stop)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    host, port = listening.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    sys.stdout.write(f"{engine.capabilities.name} at {url}\n")
    sys.stdout.flush()
    try:
        await server.serve(sockets=[listening])
    finally:
        await engine.stop()


def load_engine(given: argparse.Namespace) -> Engine:
    """The engine that the command line names."""
    if given.engine is not None:
        module, _, name = given.engine.partition(":")
        if not name:
            sys.exit(f"--engine: MODULE:FACTORY expected, {given.engine!r} found")
        return getattr(importlib.import_module(module), name)()
    return SimulatedEngine(
        PROFILES[given.profile],
        model=given.model,
        seed=given.seed,
        speed_permille=given.speed_permille,
    )


def main() -> None:
    """The process."""
    parser = argparse.ArgumentParser(
        prog="python -m waterclock_worker.engine_http",
        description="An engine behind the OpenAI chat API, without the mesh.",
    )
    parser.add_argument("--profile", choices=sorted(PROFILES), default="a10g-8b")
    parser.add_argument("--model", help="the name to serve; the profile's own by default")
    parser.add_argument("--speed-permille", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--engine", metavar="MODULE:FACTORY", help="makes another engine than the simulated one"
    )
    parser.add_argument("--metrics", action="store_true", help="vLLM's metrics in every answer")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    given = parser.parse_args()

    import uvloop

    family = socket.AF_INET6 if ":" in given.host else socket.AF_INET
    listening = socket.create_server((given.host, given.port), family=family, backlog=2048)
    uvloop.run(serve(load_engine(given), listening, metrics=given.metrics))


if __name__ == "__main__":
    main()
