"""What stands on the tape: every event there and back, and what is no event."""

import json
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proto_values import values
from waterclock_proto.envelope import COUNTER_MAX, Chain, EventRefused, decode_event
from waterclock_proto.events import EVENT_BYTES_MAX, EVENT_TYPES, EventData, RungChanged
from waterclock_proto.golden import EVENTS, sealed
from waterclock_proto.subjects import event_filter, event_subject

EACH_TYPE = pytest.mark.parametrize("kind", EVENT_TYPES, ids=lambda kind: kind.TYPE)
FEW = settings(max_examples=25)
"""For what runs once for each type."""
EACH_EXAMPLE = pytest.mark.parametrize("data", EVENTS, ids=lambda data: data.TYPE)


def chain(key: bytes = b"key") -> Chain:
    return Chain(service="scheduler", writer="scheduler-1f", key=key)


def changed(payload: bytes, **attributes: Any) -> bytes:
    return json.dumps(json.loads(payload) | attributes).encode()


def with_data(payload: bytes, **fields: Any) -> bytes:
    event = json.loads(payload)
    return json.dumps(event | {"data": event["data"] | fields}).encode()


# --- there and back


@EACH_TYPE
@FEW
@given(data=st.data())
def test_what_is_written_is_read(kind: type[EventData], data: st.DataObject) -> None:
    event = data.draw(values(kind))
    subject, payload = chain().seal(event)
    envelope = decode_event(subject, payload)
    assert envelope.data == event
    assert type(envelope.data) is kind
    assert msgspec.json.encode(envelope) == payload
    assert len(payload) <= EVENT_BYTES_MAX


@EACH_TYPE
@FEW
@given(data=st.data())
def test_a_subject_is_five_tokens_that_its_filter_finds(
    kind: type[EventData], data: st.DataObject
) -> None:
    event = data.draw(values(kind))
    subject = event_subject(event)
    assert re.fullmatch(r"wc\.event\.[a-z_]+\.[A-Za-z0-9_-]{1,64}\.[A-Za-z0-9_-]{1,64}", subject)
    _, _, name, tenant, scope = subject.split(".")
    assert name == kind.TYPE
    assert event_filter(kind, tenant=tenant, scope=scope) == subject
    assert event_filter(kind) == f"wc.event.{kind.TYPE}.*.*"


@EACH_EXAMPLE
def test_readers_ignore_fields_they_do_not_know(data: EventData) -> None:
    subject, payload = sealed(data)
    event = json.loads(payload)
    event["later"] = {"deep": [1, 2.5, None]}
    event["data"]["later"] = "more"
    for value in event["data"].values():
        if isinstance(value, dict):
            value["later"] = [True]
    assert decode_event(subject, json.dumps(event).encode()).data == data


# --- disagreement


@pytest.mark.parametrize("other", EVENT_TYPES, ids=lambda kind: kind.TYPE)
@EACH_EXAMPLE
def test_an_event_of_another_type_is_refused(data: EventData, other: type[EventData]) -> None:
    subject, payload = sealed(data)
    renamed = subject.replace(f".{data.TYPE}.", f".{other.TYPE}.")
    if other is type(data):
        assert decode_event(renamed, payload).data == data
    else:
        with pytest.raises(EventRefused):
            decode_event(renamed, payload)


@EACH_EXAMPLE
def test_an_event_under_another_ones_subject_is_refused(data: EventData) -> None:
    subject, payload = sealed(data)
    tokens = subject.split(".")
    for place in (3, 4):
        other = ".".join([*tokens[:place], "another", *tokens[place + 1 :]])
        with pytest.raises(EventRefused, match=f"belongs on {re.escape(subject)}"):
            decode_event(other, payload)
    for wrong in (f"{subject}.more", subject.rpartition(".")[0], subject.replace("wc.", "xx.")):
        with pytest.raises(EventRefused, match=re.escape(wrong)):
            decode_event(wrong, payload)


@EACH_EXAMPLE
def test_attributes_that_disagree_are_refused(data: EventData) -> None:
    subject, payload = sealed(data)
    for attributes, expected in (
        ({"id": "another/7"}, "has id 'another/7', expected '"),
        ({"counter": 8}, "expected '"),
        ({"writer": "another"}, "expected 'another/7'"),
        ({"tenant": "another"}, "has tenant 'another', and '"),
        (
            {"type": f"waterclock.{data.TYPE}.v2"},
            f"carries an event of type 'waterclock.{data.TYPE}.v2'",
        ),
        ({"specversion": "2.0"}, "Invalid enum value '2.0' - at `$.specversion`"),
        ({"previous": "00"}, "$.previous"),
        ({"nonce": ""}, "$.nonce"),
    ):
        with pytest.raises(EventRefused) as refused:
            decode_event(subject, changed(payload, **attributes))
        assert expected in str(refused.value)


# --- what is no event at all

DISPATCHED = next(sealed(data) for data in EVENTS if data.TYPE == "dispatched")


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        pytest.param("tenant", "acme\n", "matching regex", id="line feed at the end of a name"),
        pytest.param("tenant", "ac\0me", "matching regex", id="NUL in a name"),
        pytest.param("tenant", "ac.me", "matching regex", id="two tokens"),
        pytest.param("tenant", "*", "matching regex", id="wildcard"),
        pytest.param("tenant", "_", "matching regex", id="nobody's name"),
        pytest.param("tenant", "a" * 65, "matching regex", id="long name"),
        pytest.param("id", "١٢", "matching regex", id="digits of another script"),
        pytest.param("worker", "", "matching regex", id="no worker"),
        pytest.param("attempt", -1, "`int` >= 0", id="negative"),
        pytest.param("attempt", 2**31, "`int` <= 2147483647", id="too many"),
        pytest.param("deadline_us", 2**63, "`int` <= 9223372036854775807", id="64 bits"),
        pytest.param("deadline_us", 10**40, "`int` <= 9223372036854775807", id="huge"),
        pytest.param("place", 1.5, "got `float`", id="float"),
        pytest.param("place", 1.0, "got `float`", id="whole float"),
        pytest.param("place", True, "got `bool`", id="bool for an int"),
        pytest.param("place", "1", "got `str`", id="text for an int"),
        pytest.param("place", None, "got `null`", id="nothing"),
        pytest.param("body_commitment", "AB" * 32, "matching regex", id="capital hex"),
        pytest.param("policy", "", "length >= 1", id="empty label"),
        pytest.param(
            "arrival", {"wall_us": 1}, "missing required field `source`", id="half a stamp"
        ),
    ],
)
def test_a_value_out_of_range_is_named(field: str, value: object, expected: str) -> None:
    subject, payload = DISPATCHED
    with pytest.raises(EventRefused) as refused:
        decode_event(subject, with_data(payload, **{field: value}))
    assert expected in str(refused.value)
    assert f"$.data.{field}" in str(refused.value)
    assert subject in str(refused.value)


@pytest.mark.parametrize(
    "replacement",
    [
        pytest.param(b'"sj\\ud800f"', id="lone surrogate"),
        pytest.param(b'"sj\\udc00f"', id="lone low surrogate"),
        pytest.param(b'"sj\xed\xa0\x80f"', id="surrogate in UTF-8"),
        pytest.param(b'"sj\x00f"', id="NUL byte"),
        pytest.param(b'"sj\xfff"', id="not UTF-8"),
        pytest.param(b"1e400", id="number beyond a double"),
        pytest.param(b"-" + b"9" * 5000, id="number of 5000 digits"),
        pytest.param(b"NaN", id="no number"),
        pytest.param(b"'sjf'", id="single quotes"),
    ],
)
def test_text_that_is_not_json_is_refused(replacement: bytes) -> None:
    subject, payload = DISPATCHED
    assert payload.count(b'"sjf"') == 1
    with pytest.raises(EventRefused, match=re.escape(f"payload of {subject}: ")):
        decode_event(subject, payload.replace(b'"sjf"', replacement))


def test_nesting_without_end_is_refused() -> None:
    subject, payload = DISPATCHED
    deep = b'{"later":' + b"[" * 100_000 + b"]" * 100_000 + b","
    with pytest.raises(EventRefused, match="recursion"):
        decode_event(subject, deep + payload[1:])


@given(st.binary() | st.recursive(st.none() | st.text(), st.lists).map(msgspec.json.encode))
def test_anything_else_is_refused_and_never_a_crash(payload: bytes) -> None:
    with pytest.raises(EventRefused):
        decode_event("wc.event.started.acme.w1", payload)


@given(data=st.data())
def test_a_damaged_event_is_an_event_or_refused(data: st.DataObject) -> None:
    subject, payload = sealed(data.draw(st.sampled_from(EVENTS)))
    damaged = bytearray(payload)
    damaged[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    try:
        envelope = decode_event(subject, bytes(damaged))
    except EventRefused:
        return
    assert event_subject(envelope.data) == subject


@given(st.text())
def test_an_unknown_subject_is_refused(subject: str) -> None:
    with pytest.raises(EventRefused):
        decode_event(subject, DISPATCHED[1])


# --- what no reader would accept is not written


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        pytest.param({"pool": "zh.b"}, "matching regex", id="no name"),
        pytest.param({"pool": ""}, "matching regex", id="no pool"),
        pytest.param({"depth": -1}, ">= 0", id="negative"),
        pytest.param({"actions": ("explode",)}, "Invalid enum value", id="not of the list"),
        pytest.param({"pool": "\ud800"}, "not Unicode text", id="lone surrogate"),
        pytest.param({"actions": ("refuse",) * 4000}, f"at most {EVENT_BYTES_MAX}", id="large"),
    ],
)
def test_a_writer_refuses_it_and_its_chain_stays_as_it_was(
    fields: dict[str, Any], expected: str
) -> None:
    good = next(data for data in EVENTS if isinstance(data, RungChanged))
    writer, twin = chain(), chain()
    with pytest.raises(EventRefused, match=expected):
        writer.seal(msgspec.structs.replace(good, **fields))
    assert writer.seal(good) == twin.seal(good)


def test_a_writer_ends_with_its_last_counter() -> None:
    writer = chain()
    writer.counter = COUNTER_MAX
    subject, payload = writer.seal(EVENTS[0])
    assert decode_event(subject, payload).counter == 2**31 - 1
    with pytest.raises(EventRefused, match="has used its 2147483648 counters"):
        writer.seal(EVENTS[0])


def test_the_list_of_types_is_whole() -> None:
    assert [kind.TYPE for kind in EVENT_TYPES] == [data.TYPE for data in EVENTS]
    assert len({kind.TYPE for kind in EVENT_TYPES}) == len(EVENT_TYPES)
    concrete: set[type[EventData]] = set()
    waiting: list[type[EventData]] = [EventData]
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        if kind.TYPE:
            concrete.add(kind)
    assert concrete == set(EVENT_TYPES)
