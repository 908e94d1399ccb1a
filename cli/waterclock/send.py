"""Sends one request, shows its answer as it comes, and at the end where its time went."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final as Constant
from typing import Protocol

from msgspec import Struct

from waterclock.load_result import milliseconds
from waterclock_producer import (
    AnswerPending,
    Final,
    Handle,
    Producer,
    ProducerError,
    Receipt,
    Restarted,
    Submission,
    new_id,
)
from waterclock_proto.names import Language
from waterclock_proto.requests import Timings
from waterclock_proto.segments import SEGMENTS

BAR_COLUMNS: Constant = 30
RECEIPT_WITHIN_S: Constant = 2
"""How long a receipt may come after the final; it is sent by another service."""


class Writer(Protocol):
    """Where text goes: a terminal, a file, a buffer."""

    def write(self, text: str, /) -> object:
        """Take some text; line ends are in it."""
        ...

    def flush(self) -> object:
        """Show what was written."""
        ...


@dataclass(frozen=True, kw_only=True)
class SendOptions:
    """One request, and where it goes."""

    tenant: str
    prompt: str
    url: str = ""
    """Of the bus. Not used where ``send_one`` is given its own way to connect."""
    user: str | None = None
    password: str | None = None
    model: str | None = None
    max_tokens: int | None = None
    deadline_ms: int | None = None
    language: Language | None = None
    session: str | None = None
    stream: bool = True
    receipts: str | None = None
    """A folder where the receipt is kept."""
    timeout_s: int = 300


class SendResult(Struct, frozen=True, kw_only=True):
    """What became of it."""

    id: str
    final: Final
    receipt: Receipt | None
    """None if none came within ``RECEIPT_WITHIN_S`` after the final."""
    receipt_doubt: str
    latency_us: int
    """Send → final, by this process's monotonic clock."""
    first_token_us: int | None


async def send_one(
    options: SendOptions,
    out: Writer,
    *,
    connect: Callable[[], Producer] | None = None,
) -> SendResult:
    """Send, write the answer to ``out`` as it comes, then the outcome and the segments.

    Interrupting it asks the mesh to cancel the request.

    Raises:
        ProducerError: not connected, not stored, or no answer within ``timeout_s``
            (``AnswerPending``, which names the id).
    """
    producer = connect() if connect else _connect(options)
    submission = Submission(
        id=new_id(),
        model=options.model,
        prompt=options.prompt,
        max_tokens=options.max_tokens,
        stream=options.stream,
        deadline_ms=options.deadline_ms,
        language=options.language,
        session=options.session,
    )
    async with producer:
        handle = producer.send(submission)
        try:
            async with asyncio.timeout(options.timeout_s):
                await _show(handle, out)
        except TimeoutError:
            raise AnswerPending(
                f"request {handle.id} has no end after {options.timeout_s} s; it goes on, and its "
                "answer can be asked for by that id"
            ) from None
        except asyncio.CancelledError:
            await producer.cancel(handle.id)
            raise
        final = await handle.result()
        receipt = None
        # A missing one is said below; the answer is there all the same.
        with suppress(ProducerError):
            receipt = await handle.receipt(RECEIPT_WITHIN_S)
    times = handle.times
    sent_ns = times.sent_ns
    result = SendResult(
        id=handle.id,
        final=final,
        receipt=receipt,
        receipt_doubt=handle.receipt_doubt,
        latency_us=((times.final_ns or sent_ns) - sent_ns) // 1000,
        first_token_us=(
            None if times.first_token_ns is None else (times.first_token_ns - sent_ns) // 1000
        ),
    )
    out.write(render_send(result))
    out.flush()
    return result


def render_send(result: SendResult) -> str:
    """Outcome, receipt, segments and clocks, as lines of plain text."""
    final = result.final
    reason = final.reject_reason or final.fail_reason or final.finish_reason
    lines = [
        f"{final.outcome}"
        + (f" ({reason})" if reason else "")
        + (f" by {final.model_served}" if final.model_served else "")
        + f": {final.usage.prompt_tokens:,} prompt and "
        + f"{final.usage.completion_tokens:,} output tokens"
    ]
    if final.detail:
        lines.append(_printable(final.detail))
    if final.retry_after_ms is not None:
        lines.append(f"try again after {final.retry_after_ms:,} ms")
    lines.append(_receipt_line(result))
    if final.timings is not None:
        lines += ["", *_timing_lines(final.timings)]
    seen = f"seen here: the end after {milliseconds(result.latency_us)} ms"
    if result.first_token_us is not None and final.text:
        seen += f", first text after {milliseconds(result.first_token_us)} ms"
    lines.append(seen)
    return "\n".join(lines) + "\n"


def _connect(options: SendOptions) -> Producer:
    return Producer.connect(
        options.url,
        tenant=options.tenant,
        user=options.user,
        password=options.password,
        receipts=options.receipts,
    )


async def _show(handle: Handle, out: Writer) -> None:
    ended_line = True
    async for piece in handle.stream():
        if isinstance(piece, Restarted):
            out.write("\n[The worker was lost; the answer starts again.]\n")
            ended_line = True
        elif piece.text:
            out.write(_printable(piece.text))
            ended_line = piece.text.endswith("\n")
        out.flush()
    out.write("\n" if ended_line else "\n\n")


def _printable(text: str) -> str:
    """The text without what could steer a terminal: an answer is somebody else's."""
    if text.isprintable():
        return text
    return "".join([c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text])


def _receipt_line(result: SendResult) -> str:
    receipt = result.receipt
    if receipt is None:
        return f"receipt: none came for request {result.id}"
    number = "" if receipt.number is None else f"number {receipt.number:,} of this tenant, "
    line = (
        f"receipt: request {result.id} {receipt.outcome}, {number}"
        f"event {receipt.sequence:,} of {receipt.incarnation or 'an unnamed tape'}, unsigned"
    )
    return f"{line}\nWARNING: {result.receipt_doubt}" if result.receipt_doubt else line


def _timing_lines(timings: Timings) -> list[str]:
    segments = timings.segments
    known = [name for name in SEGMENTS if name in segments]
    names = known + [name for name in segments if name not in known]
    longest_us = max((abs(segments[name]) for name in names), default=0)
    lines: list[str] = []
    for name in names:
        duration_us = segments[name]
        columns = abs(duration_us) * BAR_COLUMNS // longest_us if longest_us else 0
        bar = "the clocks disagree" if duration_us < 0 else "█" * columns
        lines.append(f"{name:<16}{milliseconds(duration_us):>14} ms  {bar}".rstrip())
    lines.append(f"{'total':<16}{milliseconds(timings.total_us):>14} ms")
    sum_us = sum(segments.values())
    if segments and sum_us != timings.total_us:
        lines.append(
            f"WARNING: the segments sum to {milliseconds(sum_us)} ms, "
            f"{milliseconds(timings.total_us)} ms expected"
        )
    if timings.queue_us is not None:
        lines.append(f"{'queue clock':<16}{milliseconds(timings.queue_us):>14} ms")
    if timings.exec_us is not None:
        lines.append(f"{'execution clock':<16}{milliseconds(timings.exec_us):>14} ms")
    return lines
