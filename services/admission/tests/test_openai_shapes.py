"""OpenAI's requests read and its answers written."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from waterclock_admission.openai_shapes import (
    ApiError,
    Shape,
    milliseconds,
    read_request,
    refusal,
    unfinished,
)
from waterclock_proto.names import RejectReason
from waterclock_proto.requests import ChatMessage, Final, Sampling, Submission, Timings, Usage

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def read(table: dict[str, Any], *, chat: bool = True):
    return read_request(json.dumps(table).encode(), chat=chat)


def test_a_chat_request_becomes_a_submission() -> None:
    asked = read(
        {
            **CHAT,
            "max_tokens": 4,
            "max_completion_tokens": 5,
            "temperature": 1,
            "top_p": 0.123456789,
            "seed": -1,
            "stop": "x",
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "waterclock": {"deadline_ms": 100, "language": "zh", "session": "s"},
        }
    )
    assert asked.include_usage
    assert asked.submission("r1", 50) == Submission(
        id="r1",
        model="m",
        messages=(ChatMessage(role="user", content="hi"),),
        max_tokens=5,
        ignore_eos=True,
        stream=True,
        deadline_ms=50,
        language="zh",
        session="s",
        sampling=Sampling(temperature="1", top_p="0.123457", seed=-1, stop=("x",)),
    )


def test_parts_of_text_are_put_together() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    asked = read({"messages": [{"role": "user", "content": parts}]})
    assert asked.messages == (ChatMessage(role="user", content="ab"),)


def test_a_prompt_may_stand_in_a_list() -> None:
    assert read({"prompt": ["a"]}, chat=False).prompt == "a"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": "hi"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "pope", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]",
        ),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
            "messages[0].tool_calls",
        ),
        ({"n": 2}, "n"),
        ({"n": True}, "n"),
        ({"tools": [{}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"logprobs": True}, "logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"presence_penalty": 0.1}, "presence_penalty"),
        ({"store": True}, "store"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"nonsense": 1}, "nonsense"),
        ({"prompt": "x"}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"seed": 2**63}, "seed"),
        ({"stop": [1]}, "stop"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": "a" * 257}, "stop"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"other": 1}}, "stream_options.other"),
        ({"waterclock": 5}, "waterclock"),
        ({"waterclock": {"other": 1}}, "waterclock.other"),
        ({"waterclock": {"deadline_ms": 0}}, "waterclock.deadline_ms"),
        ({"model": ""}, "model"),
        ({"model": 5}, "model"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(change: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        read({**CHAT, **change})
    assert (refused.value.status, refused.value.param) == (400, param)


@pytest.mark.parametrize(
    "change",
    [{"prompt": ["a", "b"]}, {"prompt": [1, 2]}, {"prompt": ""}, {"prompt": None}, {"best_of": 2}],
)
def test_the_older_api_is_as_strict(change: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as refused:
        read({"prompt": "x", **change}, chat=False)
    assert refused.value.status == 400


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"null", b"\xff", b"[" * 100_000])
def test_what_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        read_request(body, chat=True)
    assert refused.value.status == 400


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


@given(
    st.dictionaries(
        st.sampled_from(
            ["messages", "stop", "stream_options", "waterclock", "temperature", "n", "tools"]
        )
        | st.text(max_size=5),
        values,
        max_size=5,
    ),
    st.booleans(),
)
def test_any_object_is_read_or_refused(table: dict[str, Any], chat: bool) -> None:
    refused: ApiError | None = None
    try:
        asked = read({**(CHAT if chat else {"prompt": "x"}), **table}, chat=chat)
        assert msgspec.json.encode(asked.submission("r", None))
    except ApiError as error:
        refused = error
    assert refused is None or refused.status == 400


@given(st.integers(-(10**15), 10**15))
def test_milliseconds_are_exact(us: int) -> None:
    text = milliseconds(us)
    whole, _, rest = text.lstrip("-").partition(".")
    assert len(rest) == 3
    assert (int(whole) * 1000 + int(rest)) * (-1 if text.startswith("-") else 1) == us


FINAL = Final(
    tenant="acme",
    id="r",
    attempt=1,
    outcome="completed",
    finish_reason="length",
    text="hi",
    model_served="m2",
    usage=Usage(prompt_tokens=3, completion_tokens=2),
    timings=Timings(arrival_us=5, queue_us=1_234, total_us=9, segments={"queue": -1}),
)


def shape(**changes: Any) -> Shape:
    values = {"request_id": "r", "model": "m", "created_s": 5, "chat": True, "include_usage": False}
    return Shape(**(values | changes))


def events(stream: bytes) -> list[Any]:
    parts = stream.decode().split("\n\n")
    assert parts[-1] == ""
    found = [part.removeprefix("data: ") for part in parts[:-1]]
    return [part if part == "[DONE]" else json.loads(part) for part in found]


def test_a_whole_answer() -> None:
    assert json.loads(shape().whole(FINAL)) == {
        "id": "chatcmpl-r",
        "object": "chat.completion",
        "created": 5,
        "model": "m2",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hi", "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
            }
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


def test_a_stream_ends_with_where_the_time_went() -> None:
    last, done = events(shape().last(FINAL))
    assert done == "[DONE]"
    assert last["choices"][0] == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": "length",
    }
    assert last["waterclock"] == {
        "queue_ms": 1.234,
        "exec_ms": None,
        "segments": {"queue_ms": -0.001},
        "model_served": "m2",
    }
    assert "usage" not in last


def test_usage_comes_in_a_chunk_of_its_own() -> None:
    made = shape(include_usage=True)
    finish, usage, _ = events(made.last(FINAL))
    assert finish["usage"] is None
    assert "waterclock" not in finish
    assert (usage["choices"], usage["usage"]["total_tokens"]) == ([], 5)
    assert usage["waterclock"]["queue_ms"] == 1.234
    assert events(made.first())[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}


def test_the_older_api_streams_text() -> None:
    made = shape(chat=False)
    assert made.first() == b""
    assert events(made.piece("a"))[0]["choices"][0]["text"] == "a"
    assert events(made.last(FINAL))[0]["object"] == "text_completion"


@pytest.mark.parametrize(
    ("reason", "status", "code"),
    [
        ("malformed", 400, "malformed"),
        ("unknown_model", 404, "model_not_found"),
        ("id_reused", 409, "id_reused"),
        ("requests_per_minute", 429, "rate_limit_exceeded"),
        ("tokens_per_minute", 429, "rate_limit_exceeded"),
        ("concurrency", 429, "rate_limit_exceeded"),
        ("over_budget_ceiling", 400, "over_budget_ceiling"),
        ("load_shed", 503, "load_shed"),
        ("backlog_full", 503, "backlog_full"),
        ("draining", 503, "draining"),
        ("deadline_passed", 504, "deadline_expired"),
        ("body_too_large", 413, "body_too_large"),
        ("attempts_exhausted", 500, "attempts_exhausted"),
    ],
)
def test_a_reason_has_a_status(reason: RejectReason, status: int, code: str) -> None:
    error = refusal(reason, "why", 5)
    assert (error.status, error.code) == (status, code)
    assert (error.retry_after_ms is not None) == (status in (429, 503))
    assert json.loads(error.body())["error"]["message"] == "why"


@pytest.mark.parametrize(
    ("final", "status", "code"),
    [
        (Final(tenant="a", id="r", outcome="expired"), 504, "deadline_expired"),
        (Final(tenant="a", id="r", outcome="cancelled"), 499, "cancelled"),
        (Final(tenant="a", id="r", outcome="failed"), 500, "engine_error"),
        (
            Final(tenant="a", id="r", outcome="failed", fail_reason="body_missing"),
            500,
            "body_missing",
        ),
        (
            Final(tenant="a", id="r", outcome="rejected", reject_reason="backlog_full"),
            503,
            "backlog_full",
        ),
        (Final(tenant="a", id="r", outcome="completed", answer_kept=False), 410, "answer_gone"),
    ],
)
def test_an_end_without_an_answer_is_an_error(final: Final, status: int, code: str) -> None:
    error = unfinished(final)
    assert (error.status, error.code) == (status, code)
