"""The connection to the bus: what the producer needs of it, and nats-py behind that.

What is known of nats-py 2.16 and holds here: a subscription's callback must be a coroutine
function, and its messages are handled one after the other by one task, so handlers are plain
functions that never wait. What exceeds the pending limits is dropped and only the error callback
hears of it. A publish while disconnected is buffered and may be lost, so nothing is published
then. An error line from the server closes the client for good, so a new one is made.
"""

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Callable, Sequence
from typing import Protocol
from urllib.parse import urlsplit

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from waterclock_producer.errors import NotConnected
from waterclock_producer.limits import (
    CONNECT_WITHIN_S,
    FLUSH_WITHIN_S,
    PENDING_IN_BYTES_MAX,
    PENDING_IN_MESSAGES_MAX,
    PENDING_OUT_BYTES_MAX,
    PING_INTERVAL_S,
    RECONNECT_WAIT_MS,
    RECONNECT_WAIT_MS_MAX,
)

_log = logging.getLogger("waterclock_producer")

Handler = Callable[[str, bytes, str], None]
"""(subject, payload, status): status is the number of an inline status such as 503, else empty."""


class LinkDown(Exception):
    """There is no connection at this moment."""


class MessageRefused(Exception):
    """This message can never be published over this connection."""


class Link(Protocol):
    """One connection to the bus that heals itself.

    Subscriptions outlive reconnects. Messages of one subscription are handled in the order in
    which they came; between two subscriptions there is no order.
    """

    last_error: str
    """The newest thing that the bus or the network refused; empty if nothing was."""

    async def open(self, on_gap: Callable[[], None]) -> None:
        """Connect. ``on_gap`` is called whenever messages may have been missed, once
        subscriptions stand again.

        Raises:
            NotConnected: no connection within the bound, or credentials refused.
        """
        ...

    def new_inbox(self) -> str:
        """A prefix for reply subjects that nobody else has."""
        ...

    async def subscribe(self, subject: str, handler: Handler) -> None:
        """From now on, call ``handler`` for each message."""
        ...

    async def connected(self) -> None:
        """Return as soon as there is a connection."""
        ...

    async def publish(self, subject: str, payload: bytes, reply: str) -> None:
        """Hand one message to the connection; it may be lost if that breaks.

        Raises:
            LinkDown: there is no connection; publish again when there is.
            MessageRefused: the message breaks a limit of the bus.
        """
        ...

    async def close(self) -> None:
        """Send what was published, then end. May be repeated."""
        ...


class NatsLink:
    """A ``Link`` over nats-py."""

    def __init__(
        self,
        url: str | Sequence[str],
        *,
        user: str | None = None,
        password: str | None = None,
        tls: ssl.SSLContext | None = None,
        name: str = "waterclock-producer",
        inbox_prefix: str = "_INBOX",
    ) -> None:
        self.last_error = ""
        self._servers = [url] if isinstance(url, str) else list(url)
        self._user = user
        self._password = password
        self._tls = tls
        self._name = name
        self._inbox_prefix = inbox_prefix
        self._client = Client()
        self._subscriptions: list[tuple[str, Handler]] = []
        self._up = asyncio.Event()
        self._closing = False
        self._on_gap: Callable[[], None] = lambda: None
        self._dropped: asyncio.TimerHandle | None = None
        self._reopening: asyncio.Task[None] | None = None
        self._refused: asyncio.Future[str] | None = None

    async def open(self, on_gap: Callable[[], None]) -> None:
        self._on_gap = on_gap
        where = ", ".join(_without_credentials(url) for url in self._servers)
        try:
            await self._connect(CONNECT_WITHIN_S)
        except TimeoutError as error:
            raise NotConnected(
                f"no connection to {where} within {CONNECT_WITHIN_S} s: {self.last_error or error}"
            ) from error
        except nats.errors.Error as error:
            raise NotConnected(f"no connection to {where}: {error}") from error

    def new_inbox(self) -> str:
        return self._client.new_inbox()

    async def subscribe(self, subject: str, handler: Handler) -> None:
        self._subscriptions.append((subject, handler))
        await self._subscribe(self._client, subject, handler)

    async def connected(self) -> None:
        await self._up.wait()
        while not self._client.is_connected:
            # nats-py knows of a break some time before it says so.
            await asyncio.sleep(RECONNECT_WAIT_MS / 1000)
            await self._up.wait()

    async def publish(self, subject: str, payload: bytes, reply: str) -> None:
        client = self._client
        if not client.is_connected:
            raise LinkDown
        try:
            await client.publish(subject, payload, reply)
        except (
            nats.errors.ConnectionClosedError,
            nats.errors.ConnectionDrainingError,
            nats.errors.OutboundBufferLimitError,
            OSError,
        ) as error:
            raise LinkDown from error
        except nats.errors.Error as error:
            raise MessageRefused(f"{type(error).__name__}: {error}") from error

    async def close(self) -> None:
        self._closing = True
        if self._dropped is not None:
            self._dropped.cancel()
        if self._reopening is not None:
            self._reopening.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reopening
        if self._client.is_connected:
            with contextlib.suppress(nats.errors.Error, OSError):
                await self._client.flush(FLUSH_WITHIN_S)
        await self._client.close()

    async def _connect(self, within_s: int) -> None:
        """Make a client and connect it.

        Raises:
            TimeoutError: not within ``within_s``.
            nats.errors.Error: the address is none, or the credentials were refused.
        """
        client = Client()
        self._client = client
        self._refused = asyncio.get_running_loop().create_future()
        connecting = asyncio.ensure_future(
            client.connect(
                self._servers,
                user=self._user,
                password=self._password,
                tls=self._tls,
                name=self._name,
                inbox_prefix=self._inbox_prefix,
                error_cb=self._failed,
                disconnected_cb=self._disconnected,
                reconnected_cb=self._reconnected,
                closed_cb=self._closed,
                connect_timeout=CONNECT_WITHIN_S,
                # Whole seconds by its annotation; it only ever adds it to a time.
                reconnect_time_wait=RECONNECT_WAIT_MS / 1000,  # pyright: ignore[reportArgumentType] - a float works and two seconds are long
                max_reconnect_attempts=-1,
                ping_interval=PING_INTERVAL_S,
                pending_size=PENDING_OUT_BYTES_MAX,
                # Without it, a publish that waits for a dead connection waits for ever.
                flush_timeout=FLUSH_WITHIN_S,
            )
        )
        refused = self._refused
        try:
            # It goes on trying by itself, also when trying again cannot help.
            await asyncio.wait(
                (connecting, refused), timeout=within_s, return_when=asyncio.FIRST_COMPLETED
            )
            if connecting.done():
                await connecting
            elif refused.done():
                raise nats.errors.Error(refused.result())
            else:
                raise TimeoutError("it did not answer")
        except BaseException:
            connecting.cancel()
            with contextlib.suppress(asyncio.CancelledError, nats.errors.Error, OSError):
                await connecting
            await self._abandon(client)
            raise
        finally:
            refused.cancel()
            self._refused = None
        for subject, handler in self._subscriptions:
            await self._subscribe(client, subject, handler)
        if self._subscriptions:
            await client.flush(FLUSH_WITHIN_S)
        self._up.set()

    async def _abandon(self, client: Client) -> None:
        """Close a client that must not bring forth a successor."""
        closing, self._closing = self._closing, True
        try:
            with contextlib.suppress(nats.errors.Error, OSError):
                await client.close()
        finally:
            self._closing = closing

    async def _subscribe(self, client: Client, subject: str, handler: Handler) -> None:
        async def handle(message: Msg) -> None:
            headers = message.headers
            handler(message.subject, message.data, headers.get("Status", "") if headers else "")

        await client.subscribe(  # pyright: ignore[reportUnknownMemberType] - an untyped future among its parameters
            subject,
            cb=handle,
            pending_msgs_limit=PENDING_IN_MESSAGES_MAX,
            pending_bytes_limit=PENDING_IN_BYTES_MAX,
        )

    async def _failed(self, error: Exception) -> None:
        text = str(error) or type(error).__name__
        self.last_error = text
        if isinstance(error, nats.errors.SlowConsumerError):
            _log.warning("messages dropped: more arrived than could be handled")
            if self._dropped is None:
                self._dropped = asyncio.get_running_loop().call_later(1, self._after_drop)
        elif isinstance(error, (nats.errors.Error, OSError, asyncio.TimeoutError)):
            _log.debug("connection: %s", text)
        else:
            # Only a handler of ours can have raised it, and nats-py would keep it to itself.
            _log.error("a handler failed", exc_info=error)
        refused = self._refused
        if "authorization violation" in text.lower() and refused and not refused.done():
            refused.set_result(text)

    def _after_drop(self) -> None:
        self._dropped = None
        self._on_gap()

    async def _disconnected(self) -> None:
        self._up.clear()

    async def _reconnected(self) -> None:
        self._up.set()
        self._on_gap()

    async def _closed(self) -> None:
        self._up.clear()
        if not self._closing and (self._reopening is None or self._reopening.done()):
            self._reopening = asyncio.get_running_loop().create_task(self._reopen())

    async def _reopen(self) -> None:
        wait_ms = RECONNECT_WAIT_MS
        while True:
            await asyncio.sleep(wait_ms / 1000)
            wait_ms = min(wait_ms * 2, RECONNECT_WAIT_MS_MAX)
            try:
                await self._connect(CONNECT_WITHIN_S)
            except (nats.errors.Error, OSError, TimeoutError) as error:
                self.last_error = str(error) or type(error).__name__
            else:
                self._on_gap()
                return


def _without_credentials(url: str) -> str:
    parts = urlsplit(url if "://" in url else f"nats://{url}")
    host = parts.hostname or "?"
    return f"{parts.scheme}://{host}:{parts.port or 4222}"
