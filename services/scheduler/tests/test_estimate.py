"""Predicted sizes."""

from statistics import median_low

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waterclock_scheduler.config import ServiceTime, Settings
from waterclock_scheduler.estimate import Estimate, Outputs, learn, predict
from waterclock_scheduler.limits import OUTPUTS_REMEMBERED

TIMES = ServiceTime(
    base_us=1_000, prompt_us_per_token=10, output_us_per_token=100, output_tokens_default=50
)


@pytest.mark.parametrize(
    ("outputs", "prompt_tokens", "output_tokens_max", "expected"),
    [
        pytest.param(None, 0, 1000, Estimate(0, 50, 6_000), id="nothing known: the default"),
        pytest.param(None, 0, 20, Estimate(0, 20, 3_000), id="not more than it may"),
        pytest.param(Outputs([7], 7), 3, 1000, Estimate(3, 7, 1_730), id="what was before"),
        pytest.param(Outputs([0], 0), 0, 1000, Estimate(0, 0, 1_000), id="empty answers"),
    ],
)
def test_predictions(
    outputs: Outputs | None, prompt_tokens: int, output_tokens_max: int, expected: Estimate
) -> None:
    found = predict(
        TIMES, outputs, prompt_tokens=prompt_tokens, output_tokens_max=output_tokens_max
    )
    assert found == expected


@given(st.lists(st.integers(0, 5_000), min_size=1, max_size=200))
def test_the_median_is_that_of_the_newest_lengths(lengths: list[int]) -> None:
    outputs = Outputs(recent=[])
    for length in lengths:
        learn(outputs, length, cut=False)
    assert outputs.recent == lengths[-OUTPUTS_REMEMBERED:]
    assert outputs.median == median_low(outputs.recent)


def test_a_cut_answer_can_raise_the_prediction_and_not_lower_it() -> None:
    outputs = Outputs(recent=[])
    for length in (100, 110, 120):
        learn(outputs, length, cut=False)
    for _ in range(20):
        learn(outputs, 5, cut=True)
    assert outputs.median == 110
    for _ in range(20):
        learn(outputs, 500, cut=True)
    assert outputs.median == 500


def test_the_first_answer_counts_even_if_it_was_cut() -> None:
    outputs = Outputs(recent=[])
    learn(outputs, 30, cut=True)
    assert outputs.median == 30


def test_a_model_may_have_times_of_its_own() -> None:
    settings = Settings()
    assert settings.estimate("any") == settings.scheduler.estimate
