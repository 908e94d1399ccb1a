"""A writer's chain, and the envelope as a CloudEvent."""

import hashlib
import hmac
import json
import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proto_values import values
from waterclock_proto.envelope import CHAIN_START, Chain, decode_event
from waterclock_proto.events import EVENT_TYPES, EventData, Started
from waterclock_proto.golden import EVENTS, sealed

ANY_EVENT = st.sampled_from(EVENT_TYPES).flatmap(values)


def chain(key: bytes = b"key") -> Chain:
    return Chain(service="worker", writer="worker-1f", key=key)


@given(st.lists(ANY_EVENT, max_size=6))
def test_each_event_names_the_one_before_it(events: list[EventData]) -> None:
    writer = chain()
    previous = CHAIN_START
    for counter, event in enumerate(events):
        envelope = decode_event(*writer.seal(event))
        assert (envelope.counter, envelope.previous) == (counter, previous)
        assert envelope.id == f"worker-1f/{counter}"
        previous = hashlib.sha256(msgspec.json.encode(envelope)).hexdigest()
    assert (writer.counter, writer.head) == (len(events), previous)


@given(st.lists(ANY_EVENT, max_size=4))
def test_the_same_writer_writes_the_same_bytes(events: list[EventData]) -> None:
    one, other = chain(), chain()
    assert [one.seal(event) for event in events] == [other.seal(event) for event in events]


@given(st.lists(ANY_EVENT, min_size=2, max_size=4, unique_by=msgspec.json.encode))
def test_a_chain_without_one_of_its_events_does_not_join(events: list[EventData]) -> None:
    writer = chain()
    payloads = [writer.seal(event)[1] for event in events]
    del payloads[len(payloads) // 2 - 1]
    heads = [CHAIN_START, *(hashlib.sha256(payload).hexdigest() for payload in payloads)]
    named = [json.loads(payload)["previous"] for payload in payloads]
    assert named != heads[:-1]


def started(**fields: object) -> Started:
    example = next(data for data in EVENTS if isinstance(data, Started))
    return msgspec.structs.replace(example, **fields)


def nonce(event: EventData, key: bytes = b"key") -> str:
    return decode_event(*chain(key=key).seal(event)).nonce


def test_the_nonce_is_the_hmac_of_what_the_event_is_about() -> None:
    whole = hmac.digest(b"key", b"acme|r1|started|3", "sha256")
    assert nonce(started(tenant="acme", id="r1", attempt=3)) == whole.hex()[:32]


def test_the_nonce_repeats_for_a_repetition_and_for_nothing_else() -> None:
    first = started()
    assert nonce(first) == nonce(started(worker="another-1"))
    others = [started(tenant="b"), started(id="b"), started(attempt=7)]
    assert len({nonce(first), nonce(first, key=b"other"), *map(nonce, others)}) == 5


def test_events_about_no_request_have_a_nonce_each() -> None:
    writer = chain()
    about_none = [data for data in EVENTS if not hasattr(data, "id")]
    nonces = {decode_event(*writer.seal(event)).nonce for event in (*about_none, *about_none)}
    assert len(nonces) == 2 * len(about_none)


def test_fence_and_incarnation_are_the_chains() -> None:
    writer = chain()
    assert b'"fence"' not in writer.seal(EVENTS[0])[1]
    writer.fence, writer.incarnation = 4, "i-2"
    envelope = decode_event(*writer.seal(EVENTS[0]))
    assert (envelope.fence, envelope.incarnation) == (4, "i-2")


# --- CloudEvents 1.0.2, sections 2 and 3, and the JSON event format


@pytest.mark.parametrize("data", EVENTS, ids=lambda data: data.TYPE)
def test_an_event_is_a_structured_cloud_event(data: EventData) -> None:
    event = json.loads(sealed(data)[1])
    content = event.pop("data")
    assert isinstance(content, dict)
    # Required attributes: present, and not empty strings (3.1).
    assert event["specversion"] == "1.0"
    for name in ("id", "source", "type"):
        assert isinstance(event[name], str)
        assert event[name]
    # A URI reference (RFC 3986) without scheme.
    assert re.fullmatch(r"(/[A-Za-z0-9._~-]+)+", event["source"])
    for name, value in event.items():
        # Naming (3.1): lower case letters and digits, and no reserved name but data.
        assert re.fullmatch(r"[a-z0-9]{1,20}", name), name
        # Types: Boolean, Integer of 32 bits, String; null means absent.
        assert type(value) in (bool, int, str), name
        if type(value) is int:
            assert -(2**31) <= value < 2**31, name
        if type(value) is str:
            assert not re.search(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]", value), name


def test_attributes_come_before_the_data() -> None:
    """Readers of a stream may decide by the attributes before they parse the rest."""
    for data in EVENTS:
        assert list(json.loads(sealed(data)[1]))[-1] == "data"
