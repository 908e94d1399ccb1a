"""The generated documents: up to date, valid by their own standards, as strict as our decoders."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proto_values import values
from waterclock_proto.envelope import Chain, EventRefused, decode_event
from waterclock_proto.events import EVENT_TYPES, EventData
from waterclock_proto.flows import CHANNELS, EVENT_FLOWS
from waterclock_proto.golden import EVENTS, MESSAGES, sealed
from waterclock_proto.requests import Submission
from waterclock_proto.schemas import (
    MESSAGE_TYPES,
    ROOT,
    asyncapi_document,
    documents,
    event_schema,
    message_schema,
)

SCHEMAS: dict[type[msgspec.Struct], dict[str, Any]] = {
    kind: event_schema(kind) for kind in EVENT_TYPES
} | {kind: message_schema(kind) for kind in MESSAGE_TYPES}
EACH_TYPE = pytest.mark.parametrize("kind", SCHEMAS, ids=lambda kind: kind.__name__)
DOCUMENT = asyncapi_document()
ASYNCAPI = json.loads(
    (Path(__file__).parent / "asyncapi" / "asyncapi-3.0.0.schema.json").read_text()
)


def validator(kind: type[msgspec.Struct]) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(SCHEMAS[kind])


def examples(kind: type[msgspec.Struct]) -> list[dict[str, Any]]:
    if issubclass(kind, EventData):
        return [json.loads(sealed(data)[1]) for data in EVENTS if type(data) is kind]
    return [
        json.loads(msgspec.json.encode(message))
        for message in MESSAGES.values()
        if type(message) is kind
    ]


# --- up to date


@pytest.mark.parametrize(("path", "text"), documents().items(), ids=lambda each: str(each)[:40])
def test_the_file_is_what_is_generated(path: str, text: str) -> None:
    advice = "run `python -m waterclock_proto.schemas` and look at what changed"
    assert (ROOT / path).read_text(encoding="utf-8") == text, f"{path} is stale: {advice}"


def test_no_schema_is_left_over() -> None:
    found = {f"schemas/{path.name}" for path in (ROOT / "schemas").iterdir()}
    assert found | {"asyncapi.json"} == set(documents())


# --- valid by their own standards


@EACH_TYPE
def test_a_schema_is_a_schema_in_both_dialects(kind: type[msgspec.Struct]) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMAS[kind])
    without_dialect = {k: v for k, v in SCHEMAS[kind].items() if k != "$schema"}
    jsonschema.Draft7Validator.check_schema(without_dialect)


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if "$ref" in node:
            yield node["$ref"]
            # Beside a reference nothing is read.
            assert set(node) == {"$ref"}
        for value in node.values():
            yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


def resolved(document: dict[str, Any], reference: str) -> Any:
    node: Any = document
    start, *names = reference.split("/")
    assert start == "#"
    for name in names:
        node = node[name]
    return node


def test_every_reference_leads_somewhere() -> None:
    for document in (DOCUMENT, *SCHEMAS.values()):
        for reference in references(document):
            assert isinstance(resolved(document, reference), dict), reference


def keywords(schema: Any) -> Iterator[str]:
    """Yield the words that a schema uses, not the names of what it describes."""
    if not isinstance(schema, dict):
        return
    for word, value in schema.items():
        yield word
        if word in ("properties", "$defs"):
            for each in value.values():
                yield from keywords(each)
        elif word in ("anyOf", "oneOf", "allOf"):
            for each in value:
                yield from keywords(each)
        elif word in ("items", "additionalProperties", "if", "then", "else"):
            yield from keywords(value)


def test_schemas_keep_to_the_words_that_all_readers_know() -> None:
    used = {word for schema in SCHEMAS.values() for word in keywords(schema)}
    assert used <= {
        *("$schema", "$id", "$defs", "$ref", "title", "description", "default"),
        *("type", "const", "enum", "pattern", "minLength", "maxLength", "minimum", "maximum"),
        *("properties", "required", "additionalProperties", "maxProperties"),
        *("items", "minItems", "anyOf", "oneOf", "allOf", "if", "then", "else"),
    }


def test_patterns_end_as_ecma_262_says() -> None:
    text = json.dumps(DOCUMENT)
    assert r"\\Z" not in text
    assert r"\\d" not in text


def test_the_document_is_asyncapi_3() -> None:
    jsonschema.Draft7Validator.check_schema(ASYNCAPI)
    jsonschema.Draft7Validator(ASYNCAPI).validate(DOCUMENT)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"asyncapi": "2.6.0"}, id="another version"),
        pytest.param({"info": {"title": "Waterclock"}}, id="no version of its own"),
        pytest.param({"operations": {"x": {"action": "publish"}}}, id="not an action"),
        pytest.param({"channels": {"x": {"address": 5}}}, id="no address"),
        pytest.param({"surprise": {}}, id="unknown part"),
    ],
)
def test_a_wrong_document_is_not_asyncapi_3(change: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft7Validator(ASYNCAPI).validate(DOCUMENT | change)


# --- as strict as what reads


@EACH_TYPE
def test_the_examples_fit(kind: type[msgspec.Struct]) -> None:
    assert examples(kind)
    for example in examples(kind):
        validator(kind).validate(example)


@EACH_TYPE
@settings(max_examples=15)
@given(data=st.data())
def test_what_we_write_fits(kind: type[msgspec.Struct], data: st.DataObject) -> None:
    message = data.draw(values(kind))
    if isinstance(message, EventData):
        _, payload = Chain(service="worker", writer="worker-1", key=b"key").seal(message)
    elif isinstance(message, Submission):
        # Which fields go together is for admission to say, not for the type.
        return
    else:
        payload = msgspec.json.encode(message)
    validator(kind).validate(json.loads(payload))


WRONG: tuple[Any, ...] = (
    None,
    True,
    "",
    "\0",
    "a.b",
    "é",
    "x" * 600,
    -1,
    1.5,
    2**63,
    10**30,
    [],
    [1],
    {},
)


def mutants(node: Any) -> Iterator[Any]:
    """Yield every variant of a JSON value that differs in one place."""
    if isinstance(node, dict):
        yield node | {"surplus": 1}
        for key, value in node.items():
            yield {other: its for other, its in node.items() if other != key}
            for changed in mutants(value):
                yield node | {key: changed}
    elif isinstance(node, list):
        for place, value in enumerate(node):
            for changed in mutants(value):
                yield [*node[:place], changed, *node[place + 1 :]]
    yield from WRONG


def unkind(example: dict[str, Any], mutant: Any) -> bool:
    return "kind" in example and isinstance(mutant, dict) and "kind" not in mutant


@EACH_TYPE
def test_schema_and_decoder_refuse_the_same(kind: type[msgspec.Struct]) -> None:
    tried = {True: 0, False: 0}
    for example in examples(kind):
        event = issubclass(kind, EventData)
        check = validator(kind)
        for mutant in mutants(example["data"] if event else example):
            candidate = example | {"data": mutant} if event else mutant
            try:
                msgspec.json.decode(json.dumps(mutant), type=kind)
                decodes = True
            except msgspec.ValidationError:
                decodes = False
            fits = check.is_valid(candidate)
            if decodes and not fits and (kind is Submission or unkind(example, mutant)):
                # Stricter on purpose: what goes together in a submission is tried below, and
                # only where nothing else can come may a message keep silent about its kind.
                continue
            assert fits == decodes, json.dumps(mutant)[:2000]
            tried[decodes] += 1
    # Otherwise this would compare nothing.
    assert tried[True] >= 1
    assert tried[False] >= 20


@pytest.mark.parametrize(
    ("body", "fits"),
    [
        pytest.param({"prompt": "x"}, True, id="a prompt"),
        pytest.param({"messages": [{"role": "user", "content": "x"}]}, True, id="a conversation"),
        pytest.param({"prompt": "x", "messages": None}, True, id="null is absent"),
        pytest.param({"resume": True}, True, id="asking again"),
        pytest.param({"prompt": "x", "resume": False}, True, id="not asking again"),
        pytest.param({}, False, id="neither"),
        pytest.param({"prompt": None}, False, id="null is nothing"),
        pytest.param({"messages": []}, False, id="an empty conversation"),
        pytest.param(
            {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, False, id="both"
        ),
        pytest.param({"resume": True, "prompt": "x"}, False, id="asking again with a prompt"),
        pytest.param({"resume": True, "model": "m"}, False, id="asking again with a model"),
    ],
)
def test_what_goes_together_in_a_submission(body: dict[str, Any], fits: bool) -> None:
    assert validator(Submission).is_valid({"id": "r1"} | body) == fits


@pytest.mark.parametrize("data", EVENTS, ids=lambda data: data.TYPE)
def test_an_envelope_that_readers_refuse_does_not_fit(data: EventData) -> None:
    subject, payload = sealed(data)
    event = json.loads(payload)
    wrong: list[dict[str, Any]] = [
        {"specversion": "0.3"},
        {"type": "waterclock.other.v1"},
        {"type": f"waterclock.{data.TYPE}.v2"},
        {"id": "7"},
        {"counter": -1},
        {"counter": 2**31},
        {"previous": "00"},
        {"nonce": "short"},
        {"fence": -1},
        {"source": ""},
        {"data": None},
        {"data": []},
    ]
    variants = [event | each for each in wrong]
    variants += [
        {name: value for name, value in event.items() if name != absent}
        for absent in ("specversion", "id", "source", "type", "writer", "counter", "nonce", "data")
    ]
    if hasattr(data, "tenant"):
        variants.append({name: value for name, value in event.items() if name != "tenant"})
    else:
        variants.append(event | {"tenant": "acme"})
    for variant in variants:
        assert not validator(type(data)).is_valid(variant)
        with pytest.raises(EventRefused):
            decode_event(subject, json.dumps(variant).encode())


# --- the document says everything


def test_every_channel_and_every_part_in_it_is_there() -> None:
    expected = {
        f"{party}.{action}.{name}"
        for name, publishers, readers in (
            *((c.name, c.publishers, c.readers) for c in CHANNELS),
            *((f"event_{f.event.TYPE}", f.publishers, f.readers) for f in EVENT_FLOWS),
        )
        for action, parties in (("send", publishers), ("receive", readers))
        for party in parties
    }
    assert set(DOCUMENT["operations"]) == expected
    for name, operation in DOCUMENT["operations"].items():
        assert resolved(DOCUMENT, operation["channel"]["$ref"])
        assert name.startswith(f"{operation['tags'][0]['name']}.{operation['action']}.")


def test_a_producer_is_told_all_its_messages() -> None:
    told = {
        message
        for name, operation in DOCUMENT["operations"].items()
        if name.startswith("producer.")
        for message in resolved(DOCUMENT, operation["channel"]["$ref"]).get("messages", ())
    }
    assert told == {"Submission", "DeliveredClaim", "Receipt", "Delta", "Restarted", "Final"}


def test_the_documents_examples_fit_the_documents_schemas() -> None:
    for message in DOCUMENT["components"]["messages"].values():
        assert message["examples"]
        schema = {"$ref": message["payload"]["$ref"], "components": DOCUMENT["components"]}
        for example in message["examples"]:
            jsonschema.Draft7Validator(schema).validate(example["payload"])
            if "headers" in message:
                jsonschema.Draft7Validator(message["headers"]).validate(example["headers"])


def test_parameters_are_those_of_the_address() -> None:
    for channel in DOCUMENT["channels"].values():
        for name in channel["parameters"]:
            assert f"{{{name}}}" in channel["address"]
        assert channel["address"].count("{") == len(channel["parameters"])


def test_types_and_fields_are_described_in_the_words_of_the_source() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    assert [name for name, schema in schemas.items() if not schema["description"]] == []
    admitted = schemas["Admitted"]["properties"]
    assert admitted["deadline_us"]["description"] == (
        "Unix time after which the answer is worthless. UTC microseconds since 1970."
    )
    assert admitted["arrival"] == {
        "description": (
            "When the bus stored the submission. Deadlines and the queue clock run from here."
        ),
        "allOf": [{"$ref": "#/components/schemas/Stamp"}],
    }
    # Inherited, and said by the named type alone.
    assert schemas["Completed"]["properties"]["attempt"]["description"] == (
        "Counts from 1; 0 means that no attempt was ever made."
    )


def test_the_document_names_no_address() -> None:
    (server,) = DOCUMENT["servers"].values()
    assert server["host"] == "{host}:{port}"
    assert "default" not in server["variables"]["host"]
