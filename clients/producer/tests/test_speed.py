"""What a request costs this process, with a connection that costs next to nothing."""

import asyncio
import resource
import time
from collections.abc import Callable

import msgspec
import pytest

from waterclock_producer import Handle, Producer, new_submission
from waterclock_producer.link import Handler
from waterclock_proto.envelope import Chain
from waterclock_proto.events import Admitted
from waterclock_proto.requests import Final, Receipt, Timings, Usage, body_commitment
from waterclock_proto.stamps import Stamp
from waterclock_proto.subjects import final_subject, receipt_subject

SALT = bytes(32)
NO_COMMITMENT = "f" * 64
REQUESTS = 10_000
IN_FLIGHT = 256
CPU_US_MAX = 100
"""10,000 requests a second of one core."""


class Echo:
    """A ``Link`` that acknowledges, receipts and answers each submission from prepared bytes."""

    last_error = ""

    def __init__(self) -> None:
        self._handlers: dict[str, Handler] = {}
        stamp = Stamp(wall_us=1_700_000_000_000_000, source="bus")
        event = Admitted(
            tenant="acme",
            id="IDENTIFIER",
            tier="gold",
            requests_sequence=1,
            number=1,
            contract_sha256="0" * 64,
            model="m",
            arrival=stamp,
            received=stamp,
            decided=stamp,
            deadline_us=1_700_000_060_000_000,
            body_bytes=400,
            prompt_tokens_estimate=90,
            output_tokens_max=64,
            body_commitment=NO_COMMITMENT,
        )
        _, payload = Chain(service="admission", writer="w", key=b"k").seal(event)
        self._receipt = msgspec.json.encode(
            Receipt(
                tenant="acme",
                id="IDENTIFIER",
                outcome="admitted",
                requests_sequence=1,
                event=payload.decode(),
                incarnation="i",
                sequence=1,
                stored_ns=1,
                salt=SALT.hex(),
            )
        ).split(b"IDENTIFIER")
        self._final = msgspec.json.encode(
            Final(
                tenant="acme",
                id="IDENTIFIER",
                attempt=1,
                outcome="completed",
                finish_reason="stop",
                text="an answer " * 20,
                model_served="m",
                usage=Usage(prompt_tokens=90, completion_tokens=64),
                timings=Timings(arrival_us=1, queue_us=1, exec_us=1, total_us=2),
            )
        ).split(b"IDENTIFIER")

    async def open(self, on_gap: Callable[[], None]) -> None:
        pass

    def new_inbox(self) -> str:
        return "_INBOX.x"

    async def subscribe(self, subject: str, handler: Handler) -> None:
        self._handlers[subject.removesuffix("*")] = handler

    async def connected(self) -> None:
        pass

    async def publish(self, subject: str, payload: bytes, reply: str) -> None:
        request_id = payload[7:39]
        committed = body_commitment(SALT, payload).encode()
        asyncio.get_running_loop().call_soon(self._answer, request_id, committed, reply)

    def _answer(self, request_id: bytes, committed: bytes, reply: str) -> None:
        self._handlers["_INBOX.x."](reply, b'{"stream":"REQUESTS","seq":1}', "")
        name = request_id.decode()
        subject = receipt_subject("acme", name)
        receipt = request_id.join(self._receipt).replace(NO_COMMITMENT.encode(), committed)
        self._handlers["wc.receipt.acme."](subject, receipt, "")
        subject = final_subject("acme", name)
        self._handlers["wc.final.acme."](subject, request_id.join(self._final), "")

    async def close(self) -> None:
        pass


@pytest.mark.bench
async def test_ten_thousand_requests_a_second_fit_into_one_core(record_property) -> None:
    ended: list[Handle] = []
    done = asyncio.Event()
    left = REQUESTS

    def send_another(_: Handle | None = None) -> None:
        nonlocal left
        if left:
            left -= 1
            producer.send(new_submission(model="m", prompt="p" * 360, max_tokens=64), end)

    def end(handle: Handle) -> None:
        ended.append(handle)
        send_another()
        if len(ended) == REQUESTS:
            done.set()

    async with Producer(Echo(), tenant="acme") as producer:
        begun = resource.getrusage(resource.RUSAGE_SELF).ru_utime
        begun_ns = time.monotonic_ns()
        for _ in range(IN_FLIGHT):
            send_another()
        await done.wait()
        cpu_us = int((resource.getrusage(resource.RUSAGE_SELF).ru_utime - begun) * 1e6) // REQUESTS
        rate = REQUESTS * 1_000_000_000 // (time.monotonic_ns() - begun_ns)
    assert producer.counts.receipts == producer.counts.finals == REQUESTS
    assert all(handle.final and handle.receipts for handle in ended)
    assert not any(handle.receipt_doubt for handle in ended)
    record_property("requests_per_s", rate)
    assert cpu_us <= CPU_US_MAX, f"{cpu_us} µs of CPU a request, {rate} requests/s"
