"""Decisions, a case a line."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waterclock_admission import limits
from waterclock_admission.core import (
    COMMITMENT_BYTES,
    Admit,
    AskBudget,
    BudgetAnswer,
    Decision,
    Known,
    ModelTerms,
    Reject,
    Resubmit,
    Rung,
    Terms,
    decide,
    load_shed,
)
from waterclock_admission.facts import Facts
from waterclock_proto.subjects import DEADLINE_S_MAX

NOW_US = 1_800_000_000_000_000
BODY = bytes(range(32))
OTHER_BODY = bytes(reversed(range(32)))

SMALL = ModelTerms(
    name="small",
    context_tokens=1000,
    output_tokens_default=100,
    output_tokens_max=500,
    pools=("zh", "en"),
)
LARGE = ModelTerms(
    name="large", context_tokens=10_000, output_tokens_default=100, output_tokens_max=5000
)


def facts(**changes) -> Facts:
    values = {
        "tenant": "acme",
        "id": "r1",
        "commitment": BODY,
        "body_bytes": 10,
        "arrival_us": NOW_US,
        "prompt_tokens_estimate": 10,
    }
    return Facts(**(values | changes))


def terms(**changes) -> Terms:
    values = {
        "tenant": "acme",
        "tier": "gold",
        "contract_sha256": "0" * 64,
        "models": {"small": SMALL, "large": LARGE},
        "model_default": "small",
        "deadline_ms_default": 60_000,
    }
    return Terms(**(values | changes))


def known(**changes) -> Known:
    values = {"commitment": BODY[:COMMITMENT_BYTES], "requests_sequence": 7, "outcome": None}
    return Known(**(values | changes))


def decided(
    of: Facts,
    *,
    by: Terms | None = None,
    before: Known | None = None,
    budget: BudgetAnswer | None = None,
    rungs: dict[str, Rung] | None = None,
    open_requests: int = 0,
) -> Decision:
    return decide(
        of,
        by or terms(),
        before,
        budget,
        rungs=rungs or {},
        open_requests=open_requests,
        now_us=NOW_US,
    )


LIMITED = terms(requests_per_minute=60, tokens_per_minute=1000, concurrency=2)
GRANTED = BudgetAnswer(outcome="granted")
REFUSING = Rung(refuses=True, retry_after_ms=700)


@pytest.mark.parametrize(
    ("of", "extra", "expected"),
    [
        pytest.param(
            facts(),
            {},
            Admit(model="small", output_tokens_max=100, deadline_us=NOW_US + 60_000_000),
            id="with nothing said",
        ),
        pytest.param(
            facts(model="large", output_tokens=5000, deadline_ms=10),
            {},
            Admit(model="large", output_tokens_max=5000, deadline_us=NOW_US + 10_000),
            id="with everything said",
        ),
        pytest.param(
            facts(deadline_ms=10, deadline_us=NOW_US + 9_999),
            {},
            Admit(model="small", output_tokens_max=100, deadline_us=NOW_US + 9_999),
            id="the earlier of two deadlines",
        ),
        pytest.param(
            facts(prompt_tokens_estimate=950),
            {},
            Admit(model="small", output_tokens_max=50, deadline_us=NOW_US + 60_000_000),
            id="the default leaves room for the prompt",
        ),
        pytest.param(
            facts(output_tokens=490, prompt_tokens_estimate=510),
            {},
            Admit(model="small", output_tokens_max=490, deadline_us=NOW_US + 60_000_000),
            id="exactly the context",
        ),
        pytest.param(
            facts(),
            {"by": LIMITED},
            AskBudget(tokens=110, deadline_us=NOW_US + 60_000_000),
            id="limited: ask first",
        ),
        pytest.param(
            facts(),
            {"by": LIMITED, "budget": GRANTED},
            Admit(model="small", output_tokens_max=100, deadline_us=NOW_US + 60_000_000),
            id="limited and granted",
        ),
        pytest.param(
            facts(),
            {"rungs": {"zh": REFUSING}},
            Admit(model="small", output_tokens_max=100, deadline_us=NOW_US + 60_000_000),
            id="one pool of two takes work",
        ),
        pytest.param(
            facts(model="large"),
            {"rungs": {"zh": REFUSING, "en": REFUSING}},
            Admit(model="large", output_tokens_max=100, deadline_us=NOW_US + 60_000_000),
            id="a model whose pools nobody told",
        ),
    ],
)
def test_what_is_let_in(of: Facts, extra: dict, expected: Decision) -> None:
    assert decided(of, **extra) == expected


@pytest.mark.parametrize(
    ("of", "extra", "reason", "retry_after_ms"),
    [
        pytest.param(facts(model="other"), {}, "unknown_model", None, id="unknown model"),
        pytest.param(facts(output_tokens=501), {}, "invalid_field", None, id="too many tokens"),
        pytest.param(
            facts(output_tokens=491, prompt_tokens_estimate=510),
            {},
            "prompt_too_long",
            None,
            id="one over the context",
        ),
        pytest.param(
            facts(prompt_tokens_estimate=1000), {}, "prompt_too_long", None, id="all prompt"
        ),
        pytest.param(facts(deadline_us=NOW_US), {}, "deadline_passed", None, id="at the deadline"),
        pytest.param(facts(deadline_us=0), {}, "deadline_passed", None, id="long past"),
        pytest.param(
            facts(deadline_us=NOW_US + DEADLINE_S_MAX * 1_000_000 + 1),
            {},
            "deadline_too_far",
            None,
            id="one too far",
        ),
        pytest.param(
            facts(deadline_ms=10**12, deadline_us=NOW_US + 5),
            {},
            "deadline_too_far",
            None,
            id="one of two too far",
        ),
        pytest.param(
            facts(),
            {"open_requests": limits.OPEN_REQUESTS_MAX},
            "backlog_full",
            limits.BACKLOG_RETRY_MS,
            id="backlog",
        ),
        pytest.param(
            facts(),
            {"rungs": {"zh": REFUSING, "en": Rung(refuses=True, retry_after_ms=300)}},
            "load_shed",
            300,
            id="every pool refuses: the sooner one says when",
        ),
        pytest.param(
            facts(output_tokens=500, prompt_tokens_estimate=500),
            {"by": terms(tokens_per_minute=999)},
            "over_budget_ceiling",
            None,
            id="more than a minute's tokens",
        ),
        pytest.param(
            facts(),
            {"by": LIMITED, "budget": BudgetAnswer(outcome="concurrency", retry_after_ms=9)},
            "concurrency",
            9,
            id="concurrency",
        ),
        pytest.param(
            facts(),
            {
                "by": LIMITED,
                "budget": BudgetAnswer(outcome="requests_per_minute", retry_after_ms=8),
            },
            "requests_per_minute",
            8,
            id="requests",
        ),
        pytest.param(
            facts(),
            {"by": LIMITED, "budget": BudgetAnswer(outcome="tokens_per_minute", retry_after_ms=7)},
            "tokens_per_minute",
            7,
            id="tokens",
        ),
        pytest.param(
            facts(commitment=OTHER_BODY), {"before": known()}, "id_reused", None, id="other body"
        ),
        pytest.param(facts(resume=True), {}, "unknown_request", None, id="nothing to resume"),
    ],
)
def test_what_is_refused(of: Facts, extra: dict, reason: str, retry_after_ms: int | None) -> None:
    decision = decided(of, **extra)
    assert isinstance(decision, Reject)
    assert (decision.reason, decision.retry_after_ms) == (reason, retry_after_ms)
    assert decision.detail


@pytest.mark.parametrize(
    ("of", "before", "outcome"),
    [
        pytest.param(facts(), known(), "open", id="on its way"),
        pytest.param(
            facts(), known(outcome="completed", ended_us=NOW_US), "completed", id="just ended"
        ),
        pytest.param(
            facts(),
            known(outcome="expired", ended_us=NOW_US - limits.FINAL_KEPT_S * 1_000_000 + 1),
            "expired",
            id="its answer is still kept",
        ),
        pytest.param(
            facts(),
            known(outcome="failed", ended_us=NOW_US - limits.FINAL_KEPT_S * 1_000_000),
            "gone",
            id="its answer is gone",
        ),
        pytest.param(
            facts(resume=True, commitment=OTHER_BODY), known(), "open", id="resumed by id alone"
        ),
        pytest.param(
            facts(deadline_us=0), known(), "open", id="the deadline does not matter any more"
        ),
    ],
)
def test_what_was_known_comes_back(of: Facts, before: Known, outcome: Any) -> None:
    # Whatever else would refuse it, nothing runs, so nothing is refused.
    decision = decided(
        of, before=before, rungs={"zh": REFUSING, "en": REFUSING}, by=LIMITED, open_requests=10**9
    )
    assert decision == Resubmit(first_requests_sequence=7, outcome=outcome)


@pytest.mark.parametrize(
    ("rungs", "expected"),
    [
        pytest.param({}, None, id="nobody moved"),
        pytest.param({"zh": REFUSING}, None, id="one of two"),
        pytest.param({"zh": REFUSING, "en": REFUSING}, 700, id="both"),
        pytest.param({"zh": Rung(to_pool="en"), "en": REFUSING}, 700, id="one sends to the other"),
        pytest.param(
            {"zh": Rung(refuses=True, to_pool="spare"), "en": REFUSING},
            None,
            id="one sends to a pool that takes work",
        ),
        pytest.param(
            {"zh": Rung(refuses=True), "en": Rung(refuses=True)},
            limits.LOAD_RETRY_MS,
            id="a ladder that names no time",
        ),
    ],
)
def test_load_is_shed_when_no_pool_takes_work(rungs: dict[str, Rung], expected: int | None) -> None:
    assert load_shed(("zh", "en"), rungs) == expected


@given(
    st.integers(0, 2000),
    st.none() | st.integers(1, 3000),
    st.none() | st.integers(1, 10**12),
    st.none() | st.integers(0, 2**62),
    st.booleans(),
)
def test_what_is_let_in_fits_and_has_a_deadline_ahead(
    prompt: int, output: int | None, deadline_ms: int | None, deadline_us: int | None, limited: bool
) -> None:
    decision = decided(
        facts(
            prompt_tokens_estimate=prompt,
            output_tokens=output,
            deadline_ms=deadline_ms,
            deadline_us=deadline_us,
        ),
        by=LIMITED if limited else None,
        budget=GRANTED if limited else None,
    )
    assert not isinstance(decision, AskBudget)
    if isinstance(decision, Admit):
        assert decision.output_tokens_max >= 1
        assert prompt + decision.output_tokens_max <= SMALL.context_tokens
        assert NOW_US < decision.deadline_us <= NOW_US + DEADLINE_S_MAX * 1_000_000
        assert output in (None, decision.output_tokens_max)
