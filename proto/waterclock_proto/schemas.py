"""JSON Schemas and an AsyncAPI document for whoever speaks to the mesh without our code.

``python -m waterclock_proto.schemas`` writes ``proto/schemas/`` and ``proto/asyncapi.json`` from
the types, their docstrings and the flow table. They are checked in, and a test compares.

The schemas are JSON Schema 2020-12 with the keywords that draft-07 has too, because AsyncAPI 3.0
reads schemas in a superset of that draft. They say what a writer must write: where they are
stricter than our decoders (an envelope's ``type``, a submission's ``messages`` or ``prompt``), the
other readers check the same by other means.
"""

import ast
import inspect
import json
import re
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, cast

import msgspec
from msgspec import Struct

from waterclock_proto import envelope, events, names, requests, stamps
from waterclock_proto.envelope import TYPE_PREFIX, TYPE_SUFFIX, Envelope
from waterclock_proto.events import EVENT_TYPES, EventData
from waterclock_proto.flows import CHANNELS, EVENT_FLOWS, Channel, EventFlow, Party
from waterclock_proto.golden import EVENTS as EVENT_EXAMPLES
from waterclock_proto.golden import MESSAGES as MESSAGE_EXAMPLES
from waterclock_proto.golden import sealed
from waterclock_proto.stamps import Stamp
from waterclock_proto.subjects import (
    BODY_BYTES_MAX,
    EVENT_PREFIX,
    EVENTS,
    HOUR_S,
    NOBODY,
    STREAMS,
)

Schema = dict[str, Any]

ROOT = Path(__file__).resolve().parents[1]
MESSAGE_TYPES: tuple[type[Struct], ...] = (
    requests.Submission,
    requests.Receipt,
    requests.Delta,
    requests.Restarted,
    requests.Final,
    requests.DeliveredClaim,
    requests.Beat,
    Stamp,
)
DIALECT = "https://json-schema.org/draft/2020-12/schema"
DOCUMENT_VERSION = "1.0.0"


def documents() -> dict[str, str]:
    """The text of every generated file by its path under ``proto/``."""
    files = {f"schemas/{kind.TYPE}.v1.json": event_schema(kind) for kind in EVENT_TYPES}
    files |= {f"schemas/{file_name(kind)}.v1.json": message_schema(kind) for kind in MESSAGE_TYPES}
    files["asyncapi.json"] = asyncapi_document()
    return {
        path: json.dumps(content, indent=2, ensure_ascii=False) + "\n"
        for path, content in files.items()
    }


def event_schema(kind: type[EventData]) -> Schema:
    """One event as it stands on the tape, self-contained."""
    return _standalone(_event_component(kind), f"urn:waterclock:event:{kind.TYPE}:v1")


def message_schema(kind: type[Struct]) -> Schema:
    """One message, self-contained."""
    return _standalone(kind.__name__, f"urn:waterclock:message:{file_name(kind)}:v1")


def file_name(kind: type[Struct]) -> str:
    """``DeliveredClaim`` → ``delivered_claim``."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


# --- schemas


def _event_component(kind: type[EventData]) -> str:
    return f"{kind.__name__}Event"


@cache
def _components() -> dict[str, Schema]:
    """Every schema by name, with references of the form ``#/$defs/<name>``."""
    envelopes = {kind: cast("type[Struct]", Envelope[kind]) for kind in EVENT_TYPES}
    _, found = msgspec.json.schema_components(
        [*envelopes.values(), *MESSAGE_TYPES], ref_template="#/$defs/{name}"
    )
    documented = _documentation()
    components: dict[str, Schema] = {}
    for name, schema in found.items():
        generic = re.fullmatch(r"Envelope_(\w+)_", name)
        of = "Envelope" if generic else name
        title = f"{generic[1]}Event" if generic else name
        described: Schema = {"title": title, "description": documented.types.get(of, "")}
        described |= {
            key: value for key, value in schema.items() if key not in ("title", "description")
        }
        for field, its in described.get("properties", {}).items():
            _describe(its, documented.fields.get((of, field), ""))
        components[title] = _plain(described)
    for kind in EVENT_TYPES:
        _narrow_envelope(components[_event_component(kind)], kind)
    components["Submission"] |= _SUBMISSION_RULES
    return components


_SUBMISSION_RULES: Schema = {
    "if": {"properties": {"resume": {"const": True}}, "required": ["resume"]},
    "then": {"maxProperties": 2},
    "else": {
        "oneOf": [
            {
                "properties": {"messages": {"type": "array", "minItems": 1}},
                "required": ["messages"],
            },
            {"properties": {"prompt": {"type": "string"}}, "required": ["prompt"]},
        ]
    },
}
"""With ``resume``: the id and nothing else. Without: either a conversation or a prompt."""


def _narrow_envelope(schema: Schema, kind: type[EventData]) -> None:
    """Write down what an envelope's attributes are for this type of event."""
    properties = schema["properties"]
    hex_digits = "^[0-9a-f]{%d}$"
    properties["id"]["pattern"] = "^.+/(0|[1-9][0-9]*)$"
    properties["source"]["pattern"] = "^/waterclock/[a-z]+$"
    properties["type"] = {
        "description": properties["type"].get("description", ""),
        "const": f"{TYPE_PREFIX}{kind.TYPE}{TYPE_SUFFIX}",
    }
    properties["previous"]["pattern"] = hex_digits % 64
    properties["nonce"]["pattern"] = hex_digits % 32
    if "tenant" in kind.__struct_fields__:
        tenant = msgspec.json.schema(names.Tenant)
        properties["tenant"] = {
            "description": properties["tenant"]["description"],
            **_plain(tenant),
        }
        schema["required"] = [*schema["required"], "tenant"]
    else:
        properties["tenant"] = {"description": "Absent: it is about no tenant.", "const": ""}
    schema["description"] = f"{schema['description']}\n\n{_doc(kind)}"


def _describe(schema: Schema, description: str) -> None:
    if description:
        schema["description"] = description


def _plain(schema: Any) -> Any:
    """The same schema in the words that 2020-12, draft-07 and AsyncAPI share."""
    if isinstance(schema, list):
        return [_plain(each) for each in cast("list[Any]", schema)]
    if not isinstance(schema, dict):
        return schema
    plain: Schema = {}
    for key, value in cast(Schema, schema).items():
        if key == "pattern":
            plain[key] = value.replace(r"\Z", "$")
        elif key == "enum" and len(value) == 1:
            plain["const"] = value[0]
        else:
            plain[key] = _plain(value)
    if "$ref" in plain and len(plain) > 1:
        # Readers of draft-07 ignore whatever stands beside a reference.
        plain["allOf"] = [{"$ref": plain.pop("$ref")}]
    return plain


def _references(schema: Any) -> set[str]:
    if isinstance(schema, list):
        return {name for each in cast("list[Any]", schema) for name in _references(each)}
    if not isinstance(schema, dict):
        return set()
    schema = cast(Schema, schema)
    own = {schema["$ref"].removeprefix("#/$defs/")} if "$ref" in schema else set[str]()
    return own | {name for value in schema.values() for name in _references(value)}


def _standalone(name: str, identifier: str) -> Schema:
    components = _components()
    needed: set[str] = set()
    fresh = {name}
    while fresh:
        fresh = {found for each in fresh for found in _references(components[each])} - needed
        needed |= fresh
    schema: Schema = {"$schema": DIALECT, "$id": identifier} | components[name]
    if needed:
        schema["$defs"] = {each: components[each] for each in sorted(needed)}
    return schema


# --- what the source says about types and fields


class _Documentation(Struct, frozen=True):
    types: dict[str, str]
    fields: dict[tuple[str, str], str]
    """By (type, field), inherited ones included."""


@cache
def _documentation() -> _Documentation:
    """Docstrings of types, fields and named types, which the running program has forgotten."""
    trees = [
        ast.parse(inspect.getsource(each)) for each in (names, stamps, events, requests, envelope)
    ]
    named_types = {name: doc for tree in trees for name, doc, _ in _documented(tree.body)}
    own: dict[tuple[str, str], str] = {}
    bases: dict[str, list[str]] = {}
    types: dict[str, str] = {}
    for tree in trees:
        for node in tree.body:
            if not isinstance(node, ast.ClassDef):
                continue
            bases[node.name] = [base.id for base in node.bases if isinstance(base, ast.Name)]
            types[node.name] = _markdown(ast.get_docstring(node) or "")
            for name, doc, annotation in _documented(node.body):
                words = [n.id for n in ast.walk(annotation) if isinstance(n, ast.Name)]
                # A named type says what a field does not; beside a field's own words only units.
                said = [named_types[w] for w in words if named_types.get(w)]
                units = [named_types[w] for w in words if w.endswith(("Us", "Ns", "Ms"))]
                own[node.name, name] = " ".join([doc, *units] if doc else said).strip()

    def inherited(cls: str) -> dict[str, str]:
        found: dict[str, str] = {}
        for base in bases.get(cls, []):
            found |= inherited(base)
        return found | {name: doc for (of, name), doc in own.items() if of == cls}

    fields = {(cls, name): doc for cls in bases for name, doc in inherited(cls).items()}
    return _Documentation(types, fields)


def _documented(body: list[ast.stmt]) -> list[tuple[str, str, ast.expr]]:
    """(name, docstring or empty, annotation) of a class's fields, or (name, docstring, value) of a
    module's assignments.
    """
    found: list[tuple[str, str, ast.expr]] = []
    for node, following in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name, annotation = node.target.id, node.annotation
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name, annotation = node.targets[0].id, node.value
        else:
            continue
        doc = ""
        if (
            isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
            and isinstance(following.value.value, str)
        ):
            doc = _markdown(inspect.cleandoc(following.value.value))
        found.append((name, doc, annotation))
    return found


def _markdown(docstring: str) -> str:
    """A docstring as CommonMark: paragraphs on one line each."""
    paragraphs = [" ".join(each.split()) for each in docstring.split("\n\n")]
    return "\n\n".join(paragraphs).replace("``", "`")


def _doc(kind: type[Struct]) -> str:
    return _documentation().types[kind.__name__]


# --- AsyncAPI


def asyncapi_document() -> Schema:
    """The AsyncAPI 3.0.0 document of the mesh: all parties' channels and operations.

    An operation's name begins with whose it is, and its tag says so too.
    """
    channels: Schema = {}
    operations: Schema = {}
    messages: Schema = {}
    for channel in CHANNELS:
        channels[channel.name] = _channel(channel, messages)
        for party, action in _uses(channel.publishers, channel.readers):
            operations[f"{party}.{action}.{channel.name}"] = _operation(
                party, action, channel.name, channel.why
            )
    for flow in EVENT_FLOWS:
        name = f"event_{flow.event.TYPE}"
        channels[name] = _event_channel(flow, messages)
        for party, action in _uses(flow.publishers, flow.readers):
            operations[f"{party}.{action}.{name}"] = _operation(
                party, action, name, _doc(flow.event).partition("\n")[0]
            )
    # The producer's submission is the one message that is always answered.
    operations["producer.send.request"]["reply"] = {"channel": {"$ref": "#/channels/receipt"}}
    schemas = cast(
        Schema,
        json.loads(json.dumps(_components()).replace('"#/$defs/', '"#/components/schemas/')),
    )
    return {
        "asyncapi": "3.0.0",
        "id": "urn:waterclock:mesh",
        "info": {
            "title": "Waterclock",
            "version": DOCUMENT_VERSION,
            "description": _INTRODUCTION,
            "license": {"name": "Apache-2.0"},
        },
        "defaultContentType": "application/json",
        "servers": {"bus": _SERVER},
        "channels": channels,
        "operations": operations,
        "components": {
            "schemas": schemas,
            "messages": messages,
            "parameters": _PARAMETERS,
            "securitySchemes": {"password": {"type": "userPassword", "description": _PASSWORD}},
        },
    }


_INTRODUCTION = f"""\
Waterclock serves LLM requests and keeps evidence of when each one waited and when it ran.

**To submit a request**, publish a `Submission` of at most {BODY_BYTES_MAX} bytes on \
`wc.request.<tenant>` with a reply subject of your own (what NATS clients call a request). The bus \
answers there with `{{"stream": "REQUESTS", "seq": <n>}}` once the submission is stored, or with \
`{{"error": {{...}}}}` if it is not. No answer means that you do not know: publish the same bytes \
again, as often as you like; a known id never runs twice. Send no `Nats-*` headers, `Nats-Msg-Id` \
least of all.

**Before you publish**, subscribe to `wc.receipt.<tenant>.*`, `wc.final.<tenant>.*` and, for \
deltas, `wc.answer.<tenant>.*`: these are passed on and not kept for you. Whoever missed a final \
publishes the submission `{{"id": <id>, "resume": true}}` and finds it on the answer subject, for \
an hour.

Times are integers: `_us` and `_ns` since 1970 in UTC or, for durations, plain differences. \
Integers reach 2^63 - 1; read them with more than a double's 53 bits. Names are 1 to 64 of \
`A-Z a-z 0-9 _ -`, and never a lone `_`, which stands in subjects for nobody. Readers of events \
and answers ignore fields that they do not know; a submission with an unknown field is refused.

Events are CloudEvents 1.0 in structured JSON mode, kept in the stream `{EVENTS.name}`. Only the \
mesh's own account reaches them, and what is described here for events is for whoever runs or \
extends a mesh."""

_PASSWORD = "Each tenant has a user of its own, in a bus account of its own."

_SERVER: Schema = {
    "host": "{host}:{port}",
    "protocol": "nats",
    "description": "The mesh's bus: a NATS server with JetStream.",
    "variables": {
        "host": {"description": "Whoever runs the mesh says it."},
        "port": {"default": "4222", "description": "4222 unless they say otherwise."},
    },
    "security": [{"$ref": "#/components/securitySchemes/password"}],
}

_PARAMETERS: Schema = {
    "tenant": {
        "description": "The tenant's name.",
        "examples": ["acme"],
    },
    "id": {
        "description": "The request's id, which the producer chose.",
        "location": "$message.payload#/id",
        "examples": ["r-1001"],
    },
    "pool": {"description": "The pool's name.", "examples": ["zh"]},
    "sequence": {"description": "A position in REQUESTS.", "examples": ["42"]},
    "worker": {
        "description": f"One life of a worker, `<name>-<random>`; `{NOBODY}` where there is none.",
        "examples": ["gpu3-9f21c4"],
    },
}


def _uses(publishers: tuple[Party, ...], readers: tuple[Party, ...]) -> list[tuple[Party, str]]:
    sends: list[tuple[Party, str]] = [(each, "send") for each in publishers]
    return [*sends, *((each, "receive") for each in readers)]


def _operation(party: Party, action: str, channel: str, summary: str) -> Schema:
    return {
        "action": action,
        "channel": {"$ref": f"#/channels/{channel}"},
        "summary": summary,
        "tags": [{"name": party}],
    }


def _parameters(address: str) -> Schema:
    found = re.findall(r"\{(\w+)\}", address)
    return {"parameters": {each: {"$ref": f"#/components/parameters/{each}"} for each in found}}


def _channel(channel: Channel, messages: Schema) -> Schema:
    described: Schema = {"address": channel.address, "description": channel.why}
    described |= _parameters(channel.address)
    if channel.stream:
        (spec,) = (each for each in STREAMS if each.name == channel.stream)
        described["description"] += (
            f" Kept in the stream `{spec.name}` for {spec.max_age_s // HOUR_S} h."
        )
    if channel.name == "edge":
        used = {"EdgeSubmission": _edge_message()}
    else:
        used = {kind.__name__: _message(kind) for kind in channel.messages}
    messages |= used
    if used:
        described["messages"] = {name: {"$ref": f"#/components/messages/{name}"} for name in used}
    return described


def _message(kind: type[Struct]) -> Schema:
    examples = [
        {"name": name, "payload": json.loads(msgspec.json.encode(example))}
        for name, example in MESSAGE_EXAMPLES.items()
        if type(example) is kind
    ]
    return {
        "name": kind.__name__,
        "title": kind.__name__,
        "summary": _doc(kind).partition("\n")[0],
        "contentType": "application/json",
        "payload": {"$ref": f"#/components/schemas/{kind.__name__}"},
        "examples": examples,
    }


def _edge_message() -> Schema:
    header = requests.EDGE_ACCEPTED_HEADER
    stamp = msgspec.json.encode(MESSAGE_EXAMPLES["edge_accepted"]).decode()
    message = _message(requests.Submission)
    message |= {"name": "EdgeSubmission", "title": "EdgeSubmission"}
    message["headers"] = {
        "type": "object",
        "properties": {
            header: {
                "type": "string",
                "contentMediaType": "application/json",
                "description": "A `Stamp` as JSON: when the edge accepted the request.",
            }
        },
        "required": [header],
    }
    message["examples"] = [
        example | {"headers": {header: stamp}} for example in message["examples"]
    ]
    return message


def _event_channel(flow: EventFlow, messages: Schema) -> Schema:
    kind = flow.event
    tenant = "{tenant}" if "tenant" in kind.__struct_fields__ else NOBODY
    scope = f"{{{kind.SCOPE}}}" if kind.SCOPE else NOBODY
    address = f"{EVENT_PREFIX}{kind.TYPE}.{tenant}.{scope}"
    name = _event_component(kind)
    (example,) = (each for each in EVENT_EXAMPLES if type(each) is kind)
    messages[name] = {
        "name": f"{TYPE_PREFIX}{kind.TYPE}{TYPE_SUFFIX}",
        "title": name,
        "summary": _doc(kind).partition("\n")[0],
        "contentType": "application/cloudevents+json",
        "payload": {"$ref": f"#/components/schemas/{name}"},
        "examples": [{"name": kind.TYPE, "payload": json.loads(sealed(example)[1])}],
    }
    return {
        "address": address,
        "description": f"{_doc(kind)}\n\nKept in the stream `{EVENTS.name}`.",
        **_parameters(address),
        "messages": {name: {"$ref": f"#/components/messages/{name}"}},
    }


def write(root: Path, files: Mapping[str, str]) -> None:
    """Write the generated files, and remove schemas that nothing generates any more."""
    for path in (root / "schemas").glob("*.json"):
        if f"schemas/{path.name}" not in files:
            path.unlink()
    for path, text in files.items():
        (root / path).parent.mkdir(exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(ROOT, documents())
    sys.stdout.write(f"wrote {len(documents())} files under {ROOT}\n")
