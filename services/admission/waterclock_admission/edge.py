"""The OpenAI-compatible edge: one more producer, in admission's own process.

A request becomes a submission on ``wc.edge.<tenant>``, with the moment at which it was accepted.
Receipt, deltas and final come back over the bus as they do to any producer. Status and headers
are sent with the first byte of the answer or with the refusal, so a refusal is never half an
answer. A client that goes away cancels its request.
"""

import asyncio
import base64
import contextlib
import hashlib
import hmac
import re
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

import msgspec
import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from waterclock_admission import limits
from waterclock_admission.clerk import CancelReason
from waterclock_admission.config import AdmissionConfig
from waterclock_admission.core import Terms
from waterclock_admission.exchange import Exchange, Text
from waterclock_admission.metrics import Metrics
from waterclock_admission.openai_shapes import (
    ApiError,
    Asked,
    Shape,
    milliseconds,
    read_request,
    refusal,
    sse_error,
    unfinished,
)
from waterclock_admission.web_server import ABORT
from waterclock_proto.names import NAME_PATTERN
from waterclock_proto.requests import (
    EDGE_ACCEPTED_HEADER,
    AnswerMessage,
    Delta,
    Final,
    Receipt,
    Restarted,
)
from waterclock_proto.stamps import Stamp
from waterclock_proto.subjects import edge_subject
from waterclock_runtime.bus import Bus
from waterclock_runtime.clock import Clock
from waterclock_runtime.errors import BusUnavailable, PoisonMessage
from waterclock_runtime.health import Health

Headers = list[tuple[bytes, bytes]]


class Admission(Protocol):
    """What the edge needs of the admission beside it."""

    def cancel(self, tenant: str, request_id: str, reason: CancelReason) -> None:
        """Ask for a request to be stopped."""
        ...

    def served_model(self, tenant: str, request_id: str) -> str | None:
        """The model that the newest dispatch of an open request named."""
        ...


class Edge:
    """``app`` is the ASGI application; ``refuse_new`` and ``drain`` end it."""

    def __init__(
        self,
        *,
        config: AdmissionConfig,
        bus: Bus,
        clock: Clock,
        log: structlog.stdlib.BoundLogger,
        metrics: Metrics,
        health: Health,
        admission: Admission,
    ) -> None:
        self._http = config.http
        self._terms = config.terms
        self._keys = [
            (bytes.fromhex(key), tenant)
            for tenant, settings in config.tenants.items()
            for key in settings.api_key_sha256
        ]
        self._bus = bus
        self._clock = clock
        self._log = log
        self._metrics = metrics
        self._health = health
        self._admission = admission
        self._exchanges: dict[int, Exchange] = {}
        self._attached: Counter[tuple[str, str]] = Counter()
        self._unreceipted = 0
        self._settled = asyncio.Event()
        self._settled.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._leaving = False
        self.app = Starlette(
            routes=[
                Route("/v1/chat/completions", _Asgi(self._chat), methods=["POST"]),
                Route("/v1/completions", _Asgi(self._completion), methods=["POST"]),
                Route("/v1/models", self._list_models, methods=["GET"]),
                Route("/v1/models/{model:path}", self._show_model, methods=["GET"]),
                Route("/healthz", self._show_health, methods=["GET"]),
            ],
            exception_handlers={
                HTTPException: self._on_http_error,
                ApiError: self._on_api_error,
                Exception: self._on_bug,
            },
        )

    # Leaving.

    def refuse_new(self) -> None:
        """Answer every new request with 503 from now on."""
        self._leaving = True

    async def settle(self, wait_s: float) -> None:
        """Wait until nobody waits for a receipt any more, at most so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._settled.wait()

    async def drain(self, wait_s: float) -> None:
        """Wait until all are answered, at most so long; then tell the rest that it ends here."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._idle.wait()
        for exchange in self._exchanges.values():
            exchange.end("closing")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await self._idle.wait()

    # Small routes.

    async def _list_models(self, request: Request) -> Response:
        terms = self._authorize(request.scope)
        models = [_model(name) for name in terms.models]
        return self._json(request, {"object": "list", "data": models})

    async def _show_model(self, request: Request) -> Response:
        terms = self._authorize(request.scope)
        name = request.path_params["model"]
        if name not in terms.models:
            raise ApiError(
                404,
                f"expected one of {sorted(terms.models)}, found another name",
                code="model_not_found",
                param="model",
            )
        return self._json(request, _model(name))

    async def _show_health(self, _request: Request) -> Response:
        healthy, report = self._health.report()
        return Response(
            msgspec.json.encode(report),
            status_code=200 if healthy else 503,
            media_type="application/json",
        )

    def _json(self, request: Request, content: object) -> Response:
        self._metrics.http_requests.labels("models", "200").inc()
        return Response(
            msgspec.json.encode(content),
            media_type="application/json",
            headers={"x-request-id": _client_request_id(_headers(request.scope)) or _new_id()},
        )

    # Errors outside of completions.

    async def _on_http_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = f"{request.method} {request.url.path}"[:200]
        api_error = ApiError(error.status_code, f"{path}: {error.detail}", code="unknown_url")
        response = self._error_response(request, api_error)
        for name, value in (error.headers or {}).items():
            response.headers[name] = value
        return response

    async def _on_api_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return self._error_response(request, error)

    async def _on_bug(self, request: Request, error: Exception) -> Response:
        # The error itself goes on to the server's log; it names code, never a body.
        self._log.error("http_bug", path=request.url.path, kind=type(error).__name__)
        return self._error_response(
            request, ApiError(500, "an error of the server's own", kind="server_error")
        )

    def _error_response(self, request: Request, error: ApiError) -> Response:
        self._metrics.http_requests.labels("other", str(error.status)).inc()
        response = Response(error.body(), status_code=error.status, media_type="application/json")
        request_id = _client_request_id(_headers(request.scope)) or _new_id()
        for name, value in _error_headers(error, request_id):
            response.headers[name.decode()] = value.decode()
        return response

    # Completions.

    async def _chat(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._complete(scope, receive, send, chat=True)

    async def _completion(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._complete(scope, receive, send, chat=False)

    async def _complete(self, scope: Scope, receive: Receive, send: Send, *, chat: bool) -> None:
        headers = _headers(scope)
        answer = _Answer(
            send,
            request_id=_client_request_id(headers) or _new_id(),
            stall_s=self._http.stall_ms / 1000,
        )
        try:
            call = await self._read_call(scope, headers, receive, answer.request_id, chat=chat)
        except ApiError as error:
            self._metrics.http_refused.labels(error.code or str(error.status)).inc()
            await self._answer_error(answer, error)
        except _ClientGone:
            self._metrics.http_cut.labels("disconnect").inc()
        else:
            await self._answer_call(call, answer, scope, receive)
        route = "chat" if chat else "completions"
        self._metrics.http_requests.labels(route, str(answer.status or 499)).inc()

    async def _read_call(
        self,
        scope: Scope,
        headers: Mapping[bytes, bytes],
        receive: Receive,
        request_id: str,
        *,
        chat: bool,
    ) -> "_Call":
        """Who asks for what. What is refused here never reaches the mesh and has no number."""
        terms = self._authorize(scope)
        if self._leaving:
            raise refusal("draining", "this server is leaving: come again", 1000)
        raw = await self._read_body(headers, receive)
        # Accepted when it was there as a whole: how fast a client sends is its own affair.
        accepted = self._clock.stamp("edge")
        asked = read_request(raw, chat=chat)
        named = _idempotency_id(headers)
        call = _Call(
            tenant=terms.tenant,
            terms=terms,
            asked=asked,
            accepted=accepted,
            chat=chat,
            deadline_ms=_header_deadline_ms(headers),
            request_id=named or request_id,
            named=named is not None,
            body=b"",
        )
        call.body = msgspec.json.encode(asked.submission(call.request_id, call.deadline_ms))
        if len(call.body) > self._http.body_bytes_max:
            raise _too_large(len(call.body), self._http.body_bytes_max)
        return call

    async def _answer_call(
        self, call: "_Call", answer: "_Answer", scope: Scope, receive: Receive
    ) -> None:
        try:
            await self._exchange(call, answer, scope, receive)
        except ApiError as error:
            await self._answer_error(answer, error)
        except _ClientGone:
            self._metrics.http_cut.labels("disconnect").inc()

    async def _answer_error(self, answer: "_Answer", error: ApiError) -> None:
        # A client that does not even take its error loses its connection when it is closed.
        with contextlib.suppress(_Stalled):
            await answer.error(error)

    async def _exchange(
        self, call: "_Call", answer: "_Answer", scope: Scope, receive: Receive
    ) -> None:
        """Submit, and answer with what comes back."""
        exchange = Exchange(
            self._bus,
            call.tenant,
            call.request_id,
            stream_bytes_max=self._http.stream_bytes_max,
            log=self._log,
        )
        abort: Callable[[], None] = scope.get("state", {}).get(ABORT, lambda: None)
        exchange.on_overflow = abort
        key = (call.tenant, call.request_id)
        self._enter(exchange, key)
        watch = asyncio.create_task(_watch_client(receive, exchange))
        finished = False
        try:
            receipt = await self._submit(call, exchange)
            answer.headers += _receipt_headers(receipt)
            if receipt.outcome == "rejected":
                raise _Ended.of(
                    refusal(receipt.reason or "malformed", receipt.detail, receipt.retry_after_ms)
                )
            if call.asked.stream:
                await self._stream(call, receipt, answer, exchange)
            else:
                await self._whole(call, receipt, answer, exchange)
            finished = True
        except _Ended:
            finished = True
            raise
        except _Stalled:
            self._metrics.http_cut.labels("stalled").inc()
            abort()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await asyncio.shield(watch)
        finally:
            watch.cancel()
            self._leave(exchange, key)
            # Whoever else has the same id open still waits for its answer; and a client that
            # named its request can come back for it when this server has been started again.
            awaited = self._attached[key] or (exchange.ended == "closing" and call.named)
            if not finished and not awaited:
                self._admission.cancel(call.tenant, call.request_id, "disconnect")

    async def _submit(self, call: "_Call", exchange: Exchange) -> Receipt:
        """Publish the submission and wait for what became of it."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        wait_s = self._http.receipt_wait_ms / 1000
        self._unreceipted += 1
        self._settled.clear()
        try:
            sequence = await self._bus.store(
                edge_subject(call.tenant),
                call.body,
                {EDGE_ACCEPTED_HEADER: msgspec.json.encode(call.accepted).decode()},
                wait_s=wait_s,
            )
            found = await exchange.receipt(sequence, began_s + wait_s)
        except PoisonMessage as error:
            raise _too_large(len(call.body), self._http.body_bytes_max) from error
        except BusUnavailable as error:
            raise _unavailable("the bus did not take the request in time") from error
        finally:
            self._unreceipted -= 1
            if not self._unreceipted:
                self._settled.set()
        if isinstance(found, Receipt):
            self._metrics.http_edge_seconds.observe(loop.time() - began_s)
            return found
        if found == "gone":
            raise _ClientGone
        raise _unavailable("admission did not decide in time")

    async def _whole(
        self, call: "_Call", receipt: Receipt, answer: "_Answer", exchange: Exchange
    ) -> None:
        while True:
            for message in await self._next(call, exchange):
                if isinstance(message, Final):
                    if message.outcome != "completed" or not message.answer_kept:
                        raise _Ended.of(unfinished(message))
                    answer.headers += _timing_headers(message)
                    if message.model_served:
                        answer.headers.append((b"x-served-model", _header(message.model_served)))
                    await answer.whole(call.shape(receipt, message).whole(message))
                    return

    async def _stream(
        self, call: "_Call", receipt: Receipt, answer: "_Answer", exchange: Exchange
    ) -> None:
        text = Text()
        shape = call.shape(receipt, None)
        while True:
            pieces: list[bytes] = []
            queue_us: int | None = None
            final: Final | None = None
            for message in await self._next(call, exchange):
                if message.attempt > text.attempt:
                    if answer.started:
                        # Another attempt begins from nothing, and the client has the beginning
                        # of the one before: it must be told.
                        await self._break_off(answer, pieces, _restarted())
                        return
                    pieces.clear()
                    text.restart(message.attempt)
                match message:
                    case Delta():
                        piece = text.take(message)
                        if queue_us is None:
                            queue_us = message.queue_us
                        if piece:
                            pieces.append(shape.piece(piece))
                    case Restarted():
                        pass
                    case Final():
                        final = message
            if final is not None:
                error = self._unsent(final, text, pieces, shape)
                if error is not None:
                    if not answer.started and not pieces:
                        raise _Ended.of(error)
                    await self._break_off(answer, pieces, error)
                    return
            if not pieces and final is None:
                continue
            if not answer.started:
                self._describe_stream(call, answer, shape, queue_us, final)
                await answer.begin_stream()
                pieces.insert(0, shape.first())
            if final is not None:
                pieces.append(shape.last(final))
            await answer.piece(b"".join(pieces), more=final is None)
            if final is not None:
                return

    def _unsent(
        self, final: Final, text: Text, pieces: list[bytes], shape: Shape
    ) -> ApiError | None:
        """Add what the deltas left out of the whole answer; or why there is no whole answer."""
        if final.outcome != "completed" or not final.answer_kept:
            return unfinished(final)
        rest = text.rest(final.text)
        if rest is None:
            return _restarted()
        if rest:
            pieces.append(shape.piece(rest))
        return None

    def _describe_stream(
        self,
        call: "_Call",
        answer: "_Answer",
        shape: Shape,
        queue_us: int | None,
        final: Final | None,
    ) -> None:
        if queue_us is None and final is not None and final.timings is not None:
            queue_us = final.timings.queue_us
        if queue_us is not None:
            answer.headers.append((b"x-queue-time-ms", milliseconds(queue_us).encode()))
        served = final.model_served if final is not None else ""
        served = served or self._admission.served_model(call.tenant, call.request_id) or ""
        answer.headers.append((b"x-served-model", _header(served or shape.model)))

    async def _break_off(self, answer: "_Answer", pieces: list[bytes], error: ApiError) -> None:
        """End a stream that has begun with an error event; never silently."""
        if not answer.started:
            await answer.begin_stream()
        self._metrics.http_cut.labels(error.code or str(error.status)).inc()
        await answer.piece(b"".join([*pieces, sse_error(error)]), more=False)

    async def _next(self, call: "_Call", exchange: Exchange) -> list[AnswerMessage]:
        """What has come of the answer.

        Raises:
            ApiError, _ClientGone, _Stalled: nothing will come any more.
        """
        left_s = (call.deadline_us() - self._clock.now_us()) / 1e6 + limits.ANSWER_GRACE_S
        found = await exchange.answers(asyncio.get_running_loop().time() + max(0.0, left_s))
        match found:
            case "gone":
                raise _ClientGone
            case "overflow":
                raise _Stalled
            case "timeout":
                raise ApiError(
                    504,
                    "the deadline passed, and no answer came",
                    kind="server_error",
                    code="deadline_expired",
                    retry=False,
                )
            case "closing":
                raise refusal("draining", "this server is leaving: come again", 1000)
            case _:
                return found

    # Parts.

    def _enter(self, exchange: Exchange, key: tuple[str, str]) -> None:
        self._exchanges[id(exchange)] = exchange
        self._attached[key] += 1
        self._idle.clear()
        self._metrics.http_open.set(len(self._exchanges))

    def _leave(self, exchange: Exchange, key: tuple[str, str]) -> None:
        exchange.close()
        del self._exchanges[id(exchange)]
        self._attached[key] -= 1
        if not self._attached[key]:
            del self._attached[key]
        if not self._exchanges:
            self._idle.set()
        self._metrics.http_open.set(len(self._exchanges))

    def _authorize(self, scope: Scope) -> Terms:
        """The tenant whose key it is; tenant and tier come from nowhere else.

        Raises:
            ApiError: 401.
        """
        scheme, _, key = _headers(scope).get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer" or not key.strip():
            raise ApiError(
                401,
                "expected the header `Authorization: Bearer <API key>`, found none",
                code="missing_api_key",
                retry=False,
            )
        digest = hashlib.sha256(key.strip()).digest()
        found = ""
        for known, tenant in self._keys:
            # All of them, each in constant time: how long it takes says nothing about a key.
            if hmac.compare_digest(known, digest):
                found = tenant
        if not found:
            raise ApiError(401, "this API key is not known", code="invalid_api_key", retry=False)
        return self._terms[found]

    async def _read_body(self, headers: Mapping[bytes, bytes], receive: Receive) -> bytes:
        """The whole body.

        Raises:
            ApiError: 413 or 408.
            _ClientGone: it went away in the middle.
        """
        most = self._http.body_bytes_max
        declared = headers.get(b"content-length", b"")
        if declared.isdigit() and int(declared) > most:
            await _discard(receive, most)
            raise _too_large(int(declared), most)
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._http.body_wait_ms / 1000):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _ClientGone
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > most:
                        await _discard(receive, most)
                        raise _too_large(size, most)
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError as error:
            raise ApiError(
                408,
                f"the body was not complete after {self._http.body_wait_ms} ms",
                code="body_timeout",
            ) from error


class _Asgi:
    """Lets a method be an ASGI application of its own route."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


class _ClientGone(Exception):
    """Nobody waits for the answer."""


class _Stalled(Exception):
    """The client does not take its answer."""


class _Ended(ApiError):
    """The request has ended without an answer; there is nothing to cancel."""

    @classmethod
    def of(cls, error: ApiError) -> "_Ended":
        return cls(
            error.status,
            error.message,
            kind=error.kind,
            code=error.code,
            param=error.param,
            reason=error.reason,
            retry_after_ms=error.retry_after_ms,
            retry=error.retry,
        )


class _Call(msgspec.Struct, kw_only=True):
    """One completion request."""

    tenant: str
    terms: Terms
    asked: Asked
    accepted: Stamp
    chat: bool
    deadline_ms: int | None
    request_id: str
    named: bool
    """Whether the client named it, so that it can ask for it again."""
    body: bytes
    """The submission."""

    def deadline_us(self) -> int:
        given = [ms for ms in (self.asked.deadline_ms, self.deadline_ms) if ms is not None]
        after_ms = min(given) if given else self.terms.deadline_ms_default
        return self.accepted.wall_us + after_ms * 1000

    def shape(self, receipt: Receipt, final: Final | None) -> Shape:
        return Shape(
            request_id=self.request_id,
            model=self.asked.model or self.terms.model_default,
            created_s=(
                final.timings.arrival_us // 1_000_000
                if final is not None and final.timings is not None
                else receipt.stored_ns // 10**9
            ),
            chat=self.chat,
            include_usage=self.asked.include_usage,
        )


class _Answer:
    """One HTTP answer; its status and headers go out with the first byte."""

    def __init__(self, send: Send, *, request_id: str, stall_s: float) -> None:
        self._send = send
        self._stall_s = stall_s
        self.request_id = request_id
        self.headers: Headers = []
        self.started = False
        self.status = 0

    async def whole(self, body: bytes) -> None:
        await self._start(
            200,
            [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
            ],
        )
        await self._body(body, more=False)

    async def error(self, error: ApiError) -> None:
        if self.started:
            await self._body(sse_error(error), more=False)
            return
        body = error.body()
        headers: Headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        if error.status in (408, 413):
            # The rest of the body is not wanted, so the connection cannot be used again.
            headers.append((b"connection", b"close"))
        await self._start(error.status, headers + _error_headers(error, None))
        await self._body(body, more=False)

    async def begin_stream(self) -> None:
        await self._start(
            200,
            [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-cache"),
                # Some proxies would else collect the whole stream first.
                (b"x-accel-buffering", b"no"),
            ],
        )

    async def piece(self, body: bytes, *, more: bool) -> None:
        await self._body(body, more=more)

    async def _start(self, status: int, headers: Headers) -> None:
        self.started = True
        self.status = status
        await self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [
                    *headers,
                    *self.headers,
                    (b"x-request-id", self.request_id.encode()),
                ],
            }
        )

    async def _body(self, body: bytes, *, more: bool) -> None:
        try:
            async with asyncio.timeout(self._stall_s):
                await self._send({"type": "http.response.body", "body": body, "more_body": more})
        except TimeoutError as error:
            raise _Stalled from error


async def _discard(receive: Receive, body_bytes_max: int) -> None:
    """Read on for a moment what is refused anyway.

    A client that is still sending when its connection is closed gets a reset, and never sees the
    answer that was on its way.
    """
    left = limits.DISCARD_TIMES * body_bytes_max
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limits.DISCARD_WAIT_S):
            while left > 0:
                async with asyncio.timeout(limits.DISCARD_IDLE_S):
                    message = await receive()
                left -= len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return


async def _watch_client(receive: Receive, exchange: Exchange) -> None:
    """End the exchange when the client goes away."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            exchange.end("gone")
            return


def _headers(scope: Scope) -> dict[bytes, bytes]:
    return dict(scope["headers"])


def _idempotency_id(headers: Mapping[bytes, bytes]) -> str | None:
    """What the client calls its request, so that coming again is the same request."""
    key = headers.get(b"idempotency-key", b"").decode("latin-1")
    if not key:
        return _client_request_id(headers)
    if _NAME.match(key):
        return key
    return "k-" + hashlib.sha256(key.encode()).hexdigest()[:48]


def _client_request_id(headers: Mapping[bytes, bytes]) -> str | None:
    given = headers.get(b"x-request-id", b"").decode("latin-1")
    return given if _NAME.match(given) else None


def _new_id() -> str:
    return f"h-{secrets.token_hex(12)}"


def _header_deadline_ms(headers: Mapping[bytes, bytes]) -> int | None:
    given = headers.get(b"x-waterclock-deadline-ms")
    if given is None:
        return None
    if not given.isdigit() or not 1 <= int(given[:20]) <= 10**12:
        raise ApiError(
            400,
            "X-Waterclock-Deadline-MS: expected an integer of 1 to 10^12",
            param="X-Waterclock-Deadline-MS",
        )
    return int(given)


def _receipt_headers(receipt: Receipt) -> Headers:
    """The receipt in brief: what stands where on the tape, and the commitment's salt."""
    brief: dict[str, Any] = {
        "kind": "receipt_unsigned",
        "tenant": receipt.tenant,
        "id": receipt.id,
        "outcome": receipt.outcome,
        "requests_sequence": receipt.requests_sequence,
        "number": receipt.number,
        "incarnation": receipt.incarnation,
        "sequence": receipt.sequence,
        "stored_ns": receipt.stored_ns,
        "event_sha256": hashlib.sha256(receipt.event.encode()).hexdigest(),
        "salt": receipt.salt,
    }
    text = base64.urlsafe_b64encode(msgspec.json.encode(brief)).rstrip(b"=")
    return [(b"x-waterclock-receipt", text), (b"x-waterclock-receipt-type", b"unsigned")]


def _timing_headers(final: Final) -> Headers:
    headers: Headers = []
    if final.timings is not None:
        if final.timings.queue_us is not None:
            headers.append((b"x-queue-time-ms", milliseconds(final.timings.queue_us).encode()))
        if final.timings.exec_us is not None:
            headers.append((b"x-exec-time-ms", milliseconds(final.timings.exec_us).encode()))
    return headers


def _error_headers(error: ApiError, request_id: str | None) -> Headers:
    headers: Headers = []
    if request_id is not None:
        headers.append((b"x-request-id", request_id.encode()))
    if error.code is not None:
        headers.append((b"x-waterclock-reason", _header(error.reason or error.code)))
    if error.status in (429, 503):
        wait_ms = 1000 if error.retry_after_ms is None else error.retry_after_ms
        # Whole seconds for everybody, rounded up; milliseconds for OpenAI's client.
        headers.append((b"retry-after", str(-(-wait_ms // 1000)).encode()))
        headers.append((b"retry-after-ms", str(wait_ms).encode()))
    if error.retry is not None:
        headers.append((b"x-should-retry", b"true" if error.retry else b"false"))
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    return headers


def _header(text: str) -> bytes:
    """Text as a header's value: what does not fit into one is replaced."""
    return re.sub(r"[^\x20-\x7e]", "?", text).encode()


def _model(name: str) -> dict[str, object]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "waterclock"}


def _too_large(size: int, most: int) -> ApiError:
    return ApiError(
        413, f"a body of {size} bytes, at most {most} allowed", code="body_too_large", retry=False
    )


def _unavailable(message: str) -> ApiError:
    return ApiError(503, message, kind="server_error", code="unavailable", retry_after_ms=1000)


def _restarted() -> ApiError:
    return ApiError(
        500,
        "the worker was lost in the middle of the answer; what was sent is no part of the next",
        kind="server_error",
        code="attempt_lost",
    )


_NAME = re.compile(NAME_PATTERN)
