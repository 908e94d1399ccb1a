"""Two counts that make an omission visible: a writer's chain, and a tenant's numbers.

Both tolerate what a correct writer does. It publishes without waiting, so an event that the
tape refused may stand behind successors that were on their way with it; and it repeats byte
for byte what was not acknowledged, so an event may stand on the tape twice. And a writer that
dies leaves a *tail*: of its last events, published and not acknowledged, some are there and
some are not. What remains when all this is allowed for is a break.
"""

import heapq
from collections.abc import Iterator
from typing import Final, Literal

from msgspec import Struct, UnsetType

from waterclock_proto.envelope import CHAIN_START, Envelope
from waterclock_proto.events import EventData, WriterSealed
from waterclock_runtime.limits import WRITER_WINDOW_MAX

TAIL_EVENTS_MAX: Final = WRITER_WINDOW_MAX
"""A writer has at most so many events on their way at once, so a gap with more of its events
behind it was not a crash."""
TAIL_NS_MAX: Final = 30 * 10**9
"""Nor was one behind which the writer still wrote half a minute later: what is not acknowledged
it repeats every two seconds, and after a break of the connection before all else."""
REPEATS_MAX: Final = WRITER_WINDOW_MAX
"""How far back a repetition can be compared with what was said first."""

_SHA256_BYTES: Final = 32

Seen = Literal["new", "repeated", "forked"]


class ChainBreak(Struct, frozen=True, kw_only=True):
    """A place where a writer's events do not follow one another."""

    writer: str
    counter: int
    """The event at which it was seen."""
    sequence: int
    kind: Literal["missing", "previous", "forked", "sealed"]
    detail: str

    def __str__(self) -> str:
        where = f"writer {self.writer} at counter {self.counter}, sequence {self.sequence}"
        return f"{where}: {self.detail}"


class Tail(Struct, frozen=True, kw_only=True):
    """The last events of a writer, with a gap before them that nothing closed."""

    writer: str
    missing_first: int
    missing_last: int
    behind: int
    """How many of its events stand behind the gap."""


class Chains:
    """Every writer of a record.

    ``open_start``: the record begins in the middle of a tape, so that a writer's first event
    in it need not be its first.
    """

    def __init__(self, *, open_start: bool = False) -> None:
        self._open_start = open_start
        self._writers: dict[str, _Writer] = {}
        self._breaks: list[ChainBreak] = []
        self.repeated = 0

    def observe(
        self, envelope: Envelope[EventData], sha256: bytes, *, sequence: int, stored_ns: int
    ) -> Seen:
        """Take in one event; ``sha256`` is of its exact payload."""
        writer = self._writers.get(envelope.writer)
        previous = "" if isinstance(envelope.previous, UnsetType) else envelope.previous
        if writer is None:
            writer = self._writers[envelope.writer] = _Writer()
            if self._open_start:
                writer.first = writer.next = envelope.counter
                writer.head = previous
        counter = envelope.counter
        if counter < writer.first:
            # Stored behind its successor, just where the record begins: nothing to link it to.
            return "new"
        if counter < writer.next or counter in writer.ahead:
            return self._repeated(writer, envelope, sha256, sequence)
        self._check_seal(envelope, previous, sequence)
        event = _Ahead(previous, sha256, sequence)
        if counter > writer.next:
            if not writer.ahead:
                writer.ahead_since_ns = stored_ns
            writer.ahead[counter] = event
            if (
                len(writer.ahead) > TAIL_EVENTS_MAX
                or stored_ns - writer.ahead_since_ns > TAIL_NS_MAX
            ):
                self._give_up_waiting(envelope.writer, writer, stored_ns)
            return "new"
        self._link(envelope.writer, writer, event)
        self._link_waiting(envelope.writer, writer)
        return "new"

    @property
    def writers(self) -> int:
        return len(self._writers)

    @property
    def breaks(self) -> list[ChainBreak]:
        """In the order of the record."""
        return sorted(self._breaks, key=lambda found: found.sequence)

    @property
    def tails(self) -> list[Tail]:
        """Gaps that a crash explains, or that are being closed while the record is read."""
        return [
            Tail(
                writer=name,
                missing_first=writer.next,
                missing_last=min(writer.ahead) - 1,
                behind=len(writer.ahead),
            )
            for name, writer in self._writers.items()
            if writer.ahead
        ]

    def _repeated(
        self, writer: "_Writer", envelope: Envelope[EventData], sha256: bytes, sequence: int
    ) -> Seen:
        ahead = writer.ahead.get(envelope.counter)
        first = ahead.sha256 if ahead is not None else writer.said(envelope.counter)
        if first == sha256:
            self.repeated += 1
            return "repeated"
        self._breaks.append(
            ChainBreak(
                writer=envelope.writer,
                counter=envelope.counter,
                sequence=sequence,
                kind="forked",
                detail=f"a second event under this counter, SHA-256 {sha256.hex()}, after "
                + ("one too long ago to compare" if first is None else f"one of {first.hex()}"),
            )
        )
        return "forked"

    def _link(self, name: str, writer: "_Writer", event: "_Ahead") -> None:
        if event.previous != writer.head:
            self._breaks.append(
                ChainBreak(
                    writer=name,
                    counter=writer.next,
                    sequence=event.sequence,
                    kind="previous",
                    detail=f"says that SHA-256 {event.previous or 'of nothing'} came before it,"
                    f" expected {writer.head}",
                )
            )
        writer.take(event.sha256)

    def _link_waiting(self, name: str, writer: "_Writer") -> None:
        while (event := writer.ahead.pop(writer.next, None)) is not None:
            self._link(name, writer, event)

    def _give_up_waiting(self, name: str, writer: "_Writer", stored_ns: int) -> None:
        counter = min(writer.ahead)
        event = writer.ahead[counter]
        self._breaks.append(
            ChainBreak(
                writer=name,
                counter=counter,
                sequence=event.sequence,
                kind="missing",
                detail=f"counters {writer.next} to {counter - 1} are not in the record",
            )
        )
        writer.skip_to(counter, event.previous)
        # A second gap behind the first has half a minute of its own.
        writer.ahead_since_ns = stored_ns
        self._link_waiting(name, writer)

    def _check_seal(self, envelope: Envelope[EventData], previous: str, sequence: int) -> None:
        data = envelope.data
        if (
            isinstance(data, WriterSealed)
            and data.sealed_counter == envelope.counter - 1
            and data.head_sha256 != previous
        ):
            self._breaks.append(
                ChainBreak(
                    writer=envelope.writer,
                    counter=envelope.counter,
                    sequence=sequence,
                    kind="sealed",
                    detail=f"seals {data.head_sha256}, and says that {previous} came before it",
                )
            )


class NumberFault(Struct, frozen=True, kw_only=True):
    """Numbers of a tenant that are missing, or were given twice."""

    tenant: str
    kind: Literal["missing", "reused"]
    first: int
    last: int

    def __str__(self) -> str:
        span = f"{self.first}" if self.first == self.last else f"{self.first} to {self.last}"
        what = "missing" if self.kind == "missing" else "given twice"
        return f"tenant {self.tenant}: number {span} {what}"


class Numbers:
    """Whether each tenant's submissions are numbered 1, 2, 3, … on one tape.

    Only numbers of events that count are to be observed; what a deposed admission wrote is not.
    """

    def __init__(self, *, open_start: bool = False) -> None:
        self._open_start = open_start
        self._tenants: dict[str, _Numbered] = {}
        self._reused: list[NumberFault] = []

    def observe(self, tenant: str, first: int, count: int = 1) -> bool:
        """Take in ``count`` numbers from ``first`` on; False if they were given before."""
        numbered = self._tenants.get(tenant)
        if numbered is None:
            numbered = self._tenants[tenant] = _Numbered(first if self._open_start else 1)
        last = first + count - 1
        if first < numbered.next:
            self._reused.append(
                NumberFault(
                    tenant=tenant, kind="reused", first=first, last=min(last, numbered.next - 1)
                )
            )
            numbered.next = max(numbered.next, last + 1)
            fresh = False
        else:
            heapq.heappush(numbered.ahead, (first, last))
            fresh = True
        while numbered.ahead and numbered.ahead[0][0] <= numbered.next:
            first, last = heapq.heappop(numbered.ahead)
            if first < numbered.next:
                self._reused.append(
                    NumberFault(
                        tenant=tenant, kind="reused", first=first, last=min(last, numbered.next - 1)
                    )
                )
            numbered.next = max(numbered.next, last + 1)
        return fresh

    def last(self, tenant: str) -> int:
        """The highest number up to which nothing is missing."""
        numbered = self._tenants.get(tenant)
        return 0 if numbered is None else numbered.next - 1

    def faults(self) -> list[NumberFault]:
        """What is missing or was given twice, by tenant."""
        return sorted(
            [*self._reused, *self._missing()], key=lambda fault: (fault.tenant, fault.first)
        )

    def _missing(self) -> Iterator[NumberFault]:
        for tenant, numbered in self._tenants.items():
            expected = numbered.next
            for first, last in sorted(numbered.ahead):
                if first > expected:
                    yield NumberFault(tenant=tenant, kind="missing", first=expected, last=first - 1)
                expected = max(expected, last + 1)


class _Ahead(Struct, frozen=True):
    """An event of a chain before which something is missing still."""

    previous: str
    sha256: bytes
    sequence: int


class _Writer:
    """One chain: what comes next, what is ahead of that, and what was said lately."""

    __slots__ = ("_lately", "_lately_from", "ahead", "ahead_since_ns", "first", "head", "next")

    def __init__(self) -> None:
        self.first = self.next = 0
        self.head = CHAIN_START
        self.ahead: dict[int, _Ahead] = {}
        self.ahead_since_ns = 0
        self._lately = bytearray()
        self._lately_from = 0

    def take(self, sha256: bytes) -> None:
        if not self._lately:
            self._lately_from = self.next
        self._lately += sha256
        if len(self._lately) >= 2 * REPEATS_MAX * _SHA256_BYTES:
            del self._lately[: REPEATS_MAX * _SHA256_BYTES]
            self._lately_from += REPEATS_MAX
        self.next += 1
        self.head = sha256.hex()

    def skip_to(self, counter: int, head: str) -> None:
        self.next, self.head = counter, head
        self._lately.clear()

    def said(self, counter: int) -> bytes | None:
        """The hash of what was said under a counter, if it was said lately."""
        start = (counter - self._lately_from) * _SHA256_BYTES
        if start < 0 or start >= len(self._lately):
            return None
        return bytes(self._lately[start : start + _SHA256_BYTES])


class _Numbered:
    """One tenant: up to where nothing is missing, and what lies beyond."""

    __slots__ = ("ahead", "next")

    def __init__(self, first: int) -> None:
        self.next = first
        self.ahead: list[tuple[int, int]] = []
