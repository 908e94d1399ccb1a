"""A producer in any language: a NATS client, a JSON library, and the AsyncAPI document.

Nothing of ours is imported by the producer here. Addresses and shapes come from the document, and
all that the mesh says is held against it; so are all events of the tape.
"""

import asyncio
import hashlib
import hmac
import json
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from jsonschema import Draft202012Validator
from nats.aio.client import Client
from nats.aio.msg import Msg

from drill import Drill, drilled
from flow_plan import SLOW, flow_plan
from open_load import MARK_EN, LoadShape

pytestmark = pytest.mark.asyncio(loop_scope="module")

DOCUMENT: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "proto" / "asyncapi.json").read_text(encoding="utf-8")
)
WAIT_S = 8.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def drill(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Drill]:
    async with drilled(tmp_path_factory.mktemp("mesh"), flow_plan()) as running:
        yield running


def address(channel: str, **parameters: str) -> str:
    """The subject of a channel of the document."""
    text: str = DOCUMENT["channels"][channel]["address"]
    for name in DOCUMENT["channels"][channel].get("parameters", {}):
        text = text.replace(f"{{{name}}}", parameters.get(name, "*"))
    assert "{" not in text
    return text


def validator(schema: str) -> Draft202012Validator:
    return Draft202012Validator({"$ref": f"#/components/schemas/{schema}", **DOCUMENT})


VALIDATORS = {name: validator(name) for name in DOCUMENT["components"]["schemas"]}


def schemas_of(channel: str) -> list[str]:
    """The schemas of the messages that a channel may carry."""
    found: list[str] = []
    for message in DOCUMENT["channels"][channel]["messages"].values():
        name = message["$ref"].rpartition("/")[2]
        payload = DOCUMENT["components"]["messages"][name]["payload"]["$ref"]
        found.append(payload.rpartition("/")[2])
    return found


def check(channel: str, payload: bytes) -> dict[str, Any]:
    """The message, which must be one that the document allows on this channel."""
    message = json.loads(payload)
    wrong = {
        name: [error.message for error in VALIDATORS[name].iter_errors(message)]
        for name in schemas_of(channel)
    }
    assert any(not errors for errors in wrong.values()), f"{channel}: {message} {wrong}"
    return message


class PlainProducer:
    """What a program of fifty lines does in any language."""

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.client = Client()
        self.heard: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
        self._news = asyncio.Event()

    async def connect(self, url: str, password: str) -> None:
        await self.client.connect(url, user=self.tenant, password=password)
        for channel in ("receipt", "answer", "final"):
            await self.client.subscribe(
                address(channel, tenant=self.tenant), cb=self._listener(channel)
            )
        await self.client.flush()

    def _listener(self, channel: str) -> Any:
        async def on_message(message: Msg) -> None:
            request_id = message.subject.rpartition(".")[2]
            self.heard[channel, request_id].append(check(channel, message.data))
            self._news.set()

        return on_message

    async def submit(self, submission: dict[str, Any]) -> bytes:
        errors = [error.message for error in VALIDATORS["Submission"].iter_errors(submission)]
        assert errors == []
        body = json.dumps(submission, ensure_ascii=False).encode()
        await self.publish(body)
        return body

    async def publish(self, body: bytes) -> dict[str, Any]:
        reply = await self.client.request(
            address("request", tenant=self.tenant), body, timeout=WAIT_S
        )
        stored = json.loads(reply.data)
        assert stored["stream"] == "REQUESTS"
        assert stored["seq"] >= 1
        return stored

    async def wait(self, channel: str, request_id: str, count: int = 1) -> dict[str, Any]:
        async with asyncio.timeout(WAIT_S):
            while len(self.heard[channel, request_id]) < count:
                self._news.clear()
                await self._news.wait()
        return self.heard[channel, request_id][count - 1]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plain(drill: Drill) -> AsyncIterator[PlainProducer]:
    producer = PlainProducer("globex")
    await producer.connect(drill.mesh.bus_url, drill.mesh.access.tenants["globex"].password)
    yield producer
    await producer.client.close()


async def test_a_request_gets_a_receipt_deltas_and_a_final(
    drill: Drill, plain: PlainProducer
) -> None:
    body = await plain.submit(
        {
            "id": "plain-1",
            "messages": [{"role": "user", "content": f"Wie geht eine {MARK_EN}? 水钟怎么走?"}],
            "max_tokens": 12,
            "ignore_eos": True,
            "stream": True,
            "deadline_ms": 20_000,
            "sampling": {"temperature": "0.7", "seed": 7},
        }
    )
    receipt = await plain.wait("receipt", "plain-1")
    final = await plain.wait("final", "plain-1")
    assert receipt["outcome"] == "admitted"
    # The proof that a receipt is about these bytes needs nothing but HMAC.
    commitment = json.loads(receipt["event"])["data"]["body_commitment"]
    salt = bytes.fromhex(receipt["salt"])
    assert hmac.new(salt, body, hashlib.sha256).hexdigest() == commitment
    deltas = plain.heard["answer", "plain-1"]
    assert "".join(delta["text"] for delta in deltas) == final["text"]
    assert sum(delta["tokens"] for delta in deltas) == final["usage"]["completion_tokens"] == 12
    assert final["outcome"] == "completed"
    timings = final["timings"]
    assert sum(timings["segments"].values()) == timings["total_us"]
    await drill.check()


async def test_sending_again_and_asking_again_run_nothing_twice(
    drill: Drill, plain: PlainProducer
) -> None:
    body = await plain.submit({"id": "plain-2", "prompt": "Once, and only once, please."})
    final = await plain.wait("final", "plain-2")
    await plain.publish(body)
    again = await plain.wait("receipt", "plain-2", 2)
    assert (again["outcome"], again["resubmitted_outcome"]) == ("resubmitted", "completed")
    assert await plain.wait("answer", "plain-2") == final
    await plain.submit({"id": "plain-2", "resume": True})
    assert await plain.wait("answer", "plain-2", 2) == final
    report = await drill.check()
    assert len(report.recount.requests["globex", "plain-2"].attempts) == 1


async def test_a_running_request_can_be_cancelled(drill: Drill, plain: PlainProducer) -> None:
    await plain.submit(
        {
            "id": "plain-3",
            "model": SLOW,
            "prompt": "A long story.",
            "max_tokens": 900,
            "ignore_eos": True,
            "stream": True,
        }
    )
    await plain.wait("answer", "plain-3", 3)
    await plain.client.publish(address("cancel", tenant="globex", id="plain-3"), b"")
    final = await plain.wait("final", "plain-3")
    assert final["outcome"] == "cancelled"
    assert 3 <= final["usage"]["completion_tokens"] < 900
    await drill.check()


@pytest.mark.parametrize(
    ("body", "request_id", "reason"),
    [
        pytest.param({"id": "plain-4", "promt": "?"}, "plain-4", "unknown_field", id="a typo"),
        pytest.param({"id": "plain-5"}, "plain-5", "invalid_field", id="nothing asked"),
        pytest.param({"prompt": "?"}, "_", "invalid_field", id="no id"),
        pytest.param({"id": "plain-6", "prompt": "?", "max_tokens": "many"}, "plain-6",
                     "invalid_field", id="a word for a number"),
    ],
)  # fmt: skip
async def test_what_the_document_does_not_allow_is_refused_by_name(
    drill: Drill, plain: PlainProducer, body: dict[str, Any], request_id: str, reason: str
) -> None:
    assert list(VALIDATORS["Submission"].iter_errors(body))
    await plain.publish(json.dumps(body).encode())
    receipt = await plain.wait("receipt", request_id)
    assert (receipt["outcome"], receipt["reason"]) == ("rejected", reason)
    assert receipt["detail"]
    await drill.check()


async def test_the_producers_own_stamps_can_be_told(drill: Drill, plain: PlainProducer) -> None:
    await plain.submit({"id": "plain-7", "prompt": "When did it come?", "sent_us": 1})
    await plain.wait("final", "plain-7")
    claim = {"id": "plain-7", "sent_us": 1, "last_token_us": 2}
    assert not list(VALIDATORS["DeliveredClaim"].iter_errors(claim))
    await plain.client.publish(address("delivered", tenant="globex"), json.dumps(claim).encode())
    await asyncio.sleep(0.3)
    report = await drill.check()
    assert report.recount.kinds["delivered"] == 1


async def test_every_event_of_the_tape_is_as_the_document_says(drill: Drill) -> None:
    await drill.producers.drive(LoadShape(seed=5, rate=60, seconds=0.5))
    await drill.check()
    tape = await drill.watch.stream("EVENTS")
    seen: set[str] = set()
    for stored in tape:
        kind = stored.subject.split(".")[2]
        seen.add(kind)
        check(f"event_{kind}", stored.payload)
        channel = address(f"event_{kind}").split(".")
        subject = stored.subject.split(".")
        assert len(subject) == len(channel)
        assert all(a in ("*", b) for a, b in zip(channel, subject, strict=True))
    assert seen >= {"admitted", "rejected", "resubmitted", "cancel_requested", "completed"}
