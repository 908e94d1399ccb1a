"""OpenAI's request and answer shapes, to and from ours: pure, no HTTP.

Requests follow the API reference of ``POST /v1/chat/completions`` and ``/v1/completions``. What a
client asks for is done, or refused by name; only what changes nothing of the answer is passed
over. Numbers of ours go out as decimals made from integers.
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

import msgspec
from msgspec import Struct

from waterclock_proto.names import I64_MAX, Language, RejectReason
from waterclock_proto.requests import (
    OUTPUT_TOKENS_CEILING,
    ChatMessage,
    Final,
    Sampling,
    Submission,
    Timings,
    Usage,
)

STOPS_MAX = 4
ROLES = ("system", "developer", "user", "assistant", "tool")
LANGUAGES: tuple[Language, ...] = ("zh", "en", "other", "und")


class ApiError(Exception):
    """An answer that is an error; OpenAI's four fields, and what belongs into headers."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        reason: RejectReason | None = None,
        retry_after_ms: int | None = None,
        retry: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.code = code
        self.param = param
        self.reason: RejectReason | None = reason
        """The mesh's own word, where OpenAI has one code for several of them."""
        self.retry_after_ms = retry_after_ms
        self.retry = retry
        """Whether OpenAI's client should try again by itself; None leaves it to the status."""

    def body(self) -> bytes:
        return _ENCODER.encode(
            {
                "error": {
                    "message": self.message,
                    "type": self.kind,
                    "param": self.param,
                    "code": self.code,
                }
            }
        )


class Asked(Struct, frozen=True, kw_only=True):
    """A request, understood."""

    model: str | None
    messages: tuple[ChatMessage, ...] | None
    prompt: str | None
    max_tokens: int | None
    sampling: Sampling | None
    ignore_eos: bool
    stream: bool
    include_usage: bool
    deadline_ms: int | None
    language: Language | None
    session: str | None

    def submission(self, request_id: str, deadline_ms: int | None) -> Submission:
        """What goes to the mesh; the same request makes the same bytes every time."""
        given = [ms for ms in (self.deadline_ms, deadline_ms) if ms is not None]
        return Submission(
            id=request_id,
            model=self.model,
            messages=self.messages,
            prompt=self.prompt,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            stream=self.stream,
            deadline_ms=min(given) if given else None,
            language=self.language,
            session=self.session,
            sampling=self.sampling,
        )


# Requests.


def read_request(body: bytes, *, chat: bool) -> Asked:
    """Read the body of a completion request.

    Raises:
        ApiError: 400, naming the parameter.
    """
    try:
        found: object = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"expected a JSON object, found something else: {error}") from error
    if not isinstance(found, dict):
        raise ApiError(400, f"expected a JSON object, found {_kind(found)}")
    table = cast("dict[str, object]", found)
    check_parameters(table, chat=chat)
    stream = _boolean(table, "stream")
    ours = _table(table, "waterclock")
    for name in ours:
        if name not in ("deadline_ms", "language", "session"):
            raise _wrong(f"waterclock.{name}", "deadline_ms, language or session", name)
    language = ours.get("language")
    if language is not None and language not in LANGUAGES:
        raise _wrong("waterclock.language", f"one of {', '.join(LANGUAGES)}", language)
    return Asked(
        model=_text(table, "model", length_max=200),
        messages=_messages(table) if chat else None,
        prompt=None if chat else _prompt(table),
        max_tokens=_max_tokens(table, chat=chat),
        sampling=_sampling(table),
        ignore_eos=_boolean(table, "ignore_eos"),
        stream=stream,
        include_usage=_include_usage(table, stream=stream),
        deadline_ms=_integer(ours, "deadline_ms", 1, 10**12, where="waterclock.deadline_ms"),
        language=language,
        session=_text(ours, "session", length_max=256, where="waterclock.session"),
    )


def check_parameters(table: Mapping[str, object], *, chat: bool) -> None:
    """Refuse what would be ignored silently, by name.

    Raises:
        ApiError: 400.
    """
    known = _CHAT_ONLY if chat else _COMPLETION_ONLY
    for name, value in table.items():
        if name in _DONE or name in known or name in _HARMLESS:
            continue
        means_nothing = _NEUTRAL.get(name)
        if means_nothing is None:
            raise ApiError(
                400, f"unknown parameter: {name!r}", param=name, code="unknown_parameter"
            )
        if not means_nothing(value):
            raise ApiError(
                400,
                f"{name} is not supported here: leave it out",
                param=name,
                code="unsupported_parameter",
            )


def _is(*accepted: object) -> Callable[[object], bool]:
    # `1 == True` in Python, and a client that sends true for a number is wrong.
    return lambda value: any(value == one and type(value) is type(one) for one in accepted)


_DONE = frozenset(
    {
        "model",
        "max_tokens",
        "temperature",
        "top_p",
        "seed",
        "stop",
        "stream",
        "stream_options",
        "ignore_eos",
        "waterclock",
    }
)
_CHAT_ONLY = frozenset({"messages", "max_completion_tokens"})
_COMPLETION_ONLY = frozenset({"prompt"})
_HARMLESS = frozenset(
    {
        "user",
        "metadata",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",
    }
)
"""They say nothing about the answer; tier and tenant come from the key alone."""
_NEUTRAL: Mapping[str, Callable[[object], bool]] = {
    "n": _is(None, 1),
    "best_of": _is(None, 1),
    "echo": _is(None, False),
    "suffix": _is(None, ""),
    "store": _is(None, False),
    "logprobs": _is(None, False),
    "top_logprobs": _is(None, 0),
    "logit_bias": _is(None, {}),
    "presence_penalty": _is(None, 0, 0.0),
    "frequency_penalty": _is(None, 0, 0.0),
    "tools": _is(None, []),
    "tool_choice": _is(None, "none", "auto"),
    "functions": _is(None, []),
    "function_call": _is(None, "none", "auto"),
    "response_format": _is(None, {"type": "text"}),
    "modalities": _is(None, ["text"]),
    "audio": _is(None),
    "prediction": _is(None),
    "reasoning_effort": _is(None),
    "verbosity": _is(None),
    "web_search_options": _is(None),
    "moderation": _is(None),
}
"""What these ask for is not done here; a value that asks for nothing is fine."""


def _messages(table: Mapping[str, object]) -> tuple[ChatMessage, ...]:
    found = table.get("messages")
    if not isinstance(found, list):
        raise _wrong("messages", "a list of messages", found)
    items = cast("list[object]", found)
    if not items:
        raise ApiError(400, "messages: expected at least one, found none", param="messages")
    return tuple(_message(item, f"messages[{place}]") for place, item in enumerate(items))


def _message(item: object, where: str) -> ChatMessage:
    if not isinstance(item, dict):
        raise _wrong(where, "an object", item)
    message = cast("dict[str, object]", item)
    for name, value in message.items():
        if name in ("role", "content", "name", "tool_call_id"):
            continue
        if value in (None, [], ""):
            continue
        raise ApiError(
            400,
            f"{where}.{name} is not supported here: leave it out",
            param=f"{where}.{name}",
            code="unsupported_parameter",
        )
    role = message.get("role")
    if role not in ROLES:
        raise _wrong(f"{where}.role", f"one of {', '.join(ROLES)}", role)
    return ChatMessage(
        role=cast(Any, role), content=_content(message.get("content"), f"{where}.content")
    )


def _content(found: object, where: str) -> str:
    if found is None:
        return ""
    if isinstance(found, str):
        return found
    if not isinstance(found, list):
        raise _wrong(where, "text, or a list of text parts", found)
    texts: list[str] = []
    for place, item in enumerate(cast("list[object]", found)):
        part = cast("dict[str, object]", item) if isinstance(item, dict) else {}
        text = part.get("text")
        if part.get("type") != "text" or not isinstance(text, str):
            raise ApiError(
                400,
                f"{where}[{place}]: only parts of type text are supported here",
                param=f"{where}[{place}]",
                code="unsupported_parameter",
            )
        texts.append(text)
    return "".join(texts)


def _prompt(table: Mapping[str, object]) -> str:
    found = table.get("prompt")
    if isinstance(found, list):
        several = cast("list[object]", found)
        if len(several) != 1 or not isinstance(several[0], str):
            raise ApiError(
                400,
                "prompt: one text is supported here, not several and not tokens",
                param="prompt",
                code="unsupported_parameter",
            )
        found = several[0]
    if not isinstance(found, str) or not found:
        raise _wrong("prompt", "text", found)
    return found


def _max_tokens(table: Mapping[str, object], *, chat: bool) -> int | None:
    tokens = _integer(table, "max_tokens", 1, OUTPUT_TOKENS_CEILING)
    if chat:
        newer = _integer(table, "max_completion_tokens", 1, OUTPUT_TOKENS_CEILING)
        return tokens if newer is None else newer
    return tokens


def _sampling(table: Mapping[str, object]) -> Sampling | None:
    temperature = _number(table, "temperature", 2)
    top_p = _number(table, "top_p", 1)
    if top_p == "0":
        raise _wrong("top_p", "a number above 0, at most 1", 0)
    seed = _integer(table, "seed", -I64_MAX - 1, I64_MAX)
    stop = _stop(table)
    if temperature is None and top_p is None and seed is None and not stop:
        return None
    return Sampling(temperature=temperature, top_p=top_p, seed=seed, stop=stop)


def _stop(table: Mapping[str, object]) -> tuple[str, ...]:
    found = table.get("stop")
    if found is None:
        return ()
    items = [found] if isinstance(found, str) else found
    if not isinstance(items, list):
        raise _wrong("stop", "text or a list of texts", found)
    texts = cast("list[object]", items)
    if len(texts) > STOPS_MAX:
        raise ApiError(400, f"stop: at most {STOPS_MAX}, found {len(texts)}", param="stop")
    for text in texts:
        if not isinstance(text, str) or not 0 < len(text) <= 256:
            raise _wrong("stop", "texts of 1 to 256 characters", text)
    return tuple(cast("list[str]", texts))


def _include_usage(table: Mapping[str, object], *, stream: bool) -> bool:
    options = _table(table, "stream_options")
    if not options:
        return False
    if not stream:
        raise ApiError(
            400, "stream_options: only together with stream = true", param="stream_options"
        )
    for name in options:
        if name not in ("include_usage", "include_obfuscation"):
            raise _wrong(f"stream_options.{name}", "include_usage", name)
    return _boolean(options, "include_usage", where="stream_options.include_usage")


def _boolean(table: Mapping[str, object], name: str, *, where: str = "") -> bool:
    found = table.get(name)
    if found is None:
        return False
    if not isinstance(found, bool):
        raise _wrong(where or name, "true or false", found)
    return found


def _integer(
    table: Mapping[str, object], name: str, low: int, high: int, *, where: str = ""
) -> int | None:
    found = table.get(name)
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, int):
        raise _wrong(where or name, "an integer", found)
    if not low <= found <= high:
        raise ApiError(400, f"{where or name}: {low} to {high}, found {found}", param=where or name)
    return found


def _number(table: Mapping[str, object], name: str, high: int) -> str | None:
    """A decimal number between 0 and ``high`` as a string, so that no float goes on."""
    found = table.get(name)
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise _wrong(name, "a number", found)
    if not 0 <= found <= high:
        raise ApiError(400, f"{name}: 0 to {high}, found {found}", param=name)
    return f"{found:.6f}".rstrip("0").rstrip(".")


def _text(
    table: Mapping[str, object], name: str, *, length_max: int, where: str = ""
) -> str | None:
    found = table.get(name)
    if found is None:
        return None
    if not isinstance(found, str) or not 0 < len(found) <= length_max:
        raise _wrong(where or name, f"text of 1 to {length_max} characters", found)
    return found


def _table(table: Mapping[str, object], name: str) -> Mapping[str, object]:
    found = table.get(name)
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise _wrong(name, "an object", found)
    return cast("dict[str, object]", found)


def _wrong(where: str, expected: str, found: object) -> ApiError:
    return ApiError(400, f"{where}: expected {expected}, found {_kind(found)}", param=where)


def _kind(value: object) -> str:
    """What a value is, in JSON's words; never what it says."""
    for kinds, word in (
        (bool, "a boolean"),
        (int, "an integer"),
        (float, "a number"),
        (str, "text"),
        (list, "a list"),
        (dict, "an object"),
    ):
        if isinstance(value, kinds):
            return word
    return "nothing"


# Answers.


def milliseconds(us: int) -> str:
    """Microseconds as milliseconds with three digits: exact, for they are made of integers."""
    sign = "-" if us < 0 else ""
    whole, rest = divmod(abs(us), 1000)
    return f"{sign}{whole}.{rest:03d}"


class Shape:
    """The answers to one request, in one of the two API's shapes."""

    def __init__(
        self, *, request_id: str, model: str, created_s: int, chat: bool, include_usage: bool
    ) -> None:
        self._chat = chat
        self._include_usage = include_usage
        self.id = f"chatcmpl-{request_id}" if chat else f"cmpl-{request_id}"
        self.model = model
        self._created_s = created_s
        self._chunk = "chat.completion.chunk" if chat else "text_completion"

    def whole(self, final: Final) -> bytes:
        """The answer at once."""
        choice: dict[str, Any] = {"index": 0}
        if self._chat:
            choice["message"] = {"role": "assistant", "content": final.text, "refusal": None}
        else:
            choice["text"] = final.text
        choice["logprobs"] = None
        choice["finish_reason"] = _finish(final)
        return _ENCODER.encode(
            {
                "id": self.id,
                "object": "chat.completion" if self._chat else "text_completion",
                "created": self._created_s,
                "model": final.model_served or self.model,
                "choices": [choice],
                "usage": _usage(final.usage),
            }
        )

    def first(self) -> bytes:
        """What a stream begins with; nothing for the older API."""
        if not self._chat:
            return b""
        return self._event({"role": "assistant", "content": ""}, None)

    def piece(self, text: str) -> bytes:
        return self._event({"content": text} if self._chat else text, None)

    def last(self, final: Final) -> bytes:
        """The end of a stream; its last chunk says where the time went."""
        ours = timings_of(final)
        nothing: object = {} if self._chat else ""
        if not self._include_usage:
            return self._event(nothing, _finish(final), ours) + DONE
        chunk: dict[str, Any] = {
            "id": self.id,
            "object": self._chunk,
            "created": self._created_s,
            "model": self.model,
            "choices": [],
            "usage": _usage(final.usage),
            "waterclock": ours,
        }
        return self._event(nothing, _finish(final)) + _sse(_ENCODER.encode(chunk)) + DONE

    def _event(
        self, content: object, finish_reason: str | None, ours: dict[str, Any] | None = None
    ) -> bytes:
        choice: dict[str, Any] = {"index": 0}
        choice["delta" if self._chat else "text"] = content
        choice["logprobs"] = None
        choice["finish_reason"] = finish_reason
        chunk: dict[str, Any] = {
            "id": self.id,
            "object": self._chunk,
            "created": self._created_s,
            "model": self.model,
            "choices": [choice],
        }
        if self._include_usage:
            chunk["usage"] = None
        if ours is not None:
            chunk["waterclock"] = ours
        return _sse(_ENCODER.encode(chunk))


def timings_of(final: Final) -> dict[str, Any]:
    """Queue and execution apart, in milliseconds, and every segment."""
    timings = final.timings or Timings(arrival_us=0, total_us=0)
    return {
        "queue_ms": _decimal(timings.queue_us),
        "exec_ms": _decimal(timings.exec_us),
        "segments": {f"{name}_ms": _decimal(us) for name, us in timings.segments.items()},
        "model_served": final.model_served,
    }


def sse_error(error: ApiError) -> bytes:
    """An error within a stream that has begun; no ``[DONE]`` follows."""
    return _sse(error.body())


DONE = b"data: [DONE]\n\n"


def _sse(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def _decimal(us: int | None) -> msgspec.Raw | None:
    return None if us is None else msgspec.Raw(milliseconds(us).encode())


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _finish(final: Final) -> str:
    # Whole answers end in one of the two; OpenAI's clients know no other word for ours.
    return "length" if final.finish_reason == "length" else "stop"


# Refusals and other ends.


def refusal(reason: RejectReason, detail: str, retry_after_ms: int | None) -> ApiError:
    """A refusal by admission or scheduler, as an HTTP error."""
    status, kind, code, param = _REFUSALS.get(reason, _OTHER)
    return ApiError(
        status,
        detail or reason.replace("_", " "),
        kind=kind,
        code=code or reason,
        param=param,
        reason=reason,
        retry_after_ms=retry_after_ms if status in (429, 503) else None,
        retry=None if status in (429, 503) else False,
    )


def unfinished(final: Final) -> ApiError:
    """An end without an answer, as an HTTP error."""
    match final.outcome:
        case "rejected":
            return refusal(final.reject_reason or "load_shed", final.detail, final.retry_after_ms)
        case "expired":
            return ApiError(
                504,
                final.detail or "the deadline passed before the answer was complete",
                kind="server_error",
                code="deadline_expired",
                retry=False,
            )
        case "cancelled":
            return ApiError(
                499,
                final.detail or "the request was cancelled",
                code="cancelled",
                retry=False,
            )
        case "failed":
            return ApiError(
                500,
                final.detail or "the work could not be done",
                kind="server_error",
                code=final.fail_reason or "engine_error",
            )
        case "completed":
            return ApiError(
                410,
                final.detail or "it was answered before, and the answer is not kept any more",
                code="answer_gone",
                retry=False,
            )


_LIMIT = "rate_limit_exceeded"
_OTHER = (500, "server_error", None, None)
_REFUSALS: Mapping[RejectReason, tuple[int, str, str | None, str | None]] = {
    "malformed": (400, "invalid_request_error", None, None),
    "unknown_field": (400, "invalid_request_error", None, None),
    "invalid_field": (400, "invalid_request_error", None, None),
    "empty_body": (400, "invalid_request_error", None, None),
    "body_too_large": (413, "invalid_request_error", None, None),
    "prompt_too_long": (400, "invalid_request_error", "context_length_exceeded", "messages"),
    "unknown_tenant": (401, "invalid_request_error", None, None),
    "unknown_model": (404, "invalid_request_error", "model_not_found", "model"),
    "unknown_request": (404, "invalid_request_error", None, None),
    "id_reused": (409, "invalid_request_error", None, None),
    "deadline_passed": (504, "server_error", "deadline_expired", None),
    "deadline_too_far": (400, "invalid_request_error", None, "deadline_ms"),
    "requests_per_minute": (429, "requests", _LIMIT, None),
    "tokens_per_minute": (429, "tokens", _LIMIT, None),
    "concurrency": (429, "requests", _LIMIT, None),
    "over_budget_ceiling": (400, "invalid_request_error", None, "max_tokens"),
    "load_shed": (503, "server_error", None, None),
    "backlog_full": (503, "server_error", None, None),
    "draining": (503, "server_error", None, None),
}
"""Reason → status, type, code (None: the reason itself), parameter."""

_ENCODER = msgspec.json.Encoder()
