"""The producer: submits requests, streams answers, keeps receipts.

One connection serves any number of requests: three wildcard subscriptions for what the mesh says
to this tenant and one for acknowledgements, made once. Nothing here makes a task for a request.

What the bus acknowledged is stored. What it did not acknowledge is sent again, the same bytes,
until it does. Receipts and answers are core messages: they reach whoever listens at that moment.
So after every gap (a reconnect, or messages dropped because too many came at once) the producer
sends again what is not acknowledged, and asks again for the outcome of what is. The mesh answers
that from its record, and nothing runs twice.
"""

import asyncio
import contextlib
import heapq
import logging
import re
import secrets
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, TypedDict, Unpack, overload

import msgspec
from msgspec import Struct

from waterclock_producer.clock import Clock, SystemClock
from waterclock_producer.errors import (
    AnswerGone,
    InFlightFull,
    InvalidSubmission,
    NotStored,
    ProducerClosed,
    ProducerError,
)
from waterclock_producer.handle import Handle, Times
from waterclock_producer.limits import (
    GONE_GRACE_MS,
    IN_FLIGHT_MAX,
    RECEIPT_GRACE_MS,
    RESEND_FIRST_MS,
    RESEND_MS_MAX,
    RESUME_AGAIN_MS,
    RESUME_TRIES_MAX,
    STORED_WITHIN_S,
    TICK_MS,
)
from waterclock_producer.link import Link, LinkDown, MessageRefused, NatsLink
from waterclock_producer.receipts import ReceiptBook, receipt_doubt
from waterclock_proto.names import NAME_PATTERN, Language
from waterclock_proto.requests import (
    ANSWER_DECODER,
    DELIVERED_BYTES_MAX,
    ChatMessage,
    DeliveredClaim,
    Final,
    Receipt,
    Sampling,
    Submission,
)
from waterclock_proto.subjects import (
    BODY_BYTES_MAX,
    answer_subject,
    cancel_subject,
    delivered_subject,
    final_subject,
    receipt_subject,
    request_subject,
)

_log = logging.getLogger("waterclock_producer")

_NS_PER_MS = 1_000_000
_ID = re.compile(NAME_PATTERN)
_ENCODER = msgspec.json.Encoder()
_SUBMISSION_DECODER = msgspec.json.Decoder(Submission)
_RECEIPT_DECODER = msgspec.json.Decoder(Receipt)
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What decoding raises for bytes that are not what they should be."""


class SubmissionFields(TypedDict, total=False):
    """The fields of ``Submission``, for those who do not want to make one."""

    id: str
    model: str
    messages: Sequence[ChatMessage]
    prompt: str
    max_tokens: int
    ignore_eos: bool
    stream: bool
    deadline_ms: int
    deadline_us: int
    language: Language
    session: str
    sampling: Sampling


class Counts(Struct):
    """What a producer did and saw, from its beginning on."""

    submitted: int = 0
    resent: int = 0
    """Times that bytes were sent again because no acknowledgement had come."""
    stored: int = 0
    not_stored: int = 0
    receipts: int = 0
    receipts_doubted: int = 0
    finals: int = 0
    finals_repeated: int = 0
    """Finals of what had ended already. Only the first counts."""
    gaps: int = 0
    """Times that messages may have been missed."""
    resumed: int = 0
    malformed: int = 0
    """Messages from the mesh that could not be read."""
    claims: int = 0


class _PubAckError(Struct, frozen=True):
    code: int = 0
    err_code: int = 0
    description: str = ""


class _PubAck(Struct, frozen=True):
    """JetStream's answer to a publish."""

    seq: int = 0
    error: _PubAckError | None = None


_PUB_ACK_DECODER = msgspec.json.Decoder(_PubAck)


class _Sending:
    """One submission that waits for its acknowledgement."""

    __slots__ = ("again_ms", "begun_ns", "body", "handle", "number", "queued", "refusal", "resume")

    def __init__(
        self, handle: Handle, body: bytes, number: int, begun_ns: int, *, resume: bool
    ) -> None:
        self.handle = handle
        self.body = body
        self.number = number
        self.begun_ns = begun_ns
        self.resume = resume
        self.queued = True
        """Whether it lies in the outbox at this moment."""
        self.again_ms = RESEND_FIRST_MS
        self.refusal = ""
        """What the bus answered instead of an acknowledgement, if anything."""


_Due = Literal["resend", "resume", "receipt", "gone"]


class Producer:
    """Submits requests of one tenant over one connection.

        async with Producer.connect(url, tenant="acme", user="acme", password=...) as producer:
            handle = await producer.submit(prompt="...", stream=True)
            async for piece in handle.stream(): ...
            final = await handle.result(timeout_s=60)

    Belongs to one event loop. Closing fails every request without an end by ``ProducerClosed``;
    their ids can be resumed later, by this or another process.
    """

    def __init__(
        self,
        link: Link,
        *,
        tenant: str,
        receipts: Path | str | None = None,
        keep_bodies: bool = True,
        report_delivery: bool = False,
        in_flight_max: int = IN_FLIGHT_MAX,
        clock: Clock | None = None,
    ) -> None:
        """``receipts`` is a folder: then all receipts are kept there, see ``ReceiptBook``.

        ``report_delivery`` sends the producer's own stamps of completed requests to the mesh.
        """
        if not _ID.fullmatch(tenant):
            raise InvalidSubmission(f"tenant matching {NAME_PATTERN} expected, {tenant!r} found")
        self.tenant = tenant
        self.counts = Counts()
        self.clock: Clock = clock or SystemClock()
        self._link = link
        self._receipts_folder = Path(receipts) if receipts is not None else None
        self._keep_bodies = keep_bodies
        self._book = ReceiptBook(tenant)
        self._report_delivery = report_delivery
        self._in_flight_max = in_flight_max
        self._in_flight = 0
        self._handles: dict[str, Handle] = {}
        self._sending: dict[int, _Sending] = {}
        self._number = 0
        self._outbox: deque[tuple[str, bytes, _Sending | None]] = deque()
        self._outbox_filled = asyncio.Event()
        self._due: list[tuple[int, int, _Due, Handle | _Sending]] = []
        self._due_count = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._inbox = ""
        self._closed = False
        self._broken: ProducerError | None = None
        self._request_subject = request_subject(tenant)
        self._receipt_prefix = len(receipt_subject(tenant, "-")) - 1
        self._answer_prefix = len(answer_subject(tenant, "-")) - 1
        self._final_prefix = len(final_subject(tenant, "-")) - 1

    @classmethod
    def connect(
        cls,
        url: str | Sequence[str],
        *,
        tenant: str,
        user: str | None = None,
        password: str | None = None,
        tls: ssl.SSLContext | None = None,
        receipts: Path | str | None = None,
        keep_bodies: bool = True,
        report_delivery: bool = False,
        in_flight_max: int = IN_FLIGHT_MAX,
    ) -> Self:
        """A producer for NATS at ``url``; ``async with`` or ``open`` connects it."""
        link = NatsLink(url, user=user, password=password, tls=tls)
        return cls(
            link,
            tenant=tenant,
            receipts=receipts,
            keep_bodies=keep_bodies,
            report_delivery=report_delivery,
            in_flight_max=in_flight_max,
        )

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def in_flight(self) -> int:
        """Requests whose end is not known."""
        return self._in_flight

    @property
    def last_error(self) -> str:
        """The newest thing that the bus or the network refused; empty if nothing was."""
        return self._link.last_error

    def receipts(self, request_id: str) -> tuple[Receipt, ...]:
        """The receipts of one request that are still in memory."""
        return self._book.of(request_id)

    async def open(self) -> None:
        """Connect and subscribe.

        Raises:
            NotConnected: no connection within the bound, or credentials refused.
            ReceiptsNotKept: the folder for receipts cannot be written.
        """
        self._book = ReceiptBook(self.tenant, self._receipts_folder, keep_bodies=self._keep_bodies)
        try:
            await self._link.open(self._on_gap)
            self._inbox = self._link.new_inbox()
            await self._link.subscribe(f"{self._inbox}.*", self._on_ack)
            await self._link.subscribe(receipt_subject(self.tenant, "*"), self._on_receipt)
            await self._link.subscribe(answer_subject(self.tenant, "*"), self._on_answer)
            await self._link.subscribe(final_subject(self.tenant, "*"), self._on_final)
        except BaseException:
            await self.close()
            raise
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._write()), loop.create_task(self._keep_time())]
        for task in self._tasks:
            task.add_done_callback(self._task_ended)

    async def close(self) -> None:
        """Send what is queued, end the connection, fail what is open. May be repeated."""
        if self._closed:
            return
        self._closed = True
        self._outbox_filled.set()
        for task in self._tasks:
            # nats-py swallows a cancellation that meets it while flushing, so the tasks look at
            # `_closed` as well.
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for subject, payload, sending in self._outbox:
            if sending is None:
                with contextlib.suppress(LinkDown, MessageRefused):
                    await self._link.publish(subject, payload, "")
        await self._link.close()
        self._sending.clear()
        for handle in tuple(self._handles.values()):
            if not handle.ended:
                self._fail(handle, ProducerClosed(f"producer closed before {handle.id} ended"))
        self._handles.clear()
        self._book.close()

    @overload
    async def submit(self, submission: Submission, /) -> Handle: ...

    @overload
    async def submit(self, /, **fields: Unpack[SubmissionFields]) -> Handle: ...

    async def submit(
        self, submission: Submission | None = None, /, **fields: Unpack[SubmissionFields]
    ) -> Handle:
        """Submit one request and wait until the bus has stored it.

        Without an ``id`` it gets a random one. See ``send`` for not waiting.

        Raises:
            InvalidSubmission: it breaks the protocol, or its id is in flight here already.
            InFlightFull: too many requests are open.
            NotStored: no acknowledgement within the bound.
            ReceiptsNotKept: an earlier receipt could not be written.
        """
        if submission is None:
            submission = new_submission(**fields)
        handle = self.send(submission)
        await handle.stored()
        return handle

    def send(
        self, submission: Submission, on_end: Callable[[Handle], None] | None = None
    ) -> Handle:
        """Submit one request without waiting: the pipelined form of ``submit``.

        ``on_end`` is called once, when the handle has ended (with a final or an error); it must
        not wait and not raise.

        Raises:
            InvalidSubmission, InFlightFull, ReceiptsNotKept, ProducerClosed: as ``submit``.
        """
        times = Times(sent_us=self.clock.wall_us(), sent_ns=self.clock.mono_ns())
        if submission.sent_us is None and not submission.resume:
            submission = msgspec.structs.replace(submission, sent_us=times.sent_us)
        elif submission.sent_us is not None:
            times.sent_us = submission.sent_us
        body = encode_submission(submission)
        return self._begin(submission.id, body, times, on_end, resume=submission.resume)

    def send_body(
        self, request_id: str, body: bytes, on_end: Callable[[Handle], None] | None = None
    ) -> Handle:
        """Submit exact bytes, unseen: what an earlier process sent, or what shall test a mesh.

        ``request_id`` must be the id inside, or no answer finds its way back.
        """
        times = Times(sent_us=self.clock.wall_us(), sent_ns=self.clock.mono_ns())
        return self._begin(request_id, body, times, on_end, resume=False)

    async def cancel(self, request_id: str) -> None:
        """Ask the mesh to stop a request, wherever it is. Its final says how it ended.

        Said again after a gap, as long as the request is open here.
        """
        self._check_open()
        _check_id(request_id)
        handle = self._handles.get(request_id)
        if handle is not None and not handle.ended:
            handle.cancelled = True
        self._post(cancel_subject(self.tenant, request_id), b"", None)

    async def resume(self, request_id: str) -> Handle:
        """Ask for the outcome of a request that this or another process submitted.

        The handle gets a receipt, and a final if there is one or as soon as there is. Waits until
        the bus has stored the question, unless the request is open here anyway.

        Raises:
            InFlightFull, NotStored, ProducerClosed: as ``submit``.
        """
        self._check_open()
        handle = self._handles.get(request_id)
        if handle is None or handle.ended:
            handle = self.send(Submission(id=request_id, resume=True))
        else:
            self._ask_anew(handle)
        await handle.stored()
        return handle

    # --- sending

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """Nothing but closing ends a task of ours; if a bug did, nobody shall wait for it."""
        if self._closed or task.cancelled():
            return
        self._broken = ProducerClosed(f"the producer stopped working: {task.exception()!r}")
        _log.error("the producer stopped working", exc_info=task.exception())
        for handle in tuple(self._handles.values()):
            if not handle.ended:
                self._fail(handle, self._broken)

    def _check_open(self) -> None:
        if self._closed:
            raise ProducerClosed("the producer is closed")
        if self._broken is not None:
            raise self._broken

    def _begin(
        self,
        request_id: str,
        body: bytes,
        times: Times,
        on_end: Callable[[Handle], None] | None,
        *,
        resume: bool,
    ) -> Handle:
        self._check_open()
        if self._book.problem is not None:
            raise self._book.problem
        _check_id(request_id)
        if len(body) > BODY_BYTES_MAX:
            raise InvalidSubmission(
                f"submission of {len(body)} bytes, at most {BODY_BYTES_MAX} allowed"
            )
        earlier = self._handles.get(request_id)
        if earlier is not None and not earlier.ended:
            raise InvalidSubmission(f"id {request_id} is in flight already: use its handle")
        if self._in_flight >= self._in_flight_max:
            raise InFlightFull(
                f"{self._in_flight} requests are open, at most {self._in_flight_max}"
            )
        handle = Handle(request_id, None if resume else body, times, on_end)
        handle.resumed = handle.resuming = resume
        self._handles[request_id] = handle
        self._in_flight += 1
        self.counts.submitted += 1
        self._dispatch(handle, body, times.sent_ns, resume=resume)
        return handle

    def _dispatch(self, handle: Handle, body: bytes, now_ns: int, *, resume: bool) -> None:
        self._number += 1
        sending = _Sending(handle, body, self._number, now_ns, resume=resume)
        self._sending[self._number] = sending
        handle.sending = self._number
        self._post(self._request_subject, body, sending)
        self._schedule(now_ns + RESEND_FIRST_MS * _NS_PER_MS, "resend", sending)

    def _post(self, subject: str, payload: bytes, sending: _Sending | None) -> None:
        self._outbox.append((subject, payload, sending))
        if len(self._outbox) == 1:
            self._outbox_filled.set()

    async def _write(self) -> None:
        """Carry the outbox to the connection, in order; the only one who publishes."""
        outbox, link = self._outbox, self._link
        while not self._closed:
            if not outbox:
                self._outbox_filled.clear()
                await self._outbox_filled.wait()
                continue
            subject, payload, sending = outbox[0]
            reply = ""
            if sending is not None:
                if sending.number not in self._sending:
                    # Acknowledged, or given up, while it waited here.
                    outbox.popleft()
                    continue
                reply = f"{self._inbox}.{sending.number}"
            try:
                await link.publish(subject, payload, reply)
            except LinkDown:
                await link.connected()
                continue
            except MessageRefused as error:
                _log.warning("publishing on %s was refused: %s", subject, error)
                if sending is not None:
                    self._give_up(sending, f"refused: {error}")
            outbox.popleft()
            if sending is not None:
                sending.queued = False

    def _resend(self, sending: _Sending) -> None:
        if not sending.queued:
            sending.queued = True
            self.counts.resent += 1
            self._post(self._request_subject, sending.body, sending)

    def _resume(self, handle: Handle) -> None:
        if handle.resuming or handle.ended:
            return
        handle.resuming = handle.resumed = True
        handle.resume_tries += 1
        self.counts.resumed += 1
        body = encode_submission(Submission(id=handle.id, resume=True))
        self._dispatch(handle, body, self.clock.mono_ns(), resume=True)

    def _ask_anew(self, handle: Handle) -> None:
        """Resume, unless what is on its way to the bus will be answered with the same."""
        if not handle.sending:
            handle.resuming = False
            handle.resume_tries = 0
            self._resume(handle)

    def _on_gap(self) -> None:
        """Messages may have been missed: send again what is not acknowledged, ask for the rest."""
        self.counts.gaps += 1
        for sending in tuple(self._sending.values()):
            self._resend(sending)
        for handle in tuple(self._handles.values()):
            if handle.ended:
                continue
            if handle.cancelled:
                self._post(cancel_subject(self.tenant, handle.id), b"", None)
            # What was asked before may have been answered while nobody listened.
            self._ask_anew(handle)

    # --- time

    def _schedule(self, at_ns: int, what: _Due, about: Handle | _Sending) -> None:
        self._due_count += 1
        heapq.heappush(self._due, (at_ns, self._due_count, what, about))

    async def _keep_time(self) -> None:
        while not self._closed:
            await self.clock.sleep_ns(TICK_MS * _NS_PER_MS)
            now_ns = self.clock.mono_ns()
            while self._due and self._due[0][0] <= now_ns:
                _, _, what, about = heapq.heappop(self._due)
                if isinstance(about, _Sending):
                    self._resend_due(about, now_ns)
                else:
                    self._handle_due(what, about)

    def _resend_due(self, sending: _Sending, now_ns: int) -> None:
        if sending.number not in self._sending:
            return
        if now_ns - sending.begun_ns < STORED_WITHIN_S * 1000 * _NS_PER_MS:
            self._resend(sending)
            sending.again_ms = min(sending.again_ms * 2, RESEND_MS_MAX)
            self._schedule(now_ns + sending.again_ms * _NS_PER_MS, "resend", sending)
            return
        reason = sending.refusal or self._link.last_error or "no answer from the bus"
        self._give_up(sending, f"not acknowledged within {STORED_WITHIN_S} s: {reason}")

    def _give_up(self, sending: _Sending, reason: str) -> None:
        handle = sending.handle
        self._is_sent(handle)
        if sending.resume and handle.body is not None:
            # Only the question was lost; the answer may come by itself, or after the next gap.
            handle.resuming = False
            return
        self.counts.not_stored += 1
        self._fail(handle, NotStored(f"{handle.id} {reason}"))

    def _handle_due(self, what: _Due, handle: Handle) -> None:
        if what == "resume":
            self._resume(handle)
        elif what == "gone":
            if not handle.ended:
                self._fail(
                    handle, AnswerGone(f"{handle.id} ended, its answer is not kept any more")
                )
        elif self._handles.get(handle.id) is handle:
            del self._handles[handle.id]
            self._claim(handle)

    # --- what the mesh says

    def _on_ack(self, subject: str, payload: bytes, status: str) -> None:
        sending = self._sending.get(int(subject[len(self._inbox) + 1 :]))
        if sending is None:
            return
        if status:
            listener = f"nobody listens on {self._request_subject}" if status == "503" else status
            sending.refusal = f"{listener}: is the mesh up, and is this its bus?"
            return
        try:
            ack = _PUB_ACK_DECODER.decode(payload)
        except _UNREADABLE as error:
            self._malformed(subject, error)
            return
        if ack.error is not None or ack.seq < 1:
            error = ack.error or _PubAckError(description="acknowledgement without a sequence")
            sending.refusal = f"{error.description} ({error.err_code or error.code})"
            return
        handle = sending.handle
        self._is_sent(handle)
        if handle.stored_sequence is None:
            handle.stored_sequence = ack.seq
            self.counts.stored += 1
            handle.times.stored_us = self.clock.wall_us()
            handle.times.stored_ns = self.clock.mono_ns()
            handle.wake()

    def _is_sent(self, handle: Handle) -> None:
        """Nothing of this request needs an acknowledgement any more."""
        self._sending.pop(handle.sending, None)
        handle.sending = 0

    def _on_receipt(self, subject: str, payload: bytes, _status: str) -> None:
        handle = self._handles.get(subject[self._receipt_prefix :])
        if handle is None:
            # Another producer's of this tenant, or a repetition.
            return
        try:
            receipt = _RECEIPT_DECODER.decode(payload)
        except _UNREADABLE as error:
            self._malformed(subject, error)
            return
        now_us = self.clock.wall_us()
        doubt = receipt_doubt(receipt, handle.body)
        if (receipt.tenant, receipt.id) != (self.tenant, handle.id):
            doubt = f"receipt about {receipt.tenant}/{receipt.id} on {subject}"
        if doubt:
            self.counts.receipts_doubted += 1
            handle.receipt_doubt = handle.receipt_doubt or doubt
            _log.warning("receipt of %s contradicts the submission: %s", handle.id, doubt)
        self.counts.receipts += 1
        self._book.add(receipt, payload, body=handle.body, received_us=now_us, doubt=doubt)
        if handle.times.receipt_ns is None:
            handle.times.receipt_us = now_us
            handle.times.receipt_ns = self.clock.mono_ns()
        # Of a request that was submitted elsewhere, or under the same id with another body.
        others = doubt or (handle.body is None and receipt.outcome == "admitted")
        if handle.stored_sequence is None and not others:
            # The acknowledgement is late or lost, but only what was stored gets a receipt.
            handle.stored_sequence = receipt.requests_sequence
            self.counts.stored += 1
            self._is_sent(handle)
        handle.take_receipt(receipt)
        if handle.ended:
            self._settle(handle)
        else:
            self._judge(handle, receipt)

    def _judge(self, handle: Handle, receipt: Receipt) -> None:
        """What a receipt means for a request that is open here."""
        if receipt.outcome == "resubmitted":
            handle.resuming = False
            if receipt.resubmitted_outcome == "gone":
                due_ns = self.clock.mono_ns() + GONE_GRACE_MS * _NS_PER_MS
                self._schedule(due_ns, "gone", handle)
        elif receipt.outcome == "rejected":
            unknown = handle.resuming and receipt.reason == "unknown_request"
            if receipt.requests_sequence == handle.stored_sequence or unknown:
                self._end(handle, _refused(receipt))
                return
            if not handle.resuming:
                # Somebody else of this tenant used the id for another body.
                return
            # Only the question was refused, and that says nothing about the request.
            handle.resuming = False
            if handle.resume_tries < RESUME_TRIES_MAX:
                again_ms = receipt.retry_after_ms or RESUME_AGAIN_MS
                due_ns = self.clock.mono_ns() + again_ms * _NS_PER_MS
                self._schedule(due_ns, "resume", handle)
            elif handle.body is None:
                self._end(handle, _refused(receipt))

    def _on_answer(self, subject: str, payload: bytes, _status: str) -> None:
        handle = self._handles.get(subject[self._answer_prefix :])
        if handle is None:
            return
        try:
            message = ANSWER_DECODER.decode(payload)
        except _UNREADABLE as error:
            self._malformed(subject, error)
            return
        if isinstance(message, Final):
            self._take_final(handle, message, subject)
        elif handle.take_piece(message):
            times = handle.times
            times.last_token_us = self.clock.wall_us()
            times.last_token_ns = self.clock.mono_ns()
            if times.first_token_ns is None:
                times.first_token_us = times.last_token_us
                times.first_token_ns = times.last_token_ns

    def _on_final(self, subject: str, payload: bytes, _status: str) -> None:
        handle = self._handles.get(subject[self._final_prefix :])
        if handle is None:
            return
        try:
            message = ANSWER_DECODER.decode(payload)
        except _UNREADABLE as error:
            self._malformed(subject, error)
            return
        if isinstance(message, Final):
            self._take_final(handle, message, subject)
        else:
            self._malformed(
                subject, ValueError(f"a final expected, {type(message).__name__} found")
            )

    def _take_final(self, handle: Handle, final: Final, subject: str) -> None:
        if (final.tenant, final.id) != (self.tenant, handle.id):
            self._malformed(subject, ValueError(f"final about {final.tenant}/{final.id}"))
        elif handle.ended:
            self.counts.finals_repeated += 1
        else:
            self.counts.finals += 1
            self._end(handle, final)

    # --- ends

    def _end(self, handle: Handle, final: Final) -> None:
        times = handle.times
        times.final_us = self.clock.wall_us()
        times.final_ns = self.clock.mono_ns()
        self._in_flight -= 1
        self._is_sent(handle)
        handle.end(final)
        if final.outcome == "completed":
            if times.first_token_ns is None:
                times.first_token_us, times.first_token_ns = times.final_us, times.final_ns
            if times.last_token_ns is None or handle.mended:
                times.last_token_us, times.last_token_ns = times.final_us, times.final_ns
        if handle.receipts:
            self._settle(handle)
        else:
            self._schedule(times.final_ns + RECEIPT_GRACE_MS * _NS_PER_MS, "receipt", handle)

    def _settle(self, handle: Handle) -> None:
        """Receipt and end are known: forget the request."""
        if self._handles.get(handle.id) is handle:
            del self._handles[handle.id]
            self._claim(handle)

    def _fail(self, handle: Handle, error: ProducerError) -> None:
        self._in_flight -= 1
        self._is_sent(handle)
        if self._handles.get(handle.id) is handle:
            del self._handles[handle.id]
        handle.fail(error)

    def _claim(self, handle: Handle) -> None:
        if not self._report_delivery or handle.body is None:
            return
        if handle.final is None or handle.final.outcome != "completed":
            return
        times = handle.times
        claim = _ENCODER.encode(
            DeliveredClaim(
                id=handle.id,
                sent_us=times.sent_us,
                receipt_us=times.receipt_us,
                first_token_us=times.first_token_us,
                last_token_us=times.last_token_us,
            )
        )
        assert len(claim) <= DELIVERED_BYTES_MAX
        self.counts.claims += 1
        self._post(delivered_subject(self.tenant), claim, None)

    def _malformed(self, subject: str, error: Exception) -> None:
        self.counts.malformed += 1
        # Decoding errors of msgspec name a place and a type, never the text itself.
        _log.warning("message on %s cannot be read: %s", subject, error)


def new_id() -> str:
    """A random request id: 128 bits, as 32 hex digits."""
    return secrets.token_hex(16)


def new_submission(**fields: Unpack[SubmissionFields]) -> Submission:
    """A ``Submission`` from its fields, with a random id where none is given."""
    fields.setdefault("id", new_id())
    if "messages" in fields:
        fields["messages"] = tuple(fields["messages"])
    return Submission(**fields)  # pyright: ignore[reportArgumentType] - messages is a tuple by now


def encode_submission(submission: Submission) -> bytes:
    """The bytes to submit.

    Raises:
        InvalidSubmission: a field is out of range, or not exactly one of prompt and messages.
    """
    if not submission.resume and (submission.prompt is None) == (submission.messages is None):
        raise InvalidSubmission("exactly one of prompt and messages expected")
    try:
        body = _ENCODER.encode(submission)
        # Ranges are checked by decoding; better here than as a refusal that costs a number.
        _SUBMISSION_DECODER.decode(body)
    except (msgspec.MsgspecError, UnicodeEncodeError, UnicodeDecodeError) as error:
        raise InvalidSubmission(f"submission: {error}") from error
    return body


def _check_id(request_id: str) -> None:
    if not _ID.fullmatch(request_id):
        raise InvalidSubmission(f"id matching {NAME_PATTERN} expected, {request_id[:80]!r} found")


def _refused(receipt: Receipt) -> Final:
    return Final(
        tenant=receipt.tenant,
        id=receipt.id,
        outcome="rejected",
        reject_reason=receipt.reason,
        retry_after_ms=receipt.retry_after_ms,
        detail=receipt.detail,
    )
