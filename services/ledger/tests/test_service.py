"""The service over a tape in memory: what it appends, and when it begins anew."""

import asyncio
import contextlib
import errno
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import structlog
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from synthetic_tapes import SyntheticTape, stamp
from waterclock_ledger import service as service_module
from waterclock_ledger.check import check_log
from waterclock_ledger.config import LedgerSettings, check
from waterclock_ledger.files import LogUnwritable, LogWriter, incarnations, open_reader
from waterclock_ledger.service import LedgerService
from waterclock_ledger.tape import OPENING_SUBJECT
from waterclock_proto.envelope import Chain, decode_event
from waterclock_proto.events import LogOpened
from waterclock_proto.leaves import Leaf, decode_leaf, encode_leaf
from waterclock_runtime.clock import Clock
from waterclock_runtime.config import SettingsLoader
from waterclock_runtime.errors import BusUnavailable, ConfigRefused, StreamRolledBack
from waterclock_runtime.health import Health
from waterclock_runtime.tape import TapeMessage


class FakeTape:
    """EVENTS in memory. It keeps the contract of ``Tape`` and refuses what no caller may ask."""

    def __init__(self, leaves: list[bytes] | None = None) -> None:
        self.stored: dict[int, Leaf] = {}
        self.first = 1
        self.last = 0
        self.moved = asyncio.Event()
        self.batch_size = 7
        self.unavailable = 0
        self.shaken = False
        for leaf in leaves or []:
            self.store(decode_leaf(leaf))

    def store(self, leaf: Leaf) -> int:
        if not leaf.hole:
            self.last = leaf.sequence
            self.stored[leaf.sequence] = leaf
        self.moved.set()
        return leaf.sequence

    def publish(self, subject: str, payload: bytes) -> int:
        return self.store(
            Leaf(
                sequence=self.last + 1,
                stored_ns=1_000 * (self.last + 1),
                subject=subject,
                payload=payload,
            )
        )

    def cut(self, last: int) -> None:
        """What a power cut does: the end is gone, and its sequences are given again."""
        self.stored = {at: leaf for at, leaf in self.stored.items() if at <= last}
        self.last = last
        self.shake()

    def expire(self, first: int) -> None:
        self.stored = {at: leaf for at, leaf in self.stored.items() if at >= first}
        self.first = first

    def shake(self) -> None:
        """Make readers look again whether the tape is the one they read."""
        self.shaken = True
        self.moved.set()

    async def state(self) -> tuple[int, int]:
        if self.unavailable:
            self.unavailable -= 1
            raise BusUnavailable("the bus is away")
        return self.first, self.last

    async def message(self, sequence: int) -> Leaf | None:
        assert sequence >= 1
        return self.stored.get(sequence)

    async def newest_opening(self) -> Leaf | None:
        found = [leaf for leaf in self.stored.values() if leaf.subject == OPENING_SUBJECT]
        return found[-1] if found else None

    async def read(
        self, start: int, before: Leaf | None
    ) -> AsyncGenerator[list[TapeMessage], None]:
        assert before is None or before.sequence == start - 1
        following = start
        while True:
            if self.shaken:
                self.shaken = False
                found = self.stored.get(before.sequence) if before else None
                if self.last < following - 1 or (
                    before is not None and found is not None and found.payload != before.payload
                ):
                    raise StreamRolledBack(f"ends at {self.last}, {following - 1} had been read")
            ready = [leaf for at, leaf in self.stored.items() if at >= following]
            for leaf in ready[: self.batch_size]:
                before, following = leaf, leaf.sequence + 1
            yield [
                TapeMessage(leaf.sequence, leaf.stored_ns, leaf.subject, leaf.payload)
                for leaf in ready[: self.batch_size]
            ]
            if len(ready) <= self.batch_size:
                self.moved.clear()
                await self.moved.wait()


class Ledger:
    """One ledger process over a fake tape."""

    def __init__(self, tape: FakeTape, data_dir: Path, sync_interval_ms: int = 1) -> None:
        self.tape = tape
        self.health = Health()
        self.registry = CollectorRegistry()
        self.log = LogWriter(data_dir)
        self.chain = Chain(service="ledger", writer=f"ledger-{id(self)}", key=b"k")
        self.emitted: list[LogOpened] = []
        self.answered = True
        self.service = LedgerService(
            tape=tape,
            log=self.log,
            emit=self.emit,
            clock=Clock(environ={}),
            health=self.health,
            registry=self.registry,
            logger=structlog.get_logger(),
            sync_interval_ms=sync_interval_ms,
            on_incarnation=self.on_incarnation,
        )
        self.stopping = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    def emit(self, data: LogOpened, on_stored: Callable[[int], None]) -> None:
        self.emitted.append(data)
        if self.answered:
            on_stored(self.tape.publish(*self.chain.seal(data)))

    def on_incarnation(self, incarnation: str) -> None:
        self.chain.incarnation = incarnation

    async def until(self, condition: Callable[[], bool]) -> None:
        """Give the service its turns until it holds; a service that died says why."""
        assert self.task is not None
        while not condition():
            if self.task.done():
                self.task.result()
                raise AssertionError("the service ended")
            await asyncio.sleep(0)

    async def caught_up(self) -> None:
        def here() -> bool:
            head = self.log.head
            return head is not None and self.log.next_sequence == self.tape.last + 1

        await self.until(here)

    def metric(self, name: str, **labels: str) -> int:
        return int(self.registry.get_sample_value(name, labels) or 0)


@asynccontextmanager
async def running(
    tape: FakeTape, data_dir: Path, *, sync_interval_ms: int = 1
) -> AsyncIterator[Ledger]:
    ledger = Ledger(tape, data_dir, sync_interval_ms)
    ledger.task = asyncio.create_task(ledger.service.run(ledger.stopping))
    try:
        yield ledger
    finally:
        ledger.stopping.set()
        await ledger.task


def recorded(data_dir: Path, place: int = -1) -> list[Leaf]:
    head = incarnations(data_dir)[place]
    return [leaf for batch in open_reader(data_dir, head) for leaf in batch.leaves]


def a_tape(requests: int = 5) -> SyntheticTape:
    tape = SyntheticTape()
    tape.open("first")
    for number in range(requests):
        tape.run(f"r{number}", number * 1_000)
    return tape


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "OPENING_WAIT_S", 0)
    monkeypatch.setattr(service_module, "UNAVAILABLE_WAIT_S", 0)
    monkeypatch.setattr(service_module, "WATCH_INTERVAL_S", 0)


async def test_a_new_record_takes_the_name_that_the_tape_has(tmp_path: Path) -> None:
    made = a_tape()
    async with running(FakeTape(made.leaves), tmp_path) as ledger:
        await ledger.caught_up()
        assert ledger.health.ready
        await ledger.until(lambda: ledger.health.facts.get("lag_events") == 0)
        assert ledger.health.facts["incarnation"] == "first"
        assert ledger.metric("waterclock_ledger_sequence") == len(made.leaves)
        assert ledger.metric("waterclock_ledger_events_total", type="admitted") == 5
    assert ledger.emitted == []
    (head,) = incarnations(tmp_path)
    assert (head.incarnation, head.reason, head.announced_sequence) == ("first", "created", 1)
    assert [encode_leaf(leaf) for leaf in recorded(tmp_path)] == made.leaves
    assert check_log(tmp_path) == []


async def test_a_ledger_that_starts_again_goes_on_where_it_stood(tmp_path: Path) -> None:
    made = a_tape()
    tape = FakeTape(made.leaves[:20])
    async with running(tape, tmp_path) as ledger:
        await ledger.caught_up()
    for leaf in made.leaves[20:]:
        tape.store(decode_leaf(leaf))
    async with running(tape, tmp_path) as ledger:
        await ledger.caught_up()
    assert [encode_leaf(leaf) for leaf in recorded(tmp_path)] == made.leaves
    assert len(incarnations(tmp_path)) == 1


async def test_a_tape_without_a_name_is_given_one(tmp_path: Path) -> None:
    made = SyntheticTape()
    made.elect()
    made.run("r", 1_000)
    tape = FakeTape(made.leaves)
    async with running(tape, tmp_path) as ledger:
        await ledger.until(lambda: len(ledger.log.heads) == 1)
        await ledger.until(lambda: ledger.log.heads[0].announced_sequence is not None)
        await ledger.caught_up()
    (head,) = incarnations(tmp_path)
    (opened,) = ledger.emitted
    assert (opened.incarnation, opened.first_sequence, opened.reason) == (
        head.incarnation,
        1,
        "created",
    )
    assert head.announced_sequence == len(made.leaves) + 1
    # The event that says so names the incarnation in its envelope already.
    last = recorded(tmp_path)[-1]
    assert decode_event(last.subject, last.payload).incarnation == head.incarnation


async def test_an_empty_tape_is_opened_when_nobody_else_did(tmp_path: Path) -> None:
    tape = FakeTape()
    async with running(tape, tmp_path) as ledger:
        await ledger.until(lambda: tape.last == 1)
        await ledger.caught_up()
    assert len(ledger.emitted) == 1
    assert recorded(tmp_path)[0].subject == OPENING_SUBJECT


async def test_what_the_tape_lost_becomes_holes(tmp_path: Path) -> None:
    made = a_tape()
    tape = FakeTape(made.leaves)
    for sequence in (5, 11, 12, 13):
        del tape.stored[sequence]
    with capture_logs() as logs:
        async with running(tape, tmp_path) as ledger:
            await ledger.caught_up()
            assert ledger.health.report()[1]["wrong"] == {
                "holes": "4 since it started, the last ones 11 to 13"
            }
            assert ledger.metric("waterclock_ledger_holes_total") == 4
    found = [leaf.sequence for leaf in recorded(tmp_path) if leaf.hole]
    assert found == [5, 11, 12, 13]
    assert [entry["count"] for entry in logs if entry["event"] == "hole"] == [1, 3]
    assert "hole: nothing is known of sequences 11 to 13" in check_log(tmp_path)


async def test_a_record_made_late_keeps_the_index_that_the_leaves_have(tmp_path: Path) -> None:
    made = a_tape()
    tape = FakeTape(made.leaves)
    tape.publish(
        *made.chain("ledger", "ledger-0000").seal(
            LogOpened(
                incarnation="second",
                first_sequence=9,
                reason="rolled_back",
                previous_incarnation="first",
                previous_size=12,
                opened=stamp(0, "ledger"),
            )
        )
    )
    tape.expire(15)
    async with running(tape, tmp_path) as ledger:
        await ledger.caught_up()
    (head,) = incarnations(tmp_path)
    assert (head.incarnation, head.first_sequence) == ("second", 9)
    assert [leaf.sequence for leaf in recorded(tmp_path) if leaf.hole] == list(range(9, 15))
    assert ledger.emitted == []


async def test_a_rollback_that_another_record_saw_is_found_in_the_tape(tmp_path: Path) -> None:
    made = a_tape()
    tape = FakeTape(made.leaves[:18])
    opened = LogOpened(
        incarnation="second",
        first_sequence=15,
        reason="rolled_back",
        previous_incarnation="first",
        previous_size=20,
        opened=stamp(0, "ledger"),
    )
    tape.publish(*made.chain("ledger", "ledger-0000").seal(opened))
    last = tape.last
    tape.publish("wc.event.x._._", b"after")
    async with running(tape, tmp_path) as ledger:
        await ledger.until(lambda: len(ledger.log.heads) == 2)
        await ledger.caught_up()
    first, second = incarnations(tmp_path)
    assert (second.incarnation, second.first_sequence, second.announced_sequence) == (
        "second",
        15,
        last,
    )
    assert first.incarnation == "first"
    assert second.previous_size == last - 1
    assert ledger.emitted == []
    assert [leaf.sequence for leaf in recorded(tmp_path)] == list(range(15, last + 2))


@pytest.mark.parametrize("again", [True, False], ids=["sequences given again", "shorter"])
@pytest.mark.parametrize("running_through", [True, False], ids=["while it runs", "while it is off"])
async def test_a_tape_rolled_back_begins_an_incarnation_where_histories_part(
    tmp_path: Path, again: bool, running_through: bool
) -> None:
    made = a_tape()
    tape = FakeTape(made.leaves)
    length = len(made.leaves)

    def roll_back() -> None:
        tape.cut(21)
        if again:
            for number in range(length):
                tape.publish("wc.event.x._._", b"other %d" % number)

    async with contextlib.AsyncExitStack() as stack:
        ledger = await stack.enter_async_context(running(tape, tmp_path))
        await ledger.caught_up()
        if running_through:
            roll_back()
            await ledger.until(lambda: len(ledger.log.heads) == 2)
            await ledger.caught_up()
        await stack.aclose()
    if not running_through:
        roll_back()
        async with running(tape, tmp_path) as ledger:
            await ledger.until(lambda: len(ledger.log.heads) == 2)
            await ledger.caught_up()
    first, second = incarnations(tmp_path)
    assert (second.reason, second.first_sequence) == ("rolled_back", 22)
    assert (second.previous_incarnation, second.previous_size) == ("first", length)
    assert first.incarnation == "first"
    # Nothing is forgotten of what was recorded before.
    assert [encode_leaf(leaf) for leaf in recorded(tmp_path, 0)] == made.leaves
    (opened,) = ledger.emitted
    assert (opened.incarnation, opened.reason, opened.first_sequence) == (
        second.incarnation,
        "rolled_back",
        22,
    )
    assert ledger.metric("waterclock_ledger_incarnations_total", reason="rolled_back") == 1
    assert [leaf.sequence for leaf in recorded(tmp_path)] == list(range(22, tape.last + 1))
    assert recorded(tmp_path)[-1].subject == OPENING_SUBJECT


async def test_the_same_bytes_stored_at_another_moment_are_another_history(
    tmp_path: Path,
) -> None:
    made = a_tape()
    tape = FakeTape(made.leaves)
    async with running(tape, tmp_path) as ledger:
        await ledger.caught_up()
    tape.cut(21)
    for leaf in map(decode_leaf, made.leaves[21:]):
        tape.publish(leaf.subject, leaf.payload)
    async with running(tape, tmp_path) as ledger:
        await ledger.until(lambda: len(ledger.log.heads) == 2)
        await ledger.caught_up()
    assert incarnations(tmp_path)[1].first_sequence == 22


async def test_a_second_rollback_may_reach_behind_the_first(tmp_path: Path) -> None:
    made = a_tape()
    tape = FakeTape(made.leaves)
    async with running(tape, tmp_path) as ledger:
        await ledger.caught_up()
        for place, last in enumerate((21, 12), start=2):
            tape.cut(last)
            await ledger.until(lambda place=place: len(ledger.log.heads) == place)
            await ledger.caught_up()
    assert [head.first_sequence for head in incarnations(tmp_path)] == [1, 22, 13]
    assert {head.reason for head in incarnations(tmp_path)[1:]} == {"rolled_back"}


@pytest.mark.parametrize("named", [True, False], ids=["named by its maker", "without a name"])
async def test_another_tape_is_another_tape(tmp_path: Path, named: bool) -> None:
    made = a_tape()
    async with running(FakeTape(made.leaves), tmp_path) as ledger:
        await ledger.caught_up()
    other = SyntheticTape()
    other.now_us = 77
    if named:
        other.open("other")
    other.run("r", 9_999)
    async with running(FakeTape(other.leaves), tmp_path) as ledger:
        await ledger.until(lambda: len(ledger.log.heads) == 2)
        await ledger.until(lambda: ledger.log.heads[1].announced_sequence is not None)
        await ledger.caught_up()
    _, second = incarnations(tmp_path)
    assert (second.reason, second.first_sequence) == ("replaced", 1)
    assert (second.incarnation == "other") == named
    assert len(ledger.emitted) == (0 if named else 1)


async def test_a_ledger_that_died_before_it_could_say_so_says_it_when_it_comes_back(
    tmp_path: Path,
) -> None:
    made = SyntheticTape()
    made.elect()
    tape = FakeTape(made.leaves)
    ledger = Ledger(tape, tmp_path)
    ledger.answered = False
    ledger.task = asyncio.create_task(ledger.service.run(ledger.stopping))
    await ledger.caught_up()
    ledger.stopping.set()
    await ledger.task
    (head,) = incarnations(tmp_path)
    assert head.announced_sequence is None
    async with running(tape, tmp_path) as again:
        await again.until(lambda: again.log.heads[0].announced_sequence is not None)
    assert [opened.incarnation for opened in again.emitted] == [head.incarnation]
    assert incarnations(tmp_path)[0].announced_sequence == len(made.leaves) + 1


async def test_expired_events_that_were_never_read_are_holes_and_nothing_else(
    tmp_path: Path,
) -> None:
    made = a_tape()
    tape = FakeTape(made.leaves[:10])
    async with running(tape, tmp_path) as ledger:
        await ledger.caught_up()
    for leaf in made.leaves[10:]:
        tape.store(decode_leaf(leaf))
    tape.expire(16)
    async with running(tape, tmp_path) as ledger:
        await ledger.caught_up()
    assert len(incarnations(tmp_path)) == 1
    assert [leaf.sequence for leaf in recorded(tmp_path) if leaf.hole] == list(range(11, 16))


async def test_while_the_bus_is_away_health_says_so_and_the_ledger_waits(tmp_path: Path) -> None:
    tape = FakeTape(a_tape().leaves)
    tape.unavailable = 3
    async with running(tape, tmp_path) as ledger:
        await ledger.until(lambda: "tape" in ledger.health.report()[1]["wrong"])
        await ledger.caught_up()
        assert ledger.health.report()[1]["wrong"] == {}


async def test_with_no_interval_every_batch_is_durable_before_the_next(tmp_path: Path) -> None:
    tape = FakeTape(a_tape().leaves)
    async with running(tape, tmp_path, sync_interval_ms=0) as ledger:
        await ledger.caught_up()
        assert ledger.log.synced_size >= ledger.log.size - tape.batch_size
        await ledger.until(lambda: ledger.log.synced_size == ledger.log.size)


async def test_a_disk_that_refuses_ends_the_service_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = a_tape()
    tape = FakeTape(made.leaves)

    def refuse(descriptor: int, content: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    ledger = Ledger(tape, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", refuse)
        with pytest.raises(LogUnwritable, match="No space left"):
            await ledger.service.run(ledger.stopping)
    async with running(tape, tmp_path) as ledger:
        await ledger.caught_up()
    assert [encode_leaf(leaf) for leaf in recorded(tmp_path)] == made.leaves


async def test_a_torn_end_is_cut_said_and_read_again(tmp_path: Path) -> None:
    made = a_tape()
    tape = FakeTape(made.leaves)
    async with running(tape, tmp_path) as ledger:
        await ledger.caught_up()
    folder = tmp_path / "log" / "first"
    path = folder / "leaves-000000000000.bin"
    os.truncate(path, path.stat().st_size - 5)
    (folder / "synced").write_text(f"file {0:012d} bytes {0:015d}\n")
    with capture_logs() as logs:
        async with running(tape, tmp_path) as ledger:
            await ledger.caught_up()
    assert [encode_leaf(leaf) for leaf in recorded(tmp_path)] == made.leaves
    (said,) = [entry for entry in logs if entry["event"] == "torn_end_cut"]
    assert said["torn_bytes"] == len(made.leaves[-1]) + 2 - 5
    assert str(path) == said["path"]


async def test_an_invented_type_makes_no_label_of_its_own(tmp_path: Path) -> None:
    tape = FakeTape(a_tape(1).leaves)
    for number in range(20):
        tape.publish(f"wc.event.invented{number}._._", b"{}")
    async with running(tape, tmp_path) as ledger:
        await ledger.caught_up()
        assert ledger.metric("waterclock_ledger_events_total", type="unknown") == 20
    assert len(recorded(tmp_path)) == tape.last


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", ""),
        ("[ledger]\nsync_interval_ms = 0\n", ""),
        ("[ledger]\nsync_interval_ms = -1\n", "expected 0 to 60000, found -1"),
        ("[ledger]\nsync_interval_ms = 99999\n", "expected 0 to 60000, found 99999"),
        ("[ledger]\nsync_intervall_ms = 5\n", "did you mean 'sync_interval_ms'?"),
        ("[ledger]\nsync_interval_ms = 'often'\n", "sync_interval_ms"),
    ],
)
def test_mistakes_in_the_settings_are_named(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "waterclock.toml"
    file.write_text(text)
    loader = SettingsLoader(file=file, environ={})
    check(loader)
    if not said:
        loader.finish()
        return
    with pytest.raises(ConfigRefused) as refused:
        loader.finish()
    assert said in str(refused.value)


def test_the_default_interval_is_what_the_readme_says() -> None:
    readme = Path(__file__).parents[1] / "README.md"
    assert f"`sync_interval_ms` ({LedgerSettings().sync_interval_ms})" in readme.read_text()


def test_every_metric_stands_in_the_readme(tmp_path: Path) -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    registry = CollectorRegistry()
    service_module.Metrics(registry, LogWriter(tmp_path))
    names = [
        metric.name + ("_total" if metric.type == "counter" else "")
        for metric in registry.collect()
    ]
    assert names
    assert [name for name in names if f"`{name}`" not in readme] == []
