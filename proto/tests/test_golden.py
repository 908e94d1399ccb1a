"""The bytes of version 1, which never change."""

import json
from pathlib import Path

import msgspec
import pytest

from waterclock_proto.envelope import decode_event
from waterclock_proto.events import EVENT_TYPES, EventData
from waterclock_proto.golden import (
    EVENTS,
    FOLDER,
    LEAVES,
    MESSAGES,
    golden_files,
    sealed,
    write_missing,
)
from waterclock_proto.leaves import decode_leaf
from waterclock_proto.schemas import MESSAGE_TYPES

ADVICE = "run `python -m waterclock_proto.golden` for a new file; a changed one is a new version"


@pytest.mark.parametrize(
    ("name", "content"), golden_files().items(), ids=lambda each: str(each)[:40]
)
def test_today_the_same_bytes_are_written(name: str, content: bytes) -> None:
    path = FOLDER / name
    assert path.exists(), f"{name} is missing: {ADVICE}"
    assert path.read_bytes() == content, f"{name} is not what is written today: {ADVICE}"


def test_every_golden_file_is_still_compared() -> None:
    """A file that nothing writes any more is an older version, which needs a reader's test."""
    found = {path.name for path in FOLDER.iterdir() if path.suffix in (".json", ".hex")}
    assert found == set(golden_files())


@pytest.mark.parametrize("data", EVENTS, ids=lambda data: data.TYPE)
def test_a_golden_event_is_read(data: EventData) -> None:
    payload = (FOLDER / f"{data.TYPE}.v1.json").read_bytes()
    envelope = decode_event(sealed(data)[0], payload)
    assert envelope.data == data
    assert envelope.counter == 7


@pytest.mark.parametrize("name", MESSAGES)
def test_a_golden_message_is_read(name: str) -> None:
    payload = (FOLDER / f"{name}.v1.json").read_bytes()
    assert msgspec.json.decode(payload, type=type(MESSAGES[name])) == MESSAGES[name]


@pytest.mark.parametrize("name", LEAVES)
def test_a_golden_leaf_is_read(name: str) -> None:
    encoded = bytes.fromhex((FOLDER / f"{name}.v1.hex").read_text())
    assert decode_leaf(encoded) == LEAVES[name]


def test_there_is_an_example_of_every_type() -> None:
    assert [type(data) for data in EVENTS] == list(EVENT_TYPES)
    assert {type(message) for message in MESSAGES.values()} == set(MESSAGE_TYPES)


@pytest.mark.parametrize("data", EVENTS, ids=lambda data: data.TYPE)
def test_a_golden_event_sets_every_field(data: EventData) -> None:
    fields = msgspec.structs.fields(data)
    unset = [f.name for f in fields if not f.required and getattr(data, f.name) == f.default]
    assert unset == []


@pytest.mark.parametrize("kind", MESSAGE_TYPES, ids=lambda kind: kind.__name__)
def test_the_golden_messages_of_a_type_set_every_field(kind: type[msgspec.Struct]) -> None:
    examples = [message for message in MESSAGES.values() if type(message) is kind]
    written = {field for message in examples for field in json.loads(msgspec.json.encode(message))}
    expected = {field.encode_name for field in msgspec.structs.fields(kind)}
    assert expected <= written


def test_a_file_that_is_there_is_never_written_again(tmp_path: Path) -> None:
    first = write_missing(tmp_path)
    assert sorted(first) == sorted(golden_files())
    (tmp_path / "started.v1.json").write_bytes(b"of long ago")
    (tmp_path / "expired.v1.json").unlink()
    assert write_missing(tmp_path) == ["expired.v1.json"]
    assert (tmp_path / "started.v1.json").read_bytes() == b"of long ago"
