"""A writer's own events, read back, are not decoded a second time, and never mistaken."""

from typing import Any, cast

import pytest

from waterclock_proto.envelope import Chain, EventRefused
from waterclock_proto.events import SchedulerElected
from waterclock_proto.stamps import Stamp
from waterclock_runtime import limits
from waterclock_runtime.writer import EventWriter

STAMP = Stamp(wall_us=1, source="scheduler")


def remembering() -> tuple[EventWriter, Chain]:
    writer = cast(Any, EventWriter.__new__(EventWriter))
    chain = Chain(service="scheduler", writer="scheduler-a", key=b"k" * 32)
    writer._chain, writer._own = chain, {}
    return writer, chain


def sealed(writer: Any, chain: Chain) -> tuple[str, bytes]:
    subject, payload = chain.seal(SchedulerElected(elected=STAMP))
    writer._remember(subject, payload)
    return subject, payload


def test_the_own_event_is_the_object_that_was_sealed() -> None:
    writer, chain = remembering()
    subject, payload = sealed(writer, chain)
    assert writer.decode(subject, bytes(payload)) is chain.sealed


def test_a_repetition_is_decoded_to_the_same_event() -> None:
    writer, chain = remembering()
    subject, payload = sealed(writer, chain)
    first = writer.decode(subject, payload)
    assert writer.decode(subject, payload) == first


def test_the_same_bytes_under_another_subject_are_refused() -> None:
    writer, chain = remembering()
    _, payload = sealed(writer, chain)
    with pytest.raises(EventRefused, match="carries an event"):
        writer.decode("wc.event.admission_elected._._", payload)


def test_what_is_never_read_back_is_forgotten() -> None:
    writer, chain = remembering()
    for _ in range(limits.OWN_EVENTS_MAX + 3):
        sealed(writer, chain)
    assert len(cast(Any, writer)._own) == limits.OWN_EVENTS_MAX
