"""The writer against a bus in memory: nothing lost, nothing changed, one order."""

import asyncio
import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fake_wire import FakeWire
from waterclock_proto.envelope import EventRefused, decode_event
from waterclock_proto.events import ClockReported, Failed, WriterSealed
from waterclock_proto.stamps import Stamp
from waterclock_runtime import limits
from waterclock_runtime.clock import Clock
from waterclock_runtime.errors import BusUnavailable
from waterclock_runtime.writer import EventWriter

CLOCK = Clock(environ={})


def failed(number: int, detail_bytes: int = 0) -> Failed:
    return Failed(
        tenant="acme",
        id=f"r{number}",
        attempt=1,
        worker="w-1",
        reason="engine_error",
        detail="x" * detail_bytes,
        ended=Stamp(wall_us=1_700_000_000_000_000, source="worker"),
    )


class Hand:
    """A writer whose clock is moved by hand, and what it was told of its events."""

    def __init__(self, window: int = 8) -> None:
        self.wire = FakeWire()
        self.now_s = 100.0
        self.writer = EventWriter(
            self.wire,
            service="worker",
            clock=CLOCK,
            key=b"k" * 32,
            window=window,
            now_s=lambda: self.now_s,
        )
        self.writer.attach()
        self.stored: dict[int, int] = {}
        self.emitted = 0

    def emit(self, detail_bytes: int = 0) -> None:
        counter = self.writer.emit(
            failed(self.emitted, detail_bytes),
            lambda sequence, counter=self.emitted: self._on_stored(counter, sequence),
        )
        assert counter == self.emitted
        self.emitted += 1

    def emit_many(self, count: int) -> None:
        for _ in range(count):
            self.emit()

    def later(self, seconds: float) -> None:
        """Let time pass, and the writer look after its events."""
        self.now_s += seconds
        if self.wire.connected:
            self.writer.sweep()

    def _on_stored(self, counter: int, sequence: int) -> None:
        assert counter not in self.stored, "said twice that an event is stored"
        assert self._counter_at(sequence) == counter
        self.stored[counter] = sequence

    def _counter_at(self, sequence: int) -> int:
        return decode_event(*self.wire.tape[sequence - 1]).counter

    @property
    def counters(self) -> list[int]:
        """The tape."""
        return [self._counter_at(sequence) for sequence in range(1, len(self.wire.tape) + 1)]

    @property
    def first_counters(self) -> list[int]:
        return list(dict.fromkeys(self.counters))

    @property
    def on_their_way(self) -> list[int]:
        return [decode_event(m.subject, m.payload).counter for m in self.wire.outbox]

    def check_all(self) -> None:
        assert self.writer.outstanding == 0
        assert self.first_counters == list(range(self.emitted))
        assert sorted(self.stored) == list(range(self.emitted))


@pytest.fixture
def hand() -> Hand:
    return Hand()


def test_the_first_goes_alone_and_each_acknowledgement_lets_more_follow(hand: Hand) -> None:
    hand.emit_many(20)
    seen: list[int] = []
    while hand.wire.outbox:
        seen.append(len(hand.wire.outbox))
        hand.wire.take(len(hand.wire.outbox))
    # 1, then twice as many for each, up to the window.
    assert seen[:3] == [1, 2, 8]
    assert max(seen) <= 8
    hand.check_all()
    assert hand.writer.republished == 0


def test_what_is_under_way_never_exceeds_the_window(hand: Hand) -> None:
    hand.emit_many(4)
    hand.wire.take_all()
    hand.emit_many(50)
    assert len(hand.wire.outbox) == 8
    hand.wire.take(3)
    assert len(hand.wire.outbox) == 8
    hand.wire.take_all()
    hand.check_all()


def test_lost_acknowledgements_repeat_the_same_bytes(hand: Hand) -> None:
    hand.emit_many(5)
    hand.wire.take_all()
    hand.emit_many(5)
    hand.wire.break_connection(taken=3)
    assert hand.writer.outstanding == 5
    hand.wire.reconnect()
    assert hand.on_their_way == [5]
    hand.wire.take_all()
    hand.check_all()
    assert hand.counters == [*range(8), *range(5, 10)]
    assert hand.writer.republished == 5


def test_nothing_is_published_while_the_connection_is_broken(hand: Hand) -> None:
    hand.wire.break_connection()
    hand.emit_many(5)
    hand.later(60)
    assert hand.wire.outbox == []
    hand.wire.reconnect()
    hand.wire.take_all()
    hand.check_all()


def test_a_full_tape_stalls_and_is_tried_with_one_event(hand: Hand) -> None:
    hand.emit_many(4)
    hand.wire.take_all()
    hand.wire.bytes_max = 0
    hand.emit_many(6)
    hand.wire.take_all()
    assert hand.writer.stalled
    assert hand.writer.stalled_why == "the tape refuses events: maximum bytes exceeded"
    assert hand.writer.refused == 1
    hand.emit_many(6)
    assert hand.on_their_way == []
    for _ in range(5):
        hand.later(0.1)
        assert hand.on_their_way == [4]
        hand.wire.take_all()
    assert len(hand.wire.book.named("tape_refuses_events")) == 1
    hand.wire.bytes_max = None
    hand.later(0.1)
    hand.wire.take_all()
    assert not hand.writer.stalled
    assert len(hand.wire.book.named("tape_takes_events_again")) == 1
    assert hand.counters == list(range(16))
    hand.check_all()


def test_a_small_event_behind_a_refused_large_one_is_counted_as_turned(hand: Hand) -> None:
    hand.emit_many(4)
    hand.wire.take_all()
    hand.wire.bytes_max = hand.wire.bytes_held + 900
    hand.emit(detail_bytes=512)
    hand.emit()
    hand.wire.take_all()
    assert hand.writer.turned == 1
    hand.wire.bytes_max = None
    hand.later(0.1)
    hand.wire.take_all()
    # Nothing is lost, and the tape shows it as it was.
    assert hand.counters == [0, 1, 2, 3, 5, 4]
    assert sorted(hand.stored) == list(range(6))


def test_a_refused_event_whose_copy_is_taken_was_not_overtaken(hand: Hand) -> None:
    hand.emit()
    hand.wire.bytes_max = 0
    hand.later(limits.WRITER_ACK_TIMEOUT_S + 0.1)
    assert hand.on_their_way == [0, 0]
    hand.wire.take()
    assert hand.writer.stalled
    hand.wire.bytes_max = None
    hand.wire.take()
    assert not hand.writer.stalled
    assert hand.writer.turned == 0
    hand.emit_many(2)
    hand.wire.take_all()
    hand.check_all()


def test_silence_is_probed_with_one_event_not_with_all(hand: Hand) -> None:
    hand.emit_many(4)
    hand.wire.take_all()
    hand.emit_many(8)
    hand.later(limits.WRITER_ACK_TIMEOUT_S - 0.1)
    assert len(hand.wire.outbox) == 8
    for _ in range(15):
        hand.later(0.1)
    # After 3.4 s: one probe; a bus that only stood still then answers them all.
    assert hand.on_their_way == [*range(4, 12), 4]
    hand.wire.take_all()
    assert hand.writer.republished == 1
    hand.check_all()


def test_what_was_lost_on_the_way_is_repeated_once_a_probe_is_answered(hand: Hand) -> None:
    hand.emit_many(4)
    hand.wire.take_all()
    hand.emit_many(8)
    hand.wire.lose(8)
    hand.later(limits.WRITER_ACK_TIMEOUT_S + 0.1)
    assert hand.on_their_way == [4]
    hand.wire.take_all()
    hand.check_all()
    assert hand.counters == list(range(12))
    assert len(hand.wire.book.named("events_lost_on_the_way")) == 1


def test_a_full_buffer_is_tried_again_in_order(hand: Hand) -> None:
    hand.emit_many(4)
    hand.wire.take_all()
    hand.wire.buffer_full = True
    hand.emit_many(4)
    assert hand.wire.outbox == []
    hand.wire.buffer_full = False
    hand.emit()
    assert hand.on_their_way == [4, 5, 6, 7, 8]
    hand.wire.take_all()
    hand.check_all()
    assert hand.writer.republished == 0


def test_a_second_acknowledgement_is_ignored(hand: Hand) -> None:
    hand.emit_many(2)
    reply = hand.wire.outbox[0].reply
    hand.wire.take_all()
    for _ in range(3):
        hand.wire.deliver(reply, b'{"stream":"EVENTS","seq":1}')
    hand.wire.deliver(reply, b'{"error":{"code":503,"description":"late"},"seq":0}')
    assert not hand.writer.stalled
    hand.emit_many(3)
    hand.wire.take_all()
    hand.check_all()


@pytest.mark.parametrize(
    ("payload", "headers", "why"),
    [
        (b"", {"Status": "503"}, "no stream takes this subject"),
        (b"not json", None, "not an acknowledgement"),
        (b"{}", None, "not an acknowledgement"),
    ],
)
def test_what_is_no_acknowledgement_is_a_refusal(
    hand: Hand, payload: bytes, headers: dict[str, str] | None, why: str
) -> None:
    hand.emit()
    hand.wire.deliver(hand.wire.outbox.pop().reply, payload, headers=headers)
    assert why in hand.writer.stalled_why
    hand.later(0.1)
    hand.wire.take_all()
    hand.check_all()


def test_an_event_that_no_reader_would_take_does_not_move_the_chain(hand: Hand) -> None:
    with pytest.raises(EventRefused):
        hand.writer.emit(failed(0, detail_bytes=100_000))
    hand.emit_many(2)
    hand.wire.take_all()
    hand.check_all()


async def test_ready_waits_for_room_and_for_nothing_else() -> None:
    hand = Hand(window=4)
    hand.emit_many(3)
    await asyncio.wait_for(hand.writer.ready(), 0.1)
    hand.emit()
    waiting = asyncio.create_task(hand.writer.ready())
    await asyncio.sleep(0)
    assert not waiting.done()
    hand.wire.take()
    await waiting
    hand.wire.take_all()
    assert await hand.writer.drain(0.1)


async def test_the_end_is_sealed_and_nothing_is_left_behind() -> None:
    hand = Hand()
    hand.emit_many(3)
    hand.wire.take_all()
    closing = asyncio.create_task(hand.writer.close(1.0))
    await asyncio.sleep(0)
    hand.wire.take_all()
    assert await closing
    last = decode_event(*hand.wire.tape[-1]).data
    assert isinstance(last, WriterSealed)
    assert (last.last, last.sealed_counter) == (True, 2)
    assert hand.wire.listeners == {}
    # The callbacks are gone as well: a break does not reach a closed writer.
    hand.wire.break_connection()
    hand.wire.reconnect()


async def test_an_end_without_the_bus_says_that_something_is_missing() -> None:
    hand = Hand()
    hand.wire.break_connection()
    hand.emit()
    assert not await hand.writer.close(0.01)
    assert hand.writer.outstanding == 2


def test_too_many_waiting_events_are_refused(hand: Hand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WRITER_WAITING_MAX", 10)
    hand.wire.break_connection()
    hand.emit_many(10)
    with pytest.raises(BusUnavailable, match="10 events wait for the tape"):
        hand.emit()


async def test_what_the_writer_says_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its clock first, as the carrier of a bracket; then seals, when the chain has moved."""
    monkeypatch.setattr(limits, "SEAL_INTERVAL_S", 0)
    monkeypatch.setattr(limits, "TAPE_LOOK_INTERVAL_S", 0)
    wire = FakeWire()
    wire.api_answers["STREAM.INFO"] = lambda _: {
        "state": {"bytes": 5},
        "config": {"max_bytes": 1_000},
    }
    writer = await EventWriter.open(wire, service="worker", clock=CLOCK, key=b"k" * 32)
    kinds: list[type] = []
    for _ in range(50):
        await asyncio.sleep(0)
        wire.take_all()
        kinds = [type(decode_event(*stored).data) for stored in wire.tape]
        if kinds[2:]:
            break
    assert kinds[:3] == [ClockReported, ClockReported, WriterSealed] or kinds[:3] == [
        ClockReported,
        WriterSealed,
        ClockReported,
    ]
    assert writer.tape_room is not None
    assert writer.tape_room.bytes_max == 1_000
    reports = [decode_event(*stored).data for stored in wire.tape]
    samples = [data.samples for data in reports if isinstance(data, ClockReported)]
    assert samples[0] == 0
    assert samples[1] >= 1
    await writer.close(0)
    assert wire.failure is None


class WriterOnABadBus(RuleBasedStateMachine):
    """Whatever the bus does: nothing lost, bytes repeated as they were, one order."""

    def __init__(self) -> None:
        super().__init__()
        self.hand = Hand()
        self.refused_before = 0

    @rule(count=st.integers(1, 12), detail=st.sampled_from([0, 0, 0, 300, 512]))
    def emit(self, count: int, detail: int) -> None:
        for place in range(count):
            self.hand.emit(detail if place % 3 == 0 else 0)

    @rule(count=st.integers(1, 12))
    def take(self, count: int) -> None:
        self.hand.wire.take(count)

    @rule(room=st.integers(0, 3_000))
    def fill_up(self, room: int) -> None:
        self.hand.wire.bytes_max = self.hand.wire.bytes_held + room

    @rule()
    def make_room(self) -> None:
        self.hand.wire.bytes_max = None

    @precondition(lambda self: self.hand.wire.connected)
    @rule(taken=st.integers(0, 12))
    def break_connection(self, taken: int) -> None:
        self.hand.wire.break_connection(taken)

    @precondition(lambda self: not self.hand.wire.connected)
    @rule()
    def reconnect(self) -> None:
        self.hand.wire.reconnect()

    @rule(full=st.booleans())
    def fill_buffer(self, full: bool) -> None:
        self.hand.wire.buffer_full = full

    @rule(seconds=st.sampled_from([0.1, 0.1, 0.1, 2.1, 10.0]))
    def later(self, seconds: float) -> None:
        self.hand.later(seconds)

    @invariant()
    def order_is_turned_by_refusals_alone(self) -> None:
        hand = self.hand
        if hand.wire.refusals == 0:
            assert hand.first_counters == list(range(len(hand.first_counters)))

    @invariant()
    def what_is_under_way_is_bounded(self) -> None:
        # Two windows: what was refused, and what goes behind it; and probes.
        assert len(self.hand.wire.outbox) <= 3 * 8

    def teardown(self) -> None:
        hand = self.hand
        hand.wire.bytes_max = None
        hand.wire.buffer_full = False
        if not hand.wire.connected:
            hand.wire.reconnect()
        for _ in range(200):
            hand.wire.take_all()
            if hand.writer.outstanding == 0:
                break
            hand.later(0.5)
        assert hand.writer.outstanding == 0
        assert sorted(hand.stored) == list(range(hand.emitted))
        first = hand.first_counters
        assert sorted(first) == list(range(hand.emitted))
        overtakers = sum(
            1 for place, counter in enumerate(first) if any(c < counter for c in first[place:])
        )
        if hand.wire.refusals == 0:
            assert overtakers == 0
        if hand.wire.breaks == 0:
            # A break can hide what was taken from whoever counts.
            assert hand.writer.turned == overtakers


WriterOnABadBus.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestWriterOnABadBus = WriterOnABadBus.TestCase


def test_a_bus_that_loses_messages_loses_no_event() -> None:
    """Every third message vanishes; the rest is answered in order."""
    hand = Hand()
    lost = itertools.count()
    hand.emit_many(40)
    for _ in range(2_000):
        if hand.writer.outstanding == 0:
            break
        while hand.wire.outbox:
            if next(lost) % 3 == 2:
                hand.wire.lose()
            else:
                hand.wire.take()
        hand.later(0.1)
    assert sorted(hand.stored) == list(range(40))
