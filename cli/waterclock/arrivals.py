"""What a load sends and when: planned requests, and texts for them.

The texts mean nothing. They are made from the word lists below, so that a load needs no data, and
have exactly the wanted number of estimated tokens (``estimate_prompt_tokens``): four ASCII
characters each in English, one character each in Chinese.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Final, Literal

from msgspec import Struct

from waterclock_proto.requests import Submission
from waterclock_proto.subjects import BODY_BYTES_MAX

TextLanguage = Literal["zh", "en"]

BLOCK_TOKENS: Final = 512
"""Of one shared prefix block, as in the Mooncake traces."""
_PROMPT_BYTES_MAX: Final = BODY_BYTES_MAX - 8192
"""What a body leaves for the prompt beside all other fields."""
PROMPT_TOKENS_MAX: Final[dict[TextLanguage, int]] = {
    "en": _PROMPT_BYTES_MAX // 4,
    "zh": _PROMPT_BYTES_MAX // 3,
}
"""The longest prompts that fit into a submission."""

_RING_CHARACTERS: Final = 32_768
_BLOCKS_KEPT: Final = 4_096
_STEP: Final = 7_919
"""A prime, so that texts begin all over the ring."""


class Planned(Struct, frozen=True, kw_only=True):
    """One request of a load, due ``at_us`` after the load's beginning."""

    at_us: int
    tenant: str
    language: TextLanguage
    """Of the text; not told to the mesh, which must find it out."""
    text: Callable[[], str]
    """Makes the prompt; the same each time. A callable, because a long plan's texts need not
    be in memory all at once."""
    max_tokens: int
    tier: str = ""
    phase: str = ""
    model: str | None = None
    ignore_eos: bool = True
    stream: bool = True
    deadline_ms: int | None = None
    session: str | None = None
    cut: bool = False
    """Whether the prompt is shorter than it should be, because no submission is that large."""

    def submission(self, request_id: str) -> Submission:
        """The submission under an id."""
        return Submission(
            id=request_id,
            model=self.model,
            prompt=self.text(),
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            stream=self.stream,
            deadline_ms=self.deadline_ms,
            session=self.session,
        )


class Prompts:
    """Texts of an exact estimated length. The same seed makes the same texts."""

    def __init__(self, seed: int = 0) -> None:
        self._rings: dict[TextLanguage, str] = {
            "en": _ring(random.Random(f"{seed}|en"), _english_sentence),
            "zh": _ring(random.Random(f"{seed}|zh"), _chinese_sentence),
        }
        self._block = lru_cache(maxsize=_BLOCKS_KEPT)(self._make_block)

    def text(self, language: TextLanguage, tokens: int, number: int) -> str:
        """A text of ``tokens`` estimated tokens; another ``number`` begins otherwise."""
        if language == "zh":
            return self._cut("zh", tokens, f"第{_chinese_number(number)}题：", number)
        return self._cut("en", 4 * tokens, f"Question {number}: ", number)

    def blocks(self, language: TextLanguage, tokens: int, blocks: Sequence[int]) -> str:
        """A text of ``tokens``, put together from numbered blocks of ``BLOCK_TOKENS``.

        Equal numbers give equal blocks, so equal beginnings are equal prefixes.
        """
        whole = "".join([self._block(language, block) for block in blocks])
        return whole[: tokens if language == "zh" else 4 * tokens]

    def _make_block(self, language: TextLanguage, block: int) -> str:
        if language == "zh":
            return self._cut("zh", BLOCK_TOKENS, f"第{_chinese_number(block)}节：", block)
        return self._cut("en", 4 * BLOCK_TOKENS, f"Part {block}: ", block)

    def _cut(self, language: TextLanguage, characters: int, beginning: str, number: int) -> str:
        ring = self._rings[language]
        start = number * _STEP % len(ring)
        missing = characters - len(beginning)
        if missing <= 0:
            return beginning[:characters]
        pieces = [beginning, ring[start : start + missing]]
        missing -= len(pieces[1])
        while missing > 0:
            pieces.append(ring[:missing])
            missing -= len(pieces[-1])
        return "".join(pieces)


def shares(weights: Mapping[str, int]) -> tuple[list[str], list[int]]:
    """Names and their running sums, for choosing by weight.

    Raises:
        ValueError: no name, a negative weight, or all of them zero.
    """
    names = list(weights)
    sums: list[int] = []
    for name in names:
        if weights[name] < 0:
            raise ValueError(f"weight of {name}: zero or more expected, {weights[name]} found")
        sums.append(weights[name] + (sums[-1] if sums else 0))
    if not sums or sums[-1] == 0:
        raise ValueError(f"weights: at least one above zero expected, {dict(weights)} found")
    return names, sums


def _ring(source: random.Random, sentence: Callable[[random.Random], str]) -> str:
    pieces: list[str] = []
    characters = 0
    while characters < _RING_CHARACTERS:
        pieces.append(sentence(source))
        characters += len(pieces[-1])
    return "".join(pieces)


def _english_sentence(source: random.Random) -> str:
    who, does, what, where = (source.choice(words) for words in _ENGLISH)
    return f"{who} {does} {what} {where}. "


def _chinese_sentence(source: random.Random) -> str:
    return "".join([source.choice(words) for words in _CHINESE]) + "。"


def _chinese_number(number: int) -> str:
    return "".join(["〇一二三四五六七八九"[int(digit)] for digit in str(number)])


_ENGLISH: Final = (
    (
        "The clerk", "A young engineer", "Our neighbour", "The harbour pilot", "My sister",
        "The night watch", "A travelling doctor", "The old baker", "The committee", "Nobody here",
        "The new apprentice", "A patient teacher", "The lighthouse keeper", "Every second visitor",
    ),
    (
        "explains", "repairs", "forgets", "measures", "carries", "describes", "looks for",
        "compares", "counts", "promises", "paints", "translates", "weighs", "doubts",
    ),
    (
        "the broken clock", "three letters from abroad", "a jar of clear water", "two quiet rooms",
        "every page of the ledger", "a bridge of stone", "the winter timetable", "the contract",
        "the price of bread", "an unfinished map", "the rule about lateness", "a basket of pears",
    ),
    (
        "before the market opens", "in the middle of the night", "without being asked",
        "beside the slow river", "as if nothing had happened", "for the second time this week",
        "while the others wait", "under a leaking roof", "on the last day of the month",
        "until the vessel is empty", "with more care than speed", "at the end of the street",
    ),
)  # fmt: skip

_CHINESE: Final = (
    (
        "邻居", "年轻的工程师", "港口的领航员", "我的妹妹", "守夜人", "老面包师", "新来的学徒",
        "耐心的老师", "灯塔管理员", "旅行的医生", "委员会", "图书馆的读者",
    ),
    (
        "清晨", "半夜", "下雨的时候", "在集市开门以前", "这个月的最后一天", "不慌不忙地",
        "第二次", "当着大家的面", "在河边", "在漏水的屋檐下",
    ),
    (
        "修理", "解释", "忘记了", "测量", "搬运", "描述", "寻找", "比较", "翻译", "数着",
        "怀疑", "答应归还",
    ),
    (
        "坏掉的水钟", "三封远方的来信", "一罐清水", "那份很长的合同", "账本的每一页", "一座石桥",
        "冬天的时刻表", "两间安静的房子", "面包的价钱", "没有画完的地图", "关于迟到的规定",
        "一篮子梨",
    ),
)  # fmt: skip
