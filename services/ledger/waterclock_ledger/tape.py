"""The tape, as far as the ledger needs it: the adapter to the bus."""

from collections.abc import AsyncGenerator
from typing import Protocol

from waterclock_proto.events import LogOpened
from waterclock_proto.leaves import Leaf
from waterclock_proto.subjects import EVENTS, event_filter
from waterclock_runtime.bus import Bus
from waterclock_runtime.tape import TapeMessage, TapeReader

OPENING_SUBJECT = event_filter(LogOpened, tenant="_", scope="_")
"""Where every ``log_opened`` stands."""


class Tape(Protocol):
    """EVENTS. Every method may raise ``BusUnavailable``; whoever calls decides."""

    async def state(self) -> tuple[int, int]:
        """First and last sequence; the last is one less than the first if nothing is there."""
        ...

    async def message(self, sequence: int) -> Leaf | None:
        """What stands at a sequence now; None if nothing does."""
        ...

    async def newest_opening(self) -> Leaf | None:
        """The last ``log_opened``."""
        ...

    def read(self, start: int, before: Leaf | None) -> AsyncGenerator[list[TapeMessage]]:
        """All messages from ``start`` on, in order, for ever; an empty batch at the head.

        ``before`` is what stood at ``start - 1``. Sequences that the stream has lost are left
        out.

        Raises (from iteration):
            StreamRolledBack: the tape does not have any more what was read, or ``before``.
        """
        ...


class BusTape:
    """EVENTS on the bus."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def state(self) -> tuple[int, int]:
        first, last = await self._bus.stream_state(EVENTS.name)
        # An empty new stream says 0 and 0, an emptied one says n + 1 and n.
        return max(1, first), last

    async def message(self, sequence: int) -> Leaf | None:
        found = await self._bus.message(EVENTS.name, sequence)
        if found is None:
            return None
        subject, payload, stored_ns = found
        return Leaf(sequence=sequence, stored_ns=stored_ns, subject=subject, payload=payload)

    async def newest_opening(self) -> Leaf | None:
        found = await self._bus.last(EVENTS.name, OPENING_SUBJECT)
        return None if found is None else await self.message(found[1])

    def read(self, start: int, before: Leaf | None) -> AsyncGenerator[list[TapeMessage]]:
        reader = TapeReader(self._bus, start=start)
        if before is not None and not before.hole:
            reader.remember(before.sequence, before.payload, before.stored_ns)
        return self._batches(reader)

    async def _batches(self, reader: TapeReader) -> AsyncGenerator[list[TapeMessage]]:
        try:
            async for batch in reader:
                yield batch
        finally:
            await reader.close()
