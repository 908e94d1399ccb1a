"""Which language a prompt is in, by counting scripts; no model, no data file.

The question is which pool reads the prompt: ``zh``, ``en``, ``other``, or ``und`` where the text
does not say. Rules, in order:

1. No letter at all is ``und``.
2. Kana is Japanese and a majority of hangul is Korean, both ``other``: Han characters alone decide
   nothing where these stand.
3. Han characters are ``zh``, also inside of English words or code: a Chinese question about an
   English text is a Chinese prompt.
4. Letters of other scripts, unless they are few among Latin ones, are ``other``.
5. Latin letters are ``en`` or ``other`` by small words (articles, pronouns, prepositions).

Limits, which come with the method: Japanese written in kanji alone counts as ``zh``. A Latin text
of a few words without a small word counts as ``en`` if it is ASCII, with a low confidence; so do
identifiers, code and names. Latin languages whose small words are not listed below (there are
hundreds) are told from English by the absence of English ones only, which needs about ten words.
Transliterated Chinese is ``other`` or ``en``. Whoever knows better says ``language`` in the
request: that has authority over all of this.
"""

import re
from collections import Counter
from typing import Final

from msgspec import Struct

from waterclock_proto.names import Language
from waterclock_scheduler.language_words import ENGLISH_WORDS, FOREIGN_WORDS
from waterclock_scheduler.limits import TEXT_HEAD_CHARS, TEXT_TAIL_CHARS


class Detected(Struct, frozen=True):
    """A language and how far to trust it: 0 is a guess, 1000 is certain. Not a probability."""

    language: Language
    permille: int


def detect(text: str) -> Detected:
    """The language of ``text``, of which only the beginning and the end are looked at.

    Any string has an answer: lone surrogates, which JSON can carry, are no letters.
    """
    text = clip(text)
    if text.isascii():
        # Most prompts in Latin script: nothing to count.
        if _LETTER.search(text) is None:
            return Detected("und", 0)
        return _latin(text, accented_permille=0)
    han = kana = hangul = latin = accented = letters = 0
    for char, count in Counter(text).items():
        if not char.isalpha() and char not in _HAN_MARKS:
            continue
        letters += count
        code = ord(char)
        if code < 0x80:
            latin += count
        elif _is_latin(code):
            latin += count
            accented += count
        elif _is_kana(code):
            kana += count
        elif _is_hangul(code):
            hangul += count
        elif _is_han(code) or char in _HAN_MARKS:
            han += count
    if not letters:
        return Detected("und", 0)
    east = han + kana + hangul
    if east:
        if (kana >= 3 or kana * 5 >= east) and kana * 12 >= east:
            return Detected("other", _share(kana * 3, letters))
        if hangul * 2 > east and hangul * 20 >= latin:
            return Detected("other", _share(hangul, letters))
        if han >= 4 or (han and han * 20 >= latin):
            return Detected("zh", _share(han * 4, han * 4 + latin + kana + hangul))
    other = letters - east - latin
    if other * 3 > latin or other >= 12:
        return Detected("other", max(500, _share(other, letters)))
    if not latin:
        # A little of everything and a majority of nothing.
        return Detected("other", 300)
    return _latin(text, accented_permille=accented * 1000 // latin)


def clip(text: str) -> str:
    """The first and the last characters of a long text, with a break between them."""
    if len(text) <= TEXT_HEAD_CHARS + TEXT_TAIL_CHARS:
        return text
    return f"{text[:TEXT_HEAD_CHARS]}\n{text[-TEXT_TAIL_CHARS:]}"


def _latin(text: str, *, accented_permille: int) -> Detected:
    words = _WORD.findall(text.lower())
    english = sum(map(_ENGLISH.__contains__, words))
    foreign = sum(map(_FOREIGN.__contains__, words))
    if foreign > english:
        return Detected("other", min(1000, 400 + 1000 * (foreign - english) // len(words)))
    if english:
        # English text has a small word in two or three; in another language a hit is chance.
        if english * 12 >= len(words) and accented_permille < 60:
            return Detected("en", min(1000, 400 + 1500 * english // len(words)))
        if accented_permille or len(words) >= 10:
            return Detected("other", 350)
        return Detected("en", 350)
    if accented_permille or foreign:
        return Detected("other", 500 if accented_permille >= 30 else 400)
    if len(words) >= 10:
        return Detected("other", 350)
    return Detected("en", 350)


def _share(part: int, whole: int) -> int:
    return min(1000, 1000 * part // whole)


def _is_latin(code: int) -> bool:
    return (
        code <= 0x24F
        or 0x1E00 <= code <= 0x1EFF
        or 0xFF21 <= code <= 0xFF5A  # full-width, as typed with a Chinese keyboard
    )


def _is_kana(code: int) -> bool:
    return 0x3041 <= code <= 0x30FF or 0x31F0 <= code <= 0x31FF or 0xFF66 <= code <= 0xFF9D


def _is_hangul(code: int) -> bool:
    return (
        0xAC00 <= code <= 0xD7FF
        or 0x1100 <= code <= 0x11FF
        or 0x3130 <= code <= 0x318F
        or 0xA960 <= code <= 0xA97F
    )


def _is_han(code: int) -> bool:
    return (
        0x4E00 <= code <= 0x9FFF
        or 0x3400 <= code <= 0x4DBF
        or 0xF900 <= code <= 0xFAFF
        or 0x20000 <= code <= 0x323AF
    )


_HAN_MARKS: Final = frozenset("々〇〆")
_LETTER: Final = re.compile(r"[A-Za-z]")
_WORD: Final = re.compile(r"[^\W\d_]+")
_ENGLISH: Final = frozenset(ENGLISH_WORDS.split())
_FOREIGN: Final = frozenset(FOREIGN_WORDS.split())
assert not _ENGLISH & _FOREIGN
