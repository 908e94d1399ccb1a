"""The scheduler's process on a real bus: routing, crashes, elections, and a bus that goes away."""

import asyncio
import signal
from pathlib import Path

import msgspec
import pytest

from broker_process import BrokerProcess
from waterclock_proto.events import (
    AttemptLost,
    Cancelled,
    Dispatched,
    Enqueued,
    Expired,
    SchedulerElected,
)
from waterclock_proto.subjects import EVENTS, pulse_subject
from waterclock_scheduler.pulse import Pulse, decode_pulse

from .mesh_stub import MODEL, POOLS, Mesh, SchedulerProcess, running, until


async def test_requests_go_to_the_pool_of_their_language_and_end(
    broker: BrokerProcess, tmp_path: Path
) -> None:
    scheduler = SchedulerProcess(tmp_path, broker)
    async with running(scheduler), Mesh.open(broker) as mesh:
        await scheduler.start()
        main = mesh.start_worker("main")
        chinese = mesh.start_worker("chinese", pool="zh")
        await mesh.admit("en", "What is a water clock, and how was it used?")
        await mesh.admit("zh", "什么是水钟？它是怎么用的？")
        await mesh.admit("und", "1 + 1 = ?")
        await mesh.until_ended("en", "zh", "und")
        enqueued = {e.id: (e.pool, e.language, e.language_reason) for e in mesh.events(Enqueued)}
        assert enqueued == {
            "en": ("main", "en", "script"),
            "zh": ("zh", "zh", "script"),
            "und": ("main", "und", "default"),
        }
        workers = {e.id: e.worker for e in mesh.events(Dispatched)}
        assert workers == {"en": main, "zh": chinese, "und": main}
        assert await scheduler.end() == 0


async def test_a_body_that_is_not_there_is_the_workers_to_report(
    broker: BrokerProcess, tmp_path: Path
) -> None:
    scheduler = SchedulerProcess(tmp_path, broker)
    async with running(scheduler), Mesh.open(broker) as mesh:
        await scheduler.start()
        mesh.start_worker()
        mesh.admit_stored("gone", b"{}", 12_345)
        await mesh.until_ended("gone")
        (enqueued,) = mesh.events(Enqueued)
        assert (enqueued.language_reason, enqueued.pool) == ("unread", "main")
        assert enqueued.prompt_tokens == 4


async def test_what_waits_is_cancelled_or_expires(broker: BrokerProcess, tmp_path: Path) -> None:
    scheduler = SchedulerProcess(tmp_path, broker)
    async with running(scheduler), Mesh.open(broker) as mesh:
        await scheduler.start()
        await scheduler.says("leading")
        mesh.cancel("before")
        await mesh.admit("before")
        await mesh.admit("waits")
        await mesh.admit("late", deadline_ms=300)
        await until(lambda: len(mesh.events(Enqueued)) == 2, scheduler.log)
        mesh.cancel("waits")
        await mesh.until_ended("before", "waits", "late")
        assert sorted(e.id for e in mesh.events(Cancelled)) == ["before", "waits"]
        assert [e.id for e in mesh.events(Expired)] == ["late"]
        assert mesh.events(Dispatched) == []


@pytest.mark.timeout(120)
async def test_kills_lose_nothing_and_run_nothing_twice(
    broker: BrokerProcess, tmp_path: Path
) -> None:
    """kill −9 in the middle of a stream of requests, five times; every request ends once."""
    config = f"[scheduler]\nsnapshot_interval_s = 1\n{POOLS}"
    scheduler = SchedulerProcess(tmp_path, broker, config=config)
    async with running(scheduler), Mesh.open(broker) as mesh:
        await scheduler.start()
        mesh.start_worker(slots=16)
        names: list[str] = []

        async def send() -> None:
            while True:
                name = f"r{len(names)}"
                await mesh.admit(name)
                names.append(name)
                await asyncio.sleep(0.002)

        sending = asyncio.create_task(send())
        for kill in range(5):
            await scheduler.says("leading", kill + 1)
            before = len(mesh.ends())
            await until(lambda least=before + 50: len(mesh.ends()) > least, scheduler.log)
            await asyncio.sleep(0.3 * kill)
            await scheduler.end(signal.SIGKILL)
            await scheduler.start()
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        await mesh.until_ended(*names)
        await asyncio.sleep(0.5)
        assert len(names) > 300
        assert set(mesh.ends()) == set(names)
        assert set(mesh.ends().values()) == {1}
        assert max(e.attempt for e in mesh.events(Dispatched)) == 1
        assert "snapshot_used" in scheduler.log()
        assert len(mesh.events(SchedulerElected)) == 6
        assert await scheduler.end() == 0


async def test_a_clean_restart_goes_on_from_its_snapshot(
    broker: BrokerProcess, tmp_path: Path
) -> None:
    scheduler = SchedulerProcess(tmp_path, broker)
    async with running(scheduler), Mesh.open(broker) as mesh:
        await scheduler.start()
        for name in ("a", "b"):
            await mesh.admit(name)
        await until(lambda: len(mesh.events(Enqueued)) == 2, scheduler.log)
        assert await scheduler.end() == 0
        await mesh.admit("c")
        await scheduler.start()
        await scheduler.says("snapshot_used")
        mesh.start_worker()
        await mesh.until_ended("a", "b", "c")
        assert [e.id for e in mesh.events(Enqueued)] == ["a", "b", "c"]


@pytest.mark.parametrize("damage", ["garbage", "another tape"])
async def test_a_snapshot_that_does_not_fit_is_discarded_and_the_tape_folded_again(
    broker: BrokerProcess, tmp_path: Path, damage: str
) -> None:
    scheduler = SchedulerProcess(tmp_path, broker)
    path = scheduler.folder / "scheduler" / "scheduler.snapshot"
    async with running(scheduler), Mesh.open(broker) as mesh:
        await scheduler.start()
        await mesh.admit("a")
        await until(lambda: len(mesh.events(Enqueued)) == 1, scheduler.log)
        await scheduler.end()
        if damage == "garbage":
            path.write_bytes(path.read_bytes()[:-5])
        else:
            there = msgspec.msgpack.decode(path.read_bytes(), strict=False)
            path.write_bytes(msgspec.msgpack.encode(there | {"sha256": "0" * 64}))
        await scheduler.start()
        await scheduler.says("snapshot_discarded")
        mesh.start_worker()
        await mesh.until_ended("a")


async def test_a_second_scheduler_deposes_the_first_which_ends_with_an_error(
    broker: BrokerProcess, tmp_path: Path
) -> None:
    first = SchedulerProcess(tmp_path, broker, name="first")
    second = SchedulerProcess(tmp_path, broker, name="second")
    async with running(first, second), Mesh.open(broker) as mesh:
        await first.start()
        await first.says("leading")
        await mesh.admit("a")
        await until(lambda: len(mesh.events(Enqueued)) == 1, first.log)
        await second.start()
        assert await first.ended() == 1
        assert "FenceLost" in first.log()
        mesh.start_worker()
        await mesh.admit("b")
        await mesh.until_ended("a", "b")
        assert [event.fence for event in mesh.tape if isinstance(event.data, SchedulerElected)] == [
            1,
            2,
        ]


async def test_a_stopped_scheduler_that_goes_on_is_heard_by_nobody(
    broker: BrokerProcess, tmp_path: Path
) -> None:
    """SIGSTOP, another one takes over, SIGCONT: what the zombie still says bears the old fence."""
    zombie = SchedulerProcess(tmp_path, broker, name="zombie")
    heir = SchedulerProcess(tmp_path, broker, name="heir")
    async with running(zombie, heir), Mesh.open(broker) as mesh:
        await zombie.start()
        await zombie.says("leading")
        mesh.finish_at_once = False
        mesh.start_worker(slots=1)
        await mesh.admit("a")
        await until(lambda: len(mesh.held) == 1, zombie.log)
        assert zombie.process is not None
        zombie.process.send_signal(signal.SIGSTOP)
        await heir.start()
        await heir.says("leading")
        await mesh.admit("b")
        mesh.finish_at_once = True
        mesh.finish_held()
        await mesh.until_ended("a", "b")
        zombie.process.send_signal(signal.SIGCONT)
        assert await zombie.ended() == 1
        await mesh.admit("c")
        await mesh.until_ended("c")
        assert set(mesh.ends().values()) == {1}
        assert [e.attempt for e in mesh.events(Dispatched)] == [1, 1, 1]


async def test_a_standby_takes_over_when_the_leader_falls_silent(
    broker: BrokerProcess, tmp_path: Path
) -> None:
    standby_config = f"[scheduler]\nstandby = true\ntakeover_ms = 1500\n{POOLS}"
    leader = SchedulerProcess(tmp_path, broker, name="leader")
    standby = SchedulerProcess(tmp_path, broker, name="standby", config=standby_config)
    async with running(leader, standby), Mesh.open(broker) as mesh:
        await leader.start()
        await leader.says("leading")
        await standby.start()
        await standby.says("service_started")
        await asyncio.sleep(3)
        assert "election_entered" not in standby.log()
        await leader.end(signal.SIGKILL)
        await standby.says("leading")
        mesh.start_worker()
        await mesh.admit("a")
        await mesh.until_ended("a")


@pytest.mark.timeout(120)
async def test_a_bus_that_goes_away_costs_no_worker_its_lease(
    broker: BrokerProcess, tmp_path: Path
) -> None:
    scheduler = SchedulerProcess(tmp_path, broker)
    async with running(scheduler), Mesh.open(broker) as mesh:
        await scheduler.start()
        mesh.finish_at_once = False
        mesh.start_worker()
        await mesh.admit("a")
        await until(lambda: len(mesh.held) == 1, scheduler.log)
        broker.pause()
        await asyncio.sleep(5)
        broker.resume()
        await asyncio.sleep(1)
        broker.restart()
        await mesh.bus.wait_connected()
        await mesh.admit("b")
        await until(lambda: len(mesh.held) == 2, scheduler.log)
        await asyncio.sleep(4)
        mesh.finish_held()
        await mesh.until_ended("a", "b")
        assert mesh.events(AttemptLost) == []


async def test_a_silent_worker_is_replaced(broker: BrokerProcess, tmp_path: Path) -> None:
    config = f"[scheduler]\nlease_ms = 1900\n{POOLS}"
    scheduler = SchedulerProcess(tmp_path, broker, config=config)
    async with running(scheduler), Mesh.open(broker) as mesh:
        await scheduler.start()
        mesh.finish_at_once = False
        silent = mesh.start_worker("silent", slots=1)
        await mesh.admit("a")
        await until(lambda: len(mesh.held) == 1, scheduler.log)
        del mesh.lives[silent]
        other = mesh.start_worker("other", slots=1)
        await until(lambda: len(mesh.held) == 2, scheduler.log)
        (lost,) = mesh.events(AttemptLost)
        assert (lost.worker, lost.reason) == (silent, "lease")
        assert mesh.held[1].worker == other
        mesh.finish_held()
        await mesh.until_ended("a")
        assert set(mesh.ends().values()) == {1}


async def test_the_pulse_says_how_a_pool_stands(broker: BrokerProcess, tmp_path: Path) -> None:
    scheduler = SchedulerProcess(tmp_path, broker)
    async with running(scheduler), Mesh.open(broker) as mesh:
        pulses: list[Pulse] = []

        def on_pulse(subject: str, payload: bytes) -> None:
            pulse = decode_pulse(payload)
            assert pulse is not None
            assert pulse_subject(pulse.pool) == subject
            pulses.append(pulse)

        mesh.bus.subscribe("wc.pulse.*", on_pulse)
        await scheduler.start()
        mesh.finish_at_once = False
        mesh.start_worker(slots=2)
        for number in range(5):
            await mesh.admit(f"r{number}")
        await until(
            lambda: any(p.pool == "main" and p.in_flight == 2 for p in pulses), scheduler.log
        )
        found = [p for p in pulses if p.pool == "main"][-1]
        assert (found.depth, found.in_flight, found.workers, found.slots, found.rung) == (
            3,
            2,
            1,
            2,
            0,
        )


async def test_a_tape_that_was_made_anew_is_folded_from_its_beginning(
    broker: BrokerProcess, tmp_path: Path
) -> None:
    scheduler = SchedulerProcess(tmp_path, broker)
    async with running(scheduler):
        async with Mesh.open(broker) as mesh:
            await scheduler.start()
            for number in range(20):
                await mesh.admit(f"old{number}")
            await until(lambda: len(mesh.events(Enqueued)) == 20, scheduler.log)
            await scheduler.end()
            await mesh.bus.api(f"STREAM.DELETE.{EVENTS.name}", {})
        async with Mesh.open(broker) as mesh:
            await scheduler.start()
            await scheduler.says("snapshot_discarded")
            mesh.start_worker()
            await mesh.admit("new")
            await mesh.until_ended("new")
            assert MODEL == mesh.events(Dispatched)[0].model
