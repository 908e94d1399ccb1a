"""One connection to the bus, and the fast ways to use it.

What is done here and not by nats-py's JetStream context, and why: publishing with numbered
replies under one wildcard inbox costs a third of a future each; direct gets the same. The
library drives the protocol, the reconnecting and the parsing.
"""

import asyncio
import contextlib
import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import structlog
from msgspec import Struct
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription
from nats.errors import Error as NatsError

from waterclock_proto.subjects import ANSWERS, EVENTS, REQUESTS, STREAMS, StreamSpec, final_subject
from waterclock_runtime import limits
from waterclock_runtime.errors import BusUnavailable, StreamMismatch

T = TypeVar("T")

Handler = Callable[[str, bytes], None]
"""(subject, payload). Runs on the event loop for each message: keep it cheap."""


class BusSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[bus]``: where the bus is and how the mesh's streams are kept."""

    url: str = "nats://127.0.0.1:4222"
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


class _Stored(Struct):
    """A JetStream publish that has not been acknowledged."""

    subject: str
    payload: bytes
    headers: Mapping[str, str] | None
    on_stored: Callable[[int], None] | None
    sent_s: float
    tries: int = 1


class Bus:
    """One connection. Methods without ``async`` never wait and never raise while reconnecting."""

    def __init__(
        self, client: Client, settings: BusSettings, log: structlog.stdlib.BoundLogger
    ) -> None:
        self.nc = client
        self.settings = settings
        self.log = log
        self.dropped = 0
        """Core messages that were not sent because the bus was away and the buffer full."""
        self.breaks = 0
        self._on_reconnect: list[Callable[[], None]] = []
        self._inbox = client.new_inbox()
        self._number = 0
        self._gets: dict[int, asyncio.Future[Msg]] = {}
        self._stores: dict[int, _Stored] = {}
        self._sweeper: asyncio.Task[None] | None = None
        self.closed = asyncio.Event()

    @classmethod
    async def connect(
        cls, settings: BusSettings, *, name: str, log: structlog.stdlib.BoundLogger
    ) -> "Bus":
        """Connect, waiting at most ``settings.connect_wait_s``.

        Raises:
            BusUnavailable: nobody answered within that time, or the credentials were refused.
        """
        client = Client()
        bus = cls.__new__(cls)
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + settings.connect_wait_s

        async def on_error(error: Exception) -> None:
            log.warning("bus_error", error=repr(error))

        async def on_disconnect() -> None:
            if not client.is_closed:
                bus.breaks += 1
                log.warning("bus_lost", url=settings.url)

        async def on_reconnect() -> None:
            log.info("bus_found_again", url=settings.url)
            bus.run_reconnected()

        async def on_closed() -> None:
            bus.closed.set()

        said = False
        while True:
            try:
                await client.connect(
                    settings.url,
                    name=name,
                    user=settings.user,
                    password=settings.password,
                    allow_reconnect=True,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=limits.RECONNECT_WAIT_S,  # pyright: ignore[reportArgumentType] - the library sleeps on it as it is; its annotation says int
                    connect_timeout=5,
                    ping_interval=limits.PING_INTERVAL_S,
                    max_outstanding_pings=limits.PINGS_OUTSTANDING_MAX,
                    pending_size=limits.PENDING_BYTES_MAX,
                    error_cb=on_error,
                    disconnected_cb=on_disconnect,
                    reconnected_cb=on_reconnect,
                    closed_cb=on_closed,
                )
                break
            except (NatsError, OSError, TimeoutError) as error:
                if "authorization" in str(error).lower():
                    raise BusUnavailable(
                        f"bus at {settings.url} refused user {settings.user!r}: check [bus] user and password"
                    ) from error
                if loop.time() >= give_up_s:
                    raise BusUnavailable(
                        f"no bus at {settings.url} within {settings.connect_wait_s} s: {error!r}"
                    ) from error
                if not said:
                    log.warning("bus_unreachable", url=settings.url, error=repr(error))
                    said = True
                await asyncio.sleep(limits.RECONNECT_WAIT_S)
                client = Client()
        cls.__init__(bus, client, settings, log)
        await client.subscribe(
            f"{bus._inbox}.*.*", cb=bus._on_numbered, pending_msgs_limit=0, pending_bytes_limit=0
        )
        bus._sweeper = asyncio.create_task(bus._sweep(), name="bus-sweeper")
        bus.on_reconnect(bus._store_again)
        return bus

    @property
    def connected(self) -> bool:
        return self.nc.is_connected

    def on_reconnect(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` each time the connection has come back."""
        self._on_reconnect.append(callback)

    def run_reconnected(self) -> None:
        for callback in self._on_reconnect:
            callback()

    def publish(
        self,
        subject: str,
        payload: bytes,
        headers: Mapping[str, str] | None = None,
        reply: str = "",
    ) -> None:
        """Core publish: buffered, at most once. Dropped and counted if it cannot be buffered."""
        try:
            _drive(self.nc.publish(subject, payload, reply, dict(headers) if headers else None))
        except NatsError as error:
            self.dropped += 1
            self.log.debug("core_message_dropped", subject=subject, error=repr(error))

    def subscribe(self, subject: str, handler: Handler) -> Subscription:
        """Core subscription; it survives a reconnect. An exception in ``handler`` is logged."""

        async def on_message(message: Msg) -> None:
            try:
                handler(message.subject, message.data)
            except Exception as error:
                self.log.error("handler_failed", subject=subject, error=repr(error), exc_info=True)

        return Subscription(
            _drive(
                self.nc.subscribe(
                    subject, cb=on_message, pending_msgs_limit=0, pending_bytes_limit=0
                )
            )
        )

    def store_soon(
        self,
        subject: str,
        payload: bytes,
        on_stored: Callable[[int], None] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """JetStream publish of anything but events, repeated byte for byte until acknowledged."""
        self._number += 1
        number = self._number
        self._stores[number] = _Stored(
            subject=subject,
            payload=payload,
            headers=headers,
            on_stored=on_stored,
            sent_s=asyncio.get_running_loop().time(),
        )
        if self.connected:
            self.publish(subject, payload, headers, reply=f"{self._inbox}.p.{number}")

    async def store(
        self,
        subject: str,
        payload: bytes,
        headers: Mapping[str, str] | None = None,
        *,
        wait_s: float = 30.0,
    ) -> int:
        """The same, awaited; returns the stream sequence.

        Raises:
            BusUnavailable: not acknowledged within ``wait_s``; it may or may not be stored.
        """
        stored: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def on_stored(sequence: int) -> None:
            if not stored.done():
                stored.set_result(sequence)

        self.store_soon(subject, payload, on_stored, headers)
        try:
            async with asyncio.timeout(wait_s):
                return await stored
        except TimeoutError as error:
            raise BusUnavailable(f"{subject}: not acknowledged within {wait_s} s") from error

    @property
    def storing(self) -> int:
        """JetStream publishes that wait for their acknowledgement."""
        return len(self._stores)

    async def bodies(self, sequences: Sequence[int]) -> list[bytes | None]:
        """Bodies of REQUESTS by sequence, all at once; None for what is not there.

        Raises:
            BusUnavailable: no answer within the bound, several times.
        """
        return list(await asyncio.gather(*(self._body(sequence) for sequence in sequences)))

    async def message(self, stream: str, sequence: int) -> tuple[str, bytes, int] | None:
        """(subject, payload, stored ns) at a sequence of a stream, or None."""
        found = await self._get(stream, {"seq": sequence})
        if found is None:
            return None
        headers = found.headers or {}
        return (
            headers.get("Nats-Subject", ""),
            found.data,
            parse_rfc3339_ns(headers.get("Nats-Time-Stamp", "")),
        )

    async def last(self, stream: str, subject: str) -> tuple[bytes, int] | None:
        """(payload, sequence) of the newest message on a subject of a stream, or None."""
        found = await self._get(stream, {"last_by_subj": subject})
        if found is None:
            return None
        return found.data, int((found.headers or {}).get("Nats-Sequence", "0"))

    async def final(self, tenant: str, request_id: str) -> bytes | None:
        """The final answer of a request while ANSWERS keeps it."""
        found = await self.last(ANSWERS.name, final_subject(tenant, request_id))
        return None if found is None else found[0]

    async def stream_state(self, stream: str) -> tuple[int, int]:
        """(first, last) sequence of a stream; (1, 0) when it is empty and new."""
        info = await self.api(f"STREAM.INFO.{stream}", {})
        if "error" in info:
            raise BusUnavailable(f"stream {stream}: {info['error'].get('description')}")
        return int(info["state"]["first_seq"]), int(info["state"]["last_seq"])

    async def api(self, action: str, request: Mapping[str, Any]) -> dict[str, Any]:
        """One call of the JetStream API, asked again until answered or 30 s have passed.

        Raises:
            BusUnavailable: no answer in that time.
        """
        subject = f"$JS.API.{action}"
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + 30.0
        while True:
            try:
                reply = await self.nc.request(
                    subject, json.dumps(request).encode(), timeout=limits.REQUEST_TIMEOUT_S
                )
                answer = json.loads(reply.data)
                # 503 while the server has JetStream but not the stream yet, after a restart.
                if answer.get("error", {}).get("code") != 503 or loop.time() >= give_up_s:
                    return answer
            except (NatsError, TimeoutError) as error:
                if loop.time() >= give_up_s:
                    raise BusUnavailable(f"{subject}: no answer within 30 s: {error!r}") from error
            await asyncio.sleep(0.2)

    async def provision(self) -> bool:
        """Make the streams that are missing and verify those that exist.

        Returns whether EVENTS was made just now.

        Raises:
            StreamMismatch: a stream is not as the mesh needs it.
        """
        made_events = False
        for spec in STREAMS:
            wanted = self._stream_config(spec)
            # Looked at first: sizes may have been changed since, and a create that differs from
            # what exists is refused, for its name or for its size.
            info = await self.api(f"STREAM.INFO.{spec.name}", {})
            if info.get("error", {}).get("err_code") == _STREAM_NOT_FOUND:
                made = await self.api(f"STREAM.CREATE.{spec.name}", wanted)
                code = made.get("error", {}).get("err_code")
                if code is None:
                    made_events = made_events or spec is EVENTS
                    continue
                if code != _STREAM_NAME_IN_USE:
                    raise StreamMismatch(f"stream {spec.name}: {made['error'].get('description')}")
                # Somebody else made it in between.
                info = await self.api(f"STREAM.INFO.{spec.name}", {})
            if "error" in info:
                raise StreamMismatch(f"stream {spec.name}: {info['error'].get('description')}")
            self._verify(spec.name, wanted, info)
        return made_events

    async def close(self) -> None:
        """Flush what is buffered and close. Waits at most a few seconds for acknowledgements."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(3.0):
                while self._stores and self.connected:
                    await asyncio.sleep(0.01)
        if self._sweeper is not None:
            self._sweeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sweeper
        with contextlib.suppress(NatsError, TimeoutError, asyncio.TimeoutError):
            if self.connected:
                await self.nc.flush(timeout=2)
            await self.nc.close()

    def _stream_config(self, spec: StreamSpec) -> dict[str, Any]:
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
            # Readers recognise repetitions themselves; the smallest window costs least.
            "duplicate_window": 100_000_000,
        }

    def _verify(self, name: str, wanted: Mapping[str, Any], info: Mapping[str, Any]) -> None:
        found = info.get("config", {})
        # Sizes and ages are the operator's to change on a running bus; the rest is meaning.
        for field in ("subjects", "retention", "discard", "allow_direct", "max_msgs_per_subject"):
            if found.get(field) != wanted[field]:
                raise StreamMismatch(
                    f"stream {name}: {field} is {found.get(field)!r}, expected {wanted[field]!r};"
                    " change the stream, or point [bus] url at a bus of the mesh's own"
                )

    async def _body(self, sequence: int) -> bytes | None:
        found = await self._get(REQUESTS.name, {"seq": sequence})
        return None if found is None else found.data

    async def _get(self, stream: str, request: Mapping[str, Any]) -> Msg | None:
        subject = f"$JS.API.DIRECT.GET.{stream}"
        payload = json.dumps(request).encode()
        for _ in range(limits.BODY_TRIES):
            self._number += 1
            number = self._number
            answer: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()
            self._gets[number] = answer
            try:
                self.publish(subject, payload, reply=f"{self._inbox}.g.{number}")
                async with asyncio.timeout(limits.BODY_TIMEOUT_S):
                    message = await answer
            except TimeoutError:
                continue
            finally:
                self._gets.pop(number, None)
            status = (message.headers or {}).get("Status")
            if status is None:
                return message
            if status == "404":
                return None
            # 503: no responders yet, after a restart of the bus.
            await asyncio.sleep(0.1)
        raise BusUnavailable(
            f"{subject} {request}: no answer in {limits.BODY_TRIES} tries of {limits.BODY_TIMEOUT_S} s"
        )

    async def _on_numbered(self, message: Msg) -> None:
        _, kind, number = message.subject.rsplit(".", 2)
        if kind == "g":
            answer = self._gets.get(int(number))
            if answer is not None and not answer.done():
                answer.set_result(message)
            return
        stored = self._stores.get(int(number))
        if stored is None:
            return
        acknowledgement = decode_puback(message)
        if acknowledgement.error is not None or not acknowledgement.stream:
            if stored.tries == 1:
                self.log.warning(
                    "store_refused", subject=stored.subject, error=acknowledgement.error
                )
            return  # the sweeper tries again
        del self._stores[int(number)]
        if stored.on_stored is not None:
            stored.on_stored(acknowledgement.seq)

    def _store_again(self) -> None:
        now_s = asyncio.get_running_loop().time()
        for number, stored in list(self._stores.items()):
            stored.sent_s = now_s
            stored.tries += 1
            self.publish(
                stored.subject, stored.payload, stored.headers, reply=f"{self._inbox}.p.{number}"
            )

    async def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(limits.WRITER_SWEEP_S)
            if not self.connected:
                continue
            now_s = loop.time()
            for number, stored in list(self._stores.items())[: limits.WRITER_BURST]:
                if now_s - stored.sent_s < limits.WRITER_ACK_TIMEOUT_S:
                    break
                stored.sent_s = now_s
                stored.tries += 1
                self.publish(
                    stored.subject,
                    stored.payload,
                    stored.headers,
                    reply=f"{self._inbox}.p.{number}",
                )


def decode_puback(message: Msg) -> PubAck:
    """The acknowledgement in a reply; an error of our own making where it is none."""
    if message.headers and message.headers.get("Status"):
        return PubAck(
            error={"code": int(message.headers["Status"]), "description": "no responders"}
        )
    try:
        return _PUBACK.decode(message.data)
    except msgspec.MsgspecError as error:
        return PubAck(error={"code": 0, "description": f"not an acknowledgement: {error}"})


def parse_rfc3339_ns(text: str) -> int:
    """Nanoseconds since 1970 of ``2026-01-02T03:04:05.123456789Z``, without a float; 0 if empty."""
    if not text:
        return 0
    import datetime

    whole, _, rest = text.rstrip("Z").partition(".")
    seconds = int(datetime.datetime.fromisoformat(whole).replace(tzinfo=datetime.UTC).timestamp())
    return seconds * 10**9 + int((rest or "0").ljust(9, "0")[:9])


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


_STREAM_NOT_FOUND = 10059
_STREAM_NAME_IN_USE = 10058
_PUBACK = msgspec.json.Decoder(PubAck)
