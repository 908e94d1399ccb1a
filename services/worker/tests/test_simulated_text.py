"""Lengths, keys and words of the simulated engine."""

import math
from statistics import NormalDist

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waterclock_worker.simulated_text import (
    LENGTH_PERMILLE,
    Script,
    answer_seed,
    answer_text,
    output_tokens_of,
    prefix_keys,
    prompt_tokens_of,
    script_of,
)

seeds = st.integers(0, 2**64 - 1)
scripts: st.SearchStrategy[Script] = st.sampled_from(["latin", "han"])


@pytest.mark.parametrize(
    ("prompt", "script"),
    [
        pytest.param("What time is it?", "latin", id="English"),
        pytest.param("现在几点？", "han", id="Chinese"),
        pytest.param(
            "请把 the water clock 翻译成中文，谢谢", "han", id="Chinese with English in it"
        ),
        pytest.param("What does 水 mean in this long sentence?", "latin", id="one character"),
        pytest.param("Quelle heure est-il à présent ?", "latin", id="accents"),
        pytest.param("", "latin", id="nothing"),
    ],
)
def test_the_script_of_the_prompt_is_that_of_the_answer(prompt: str, script: Script) -> None:
    assert script_of(prompt) == script


@pytest.mark.parametrize(
    ("prompt", "tokens"), [("", 1), ("abcd", 1), ("abcde", 2), ("水钟计时", 3), ("a" * 400, 100)]
)
def test_four_bytes_are_a_token(prompt: str, tokens: int) -> None:
    assert prompt_tokens_of(prompt) == tokens


def test_the_length_table_is_the_lognormal_that_it_claims_to_be() -> None:
    normal = NormalDist()
    assert list(LENGTH_PERMILLE) == [
        round(1000 * math.exp(normal.inv_cdf((2 * i + 1) / 128))) for i in range(64)
    ]


def test_lengths_have_the_median_asked_for_and_a_long_tail() -> None:
    lengths = sorted(
        output_tokens_of(answer_seed(str(i), "m", 0), median=200, tokens_max=10**6)[0]
        for i in range(4000)
    )
    assert 185 < lengths[2000] < 215
    assert 2.2 < lengths[3360] / lengths[2000] < 3.2  # one sigma: e
    assert lengths[0] >= 1
    assert len(set(lengths)) > 500  # more than the table's 64


@given(seeds, st.integers(1, 500), st.integers(1, 2000))
def test_a_length_is_clipped_and_says_so(seed: int, median: int, tokens_max: int) -> None:
    tokens, stops = output_tokens_of(seed, median=median, tokens_max=tokens_max)
    free, _ = output_tokens_of(seed, median=median, tokens_max=10**9)
    assert tokens == min(free, tokens_max)
    assert stops == (free <= tokens_max)


@given(scripts, seeds, st.lists(st.integers(1, 9), max_size=20))
def test_an_answer_does_not_depend_on_how_it_was_cut(
    script: Script, seed: int, cuts: list[int]
) -> None:
    pieces: list[str] = []
    at = 0
    for tokens in cuts:
        pieces.append(answer_text(script, seed, at=at, tokens=tokens))
        at += tokens
    assert "".join(pieces) == answer_text(script, seed, at=0, tokens=at)


@given(seeds, st.integers(1, 200))
def test_a_token_is_a_word_or_a_character(seed: int, tokens: int) -> None:
    latin = answer_text("latin", seed, at=0, tokens=tokens)
    assert len(latin.split(" ")) == tokens
    assert latin[0].isupper()
    assert len(answer_text("han", seed, at=0, tokens=tokens)) == tokens


def test_answers_are_the_same_in_every_process() -> None:
    seed = answer_seed("What time is it?", "m", 0)
    assert seed == 0x3E3FB57475B0BCBA
    assert answer_text("latin", seed, at=0, tokens=9) == (
        "Speak mother fire who set live even warm, read"
    )
    assert answer_text("han", seed, at=0, tokens=9) == "党日方九情合同，没"
    keys = prefix_keys("w" * 64, salt="s", model="m", blocks=2, block_tokens=4)
    assert keys == (10049096387492783231, 1542695690835589230)


@given(st.text(), st.text(), st.integers(0, 9))
def test_prompt_model_and_seed_each_make_another_answer(prompt: str, model: str, seed: int) -> None:
    one = answer_seed(prompt, model, seed)
    assert one == answer_seed(prompt, model, seed)
    others = [(prompt + "x", model, seed), (prompt, model + "x", seed), (prompt, model, seed + 1)]
    assert one not in {answer_seed(*other) for other in others}


@given(st.text(alphabet="ab水", max_size=300), st.text(alphabet="ab水", max_size=300))
def test_prompts_share_keys_as_far_as_their_blocks_are_the_same(one: str, other: str) -> None:
    def keys(prompt: str) -> tuple[int, ...]:
        return prefix_keys(prompt, salt="s", model="m", blocks=99, block_tokens=2)

    same = 0
    first, second = one.encode(), other.encode()
    while (same + 1) * 8 <= min(len(first), len(second)) and first[
        same * 8 : same * 8 + 8
    ] == second[same * 8 : same * 8 + 8]:
        same += 1
    assert len(keys(one)) == len(first) // 8
    assert keys(one)[:same] == keys(other)[:same]
    assert set(keys(one)[same:]).isdisjoint(keys(other)[same:])


def test_salt_and_model_share_nothing_and_blocks_bound_the_keys() -> None:
    def keys(salt: str, model: str, blocks: int) -> tuple[int, ...]:
        return prefix_keys("w" * 64, salt=salt, model=model, blocks=blocks, block_tokens=4)

    assert len(keys("s", "m", 9)) == 4
    assert keys("s", "m", 2) == keys("s", "m", 9)[:2]
    assert set(keys("s", "m", 9)).isdisjoint(keys("t", "m", 9))
    assert set(keys("s", "m", 9)).isdisjoint(keys("s", "n", 9))
