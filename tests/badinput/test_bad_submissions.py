"""What no producer should send: each gets a refusal that says what was wrong, and nothing else.

``bodies/<reason>/<what is wrong>`` are the exact bytes; large ones are made by ``bad_bodies``.
"""

import asyncio
import contextlib
import http.client
import itertools
import json
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from nats.aio.client import Client
from nats.aio.msg import Msg

from bad_bodies import fuzzed, large_bodies
from drill import Drill, drilled
from drill_mesh import TENANTS, DrillMesh
from open_load import LoadShape, outcomes

pytestmark = pytest.mark.asyncio(loop_scope="module")

BODIES = Path(__file__).parent / "bodies"
FILES = sorted(BODIES.glob("*/*"))
LARGE = large_bodies()
SECRET = "xylophoneparty"
"""Stands in the bodies that are made here; a refusal names what was wrong and never quotes."""
WAIT_S = 10.0
HELPFUL = ("expected", "found", "at most", "missing", "out of range", "known", "before", "after")
GROWTH_KIB_MAX = 24 * 1024
"""Of a service's memory over a flood: the allocator's own hunger, and no more."""


class Raw:
    """One tenant's plain connection: exact bytes out, receipts in."""

    def __init__(self) -> None:
        self.client = Client()
        self.receipts: dict[int, dict[str, Any]] = {}
        """By the sequence of the submission."""
        self._news = asyncio.Event()

    async def connect(self, mesh: DrillMesh, tenant: str) -> None:
        self.tenant, self.subject = tenant, f"wc.request.{tenant}"
        await self.client.connect(
            mesh.bus_url, user=tenant, password=mesh.access.tenants[tenant].password
        )

        async def on_receipt(message: Msg) -> None:
            receipt = json.loads(message.data)
            self.receipts[receipt["requests_sequence"]] = receipt
            self._news.set()

        await self.client.subscribe(f"wc.receipt.{tenant}.*", cb=on_receipt)
        await self.client.flush()

    async def refused(self, body: bytes) -> dict[str, Any]:
        """The receipt of one body."""
        reply = await self.client.request(self.subject, body, timeout=WAIT_S)
        sequence = json.loads(reply.data)["seq"]
        async with asyncio.timeout(WAIT_S):
            while sequence not in self.receipts:
                self._news.clear()
                await self._news.wait()
        return self.receipts[sequence]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def drill(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Drill]:
    async with drilled(tmp_path_factory.mktemp("mesh")) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def raws(drill: Drill) -> AsyncIterator[Iterator[Raw]]:
    connections = [Raw() for _ in TENANTS]
    for connection, tenant in zip(connections, TENANTS, strict=True):
        await connection.connect(drill.mesh, tenant)
    yield itertools.cycle(connections)
    for connection in connections:
        await connection.client.close()


@pytest_asyncio.fixture(loop_scope="module")
async def raw(raws: Iterator[Raw]) -> Raw:
    """A tenant in its turn; malformed submissions of one tenant and second beyond the tenth are
    folded, and then only the first of them gets a receipt."""
    await asyncio.sleep(0.11 / len(TENANTS))
    return next(raws)


async def test_there_is_a_body_for_every_way_that_is_known() -> None:
    reasons = {file.parent.name for file in FILES} | {reason for reason, _ in LARGE.values()}
    assert reasons >= {
        "malformed", "unknown_field", "invalid_field", "empty_body", "body_too_large",
        "prompt_too_long", "unknown_model", "unknown_request", "deadline_passed",
        "deadline_too_far",
    }  # fmt: skip
    assert len(FILES) >= 60


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}-{file.stem}")
async def test_a_bad_body_is_refused_for_its_reason(raw: Raw, file: Path) -> None:
    check_receipt(await raw.refused(file.read_bytes()), file.parent.name)


@pytest.mark.parametrize("name", LARGE)
async def test_a_large_bad_body_is_refused_for_its_reason(raw: Raw, name: str) -> None:
    reason, body = LARGE[name]
    check_receipt(await raw.refused(body), reason)


def check_receipt(receipt: dict[str, Any], reason: str) -> None:
    assert (receipt["outcome"], receipt["reason"]) == ("rejected", reason), receipt["detail"]
    detail = receipt["detail"]
    assert 12 <= len(detail) <= 512
    # What was expected, what was found, or what the bound is.
    assert any(word in detail.lower() for word in HELPFUL), detail
    for quoted in ("hello", "please run", "klingon", "boss"):
        assert quoted not in detail


async def test_a_body_that_the_bus_does_not_take_is_refused_by_the_bus(raw: Raw) -> None:
    reply = await raw.client.request(raw.subject, b" " * 1_020_000, timeout=WAIT_S)
    assert "error" in json.loads(reply.data)


async def test_a_tenant_that_nobody_configured_is_refused(drill: Drill) -> None:
    """Only the mesh's own account can write there, so it is a mistake of the operator's."""
    sequence = await drill.watch.publish("wc.request.nobody", b'{"id":"a","prompt":"hello"}')
    await drill.watch.publish("wc.request._", b'{"id":"a","prompt":"hello"}')
    await asyncio.sleep(0.5)
    report = await drill.check()
    (decision,) = [d for d in report.recount.decisions if d.tenant == "nobody"]
    assert (decision.kind, decision.reason) == ("rejected", "unknown_tenant")
    assert decision.first == sequence


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"{", id="no JSON"),
        pytest.param(b"[1]", id="a list"),
        pytest.param(b'{"messages":[{"role":"user","content":"\\ud800"}]}', id="lone surrogate"),
        pytest.param(b'{"messages":[{"role":"user","content":"a\\u0000"}]}', id="NUL"),
        pytest.param(b'{"messages":[{"role":"user","content":"caf\xe9"}]}', id="latin 1"),
        pytest.param(b'{"messages":' + b"[" * 50_000 + b"]" * 50_000 + b"}", id="deep"),
        pytest.param(
            b'{"messages":[{"role":"user","content":"a"}],"max_tokens":1e999}', id="infinite"
        ),
        pytest.param(b'{"messages":[{"role":"user","content":"a"}],"seed":1e400}', id="huge"),
    ],
)
async def test_a_bad_body_over_http_is_a_bad_request(drill: Drill, body: bytes) -> None:
    status, answer = await asyncio.to_thread(post, drill.mesh, body)
    assert status == 400, answer
    error = json.loads(answer)["error"]
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) > 12


def post(mesh: DrillMesh, body: bytes) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", mesh.ports.http, timeout=10)
    with contextlib.closing(connection):
        key = mesh.access.tenants["initech"].api_key
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", body, headers)
        response = connection.getresponse()
        return response.status, response.read()


async def test_noise_on_the_other_subjects_is_dropped(drill: Drill, raw: Raw) -> None:
    """Cancels of what nobody knows and claims that are none: bounded, and of no consequence."""
    await drill.check()
    cancels_before = drill.checker.recount.kinds["cancel_requested"]
    draw = random.Random(1)
    for number in range(3_000):
        await raw.client.publish(f"wc.cancel.{raw.tenant}.none-{number}", draw.randbytes(20))
        for claim in (draw.randbytes(draw.randint(0, 700)), b'{"id":"none-%d"}' % number):
            await raw.client.publish(f"wc.delivered.{raw.tenant}", claim)
    await raw.client.publish(f"wc.delivered.{raw.tenant}", b"[" * 100_000)
    await raw.client.flush()
    handles = await drill.producers.drive(LoadShape(seed=700, rate=60, seconds=0.5))
    report = await drill.check()
    assert outcomes(handles) == {"completed": len(handles)}
    cancels = report.recount.kinds["cancel_requested"] - cancels_before
    # A hundred a second of each tenant; this took a few seconds at most.
    assert 1 <= cancels <= 1_000
    assert report.recount.kinds["delivered"] == 0
    await drill.ready()


async def test_ten_thousand_fuzzed_bodies_change_nothing(drill: Drill) -> None:
    await flood(drill, seed=710, count=10_000)


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_hundred_thousand_fuzzed_bodies_change_nothing(drill: Drill) -> None:
    await flood(drill, seed=720, count=100_000)


async def flood(drill: Drill, *, seed: int, count: int) -> None:
    """Services stay up, memory stays flat, the tape grows far slower than the flood."""
    mesh = drill.mesh
    clients = {name: Client() for name in TENANTS}
    for name, client in clients.items():
        await client.connect(mesh.bus_url, user=name, password=mesh.access.tenants[name].password)

    async def send(first_seed: int, bodies: int) -> None:
        names = list(clients)
        for number, body in enumerate(fuzzed(first_seed, bodies, SECRET)):
            await clients[names[number % 3]].publish(f"wc.request.{names[number % 3]}", body)
            if number % 200 == 0:
                await asyncio.sleep(0)
        for client in clients.values():
            await client.flush(timeout=30)

    try:
        # What a first flood makes the allocator hold is no leak.
        await send(seed + 1, 2_000)
        await drill.checker.settle(60)
        before = await drill.check()
        _, tape_before = await drill.watch.bounds("EVENTS")
        memory = memory_kib(mesh)
        restarts = list(mesh.restarts)
        load = asyncio.create_task(
            drill.producers.drive(LoadShape(seed=seed, rate=20, seconds=2.0))
        )
        await send(seed, count)
        handles = await load
        await drill.checker.settle(200)
    finally:
        for client in clients.values():
            await client.close()
    growth = {name: kib - memory[name] for name, kib in memory_kib(mesh).items()}
    report = await drill.check(60)
    assert outcomes(handles) == {"completed": len(handles)}
    assert mesh.restarts == restarts
    await drill.ready()
    assert max(growth.values()) < GROWTH_KIB_MAX, growth
    sent = report.submissions - before.submissions
    # Under a flood an acknowledgement may be late, and the same bytes are sent again.
    again = sum(producer.counts.resent for producer in drill.producers.by_tenant.values())
    assert count + len(handles) <= sent <= count + len(handles) + again
    refused = [d for d in report.recount.decisions if d.kind == "rejected"]
    folded = defaultdict(int)
    for decision in refused:
        folded[decision.count > 1] += decision.count
    assert folded[True] > 8 * folded[False], "most of a flood is folded"
    _, tape_after = await drill.watch.bounds("EVENTS")
    # Each of those that stayed good makes some seven events; a fold stands for up to 256 bodies.
    good = report.requests - before.requests
    assert tape_after - tape_before < count // 12 + 9 * good
    for decision in refused:
        assert SECRET not in decision.reason


def memory_kib(mesh: DrillMesh) -> dict[str, int]:
    """Resident memory of every service."""
    found: dict[str, int] = {}
    for name in mesh.services:
        status = Path(f"/proc/{mesh.children[name].pid}/status").read_text()
        (line,) = [line for line in status.splitlines() if line.startswith("VmRSS")]
        found[name] = int(line.split()[1])
    return found
