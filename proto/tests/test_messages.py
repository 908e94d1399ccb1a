"""What crosses the border: every message there and back, and submissions that are refused."""

import contextlib
import hashlib
import hmac
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proto_values import TEXT, values
from waterclock_proto import requests
from waterclock_proto.golden import MESSAGES
from waterclock_proto.requests import (
    ANSWER_DECODER,
    DELIVERED_BYTES_MAX,
    Beat,
    ChatMessage,
    DeliveredClaim,
    Delta,
    Final,
    Receipt,
    Restarted,
    Submission,
)
from waterclock_proto.stamps import Stamp

TYPES = (Submission, Receipt, Delta, Restarted, Final, DeliveredClaim, Beat, Stamp)
SUBMISSION = msgspec.json.Decoder(Submission)


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.__name__)
@settings(max_examples=25)
@given(data=st.data())
def test_what_is_written_is_read(kind: type[msgspec.Struct], data: st.DataObject) -> None:
    message = data.draw(values(kind))
    payload = msgspec.json.encode(message)
    read = msgspec.json.decode(payload, type=kind)
    assert read == message
    assert msgspec.json.encode(read) == payload


@given(st.one_of(values(Delta), values(Restarted), values(Final)))
def test_an_answer_says_what_it_is(message: Delta | Restarted | Final) -> None:
    payload = msgspec.json.encode(message)
    assert json.loads(payload)["kind"] == type(message).__name__.lower()
    assert ANSWER_DECODER.decode(payload) == message


@given(values(DeliveredClaim))
def test_a_claim_fits_into_its_bound(claim: DeliveredClaim) -> None:
    assert len(msgspec.json.encode(claim)) <= DELIVERED_BYTES_MAX


@pytest.mark.parametrize("kind", [Receipt, Delta, Restarted, Final, Beat, Stamp])
def test_readers_ignore_fields_they_do_not_know(kind: type[msgspec.Struct]) -> None:
    for message in MESSAGES.values():
        if type(message) is kind:
            more = json.loads(msgspec.json.encode(message)) | {"later": {"deep": [1.5, None]}}
            assert msgspec.json.decode(json.dumps(more), type=kind) == message


def test_a_receipt_says_that_it_is_unsigned() -> None:
    for message in MESSAGES.values():
        if isinstance(message, Receipt):
            assert json.loads(msgspec.json.encode(message))["kind"] == "receipt_unsigned"


def test_the_event_in_a_receipt_survives_byte_for_byte() -> None:
    event = '{"a":"é 水 \\u0000 \\" \\\\"}'
    receipt = msgspec.structs.replace(MESSAGES["receipt"], event=event)
    read = msgspec.json.decode(msgspec.json.encode(receipt), type=Receipt)
    assert read.event.encode() == event.encode()


# --- submissions

REFUSED = [
    pytest.param(b'{"id":"r1","promt":"x"}', "unknown field `promt`", id="unknown field"),
    pytest.param(
        b'{"id":"r1","sampling":{"top_k":5}}',
        "unknown field `top_k` - at `$.sampling`",
        id="unknown field in sampling",
    ),
    pytest.param(
        b'{"id":"r1","messages":[{"role":"user","content":"x","name":"y"}]}',
        "unknown field `name` - at `$.messages[0]`",
        id="unknown field in a message",
    ),
    pytest.param(
        b'{"id":"r1","messages":[{"role":"system","content":"x"},{"role":"robot","content":"x"}]}',
        "Invalid enum value 'robot' - at `$.messages[1].role`",
        id="unknown role",
    ),
    pytest.param(
        b'{"id":"r1","messages":[{"role":"user","content":[{"text":"x"}]}]}',
        "Expected `str`, got `array` - at `$.messages[0].content`",
        id="parts",
    ),
    pytest.param(b'{"prompt":"x"}', "missing required field `id`", id="no id"),
    pytest.param(b'{"id":""}', "- at `$.id`", id="empty id"),
    pytest.param(b'{"id":"_"}', "- at `$.id`", id="nobody"),
    pytest.param(b'{"id":"a b"}', "- at `$.id`", id="space in the id"),
    pytest.param(b'{"id":"a.b"}', "- at `$.id`", id="two tokens"),
    pytest.param(b'{"id":"a\\n"}', "- at `$.id`", id="line feed"),
    pytest.param(b'{"id":"a\\u0000"}', "- at `$.id`", id="NUL"),
    pytest.param('{"id":"é"}'.encode(), "- at `$.id`", id="not ASCII"),
    pytest.param(b'{"id":"r1","max_tokens":0}', ">= 1 - at `$.max_tokens`", id="no tokens"),
    pytest.param(b'{"id":"r1","max_tokens":1e3}', "got `float` - at `$.max_tokens`", id="float"),
    pytest.param(b'{"id":"r1","max_tokens":"9"}', "got `str` - at `$.max_tokens`", id="text"),
    pytest.param(b'{"id":"r1","max_tokens":true}', "got `bool` - at `$.max_tokens`", id="bool"),
    pytest.param(b'{"id":"r1","deadline_us":1e400}', "- at `$.deadline_us`", id="beyond a double"),
    pytest.param(
        b'{"id":"r1","deadline_us":%s}' % (b"9" * 5000), "- at `$.deadline_us`", id="5000 digits"
    ),
    pytest.param(b'{"id":"r1","deadline_us":-1}', ">= 0 - at `$.deadline_us`", id="before 1970"),
    pytest.param(b'{"id":"r1","language":"fr"}', "'fr' - at `$.language`", id="language"),
    pytest.param(
        b'{"id":"r1","sampling":{"temperature":0.7}}',
        "got `float` - at `$.sampling.temperature`",
        id="temperature as a number",
    ),
    pytest.param(
        '{"id":"r1","sampling":{"temperature":"٣.٥"}}'.encode(),
        "- at `$.sampling.temperature`",
        id="digits of another script",
    ),
    pytest.param(
        b'{"id":"r1","sampling":{"temperature":"1\\n"}}',
        "- at `$.sampling.temperature`",
        id="temperature with a line feed",
    ),
    pytest.param(b'{"id":"r1","prompt":"\xed\xa0\x80"}', "UTF-8", id="surrogate in UTF-8"),
    pytest.param(b'{"id":"r1","prompt":"\xff"}', "UTF-8", id="not UTF-8"),
    pytest.param(b'{"id":"r1","prompt":"a\x00b"}', "invalid character", id="NUL byte"),
    pytest.param(b'{"id":"r1"} {"id":"r2"}', "trailing characters", id="two at once"),
    pytest.param(b'\xef\xbb\xbf{"id":"r1"}', "malformed", id="byte order mark"),
    pytest.param(b'["r1"]', "Expected `object`, got `array`", id="array"),
    pytest.param(b"", "truncated", id="empty"),
]


@pytest.mark.parametrize(("body", "expected"), REFUSED)
def test_a_wrong_submission_is_refused_and_told_why(body: bytes, expected: str) -> None:
    with pytest.raises(msgspec.MsgspecError) as refused:
        SUBMISSION.decode(body)
    assert expected in str(refused.value)


@pytest.mark.parametrize(
    "escape", [r"\ud800", r"\ud800x", r"\udc00", r"\ud800\ud800", r"\udfffmore text to follow"]
)
def test_a_lone_surrogate_is_refused(escape: str) -> None:
    with pytest.raises(msgspec.DecodeError):
        SUBMISSION.decode(b'{"id":"r1","prompt":"%s"}' % escape.encode())


def test_a_pair_of_surrogates_is_one_character() -> None:
    assert SUBMISSION.decode(rb'{"id":"r1","prompt":"\ud83d\udd70"}').prompt == "🕰"


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_nesting_without_end_is_refused_like_any_unknown_field(opening: bytes) -> None:
    with pytest.raises(msgspec.ValidationError, match="unknown field `a`"):
        SUBMISSION.decode(b'{"id":"r1","a":' + opening * 100_000)


@given(st.binary())
def test_anything_else_is_refused_and_never_a_crash(body: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        SUBMISSION.decode(body)


@given(values(Submission), st.data())
def test_a_damaged_submission_is_refused_or_a_submission(
    submission: Submission, data: st.DataObject
) -> None:
    damaged = bytearray(msgspec.json.encode(submission))
    damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(msgspec.MsgspecError):
        assert isinstance(SUBMISSION.decode(damaged), Submission)


# --- what is derived from a submission


def test_a_commitment_is_an_hmac_that_the_producer_can_make_itself() -> None:
    salt = requests.body_salt(b"mesh key", "acme", "r1")
    body = b'{"id":"r1","prompt":"x"}'
    commitment = requests.body_commitment(salt, body)
    assert len(salt) == 32
    assert commitment == hmac.new(salt, body, hashlib.sha256).hexdigest()
    assert commitment != requests.body_commitment(salt, body + b" ")


def test_salts_and_fingerprints_differ_between_keys_tenants_and_names() -> None:
    variants: list[tuple[Any, ...]] = [
        (b"k1", "acme", "r1"),
        (b"k2", "acme", "r1"),
        (b"k1", "acm", "er1"),
        (b"k1", "acme", "r2"),
    ]
    assert len({requests.body_salt(*each) for each in variants}) == 4
    fingerprints = {requests.session_fingerprint(*each) for each in variants}
    assert len(fingerprints) == 4
    assert {len(each) for each in fingerprints} == {32}


@given(st.text(), st.text())
def test_an_estimate_counts_about_a_token_for_each_part(one: str, other: str) -> None:
    whole = requests.estimate_prompt_tokens(one + other)
    parts = requests.estimate_prompt_tokens(one) + requests.estimate_prompt_tokens(other)
    assert whole <= parts <= whole + 1
    assert requests.estimate_prompt_tokens(one) <= len(one)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        pytest.param("", 0, id="nothing"),
        pytest.param("a", 1, id="a letter"),
        pytest.param("abcd", 1, id="four letters"),
        pytest.param("abcde", 2, id="five letters"),
        pytest.param("水钟", 2, id="two characters"),
        pytest.param("水钟 tells time", 2 + 3, id="both"),
    ],
)
def test_estimates(text: str, tokens: int) -> None:
    assert requests.estimate_prompt_tokens(text) == tokens


@given(st.lists(st.text(TEXT), max_size=4))
def test_what_the_model_reads_is_the_prompt_or_all_turns(turns: list[str]) -> None:
    messages = tuple(ChatMessage(role="user", content=turn) for turn in turns)
    assert requests.prompt_text(Submission(id="r1", messages=messages)) == "\n".join(turns)
    assert requests.prompt_text(Submission(id="r1", prompt="x", messages=messages)) == "x"
    assert requests.prompt_text(Submission(id="r1", resume=True)) == ""
