"""A bus in memory that keeps the contract of ``Wire`` and checks that its user does.

Nothing moves by itself: a test says when the bus takes what was published, refuses, loses,
breaks and comes back.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct
from nats.aio.msg import Msg

from runtime_probe import LogBook
from waterclock_proto.envelope import decode_event
from waterclock_proto.subjects import EVENT_PREFIX, EVENTS
from waterclock_runtime.bus import OnMessage


class Published(Struct, frozen=True):
    """A message on its way to the bus."""

    subject: str
    payload: bytes
    reply: str


class FakeSubscription:
    """May be closed twice, as the contract says."""

    def __init__(self, wire: "FakeWire", subject: str) -> None:
        self._wire = wire
        self._subject = subject

    def close(self) -> None:
        self._wire.listeners.pop(self._subject, None)


class FakeWire:
    """Keeps ``Wire``'s contract; ``tape`` is what EVENTS holds."""

    def __init__(self) -> None:
        self.connected = True
        self.book = LogBook()
        self.log = self.book.log
        self.listeners: dict[str, OnMessage] = {}
        self.outbox: list[Published] = []
        """Published and not yet taken by the bus."""
        self.buffer_full = False
        self.tape: list[tuple[str, bytes]] = []
        """Sequence - 1 → subject and payload."""
        self.bytes_max: int | None = None
        self.bytes_held = 0
        self.refusals = 0
        self.breaks = 0
        self.core: list[Published] = []
        """What was published to anything but the tape."""
        self.api_calls: list[str] = []
        self.api_answers: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {}
        self.stored_ns = 1_700_000_000_000_000_000
        self.failure: Exception | None = None
        self._inboxes = 0
        self._breaks: list[Callable[[], None]] = []
        self._reconnects: list[Callable[[], None]] = []
        self._bytes_of: dict[tuple[str, int], bytes] = {}

    # Wire.

    def publish(
        self,
        subject: str,
        payload: bytes,
        headers: Mapping[str, str] | None = None,
        reply: str = "",
    ) -> bool:
        message = Published(subject, payload, reply)
        if not subject.startswith(EVENT_PREFIX):
            self.core.append(message)
            return True
        # Events wait in their writer, never in a buffer that is sent by somebody else.
        assert self.connected, "an event was published while the connection is broken"
        assert headers is None, "events carry no headers"
        envelope = decode_event(subject, payload)
        first = self._bytes_of.setdefault((envelope.writer, envelope.counter), payload)
        assert first == payload, "a repetition has other bytes"
        if self.buffer_full:
            return False
        self.outbox.append(message)
        return True

    def listen(self, subject: str, on_message: OnMessage) -> FakeSubscription:
        self.listeners[subject] = on_message
        return FakeSubscription(self, subject)

    def new_inbox(self) -> str:
        self._inboxes += 1
        return f"_INBOX.fake{self._inboxes}"

    def on_break(self, callback: Callable[[], None]) -> Callable[[], None]:
        self._breaks.append(callback)
        return lambda: self._breaks.remove(callback)

    def on_reconnect(self, callback: Callable[[], None]) -> Callable[[], None]:
        self._reconnects.append(callback)
        return lambda: self._reconnects.remove(callback)

    async def wait_connected(self) -> None:
        assert self.connected, "the test forgot to reconnect"

    async def api(self, action: str, request: Mapping[str, Any]) -> dict[str, Any]:
        self.api_calls.append(action)
        for prefix, answer in self.api_answers.items():
            if action.startswith(prefix):
                return answer(request)
        raise AssertionError(f"nobody answers {action}")

    async def message(self, stream: str, sequence: int) -> tuple[str, bytes, int] | None:
        assert stream == EVENTS.name
        if not 1 <= sequence <= len(self.tape):
            return None
        return (*self.tape[sequence - 1], self.stored_ns + sequence)

    def fail(self, error: Exception) -> None:
        self.failure = error

    # What a test does.

    def take(self, count: int = 1, *, answer: bool = True) -> None:
        """The bus takes messages in the order in which they were published."""
        for _ in range(min(count, len(self.outbox))):
            message = self.outbox.pop(0)
            size = len(message.subject) + len(message.payload)
            if self.bytes_max is not None and self.bytes_held + size > self.bytes_max:
                self.refusals += 1
                reply = (
                    b'{"error":{"code":503,"err_code":10077,"description":"maximum bytes exceeded"}'
                    b',"stream":"EVENTS","seq":0}'
                )
            else:
                self.bytes_held += size
                self.tape.append((message.subject, message.payload))
                reply = b'{"stream":"EVENTS","seq":%d}' % len(self.tape)
            if answer:
                self.deliver(message.reply, reply)

    def take_all(self) -> None:
        """Until nothing is published any more."""
        while self.outbox:
            self.take(len(self.outbox))

    def lose(self, count: int = 1) -> None:
        """Messages vanish on their way, as a change of leaders makes them."""
        del self.outbox[:count]

    def break_connection(self, taken: int = 0) -> None:
        """A beginning of what was on its way was taken, and no answer came through."""
        self.take(taken, answer=False)
        self.outbox.clear()
        self.connected = False
        self.breaks += 1
        for callback in list(self._breaks):
            callback()

    def reconnect(self) -> None:
        self.connected = True
        for callback in list(self._reconnects):
            callback()

    def deliver(
        self, subject: str, payload: bytes, *, reply: str = "", headers: Any = None
    ) -> None:
        """Hand a message to whoever listens to its subject."""
        for pattern, on_message in list(self.listeners.items()):
            if _matches(pattern, subject):
                _run(on_message, Msg(_NO_CLIENT, subject, reply, payload, headers))

    def deliver_to(
        self, inbox: str, subject: str, payload: bytes, *, reply: str, headers: Any = None
    ) -> None:
        """What a push consumer sends to its inbox: the message keeps its own subject."""
        _run(self.listeners[inbox], Msg(_NO_CLIENT, subject, reply, payload, headers))


async def turns(condition: Callable[[], bool] | None = None, *, most: int = 10) -> None:
    """Let the event loop turn, at most so often, until ``condition`` holds."""
    for _ in range(most if condition is None else 100_000):
        if condition is not None and condition():
            return
        await asyncio.sleep(0)
    assert condition is None, "it did not come about"


def _run(on_message: OnMessage, message: Msg) -> None:
    """Callbacks of the runtime never wait, so they can be run here and now."""
    coroutine = on_message(message).__await__()
    try:
        next(coroutine)
    except StopIteration:
        return
    raise AssertionError("a callback waited")


def _matches(pattern: str, subject: str) -> bool:
    wanted, found = pattern.split("."), subject.split(".")
    return len(wanted) == len(found) and all(
        token in ("*", part) for token, part in zip(wanted, found, strict=True)
    )


_NO_CLIENT: Any = None
