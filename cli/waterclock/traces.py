"""Public request traces as loads: when requests came, how long they were and how long the answers.

Two formats, told apart by their first line:

* Azure LLM inference traces, CSV: ``TIMESTAMP,ContextTokens,GeneratedTokens``; wall clock to 100 ns
  (github.com/Azure/AzurePublicDataset).
* Mooncake traces, a JSON object a line: ``timestamp`` in milliseconds, ``input_length``,
  ``output_length``, and ``hash_ids``, one for each 512 tokens of the input; equal ids are equal
  prefix blocks (github.com/kvcache-ai/Mooncake).

Plain or gzipped. No trace has texts, so they are made up, of the same length by estimate.
"""

import gzip
import itertools
import random
import re
import zlib
from bisect import bisect_right
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import date
from fractions import Fraction
from pathlib import Path
from typing import IO, Annotated, Final, cast

import msgspec
from msgspec import Meta, Struct

from waterclock.arrivals import (
    BLOCK_TOKENS,
    PROMPT_TOKENS_MAX,
    Planned,
    Prompts,
    TextLanguage,
    shares,
)
from waterclock_proto.requests import OUTPUT_TOKENS_CEILING

AZURE_HEADER: Final = "TIMESTAMP,ContextTokens,GeneratedTokens"
_AZURE_ROW = re.compile(
    r"(\d{4})-(\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)(?:\.(\d{1,7}))?(?:\+00:00)?,(\d{1,9}),(\d{1,9})"
)
_AZURE_EXPECTED: Final = "'YYYY-MM-DD hh:mm:ss.fffffff,<tokens>,<tokens>'"
_LINE_BYTES_MAX: Final = 1_000_000
"""Far above the longest line of a Mooncake trace, so that no other file is read into memory."""

_Tokens = Annotated[int, Meta(ge=0, le=10**9)]


class TraceRefused(ValueError):
    """A file is not a trace: says which line, what was expected and what was found."""


class Arrival(Struct, frozen=True, kw_only=True):
    """One request of a trace."""

    at_us: int
    """Since the trace's first arrival."""
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    """One number for each ``BLOCK_TOKENS`` of the input, where the trace says it."""


class TraceOptions(Struct, frozen=True, kw_only=True):
    """How a trace becomes a load."""

    path: Path
    speed: Fraction = Fraction(1)
    """How many times denser than recorded; deadlines shrink by the same factor. The engine's
    steps do not: a simulated one is made as much faster by the mesh's own configuration."""
    limit: int | None = None
    """At most so many requests."""
    minutes: int | None = None
    """Only the trace's first minutes, by its own time."""
    tenants: Mapping[str, int]
    """Weights by tenant name; who sends a request is drawn."""
    languages: Mapping[str, int] = msgspec.field(default_factory=lambda: {"en": 1})
    """Weights of ``en`` and ``zh``."""
    deadline_ms: int | None = None
    """Before ``speed``."""
    model: str | None = None
    stream: bool = True
    seed: int = 0


def read_trace(path: Path) -> Iterator[Arrival]:
    """The arrivals of a trace in its order.

    Raises:
        TraceRefused: at the first line that is not as it should be.
        OSError: the file cannot be read.
    """
    with _opened(path) as file:
        lines = enumerate(_lines(path, file), 1)
        first = next(lines, None)
        if first is None:
            raise TraceRefused(f"{path}: a trace expected, an empty file found")
        if first[1].removeprefix("\ufeff") == AZURE_HEADER:
            arrivals = _read_azure(path, lines)
        elif first[1].startswith("{"):
            arrivals = _read_mooncake(path, itertools.chain((first,), lines))
        else:
            raise TraceRefused(
                f"{path}:1: {AZURE_HEADER!r} or a JSON object expected, {_seen(first[1])} found"
            )
        last_us = 0
        count = 0
        for number, arrival in arrivals:
            if arrival.at_us < last_us:
                raise TraceRefused(
                    f"{path}:{number}: an arrival not before that of the line above expected, one "
                    f"{last_us - arrival.at_us} µs earlier found"
                )
            last_us = arrival.at_us
            count += 1
            yield arrival
        if count == 0:
            raise TraceRefused(f"{path}: at least one arrival expected, none found")


def plan_trace(options: TraceOptions) -> Iterator[Planned]:
    """The load that a trace makes: texts of the same length, answers of exactly its length.

    The same options make the same load.

    Raises:
        ValueError: a speed, weight or bound that cannot be.
        TraceRefused, OSError: as ``read_trace``, while iterating.
    """
    if options.speed <= 0:
        raise ValueError(f"speed above 0 expected, {options.speed} found")
    unknown = set(options.languages) - {"en", "zh"}
    if unknown:
        raise ValueError(f"languages en and zh expected, {', '.join(sorted(unknown))} found")
    return _plan(options, shares(options.tenants), shares(options.languages))


def _plan(
    options: TraceOptions,
    tenants: tuple[list[str], list[int]],
    languages: tuple[list[str], list[int]],
) -> Iterator[Planned]:
    prompts = Prompts(options.seed)
    speed = options.speed
    deadline_ms = options.deadline_ms
    if deadline_ms is not None:
        deadline_ms = max(1, deadline_ms * speed.denominator // speed.numerator)
    end_us = None if options.minutes is None else options.minutes * 60_000_000
    arrivals = itertools.islice(read_trace(options.path), options.limit)
    for number, arrival in enumerate(arrivals):
        if end_us is not None and arrival.at_us >= end_us:
            return
        # Who shares the beginning of a conversation is the same client and writes the same
        # language. The first block alone would not do: often it is one system prompt for all.
        kin = arrival.blocks[:2] or (number,)
        drawn = random.Random(f"{options.seed}|{kin}")
        tenant = tenants[0][bisect_right(tenants[1], drawn.randrange(tenants[1][-1]))]
        language = cast(
            TextLanguage,
            languages[0][bisect_right(languages[1], drawn.randrange(languages[1][-1]))],
        )
        tokens = min(max(arrival.input_tokens, 1), PROMPT_TOKENS_MAX[language])
        yield Planned(
            at_us=arrival.at_us * speed.denominator // speed.numerator,
            tenant=tenant,
            language=language,
            text=_TraceText(
                prompts=prompts,
                language=language,
                tokens=tokens,
                blocks=arrival.blocks,
                number=number,
            ),
            max_tokens=min(max(arrival.output_tokens, 1), OUTPUT_TOKENS_CEILING),
            model=options.model,
            stream=options.stream,
            deadline_ms=deadline_ms,
            session=f"trace-{kin[-1]}" if arrival.blocks else None,
            cut=tokens < arrival.input_tokens,
        )


class _TraceText(Struct, frozen=True, kw_only=True):
    """Makes the text of one arrival when it is called."""

    prompts: Prompts
    language: TextLanguage
    tokens: int
    blocks: tuple[int, ...]
    number: int

    def __call__(self) -> str:
        if self.blocks:
            return self.prompts.blocks(self.language, self.tokens, self.blocks)
        return self.prompts.text(self.language, self.tokens, self.number)


def _read_azure(path: Path, lines: Iterable[tuple[int, str]]) -> Iterator[tuple[int, Arrival]]:
    first_ticks: int | None = None
    for number, line in lines:
        if not line:
            continue
        row = _AZURE_ROW.fullmatch(line)
        if row is None:
            raise TraceRefused(f"{path}:{number}: {_AZURE_EXPECTED} expected, {_seen(line)} found")
        year, month, day, hour, minute, second, fraction, context, generated = row.groups("0")
        try:
            days = date(int(year), int(month), int(day)).toordinal()
        except ValueError as error:
            raise TraceRefused(f"{path}:{number}: a date expected, {_seen(line)} found") from error
        if int(hour) > 23 or int(minute) > 59 or int(second) > 59:
            raise TraceRefused(f"{path}:{number}: a time of day expected, {_seen(line)} found")
        seconds = ((days * 24 + int(hour)) * 60 + int(minute)) * 60 + int(second)
        # Ticks of 100 ns: the first arrival must be subtracted before anything is rounded.
        ticks = seconds * 10_000_000 + int(fraction.ljust(7, "0"))
        if first_ticks is None:
            first_ticks = ticks
        yield (
            number,
            Arrival(
                at_us=(ticks - first_ticks) // 10,
                input_tokens=int(context),
                output_tokens=int(generated),
            ),
        )


class _MooncakeRow(Struct, frozen=True):
    timestamp: Annotated[int, Meta(ge=0, le=10**12)]
    input_length: _Tokens
    output_length: _Tokens
    hash_ids: tuple[Annotated[int, Meta(ge=0)], ...]


_MOONCAKE_DECODER = msgspec.json.Decoder(_MooncakeRow)


def _read_mooncake(path: Path, lines: Iterable[tuple[int, str]]) -> Iterator[tuple[int, Arrival]]:
    first_ms: int | None = None
    for number, line in lines:
        if not line:
            continue
        try:
            row = _MOONCAKE_DECODER.decode(line)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise TraceRefused(
                f"{path}:{number}: timestamp, input_length, output_length and hash_ids expected, "
                f"{_seen(line)} found: {error}"
            ) from error
        blocks = -(-row.input_length // BLOCK_TOKENS)
        if len(row.hash_ids) != blocks:
            raise TraceRefused(
                f"{path}:{number}: {blocks} hash_ids expected for {row.input_length} tokens in "
                f"blocks of {BLOCK_TOKENS}, {len(row.hash_ids)} found"
            )
        if first_ms is None:
            first_ms = row.timestamp
        yield (
            number,
            Arrival(
                at_us=(row.timestamp - first_ms) * 1000,
                input_tokens=row.input_length,
                output_tokens=row.output_length,
                blocks=row.hash_ids,
            ),
        )


@contextmanager
def _opened(path: Path) -> Generator[IO[bytes]]:
    with path.open("rb") as plain:
        if plain.read(2) != b"\x1f\x8b":
            plain.seek(0)
            yield plain
            return
        plain.seek(0)
        with gzip.GzipFile(fileobj=plain) as unpacked:
            yield cast(IO[bytes], unpacked)


def _lines(path: Path, file: IO[bytes]) -> Iterator[str]:
    for number in itertools.count(1):
        try:
            line = file.readline(_LINE_BYTES_MAX)
            text = line.decode()
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise TraceRefused(f"{path}:{number}: whole gzip data expected: {error}") from error
        except UnicodeDecodeError as error:
            raise TraceRefused(f"{path}:{number}: UTF-8 text expected: {error}") from error
        if not line:
            return
        if len(line) == _LINE_BYTES_MAX and not line.endswith(b"\n"):
            raise TraceRefused(
                f"{path}:{number}: a line of at most {_LINE_BYTES_MAX} bytes expected, more found"
            )
        yield text.rstrip("\r\n")


def _seen(line: str) -> str:
    return repr(line if len(line) <= 80 else f"{line[:77]}...")
