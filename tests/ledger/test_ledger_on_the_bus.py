"""The ledger's process on a real bus: kills, holes, rollbacks, and a tape made anew."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import nats
import pytest
from nats.aio.client import Client

from broker_process import BrokerProcess
from synthetic_tapes import SyntheticTape
from waterclock_ledger.check import check, check_log
from waterclock_ledger.files import LogHead, incarnations, open_reader
from waterclock_ledger.report import replay
from waterclock_proto.leaves import Leaf, decode_leaf, encode_leaf

WAIT_S = 30.0


class LedgerProcess:
    """``python -m waterclock_ledger`` in a folder of its own."""

    def __init__(self, folder: Path, broker: BrokerProcess) -> None:
        folder.mkdir()
        self.folder = folder
        self.record = folder / "ledger"
        self.config = folder / "waterclock.toml"
        self.config.write_text(
            f'[bus]\nurl = "{broker.url}"\n'
            f'[service]\ndata_dir = "{folder}"\nmesh_key = "{"ab" * 32}"\n'
        )
        self.log = folder / "ledger.log"
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        with self.log.open("ab") as output:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "waterclock_ledger",
                env=os.environ | {"WATERCLOCK_CONFIG": str(self.config)},
                stderr=output,
            )

    async def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        assert self.process is not None
        if self.process.returncode is None:
            self.process.send_signal(number)
        return await self.process.wait()

    def leaves(self) -> list[Leaf]:
        """Every leaf of every incarnation."""
        return [
            leaf
            for head in self.heads()
            for batch in open_reader(self.record, head)
            for leaf in batch.leaves
        ]

    def heads(self) -> list[LogHead]:
        return incarnations(self.record)

    async def until(self, condition: Callable[[], bool]) -> None:
        give_up = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < give_up, self.log.read_text()
            await asyncio.sleep(0.02)

    async def has(self, payload: bytes) -> None:
        """Wait until the record ends with what was published last, its own events aside."""
        await self.until(lambda: any(leaf.payload == payload for leaf in self.leaves()))


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    made = BrokerProcess(tmp_path / "broker").start()
    yield made
    made.stop()


@asynccontextmanager
async def a_ledger(tmp_path: Path, broker: BrokerProcess) -> AsyncIterator[LedgerProcess]:
    ledger = LedgerProcess(tmp_path / "mesh", broker)
    await ledger.start()
    try:
        yield ledger
    finally:
        await ledger.end()


@asynccontextmanager
async def a_client(broker: BrokerProcess) -> AsyncIterator[Client]:
    client = await nats.connect(broker.url)
    try:
        yield client
    finally:
        await client.close()


async def publish(client: Client, made: SyntheticTape, start: int = 0) -> bytes:
    """Store the tape's events from a place on, each acknowledged; the last payload."""
    payload = b""
    for leaf in map(decode_leaf, made.leaves[start:]):
        payload = leaf.payload
        await client.request(leaf.subject, payload, timeout=20)
    return payload


async def stream_exists(client: Client, ledger: LedgerProcess) -> None:
    """Wait until the ledger has made the streams and begun its record."""
    await ledger.until(lambda: (ledger.record / "log").is_dir() and bool(ledger.heads()))


def requests(count: int, first: int = 0) -> SyntheticTape:
    """A tape without ``log_opened``: the process on the real bus makes its own."""
    tape = SyntheticTape()
    tape.elect()
    for number in range(first, first + count):
        tape.run(f"r{number}", number * 1_000)
    return tape


async def test_what_is_published_is_recorded_through_kills_and_restarts_of_everything(
    tmp_path: Path, broker: BrokerProcess
) -> None:
    made = requests(60)
    async with a_ledger(tmp_path, broker) as ledger, a_client(broker) as client:
        await stream_exists(client, ledger)
        for round_, start in enumerate(range(0, len(made.leaves), 100)):
            part = SyntheticTape()
            part.leaves = made.leaves[start : start + 100]
            sending = asyncio.create_task(publish(client, part))
            if round_ == 1:
                await asyncio.sleep(0.05)
                await ledger.end(signal.SIGKILL)
                await ledger.start()
            payload = await sending
            if round_ == 2:
                broker.restart()
            await ledger.has(payload)
        assert await ledger.end() == 0
        assert check(ledger.record).violations == []
        (head,) = ledger.heads()
        assert (head.reason, head.first_sequence, head.announced_sequence) == ("created", 1, 1)
        published = [decode_leaf(leaf).payload for leaf in made.leaves]
        recorded = [leaf.payload for leaf in ledger.leaves()]
        assert [payload for payload in recorded if payload in set(published)] == published
        stream = await client.jetstream().stream_info("EVENTS")
        # The last words of a killed or stopped ledger may follow what it could record.
        assert len(recorded) <= stream.state.last_seq
        for leaf in ledger.leaves()[::50]:
            stored = await client.jetstream().get_msg("EVENTS", leaf.sequence)
            assert (stored.subject, stored.data) == (leaf.subject, leaf.payload)
        (group,) = replay(ledger.record).groups
        assert group.outcomes["completed"] == 60


async def test_deleted_events_become_holes(tmp_path: Path, broker: BrokerProcess) -> None:
    async with a_ledger(tmp_path, broker) as ledger, a_client(broker) as client:
        await stream_exists(client, ledger)
        await ledger.end()
        made = requests(5)
        stream = client.jetstream()
        before = (await stream.stream_info("EVENTS")).state.last_seq
        payload = await publish(client, made)
        for sequence in (before + 4, before + 5, before + 9):
            await stream.delete_msg("EVENTS", sequence)
        await ledger.start()
        await ledger.has(payload)
        assert [leaf.sequence for leaf in ledger.leaves() if leaf.hole] == [
            before + 4,
            before + 5,
            before + 9,
        ]
        violations = check_log(ledger.record)
        assert f"hole: nothing is known of sequences {before + 4} to {before + 5}" in violations


@pytest.mark.parametrize("stopped", [True, False], ids=["ledger stopped", "ledger running"])
async def test_an_older_copy_of_the_stream_in_its_place_begins_an_incarnation(
    tmp_path: Path, broker: BrokerProcess, stopped: bool
) -> None:
    made = requests(20)
    common = 70
    async with a_ledger(tmp_path, broker) as ledger:
        async with a_client(broker) as client:
            await stream_exists(client, ledger)
            first_part = SyntheticTape()
            first_part.leaves = made.leaves[:common]
            await ledger.has(await publish(client, first_part))
        broker.stop()
        broker.copy_store(tmp_path / "copy")
        broker.start()
        async with a_client(broker) as client:
            await ledger.has(await publish(client, made, common))
        if stopped:
            await ledger.end()
        old = ledger.leaves()
        broker.kill()
        broker.restore_store(tmp_path / "copy")
        broker.start()
        async with a_client(broker) as client:
            if not stopped:
                await ledger.until(lambda: len(ledger.heads()) == 2)
            other = requests(6, first=100)
            payload = await publish(client, other)
            if stopped:
                await ledger.start()
            await ledger.until(lambda: len(ledger.heads()) == 2)
            await ledger.has(payload)
            await ledger.until(lambda: ledger.heads()[1].announced_sequence is not None)
            first, second = ledger.heads()
            assert (second.reason, second.previous_incarnation) == (
                "rolled_back",
                first.incarnation,
            )
            # Nothing recorded before has changed; the new incarnation is what the stream has now.
            recorded = ledger.leaves()
            assert recorded[: second.previous_size] == old[: second.previous_size]
            for leaf in recorded[second.previous_size :]:
                stored = await client.jetstream().get_msg("EVENTS", leaf.sequence)
                assert (stored.subject, stored.data) == (leaf.subject, leaf.payload)
            last_same = second.first_sequence - 1
            stored = await client.jetstream().get_msg("EVENTS", last_same)
            same = next(leaf for leaf in old if leaf.sequence == last_same)
            assert stored.data == same.payload
        record = replay(ledger.record)
        assert record.totals.abandoned == second.previous_size - last_same
        assert [part.reason for part in record.totals.incarnations] == ["created", "rolled_back"]


async def test_a_stream_made_anew_is_another_tape(tmp_path: Path, broker: BrokerProcess) -> None:
    async with a_ledger(tmp_path, broker) as ledger:
        async with a_client(broker) as client:
            await stream_exists(client, ledger)
            await ledger.has(await publish(client, requests(5)))
            await ledger.end()
            await client.jetstream().delete_stream("EVENTS")
        await ledger.start()
        await ledger.until(lambda: len(ledger.heads()) == 2)
        async with a_client(broker) as client:
            await ledger.has(await publish(client, requests(3, first=50)))
        first, second = ledger.heads()
        assert (second.reason, second.first_sequence) == ("replaced", 1)
        assert second.announced_sequence == 1
        assert first.incarnation != second.incarnation
        (group,) = replay(ledger.record).groups
        assert group.outcomes["completed"] == 8


async def test_a_second_ledger_makes_the_same_record(tmp_path: Path, broker: BrokerProcess) -> None:
    async with a_ledger(tmp_path, broker) as ledger, a_client(broker) as client:
        await stream_exists(client, ledger)
        payload = await publish(client, requests(10))
        await ledger.has(payload)
        second = LedgerProcess(tmp_path / "second", broker)
        await second.start()
        try:
            await second.has(payload)
            last = await publish(client, requests(4, first=70))
            await ledger.has(last)
            await second.has(last)
        finally:
            await second.end()
        both = zip(ledger.leaves(), second.leaves(), strict=False)
        assert all(encode_leaf(one) == encode_leaf(other) for one, other in both)
        assert [head.incarnation for head in ledger.heads()] == [
            head.incarnation for head in second.heads()
        ]
