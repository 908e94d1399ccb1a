"""What the simulated engine reads and writes: token counts, block keys, lengths and words.

Everything here is a function of its arguments in integers, so it is the same on every platform
and in every process. Nothing is learned and nothing means anything: an answer is filler of
one word (Chinese: one character) a token.
"""

import re
from hashlib import blake2b
from typing import Literal

Script = Literal["latin", "han"]

LENGTH_PERMILLE = (
    # Quantiles (2i+1)/128 of a lognormal with median 1 and sigma 1, in thousandths.
    *(89, 137, 172, 202, 229, 255, 280, 304, 329, 352, 376, 400, 424, 448, 472, 497),
    *(522, 547, 573, 600, 627, 655, 683, 712, 742, 773, 805, 838, 872, 907, 943, 981),
    *(1020, 1061, 1103, 1147, 1194, 1242, 1294, 1347, 1404, 1464, 1527, 1595, 1667, 1744),
    *(1827, 1916, 2012, 2117, 2233, 2360, 2501, 2659, 2838, 3044, 3284, 3570, 3920, 4364),
    *(4958, 5822, 7297, 11218),
)
"""A table and not a formula: ``exp`` may differ in its last bit between platforms. Lognormal
with a sigma near 1 is the usual shape of answer lengths in published traces."""

SCRIPT_CHARS_READ = 512
HAN_PERMILLE_MIN = 200


def script_of(prompt: str) -> Script:
    """``han`` if a fifth of the prompt's beginning is Chinese characters."""
    if prompt.isascii():
        return "latin"
    head = prompt[:SCRIPT_CHARS_READ]
    han = sum(1 for char in head if "\u3400" <= char <= "\u9fff")
    return "han" if han * 1000 >= len(head) * HAN_PERMILLE_MIN else "latin"


def prompt_tokens_of(prompt: str) -> int:
    """A count as today's vocabularies give it, roughly: 4 bytes of UTF-8 are one token.

    That is 4 letters of English and 1.3 Chinese characters. Never less than 1.
    """
    size = len(prompt) if prompt.isascii() else len(_bytes(prompt))
    return max(1, (size + 3) // 4)


def answer_seed(prompt: str, model: str, seed: int) -> int:
    """64 bits that fix length and words of the answer."""
    named = _bytes(f"{seed}\0{model}\0{prompt}")
    return int.from_bytes(blake2b(named, digest_size=8).digest(), "big")


def output_tokens_of(answer_seed: int, *, median: int, tokens_max: int) -> tuple[int, bool]:
    """Length of an answer that ends by itself, and whether it does so below ``tokens_max``."""
    permille = LENGTH_PERMILLE[answer_seed & 63]
    # The neighbouring quantile bounds the step; without this a median gives 64 lengths only.
    above = LENGTH_PERMILLE[min(63, (answer_seed & 63) + 1)]
    permille += (above - permille) * ((answer_seed >> 6) & 255) // 256
    tokens = max(1, median * permille // 1000)
    return (tokens, True) if tokens <= tokens_max else (tokens_max, False)


def prefix_keys(
    prompt: str, *, salt: str, model: str, blocks: int, block_tokens: int
) -> tuple[int, ...]:
    """Keys of the prompt's full KV blocks, at most ``blocks`` of them, each chained to the last.

    A block is the next ``4 * block_tokens`` bytes, as :func:`prompt_tokens_of` counts. Prompts
    share the first keys exactly as far as they, salt and model are the same.
    """
    width = 4 * block_tokens
    data = _bytes(prompt)
    digest = blake2b(_bytes(f"{model}\0{salt}"), digest_size=8).digest()
    keys: list[int] = []
    for start in range(0, min(len(data) // width, blocks) * width, width):
        digest = blake2b(digest + data[start : start + width], digest_size=8).digest()
        keys.append(int.from_bytes(digest, "big"))
    return tuple(keys)


def answer_text(script: Script, answer_seed: int, *, at: int, tokens: int) -> str:
    """Tokens ``at`` to ``at + tokens`` of an answer: joined pieces do not depend on the cuts."""
    offset = answer_seed & 255
    # An odd stride visits the whole vocabulary before it repeats.
    stride = (answer_seed >> 8) & 254 | 1
    table = HAN if script == "han" else LATIN
    text = "".join([table[i & 15][(offset + i * stride) & 255] for i in range(at, at + tokens)])
    return text[1:] if at == 0 and tokens and script == "latin" else text


def _bytes(text: str) -> bytes:
    # JSON can carry half a surrogate pair, and no prompt may break the engine.
    return text.encode("utf-8", "surrogatepass")


_WORDS = re.findall(
    r"\w+",
    """
    about after again all always an and answer are as at away be because before begin between both
    bring but by call can change city clear close come could count day did different do door each
    early earth east enough even ever every eye face fact fall fast feel few fill find fire first
    flow follow food for four from full gate get give glass go good great green ground half hand
    hard have head hear heart help high hold home house how if important into is it its just keep
    kind know large last late law leave left less let level life light like list little live long
    low make many may mean measure men mile morning most mother move much must name need never new
    next no north not note now number of off old on once one open or order other out over own
    paper part pass past place plain plan plant point pour put question quiet rain reach read rest
    right river road room rule run same second see seem set she short should side simple since
    small some song soon sound speak stand star start still stone stop story strong such sun sure
    talk tell than that their them then there they thing think those thought three through to
    together too took true try turn two until up upon us vessel voice wait walk warm was watch
    water we well were west when where which white who why will with without wood word world would
    write year yet you young your
    """,
)

_CHARACTERS = (
    "的一是在不了有和人这中大为上个国我以要他时来用们生到作地于出就分对成会可主发年动同工也能"
    "下过子说产种面而方后多定行学法所民得经十三之进着等部度家电力里如水化高自二理起小物现实加"
    "量都两体制机当使点从业本去把性好应开它合还因由其些然前外天政四日那社义事平形相全表间样与"
    "关各重新线内数正心反你明看原又么利比或但质气第向道命此变条只没结解问意建月公无系军很情者"
    "最立代想已通并提直题党程展五果料象员革位入常文总次品式活设及管特件长求老头基资边流路级少"
    "图山统接知较将组见计别她手角期根论运农指几九区强放决西被干做必战先回则任"
)


def _latin(position: int) -> tuple[str, ...]:
    words = _WORDS
    if position == 0:
        words = [word.capitalize() for word in words]
    end = "." if position == 15 else "," if position == 7 else ""
    return tuple(f" {word}{end}" for word in words)


def _han(position: int) -> tuple[str, ...]:
    # A mark is a token of its own, so that characters and tokens are the same number.
    if position in (7, 15):
        return ("，" if position == 7 else "。",) * 256
    return tuple(_CHARACTERS)


LATIN = tuple(_latin(position) for position in range(16))
"""Words by place in a sentence of 16 tokens, then by number; each with the space before it."""
HAN = tuple(_han(position) for position in range(16))
assert len(set(_WORDS)) == len(_WORDS) == len(set(_CHARACTERS)) == len(_CHARACTERS) == 256
