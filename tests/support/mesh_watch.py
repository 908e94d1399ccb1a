"""Looks at a running mesh from outside: what it says to its tenants, and what its bus holds.

Nothing here uses the services' or the runtime's code, so that a mistake of theirs cannot hide
itself: the tenants' own connections are listened on with the plain client, and the operator
reads every message of a stream by direct gets (ADR-31 of NATS: ``seq`` and ``batch``).
"""

import asyncio
import contextlib
import json
import time
from collections import defaultdict
from typing import Any

from msgspec import Struct
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from waterclock.mesh import EmbeddedMesh

BATCH = 1_000
BATCH_BYTES = 8_000_000
"""Far below what the bus buffers for a client before it cuts it off."""
BATCH_WAIT_S = 10.0


class Stored(Struct, frozen=True, gc=False):
    """One message as a stream holds it."""

    sequence: int
    stored_ns: int
    subject: str
    payload: bytes


class Said(Struct, frozen=True, gc=False):
    """One core message as somebody heard it."""

    at_ns: int
    """This host's wall clock, nanoseconds."""
    subject: str
    payload: bytes


class Watch:
    """Listens from its start on; reads streams when asked. Use ``async with``."""

    def __init__(self, mesh: EmbeddedMesh) -> None:
        self.mesh = mesh
        self.receipts: list[Said] = []
        self.finals: dict[tuple[str, str], dict[bytes, int]] = defaultdict(dict)
        """By request: the distinct finals that were sent, and when each was first heard."""
        self.beats: dict[str, list[tuple[int, int]]] = defaultdict(list)
        """By life of a worker: when it was heard (wall clock, ns) and sent (monotonic, ns)."""
        self.breaks: list[int] = []
        """When a connection of the watch was lost: it may have missed something then."""
        self._clients: list[Client] = []
        self._operator = Client()
        self._reading = asyncio.Lock()

    async def __aenter__(self) -> "Watch":
        mesh = self.mesh
        self._operator = await self._connect("operator", mesh.access.services["operator"])
        await self._listen(self._operator, "wc.beat.*", self._on_beat)
        for tenant in mesh.config["tenants"]:
            client = await self._connect(tenant, mesh.access.tenants[tenant].password)
            await self._listen(client, f"wc.receipt.{tenant}.*", self._on_receipt)
            await self._listen(client, f"wc.final.{tenant}.*", self._on_final)
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in self._clients:
            with contextlib.suppress(NatsError, OSError, TimeoutError):
                await client.close()

    @property
    def operator(self) -> Client:
        """A connection that may do everything inside the mesh's account."""
        return self._operator

    async def stream(self, name: str, start: int = 1) -> list[Stored]:
        """Every message of a stream from ``start`` on, as it stands now.

        Raises:
            AssertionError: the bus does not answer, or ends a batch before it is whole.
        """
        first, last = await self.bounds(name)
        found: list[Stored] = []
        at = max(start, first)
        while at <= last:
            batch = await self._batch(name, at, min(BATCH, last - at + 1))
            batch = [message for message in batch if message.sequence <= last]
            found += batch
            if not batch:
                break
            at = batch[-1].sequence + 1
        return found

    async def bounds(self, name: str) -> tuple[int, int]:
        """First and last sequence of a stream."""
        state = (await self.api(f"STREAM.INFO.{name}"))["state"]
        return int(state["first_seq"]), int(state["last_seq"])

    async def api(self, action: str, request: dict[str, Any] | None = None) -> dict[str, Any]:
        """One call of JetStream's own API, tried again for some seconds.

        Raises:
            AssertionError: it does not answer, or answers with an error.
        """
        why: object = None
        for _ in range(40):
            try:
                reply = await self._operator.request(
                    f"$JS.API.{action}", json.dumps(request or {}).encode(), timeout=2
                )
                answer: dict[str, Any] = json.loads(reply.data)
                if "error" not in answer:
                    return answer
                why = answer["error"]
            except (NatsError, TimeoutError) as error:
                why = error
            await asyncio.sleep(0.25)
        raise AssertionError(f"$JS.API.{action}: an answer expected, {why!r} found")

    async def publish(self, subject: str, payload: bytes) -> int:
        """Store one message as the operator; returns its sequence."""
        reply = await self._operator.request(subject, payload, timeout=5)
        answer = json.loads(reply.data)
        assert "seq" in answer, f"{subject}: expected an acknowledgement, found {answer}"
        return int(answer["seq"])

    async def _batch(self, name: str, start: int, count: int) -> list[Stored]:
        why: object = None
        for _ in range(20):
            try:
                async with self._reading:
                    return await self._batch_once(name, start, count)
            except (NatsError, TimeoutError, ConnectionError) as error:
                why = error
            await asyncio.sleep(0.25)
        raise AssertionError(f"{name} from {start}: a batch expected, {why!r} found")

    async def _batch_once(self, name: str, start: int, count: int) -> list[Stored]:
        client = self._operator
        inbox = client.new_inbox()
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        found: list[Stored] = []

        async def on_message(message: Msg) -> None:
            headers = message.headers or {}
            status = headers.get("Status")
            if status is not None:
                if not done.done():
                    if status in ("204", "404"):
                        done.set_result(None)
                    else:
                        done.set_exception(
                            ConnectionError(f"{status} {headers.get('Description', '')}")
                        )
                return
            found.append(
                Stored(
                    int(headers["Nats-Sequence"]),
                    rfc3339_ns(headers["Nats-Time-Stamp"]),
                    headers["Nats-Subject"],
                    message.data,
                )
            )

        subscription = await client.subscribe(
            inbox, cb=on_message, pending_msgs_limit=0, pending_bytes_limit=0
        )
        try:
            request = {"seq": start, "batch": count, "max_bytes": BATCH_BYTES}
            await client.publish(f"$JS.API.DIRECT.GET.{name}", json.dumps(request).encode(), inbox)
            async with asyncio.timeout(BATCH_WAIT_S):
                await done
        finally:
            with contextlib.suppress(NatsError):
                await subscription.unsubscribe()
        return found

    async def _connect(self, user: str, password: str) -> Client:
        client = Client()

        async def on_break() -> None:
            self.breaks.append(time.time_ns())

        async def on_error(_: Exception) -> None:
            """What breaks is looked at where it matters."""

        await client.connect(
            self.mesh.bus_url,
            user=user,
            password=password,
            name=f"watch-{user}",
            max_reconnect_attempts=-1,
            reconnect_time_wait=0.05,  # pyright: ignore[reportArgumentType] - a float works
            connect_timeout=2,
            ping_interval=2,
            disconnected_cb=on_break,
            error_cb=on_error,
        )
        self._clients.append(client)
        return client

    async def _listen(self, client: Client, subject: str, handler: Any) -> None:
        async def on_message(message: Msg) -> None:
            handler(Said(time.time_ns(), message.subject, message.data))

        await client.subscribe(subject, cb=on_message, pending_msgs_limit=0, pending_bytes_limit=0)

    def _on_beat(self, said: Said) -> None:
        sent_ns = int(json.loads(said.payload)["beat"]["mono_ns"])
        self.beats[said.subject.removeprefix("wc.beat.")].append((said.at_ns, sent_ns))

    def _on_receipt(self, said: Said) -> None:
        self.receipts.append(said)

    def _on_final(self, said: Said) -> None:
        _, _, tenant, request_id = said.subject.split(".")
        self.finals[tenant, request_id].setdefault(said.payload, said.at_ns)


def rfc3339_ns(text: str) -> int:
    """``2026-01-02T03:04:05.678901234Z`` as nanoseconds since 1970, in integers."""
    date, _, rest = text.removesuffix("Z").partition("T")
    clock, _, fraction = rest.partition(".")
    year, month, day = map(int, date.split("-"))
    hour, minute, second = map(int, clock.split(":"))
    seconds = (_days(year, month, day) * 24 + hour) * 3600 + minute * 60 + second
    return seconds * 10**9 + int(fraction.ljust(9, "0") or "0")


def _days(year: int, month: int, day: int) -> int:
    """Days since 1970-01-01 in the Gregorian calendar (H. Hinnant, days_from_civil)."""
    year -= month <= 2
    era, of_era = divmod(year, 400)
    of_year = (153 * ((month + 9) % 12) + 2) // 5 + day - 1
    return era * 146_097 + of_era * 365 + of_era // 4 - of_era // 100 + of_year - 719_468
