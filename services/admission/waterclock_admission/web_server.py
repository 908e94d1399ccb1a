"""uvicorn in the service's own loop, with the limits that it does not have itself.

What is added: a bound on request line and headers in bytes and in time (a connection that sends
them drop by drop holds nothing for long), a bound on connections, and a way to cut a connection
off whose client does not read.
"""

import asyncio
import contextlib
import socket
from collections.abc import Generator
from typing import Any, Literal, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import (
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState

from waterclock_admission.config import HttpSettings

SEND_BUFFER_BYTES = 131_072
"""What the kernel keeps for a client that does not read; the rest waits in the edge's own bound."""
ABORT = "waterclock_abort"
"""In a request's ASGI state: a function that drops its connection at once."""


class WebServer:
    """One listening socket. ``start`` returns when it listens."""

    def __init__(self, app: ASGIApp, settings: HttpSettings) -> None:
        self._settings = settings
        config = Config(
            app,
            loop="none",
            http=_protocol(settings),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=settings.idle_s,
            timeout_graceful_shutdown=1,
        )
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None
        self.port = 0

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: the address is taken, or not this host's.
        """
        listening = socket.create_server(
            (self._settings.host, self._settings.port),
            family=socket.AF_INET6 if ":" in self._settings.host else socket.AF_INET,
            backlog=2048,
        )
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        listening.setblocking(False)
        self.port = listening.getsockname()[1]
        self._task = asyncio.create_task(self._server.serve(sockets=[listening]), name="http")

    async def stop(self) -> None:
        """Stop listening, close idle connections, give what still runs a second."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Signals are the service's own business."""
        yield


def _protocol(settings: HttpSettings) -> type[HttpToolsProtocol]:
    class BoundedProtocol(HttpToolsProtocol):
        """One connection."""

        def __init__(
            self,
            config: Config,
            server_state: ServerState,
            app_state: dict[str, Any],
            _loop: asyncio.AbstractEventLoop | None = None,
        ) -> None:
            super().__init__(config, server_state, app_state, _loop)
            self._heads = 0
            """Requests that have begun on this connection."""
            self._head_bytes = 0
            self._head_timer: asyncio.TimerHandle | None = None
            self._part: Literal["idle", "head", "body"] = "idle"
            """What of a request comes next."""
            self._turned_away = False

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            if len(self.connections) > settings.connections_max:
                self._turn_away(503, "Service Unavailable", b"retry-after: 1\r\n")
                return
            self._arm()

        def connection_lost(self, exc: Exception | None) -> None:
            self._disarm()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self._turned_away:
                return
            # How many heads begin in this piece if all of it belongs to one that is not complete.
            # Of a piece that also holds the end of another request nothing is counted.
            heads = {"idle": 1, "head": 0, "body": -1}[self._part] + self._heads
            if self._part != "body" and self._head_timer is None:
                self._arm()
            super().data_received(data)
            if self._part == "head" and self._heads == heads and not self._turned_away:
                self._head_bytes += len(data)
                self._check_head()

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._part = "head"
            self._heads += 1
            self._head_bytes = 0
            self.scope["state"][ABORT] = self._abort  # pyright: ignore[reportTypedDictNotRequiredAccess]  # uvicorn has just set it

        def on_headers_complete(self) -> None:
            self._head_bytes = len(self.url) + sum(
                len(name) + len(value) for name, value in self.headers
            )
            self._check_head()
            if self._turned_away:
                return
            self._part = "body"
            self._disarm()
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            if not self._turned_away:
                super().on_body(body)

        def on_message_complete(self) -> None:
            self._part = "idle"
            if not self._turned_away:
                super().on_message_complete()

        def _check_head(self) -> None:
            if self._head_bytes > settings.header_bytes_max:
                self._turn_away(431, "Request Header Fields Too Large")

        def _arm(self) -> None:
            self._head_timer = self.loop.call_later(
                settings.header_wait_ms / 1000, self._turn_away, 408, "Request Timeout"
            )

        def _disarm(self) -> None:
            timer, self._head_timer = self._head_timer, None
            if timer is not None:
                timer.cancel()

        def _turn_away(self, status: int, phrase: str, more: bytes = b"") -> None:
            self._disarm()
            if self._turned_away or self.transport.is_closing():
                return
            self._turned_away = True
            running = cast("RequestResponseCycle | None", self.cycle)
            if running is not None and not running.response_complete:
                # An answer is on its way; it ends, and the connection with it.
                running.keep_alive = False
                return
            self.transport.write(
                b"HTTP/1.1 %d %s\r\n%scontent-length: 0\r\nconnection: close\r\n\r\n"
                % (status, phrase.encode(), more)
            )
            self.transport.close()

        def _abort(self) -> None:
            self.transport.abort()

    return BoundedProtocol
