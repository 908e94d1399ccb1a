"""Budgets as arithmetic."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waterclock_admission.allowances import UNITS, Allowances, Level
from waterclock_admission.core import Ask

from .simulated_tape import START_US, terms


def ask(member: str, *, tokens: int = 1, expires_us: int = 10**18, repeats: int = -1) -> Ask:
    return Ask(tenant="acme", member=member, tokens=tokens, expires_us=expires_us, repeats=repeats)


def allowances(**limited: int) -> Allowances:
    return Allowances({"acme": terms("acme", **limited)})


def outcomes(found) -> list[str]:
    return [answer.outcome for answer in found]


def test_a_minutes_worth_at_once_and_then_one_at_a_time() -> None:
    budget = allowances(requests_per_minute=3)
    found = budget.ask([ask(str(place)) for place in range(5)], START_US)
    assert outcomes(found) == ["granted"] * 3 + ["requests_per_minute"] * 2
    assert found[3].retry_after_ms == 20_000
    assert outcomes(budget.ask([ask("x")], START_US + 19_999_999)) == ["requests_per_minute"]
    assert outcomes(budget.ask([ask("x"), ask("y")], START_US + 20_000_000)) == [
        "granted",
        "requests_per_minute",
    ]


def test_tokens_are_charged_as_they_may_cost() -> None:
    budget = allowances(tokens_per_minute=100)
    found = budget.ask([ask("a", tokens=60), ask("b", tokens=50), ask("c", tokens=40)], START_US)
    assert outcomes(found) == ["granted", "tokens_per_minute", "granted"]
    assert found[1].retry_after_ms == 6_000


def test_the_same_submission_is_charged_once() -> None:
    budget = allowances(requests_per_minute=2)
    for _ in range(5):
        assert outcomes(budget.ask([ask("a")], START_US)) == ["granted"]
    assert outcomes(budget.ask([ask("b"), ask("c")], START_US)) == [
        "granted",
        "requests_per_minute",
    ]


def test_a_repetition_in_the_batch_is_not_charged() -> None:
    budget = allowances(requests_per_minute=2)
    found = budget.ask([ask("a"), ask("b", repeats=0), ask("c")], START_US)
    assert outcomes(found) == ["granted", "repeated", "granted"]


def test_a_repetition_of_what_was_refused_is_asked_for_itself() -> None:
    budget = allowances(tokens_per_minute=10)
    found = budget.ask([ask("a", tokens=11), ask("b", tokens=5, repeats=0)], START_US)
    assert outcomes(found) == ["tokens_per_minute", "granted"]


def test_concurrency_is_given_back_by_release_and_by_time() -> None:
    budget = allowances(concurrency=2)
    budget.ask([ask("a", expires_us=START_US + 5_000), ask("b")], START_US)
    assert outcomes(budget.ask([ask("c")], START_US + 4_000)) == ["concurrency"]
    assert outcomes(budget.ask([ask("c")], START_US + 5_000)) == ["granted"]
    assert outcomes(budget.ask([ask("d")], START_US + 5_000)) == ["concurrency"]
    budget.release("acme", "b")
    assert outcomes(budget.ask([ask("d")], START_US + 5_000)) == ["granted"]


def test_a_refusal_charges_nothing() -> None:
    budget = allowances(requests_per_minute=5, tokens_per_minute=10)
    budget.ask([ask("a", tokens=11)], START_US)
    level = budget.level("acme", START_US)
    assert (level.requests, level.tokens) == (5 * UNITS, 10 * UNITS)


@given(st.lists(st.integers(0, 50_000_000), max_size=30), st.integers(1, 100_000_000))
def test_refilling_often_gives_as_much_as_refilling_once(
    steps_us: list[int], per_minute: int
) -> None:
    agreed = terms("acme", requests_per_minute=per_minute, tokens_per_minute=1)
    often = Level(requests=0, tokens=0, at_us=START_US)
    now_us = START_US
    for step_us in steps_us:
        now_us += step_us
        often.refill(agreed, now_us)
    once = Level(requests=0, tokens=0, at_us=START_US)
    once.refill(agreed, now_us)
    assert often == once
    assert often.requests <= per_minute * UNITS < 2**53


@given(st.integers(-(10**9), 10**9))
def test_a_clock_that_steps_back_refills_nothing_and_takes_nothing(step_us: int) -> None:
    agreed = terms("acme", requests_per_minute=60)
    level = Level(requests=UNITS, tokens=0, at_us=START_US)
    level.refill(agreed, START_US + step_us)
    assert level.requests >= UNITS
    assert level.at_us == max(START_US, START_US + step_us)
    if step_us <= 0:
        assert level.requests == UNITS


@pytest.mark.parametrize("per_minute", [1, 7, 60, 6_000])
def test_over_time_no_more_is_granted_than_agreed(per_minute: int) -> None:
    budget = allowances(requests_per_minute=per_minute)
    granted = 0
    for step in range(600):
        found = budget.ask([ask(f"{step}.{n}") for n in range(30)], START_US + step * 500_000)
        granted += outcomes(found).count("granted")
    # A minute's worth to begin with, and five minutes of refilling.
    assert granted <= per_minute * 6
    if per_minute <= 3_000:
        assert granted >= per_minute * 6 - 1
