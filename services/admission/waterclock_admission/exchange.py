"""What comes back for one HTTP request: receipt, deltas and final, in the order they came.

Bounded: a client that does not take its stream makes it overflow, and nothing more is kept.
"""

import asyncio
from collections import deque
from typing import Literal

import msgspec
import structlog

from waterclock_proto.requests import ANSWER_DECODER, AnswerMessage, Delta, Final, Receipt
from waterclock_runtime.bus import Bus, Subscription

End = Literal["gone", "overflow", "timeout", "closing"]
"""Why nothing more comes: the client went away; it does not read; it took too long; the service
is leaving."""


class Exchange:
    """Listens from its creation until ``close``."""

    def __init__(
        self,
        bus: Bus,
        tenant: str,
        request_id: str,
        *,
        stream_bytes_max: int,
        log: structlog.stdlib.BoundLogger,
    ) -> None:
        self._stream_bytes_max = stream_bytes_max
        self._log = log
        self._receipts: deque[Receipt] = deque(maxlen=16)
        self._answers: deque[AnswerMessage] = deque()
        self._bytes = 0
        self._arrived = asyncio.Event()
        self._end: End | None = None
        self.on_overflow = lambda: None
        # One subscription for wc.receipt, wc.answer and wc.final of this request.
        self._subscription: Subscription = bus.subscribe(
            f"wc.*.{tenant}.{request_id}", self._on_message
        )

    def close(self) -> None:
        self._subscription.close()

    def end(self, why: End) -> None:
        """Wake whoever waits: nothing more is wanted."""
        if self._end is None:
            self._end = why
        self._arrived.set()

    @property
    def ended(self) -> End | None:
        return self._end

    async def receipt(self, requests_sequence: int, give_up_s: float) -> Receipt | End:
        """The receipt of this submission; others of the same id are somebody else's."""
        while True:
            while self._receipts:
                receipt = self._receipts.popleft()
                if receipt.requests_sequence == requests_sequence:
                    return receipt
            end = await self._wait(give_up_s)
            if end is not None:
                return end

    async def answers(self, give_up_s: float) -> list[AnswerMessage] | End:
        """Everything that has come and was not taken; at least one."""
        while not self._answers:
            end = await self._wait(give_up_s)
            if end is not None:
                return end
        if self._end is not None and self._end != "closing":
            return self._end
        taken = list(self._answers)
        self._answers.clear()
        self._bytes = 0
        return taken

    async def _wait(self, give_up_s: float) -> End | None:
        if self._end is not None:
            return self._end
        self._arrived.clear()
        try:
            async with asyncio.timeout_at(give_up_s):
                await self._arrived.wait()
        except TimeoutError:
            return "timeout"
        return self._end

    def _on_message(self, subject: str, payload: bytes) -> None:
        kind = subject.split(".", 2)[1]
        try:
            if kind == "receipt":
                self._receipts.append(_RECEIPT_DECODER.decode(payload))
            elif kind in ("answer", "final"):
                self._take(ANSWER_DECODER.decode(payload), len(payload))
            else:
                return
        except msgspec.MsgspecError as error:
            self._log.error("answer_refused", subject=subject, error=str(error))
            return
        self._arrived.set()

    def _take(self, message: AnswerMessage, size: int) -> None:
        if not isinstance(message, Final):
            self._bytes += size
            if self._bytes > self._stream_bytes_max:
                self.end("overflow")
                self.on_overflow()
                return
        self._answers.append(message)


class Text:
    """Puts an answer's deltas together: in order, without holes, of one attempt.

    What was lost or came out of order is not sent; the final answer has the whole text, and
    ``rest`` says what of it the client has not got.
    """

    def __init__(self) -> None:
        self.attempt = 0
        """Whose deltas these are."""
        self._next = 0
        self._sent: list[str] = []
        self._broken = False

    def take(self, delta: Delta) -> str:
        """What of this delta can be sent now."""
        if delta.attempt < self.attempt:
            return ""
        if delta.attempt > self.attempt:
            self.restart(delta.attempt)
        if self._broken or delta.index < self._next:
            return ""
        if delta.index > self._next:
            self._broken = True
            return ""
        self._next += 1
        self._sent.append(delta.text)
        return delta.text

    def restart(self, attempt: int) -> None:
        """Another attempt begins from nothing. Only while nothing was sent."""
        self.attempt = attempt
        self._next = 0
        self._sent = []
        self._broken = False

    def rest(self, text: str) -> str | None:
        """What is missing of the whole text; None if what was sent does not begin it."""
        sent = "".join(self._sent)
        return text[len(sent) :] if text.startswith(sent) else None


_RECEIPT_DECODER = msgspec.json.Decoder(Receipt)
