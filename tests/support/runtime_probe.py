"""What the tests of the runtime share: a connected bus, its log, events, and what a reader got."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import structlog
from structlog.testing import CapturingLogger

from waterclock_proto.envelope import Envelope, decode_event
from waterclock_proto.events import EventData, Failed, Started
from waterclock_proto.stamps import Stamp
from waterclock_runtime.bus import Bus, BusSettings
from waterclock_runtime.clock import Clock
from waterclock_runtime.tape import TapeMessage, TapeReader
from waterclock_runtime.writer import EventWriter

KEY = b"k" * 32
MIB = 1024 * 1024


class LogBook:
    """Keeps what was logged; ``log`` is what the runtime takes."""

    def __init__(self) -> None:
        self._raw = CapturingLogger()
        self.log: Any = structlog.wrap_logger(self._raw, processors=[_level_and_event])

    def named(self, event: str) -> list[dict[str, Any]]:
        """Every line with this name."""
        return [line for line in self.lines if line["event"] == event]

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [dict(call.kwargs) for call in self._raw.calls]


def _level_and_event(_: Any, level: str, event: Any) -> Any:
    return (), {**event, "level": level}


@asynccontextmanager
async def connected(
    url: str, book: LogBook | None = None, *, provision: bool = True, **settings: Any
) -> AsyncIterator[Bus]:
    """A connected bus with small streams, closed at the end."""
    small: dict[str, Any] = {
        "events_bytes_max": 256 * MIB,
        "requests_bytes_max": 64 * MIB,
        "answers_bytes_max": 64 * MIB,
    }
    bus = await Bus.connect(
        BusSettings(url=url, **(small | settings)), name="probe", log=(book or LogBook()).log
    )
    try:
        if provision:
            await bus.provision()
        yield bus
    finally:
        await bus.close()


@asynccontextmanager
async def writing(
    bus: Bus, *, clock: Clock | None = None, window: int = 1_000
) -> AsyncIterator[EventWriter]:
    """An open writer, closed at the end."""
    writer = await EventWriter.open(
        bus, service="worker", clock=clock or Clock(environ={}), key=KEY, window=window
    )
    try:
        yield writer
    finally:
        await writer.close()


def event(number: int) -> Started:
    """A small event that can be told from others."""
    stamp = Stamp(wall_us=1_700_000_000_000_000 + number, source="worker")
    return Started(
        tenant="acme", id=f"r{number}", attempt=1, worker="w-1", taken=stamp, submitted=stamp
    )


class Account:
    """What a reader has been handed, and whether that is what it was promised."""

    def __init__(self) -> None:
        self.messages: list[TapeMessage] = []
        self.envelopes: list[Envelope[EventData]] = []
        self.empty_batches = 0
        self.largest_batch = 0
        self._ids: dict[str, None] = {}

    def take(self, batch: Sequence[TapeMessage]) -> None:
        if not batch:
            self.empty_batches += 1
        self.largest_batch = max(self.largest_batch, len(batch))
        for message in batch:
            self.messages.append(message)
            envelope = decode_event(message.subject, message.payload)
            self.envelopes.append(envelope)
            if isinstance(envelope.data, Started | Failed):
                self._ids.setdefault(envelope.data.id)

    @property
    def sequences(self) -> list[int]:
        return [message.sequence for message in self.messages]

    def first_counters(self, writer: str) -> list[int]:
        """The writer's counters in the order in which each stood on the tape first."""
        return list(dict.fromkeys(env.counter for env in self.envelopes if env.writer == writer))

    def ids(self) -> list[str]:
        """Ids of the tests' own events, each once, in the order of the tape."""
        return list(self._ids)

    @property
    def last_id(self) -> str:
        """The newest of ``ids``."""
        return next(reversed(self._ids), "")

    def repetitions(self) -> int:
        """Events that stand on the tape again; they must be the same bytes."""
        seen: dict[tuple[str, int], bytes] = {}
        again = 0
        for message, envelope in zip(self.messages, self.envelopes, strict=True):
            key = (envelope.writer, envelope.counter)
            again += key in seen
            assert seen.setdefault(key, message.payload) == message.payload
        return again


async def read_until(
    reader: TapeReader, account: Account, enough: Callable[[Account], bool]
) -> None:
    """Iterate until ``enough`` says so; the test's own timeout is the bound."""
    async for batch in reader:
        account.take(batch)
        if enough(account):
            return


async def until(condition: Callable[[], bool], wait_s: float = 20.0) -> float:
    """Wait until ``condition`` holds; how long that took, in seconds."""
    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    while not condition():
        assert loop.time() - begun_s < wait_s, "it did not come about in time"
        await asyncio.sleep(0.005)
    return loop.time() - begun_s
