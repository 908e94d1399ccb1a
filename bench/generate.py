"""Load for the benchmarks, in a process of its own: closed or open loop, NATS or HTTP.

Prints one JSON object. Latency is measured on this process's monotonic clock, from the send to the
answer. In the open loop nothing waits for an answer before the next is sent, so no waiting is left
out; how late the sends themselves were (the event loop's timer ticks in milliseconds) stands beside
it as ``late_us``.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import uvloop

from waterclock_producer import Handle, Producer, new_id, new_submission

Send = Callable[[], Awaitable[bool]]
BODY_BYTES = 400


async def _nats(given: argparse.Namespace) -> dict[str, Any]:
    async with Producer.connect(
        given.url,
        tenant=given.tenant,
        user=given.tenant,
        password=given.secret,
        keep_bodies=False,
        in_flight_max=1_000_000,
    ) as producer:
        # The rest of a submission (id, model, max_tokens) makes it 400 bytes.
        prompt = "word " * ((BODY_BYTES - 80) // 5)

        def begin(on_end: Callable[[bool | None], None]) -> None:
            """One request; ``on_end`` says whether it was completed, None if it got no answer."""
            submission = new_submission(id=new_id(), model=given.model, prompt=prompt, max_tokens=1)

            def ended(handle: Handle) -> None:
                final = handle.final
                on_end(None if final is None else final.outcome == "completed")

            producer.send(submission, ended)

        if given.in_flight:
            return await _closed_calls(begin, given.in_flight, given.warm_up_s, given.seconds)

        async def send() -> bool:
            answer: asyncio.Future[bool | None] = asyncio.get_running_loop().create_future()
            begin(answer.set_result)
            found = await answer
            if found is None:
                raise RuntimeError("no answer")
            return found

        return await _drive(given, send)


async def _closed_calls(
    begin: Callable[[Callable[[bool | None], None]], None],
    in_flight: int,
    warm_up_s: float,
    seconds: float,
) -> dict[str, Any]:
    """The closed loop without a task for each request: each end begins the next."""
    begun = time.monotonic_ns()
    from_ns = begun + int(warm_up_s * 1e9)
    to_ns = from_ns + int(seconds * 1e9)
    latencies_ns: list[int] = []
    counts = {"sent": 0, "answered": 0, "refused": 0, "lost": 0}
    open_ = in_flight
    done = asyncio.Event()

    def one() -> None:
        nonlocal open_
        at_ns = time.monotonic_ns()
        if at_ns >= to_ns:
            open_ -= 1
            if not open_:
                done.set()
            return
        counts["sent"] += 1

        def on_end(good: bool | None) -> None:
            now_ns = time.monotonic_ns()
            counts["lost" if good is None else "answered" if good else "refused"] += 1
            if good and from_ns <= at_ns and now_ns <= to_ns:
                latencies_ns.append(now_ns - at_ns)
            one()

        begin(on_end)

    print("begun", flush=True)
    for _ in range(in_flight):
        one()
    await done.wait()
    return {**counts, "counted": len(latencies_ns), "seconds": seconds, **_shape(latencies_ns)}


class HttpConnections:
    """Keep-alive connections to one HTTP/1.1 server, one request at a time on each."""

    def __init__(self, url: str, path: str, secret: str, body: bytes) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._request = (
            f"POST {path} HTTP/1.1\r\nHost: {self._host}\r\nAuthorization: Bearer {secret}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        ).encode() + body
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def send(self) -> bool:
        """One request; whether its status was 200."""
        if self._idle:
            reader, writer = self._idle.pop()
        else:
            reader, writer = await asyncio.open_connection(self._host, self._port)
        writer.write(self._request)
        head = await reader.readuntil(b"\r\n\r\n")
        lower = head.lower()
        at = lower.index(b"content-length:") + len(b"content-length:")
        await reader.readexactly(int(lower[at : lower.index(b"\r\n", at)]))
        self._idle.append((reader, writer))
        return head.startswith(b"HTTP/1.1 200")

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()


async def _http(given: argparse.Namespace) -> dict[str, Any]:
    body = json.dumps(
        {
            "model": given.model,
            "messages": [{"role": "user", "content": "word " * ((BODY_BYTES - 90) // 5)}],
            "max_tokens": 1,
        }
    ).encode()
    connections = HttpConnections(given.url, "/v1/chat/completions", given.secret, body)
    try:
        return await _drive(given, connections.send)
    finally:
        connections.close()


async def _drive(given: argparse.Namespace, send: Send) -> dict[str, Any]:
    if given.in_flight:
        return await _closed(send, given.in_flight, given.warm_up_s, given.seconds)
    return await _open(send, given.rate, given.warm_up_s, given.seconds)


async def _closed(send: Send, in_flight: int, warm_up_s: float, seconds: float) -> dict[str, Any]:
    begun = time.monotonic_ns()
    from_ns = begun + int(warm_up_s * 1e9)
    to_ns = from_ns + int(seconds * 1e9)
    latencies_ns: list[int] = []
    counts = {"sent": 0, "answered": 0, "refused": 0, "lost": 0}

    async def one() -> None:
        while (at_ns := time.monotonic_ns()) < to_ns:
            counts["sent"] += 1
            ended = await _one(send, counts)
            if ended and at_ns >= from_ns:
                now_ns = time.monotonic_ns()
                if now_ns <= to_ns:
                    latencies_ns.append(now_ns - at_ns)

    print("begun", flush=True)
    await asyncio.gather(*(one() for _ in range(in_flight)))
    return {**counts, "counted": len(latencies_ns), "seconds": seconds, **_shape(latencies_ns)}


async def _open(send: Send, rate: float, warm_up_s: float, seconds: float) -> dict[str, Any]:
    begun_ns = time.monotonic_ns() + 50_000_000
    warm = int(warm_up_s * rate)
    count = warm + int(seconds * rate)
    latencies_ns: list[int] = []
    late_ns: list[int] = []
    counts = {"sent": 0, "answered": 0, "refused": 0, "lost": 0}

    async def one(number: int) -> None:
        sent_ns = time.monotonic_ns()
        if await _one(send, counts) and number >= warm:
            latencies_ns.append(time.monotonic_ns() - sent_ns)

    print("begun", flush=True)
    tasks: list[asyncio.Task[None]] = []
    for number in range(count):
        intended_ns = begun_ns + int(number * 1e9 / rate)
        wait_ns = intended_ns - time.monotonic_ns()
        if wait_ns > 0:
            await asyncio.sleep(wait_ns / 1e9)
        late_ns.append(time.monotonic_ns() - intended_ns)
        counts["sent"] += 1
        tasks.append(asyncio.create_task(one(number)))
    await asyncio.gather(*tasks)
    shape = _shape(latencies_ns)
    late = {f"late_{name}": value for name, value in _shape(late_ns).items()}
    return {**counts, "counted": len(latencies_ns), **late, **shape}


async def _one(send: Send, counts: dict[str, int]) -> bool:
    try:
        good = await send()
    except Exception as error:  # noqa: BLE001 - whatever went wrong, the answer did not come
        counts["lost"] += 1
        counts.setdefault(f"error {type(error).__name__}", 0)
        counts[f"error {type(error).__name__}"] += 1
        return False
    counts["answered" if good else "refused"] += 1
    return good


def _shape(latencies_ns: list[int]) -> dict[str, int]:
    ordered = sorted(latencies_ns)
    if not ordered:
        return {}
    ranks = {"p50": 50, "p90": 90, "p99": 99}
    shape = {
        f"{name}_us": ordered[-(-percent * len(ordered) // 100) - 1] // 1000
        for name, percent in ranks.items()
    }
    return {**shape, "max_us": ordered[-1] // 1000}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--over", choices=("nats", "http"), required=True)
    parser.add_argument("--url", required=True)
    parser.add_argument("--tenant", default="acme")
    parser.add_argument("--secret", required=True)
    parser.add_argument("--model", default="sim-8b")
    parser.add_argument("--in-flight", type=int, default=0, help="closed loop of so many")
    parser.add_argument("--rate", type=float, default=200.0, help="open loop, requests a second")
    parser.add_argument("--warm-up-s", type=float, default=5.0)
    parser.add_argument("--seconds", type=float, default=30.0)
    given = parser.parse_args()
    print(json.dumps(uvloop.run((_nats if given.over == "nats" else _http)(given))), flush=True)


if __name__ == "__main__":
    main()
