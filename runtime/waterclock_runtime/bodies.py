"""Bodies that are there before anybody has to ask for them.

Reading a body by direct get costs a round trip, twice a request: the scheduler's and the
worker's. So a scheduler lets REQUESTS be pushed to it as it grows, and hands a body on to the
worker just before the dispatch. Nothing depends on it: what is not in the cache is read by direct
get, and a body is checked against its commitment wherever it came from.
"""

import asyncio
import contextlib
import secrets
from collections.abc import Callable
from typing import Any

from nats.aio.msg import Msg

from waterclock_proto.subjects import REQUESTS
from waterclock_runtime import limits
from waterclock_runtime.bus import Closable, Wire
from waterclock_runtime.errors import BusUnavailable
from waterclock_runtime.tape import ACK_PREFIX, parse_delivery


class BodyCache:
    """Bodies by their REQUESTS sequence: the newest ones, within bounds of count and bytes."""

    def __init__(
        self,
        *,
        count_max: int = limits.BODIES_KEPT_MAX,
        bytes_max: int = limits.BODIES_KEPT_BYTES_MAX,
        body_bytes_max: int = limits.BODY_KEPT_BYTES_MAX,
    ) -> None:
        self._count_max = count_max
        self._bytes_max = bytes_max
        self._body_bytes_max = body_bytes_max
        self._bodies: dict[int, bytes] = {}
        self.bytes_held = 0

    def __len__(self) -> int:
        return len(self._bodies)

    def put(self, sequence: int, body: bytes) -> None:
        """Keep a body; the eldest ones go when there is no room."""
        if len(body) > self._body_bytes_max:
            return
        self.take(sequence)
        self._bodies[sequence] = body
        self.bytes_held += len(body)
        while len(self._bodies) > self._count_max or self.bytes_held > self._bytes_max:
            self.take(next(iter(self._bodies)))

    def get(self, sequence: int) -> bytes | None:
        """A body, which stays."""
        return self._bodies.get(sequence)

    def take(self, sequence: int) -> bytes | None:
        """A body, which goes."""
        body = self._bodies.pop(sequence, None)
        if body is not None:
            self.bytes_held -= len(body)
        return body


class BodyFeed:
    """Fills a cache with what REQUESTS takes from now on, as well as it can."""

    def __init__(self, bus: Wire, cache: BodyCache) -> None:
        self._bus = bus
        self._cache = cache
        self._subscription: Closable | None = None
        self._consumer = ""
        self._heard = False
        self._again = asyncio.Event()
        self._forget: Callable[[], None] | None = None
        self._task: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Begin, in the background."""
        self._forget = self._bus.on_reconnect(self._again.set)
        self._task = asyncio.create_task(self._follow(), name="body-feed")

    async def close(self) -> None:
        if self._forget is not None:
            self._forget()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._let_go()

    async def _follow(self) -> None:
        while True:
            self._let_go()
            try:
                await self._bus.wait_connected()
                await self._make_consumer()
            except BusUnavailable as error:
                self._bus.log.warning("body_feed_unavailable", error=str(error))
                await asyncio.sleep(limits.RECONNECT_WAIT_S)
                continue
            self._again.clear()
            self._heard = True
            while self._heard and not self._again.is_set():
                self._heard = False
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(limits.BODY_FEED_SILENCE_S):
                        await self._again.wait()

    async def _make_consumer(self) -> None:
        inbox = self._bus.new_inbox()
        self._consumer = f"bodies-{secrets.token_hex(8)}"
        self._subscription = self._bus.listen(inbox, self._on_message)
        config: dict[str, Any] = {
            "name": self._consumer,
            "deliver_subject": inbox,
            "ack_policy": "none",
            "max_deliver": 1,
            "mem_storage": True,
            "num_replicas": 1,
            "flow_control": True,
            "idle_heartbeat": int(limits.BODY_FEED_HEARTBEAT_S * 10**9),
            "inactive_threshold": int(limits.TAPE_INACTIVE_S * 10**9),
            "deliver_policy": "new",
            "replay_policy": "instant",
        }
        made = await self._bus.api(
            f"CONSUMER.CREATE.{REQUESTS.name}.{self._consumer}",
            {"stream_name": REQUESTS.name, "config": config, "action": "create"},
        )
        if "error" in made:
            raise BusUnavailable(f"consumer of {REQUESTS.name}: {made['error'].get('description')}")

    def _let_go(self) -> None:
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            subscription.close()
            if self._bus.connected:
                self._bus.publish(f"$JS.API.CONSUMER.DELETE.{REQUESTS.name}.{self._consumer}", b"")

    async def _on_message(self, message: Msg) -> None:
        self._heard = True
        if message.reply.startswith(ACK_PREFIX):
            self._cache.put(parse_delivery(message.reply).stream_sequence, message.data)
            return
        # Flow control and heartbeats. What does not fit is dropped here, so nothing piles up.
        stalled = (message.headers or {}).get("Nats-Consumer-Stalled")
        for reply in (stalled, message.reply):
            if reply:
                self._bus.publish(reply, b"")
