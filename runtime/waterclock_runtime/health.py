"""What a process says of itself over HTTP: ``/healthz``, ``/livez`` and ``/metrics``.

On threads of its own, so that it answers while the event loop is busy, and says so when the
loop is stuck. A client that hangs holds one thread for a few seconds and nothing else.
"""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Any, cast
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import (
    make_wsgi_app,  # pyright: ignore[reportUnknownVariableType] - the library leaves the application's type open
)

from waterclock_runtime import limits

WsgiApp = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class Health:
    """What ``/healthz`` says: healthy while the service is ready and nothing is wrong."""

    def __init__(self) -> None:
        self._wrong: dict[str, str] = {}
        self._watched: dict[str, Callable[[], str]] = {}
        self._beat_s = time.monotonic()
        self.ready = False
        self.facts: dict[str, Any] = {}

    def wrong(self, what: str, why: str) -> None:
        """Note a trouble; ``right`` takes it back."""
        self._wrong[what] = why

    def right(self, what: str) -> None:
        self._wrong.pop(what, None)

    def watch(self, what: str, read: Callable[[], str]) -> None:
        """Ask ``read`` at every report what is wrong; an empty text means nothing.

        It is called on another thread than the event loop's.
        """
        self._watched[what] = read

    def beat(self) -> None:
        """The event loop turns; called by it all the time."""
        self._beat_s = time.monotonic()

    def stuck_s(self) -> float:
        """For how long the event loop has not turned."""
        return time.monotonic() - self._beat_s

    def report(self) -> tuple[bool, dict[str, Any]]:
        """Whether all is well, and what ``/healthz`` says of it."""
        wrong = dict(self._wrong)
        for what, read in list(self._watched.items()):
            why = read()
            if why:
                wrong[what] = why
        stuck_s = self.stuck_s()
        if stuck_s > limits.LOOP_STUCK_S:
            wrong["loop"] = f"has not turned for {stuck_s:.1f} s"
        healthy = self.ready and not wrong
        return healthy, {"healthy": healthy, "ready": self.ready, "wrong": wrong, **self.facts}


class HealthServer:
    """Serves until ``close``.

    * ``/healthz``: 200 while healthy, else 503; what is wrong stands in the body. For whoever
      sends work here.
    * ``/livez``: 503 only when the event loop is stuck. For whoever restarts processes: one
      that waits for the bus is not mended by a restart.
    * ``/metrics``: Prometheus text.

    Raises:
        OSError: the address cannot be listened on.
    """

    def __init__(self, host: str, port: int, registry: CollectorRegistry, health: Health) -> None:
        self._server = make_server(
            host, port, _app(registry, health), server_class=_Server, handler_class=_Handler
        )
        self.port: int = self._server.server_port
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="health", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _app(registry: CollectorRegistry, health: Health) -> WsgiApp:
    metrics = cast("WsgiApp", make_wsgi_app(registry))

    def app(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        path = environ.get("PATH_INFO")
        if path == "/metrics":
            return metrics(environ, start)
        if path == "/healthz":
            well, report = health.report()
        elif path == "/livez":
            stuck_s = health.stuck_s()
            well, report = stuck_s <= limits.LOOP_STUCK_S, {"loop_stuck_ms": int(stuck_s * 1000)}
        else:
            start("404 Not Found", [("Content-Type", "text/plain")])
            return [b"expected /metrics, /healthz or /livez\n"]
        start(
            "200 OK" if well else "503 Service Unavailable", [("Content-Type", "application/json")]
        )
        return [json.dumps(report).encode()]

    return app


class _Server(ThreadingMixIn, WSGIServer):
    # Threads that still serve somebody do not keep the process from ending.
    daemon_threads = True
    block_on_close = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._places = threading.BoundedSemaphore(limits.HEALTH_CLIENTS_MAX)
        super().__init__(*args, **kwargs)

    def server_bind(self) -> None:
        # WSGIServer's own asks the resolver for this host's name, which can take seconds.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away or was too slow is not news."""


class _Handler(WSGIRequestHandler):
    timeout = limits.HEALTH_TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Scrapes are not news."""
