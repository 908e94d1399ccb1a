"""One connection to the bus, and the fast ways to use it.

What is done here and not by nats-py's JetStream context, and why: publishing with numbered
replies under one wildcard inbox costs a third of a future each; direct gets the same. The
library drives the protocol, the reconnecting and the parsing.

What is repeated until it is acknowledged is repeated from here alone. The library keeps what it
could not send and sends it on the next connection, before anybody else can; there it would
stand before older messages that the break had swallowed. So a break empties the library's
buffer of everything that asks for a reply.
"""

import asyncio
import base64
import contextlib
import datetime
import json
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

import msgspec
import structlog
from msgspec import Struct
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription
from nats.errors import Error as NatsError
from nats.errors import MaxPayloadError

from waterclock_proto.subjects import (
    ANSWERS,
    EVENT_PREFIX,
    EVENTS,
    REQUESTS,
    STREAMS,
    StreamSpec,
    final_subject,
)
from waterclock_runtime import limits
from waterclock_runtime.errors import BusUnavailable, PoisonMessage, StreamMismatch

T = TypeVar("T")

Handler = Callable[[str, bytes], None]
"""(subject, payload). Runs on the event loop for each message: keep it cheap."""
OnMessage = Callable[[Msg], Awaitable[None]]
"""The same with the whole message. What it raises is a bug, and stops the service."""


class BusSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[bus]``: where the bus is and how the mesh's streams are kept."""

    url: str = "nats://127.0.0.1:4222"
    """Several servers of one cluster are separated by commas."""
    user: str | None = None
    password: str | None = None
    connect_wait_s: float = limits.CONNECT_WAIT_S
    events_bytes_max: int = 8 * 1024**3
    """The tape refuses events beyond it (``discard: new``)."""
    requests_bytes_max: int = 4 * 1024**3
    answers_bytes_max: int = 1024**3
    events_age_s_max: int = EVENTS.max_age_s
    replicas: int = 1
    writer_window: int = limits.WRITER_WINDOW
    group_commit: bool = False
    """Events that wait together are stored as one batch, with one write to the disk. For a bus
    with ``sync_interval: always``, where each message would otherwise be a write of its own."""

    def __post_init__(self) -> None:
        if not 1 <= self.writer_window <= limits.WRITER_WINDOW_MAX:
            raise ValueError(
                f"writer_window of {self.writer_window}, expected 1 to {limits.WRITER_WINDOW_MAX}"
            )
        if self.connect_wait_s <= 0:
            raise ValueError(f"connect_wait_s of {self.connect_wait_s}, expected more than 0")


class PubAck(Struct, frozen=True):
    """What JetStream answers to a publish: a sequence, or an error."""

    stream: str = ""
    seq: int = 0
    error: dict[str, Any] | None = None


class Subscription:
    """One core subscription. ``close`` may be called twice."""

    __slots__ = ("_inner",)

    def __init__(self, inner: NatsSubscription) -> None:
        self._inner: NatsSubscription | None = inner

    def close(self) -> None:
        inner, self._inner = self._inner, None
        if inner is not None:
            with contextlib.suppress(NatsError):
                _drive(inner.unsubscribe())


class Closable(Protocol):
    """What ``listen`` returns; ``close`` may be called twice."""

    def close(self) -> None: ...


class Wire(Protocol):
    """What writers and readers need of a bus.

    Messages of one publisher are processed by the bus in the order in which they were
    published, until a break; of what was under way at a break, a beginning was processed and
    the rest was not. ``publish`` returns False for what was not even buffered. Nothing that
    asked for a reply is sent again by the wire after a break.
    """

    @property
    def connected(self) -> bool: ...
    @property
    def log(self) -> structlog.stdlib.BoundLogger: ...
    def publish(
        self,
        subject: str,
        payload: bytes,
        headers: Mapping[str, str] | None = None,
        reply: str = "",
    ) -> bool: ...
    def listen(self, subject: str, on_message: OnMessage) -> Closable: ...
    def new_inbox(self) -> str: ...
    def on_break(self, callback: Callable[[], None]) -> Callable[[], None]: ...
    def on_reconnect(self, callback: Callable[[], None]) -> Callable[[], None]: ...
    async def wait_connected(self) -> None: ...
    async def api(self, action: str, request: Mapping[str, Any]) -> dict[str, Any]: ...
    async def message(self, stream: str, sequence: int) -> tuple[str, bytes, int] | None: ...
    def fail(self, error: Exception) -> None: ...


class _Stored(Struct):
    """A JetStream publish that has not been acknowledged."""

    subject: str
    payload: bytes
    headers: Mapping[str, str] | None
    on_stored: Callable[[int], None] | None
    sent_s: float = 0.0
    refused: str = ""


class _Ask(Struct):
    """A question to the bus; the answer is None when it has to be asked again."""

    answer: asyncio.Future[Msg | None]
    expires_s: float


class Bus:
    """One connection. Methods without ``async`` never wait and never raise while reconnecting."""

    def __init__(
        self, client: Client, settings: BusSettings, log: structlog.stdlib.BoundLogger
    ) -> None:
        self.nc = client
        self.settings = settings
        self.log = log
        self.dropped = 0
        """Core messages that were not sent: the bus was away and the buffer full, or too large."""
        self.breaks = 0
        self.handler_failures = 0
        self.closed = asyncio.Event()
        """Set when the connection has ended and will not come back."""
        self.failure: Exception | None = None
        """Why it ended, where nobody had asked for it."""
        self._inbox = client.new_inbox()
        self._number = 0
        self._asks: dict[int, _Ask] = {}
        self._stores: dict[int, _Stored] = {}
        self._storing_bytes = 0
        self._all_stored = asyncio.Event()
        self._all_stored.set()
        self._up = asyncio.Event()
        self._closing = False
        self._on_break: list[Callable[[], None]] = []
        self._on_reconnect: list[Callable[[], None]] = []
        self._sweeper: asyncio.Task[None] | None = None
        self._said_of_this_break: set[str] = set()
        self._drops_said_s = float("-inf")
        self._drops_said = 0

    @classmethod
    async def connect(
        cls, settings: BusSettings, *, name: str, log: structlog.stdlib.BoundLogger
    ) -> "Bus":
        """Connect, waiting at most ``settings.connect_wait_s``.

        Raises:
            BusUnavailable: nobody answered within that time, or the credentials were refused.
        """
        client = Client()
        bus = cls(client, settings, log)
        where = url_without_secrets(settings.url)
        connecting = True
        last_error: Exception | None = None

        async def on_error(error: Exception) -> None:
            nonlocal last_error
            if not connecting:
                bus.run_error(error)
                return
            if "authorization" in str(error).lower():
                # Raised through the library's own loop, which would try for ever.
                raise BusUnavailable(
                    f"bus at {where} refused user {settings.user!r}: check [bus] user and password"
                ) from error
            if last_error is None:
                log.warning("bus_unreachable", url=where, error=repr(error))
            last_error = error

        async def on_disconnect() -> None:
            if not client.is_closed:
                bus.run_break()

        async def on_reconnect() -> None:
            bus.run_reconnected()

        async def on_closed() -> None:
            bus.run_closed()

        try:
            async with asyncio.timeout(settings.connect_wait_s):
                await client.connect(
                    [url.strip() for url in settings.url.split(",")],
                    name=name,
                    user=settings.user,
                    password=settings.password,
                    allow_reconnect=True,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=limits.RECONNECT_WAIT_S,  # pyright: ignore[reportArgumentType] - the library sleeps on it as it is; its annotation says int
                    connect_timeout=limits.CONNECT_TIMEOUT_S,
                    ping_interval=limits.PING_INTERVAL_S,
                    max_outstanding_pings=limits.PINGS_OUTSTANDING_MAX,
                    pending_size=limits.PENDING_BYTES_MAX + limits.PENDING_BYTES_SPARE,
                    # Without a bound, or it would make `subscribe` wait while the bus stands still.
                    flusher_queue_size=0,
                    error_cb=on_error,
                    disconnected_cb=on_disconnect,
                    reconnected_cb=on_reconnect,
                    closed_cb=on_closed,
                )
        except BaseException as error:
            with contextlib.suppress(Exception):
                await client.close()
            if isinstance(error, TimeoutError):
                raise BusUnavailable(
                    f"no bus at {where} within {settings.connect_wait_s:g} s: {last_error!r};"
                    " start it, or correct [bus] url"
                ) from error
            if isinstance(error, (NatsError, OSError, ValueError)):
                raise BusUnavailable(f"[bus] url {where!r}: {error}") from error
            raise
        connecting = False
        bus.listen(f"{bus._inbox}.*.*", bus._on_numbered)
        bus._sweeper = asyncio.create_task(bus._sweep(), name="bus-sweeper")
        bus._sweeper.add_done_callback(bus._on_sweeper_ended)
        bus._up.set()
        return bus

    @property
    def connected(self) -> bool:
        return self.nc.is_connected

    async def wait_connected(self) -> None:
        """Wait, for however long, until there is a connection.

        Raises:
            BusUnavailable: it has ended for good.
        """
        await self._up.wait()
        if self.closed.is_set():
            raise BusUnavailable(f"the connection to the bus has ended: {self.failure!r}")

    def on_break(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call ``callback`` each time the connection is lost; the result takes that back."""
        return _registered(self._on_break, callback)

    def on_reconnect(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call ``callback`` each time it has come back; the result takes that back."""
        return _registered(self._on_reconnect, callback)

    def new_inbox(self) -> str:
        """A subject that nobody else listens to."""
        return self.nc.new_inbox()

    # Publishing.

    def publish(
        self,
        subject: str,
        payload: bytes,
        headers: Mapping[str, str] | None = None,
        reply: str = "",
    ) -> bool:
        """Core publish: buffered, at most once. Whether it was buffered.

        What cannot be is dropped and counted, and said at most every ten seconds.
        """
        nc = self.nc
        if nc.pending_data_size > limits.PENDING_BYTES_MAX:
            self._drop(subject, payload, "the buffer is full: the bus is away, or too slow")
            return False
        try:
            _drive(nc.publish(subject, payload, reply, dict(headers) if headers else None))
        except MaxPayloadError:
            self._drop(
                subject,
                payload,
                f"the bus takes {nc.max_payload} bytes at most: raise its max_payload",
            )
            return False
        except NatsError as error:
            self._drop(subject, payload, repr(error))
            return False
        return True

    def subscribe(self, subject: str, handler: Handler) -> Subscription:
        """Core subscription; it survives a reconnect.

        An exception in ``handler`` is logged and counted, and the next message comes: what
        arrives here may come from outside, and must not end the service.
        """

        async def on_message(message: Msg) -> None:
            try:
                handler(message.subject, message.data)
            except Exception:
                self.handler_failures += 1
                self.log.exception("handler_failed", subject=subject)

        return self.listen(subject, on_message)

    def listen(self, subject: str, on_message: OnMessage) -> Subscription:
        """Core subscription with whole messages; what ``on_message`` raises ends the service.

        ``on_message`` runs while the client parses what came in, so it must not wait.
        """
        subscription = _drive(
            self.nc.subscribe(  # pyright: ignore[reportUnknownMemberType] - a parameter that is not used here has no full type
                subject, cb=on_message, pending_msgs_limit=0, pending_bytes_limit=0
            )
        )
        # The client keeps messages in a queue for a task of the subscription, and that detour
        # costs as much as the rest of receiving one. Nothing here needs the task.
        subscription._pending_queue = _StraightOn(on_message, self.fail)  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue] - there is no public way past the queue; the version is pinned, and the tests of the runtime on a real bus watch it
        return Subscription(subscription)

    def store_soon(
        self,
        subject: str,
        payload: bytes,
        on_stored: Callable[[int], None] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """JetStream publish of anything but events, repeated byte for byte until acknowledged.

        Raises:
            BusUnavailable: too much waits already.
            PoisonMessage: larger than the bus takes.
        """
        self._store(subject, payload, on_stored, headers)

    async def store(
        self,
        subject: str,
        payload: bytes,
        headers: Mapping[str, str] | None = None,
        *,
        wait_s: float = limits.ANSWER_WAIT_S,
    ) -> int:
        """The same, awaited; returns the stream sequence.

        Raises:
            BusUnavailable: not acknowledged within ``wait_s``; it may or may not be stored, and
                is not repeated any more.
            PoisonMessage: larger than the bus takes.
        """
        stored: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def on_stored(sequence: int) -> None:
            if not stored.done():
                stored.set_result(sequence)

        number = self._store(subject, payload, on_stored, headers)
        try:
            async with asyncio.timeout(wait_s):
                return await stored
        except TimeoutError as error:
            why = self._stores[number].refused or "no acknowledgement"
            raise BusUnavailable(f"{subject}: not stored within {wait_s:g} s: {why}") from error
        finally:
            self._forget_store(number)

    async def ask(
        self, subject: str, payload: bytes, headers: Mapping[str, str] | None = None
    ) -> PubAck:
        """JetStream publish whose refusal is an answer too; repeated until there is one.

        Raises:
            BusUnavailable: no answer within the bound.
        """
        request = [(payload, headers)]
        found = await self._fetch(subject, request, limits.REQUEST_TIMEOUT_S, _is_answer)
        return decode_puback(found[0])

    @property
    def storing(self) -> int:
        """JetStream publishes that wait for their acknowledgement."""
        return len(self._stores)

    # Reading.

    async def bodies(self, sequences: Sequence[int]) -> list[bytes | None]:
        """Bodies of REQUESTS by sequence, many at once; None for what is not there.

        Raises:
            BusUnavailable: no answer within the bound.
        """
        found = await self._get(REQUESTS.name, [b'{"seq":%d}' % number for number in sequences])
        return [None if message is None else message.data for message in found]

    async def message(self, stream: str, sequence: int) -> tuple[str, bytes, int] | None:
        """(subject, payload, stored ns) at a sequence of a stream, or None.

        Raises:
            BusUnavailable: no answer within the bound.
        """
        found = (await self._get(stream, [b'{"seq":%d}' % sequence]))[0]
        if found is None:
            return None
        headers = found.headers or {}
        return (
            headers.get("Nats-Subject", ""),
            found.data,
            parse_rfc3339_ns(headers.get("Nats-Time-Stamp", "")),
        )

    async def last(self, stream: str, subject: str) -> tuple[bytes, int] | None:
        """(payload, sequence) of the newest message on a subject of a stream, or None.

        Raises:
            BusUnavailable: no answer within the bound.
        """
        request = json.dumps({"last_by_subj": subject}).encode()
        found = (await self._get(stream, [request]))[0]
        if found is None:
            return None
        return found.data, int((found.headers or {}).get(_SEQUENCE_HEADER, "0"))

    async def final(self, tenant: str, request_id: str) -> bytes | None:
        """The final answer of a request while ANSWERS keeps it."""
        found = await self.last(ANSWERS.name, final_subject(tenant, request_id))
        return None if found is None else found[0]

    async def stream_state(self, stream: str) -> tuple[int, int]:
        """(first, last) sequence of a stream; (1, 0) or (0, 0) when it is empty and new.

        Raises:
            BusUnavailable: no answer, or no such stream.
        """
        info = await self.api(f"STREAM.INFO.{stream}", {})
        if "error" in info:
            raise BusUnavailable(f"stream {stream}: {info['error'].get('description')}")
        return int(info["state"]["first_seq"]), int(info["state"]["last_seq"])

    async def api(self, action: str, request: Mapping[str, Any]) -> dict[str, Any]:
        """One call of the JetStream API, asked again until answered or 30 s have passed.

        Raises:
            BusUnavailable: no answer in that time.
        """
        answer: dict[str, Any] = {}

        def is_final(message: Msg) -> bool:
            nonlocal answer
            if (message.headers or {}).get("Status") == "503":
                return False
            answer = json.loads(message.data)
            return answer.get("error", {}).get("err_code") not in _NOT_YET

        payload = json.dumps(request).encode()
        subject = f"$JS.API.{action}"
        await self._fetch(subject, [(payload, None)], limits.REQUEST_TIMEOUT_S, is_final)
        if answer.get("error", {}).get("err_code") in _NO_JETSTREAM:
            raise BusUnavailable(
                f"{subject}: {answer['error'].get('description')}: the bus needs a"
                " `jetstream` block, and the mesh's account needs it enabled"
            )
        return answer

    # Streams.

    async def provision(self) -> bool:
        """Make the streams that are missing and verify those that exist.

        Returns whether EVENTS holds nothing and never did: its first message is yet to come.

        Raises:
            StreamMismatch: a stream is not as the mesh needs it, or cannot be made.
            BusUnavailable: no answer within the bound.
        """
        largest = max(spec.max_msg_bytes for spec in STREAMS)
        if self.nc.max_payload < largest:
            raise StreamMismatch(
                f"the bus takes messages of {self.nc.max_payload} bytes, expected at least"
                f" {largest}: raise max_payload in its configuration"
            )
        new_tape = False
        for spec in STREAMS:
            wanted = self.stream_config(spec)
            # Looked at first: sizes may have been changed since, and a create that differs from
            # what exists is refused, for its name or for its size.
            info = await self.api(f"STREAM.INFO.{spec.name}", {})
            if info.get("error", {}).get("err_code") == STREAM_NOT_FOUND:
                info = await self._make(spec, wanted)
            if "error" in info:
                raise StreamMismatch(f"stream {spec.name}: {info['error'].get('description')}")
            self._verify(spec, wanted, info.get("config", {}))
            if spec is EVENTS:
                new_tape = int(info["state"]["last_seq"]) == 0
        return new_tape

    async def _make(self, spec: StreamSpec, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Make a stream that was not there; what the bus says of it, whoever made it.

        Of several that make the same stream at once all but one are refused, and not always for
        its name: while they are being made each reserves its size, and together they may be more
        than the bus has. So a refusal counts only when nobody has made it after a while.

        Raises:
            StreamMismatch: it cannot be made.
        """
        give_up_s = asyncio.get_running_loop().time() + limits.REQUEST_TIMEOUT_S
        while True:
            made = await self.api(f"STREAM.CREATE.{spec.name}", wanted)
            # Somebody else may have made it in between, and otherwise.
            info = await self.api(f"STREAM.INFO.{spec.name}", {})
            if "error" not in info:
                return info
            error = made.get("error", info["error"])
            if error.get("err_code") != _NO_ROOM or asyncio.get_running_loop().time() > give_up_s:
                raise StreamMismatch(
                    f"stream {spec.name} of {wanted['max_bytes']} bytes cannot be made:"
                    f" {error.get('description')};{_advice(spec.name, error)}"
                )
            await asyncio.sleep(limits.ASK_AGAIN_S)

    async def close(self) -> None:
        """Flush what is buffered and close. Waits at most a few seconds for acknowledgements."""
        self._closing = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limits.CLOSE_WAIT_S if self.connected else 0):
                await self._all_stored.wait()
        if self._sweeper is not None:
            self._sweeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sweeper
        with contextlib.suppress(NatsError, OSError, TimeoutError):
            if self.connected:
                await self.nc.flush(timeout=2)
        with contextlib.suppress(NatsError, OSError, TimeoutError):
            await self.nc.close()
        # A cancellation can be lost in the client's own wait_for (Python 3.11), and then it would
        # look for a server for ever. With none to look for it ends by itself.
        self.nc._server_pool.clear()  # pyright: ignore[reportPrivateUsage] - there is no public way to end it
        self.run_closed()

    # What the connection says.

    def run_error(self, error: Exception) -> None:
        """The library reports an error, its own or one of a callback."""
        if not isinstance(error, (NatsError, OSError, TimeoutError)):
            self.log.error("callback_failed", exc_info=error)
            self.fail(error)
        elif "permissions violation" in str(error).lower():
            self.log.error(
                "bus_refuses_subject",
                error=str(error),
                advice="the bus's accounts do not let this user do so: make them anew",
            )
        elif self.connected:
            self.log.warning("bus_error", error=repr(error))
        elif repr(error) not in self._said_of_this_break:
            # Every further try fails alike; a new reason (other credentials, say) is news.
            self._said_of_this_break.add(repr(error))
            self.log.warning("bus_still_away", error=repr(error))

    def fail(self, error: Exception) -> None:
        """Something that cannot be gone on from: whoever waits for ``closed`` ends the service."""
        if self.failure is None:
            self.failure = error
        self._end()

    def run_break(self) -> None:
        """The connection was lost; the library has not begun to make a new one."""
        self.breaks += 1
        self._said_of_this_break.clear()
        self._up.clear()
        self._forget_pending()
        self.log.warning("bus_lost", url=url_without_secrets(self.settings.url))
        self._call(self._on_break)

    def run_reconnected(self) -> None:
        """There is a new connection, with all subscriptions."""
        self._up.set()
        self.log.info("bus_found_again", url=url_without_secrets(self.settings.url))
        self._ask_all_again()
        for stored in self._stores.values():
            stored.sent_s = 0.0
        self._call(self._on_reconnect)
        self._store_overdue()

    def run_closed(self) -> None:
        """The connection has ended for good, asked for or not."""
        if not self._closing and self.failure is None:
            self.failure = BusUnavailable(f"the bus ended the connection: {self.nc.last_error!r}")
            self.log.error("bus_closed", error=repr(self.nc.last_error))
        self._end()

    def _end(self) -> None:
        self.closed.set()
        self._up.set()
        self._ask_all_again()

    def _ask_all_again(self) -> None:
        for ask in self._asks.values():
            if not ask.answer.done():
                ask.answer.set_result(None)
        self._asks.clear()

    def _on_sweeper_ended(self, task: "asyncio.Task[None]") -> None:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self.fail(error)

    def _call(self, callbacks: list[Callable[[], None]]) -> None:
        for callback in list(callbacks):
            try:
                callback()
            except Exception as error:  # noqa: BLE001 - a bug; here it would end the library's task
                self.run_error(RuntimeError(f"{callback} failed: {error!r}"))

    def _forget_pending(self) -> None:
        """Drop from the library's buffer what is repeated from here, and its subscriptions."""
        kept = [
            command
            for command in self.nc._pending  # pyright: ignore[reportPrivateUsage] - see the module's head: it offers no other way
            if not command.startswith(_EVENT_COMMANDS)
            and b" _INBOX." not in command.partition(b"\r\n")[0]
        ]
        self.nc._pending = kept  # pyright: ignore[reportPrivateUsage] - as above
        self.nc._pending_data_size = sum(map(len, kept))  # pyright: ignore[reportPrivateUsage] - as above

    def _drop(self, subject: str, payload: bytes, why: str) -> None:
        self.dropped += 1
        now_s = asyncio.get_running_loop().time()
        if now_s - self._drops_said_s < limits.DROPS_SAID_INTERVAL_S:
            return
        self.log.warning(
            "messages_dropped",
            subject=subject,
            bytes=len(payload),
            why=why,
            count=self.dropped - self._drops_said,
        )
        self._drops_said_s, self._drops_said = now_s, self.dropped

    # Streams' configuration.

    def stream_config(self, spec: StreamSpec) -> dict[str, Any]:
        """What is asked for when the stream has to be made."""
        age_s = self.settings.events_age_s_max if spec is EVENTS else spec.max_age_s
        bytes_max = {
            EVENTS.name: self.settings.events_bytes_max,
            REQUESTS.name: self.settings.requests_bytes_max,
            ANSWERS.name: self.settings.answers_bytes_max,
        }[spec.name]
        return {
            "name": spec.name,
            "subjects": list(spec.subjects),
            "retention": "limits",
            "storage": "file",
            "discard": spec.discard,
            "max_age": age_s * 10**9,
            "max_bytes": bytes_max,
            "max_msgs": -1,
            "max_msg_size": spec.max_msg_bytes,
            "max_msgs_per_subject": spec.max_msgs_per_subject,
            "max_consumers": -1,
            "num_replicas": self.settings.replicas,
            "allow_direct": spec.allow_direct,
            "allow_atomic": spec.allow_atomic,
            # Readers recognise repetitions themselves; the smallest window costs least.
            "duplicate_window": 100_000_000,
        }

    def _verify(
        self, spec: StreamSpec, wanted: Mapping[str, Any], found: Mapping[str, Any]
    ) -> None:
        """What changes the stream's meaning is refused; what only changes its size is said."""
        for field in (
            "subjects",
            "retention",
            "storage",
            "discard",
            "allow_direct",
            "allow_atomic",
            "max_msgs_per_subject",
        ):
            if (found.get(field) or False) != (wanted[field] or False):
                raise StreamMismatch(
                    f"stream {spec.name}: {field} is {found.get(field)!r}, expected"
                    f" {wanted[field]!r}; change the stream, or point [bus] url at a bus of the"
                    " mesh's own"
                )
        if 0 <= found.get("max_msg_size", -1) < spec.max_msg_bytes:
            raise StreamMismatch(
                f"stream {spec.name}: max_msg_size is {found['max_msg_size']}, expected at least"
                f" {spec.max_msg_bytes}; raise it, or messages that were admitted do not fit"
            )
        changed = {
            field: found.get(field)
            for field in ("max_age", "max_bytes", "max_msgs", "num_replicas")
            if found.get(field) != wanted[field]
        }
        if changed:
            # The operator's to change on a running bus.
            self.log.info(
                "stream_differs_from_configuration",
                stream=spec.name,
                found=changed,
                configured={field: wanted[field] for field in changed},
            )

    # Questions and answers.

    async def _get(self, stream: str, requests: Sequence[bytes]) -> list[Msg | None]:
        found = await self._fetch(
            f"$JS.API.DIRECT.GET.{stream}",
            [(request, None) for request in requests],
            limits.GET_TIMEOUT_S,
            _is_answer,
        )
        return [
            message
            if _is_message(message)
            else await self._get_from_leader(stream, request, message)
            for request, message in zip(requests, found, strict=True)
        ]

    async def _get_from_leader(self, stream: str, request: bytes, refused: Msg) -> Msg | None:
        """A direct get may have asked a replica that is behind; the leader knows."""
        headers = refused.headers or {}
        if headers.get("Status") != "404":
            raise BusUnavailable(
                f"direct get of {request.decode()} from {stream}: {headers.get('Status')}"
                f" {headers.get('Description')}"
            )
        answer = await self.api(f"STREAM.MSG.GET.{stream}", json.loads(request))
        found = answer.get("message")
        if found is None:
            return None
        return Msg(
            _client=self.nc,
            data=base64.b64decode(found.get("data", "")),
            headers={
                "Nats-Subject": found["subject"],
                _SEQUENCE_HEADER: str(found["seq"]),
                "Nats-Time-Stamp": found["time"],
            },
        )

    async def _fetch(
        self,
        subject: str,
        requests: Sequence[tuple[bytes, Mapping[str, str] | None]],
        try_s: float,
        is_final: Callable[[Msg], bool],
    ) -> list[Msg]:
        """The answers to all requests, in their order, each asked for until ``is_final``."""
        if self.closed.is_set():
            # Whoever asks in a loop must not hold the event loop with it.
            await asyncio.sleep(limits.ASK_AGAIN_S)
            await self.wait_connected()
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + limits.ANSWER_WAIT_S
        answers: list[Msg | None] = [None] * len(requests)
        ahead = deque(range(len(requests)))
        open_: deque[tuple[int, asyncio.Future[Msg | None]]] = deque()
        while ahead or open_:
            while ahead and len(open_) < limits.GETS_AT_ONCE:
                index = ahead.popleft()
                expires_s = min(loop.time() + try_s, give_up_s)
                open_.append((index, self._ask(subject, *requests[index], expires_s)))
            index, future = open_.popleft()
            message = await future
            if message is not None and is_final(message):
                answers[index] = message
                continue
            ahead.append(index)
            await self._before_asking_again(subject, message, give_up_s)
        return [answer for answer in answers if answer is not None]

    async def _before_asking_again(
        self, subject: str, message: Msg | None, give_up_s: float
    ) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(give_up_s):
                await self.wait_connected()
                if message is not None:
                    await asyncio.sleep(limits.ASK_AGAIN_S)
        except TimeoutError:
            pass
        if loop.time() < give_up_s:
            return
        if not self.connected:
            why = "the bus is away"
        elif message is None:
            why = "no answer; may this user publish to it?"
        else:
            why = "nobody answers to it: is JetStream enabled there, and the stream made?"
        raise BusUnavailable(f"{subject}: given up after {limits.ANSWER_WAIT_S:g} s: {why}")

    def _ask(
        self,
        subject: str,
        payload: bytes,
        headers: Mapping[str, str] | None,
        expires_s: float,
    ) -> asyncio.Future[Msg | None]:
        self._number += 1
        answer: asyncio.Future[Msg | None] = asyncio.get_running_loop().create_future()
        self._asks[self._number] = _Ask(answer, expires_s)
        if self.connected:
            self.publish(subject, payload, headers, reply=f"{self._inbox}.a.{self._number}")
        return answer

    async def _on_numbered(self, message: Msg) -> None:
        _, kind, number = message.subject.rsplit(".", 2)
        if kind == "a":
            ask = self._asks.pop(int(number), None)
            if ask is not None and not ask.answer.done():
                ask.answer.set_result(message)
        else:
            self._on_store_answered(int(number), message)

    # Storing.

    def _store(
        self,
        subject: str,
        payload: bytes,
        on_stored: Callable[[int], None] | None,
        headers: Mapping[str, str] | None,
    ) -> int:
        if len(payload) > self.nc.max_payload:
            raise PoisonMessage(
                f"message of {len(payload)} bytes for {subject}, the bus takes at most"
                f" {self.nc.max_payload}: raise its max_payload"
            )
        if self._storing_bytes + len(payload) > limits.STORING_BYTES_MAX:
            raise BusUnavailable(
                f"{subject}: {len(self._stores)} messages of {self._storing_bytes} bytes already"
                f" wait to be stored, at most {limits.STORING_BYTES_MAX} bytes allowed"
            )
        self._number += 1
        number = self._number
        stored = _Stored(subject, payload, headers, on_stored)
        self._stores[number] = stored
        self._storing_bytes += len(payload)
        self._all_stored.clear()
        if self.connected:
            self._send_store(number, stored, asyncio.get_running_loop().time())
        return number

    def _send_store(self, number: int, stored: _Stored, now_s: float) -> bool:
        sent = self.publish(
            stored.subject, stored.payload, stored.headers, reply=f"{self._inbox}.p.{number}"
        )
        if sent:
            stored.sent_s = now_s
        return sent

    def _on_store_answered(self, number: int, message: Msg) -> None:
        stored = self._stores.get(number)
        if stored is None:
            return
        acknowledgement = decode_puback(message)
        if acknowledgement.error is not None or not acknowledgement.stream:
            why = str((acknowledgement.error or {}).get("description", "not an acknowledgement"))
            if not stored.refused:
                self.log.warning("store_refused", subject=stored.subject, error=why)
            stored.refused = why
            return  # tried again when its time is up
        self._forget_store(number)
        if stored.on_stored is not None:
            stored.on_stored(acknowledgement.seq)

    def _forget_store(self, number: int) -> None:
        stored = self._stores.pop(number, None)
        if stored is not None:
            self._storing_bytes -= len(stored.payload)
        if not self._stores:
            self._all_stored.set()

    def _store_overdue(self) -> None:
        """Publish again what has not been answered; what is left over waits for the next sweep."""
        now_s = asyncio.get_running_loop().time()
        overdue_s = now_s - limits.WRITER_ACK_TIMEOUT_S
        for number, stored in list(self._stores.items()):
            if stored.sent_s < overdue_s and not self._send_store(number, stored, now_s):
                return

    async def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(limits.WRITER_SWEEP_S)
            now_s = loop.time()
            expired = [number for number, ask in self._asks.items() if ask.expires_s <= now_s]
            for number in expired:
                answer = self._asks.pop(number).answer
                if not answer.done():
                    answer.set_result(None)
            if self._stores and self.connected:
                self._store_overdue()


def decode_puback(message: Msg) -> PubAck:
    """The acknowledgement in a reply; an error of our own making where it is none."""
    if message.headers and message.headers.get("Status"):
        return PubAck(
            error={
                "code": int(message.headers["Status"]),
                "description": "no stream takes this subject",
            }
        )
    try:
        return _PUBACK.decode(message.data)
    except msgspec.MsgspecError as error:
        return PubAck(error={"code": 0, "description": f"not an acknowledgement: {error}"})


def parse_rfc3339_ns(text: str) -> int:
    """Nanoseconds since 1970 of ``2026-01-02T03:04:05.123456789Z``, without a float; 0 if empty.

    Raises:
        ValueError: not such a time, or not in UTC.
    """
    if not text:
        return 0
    if not text.endswith("Z"):
        raise ValueError(f"expected a time that ends in Z, found {text!r}")
    whole, _, fraction = text[:-1].partition(".")
    moment = datetime.datetime.fromisoformat(whole).replace(tzinfo=datetime.UTC)
    since = moment - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    return (since.days * 86_400 + since.seconds) * 10**9 + int(fraction.ljust(9, "0")[:9])


def url_without_secrets(urls: str) -> str:
    """The address with user and password left out, for logs and messages."""
    shown: list[str] = []
    for url in urls.split(","):
        try:
            host = urlsplit(url.strip()).netloc.rpartition("@")[2]
            scheme = urlsplit(url.strip()).scheme
        except ValueError:
            host, scheme = "?", "?"
        shown.append(f"{scheme}://{host}" if host else url.strip().rpartition("@")[2])
    return ",".join(shown)


def _is_message(message: Msg) -> bool:
    """Whether a direct get found a message.

    A stored message brings its own headers along, and a tenant writes what it likes into them,
    ``Status`` included. Only ``Nats-Sequence`` is always the bus's own.
    """
    return _SEQUENCE_HEADER in (message.headers or {})


def _is_answer(message: Msg) -> bool:
    # 503: nobody answers yet, after a restart of the bus.
    return _is_message(message) or (message.headers or {}).get("Status") != "503"


def _advice(stream: str, error: Mapping[str, Any]) -> str:
    if error.get("err_code") == _SUBJECTS_OVERLAP:
        return " another stream has its subjects: use a bus or an account of the mesh's own"
    return (
        f" lower [bus] {stream.lower()}_bytes_max, or give the bus more disk (max_file_store in"
        " its jetstream block)"
    )


class _StraightOn:
    """Stands where the client keeps a subscription's messages, and hands each on at once."""

    __slots__ = ("_fail", "_on_message")

    def __init__(self, on_message: OnMessage, fail: Callable[[Exception], None]) -> None:
        self._on_message = on_message
        self._fail = fail

    def put_nowait(self, message: Msg) -> None:
        try:
            _drive(self._on_message(message))  # pyright: ignore[reportArgumentType] - handlers are coroutines
        except Exception as error:  # noqa: BLE001 - a bug in a handler ends the service, not the parser
            self._fail(error)

    async def get(self) -> Msg:
        """What the subscription's own task waits for until it is cancelled."""
        return await asyncio.get_running_loop().create_future()

    def qsize(self) -> int:
        return 0

    def empty(self) -> bool:
        return True

    async def join(self) -> None:
        """Nothing is ever kept."""


def _registered(
    callbacks: list[Callable[[], None]], callback: Callable[[], None]
) -> Callable[[], None]:
    callbacks.append(callback)

    def remove() -> None:
        with contextlib.suppress(ValueError):
            callbacks.remove(callback)

    return remove


def _drive(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine of the client that never has to wait, here and now.

    ``publish``, ``subscribe`` and ``unsubscribe`` append to a buffer and kick the flusher; they
    are coroutines only in form. Awaiting each would make every handler one.
    """
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    coroutine.close()
    raise RuntimeError("the bus client waited where it never did before; its version changed")


STREAM_NOT_FOUND = 10059
CONSUMER_NOT_FOUND = 10014
_SEQUENCE_HEADER = "Nats-Sequence"
_NO_ROOM = 10047
"""JetStream's ``insufficient storage resources available``."""
_SUBJECTS_OVERLAP = 10065
_NOT_YET = (10008, 10009)
"""No leader yet: the cluster is coming up."""
_NO_JETSTREAM = (10039, 10076)
_EVENT_COMMANDS = (f"PUB {EVENT_PREFIX}".encode(), f"HPUB {EVENT_PREFIX}".encode())
"""Events are repeated by their writers; those of a batch ask for no reply each."""
_PUBACK = msgspec.json.Decoder(PubAck)
