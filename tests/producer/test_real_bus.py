"""A producer over a real bus with accounts: stored means acknowledged, and no answer is lost.

The mesh behind the bus is simulated: it reads submissions from the stream, answers each id once,
and says an answer again to whoever asks again.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import nats.errors
import pytest
from nats.aio.client import Client

from broker_process import BrokerProcess
from runtime_probe import until
from waterclock_producer import (
    Delta,
    Handle,
    NotConnected,
    Producer,
    new_submission,
    read_receipts,
)
from waterclock_proto.accounts import TenantSecret, server_config
from waterclock_proto.envelope import Chain
from waterclock_proto.events import Admitted
from waterclock_proto.requests import Final, Receipt, Submission, body_commitment, body_salt
from waterclock_proto.stamps import Stamp
from waterclock_proto.subjects import STREAMS, answer_subject, final_subject, receipt_subject

KEY = b"the key of a mesh that does not exist"


@pytest.fixture
def bus(tmp_path: Path):
    folder = tmp_path / "bus"
    folder.mkdir()
    config = server_config(
        {"acme": TenantSecret(password="of acme"), "globex": TenantSecret(password="of globex")},
        {"operator": "of operator"},
        store_dir=str(folder / "store"),
        port=-1,
        ports_file_dir=str(folder),
    )
    broker = BrokerProcess(folder, config_text=config).start()
    yield broker
    broker.stop()


def producer(bus: BrokerProcess, tenant: str = "acme", **options) -> Producer:
    options = {"user": tenant, "password": f"of {tenant}", **options}
    return Producer.connect(bus.url, tenant=tenant, **options)


class EchoMesh:
    """Answers submissions from the stream, durably: what was acknowledged is answered."""

    def __init__(self) -> None:
        self.bodies: dict[tuple[str, str], bytes] = {}
        self.finals: dict[tuple[str, str], Final] = {}
        self.resumed = 0
        self.cancelled: list[str] = []
        self.claims: list[bytes] = []
        self._client = Client()
        self._chain = Chain(service="admission", writer="w", key=KEY)
        self._seen = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, url: str) -> None:
        async def ignore(_: Exception) -> None:
            pass

        await self._client.connect(
            url,
            user="operator",
            password="of operator",
            max_reconnect_attempts=-1,
            reconnect_time_wait=0.1,  # pyright: ignore[reportArgumentType] - a float works, too
            error_cb=ignore,
        )
        self._jetstream = self._client.jetstream()
        for spec in STREAMS:
            await self._jetstream.add_stream(
                name=spec.name,
                subjects=list(spec.subjects),
                max_msgs_per_subject=spec.max_msgs_per_subject,
                allow_direct=spec.allow_direct,
            )

        async def on_cancel(message) -> None:
            self.cancelled.append(message.subject.rpartition(".")[2])

        async def on_claim(message) -> None:
            self.claims.append(message.data)

        await self._client.subscribe("wc.cancel.*.*", cb=on_cancel)
        await self._client.subscribe("wc.delivered.*", cb=on_claim)
        self._pull = await self._jetstream.pull_subscribe("wc.request.*", durable="admission")
        self._later(self._read())

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.close()

    def _later(self, work) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _read(self) -> None:
        while True:
            try:
                messages = await self._pull.fetch(256, timeout=1)
            except (TimeoutError, nats.errors.Error):
                await asyncio.sleep(0.02)
                continue
            for message in messages:
                sequence = message.metadata.sequence.stream
                if sequence > self._seen:
                    self._seen = sequence
                    await self._take(message.subject.split(".")[2], message.data, sequence)
                with contextlib.suppress(nats.errors.Error):
                    await message.ack()

    async def _take(self, tenant: str, body: bytes, sequence: int) -> None:
        submission = msgspec.json.decode(body, type=Submission)
        about = (tenant, submission.id)
        if about in self.bodies:
            assert submission.resume or self.bodies[about] == body
            self.resumed += submission.resume
            if about in self.finals:
                await self._say(answer_subject(*about), self.finals[about])
            return
        self.bodies[about] = body
        stamp = Stamp(wall_us=1_700_000_000_000_000, source="admission")
        salt = body_salt(KEY, *about)
        _, event = self._chain.seal(
            Admitted(
                tenant=tenant,
                id=submission.id,
                tier="gold",
                requests_sequence=sequence,
                number=len(self.bodies),
                contract_sha256="0" * 64,
                model="m",
                arrival=stamp,
                received=stamp,
                decided=stamp,
                deadline_us=1_800_000_000_000_000,
                body_bytes=len(body),
                prompt_tokens_estimate=1,
                output_tokens_max=1,
                body_commitment=body_commitment(salt, body),
            )
        )
        receipt = Receipt(
            tenant=tenant,
            id=submission.id,
            outcome="admitted",
            requests_sequence=sequence,
            event=event.decode(),
            incarnation="i",
            sequence=len(self.bodies),
            stored_ns=1,
            salt=salt.hex(),
        )
        await self._say(receipt_subject(*about), receipt)
        if submission.stream:
            for index, text in enumerate(("an ", "answer")):
                delta = Delta(id=submission.id, attempt=1, index=index, text=text, tokens=1)
                await self._say(answer_subject(*about), delta)
        final = Final(
            tenant=tenant, id=submission.id, attempt=1, outcome="completed", text="an answer"
        )
        self.finals[about] = final
        self._later(self._store(final_subject(*about), final))

    async def _say(self, subject: str, message: msgspec.Struct) -> None:
        with contextlib.suppress(nats.errors.Error):
            await self._client.publish(subject, msgspec.json.encode(message))

    async def _store(self, subject: str, final: Final) -> None:
        while True:
            try:
                await self._jetstream.publish(subject, msgspec.json.encode(final), timeout=1)
            except (TimeoutError, nats.errors.Error):
                await asyncio.sleep(0.05)
            else:
                return


@asynccontextmanager
async def echo(bus: BrokerProcess) -> AsyncIterator[EchoMesh]:
    mesh = EchoMesh()
    await mesh.open(bus.url)
    yield mesh
    await mesh.close()


async def test_a_request_crosses_the_border_and_its_answer_comes_back(
    bus: BrokerProcess, tmp_path: Path
) -> None:
    async with echo(bus) as mesh:
        async with producer(bus, receipts=tmp_path / "kept", report_delivery=True) as acme:
            handle = await acme.submit(prompt="hi", stream=True)
            assert handle.stored_sequence == 1
            texts = [piece.text async for piece in handle.stream() if isinstance(piece, Delta)]
            assert "".join(texts) == (await handle.result(10)).text == "an answer"
            receipt = await handle.receipt(10)
            assert (receipt.requests_sequence, handle.receipt_doubt) == (1, "")
            await acme.cancel("another")
        await until(lambda: bool(mesh.claims and mesh.cancelled))
        assert [msgspec.json.decode(claim)["id"] for claim in mesh.claims] == [handle.id]
        assert mesh.cancelled == ["another"]
        kept, wrong = read_receipts(tmp_path / "kept" / "acme.receipts.jsonl")
        assert (len(kept), wrong) == (1, [])


async def test_tenants_with_the_same_ids_hear_only_their_own(bus: BrokerProcess) -> None:
    async with echo(bus), producer(bus) as acme, producer(bus, "globex") as globex:
        handles = [await each.submit(id="r1", prompt="hi") for each in (acme, globex)]
        finals = [await handle.result(10) for handle in handles]
        assert [final.tenant for final in finals] == ["acme", "globex"]


async def test_another_process_can_ask_for_the_outcome(bus: BrokerProcess) -> None:
    async with echo(bus):
        async with producer(bus) as first:
            await (await first.submit(id="r1", prompt="hi")).result(10)
        async with producer(bus) as second:
            assert (await (await second.resume("r1")).result(10)).text == "an answer"


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"password": "wrong"}, id="wrong password"),
        pytest.param({"user": None, "password": None}, id="no credentials"),
    ],
)
async def test_refused_credentials_are_said_at_once(bus: BrokerProcess, options: dict) -> None:
    begun_s = time.monotonic()
    with pytest.raises(NotConnected, match="Authorization Violation"):
        async with producer(bus, **options):
            pass
    assert time.monotonic() - begun_s < 3


async def test_a_bus_without_a_mesh_says_that_nobody_listens(bus: BrokerProcess) -> None:
    async with producer(bus) as acme:
        acme.send(new_submission(prompt="hi"))
        (sending,) = acme._sending.values()
        await until(lambda: bool(sending.refusal))
        assert "nobody listens on wc.request.acme" in sending.refusal


async def test_a_connection_that_the_server_ended_is_made_anew(bus: BrokerProcess) -> None:
    async with echo(bus), producer(bus) as acme:
        await (await acme.submit(prompt="hi")).result(10)
        client = acme._link._client  # pyright: ignore[reportAttributeAccessIssue] - the real link's
        # As for any error line that is no permissions violation: this client is closed for good.
        await client._process_err("'unknown protocol operation'")
        handle = acme.send(new_submission(prompt="hi"))
        assert (await handle.result(10)).text == "an answer"
        assert client.is_closed
        assert acme.counts.gaps == 1


@pytest.mark.parametrize("end", ["kill", "stop"])
async def test_a_bus_that_restarts_under_load_costs_no_answer(bus: BrokerProcess, end: str) -> None:
    count, in_flight = 6_000, 200
    ended: list[Handle] = []
    done = asyncio.Event()
    sent = 0

    def send_another(_: Handle | None = None) -> None:
        nonlocal sent
        if sent < count:
            sent += 1
            acme.send(new_submission(id=f"r{sent}", prompt="p" * 200), take)

    def take(handle: Handle) -> None:
        ended.append(handle)
        send_another()
        if len(ended) == count:
            done.set()

    async with echo(bus) as mesh, producer(bus) as acme:
        for _ in range(in_flight):
            send_another()
        for at in (1_000, 3_000):
            await until(lambda at=at: len(ended) >= at)
            await asyncio.to_thread(getattr(bus, end))
            await asyncio.to_thread(bus.start)
        async with asyncio.timeout(30):
            await done.wait()
        assert {handle.id for handle in ended} == {f"r{n}" for n in range(1, count + 1)}
        assert {handle.final.text if handle.final else "" for handle in ended} == {"an answer"}
        assert acme.counts.gaps == 2
        assert acme.counts.finals == count
        # Nothing ran twice: one body an id, however often it was sent.
        assert len(mesh.bodies) == count
