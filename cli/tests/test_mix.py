"""The synthetic load: the same from the same seed, and what was asked for."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waterclock.arrivals import Planned
from waterclock.mix import (
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    MixOptions,
    Phase,
    Spread,
    TenantShare,
    default_phases,
    plan_mix,
)
from waterclock_proto.requests import estimate_prompt_tokens


def mix(**options) -> list[Planned]:
    return list(plan_mix(MixOptions(**{"rate_milli": 20_000, **options})))


def told(planned: list[Planned]) -> list[tuple]:
    return [
        (p.at_us, p.tenant, p.phase, p.language, p.text(), p.max_tokens, p.stream, p.session)
        for p in planned
    ]


@given(st.integers(0, 2**32))
def test_the_same_seed_makes_the_same_load(seed: int) -> None:
    phases = (Phase(name="a", duration_ms=500), Phase(name="b", duration_ms=100))
    assert told(mix(seed=seed, phases=phases)) == told(mix(seed=seed, phases=phases))


def test_another_seed_makes_another_load() -> None:
    assert told(mix(seed=1)) != told(mix(seed=2))


def test_other_lengths_move_no_arrival_and_no_tenant() -> None:
    short = Spread(points=((0, 1), (1000, 2)))
    assert [(p.at_us, p.tenant, p.language) for p in mix()] == [
        (p.at_us, p.tenant, p.language) for p in mix(output_tokens=short)
    ]


def test_a_burst_is_as_much_denser_as_it_says() -> None:
    counts = Counter(p.phase for p in mix(rate_milli=100_000))
    # 6,000 expected, and 9,000 in half the time: Poisson, so within five standard deviations.
    assert abs(counts["steady"] - 6000) < 5 * 78
    assert abs(counts["recovery"] - 6000) < 5 * 78
    assert abs(counts["burst"] - 9000) < 5 * 95


def test_even_arrivals_are_exact() -> None:
    planned = mix(arrivals="even", phases=(Phase(name="a", duration_ms=1000),))
    assert [p.at_us for p in planned] == [50_000 * n for n in range(1, 20)]


def test_arrivals_are_in_order_and_in_their_phase() -> None:
    planned = mix(phases=default_phases(steady_s=5, burst_s=2, recovery_s=3))
    assert all(a.at_us <= b.at_us for a, b in pairwise(planned))
    begins = {"steady": 0, "burst": 5_000_000, "recovery": 7_000_000}
    ends = {"steady": 5_000_000, "burst": 7_000_000, "recovery": 10_000_000}
    assert all(begins[p.phase] <= p.at_us < ends[p.phase] for p in planned)


def test_a_phase_without_traffic() -> None:
    phases = (
        Phase(name="idle", duration_ms=60_000, rate_permille=0),
        Phase(name="busy", duration_ms=1000),
    )
    assert {p.phase for p in mix(phases=phases)} == {"busy"}


def test_tenants_and_languages_by_weight() -> None:
    tenants = (
        TenantShare(name="a", weight=3, tier="gold", languages={"zh": 1}, deadline_ms=500),
        TenantShare(name="b", weight=1, languages={"en": 1, "zh": 1}),
        TenantShare(name="c", weight=0),
    )
    planned = mix(rate_milli=100_000, tenants=tenants)
    counts = Counter(p.tenant for p in planned)
    assert set(counts) == {"a", "b"}
    assert 2.7 < counts["a"] / counts["b"] < 3.3
    assert {(p.language, p.tier, p.deadline_ms) for p in planned if p.tenant == "a"} == {
        ("zh", "gold", 500)
    }
    assert {p.language for p in planned if p.tenant == "b"} == {"en", "zh"}


def test_what_is_sent_is_what_was_planned() -> None:
    for planned in mix(sessions=3, stream_permille=500)[:50]:
        submission = planned.submission("r1")
        assert submission.id == "r1"
        assert submission.prompt == planned.text()
        assert submission.language is None
        assert (submission.max_tokens, submission.ignore_eos) == (planned.max_tokens, True)
        assert submission.session in {"session-0", "session-1", "session-2"}


@pytest.mark.parametrize("spread", [PROMPT_TOKENS, OUTPUT_TOKENS])
def test_lengths_have_the_quantiles_that_they_say(spread: Spread) -> None:
    import random

    source = random.Random(1)
    drawn = sorted(spread.draw(source) for _ in range(20_000))
    for permille, value in spread.points[1:-2]:
        found = drawn[len(drawn) * permille // 1000]
        assert abs(found - value) <= value // 10 + 2
    assert spread.points[0][1] <= drawn[0]
    assert drawn[-1] <= spread.points[-1][1]


def test_prompts_have_their_drawn_length() -> None:
    fixed = Spread(points=((0, 77), (1000, 77)))
    assert {estimate_prompt_tokens(p.text()) for p in mix(prompt_tokens=fixed)[:20]} == {77}


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"rate_milli": 0}, "rate"),
        ({"tenants": ()}, "at least one"),
        ({"tenants": (TenantShare(name="a"), TenantShare(name="a"))}, "twice"),
        ({"tenants": (TenantShare(name="a", languages={"fr": 1}),)}, "fr"),
        ({"tenants": (TenantShare(name="a", languages={}),)}, "at least one"),
        ({"phases": (Phase(name="p", duration_ms=0),)}, "phase p"),
        ({"phases": (Phase(name="p", duration_ms=1, rate_permille=-1),)}, "phase p"),
        ({"output_tokens": Spread(points=((0, 0), (1000, 5)))}, "output_tokens: values"),
        ({"output_tokens": Spread(points=((0, 5), (1000, 4)))}, "output_tokens: points"),
        ({"prompt_tokens": Spread(points=((0, 5), (900, 9)))}, "prompt_tokens: points"),
    ],
)
def test_options_that_cannot_be(options: dict, found: str) -> None:
    with pytest.raises(ValueError, match=found):
        mix(**options)
