"""What is read out of a body, and what is said about a pool."""

from typing import Any

import msgspec
import pytest

from waterclock_proto.requests import ChatMessage, Submission, body_commitment, body_salt
from waterclock_scheduler.board import Features
from waterclock_scheduler.features import read_features
from waterclock_scheduler.pulse import decode_pulse, encode_pulse, pulse_of

from .tape_model import Model

KEY = b"m" * 32
QUESTION = "What is a water clock, and how was it used?"


def features(body: bytes | None, *, committed: bytes | None = None) -> Features:
    """Of a request that was admitted with ``committed``, or with the body itself."""
    admitted = Model().admit("a")
    if committed is not None or body is not None:
        commitment = body_commitment(body_salt(KEY, "acme", "a"), committed or body or b"")
        admitted = msgspec.structs.replace(admitted, body_commitment=commitment)
    return read_features(admitted, body, mesh_key=KEY, permille_min=300)


def body_of(text: str, **more: Any) -> bytes:
    return msgspec.json.encode(Submission(id="a", prompt=text, **more))


@pytest.mark.parametrize(
    ("body", "language", "reason", "prompt_tokens"),
    [
        pytest.param(body_of(QUESTION), "en", "script", 11, id="a prompt"),
        pytest.param(
            msgspec.json.encode(
                Submission(id="a", messages=(ChatMessage(role="user", content="什么是水钟？"),))
            ),
            "zh",
            "script",
            6,
            id="messages",
        ),
        pytest.param(body_of("1 + 1 = ?"), "und", "default", 3, id="no letter"),
        pytest.param(b'{"id":"a","prompt":"\\ud800"}', "und", "unread", 10, id="a lone surrogate"),
        pytest.param(b"not json", "und", "unread", 10, id="what admission cannot have let in"),
        pytest.param(b"\xff\xfe", "und", "unread", 10, id="not even text"),
        pytest.param(None, "und", "unread", 10, id="a body that is gone"),
    ],
)
def test_features(body: bytes | None, language: str, reason: str, prompt_tokens: int) -> None:
    found = features(body)
    assert (found.language, found.reason, found.prompt_tokens) == (language, reason, prompt_tokens)


def test_a_body_that_was_changed_is_not_read() -> None:
    changed = features(body_of(QUESTION), committed=body_of("something else"))
    assert (changed.language, changed.reason) == ("und", "unread")


def test_what_is_not_certain_enough_goes_to_the_default_pool() -> None:
    admitted = Model().admit("a")
    body = body_of("Hello world")
    commitment = body_commitment(body_salt(KEY, "acme", "a"), body)
    admitted = msgspec.structs.replace(admitted, body_commitment=commitment)
    sure = read_features(admitted, body, mesh_key=KEY, permille_min=300)
    unsure = read_features(admitted, body, mesh_key=KEY, permille_min=400)
    assert (sure.language, sure.reason) == ("en", "script")
    assert (unsure.language, unsure.reason) == ("und", "default")
    assert sure.permille == unsure.permille == 350


def test_a_pulse_says_how_its_pool_stands() -> None:
    model = Model()
    model.start_worker(slots=2)
    leaving = model.start_worker("leaving", slots=8)
    leaving.draining = True
    model.beat(leaving)
    for number in range(5):
        model.admit(f"r{number}")
    model.turn()
    pulse = pulse_of(
        model.board, model.board.pools["main"], scheduler="s-1", fence=3, now_us=model.now_us
    )
    assert (pulse.depth, pulse.in_flight, pulse.workers, pulse.slots) == (3, 2, 1, 2)
    assert decode_pulse(encode_pulse(pulse)) == pulse
    assert decode_pulse(b"{}") is None
    assert decode_pulse(b"") is None
