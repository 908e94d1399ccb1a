"""A simulated mesh in memory, for tests of programs that use a producer. It answers, it does not
infer.

``FakeMesh`` is the connection and the mesh behind it. While it serves it checks what a producer
must keep to, and raises ``ContractBroken``: only subjects that cross the border, one subscription
each, replies where somebody listens, the same bytes under a known id, a delivery claim once and
only for what was completed. ``ManualClock`` is moved by hand.
"""

import asyncio
import heapq
import re
from collections.abc import Callable
from typing import Literal, TypeVar

import msgspec
from msgspec import Struct

from waterclock_producer.link import Handler, LinkDown
from waterclock_proto.envelope import Chain
from waterclock_proto.events import Admitted, EventData, Rejected, Resubmitted
from waterclock_proto.names import Outcome, RejectReason
from waterclock_proto.requests import (
    DELIVERED_BYTES_MAX,
    DeliveredClaim,
    Delta,
    Final,
    Receipt,
    Restarted,
    Submission,
    Timings,
    Usage,
    body_commitment,
    body_salt,
    estimate_prompt_tokens,
    prompt_text,
)
from waterclock_proto.stamps import Stamp
from waterclock_proto.subjects import (
    BODY_BYTES_MAX,
    CROSSINGS,
    answer_subject,
    cancel_subject,
    delivered_subject,
    final_subject,
    receipt_subject,
    request_subject,
)

T = TypeVar("T")
_NS_PER_US = 1_000
_ENCODER = msgspec.json.Encoder()
_SUBMISSION_DECODER = msgspec.json.Decoder(Submission)
_KEY = b"the key of a mesh that does not exist"


class ContractBroken(AssertionError):
    """The producer did what it must not do."""


class ManualClock:
    """A clock that stands still until ``advance`` moves it; sleepers wake in order."""

    def __init__(self) -> None:
        self._wall_us = 1_700_000_000_000_000
        self._begun_ns = self._now_ns = 1_000_000_000
        self._timers: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0

    def wall_us(self) -> int:
        return self._wall_us + (self._now_ns - self._begun_ns) // _NS_PER_US

    def mono_ns(self) -> int:
        return self._now_ns

    async def sleep_ns(self, duration_ns: int) -> None:
        if duration_ns <= 0:
            await asyncio.sleep(0)
            return
        woken = asyncio.get_running_loop().create_future()
        self.call_later_ns(duration_ns, lambda: None if woken.done() else woken.set_result(None))
        await woken

    def call_later_ns(self, delay_ns: int, call: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._timers, (self._now_ns + delay_ns, self._count, call))

    async def advance_ms(self, duration_ms: int) -> None:
        """Let everything run that is due within ``duration_ms``, each thing at its moment."""
        end_ns = self._now_ns + duration_ms * 1_000_000
        await settle()
        while self._timers and self._timers[0][0] <= end_ns:
            at_ns, _, call = heapq.heappop(self._timers)
            self._now_ns = max(at_ns, self._now_ns)
            call()
            await settle()
        self._now_ns = end_ns

    async def drive(self, task: asyncio.Task[T], *, within_s: int = 3600) -> T:
        """Move the clock from timer to timer until the task is done; returns its result.

        Raises:
            TimeoutError: not done within ``within_s`` of this clock, or nothing is due any more.
        """
        end_ns = self._now_ns + within_s * 1_000_000_000
        await settle()
        while not task.done():
            if not self._timers or self._timers[0][0] > end_ns:
                task.cancel()
                raise TimeoutError(f"the task is not done within {within_s} s of the manual clock")
            at_ns, _, call = heapq.heappop(self._timers)
            self._now_ns = max(at_ns, self._now_ns)
            call()
            await settle()
        return task.result()


async def settle() -> None:
    """Let the event loop run until nothing more follows from what has happened."""
    for _ in range(12):
        await asyncio.sleep(0)


class Answer(Struct, frozen=True, kw_only=True):
    """What the simulated mesh makes of one submission."""

    reject: RejectReason | None = None
    retry_after_ms: int | None = None
    queue_us: int = 0
    exec_us: int = 0
    texts: tuple[str, ...] = ("Hello", " world")
    """The deltas; joined they are the final's text."""
    outcome: Outcome = "completed"
    lost: bool = False
    """It is admitted and never ends."""


class _Request:
    def __init__(self, body: bytes, submission: Submission, sequence: int) -> None:
        self.body = body
        self.submission = submission
        self.sequence = sequence
        self.final: Final | None = None
        self.arrival_us = 0
        self.claimed = False


class FakeMesh:
    """A ``Link`` to a simulated mesh for one tenant.

    ``answer`` says what becomes of a submission. Without a clock everything happens at once and
    in order; with one, queue and execution take their time on it. What is set below happens to
    the next messages.
    """

    def __init__(
        self,
        tenant: str,
        *,
        clock: ManualClock | None = None,
        answer: Callable[[Submission], Answer] = lambda _: Answer(),
    ) -> None:
        self.tenant = tenant
        self.last_error = ""
        self.hold = False
        """Decide nothing until ``release``."""
        self.acks_to_lose = 0
        """Stored, and the acknowledgement is lost."""
        self.submissions_to_lose = 0
        """Not stored."""
        self.receipts_to_lose = 0
        self.finals_to_lose = 0
        self.nobody_listens = False
        self.storage_full = False
        self.resumes_to_refuse = 0
        """Refuse to say an outcome, because of the tenant's rate."""
        self.gone: set[str] = set()
        """Ids whose finals are no longer kept."""
        self.wrong_commitments = False
        self.published: list[tuple[str, bytes]] = []
        """All that the producer published, in order."""
        self.submissions: list[Submission] = []
        self.cancelled: list[str] = []
        self.claims: list[DeliveredClaim] = []
        self.violations: list[str] = []
        self.opened = 0
        self.closed = False
        self._clock = clock
        self._answer = answer
        self._on_gap: Callable[[], None] = lambda: None
        self._up = asyncio.Event()
        self._handlers: dict[str, Handler] = {}
        self._inbox = ""
        self._requests: dict[str, _Request] = {}
        self._held: list[tuple[bytes, Submission, int]] = []
        self._sequence = 0
        self._number = 0
        self._chain = Chain(service="admission", writer="fake", key=_KEY)
        self._in = [_pattern(c.subject, tenant) for c in CROSSINGS if c.direction == "in"]
        self._out = {
            c.subject.replace("{tenant}", tenant) for c in CROSSINGS if c.direction == "out"
        }

    # --- the link

    async def open(self, on_gap: Callable[[], None]) -> None:
        self._on_gap = on_gap
        self.opened += 1
        self._up.set()

    def new_inbox(self) -> str:
        self._inbox = "_INBOX.fake"
        return self._inbox

    async def subscribe(self, subject: str, handler: Handler) -> None:
        if subject not in self._out and subject != f"{self._inbox}.*":
            self._break(f"subscribed to {subject}, which does not cross the border")
        if subject in self._handlers:
            self._break(f"subscribed to {subject} twice")
        self._handlers[subject] = handler

    async def connected(self) -> None:
        await self._up.wait()

    async def publish(self, subject: str, payload: bytes, reply: str) -> None:
        if not self._up.is_set():
            raise LinkDown
        if not any(pattern.fullmatch(subject) for pattern in self._in):
            self._break(f"published on {subject}, which does not cross the border")
        self.published.append((subject, payload))
        if subject == request_subject(self.tenant):
            self._submit(payload, reply)
        elif subject == delivered_subject(self.tenant):
            self._claim(payload)
        else:
            request_id = subject.removeprefix(cancel_subject(self.tenant, ""))
            self.cancelled.append(request_id)
            self._cancel(request_id)

    async def close(self) -> None:
        self.closed = True
        self._up.clear()

    # --- faults

    def disconnect(self) -> None:
        """From now on nothing passes, in either direction; the mesh goes on working."""
        self._up.clear()

    def reconnect(self) -> None:
        self._up.set()
        self._on_gap()

    # --- the mesh by hand

    def release(self) -> None:
        """Decide what was held."""
        self.hold = False
        held, self._held = self._held, []
        for body, submission, sequence in held:
            self._decide(body, submission, sequence)

    def say(self, message: Delta | Restarted | Final, *, on_final: bool = False) -> None:
        """Publish one message of an answer at once."""
        subject = final_subject if on_final else answer_subject
        self._send(subject(self.tenant, message.id), _ENCODER.encode(message))

    def send_raw(self, subject: str, payload: bytes) -> None:
        """Publish anything on any subject at once."""
        self._send(subject, payload)

    def end(self, request_id: str, *, text: str = "", outcome: Outcome = "completed") -> None:
        """End an admitted request."""
        request = self._requests[request_id]
        now_us = self._now_us()
        request.final = Final(
            tenant=self.tenant,
            id=request_id,
            attempt=1,
            outcome=outcome,
            finish_reason="stop" if outcome == "completed" else "abort",
            text=text,
            model_served="fake",
            usage=Usage(
                prompt_tokens=estimate_prompt_tokens(prompt_text(request.submission)),
                completion_tokens=estimate_prompt_tokens(text),
            ),
            timings=Timings(
                arrival_us=request.arrival_us,
                queue_us=0,
                exec_us=now_us - request.arrival_us,
                total_us=now_us - request.arrival_us,
                segments={"queue": 0, "decode": now_us - request.arrival_us},
            ),
        )
        self._final(request.final)

    # --- what it does

    def _break(self, what: str) -> None:
        self.violations.append(what)
        raise ContractBroken(what)

    def _now_us(self) -> int:
        return self._clock.wall_us() if self._clock else 1_700_000_000_000_000 + self._sequence

    def _stamp(self, at_us: int | None = None) -> Stamp:
        return Stamp(wall_us=self._now_us() if at_us is None else at_us, source="admission")

    def _later(self, delay_us: int, call: Callable[[], None]) -> None:
        if self._clock is None or delay_us == 0:
            asyncio.get_running_loop().call_soon(call)
        else:
            self._clock.call_later_ns(delay_us * _NS_PER_US, call)

    def _send(self, subject: str, payload: bytes, status: str = "") -> None:
        if self._up.is_set():
            prefix = subject.rpartition(".")[0]
            self._handlers[f"{prefix}.*"](subject, payload, status)

    def _submit(self, body: bytes, reply: str) -> None:
        if reply.rpartition(".")[0] != self._inbox or f"{self._inbox}.*" not in self._handlers:
            self._break(f"reply subject {reply!r} that nobody listens on")
        if len(body) > BODY_BYTES_MAX:
            self._break(f"submission of {len(body)} bytes")
        if self.nobody_listens:
            self._later(0, lambda: self._send(reply, b"", "503"))
            return
        if self.submissions_to_lose:
            self.submissions_to_lose -= 1
            return
        if self.storage_full:
            refusal = b'{"error":{"code":503,"err_code":10077,"description":"no space"}}'
            self._later(0, lambda: self._send(reply, refusal))
            return
        submission = _SUBMISSION_DECODER.decode(body)
        self.submissions.append(submission)
        self._sequence += 1
        sequence = self._sequence
        if submission.resume and body != _ENCODER.encode(Submission(id=submission.id, resume=True)):
            self._break(f"resume of {submission.id} says more than that")
        if self.acks_to_lose:
            self.acks_to_lose -= 1
        else:
            ack = b'{"stream":"REQUESTS","seq":%d}' % sequence
            self._later(0, lambda: self._send(reply, ack))
        if self.hold:
            self._held.append((body, submission, sequence))
        else:
            self._later(0, lambda: self._decide(body, submission, sequence))

    def _decide(self, body: bytes, submission: Submission, sequence: int) -> None:
        self._number += 1
        request = self._requests.get(submission.id)
        if request is not None and not submission.resume and request.body != body:
            self._break(f"another body under the known id {submission.id}")
        if submission.resume and self.resumes_to_refuse:
            self.resumes_to_refuse -= 1
            self._reject(submission.id, sequence, "requests_per_minute", 500)
        elif submission.id in self.gone:
            self._resubmitted(submission.id, sequence, "gone")
        elif request is not None:
            final = request.final
            self._resubmitted(submission.id, sequence, final.outcome if final else "open")
            if final is not None:
                self._later(0, lambda: self.say(final))
        elif submission.resume:
            self._reject(submission.id, sequence, "unknown_request", None)
        else:
            answer = self._answer(submission)
            if answer.reject is not None:
                self._reject(submission.id, sequence, answer.reject, answer.retry_after_ms)
            else:
                self._admit(body, submission, sequence, answer)

    def _receipt(self, data: EventData, receipt: Receipt) -> None:
        _, payload = self._chain.seal(data)
        whole = msgspec.structs.replace(
            receipt,
            event=payload.decode(),
            number=self._number,
            sequence=self._chain.counter,
            stored_ns=self._now_us() * _NS_PER_US,
        )
        if self.receipts_to_lose:
            self.receipts_to_lose -= 1
            return
        self._send(receipt_subject(self.tenant, receipt.id), _ENCODER.encode(whole))

    def _blank(self, request_id: str, sequence: int) -> Receipt:
        return Receipt(
            tenant=self.tenant,
            id=request_id,
            outcome="admitted",
            requests_sequence=sequence,
            event="",
            incarnation="fake",
            sequence=1,
            stored_ns=0,
        )

    def _admit(self, body: bytes, submission: Submission, sequence: int, answer: Answer) -> None:
        request = _Request(body, submission, sequence)
        request.arrival_us = self._now_us()
        self._requests[submission.id] = request
        salt = body_salt(_KEY, self.tenant, submission.id)
        committed = body_commitment(salt, b"?" if self.wrong_commitments else body)
        data = Admitted(
            tenant=self.tenant,
            id=submission.id,
            tier="standard",
            requests_sequence=sequence,
            number=self._number,
            contract_sha256="0" * 64,
            model=submission.model or "fake",
            arrival=self._stamp(),
            received=self._stamp(),
            decided=self._stamp(),
            deadline_us=self._now_us() + (submission.deadline_ms or 60_000) * 1000,
            body_bytes=len(body),
            prompt_tokens_estimate=0,
            output_tokens_max=submission.max_tokens or 16,
            body_commitment=committed,
        )
        receipt = self._blank(submission.id, sequence)
        self._receipt(data, msgspec.structs.replace(receipt, salt=salt.hex()))
        if not answer.lost:
            self._later(answer.queue_us + answer.exec_us, lambda: self._finish(request, answer))

    def _finish(self, request: _Request, answer: Answer) -> None:
        submission = request.submission
        if request.final is not None:
            return
        if submission.stream:
            for index, text in enumerate(answer.texts):
                self.say(Delta(id=submission.id, attempt=1, index=index, text=text, tokens=1))
        text = "".join(answer.texts)
        total_us = answer.queue_us + answer.exec_us
        request.final = Final(
            tenant=self.tenant,
            id=submission.id,
            attempt=1,
            outcome=answer.outcome,
            finish_reason="stop" if answer.outcome == "completed" else "error",
            text=text,
            model_served="fake",
            usage=Usage(completion_tokens=len(answer.texts)),
            timings=Timings(
                arrival_us=request.arrival_us,
                queue_us=answer.queue_us,
                exec_us=answer.exec_us,
                total_us=total_us,
                segments={"queue": answer.queue_us, "decode": answer.exec_us},
            ),
        )
        self._final(request.final)

    def _final(self, final: Final) -> None:
        if self.finals_to_lose:
            self.finals_to_lose -= 1
            return
        self.say(final, on_final=True)

    def _reject(
        self, request_id: str, sequence: int, reason: RejectReason, retry_after_ms: int | None
    ) -> None:
        data = Rejected(
            tenant=self.tenant,
            id=request_id,
            requests_sequence=sequence,
            number=self._number,
            reason=reason,
            retry_after_ms=retry_after_ms,
            arrival=self._stamp(),
            decided=self._stamp(),
        )
        receipt = msgspec.structs.replace(
            self._blank(request_id, sequence),
            outcome="rejected",
            reason=reason,
            retry_after_ms=retry_after_ms,
        )
        self._receipt(data, receipt)

    def _resubmitted(
        self, request_id: str, sequence: int, outcome: Outcome | Literal["open", "gone"]
    ) -> None:
        request = self._requests.get(request_id)
        data = Resubmitted(
            tenant=self.tenant,
            id=request_id,
            requests_sequence=sequence,
            number=self._number,
            first_requests_sequence=request.sequence if request else 1,
            outcome=outcome,
            arrival=self._stamp(),
            decided=self._stamp(),
        )
        receipt = msgspec.structs.replace(
            self._blank(request_id, sequence),
            outcome="resubmitted",
            resubmitted_outcome=outcome,
        )
        self._receipt(data, receipt)

    def _cancel(self, request_id: str) -> None:
        request = self._requests.get(request_id)
        if request is not None and request.final is None:
            self._later(0, lambda: self.end(request_id, outcome="cancelled"))

    def _claim(self, payload: bytes) -> None:
        if len(payload) > DELIVERED_BYTES_MAX:
            self._break(f"claim of {len(payload)} bytes, at most {DELIVERED_BYTES_MAX} allowed")
        claim = msgspec.json.decode(payload, type=DeliveredClaim)
        request = self._requests.get(claim.id)
        if request is None or request.final is None or request.final.outcome != "completed":
            self._break(f"claim for {claim.id}, which was not completed")
            return
        if request.claimed:
            self._break(f"second claim for {claim.id}")
        request.claimed = True
        self.claims.append(claim)


def _pattern(subject: str, tenant: str) -> re.Pattern[str]:
    return re.compile(re.escape(subject.replace("{tenant}", tenant)).replace(r"\*", "[^.]+"))
