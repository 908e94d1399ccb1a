"""Languages by their scripts."""

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waterclock_scheduler.language import clip, detect
from waterclock_scheduler.limits import TEXT_HEAD_CHARS, TEXT_TAIL_CHARS

CODE = "def add(a: int, b: int) -> int:\n    return a + b\n\n\nprint(add(1, 2))\n" * 3


@pytest.mark.parametrize(
    ("text", "language"),
    [
        pytest.param("", "und", id="empty"),
        pytest.param("12345 + 678 = ?", "und", id="digits"),
        pytest.param("🙂🙂 …", "und", id="emoji"),
        pytest.param("\ud800", "und", id="a lone surrogate"),
        pytest.param("什么是水钟？", "zh", id="simplified"),
        pytest.param("什麼是水鐘？請說明。", "zh", id="traditional"),
        pytest.param("好", "zh", id="one character"),
        pytest.param("\ud800什么是水钟\udfff", "zh", id="among lone surrogates"),
        pytest.param("请用 Python 写一个 quicksort function", "zh", id="with English words"),
        pytest.param(f"这段代码做什么？\n{CODE}", "zh", id="about code"),
        pytest.param("Ｈｅｌｌｏ，世界和平", "zh", id="full-width letters"),
        pytest.param("What is a water clock, and how was it used?", "en", id="English"),
        pytest.param("WHAT IS A WATER CLOCK, AND HOW WAS IT USED?", "en", id="in capitals"),
        pytest.param("Hello world", "en", id="two words, by default"),
        pytest.param(CODE, "en", id="code alone, by default"),
        pytest.param("水時計とは何ですか？", "other", id="Japanese"),
        pytest.param("ﾐｽﾞﾄﾞｹｲ", "other", id="half-width kana"),
        pytest.param("물시계는 무엇입니까?", "other", id="Korean"),
        pytest.param("물시계(水時計)는 무엇입니까?", "other", id="Korean with hanja"),
        pytest.param("Что такое водяные часы?", "other", id="Russian"),
        pytest.param("ما هي الساعة المائية؟", "other", id="Arabic"),
        pytest.param("नमस्ते दुनिया", "other", id="Hindi"),
        pytest.param("Was ist eine Wasseruhr und wie wird sie gebaut?", "other", id="German"),
        pytest.param("¿Qué es un reloj de agua y cómo funciona?", "other", id="Spanish"),
        pytest.param("Qu'est-ce qu'une horloge à eau ?", "other", id="French"),
        pytest.param("Đồng hồ nước là gì và nó hoạt động như thế nào?", "other", id="Vietnamese"),
        pytest.param(f"Что делает этот код?\n{CODE}", "other", id="Russian about code"),
        # What the method cannot tell; see the module's limits.
        pytest.param("東京都知事選挙", "zh", id="kanji alone is taken for Chinese"),
        pytest.param("shuizhong shi shenme", "en", id="transliteration is taken for English"),
    ],
)
def test_languages(text: str, language: str) -> None:
    assert detect(text).language == language


def test_the_beginning_and_the_end_of_a_long_text_decide() -> None:
    filler = "x" * 1_000_000
    assert detect(f"水钟是什么{filler}").language == "zh"
    assert detect(f"{filler}水钟是什么").language == "zh"
    assert len(clip(filler)) == TEXT_HEAD_CHARS + TEXT_TAIL_CHARS + 1
    assert clip("short") == "short"


def test_little_text_is_trusted_little() -> None:
    assert detect("Hello world").permille < 400
    assert detect("好").permille > 900
    assert detect("What is it that you want from me and the others?").permille > 800


@given(st.text(st.characters(codec=None), max_size=2_000))
def test_any_string_has_an_answer(text: str) -> None:
    found = detect(text)
    assert found.language in ("zh", "en", "other", "und")
    assert 0 <= found.permille <= 1000


@given(st.text(st.characters(min_codepoint=0x4E00, max_codepoint=0x9FFF), min_size=1))
def test_han_alone_is_always_chinese(text: str) -> None:
    assert detect(text).language == "zh"


@pytest.mark.parametrize(
    ("folder", "kinds", "share_min"),
    [
        pytest.param("lang-xquad", {"question"}, {"zh": 1000, "en": 990, "other": 990}, id="xquad"),
        pytest.param("lang-udhr", {"paragraph"}, {"zh": 1000, "en": 990, "other": 990}, id="udhr"),
        pytest.param(
            "lang-lingua", {"sentence"}, {"zh": 999, "en": 980, "other": 955}, id="lingua"
        ),
        pytest.param(
            "lang-mixed",
            {"code-docstring", "persona-prompt"},
            {"zh": 1000, "en": 950, "other": 930},
            id="mixed",
        ),
    ],
)
def test_real_texts(
    shared_data: Path, folder: str, kinds: set[str], share_min: dict[str, int]
) -> None:
    right = dict.fromkeys(share_min, 0)
    count = dict.fromkeys(share_min, 0)
    with gzip.open(shared_data / "data" / folder / "texts.jsonl.gz", "rt") as lines:
        for line in lines:
            row = json.loads(line)
            if row["kind"] in kinds:
                count[row["pool"]] += 1
                right[row["pool"]] += detect(row["text"]).language == row["pool"]
    share = {pool: 1000 * right[pool] // count[pool] for pool in count}
    assert all(share[pool] >= share_min[pool] for pool in share), share
