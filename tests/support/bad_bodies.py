"""Bad submissions that are too large to keep as files, and a generator of any number of others."""

import json
import random
from collections.abc import Callable, Iterator

BODY_BYTES_MAX = 1_000_000


def large_bodies() -> dict[str, tuple[str, bytes]]:
    """By what is wrong: the expected reason and the body."""
    fits = b'{"id":"bad","prompt":"%s"}'
    return {
        "nested_lists": ("malformed", b"[" * 400_000 + b"]" * 400_000),
        "nested_objects": ("unknown_field", b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
        "nested_in_a_field": (
            "unknown_field",
            b'{"id":"bad","x":' + b"[" * 300 + b"]" * 300 + b"}",
        ),
        "nested_deep_in_a_field": (
            "invalid_field",
            b'{"id":"bad","prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        ),
        "one_byte_too_large": (
            "body_too_large",
            fits % (b"x" * (BODY_BYTES_MAX - len(fits) + 2 + 1)),
        ),
        "eight_thousand_bytes_too_large": ("body_too_large", b" " * (BODY_BYTES_MAX + 8_000)),
        "more_than_the_context": ("prompt_too_long", fits % (b"word " * 60_000)),
        "a_name_of_half_a_megabyte": (
            "unknown_field",
            b'{"id":"bad","%s":1}' % (b"n" * 500_000),
        ),
        "a_hundred_thousand_unknown_fields": (
            "unknown_field",
            b'{"id":"bad",' + b",".join(b'"f%d":0' % n for n in range(60_000)) + b"}",
        ),
        "a_digit_string_of_half_a_megabyte": (
            "invalid_field",
            b'{"id":"bad","prompt":"hello","max_tokens":' + b"7" * 500_000 + b"}",
        ),
        "fifty_thousand_empty_messages": (
            "empty_body",
            b'{"id":"bad","messages":['
            + b",".join([b'{"role":"user","content":""}'] * 30_000)
            + b"]}",
        ),
    }


def fuzzed(seed: int, count: int, mark: str) -> Iterator[bytes]:
    """``count`` bodies, nearly all of them malformed; each has ``mark`` in it where it can.

    A good body is taken, and torn, cut, stuffed or turned into other types. Some stay good.
    """
    draw = random.Random(seed)
    for number in range(count):
        good = {
            "id": f"f{seed}-{number}",
            "prompt": f"tell me of {mark} number {number}",
            "max_tokens": 1,
            "deadline_ms": 60_000,
        }
        yield draw.choice(_WAYS)(draw, good)


def _torn(draw: random.Random, good: dict[str, object]) -> bytes:
    body = bytearray(json.dumps(good).encode())
    for _ in range(draw.randint(1, 8)):
        body[draw.randrange(len(body))] = draw.randrange(256)
    return bytes(body)


def _cut(draw: random.Random, good: dict[str, object]) -> bytes:
    body = json.dumps(good).encode()
    return body[: draw.randrange(len(body))]


def _stuffed(draw: random.Random, good: dict[str, object]) -> bytes:
    body = json.dumps(good).encode()
    at = draw.randrange(len(body))
    return body[:at] + draw.randbytes(draw.randint(1, 40)) + body[at:]


def _retyped(draw: random.Random, good: dict[str, object]) -> bytes:
    wrong: list[object] = [None, -1, 2**70, 1.5, "", [], {}, True, [[]], {"a": {"b": []}}]
    return json.dumps(good | {draw.choice(list(good)): draw.choice(wrong)}).encode()


def _renamed(draw: random.Random, good: dict[str, object]) -> bytes:
    name = draw.choice(list(good))
    letters = list(name)
    letters[draw.randrange(len(letters))] = draw.choice("abcxyz_ \u6c34\0")
    value = good.pop(name)
    return json.dumps({**good, "".join(letters): value}).encode()


def _noise(draw: random.Random, good: dict[str, object]) -> bytes:
    del good
    return draw.randbytes(draw.randint(0, 300))


def _nested(draw: random.Random, good: dict[str, object]) -> bytes:
    depth = draw.randint(1, 3_000)
    opening, closing = draw.choice((("[", "]"), ('{"a":', "}")))
    nested = opening * depth + "1" + closing * depth
    return json.dumps(good).replace('"max_tokens": 1', f'"max_tokens": {nested}').encode()


_WAYS: tuple[Callable[[random.Random, dict[str, object]], bytes], ...] = (
    _torn,
    _torn,
    _cut,
    _stuffed,
    _retyped,
    _renamed,
    _noise,
    _nested,
)
