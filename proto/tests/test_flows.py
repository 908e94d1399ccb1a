"""The tables agree with each other, and with what the docstrings say."""

import re
from pathlib import Path

import pytest

from waterclock_proto.events import EVENT_TYPES
from waterclock_proto.flows import (
    CHANNELS,
    EVENT_FLOWS,
    SERVICES,
    EventFlow,
    event_table,
    publish_subjects,
    wildcards,
)
from waterclock_proto.subjects import CROSSINGS, STREAMS

EACH_FLOW = pytest.mark.parametrize("flow", EVENT_FLOWS, ids=lambda flow: flow.event.TYPE)


def test_every_event_has_its_row() -> None:
    assert [flow.event for flow in EVENT_FLOWS] == list(EVENT_TYPES)


@EACH_FLOW
def test_the_docstring_says_the_same(flow: EventFlow) -> None:
    doc = " ".join((flow.event.__doc__ or "").split())
    said = re.search(r"Published by ([^;]+); read by ([^.]+)\.", doc)
    assert said, f"{flow.event.__name__} does not say who publishes and who reads it"

    def parties(text: str) -> set[str]:
        named = re.sub(r" \(.*\)", "", text)
        return set(SERVICES) if named == "every service" else set(named.split(", "))

    assert parties(said[1]) == set(flow.publishers)
    assert parties(said[2]) == set(flow.readers)


@EACH_FLOW
def test_the_ledger_reads_every_event(flow: EventFlow) -> None:
    assert "ledger" in flow.readers
    assert flow.publishers


def test_what_crosses_a_tenants_border_is_what_producers_say_and_hear() -> None:
    incoming = {c.subject for c in CROSSINGS if c.direction == "in"}
    outgoing = {c.subject for c in CROSSINGS if c.direction == "out"}

    def as_crossing(address: str) -> str:
        return address.replace("{id}", "*")

    assert incoming == {as_crossing(c.address) for c in CHANNELS if "producer" in c.publishers}
    assert outgoing == {as_crossing(c.address) for c in CHANNELS if "producer" in c.readers}


def test_no_channel_is_both_ways() -> None:
    for channel in CHANNELS:
        assert not ("producer" in channel.publishers and "producer" in channel.readers)


def test_a_channels_stream_keeps_its_subject() -> None:
    streams = {spec.name: spec.subjects for spec in STREAMS}
    for channel in CHANNELS:
        kept_by = [name for name, kept in streams.items() if wildcards(channel.address) in kept]
        assert kept_by == ([channel.stream] if channel.stream else [])


def test_a_service_may_publish_what_its_rows_say() -> None:
    assert publish_subjects("ledger") == (
        "wc.event.clock_reported.*.*",
        "wc.event.writer_sealed.*.*",
        "wc.event.log_opened.*.*",
    )
    assert "wc.edge.*" in publish_subjects("admission")
    assert not any("wc.edge" in each for each in publish_subjects("worker"))
    assert not any("wc.request" in each for name in SERVICES for each in publish_subjects(name))


def test_the_table_has_a_line_for_every_event() -> None:
    lines = event_table().splitlines()
    assert len(lines) == len(EVENT_TYPES) + 2
    assert (
        "| `rejected` | admission, scheduler | admission, ledger | A submission was refused. |"
        in lines
    )
    assert all(line.count("|") == 5 for line in lines)


def test_the_architecture_page_has_this_table() -> None:
    page = (Path(__file__).resolve().parents[2] / "ARCHITECTURE.md").read_text(encoding="utf-8")
    assert event_table() in page, "put the output of `python -m waterclock_proto.flows` there"
