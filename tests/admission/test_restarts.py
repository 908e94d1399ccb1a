"""Admission killed, replaced, paused and started again; the bus broken under it."""

import asyncio
import functools
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest

from admission_host import (
    MESH_KEY,
    AdmissionHost,
    TestProducer,
    body,
    check_decisions,
    eventually,
    read_events,
)
from broker_process import BrokerProcess
from fake_mesh import FakeMesh, Plan
from waterclock_proto.events import AdmissionElected, Admitted
from waterclock_proto.requests import Final
from waterclock_proto.subjects import request_subject

MakeHost = Callable[..., AdmissionHost]


@pytest.fixture
async def producer(broker: BrokerProcess) -> AsyncIterator[TestProducer]:
    async with TestProducer(broker.url) as made:
        yield made


class Load:
    """Publishes submissions all the time, each until the bus has it."""

    def __init__(self, producer: TestProducer, *, every_s: float = 0.004) -> None:
        self._producer = producer
        self._every_s = every_s
        self.sent = 0
        self.sequences: list[int] = []
        self.malformed: list[int] = []
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await eventually(lambda: len(self.sequences) >= self.sent, 20)

    async def _run(self) -> None:
        while True:
            bad = self.sent % 7 == 3
            again = self.sent % 5 == 4
            payload = b"{" if bad else body(f"r{self.sent - (1 if again else 0)}")
            self._producer.bus.store_soon(
                request_subject("acme"), payload, functools.partial(self._stored, bad)
            )
            self.sent += 1
            await asyncio.sleep(self._every_s)

    def _stored(self, bad: bool, sequence: int) -> None:
        self.sequences.append(sequence)
        if bad:
            self.malformed.append(sequence)


async def all_decided(producer: TestProducer, at_least: int) -> None:
    """Wait until all that reached REQUESTS is decided, and check what must hold.

    That may be more than was sent: a publish that was not acknowledged is repeated.
    """
    _, stored = await producer.bus.stream_state("REQUESTS")
    assert stored >= at_least

    async def all_are() -> bool:
        return (await check_decisions(producer.bus)).get("acme", 0) >= stored

    await eventually(all_are, 30)
    assert (await check_decisions(producer.bus))["acme"] == stored


async def test_killed_again_and_again_under_load_nothing_is_lost_or_done_twice(
    broker: BrokerProcess, producer: TestProducer, make_host: MakeHost
) -> None:
    host = make_host(admission={"snapshot_s": 1})
    await asyncio.to_thread(host.start)
    async with FakeMesh(broker.url, MESH_KEY):
        load = Load(producer)
        for pause_s in (0.4, 1.5, 0.2):
            await asyncio.sleep(pause_s)
            await asyncio.to_thread(host.kill)
            await asyncio.to_thread(host.start)
        await asyncio.sleep(0.3)
        await load.stop()
        await all_decided(producer, load.sent)
        # Whoever was decided has a receipt, also when its admission died before sending it.
        # Of what was folded into one event, only the first has one.
        wanted = set(load.sequences) - set(load.malformed)
        await eventually(lambda: wanted <= {r.requests_sequence for r in producer.receipts})
    assert await asyncio.to_thread(host.stop) == 0


async def test_the_bus_killed_under_load_loses_nothing(
    broker: BrokerProcess, producer: TestProducer, make_host: MakeHost
) -> None:
    host = make_host()
    await asyncio.to_thread(host.start)
    load = Load(producer)
    for _ in range(2):
        await asyncio.sleep(0.4)
        await asyncio.to_thread(broker.restart)
    await asyncio.sleep(0.4)
    await load.stop()
    await all_decided(producer, load.sent)
    assert await asyncio.to_thread(host.stop) == 0


async def test_a_paused_admission_that_wakes_up_writes_nothing_that_counts(
    producer: TestProducer, make_host: MakeHost
) -> None:
    old = make_host("old")
    new = make_host("new")
    await asyncio.to_thread(old.start)
    assert old.process is not None
    await producer.submit("before")
    os.kill(old.process.pid, signal.SIGSTOP)
    load = Load(producer)
    await asyncio.sleep(0.2)
    await asyncio.to_thread(new.start)
    await asyncio.sleep(0.2)
    os.kill(old.process.pid, signal.SIGCONT)
    assert await asyncio.to_thread(old.process.wait, 20) == 1
    assert "FenceLost" in old.log() or "ConsumerTaken" in old.log()
    await asyncio.sleep(0.2)
    await load.stop()
    await all_decided(producer, load.sent + 1)
    elections = await read_events(producer.bus, AdmissionElected)
    assert [envelope.fence for envelope in elections] == [1, 2]
    assert await asyncio.to_thread(new.stop) == 0


async def test_a_new_admission_takes_over_from_one_that_runs(
    producer: TestProducer, make_host: MakeHost
) -> None:
    old = make_host("old")
    await asyncio.to_thread(old.start)
    load = Load(producer)
    await asyncio.sleep(0.2)
    new = make_host("new")
    await asyncio.to_thread(new.start)
    assert old.process is not None
    assert await asyncio.to_thread(old.process.wait, 20) == 1
    await asyncio.sleep(0.2)
    await load.stop()
    await all_decided(producer, load.sent)
    assert await asyncio.to_thread(new.stop) == 0


@pytest.mark.parametrize("damage", ["none", "removed", "damaged"])
async def test_a_restart_goes_on_where_the_last_one_ended(
    broker: BrokerProcess, producer: TestProducer, damage: str, make_host: MakeHost
) -> None:
    host = make_host()
    await asyncio.to_thread(host.start)
    async with FakeMesh(broker.url, MESH_KEY) as mesh:
        receipts = [await producer.submit(f"r{place}") for place in range(20)]
        await eventually(lambda: len(producer.answers) >= 20)
        assert await asyncio.to_thread(host.stop) == 0
        snapshot = host.data_dir / "fold.snapshot"
        if damage == "removed":
            snapshot.unlink()
        elif damage == "damaged":
            snapshot.write_bytes(snapshot.read_bytes()[:-1])
        # What comes meanwhile waits.
        waiting = await producer.bus.store(request_subject("acme"), body("meanwhile"))
        await asyncio.to_thread(host.start)
        assert ("snapshot_refused" in host.log()) == (damage == "damaged")
        assert (await producer.receipt(waiting)).number == 21
        again = await producer.submit("r3")
        assert (again.outcome, again.number) == ("resubmitted", 22)
        event = msgspec.json.decode(again.event)["data"]
        assert event["first_requests_sequence"] == receipts[3].requests_sequence
        await mesh.until(lambda seen: "meanwhile" in seen.ids)
    await all_decided(producer, 22)
    assert await asyncio.to_thread(host.stop) == 0


async def test_an_end_that_came_while_nobody_was_there_is_told_afterwards(
    broker: BrokerProcess, producer: TestProducer, make_host: MakeHost
) -> None:
    host = make_host()
    await asyncio.to_thread(host.start)
    async with FakeMesh(broker.url, MESH_KEY) as mesh:
        go = asyncio.Event()
        mesh.plan = lambda _a, _b: Plan(end="expired", before_first=go)
        await producer.submit("late")
        await mesh.until(lambda seen: seen.admitted)
        await asyncio.to_thread(host.kill)
        go.set()
        await asyncio.sleep(0.2)
        assert producer.answers == []
        await asyncio.to_thread(host.start)
        await eventually(lambda: producer.answers)
    final = msgspec.json.decode(producer.answers[0][1], type=Final)
    assert (final.id, final.outcome) == ("late", "expired")
    assert await asyncio.to_thread(host.stop) == 0


async def test_whoever_comes_back_while_its_request_ends_gets_the_answer(
    broker: BrokerProcess, producer: TestProducer, make_host: MakeHost
) -> None:
    """Admission may decide before it has read the end; the final went out before that."""
    host = make_host()
    await asyncio.to_thread(host.start)
    assert host.process is not None
    async with FakeMesh(broker.url, MESH_KEY) as mesh:
        for place in range(3):
            request_id = f"r{place}"
            go = asyncio.Event()
            mesh.plan = lambda _a, _b, go=go: Plan(before_first=go)
            await producer.submit(request_id)
            await mesh.until(lambda seen, wanted=request_id: wanted in seen.ids)
            os.kill(host.process.pid, signal.SIGSTOP)
            go.set()
            await eventually(lambda: producer.answers)
            producer.answers.clear()
            sequence = await producer.bus.store(request_subject("acme"), body(request_id))
            os.kill(host.process.pid, signal.SIGCONT)
            await producer.receipt(sequence)
            await eventually(lambda: producer.answers)
            final = msgspec.json.decode(producer.answers.pop()[1], type=Final)
            assert (final.id, final.text) == (request_id, "Hello, world")
    assert await asyncio.to_thread(host.stop) == 0


async def test_a_queue_that_loses_its_end_under_admission_makes_it_start_anew(
    broker: BrokerProcess, tmp_path: Path, producer: TestProducer, make_host: MakeHost
) -> None:
    host = make_host()
    await asyncio.to_thread(host.start)
    assert host.process is not None
    for place in range(5):
        await producer.submit(f"r{place}")
    await asyncio.sleep(0.4)
    await asyncio.to_thread(broker.stop)
    copy = tmp_path / "copy"
    broker.copy_store(copy)
    await asyncio.to_thread(broker.start)
    for place in range(5, 9):
        await producer.submit(f"r{place}")
    await asyncio.to_thread(broker.stop)
    give_back_requests(broker, copy)
    await asyncio.to_thread(broker.start)
    assert await producer.bus.store(request_subject("acme"), body("new")) == 6
    assert await asyncio.to_thread(host.process.wait, 30) == 1
    assert "StreamRolledBack" in host.log()
    await asyncio.to_thread(host.start)

    async def is_decided() -> bool:
        found = [envelope.data for envelope in await read_events(producer.bus, Admitted)]
        return any(isinstance(data, Admitted) and data.id == "new" for data in found)

    await eventually(is_decided)
    assert (await check_decisions(producer.bus))["acme"] == 10
    assert await asyncio.to_thread(host.stop) == 0


def give_back_requests(broker: BrokerProcess, copy: Path) -> None:
    """Put an older copy of REQUESTS in its place, and of nothing else."""
    requests = next(broker.store_dir.rglob("streams/REQUESTS"))
    shutil.rmtree(requests)
    shutil.copytree(copy / requests.relative_to(broker.store_dir), requests)


async def test_a_submission_at_a_sequence_that_was_used_before_is_decided(
    broker: BrokerProcess, tmp_path: Path, producer: TestProducer, make_host: MakeHost
) -> None:
    """A power cut takes the end of REQUESTS, and not that of the tape: sequences come again."""
    host = make_host()
    await asyncio.to_thread(host.start)
    for place in range(5):
        await producer.submit(f"r{place}")
    assert await asyncio.to_thread(host.stop) == 0
    await asyncio.sleep(0.4)
    copy = tmp_path / "copy"
    broker.stop()
    broker.copy_store(copy)
    broker.start()
    await asyncio.to_thread(host.start)
    for place in range(5, 9):
        await producer.submit(f"r{place}")
    assert await asyncio.to_thread(host.stop) == 0
    broker.stop()
    give_back_requests(broker, copy)
    broker.start()
    again = await producer.bus.store(request_subject("acme"), body("new"))
    assert again == 6
    await asyncio.to_thread(host.start)
    assert "requests_rolled_back" in host.log()

    async def is_decided() -> bool:
        found = [e.data for e in await read_events(producer.bus, Admitted)]
        return any(isinstance(data, Admitted) and data.id == "new" for data in found)

    await eventually(is_decided)
    assert (await check_decisions(producer.bus))["acme"] == 10
    assert await asyncio.to_thread(host.stop) == 0
