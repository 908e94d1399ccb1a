"""Whether a submission is let in: pure decisions, values in and values out."""

from collections.abc import Iterable, Mapping
from typing import Literal

from msgspec import Struct

from waterclock_admission import limits
from waterclock_admission.facts import Facts
from waterclock_proto.names import Outcome, RejectReason
from waterclock_proto.subjects import DEADLINE_S_MAX


class ModelTerms(Struct, frozen=True, kw_only=True):
    """What one model takes, and where it runs."""

    name: str
    context_tokens: int
    """Prompt and answer together."""
    output_tokens_default: int
    output_tokens_max: int
    pools: tuple[str, ...] = ()
    """Where the scheduler may send it; empty when nobody told admission."""


class Terms(Struct, frozen=True, kw_only=True):
    """What was agreed with one tenant. A limit of 0 is none."""

    tenant: str
    tier: str
    contract_sha256: str
    models: Mapping[str, ModelTerms]
    model_default: str
    deadline_ms_default: int
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    concurrency: int = 0

    @property
    def limited(self) -> bool:
        return bool(self.requests_per_minute or self.tokens_per_minute or self.concurrency)


class Known(Struct, frozen=True, kw_only=True):
    """A request that was admitted before."""

    commitment: bytes
    """The beginning of its body commitment, ``COMMITMENT_BYTES`` long."""
    requests_sequence: int
    outcome: Outcome | None
    """None while it is on its way."""
    ended_us: int = 0
    delivered: bool = False


COMMITMENT_BYTES = 15
"""120 bits decide whether two bodies are the same. With the interpreter's header this is a round
48 bytes."""


class Rung(Struct, frozen=True, kw_only=True):
    """Where a pool stands on the ladder of load shedding."""

    refuses: bool = False
    retry_after_ms: int | None = None
    to_pool: str = ""
    """Its new requests go there instead; empty when they stay."""


class Ask(Struct, frozen=True, kw_only=True):
    """One submission's question to its tenant's budgets."""

    tenant: str
    member: str
    """Who asks: the same submission is charged once, however often it asks."""
    tokens: int
    expires_us: int
    """When it stops counting as open, if nobody says so before."""
    repeats: int = -1
    """The place in the same batch of an earlier ask for the same request; then the later one is
    only charged if that one was not granted. -1: none."""


BudgetOutcome = Literal[
    "granted", "requests_per_minute", "tokens_per_minute", "concurrency", "repeated"
]


class BudgetAnswer(Struct, frozen=True, kw_only=True):
    """What the tenant's budgets said to one submission.

    ``repeated``: the same request was granted earlier in the same batch.
    """

    outcome: BudgetOutcome
    retry_after_ms: int = 0


class Admit(Struct, frozen=True, kw_only=True):
    """Let in."""

    model: str
    output_tokens_max: int
    deadline_us: int


class Reject(Struct, frozen=True, kw_only=True):
    """Refused; ``retry_after_ms`` where coming again can help."""

    reason: RejectReason
    detail: str
    retry_after_ms: int | None = None


class Resubmit(Struct, frozen=True, kw_only=True):
    """Known already; nothing runs twice."""

    first_requests_sequence: int
    outcome: Outcome | Literal["open", "gone"]


class AskBudget(Struct, frozen=True, kw_only=True):
    """All is well so far; the tenant's budgets have to say whether it can pay."""

    tokens: int
    """The longest possible answer and the estimated prompt: what is charged."""
    deadline_us: int


Decision = Admit | Reject | Resubmit | AskBudget


def decide(
    facts: Facts,
    terms: Terms,
    known: Known | None,
    budget: BudgetAnswer | None,
    *,
    rungs: Mapping[str, Rung],
    open_requests: int,
    open_requests_max: int = limits.OPEN_REQUESTS_MAX,
    now_us: int,
) -> Decision:
    """Admit the submission if it is new, possible in time, wanted now, and the tenant can pay.

    Call it with ``budget=None`` first; only when it answers ``AskBudget`` do the budgets have to
    be asked, and it is called again with what they said. ``now_us`` may be off from the clock that
    stamped the arrival: a deadline that lies before either is passed.
    """
    if known is not None:
        return _again(facts, known, now_us)
    if facts.resume:
        return Reject(
            reason="unknown_request",
            detail="resume names an id that is not known here (or not any more): submit it again",
        )
    model = terms.models.get(facts.model or terms.model_default)
    if model is None:
        return Reject(
            reason="unknown_model",
            detail=_clip(f"expected one of {sorted(terms.models)}, found another name"),
        )
    output_tokens = facts.output_tokens or min(
        model.output_tokens_default, max(1, model.context_tokens - facts.prompt_tokens_estimate)
    )
    if output_tokens > model.output_tokens_max:
        return Reject(
            reason="invalid_field",
            detail=f"max_tokens: at most {model.output_tokens_max} here, found {output_tokens}",
        )
    if facts.prompt_tokens_estimate + output_tokens > model.context_tokens:
        return Reject(
            reason="prompt_too_long",
            detail=(
                f"about {facts.prompt_tokens_estimate} prompt tokens and {output_tokens} of answer,"
                f" at most {model.context_tokens} together: shorten the prompt or lower max_tokens"
            ),
        )
    deadline = deadline_us(facts, terms)
    if isinstance(deadline, Reject):
        return deadline
    if deadline <= now_us:
        return Reject(
            reason="deadline_passed",
            detail=f"the deadline passed {(now_us - deadline) // 1000} ms before it was read",
        )
    if open_requests >= open_requests_max:
        return Reject(
            reason="backlog_full",
            detail=f"{open_requests} requests are on their way, at most {open_requests_max}",
            retry_after_ms=limits.BACKLOG_RETRY_MS,
        )
    retry_after_ms = load_shed(model.pools, rungs)
    if retry_after_ms is not None:
        return Reject(
            reason="load_shed",
            detail="every pool of this model sheds load",
            retry_after_ms=retry_after_ms,
        )
    tokens = facts.prompt_tokens_estimate + output_tokens
    if 0 < terms.tokens_per_minute < tokens:
        return Reject(
            reason="over_budget_ceiling",
            detail=(
                f"may cost {tokens} tokens, and the budget is {terms.tokens_per_minute} a minute:"
                " lower max_tokens or shorten the prompt"
            ),
        )
    if terms.limited:
        if budget is None:
            return AskBudget(tokens=tokens, deadline_us=deadline)
        if budget.outcome not in ("granted", "repeated"):
            return Reject(
                reason=budget.outcome,
                detail=_BUDGET_DETAIL[budget.outcome].format(
                    requests=terms.requests_per_minute,
                    tokens=terms.tokens_per_minute,
                    concurrency=terms.concurrency,
                    cost=tokens,
                ),
                retry_after_ms=budget.retry_after_ms,
            )
    return Admit(model=model.name, output_tokens_max=output_tokens, deadline_us=deadline)


def deadline_us(facts: Facts, terms: Terms) -> int | Reject:
    """The earliest deadline that was given, counted from arrival; else the tenant's own."""
    given: list[int] = []
    if facts.deadline_ms is not None:
        given.append(facts.arrival_us + facts.deadline_ms * 1000)
    if facts.deadline_us is not None:
        given.append(facts.deadline_us)
    if not given:
        return facts.arrival_us + terms.deadline_ms_default * 1000
    if max(given) - facts.arrival_us > DEADLINE_S_MAX * 1_000_000:
        return Reject(
            reason="deadline_too_far",
            detail=(
                f"{(max(given) - facts.arrival_us) // 1_000_000} s after arrival, at most"
                f" {DEADLINE_S_MAX} s: no body is kept longer"
            ),
        )
    return min(given)


def load_shed(pools: Iterable[str], rungs: Mapping[str, Rung]) -> int | None:
    """When every pool refuses: the milliseconds after which to come again; else None."""
    retry_after_ms: int | None = None
    for pool in pools:
        rung = rungs.get(pool, _GROUND)
        # A pool that sends its requests elsewhere is as full as that one; once is enough, for the
        # scheduler does not chain them.
        if rung.to_pool:
            rung = rungs.get(rung.to_pool, _GROUND)
        if not rung.refuses:
            return None
        wait_ms = rung.retry_after_ms or limits.LOAD_RETRY_MS
        retry_after_ms = wait_ms if retry_after_ms is None else min(retry_after_ms, wait_ms)
    return retry_after_ms


def _again(facts: Facts, known: Known, now_us: int) -> Resubmit | Reject:
    if not facts.resume and facts.commitment[:COMMITMENT_BYTES] != known.commitment:
        return Reject(
            reason="id_reused",
            detail="this id was admitted with another body: the same bytes, or a new id",
        )
    if known.outcome is None:
        outcome: Outcome | Literal["open", "gone"] = "open"
    elif now_us >= known.ended_us + limits.FINAL_KEPT_S * 1_000_000:
        outcome = "gone"
    else:
        outcome = known.outcome
    return Resubmit(first_requests_sequence=known.requests_sequence, outcome=outcome)


def _clip(text: str) -> str:
    return text if len(text) <= 400 else text[:399] + "…"


_GROUND = Rung()
_BUDGET_DETAIL = {
    "requests_per_minute": "the budget of {requests} requests a minute is used up",
    "tokens_per_minute": "{cost} tokens wanted, less is left of {tokens} a minute",
    "concurrency": "{concurrency} requests are on their way, and no more are agreed",
}
