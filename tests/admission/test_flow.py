"""From a producer's publish to its receipt and its answer; scheduler and worker are FakeMesh."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import pytest

from admission_host import (
    API_KEYS,
    MESH_KEY,
    AdmissionHost,
    TestProducer,
    body,
    eventually,
    read_events,
)
from broker_process import BrokerProcess
from fake_mesh import FakeMesh, Plan
from waterclock_proto.envelope import decode_event
from waterclock_proto.events import (
    AdmissionElected,
    Admitted,
    ContractActivated,
    Delivered,
    EventData,
    LogOpened,
    Rejected,
)
from waterclock_proto.requests import (
    DeliveredClaim,
    Final,
    body_commitment,
)
from waterclock_proto.subjects import (
    cancel_subject,
    delivered_subject,
    request_subject,
)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, AdmissionHost]]:
    """A bus and an admission for all tests here: they use ids of their own."""
    folder = tmp_path_factory.mktemp("admission")
    broker = BrokerProcess(folder / "broker").start()
    try:
        with AdmissionHost(folder / "admission", broker.url) as host:
            yield broker.url, host
    finally:
        broker.stop()


@pytest.fixture
async def mesh(running: tuple[str, AdmissionHost]) -> AsyncIterator[FakeMesh]:
    async with FakeMesh(running[0], MESH_KEY) as fake:
        yield fake


@pytest.fixture
async def producer(running: tuple[str, AdmissionHost]) -> AsyncIterator[TestProducer]:
    async with TestProducer(running[0]) as made:
        yield made


def finals(producer: TestProducer, request_id: str) -> list[Final]:
    return [
        msgspec.json.decode(payload, type=Final)
        for subject, payload in producer.answers
        if subject.endswith(f".{request_id}") and b'"kind":"final"' in payload
    ]


async def final(producer: TestProducer, request_id: str, count: int = 1) -> Final:
    async with asyncio.timeout(10):
        while len(found := finals(producer, request_id)) < count:
            await producer.change()
    return found[-1]


async def test_a_receipt_is_the_event_on_the_tape(mesh: FakeMesh, producer: TestProducer) -> None:
    payload = body("flow-1", sent_us=5, session="s")
    receipt = await producer.submit_bytes(payload)
    assert (receipt.outcome, receipt.id, receipt.tenant) == ("admitted", "flow-1", "acme")
    found = await mesh.bus.message("EVENTS", receipt.sequence)
    assert found is not None
    subject, stored, stored_ns = found
    assert (stored.decode(), stored_ns) == (receipt.event, receipt.stored_ns)
    envelope = decode_event(subject, stored)
    admitted = envelope.data
    assert isinstance(admitted, Admitted)
    assert admitted.requests_sequence == receipt.requests_sequence
    assert admitted.number == receipt.number
    assert admitted.tier == "gold"
    assert admitted.edge_accepted is None
    assert admitted.sent_us == 5
    assert len(admitted.session_fingerprint) == 32
    assert admitted.body_commitment == body_commitment(bytes.fromhex(receipt.salt), payload)
    assert admitted.arrival.wall_us <= admitted.decided.wall_us + 1_000_000
    assert receipt.incarnation
    assert envelope.fence >= 1
    await mesh.until(lambda seen: "flow-1" in seen.ids)
    assert (await final(producer, "flow-1")).text == "Hello, world"


async def test_numbers_go_on_one_by_one(producer: TestProducer) -> None:
    receipts = [await producer.submit(f"number-{place}") for place in range(3)]
    bad = await producer.submit_bytes(b"{")
    numbers = [receipt.number for receipt in [*receipts, bad]]
    assert numbers[0] is not None
    assert numbers == list(range(numbers[0], numbers[0] + 4))


@pytest.mark.parametrize(
    ("payload", "reason", "request_id"),
    [
        (b"", "empty_body", ""),
        (b"{", "malformed", ""),
        (b'{"id":"bad-1","prompt":"x","nonsense":1}', "unknown_field", "bad-1"),
        (b'{"id":"bad-2","prompt":"x","max_tokens":-5}', "invalid_field", "bad-2"),
        (body("bad-3", model="other"), "unknown_model", "bad-3"),
        (body("bad-4", deadline_us=1), "deadline_passed", "bad-4"),
        (body("bad-5", deadline_ms=10**11), "deadline_too_far", "bad-5"),
        (body("bad-6", max_tokens=2049), "invalid_field", "bad-6"),
        (body("bad-7", prompt="word " * 5000), "prompt_too_long", "bad-7"),
        (b'{"id":"bad-8","resume":true}', "unknown_request", "bad-8"),
    ],
)
async def test_a_refusal_has_its_reason(
    producer: TestProducer, payload: bytes, reason: str, request_id: str
) -> None:
    receipt = await producer.submit_bytes(payload)
    assert (receipt.outcome, receipt.reason, receipt.id) == ("rejected", reason, request_id)
    assert receipt.detail
    event = msgspec.json.decode(receipt.event)["data"]
    assert event["reason"] == reason
    assert event["number"] == receipt.number


async def test_a_tenant_that_is_not_configured_is_refused_and_numbered(
    running: tuple[str, AdmissionHost],
) -> None:
    async with TestProducer(running[0], tenant="stranger") as stranger:
        receipt = await stranger.submit("s1")
        assert (receipt.reason, receipt.number) == ("unknown_tenant", 1)


async def test_the_same_bytes_again_bring_the_same_answer_and_run_once(
    mesh: FakeMesh, producer: TestProducer
) -> None:
    go = asyncio.Event()
    mesh.plan = lambda _a, _b: Plan(before_first=go)
    first = await producer.submit("again")
    open_still = await producer.submit("again")
    assert (open_still.outcome, open_still.resubmitted_outcome) == ("resubmitted", "open")
    go.set()
    await final(producer, "again")

    async def ended_is_known() -> bool:
        return (await producer.submit("again")).resubmitted_outcome != "open"

    # Admission has to read the end, too.
    await eventually(ended_is_known)
    ended = await producer.submit("again")
    assert ended.resubmitted_outcome == "completed"
    assert (await final(producer, "again", 2)).text == "Hello, world"
    assert mesh.seen.ids.count("again") == 1
    event = msgspec.json.decode(ended.event)["data"]
    assert event["first_requests_sequence"] == first.requests_sequence
    resumed = await producer.submit_bytes(b'{"id":"again","resume":true}')
    assert resumed.resubmitted_outcome == "completed"
    await final(producer, "again", 3)
    other = await producer.submit("again", prompt="something else")
    assert (other.outcome, other.reason) == ("rejected", "id_reused")


async def test_an_end_by_the_scheduler_reaches_the_producer(
    mesh: FakeMesh, producer: TestProducer
) -> None:
    mesh.plan = lambda _a, _b: Plan(end="expired")
    await producer.submit("late")
    expired = await final(producer, "late")
    assert (expired.outcome, expired.text) == ("expired", "")
    assert expired.timings is not None
    assert sum(expired.timings.segments.values()) == expired.timings.total_us
    kept = await producer.bus.final("acme", "late")
    assert kept is not None
    assert msgspec.json.decode(kept, type=Final) == expired
    mesh.plan = lambda _a, _b: Plan(
        end="rejected", reject_reason="load_shed", retry_after_ms=77, detail="too much"
    )
    await producer.submit("shed")
    shed = await final(producer, "shed")
    assert (shed.outcome, shed.reject_reason, shed.retry_after_ms, shed.detail) == (
        "rejected",
        "load_shed",
        77,
        "too much",
    )


async def test_a_cancel_becomes_one_event(mesh: FakeMesh, producer: TestProducer) -> None:
    never = asyncio.Event()
    mesh.plan = lambda _a, _b: Plan(before_first=never)
    producer.bus.publish(cancel_subject("acme", "stop-2"), b"")
    await producer.submit("stop-1")
    for _ in range(3):
        producer.bus.publish(cancel_subject("acme", "stop-1"), b"")
    await mesh.until(lambda seen: len(seen.cancels) >= 2)
    assert (await final(producer, "stop-1")).outcome == "cancelled"
    producer.bus.publish(cancel_subject("acme", "stop-1"), b"")
    producer.bus.publish(cancel_subject("acme", "stop-2"), b"")
    await producer.submit("after")
    await mesh.until(lambda seen: "after" in seen.ids)
    assert sorted(cancel.id for cancel in mesh.seen.cancels) == ["stop-1", "stop-2"]
    assert {cancel.reason for cancel in mesh.seen.cancels} == {"producer"}


async def test_a_claim_is_quoted_once(mesh: FakeMesh, producer: TestProducer) -> None:
    await producer.submit("claimed")
    await final(producer, "claimed")
    claim = msgspec.json.encode(DeliveredClaim(id="claimed", sent_us=1, last_token_us=2))
    for payload in (claim, claim, b"nonsense", claim + b" " * 600):
        producer.bus.publish(delivered_subject("acme"), payload)
    await producer.submit("after-claim")
    quoted = await events(mesh, Delivered)
    assert [(d.id, d.sent_us, d.last_token_us) for d in quoted] == [("claimed", 1, 2)]


async def test_load_is_shed_while_every_pool_refuses(
    mesh: FakeMesh, producer: TestProducer
) -> None:
    mesh.set_rung(refuse=True, retry_after_ms=1234)
    async with asyncio.timeout(5):
        place = 0
        while True:
            receipt = await producer.submit(f"shed-{place}")
            if receipt.outcome == "rejected":
                break
            place += 1
    assert (receipt.reason, receipt.retry_after_ms) == ("load_shed", 1234)
    # What came to an end is still told, whatever the load is.
    again = await producer.submit(f"shed-{place}")
    assert again.outcome == "rejected"
    mesh.set_rung(refuse=False)

    async def is_let_in() -> bool:
        return (await producer.submit(f"shed-{place}")).outcome == "admitted"

    await eventually(is_let_in)


async def test_a_flood_of_malformed_submissions_is_folded(producer: TestProducer) -> None:
    count = 300
    before = await producer.submit("before-flood")
    sequences: list[int] = []
    for _ in range(count):
        producer.bus.store_soon(request_subject("acme"), b"{", sequences.append)
    await eventually(lambda: len(sequences) == count)
    after = await producer.submit("after-flood")

    async def refused() -> list[Rejected]:
        return [
            data
            for data in await events(producer, Rejected)
            if data.requests_sequence > before.requests_sequence
        ]

    async def all_are_counted() -> bool:
        return sum(data.count for data in await refused()) >= count

    await eventually(all_are_counted)
    folded = await refused()
    assert sum(d.count for d in folded) == count
    assert len(folded) < count / 3
    assert before.number is not None
    used = sorted(
        number for d in folded if d.number for number in range(d.number, d.number + d.count)
    )
    assert after.number is not None
    assert sorted([*used, after.number]) == list(
        range(before.number + 1, before.number + count + 2)
    )
    # One receipt an event, and not one a submission.
    assert len([r for r in producer.receipts if r.reason == "malformed"]) <= len(folded)


async def test_the_beginning_of_the_tape_says_who_decides(mesh: FakeMesh) -> None:
    found = await mesh.bus.message("EVENTS", 1)
    assert found is not None
    assert isinstance(decode_event(found[0], found[1]).data, LogOpened)
    assert len(await events(mesh, AdmissionElected)) == 1
    contracts = await events(mesh, ContractActivated)
    assert sorted(c.tenant for c in contracts) == [
        "acme",
        "globex",
    ]


async def test_no_text_stands_on_the_tape(mesh: FakeMesh, producer: TestProducer) -> None:
    await producer.submit("secret", prompt="Geheimnis", session="Geheimnis")
    await producer.submit_bytes(b'{"id":"secret2","prompt":"x","Geheimnis":"Geheimnis"}')
    await final(producer, "secret")
    _, last = await mesh.bus.stream_state("EVENTS")
    for sequence in range(1, last + 1):
        found = await mesh.bus.message("EVENTS", sequence)
        assert found is not None
        assert b"Geheimnis" not in found[1]


async def test_http_and_nats_are_one_tenant(
    running: tuple[str, AdmissionHost], mesh: FakeMesh, producer: TestProducer
) -> None:
    """A request that came over HTTP is known to a producer of the same tenant."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(
        base_url=f"{running[1].base_url}/v1", api_key=API_KEYS["acme"], max_retries=0
    ) as client:
        await client.chat.completions.create(
            model="sim-8b",
            messages=[{"role": "user", "content": "hi"}],
            extra_headers={"Idempotency-Key": "both-ways"},
        )
    resumed = await producer.submit_bytes(b'{"id":"both-ways","resume":true}')
    assert resumed.outcome == "resubmitted"
    async with TestProducer(running[0], tenant="globex") as other:
        foreign = await other.submit_bytes(b'{"id":"both-ways","resume":true}')
        assert foreign.reason == "unknown_request"


async def test_a_message_on_the_edges_subject_is_believed_its_stamp(
    mesh: FakeMesh, producer: TestProducer
) -> None:
    """And one on a tenant's own subject is not, whatever header it carries."""
    header = {"Wc-Edge-Accepted": '{"wall_us":1,"source":"edge"}'}
    sequence = await producer.bus.store(request_subject("acme"), body("forged"), header)
    receipt = await producer.receipt(sequence)
    assert msgspec.json.decode(receipt.event)["data"].get("edge_accepted") is None


async def events(where: FakeMesh | TestProducer, kind: type[EventData]) -> list[Any]:
    """Every event of one type, in the order of the tape."""
    return [envelope.data for envelope in await read_events(where.bus, kind)]
