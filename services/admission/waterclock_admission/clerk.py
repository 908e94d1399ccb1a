"""Admission's desk: submissions in, events out, and what is to be done when an event is read back.

No bus, no clock, no store: the service around it carries things to and fro. Between an event's
publication and its return on the tape the clerk remembers what it has decided (the *overlay*), so
that a repetition in the meantime is recognised and no number is given twice. What is told to the
world (acknowledgement, receipt) is told only when the event has come back.
"""

import re
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
from msgspec import Struct

from waterclock_admission import limits
from waterclock_admission.core import (
    COMMITMENT_BYTES,
    Admit,
    Ask,
    AskBudget,
    BudgetAnswer,
    Decision,
    Known,
    Reject,
    Resubmit,
    Rung,
    Terms,
    decide,
)
from waterclock_admission.facts import Facts, Refusal
from waterclock_admission.fold import Fold
from waterclock_admission.reading import read
from waterclock_proto.events import (
    Admitted,
    CancelRequested,
    Delivered,
    EventData,
    Rejected,
    Resubmitted,
    WindowClosed,
)
from waterclock_proto.names import NAME_PATTERN
from waterclock_proto.requests import (
    DELIVERED_BYTES_MAX,
    EDGE_ACCEPTED_HEADER,
    DeliveredClaim,
    Receipt,
    body_salt,
)
from waterclock_proto.stamps import Stamp, bus_stamp
from waterclock_runtime.tape import RequestMessage

Decided = Admitted | Rejected | Resubmitted
CancelReason = Literal["producer", "disconnect"]

MALFORMED_REASONS = frozenset(
    {"malformed", "unknown_field", "invalid_field", "empty_body", "body_too_large"}
)


class Written(Struct, kw_only=True):
    """An event that was published and has not come back."""

    data: EventData
    messages: list[RequestMessage]
    """The submissions it decides: to be acknowledged when it is read back."""


class Case(Struct, kw_only=True):
    """One submission on the desk."""

    message: RequestMessage
    tenant: str
    arrival_us: int
    terms: Terms | None
    read: Facts | Refusal
    edge_accepted: Stamp | None
    ask: int = -1
    """Its place among the sheet's asks; -1 if the budgets need not be asked."""


class Sheet(Struct, kw_only=True):
    """A batch, sorted."""

    cases: list[Case]
    asks: list[Ask]
    received: Stamp
    rungs: Mapping[str, Rung]
    known_again: list[RequestMessage]
    """Decided before: to be acknowledged again, and their receipt sent again."""
    poisoned: list[RequestMessage]
    """On a subject that names nobody: nothing can be written about them."""


class Clerk:
    """One elected admission's decisions, from its election to its end."""

    def __init__(
        self,
        fold: Fold,
        terms: Mapping[str, Terms],
        *,
        mesh_key: bytes,
        open_requests_max: int = limits.OPEN_REQUESTS_MAX,
        malformed_events_per_s: int = limits.MALFORMED_EVENTS_PER_S,
    ) -> None:
        self._fold = fold
        self._terms = terms
        self._mesh_key = mesh_key
        self._open_requests_max = open_requests_max
        self._malformed_events_per_s = malformed_events_per_s
        self._pending: dict[tuple[str, int], Written] = {}
        self._sequences: dict[int, int] = {}
        """REQUESTS sequences on the desk or in pending events → when they were stored (µs)."""
        self._admitting: dict[str, Known] = {}
        self._cancelling: set[str] = set()
        self._delivering: set[str] = set()
        self._closing: set[tuple[str, int]] = set()
        self._numbers: dict[str, _Numbers] = {}
        self._held: dict[str, list[Case]] = {}
        self._held_since_us = 0
        self._per_second: Counter[tuple[str, str]] = Counter()
        self._second = 0
        self._dropped: Counter[str] = Counter()
        self.folded = 0
        """Malformed submissions that share an event with others."""

    # Submissions.

    def sort(self, messages: Sequence[RequestMessage], received: Stamp) -> Sheet:
        """Read a batch and find out who has to ask the budgets."""
        sheet = Sheet(
            cases=[],
            asks=[],
            received=received,
            # The ladder may move while the budgets are asked; the batch keeps the rung it began on.
            rungs=dict(self._fold.rungs),
            known_again=[],
            poisoned=[],
        )
        asked: dict[str, int] = {}
        for message in messages:
            stored_us = message.stored_ns // 1000
            if self._sequences.get(message.sequence) == stored_us:
                continue
            if self._fold.is_decided(message.sequence, stored_us):
                sheet.known_again.append(message)
                continue
            case = self._open_case(message)
            if case is None:
                sheet.poisoned.append(message)
                continue
            self._sequences[message.sequence] = stored_us
            sheet.cases.append(case)
            if isinstance(case.read, Refusal) or case.terms is None:
                continue
            decision = self._decide(case.read, case.terms, None, sheet)
            if not isinstance(decision, AskBudget):
                continue
            key = f"{case.tenant}.{case.read.id}"
            case.ask = len(sheet.asks)
            sheet.asks.append(
                Ask(
                    tenant=case.tenant,
                    member=budget_member(message.sequence, case.arrival_us),
                    tokens=decision.tokens,
                    expires_us=decision.deadline_us + limits.OPEN_GRACE_S * 1_000_000,
                    repeats=asked.get(key, -1),
                )
            )
            asked.setdefault(key, case.ask)
        return sheet

    def conclude(
        self, sheet: Sheet, answers: Sequence[BudgetAnswer], decided: Stamp
    ) -> tuple[list[Written], list[Ask]]:
        """Decide the batch in its order: what to write, and which grants were not needed.

        The events have to be published in this order, each followed by ``sent``.
        """
        written: list[Written] = []
        unused: list[Ask] = []
        for case in sheet.cases:
            reading = case.read
            if isinstance(reading, Refusal):
                if self._is_flood(case, reading):
                    self._hold(case, decided.wall_us)
                    continue
                written.append(self._reject(case, reading.id, reading, decided))
                continue
            if case.terms is None:
                written.append(self._reject(case, reading.id, _UNKNOWN_TENANT, decided))
                continue
            answer = answers[case.ask] if case.ask >= 0 else None
            decision = self._decide(reading, case.terms, answer, sheet)
            granted = answer is not None and answer.outcome == "granted"
            if granted and not isinstance(decision, Admit):
                unused.append(sheet.asks[case.ask])
            written.append(self._write(case, reading, case.terms, decision, sheet, decided))
        return written, unused

    def abandon(self, sheet: Sheet) -> None:
        """Forget a batch that was sorted and will not be concluded; the bus brings it again."""
        for case in sheet.cases:
            self._sequences.pop(case.message.sequence, None)

    def flush_due(self, now_us: int) -> bool:
        """Whether held malformed submissions have waited long enough, or are too many."""
        held = sum(len(cases) for cases in self._held.values())
        return bool(held) and (
            held >= limits.FLOOD_HELD_MAX
            or now_us - self._held_since_us >= limits.FLOOD_HELD_S * 1_000_000
        )

    def flush(self, decided: Stamp) -> list[Written]:
        """Write down what was held: one event for each run of a tenant's malformed submissions.

        A run steps over what others decided between, but only over what is on the tape already:
        an event that claims a sequence must never hide a submission that nobody decided.
        """
        written: list[Written] = []
        held, self._held = self._held, {}
        for cases in held.values():
            cases.sort(key=_sequence_of)
            run: list[Case] = []
            for case in cases:
                if run and not self._fold.decided.covers(
                    run[-1].message.sequence + 1, case.message.sequence - 1
                ):
                    written.append(self._reject_run(run, decided))
                    run = []
                run.append(case)
            written.append(self._reject_run(run, decided))
        return written

    def sent(self, written: Written, writer: str, counter: int) -> None:
        """The event is on its way; ``read_back`` will be asked for it."""
        self._pending[writer, counter] = written

    def refuse_unwritable(self, written: Written) -> None:
        """Put a refusal in the place of a decision that no event can hold."""
        data = written.data
        assert isinstance(data, Decided)
        if isinstance(data, Admitted):
            self._admitting.pop(f"{data.tenant}.{data.id}", None)
        written.data = Rejected(
            tenant=data.tenant,
            requests_sequence=data.requests_sequence,
            number=data.number,
            reason="invalid_field",
            detail="a value of this submission cannot be written down: it is refused as it is",
            arrival=data.arrival,
            decided=data.decided,
        )

    def read_back(self, writer: str, counter: int) -> Written | None:
        """An own event stands on the tape and has been folded in. None for a repetition."""
        written = self._pending.pop((writer, counter), None)
        if written is None:
            return None
        for message in written.messages:
            self._sequences.pop(message.sequence, None)
        match written.data:
            case Admitted() as data:
                self._admitting.pop(f"{data.tenant}.{data.id}", None)
            case CancelRequested() as data:
                self._cancelling.discard(f"{data.tenant}.{data.id}")
            case Delivered() as data:
                self._delivering.discard(f"{data.tenant}.{data.id}")
            case WindowClosed() as data:
                self._closing.discard((data.tenant, data.start_us))
            case _:
                pass
        return written

    @property
    def outstanding(self) -> int:
        """Events that have not come back."""
        return len(self._pending)

    @property
    def undecided(self) -> int:
        """Submissions on the desk or in events that have not come back."""
        return len(self._sequences)

    def take_dropped(self) -> Counter[str]:
        """Cancels and claims that made no event since the last call, by why."""
        dropped, self._dropped = self._dropped, Counter()
        return dropped

    # What else producers say.

    def cancel(
        self, tenant: str, request_id: str, reason: CancelReason, requested: Stamp
    ) -> Written | None:
        """An event for the first cancel of a request that has not ended; else None."""
        if tenant not in self._terms or not _NAME.match(request_id):
            self._dropped["cancel_of_nobody"] += 1
            return None
        key = f"{tenant}.{request_id}"
        request = self._fold.open.get(key)
        if key in self._cancelling or (request is not None and request.cancelled):
            self._dropped["cancel_repeated"] += 1
            return None
        if request is None and key not in self._admitting:
            if key in self._fold.cancelled_early:
                self._dropped["cancel_repeated"] += 1
                return None
            if self._fold.known(tenant, request_id) is not None:
                self._dropped["cancel_after_end"] += 1
                return None
            if self._over(tenant, "cancel", limits.CANCELS_UNKNOWN_PER_S, requested.wall_us):
                self._dropped["cancel_flood"] += 1
                return None
        self._cancelling.add(key)
        return Written(
            data=CancelRequested(
                tenant=tenant,
                id=request_id,
                reason=reason,
                requested=requested,
            ),
            messages=[],
        )

    def claim(self, tenant: str, payload: bytes, quoted: Stamp) -> Written | None:
        """An event for the first statement of a producer about a request; else None."""
        if tenant not in self._terms or len(payload) > DELIVERED_BYTES_MAX:
            self._dropped["claim_refused"] += 1
            return None
        if self._over(tenant, "claim", limits.DELIVERED_PER_S, quoted.wall_us):
            self._dropped["claim_flood"] += 1
            return None
        try:
            claim = _CLAIM_DECODER.decode(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            self._dropped["claim_refused"] += 1
            return None
        key = f"{tenant}.{claim.id}"
        known = self._fold.known(tenant, claim.id)
        if known is None:
            self._dropped["claim_of_unknown"] += 1
            return None
        if known.delivered or key in self._delivering:
            self._dropped["claim_repeated"] += 1
            return None
        self._delivering.add(key)
        return Written(
            data=Delivered(
                tenant=tenant,
                id=claim.id,
                sent_us=claim.sent_us,
                receipt_us=claim.receipt_us,
                first_token_us=claim.first_token_us,
                last_token_us=claim.last_token_us,
                quoted=quoted,
            ),
            messages=[],
        )

    def close_windows(self, closed: Stamp, *, say_again_s: int) -> list[Written]:
        """Minutes that are over, and last numbers not written down for ``say_again_s``."""
        fold = self._fold
        now_us = closed.wall_us
        written: list[Written] = []
        for tenant, windows in fold.windows.items():
            for window in windows.values():
                end_us = window.start_us + limits.WINDOW_US
                mark = (tenant, window.start_us)
                # The tape has gone past it, or nothing came for a while: it is complete.
                over = fold.now_us >= end_us or now_us >= end_us + limits.WINDOW_GRACE_US
                if not over or mark in self._closing:
                    continue
                self._closing.add(mark)
                written.append(
                    Written(
                        data=WindowClosed(
                            tenant=tenant,
                            start_us=window.start_us,
                            end_us=end_us,
                            number_first=window.number_first,
                            number_last=window.number_last,
                            admitted=window.admitted,
                            rejected=window.rejected,
                            resubmitted=window.resubmitted,
                            closed=closed,
                        ),
                        messages=[],
                    )
                )
        for tenant, said_us in fold.numbers_said_us.items():
            start_us = now_us // limits.WINDOW_US * limits.WINDOW_US
            mark = (tenant, start_us)
            if now_us - said_us < say_again_s * 1_000_000 or mark in self._closing:
                continue
            self._closing.add(mark)
            written.append(
                Written(
                    data=WindowClosed(
                        tenant=tenant,
                        start_us=start_us,
                        end_us=start_us,
                        number_last=fold.last_number(tenant),
                        closed=closed,
                    ),
                    messages=[],
                )
            )
        return written

    # One submission.

    def _open_case(self, message: RequestMessage) -> Case | None:
        kind, _, tenant = message.subject.removeprefix("wc.").partition(".")
        if not _NAME.match(tenant):
            return None
        edge_accepted = _edge_stamp(message) if kind == "edge" else None
        arrival_us = edge_accepted.wall_us if edge_accepted else message.stored_ns // 1000
        return Case(
            message=message,
            tenant=tenant,
            arrival_us=arrival_us,
            terms=self._terms.get(tenant),
            read=read(
                message.payload, tenant=tenant, arrival_us=arrival_us, mesh_key=self._mesh_key
            ),
            edge_accepted=edge_accepted,
        )

    def _decide(
        self, facts: Facts, terms: Terms, answer: BudgetAnswer | None, sheet: Sheet
    ) -> Decision:
        known = self._admitting.get(f"{facts.tenant}.{facts.id}")
        if known is None:
            known = self._fold.known(facts.tenant, facts.id)
        return decide(
            facts,
            terms,
            known,
            answer,
            rungs=sheet.rungs,
            open_requests=len(self._fold.open) + len(self._admitting),
            open_requests_max=self._open_requests_max,
            now_us=sheet.received.wall_us,
        )

    def _write(
        self,
        case: Case,
        facts: Facts,
        terms: Terms,
        decision: Decision,
        sheet: Sheet,
        decided: Stamp,
    ) -> Written:
        match decision:
            case Admit():
                self._admitting[f"{case.tenant}.{facts.id}"] = Known(
                    commitment=facts.commitment[:COMMITMENT_BYTES],
                    requests_sequence=case.message.sequence,
                    outcome=None,
                )
                data: Decided = Admitted(
                    tenant=case.tenant,
                    id=facts.id,
                    tier=terms.tier,
                    requests_sequence=case.message.sequence,
                    number=self._next_number(case.tenant),
                    contract_sha256=terms.contract_sha256,
                    model=decision.model,
                    stream=facts.stream,
                    arrival=bus_stamp(case.message.stored_ns),
                    edge_accepted=case.edge_accepted,
                    received=sheet.received,
                    decided=decided,
                    sent_us=facts.sent_us,
                    deadline_us=decision.deadline_us,
                    body_bytes=facts.body_bytes,
                    prompt_tokens_estimate=facts.prompt_tokens_estimate,
                    output_tokens_max=decision.output_tokens_max,
                    body_commitment=facts.commitment.hex(),
                    language_hint=facts.language_hint,
                    session_fingerprint=facts.session_fingerprint,
                )
            case Resubmit():
                data = Resubmitted(
                    tenant=case.tenant,
                    id=facts.id,
                    requests_sequence=case.message.sequence,
                    number=self._next_number(case.tenant),
                    first_requests_sequence=decision.first_requests_sequence,
                    outcome=decision.outcome,
                    arrival=bus_stamp(case.message.stored_ns),
                    decided=decided,
                )
            case Reject():
                return self._reject(case, facts.id, decision, decided)
            case AskBudget():
                # What it knew this request by was forgotten while the budgets were asked about
                # others. Coming again in a moment is decided properly.
                return self._reject(case, facts.id, _ASK_AGAIN, decided)
        return Written(data=data, messages=[case.message])

    def _reject(
        self, case: Case, request_id: str, why: Reject | Refusal, decided: Stamp
    ) -> Written:
        return Written(
            data=Rejected(
                tenant=case.tenant,
                id=request_id,
                requests_sequence=case.message.sequence,
                number=self._next_number(case.tenant),
                reason=why.reason,
                detail=why.detail,
                retry_after_ms=why.retry_after_ms if isinstance(why, Reject) else None,
                tier=case.terms.tier if case.terms is not None else None,
                arrival=bus_stamp(case.message.stored_ns),
                edge_accepted=case.edge_accepted,
                decided=decided,
            ),
            messages=[case.message],
        )

    def _reject_run(self, run: list[Case], decided: Stamp) -> Written:
        first = run[0]
        assert isinstance(first.read, Refusal)
        if len(run) == 1:
            return self._reject(first, first.read.id, first.read, decided)
        self.folded += len(run)
        number = self._next_number(first.tenant, len(run))
        return Written(
            data=Rejected(
                tenant=first.tenant,
                id=first.read.id,
                requests_sequence=first.message.sequence,
                requests_sequence_last=run[-1].message.sequence,
                number=number,
                count=len(run),
                reason=first.read.reason,
                detail=(
                    f"the first of {len(run)} malformed submissions, more than"
                    f" {self._malformed_events_per_s} a second: {first.read.detail}"
                )[:512],
                tier=first.terms.tier if first.terms is not None else None,
                arrival=bus_stamp(first.message.stored_ns),
                decided=decided,
            ),
            messages=[case.message for case in run],
        )

    def _is_flood(self, case: Case, refusal: Refusal) -> bool:
        return refusal.reason in MALFORMED_REASONS and self._over(
            case.tenant,
            "malformed",
            self._malformed_events_per_s,
            case.message.stored_ns // 1000,
        )

    def _hold(self, case: Case, now_us: int) -> None:
        if not self._held:
            self._held_since_us = now_us
        self._held.setdefault(case.tenant, []).append(case)

    def _over(self, tenant: str, what: str, per_second_max: int, now_us: int) -> bool:
        """Count one more of the tenant in this second; whether that is too many."""
        second = now_us // 1_000_000
        if second > self._second:
            self._second = second
            self._per_second.clear()
        self._per_second[tenant, what] += 1
        return self._per_second[tenant, what] > per_second_max

    def _next_number(self, tenant: str, count: int = 1) -> int:
        numbers = self._numbers.get(tenant)
        if numbers is None:
            # Right after the election nothing of ours is on its way, so the fold knows them all.
            numbers = self._numbers[tenant] = _Numbers(
                self._fold.missing_numbers(tenant), self._fold.last_number(tenant)
            )
        return numbers.take(count)


class _Numbers:
    """One tenant's numbers: holes that a crash left first, then on from the last."""

    def __init__(self, missing: list[int], last: int) -> None:
        self._missing = deque(missing)
        self._last = last

    def take(self, count: int) -> int:
        """The first of ``count`` numbers in a row."""
        if count == 1 and self._missing:
            return self._missing.popleft()
        first = self._last + 1
        self._last += count
        return first


def receipt(
    data: Decided,
    *,
    payload: bytes,
    sequence: int,
    stored_ns: int,
    incarnation: str,
    mesh_key: bytes,
) -> Receipt:
    """What the producer is told of a decision that stands on the tape at ``sequence``."""
    salt = body_salt(mesh_key, data.tenant, data.id).hex() if data.id else ""
    event = payload.decode()
    match data:
        case Admitted():
            return Receipt(
                tenant=data.tenant,
                id=data.id,
                outcome="admitted",
                requests_sequence=data.requests_sequence,
                number=data.number,
                event=event,
                incarnation=incarnation,
                sequence=sequence,
                stored_ns=stored_ns,
                salt=salt,
            )
        case Resubmitted():
            return Receipt(
                tenant=data.tenant,
                id=data.id,
                outcome="resubmitted",
                requests_sequence=data.requests_sequence,
                number=data.number,
                event=event,
                incarnation=incarnation,
                sequence=sequence,
                stored_ns=stored_ns,
                salt=salt,
                resubmitted_outcome=data.outcome,
            )
        case Rejected():
            return Receipt(
                tenant=data.tenant,
                id=data.id,
                outcome="rejected",
                requests_sequence=data.requests_sequence,
                number=data.number,
                event=event,
                incarnation=incarnation,
                sequence=sequence,
                stored_ns=stored_ns,
                salt=salt,
                reason=data.reason,
                detail=data.detail,
                retry_after_ms=data.retry_after_ms,
            )


def budget_member(requests_sequence: int, arrival_us: int) -> str:
    """A submission's name in the budgets; after a loss of the bus, not another one's."""
    return f"{requests_sequence}.{arrival_us}"


def _edge_stamp(message: RequestMessage) -> Stamp | None:
    text = (message.headers or {}).get(EDGE_ACCEPTED_HEADER)
    if text is None:
        return None
    try:
        return _STAMP_DECODER.decode(text)
    except msgspec.MsgspecError:
        # Only the mesh's own edge writes there; without its stamp the bus's counts.
        return None


def _sequence_of(case: Case) -> int:
    return case.message.sequence


_NAME = re.compile(NAME_PATTERN)
_STAMP_DECODER = msgspec.json.Decoder(Stamp)
_CLAIM_DECODER = msgspec.json.Decoder(DeliveredClaim)
_UNKNOWN_TENANT = Refusal(reason="unknown_tenant", detail="no tenant of this name is configured")
_ASK_AGAIN = Reject(
    reason="load_shed", detail="could not be decided in this batch: come again", retry_after_ms=1000
)
