"""The edge as plain HTTP: what clients send that is wrong, slow, too large or cut off."""

import asyncio
import base64
import contextlib
import hashlib
import json
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from admission_host import API_KEYS, MESH_KEY, MODEL, AdmissionHost, eventually
from broker_process import BrokerProcess
from fake_mesh import FakeMesh, Plan

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
HTTP = {
    "header_wait_ms": 700,
    "header_bytes_max": 8_192,
    "body_wait_ms": 700,
    "body_bytes_max": 100_000,
    "idle_s": 1,
    "stall_ms": 30_000,
    "stream_bytes_max": 65_536,
    "connections_max": 50,
}


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        return self.json()["error"]


@pytest.fixture(scope="module")
def edge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[BrokerProcess, AdmissionHost]]:
    folder = tmp_path_factory.mktemp("http")
    broker = BrokerProcess(folder / "broker").start()
    try:
        with AdmissionHost(folder / "admission", broker.url, http=HTTP) as host:
            yield broker, host
    finally:
        broker.stop()


@pytest.fixture
async def mesh(edge: tuple[BrokerProcess, AdmissionHost]) -> AsyncIterator[FakeMesh]:
    async with FakeMesh(edge[0].url, MESH_KEY) as fake:
        yield fake


@pytest.fixture
def host(edge: tuple[BrokerProcess, AdmissionHost]) -> AdmissionHost:
    return edge[1]


def request(
    body: bytes | dict[str, Any] = b"",
    *,
    method: str = "POST",
    path: str = "/v1/chat/completions",
    key: str | None = API_KEYS["acme"],
    headers: dict[str, str] | None = None,
) -> bytes:
    payload = body if isinstance(body, bytes) else json.dumps(body).encode()
    fields = {"Host": "edge", "Content-Length": str(len(payload))}
    if key is not None:
        fields["Authorization"] = f"Bearer {key}"
    fields |= headers or {}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + payload


class Connection:
    """One connection, read answer by answer."""

    def __init__(self, host: AdmissionHost) -> None:
        self._port = host.http_port

    async def __aenter__(self) -> "Connection":
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        with contextlib.suppress(OSError):
            await self.writer.drain()

    async def answer(self) -> Answer:
        async with asyncio.timeout(10):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
            lines = head.split("\r\n")
            headers = {
                name.lower(): value
                for name, _, value in (line.partition(": ") for line in lines[1:] if line)
            }
            body = b""
            if headers.get("transfer-encoding") == "chunked":
                while size := int(await self.reader.readline(), 16):
                    body += await self.reader.readexactly(size)
                    await self.reader.readexactly(2)
                await self.reader.readexactly(2)
            else:
                body = await self.reader.readexactly(int(headers.get("content-length", "0")))
            return Answer(int(lines[0].split(" ")[1]), headers, body)

    async def ended(self) -> bytes:
        """Everything up to the end of the connection."""
        async with asyncio.timeout(10):
            try:
                return await self.reader.read()
            except ConnectionResetError:
                return b""


async def ask(host: AdmissionHost, data: bytes) -> Answer:
    async with Connection(host) as connection:
        await connection.send(data)
        return await connection.answer()


async def test_headers_say_what_happened(host: AdmissionHost, mesh: FakeMesh) -> None:
    answer = await ask(host, request(CHAT, headers={"X-Request-Id": "mine-1"}))
    assert answer.status == 200
    assert answer.headers["x-request-id"] == "mine-1"
    assert answer.headers["x-queue-time-ms"] == "12.345"
    assert answer.headers["x-exec-time-ms"] == "67.890"
    assert answer.headers["x-served-model"] == MODEL
    text = answer.headers["x-waterclock-receipt"]
    receipt = json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    assert (receipt["id"], receipt["outcome"]) == ("mine-1", "admitted")
    found = await mesh.bus.message("EVENTS", receipt["sequence"])
    assert found is not None
    assert hashlib.sha256(found[1]).hexdigest() == receipt["event_sha256"]
    assert mesh.seen.admitted[0].number == receipt["number"]
    assert (
        (await ask(host, request(CHAT, headers={"X-Request-Id": "no id!"})))
        .headers["x-request-id"]
        .startswith("h-")
    )


async def test_a_stream_is_server_sent_events_to_the_letter(
    host: AdmissionHost, mesh: FakeMesh
) -> None:
    answer = await ask(host, request({**CHAT, "stream": True}))
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-queue-time-ms"] == "12.345"
    assert answer.headers["x-served-model"] == MODEL
    assert "x-exec-time-ms" not in answer.headers
    parts = answer.body.split(b"\n\n")
    assert parts[-2:] == [b"data: [DONE]", b""]
    assert all(part.startswith(b"data: {") for part in parts[:-2])
    assert json.loads(parts[-3][6:])["waterclock"]["exec_ms"] == 67.89


async def test_connections_are_used_again(host: AdmissionHost, mesh: FakeMesh) -> None:
    async with Connection(host) as connection:
        for _ in range(3):
            await connection.send(request(CHAT))
            assert (await connection.answer()).status == 200
        # Two at once, as a proxy may send them.
        await connection.send(request(CHAT) + request({**CHAT, "n": 2}))
        assert [(await connection.answer()).status for _ in range(2)] == [200, 400]


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (request(CHAT, key=None), 401),
        (request(CHAT, key="wrong"), 401),
        (request(CHAT, headers={"Authorization": "Basic abc"}), 401),
        (request(CHAT, headers={"Authorization": "Bearer "}), 401),
        (request(b"{"), 400),
        (request(b"[]"), 400),
        (request(b"\xff\xfe"), 400),
        (request({"model": MODEL}), 400),
        (request(CHAT, headers={"X-Waterclock-Deadline-MS": "soon"}), 400),
        (request(CHAT, headers={"X-Waterclock-Deadline-MS": "0"}), 400),
        (request(CHAT, path="/v1/embeddings"), 404),
        (request(CHAT, path="/"), 404),
        (request(method="GET"), 405),
        (request(method="GET", path="/v1/models", key="wrong"), 401),
        (request(method="GET", path="/v1/models/none"), 404),
        (request(b"x" * 100_001), 413),
        (request({**CHAT, "messages": [{"role": "user", "content": "é" * 60_000}]}), 413),
    ],
)
async def test_what_is_wrong_gets_openais_error(
    host: AdmissionHost, mesh: FakeMesh, data: bytes, status: int
) -> None:
    answer = await ask(host, data)
    assert answer.status == status
    assert answer.headers["content-type"] == "application/json"
    assert set(answer.error) == {"message", "type", "param", "code"}
    assert answer.error["message"]
    assert answer.headers["x-request-id"]
    assert mesh.seen.admitted == []


async def test_a_body_in_chunks_that_grows_too_large_is_cut(host: AdmissionHost) -> None:
    head = request(b"", headers={"Transfer-Encoding": "chunked"}).replace(
        b"Content-Length: 0\r\n", b""
    )
    async with Connection(host) as connection:
        await connection.send(head)
        for _ in range(11):
            await connection.send(b"2710\r\n" + b"x" * 10_000 + b"\r\n")
        answer = await connection.answer()
        assert (answer.status, answer.headers["connection"]) == (413, "close")


async def test_a_body_that_does_not_come_is_not_waited_for(host: AdmissionHost) -> None:
    async with Connection(host) as connection:
        await connection.send(request(b"x" * 10)[:-5])
        assert (await connection.answer()).status == 408
        await connection.ended()


async def test_headers_that_do_not_come_are_not_waited_for(host: AdmissionHost) -> None:
    async with Connection(host) as silent, Connection(host) as slow:
        for byte in b"POST /v1/c":
            await slow.send(bytes([byte]))
            await asyncio.sleep(0.05)
        assert (await slow.ended()).startswith(b"HTTP/1.1 408 ")
        assert (await silent.ended()).startswith(b"HTTP/1.1 408 ")


async def test_headers_that_grow_too_large_are_refused(host: AdmissionHost) -> None:
    for data in (
        request(CHAT, headers={"X-Long": "x" * 9_000}),
        b"GET /" + b"x" * 9_000,
        b"GET / HTTP/1.1\r\n" + b"X-Many: x\r\n" * 1_000,
    ):
        async with Connection(host) as connection:
            await connection.send(data)
            assert (await connection.ended()).startswith(b"HTTP/1.1 431 ")
    async with Connection(host) as slowly:
        await slowly.send(b"GET / HTTP/1.1\r\n")
        for _ in range(5):
            await slowly.send(b"X-Many: " + b"x" * 2_000)
            await asyncio.sleep(0.05)
        assert (await slowly.ended()).startswith(b"HTTP/1.1 431 ")


async def test_an_idle_connection_is_closed(host: AdmissionHost, mesh: FakeMesh) -> None:
    async with Connection(host) as connection:
        await connection.send(request(CHAT))
        assert (await connection.answer()).status == 200
        assert await connection.ended() == b""


async def test_connections_are_bounded(host: AdmissionHost) -> None:
    async with contextlib.AsyncExitStack() as stack:
        many = [await stack.enter_async_context(Connection(host)) for _ in range(60)]
        turned_away = await asyncio.gather(*(connection.ended() for connection in many))
    assert sum(data.startswith(b"HTTP/1.1 503 ") for data in turned_away) == 10
    assert (await ask(host, request(method="GET", path="/healthz"))).status == 200


async def test_what_is_no_http_is_refused(host: AdmissionHost) -> None:
    async with Connection(host) as connection:
        await connection.send(b"\x16\x03\x01\x02\x00 hello\r\n\r\n")
        assert (await connection.ended()).startswith(b"HTTP/1.1 400 ")


@contextlib.contextmanager
def stalled_client(host: AdmissionHost) -> Iterator[None]:
    """Asks for a stream and reads nothing of it."""
    stalled = socket.create_connection(("127.0.0.1", host.http_port))
    stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    try:
        stalled.sendall(request({**CHAT, "stream": True}))
        yield
    finally:
        stalled.close()


async def test_a_client_that_takes_nothing_for_too_long_is_cut_off(
    broker: BrokerProcess, tmp_path_factory: pytest.TempPathFactory
) -> None:
    http = {"stall_ms": 500, "stream_bytes_max": 10**9}
    host = AdmissionHost(tmp_path_factory.mktemp("stall"), broker.url, http=http)
    with host:
        async with FakeMesh(broker.url, MESH_KEY) as mesh:
            never = asyncio.Event()
            mesh.plan = lambda _a, _b: Plan(pieces=("x" * 100_000,) * 100, before_end=never)
            with stalled_client(host):
                await mesh.until(lambda seen: seen.cancels, 15)
            assert await host.metric('waterclock_http_cut_total{why="stalled"}') == 1


async def test_a_client_that_does_not_read_is_cut_off_and_its_request_cancelled(
    host: AdmissionHost, mesh: FakeMesh
) -> None:
    never = asyncio.Event()
    mesh.plan = lambda _a, _b: Plan(
        pieces=("x" * 20_000,) * 200, piece_delay_s=0.002, before_end=never
    )
    with stalled_client(host):
        await mesh.until(lambda seen: seen.cancels, 15)
    assert mesh.seen.cancels[0].reason == "disconnect"
    assert await host.metric('waterclock_http_cut_total{why="stalled"}') == 1

    async def nobody_is_open() -> bool:
        return await host.metric("waterclock_http_open") == 0

    await eventually(nobody_is_open)


async def test_a_client_that_resets_its_connection_cancels(
    host: AdmissionHost, mesh: FakeMesh
) -> None:
    never = asyncio.Event()
    mesh.plan = lambda _a, _b: Plan(before_first=never)
    async with Connection(host) as connection:
        await connection.send(request(CHAT))
        await mesh.until(lambda seen: seen.admitted)
        connection.writer.transport.abort()
    await mesh.until(lambda seen: seen.cancels)


async def test_a_deadline_may_come_as_a_header(host: AdmissionHost, mesh: FakeMesh) -> None:
    await ask(host, request(CHAT, headers={"X-Waterclock-Deadline-MS": "4321"}))
    admitted = mesh.seen.admitted[0]
    assert admitted.edge_accepted is not None
    assert admitted.deadline_us == admitted.edge_accepted.wall_us + 4_321_000
    assert admitted.edge_accepted.wall_us <= admitted.arrival.wall_us + 1_000


async def test_an_answer_that_never_comes_ends_after_its_deadline(
    host: AdmissionHost, mesh: FakeMesh
) -> None:
    mesh.plan = lambda _a, _b: Plan(end="silent")
    answer = await ask(host, request(CHAT, headers={"X-Waterclock-Deadline-MS": "1000"}))
    assert (answer.status, answer.error["code"]) == (504, "deadline_expired")
    await mesh.until(lambda seen: seen.cancels)


async def test_an_idempotency_key_may_be_any_text(host: AdmissionHost, mesh: FakeMesh) -> None:
    headers = {"Idempotency-Key": "order 17 / Müller"}
    first = await ask(host, request(CHAT, headers=headers))
    second = await ask(host, request(CHAT, headers=headers))
    assert first.json()["id"] == second.json()["id"]
    assert len(mesh.seen.admitted) == 1


async def test_a_request_that_was_cancelled_is_no_answer(
    host: AdmissionHost, mesh: FakeMesh
) -> None:
    never = asyncio.Event()
    mesh.plan = lambda _a, _b: Plan(before_first=never)
    call = asyncio.create_task(ask(host, request(CHAT, headers={"X-Request-Id": "stop-me"})))
    await mesh.until(lambda seen: seen.admitted)
    mesh.bus.publish("wc.cancel.acme.stop-me", b"")
    answer = await call
    assert (answer.status, answer.error["code"]) == (499, "cancelled")
    assert answer.headers["x-should-retry"] == "false"


async def test_an_error_after_the_first_byte_is_an_event_of_the_stream(
    host: AdmissionHost, mesh: FakeMesh
) -> None:
    go = asyncio.Event()
    mesh.plan = lambda _a, _b: Plan(end="failed", detail="broke down", before_end=go)
    async with Connection(host) as connection:
        await connection.send(request({**CHAT, "stream": True}))
        await asyncio.sleep(0.3)
        go.set()
        answer = await connection.answer()
    assert answer.status == 200
    parts = answer.body.split(b"\n\n")
    assert json.loads(parts[-2][6:])["error"]["message"] == "broke down"
    assert b"[DONE]" not in answer.body


async def test_health_is_on_the_edge_as_well(host: AdmissionHost) -> None:
    answer = await ask(host, request(method="GET", path="/healthz", key=None))
    assert (answer.status, answer.json()["ready"]) == (200, True)


async def test_leaving_lets_answers_end_and_takes_nothing_new(
    broker: BrokerProcess, tmp_path_factory: pytest.TempPathFactory
) -> None:
    host = AdmissionHost(tmp_path_factory.mktemp("leaving"), broker.url)
    host.start()
    assert host.process is not None
    go = asyncio.Event()
    async with FakeMesh(broker.url, MESH_KEY) as mesh, Connection(host) as kept:
        mesh.plan = lambda _a, _b: Plan(before_first=go)
        call = asyncio.create_task(ask(host, request(CHAT)))
        await mesh.until(lambda seen: seen.admitted)
        await kept.send(request(method="GET", path="/v1/models"))
        await kept.answer()
        host.process.terminate()
        await asyncio.sleep(0.2)
        await kept.send(request(CHAT))
        refused = await kept.answer()
        assert (refused.status, refused.error["code"]) == (503, "draining")
        assert refused.headers["retry-after"] == "1"
        go.set()
        assert (await call).status == 200
    assert await asyncio.to_thread(host.process.wait, 15) == 0


async def test_leaving_tells_those_whose_answer_takes_too_long(
    broker: BrokerProcess, tmp_path_factory: pytest.TempPathFactory
) -> None:
    host = AdmissionHost(tmp_path_factory.mktemp("leaving"), broker.url)
    host.start()
    assert host.process is not None
    never = asyncio.Event()
    async with FakeMesh(broker.url, MESH_KEY) as mesh:
        mesh.plan = lambda _a, _b: Plan(before_end=never)
        whole = asyncio.create_task(ask(host, request(CHAT)))
        stream = asyncio.create_task(ask(host, request({**CHAT, "stream": True})))
        await mesh.until(lambda seen: len(seen.admitted) == 2)
        await asyncio.sleep(0.2)
        host.process.terminate()
        assert (await whole).error["code"] == "draining"
        assert b'"code":"draining"' in (await stream).body
    assert await asyncio.to_thread(host.process.wait, 15) == 0


async def test_without_a_bus_the_client_is_told_to_come_again(
    broker: BrokerProcess, tmp_path_factory: pytest.TempPathFactory
) -> None:
    host = AdmissionHost(
        tmp_path_factory.mktemp("nobus"), broker.url, http={"receipt_wait_ms": 500}
    )
    with host:
        broker.pause()
        answer = await ask(host, request(CHAT))
        assert (answer.status, answer.error["code"]) == (503, "unavailable")
        assert answer.headers["retry-after"] == "1"
        broker.resume()
        async with FakeMesh(broker.url, MESH_KEY):

            async def is_served() -> bool:
                return (await ask(host, request(CHAT))).status == 200

            await eventually(is_served, 20)
