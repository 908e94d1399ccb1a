"""One request on its way, as its producer sees it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

from msgspec import Struct

from waterclock_producer.assembly import Assembly, Piece
from waterclock_producer.errors import AnswerPending, ProducerError, ReceiptPending
from waterclock_proto.requests import Final, Receipt

T = TypeVar("T")


class Times(Struct):
    """When this process saw what. ``_us`` is wall time (UTC), ``_ns`` the monotonic clock.

    Durations are differences of ``_ns``. A moment is when the message was handled here, so it
    includes what the message waited for in this process.
    """

    sent_us: int = 0
    """The claim: it also stands in the submission."""
    sent_ns: int = 0
    stored_us: int | None = None
    """The bus acknowledged the submission."""
    stored_ns: int | None = None
    receipt_us: int | None = None
    receipt_ns: int | None = None
    first_token_us: int | None = None
    """First delta, or the final where there were no deltas."""
    first_token_ns: int | None = None
    last_token_us: int | None = None
    """Newest delta, or the final where that brought the rest of the text."""
    last_token_ns: int | None = None
    final_us: int | None = None
    final_ns: int | None = None


class Handle:
    """What became of one submission. Made by a ``Producer``; belongs to its event loop.

    Everything can be awaited by any number of readers, also after the end.
    """

    __slots__ = (
        "_assembly",
        "_error",
        "_final",
        "_on_end",
        "_receipts",
        "_waiters",
        "body",
        "cancelled",
        "id",
        "receipt_doubt",
        "resume_tries",
        "resumed",
        "resuming",
        "sending",
        "stored_sequence",
        "times",
    )

    def __init__(
        self,
        request_id: str,
        body: bytes | None,
        times: Times,
        on_end: Callable[["Handle"], None] | None = None,
    ) -> None:
        self.id = request_id
        self.body = body
        """The exact bytes that were submitted; None for what was only resumed."""
        self.times = times
        self.stored_sequence: int | None = None
        """Where the bus stored the submission; None until it said so."""
        self.receipt_doubt = ""
        """What in a receipt contradicts the submission; empty if nothing does."""
        self.cancelled = False
        """Whether cancelling was asked for; how it ended is for the final to say."""
        self.resumed = False
        """Whether the outcome was ever asked for again."""
        self.resuming = False
        self.resume_tries = 0
        self.sending = 0
        """The number under which the bus is asked to acknowledge it; 0 if nothing is on its way."""
        self._receipts: list[Receipt] = []
        self._final: Final | None = None
        self._error: ProducerError | None = None
        self._assembly = Assembly()
        self._waiters: list[asyncio.Future[None]] = []
        self._on_end = on_end

    @property
    def final(self) -> Final | None:
        """How it ended, if that is known yet."""
        return self._final

    @property
    def receipts(self) -> tuple[Receipt, ...]:
        """What came so far, in that order."""
        return tuple(self._receipts)

    @property
    def error(self) -> ProducerError | None:
        """Why no more is going to be known; then every wait raises it."""
        return self._error

    @property
    def ended(self) -> bool:
        return self._final is not None or self._error is not None

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The answer's pieces so far; see ``stream``."""
        return tuple(self._assembly.pieces)

    @property
    def mended(self) -> bool:
        """Whether the final had text that the deltas had not brought by then, or another text."""
        return self._assembly.mended

    async def stored(self) -> int | None:
        """Wait until the bus has stored the submission; returns its sequence.

        None where a receipt or an answer was here first and does not say it.

        Raises:
            NotStored: no acknowledgement within the bound.
        """
        while self.stored_sequence is None and not self._receipts and self._final is None:
            self._raise_error()
            await self._change()
        return self.stored_sequence

    async def receipt(self, timeout_s: float | None = None) -> Receipt:
        """The first receipt.

        Raises:
            ReceiptPending: none came within ``timeout_s``; it may still come.
            ProducerError: none can come any more.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not self._receipts:
                    self._raise_error()
                    await self._change()
        except TimeoutError:
            raise ReceiptPending(f"no receipt for {self.id} within {timeout_s} s") from None
        return self._receipts[0]

    async def result(self, timeout_s: float | None = None) -> Final:
        """How the request ended, with the whole text. A refusal is an end like any other.

        Raises:
            AnswerPending: it did not end within ``timeout_s``; it may still.
            AnswerGone: it ended earlier, and its answer is no longer kept.
            ProducerError: nothing can be known any more.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while self._final is None:
                    self._raise_error()
                    await self._change()
        except TimeoutError:
            raise AnswerPending(
                f"no final answer for {self.id} within {timeout_s} s "
                f"(stored: {self.stored_sequence is not None}, receipts: {len(self._receipts)})"
            ) from None
        return self._final

    async def stream(self) -> AsyncIterator[Piece]:
        """The answer's pieces as they come; ends when the request has ended.

        ``Restarted`` says that what was shown before counts no longer. For a completed answer the
        texts after the last ``Restarted`` join to exactly the final's text: what deltas did not
        bring, the final does. Without ``stream=True`` in the submission that is all of it, at the
        end.

        Raises:
            ProducerError: nothing can be known any more.
        """
        shown = 0
        while True:
            pieces = self._assembly.pieces
            while shown < len(pieces):
                shown += 1
                yield pieces[shown - 1]
            if self._final is not None:
                return
            self._raise_error()
            await self._change()

    # What follows is the producer's side.

    def take_receipt(self, receipt: Receipt) -> None:
        self._receipts.append(receipt)
        self.wake()

    def take_piece(self, piece: Piece) -> bool:
        """Says whether the piece was news."""
        grew = self._assembly.add(piece)
        if grew:
            self.wake()
        return grew

    def end(self, final: Final) -> None:
        self._assembly.end(final)
        self._final = final
        self._ended()

    def fail(self, error: ProducerError) -> None:
        self._error = error
        self._ended()

    def wake(self) -> None:
        if self._waiters:
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    def _ended(self) -> None:
        self.wake()
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end(self)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    async def _change(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter
