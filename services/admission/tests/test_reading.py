"""Bodies: what is wrong with each gets its name, and nothing of the body is repeated."""

import random
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from waterclock_admission.facts import Facts, Refusal
from waterclock_admission.reading import read
from waterclock_proto.names import RejectReason
from waterclock_proto.requests import Submission, body_commitment, body_salt, session_fingerprint
from waterclock_proto.subjects import BODY_BYTES_MAX

KEY = b"k" * 32
SECRET = "Geheimnis"


def reading(body: bytes) -> Facts | Refusal:
    return read(body, tenant="acme", arrival_us=1, mesh_key=KEY)


def test_a_good_body_becomes_facts() -> None:
    body = (
        b'{"id":"r1","messages":[{"role":"user","content":"hello there"}],"model":"m",'
        b'"stream":true,"max_tokens":5,"deadline_ms":7,"language":"en","session":"s","sent_us":9}'
    )
    assert reading(body) == Facts(
        tenant="acme",
        id="r1",
        commitment=bytes.fromhex(body_commitment(body_salt(KEY, "acme", "r1"), body)),
        body_bytes=len(body),
        arrival_us=1,
        model="m",
        stream=True,
        prompt_tokens_estimate=3,
        output_tokens=5,
        deadline_ms=7,
        language_hint="en",
        session_fingerprint=session_fingerprint(KEY, "acme", "s"),
        sent_us=9,
    )


def test_the_resume_form_is_the_id_alone() -> None:
    found = reading(b'{"id":"r1","resume":true}')
    assert isinstance(found, Facts)
    assert found.resume


@pytest.mark.parametrize(
    ("body", "reason", "request_id"),
    [
        pytest.param(b"", "empty_body", "", id="no bytes"),
        pytest.param(b"{", "malformed", "", id="cut off"),
        pytest.param(b"[]", "malformed", "", id="a list"),
        pytest.param(b'"Geheimnis"', "malformed", "", id="text"),
        pytest.param(b"\xff\xfe{}", "malformed", "", id="not UTF-8"),
        pytest.param(b'{"id":"r1","prompt":"\xff"}', "malformed", "r1", id="not UTF-8 within"),
        pytest.param(b"\xef\xbb\xbf{}", "malformed", "", id="byte order mark"),
        pytest.param(b'{"id":"r1","prompt":"a"} Geheimnis', "malformed", "", id="more behind"),
        pytest.param(b"[" * 100_000, "malformed", "", id="nested deeply"),
        pytest.param(b'{"id":"r1","prompt":"\\ud800Geheimnis"}', "malformed", "", id="surrogate"),
        pytest.param(b'{"id":"r1","max_tokens":NaN}', "malformed", "", id="NaN"),
        pytest.param(b"{}", "invalid_field", "", id="no id"),
        pytest.param(b'{"id":"_","prompt":"a"}', "invalid_field", "", id="the id of nobody"),
        pytest.param(b'{"id":"a.b","prompt":"a"}', "invalid_field", "", id="two tokens"),
        pytest.param(b'{"id":"r1\\n","prompt":"a"}', "invalid_field", "", id="a line feed"),
        pytest.param(b'{"id":5,"prompt":"a"}', "invalid_field", "", id="a number as id"),
        pytest.param(b'{"id":"r1"}', "invalid_field", "r1", id="neither prompt nor messages"),
        pytest.param(
            b'{"id":"r1","prompt":"Geheimnis","messages":[]}', "invalid_field", "r1", id="both"
        ),
        pytest.param(b'{"id":"r1","prompt":""}', "empty_body", "r1", id="empty prompt"),
        pytest.param(b'{"id":"r1","messages":[]}', "empty_body", "r1", id="no messages"),
        pytest.param(
            b'{"id":"r1","messages":[{"role":"user","content":""}]}',
            "empty_body",
            "r1",
            id="messages without content",
        ),
        pytest.param(b'{"id":"r1","prompt":"Geheimnis\\u0000"}', "invalid_field", "r1", id="NUL"),
        pytest.param(
            b'{"id":"r1","prompt":"a","Geheimnis":1}', "unknown_field", "r1", id="unknown field"
        ),
        pytest.param(
            b'{"id":"r1","messages":[{"role":"user","content":"a","Geheimnis":1}]}',
            "unknown_field",
            "r1",
            id="unknown field within",
        ),
        pytest.param(
            b'{"id":"r1","messages":[{"role":"Geheimnis","content":"a"}]}',
            "invalid_field",
            "r1",
            id="unknown role",
        ),
        pytest.param(
            b'{"id":"r1","prompt":"a","language":"Geheimnis"}', "invalid_field", "r1", id="language"
        ),
        pytest.param(b'{"id":"r1","prompt":"a","max_tokens":0}', "invalid_field", "r1", id="zero"),
        pytest.param(
            b'{"id":"r1","prompt":"a","max_tokens":-1}', "invalid_field", "r1", id="negative"
        ),
        pytest.param(
            b'{"id":"r1","prompt":"a","max_tokens":1e400}', "invalid_field", "r1", id="infinite"
        ),
        pytest.param(
            b'{"id":"r1","prompt":"a","deadline_us":99999999999999999999999}',
            "invalid_field",
            "r1",
            id="huge",
        ),
        pytest.param(
            b'{"id":"r1","prompt":"a","max_tokens":1.5}', "invalid_field", "r1", id="a fraction"
        ),
        pytest.param(
            b'{"id":"r1","prompt":"a","sampling":{"temperature":0.5}}',
            "invalid_field",
            "r1",
            id="a decimal that is no string",
        ),
        pytest.param(
            b'{"id":"r1","prompt":"a","sampling":{"temperature":"2.1"}}',
            "invalid_field",
            "r1",
            id="too hot",
        ),
        pytest.param(
            b'{"id":"r1","prompt":"a","sampling":{"top_p":"0"}}', "invalid_field", "r1", id="top_p"
        ),
        pytest.param(
            b'{"id":"r1","prompt":"a","sampling":{"stop":[""]}}', "invalid_field", "r1", id="stop"
        ),
        pytest.param(
            b'{"id":"r1","resume":true,"prompt":"Geheimnis"}', "invalid_field", "r1", id="resume"
        ),
        pytest.param(
            b'{"id":"r1","prompt":"' + b"a" * BODY_BYTES_MAX + b'"}',
            "body_too_large",
            "r1",
            id="too large",
        ),
    ],
)
def test_a_bad_body_gets_its_reason(body: bytes, reason: str, request_id: str) -> None:
    found = reading(body)
    assert isinstance(found, Refusal)
    assert (found.reason, found.id) == (reason, request_id)
    assert 0 < len(found.detail) <= 512
    assert SECRET not in found.detail


@pytest.mark.parametrize(
    ("field", "hint"),
    [("max_token", "max_tokens"), ("mesages", "messages"), ("promt", "prompt")],
)
def test_a_misspelt_field_gets_the_right_one(field: str, hint: str) -> None:
    found = reading(b'{"id":"r1","prompt":"a","%s":1}' % field.encode())
    assert isinstance(found, Refusal)
    assert found.detail.endswith(f"did you mean {hint}?")


def test_a_path_that_a_field_name_makes_up_is_not_repeated() -> None:
    found = reading(b'{"id":"r1","prompt":"a","x` - at `$.Geheimnis":1}')
    assert isinstance(found, Refusal)
    assert SECRET not in found.detail


GOOD = msgspec.json.encode(
    Submission(id="r1", prompt=SECRET * 5, max_tokens=5, session="s", sent_us=3, stream=True)
)


def test_ten_thousand_broken_bodies_each_get_an_answer() -> None:
    chance = random.Random(20261130)
    reasons = set(get_args(RejectReason))
    refused = 0
    for _ in range(10_000):
        body = bytearray(GOOD)
        for _ in range(chance.randint(1, 4)):
            where = chance.randrange(len(body))
            match chance.randrange(4):
                case 0:
                    body[where] = chance.randrange(256)
                case 1:
                    del body[where : where + chance.randint(1, 8)]
                case 2:
                    body[where:where] = chance.choice(
                        [b'"', b"{", b"[", b"\\", b"\0", b"1e999", b"null,", b'"x":1,', b"\xf0"]
                    )
                case _:
                    body[where:where] = body[where : where + chance.randint(1, 30)]
            body = body or bytearray(b"x")
        found = reading(bytes(body))
        if isinstance(found, Refusal):
            refused += 1
            assert found.reason in reasons
            assert found.detail
            assert len(found.detail) <= 512
            assert SECRET not in found.detail
    assert refused > 5_000


@given(st.binary(max_size=300))
def test_any_bytes_get_an_answer(body: bytes) -> None:
    assert isinstance(reading(body), Facts | Refusal)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


@given(
    st.dictionaries(
        st.sampled_from(
            [field.name for field in msgspec.structs.fields(Submission)] + ["other", "id "]
        ),
        json_values,
        max_size=6,
    )
)
def test_any_json_object_gets_an_answer(fields: dict) -> None:
    assert isinstance(reading(msgspec.json.encode(fields)), Facts | Refusal)


@given(st.text(min_size=1, max_size=200))
def test_any_text_is_a_prompt_unless_it_has_a_nul(text: str) -> None:
    found = reading(msgspec.json.encode({"id": "r1", "prompt": text}))
    assert isinstance(found, Refusal if "\0" in text else Facts)
