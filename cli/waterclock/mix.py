"""A synthetic load: several tenants, two languages, phases of different rate, from a seed.

The default is a day in small: steady traffic, a burst of three times the rate, recovery. It needs
no data from elsewhere.
"""

import math
import random
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Final, Literal, cast

from msgspec import Struct, field

from waterclock.arrivals import PROMPT_TOKENS_MAX, Planned, Prompts, TextLanguage, shares
from waterclock_proto.requests import OUTPUT_TOKENS_CEILING


class TenantShare(Struct, frozen=True, kw_only=True):
    """One tenant of the mix."""

    name: str
    weight: int = 1
    tier: str = ""
    """For grouping results only; what a tenant is entitled to, the mesh knows."""
    languages: Mapping[str, int] = field(default_factory=lambda: {"en": 1})
    """Weights of ``en`` and ``zh``."""
    deadline_ms: int | None = None


class Phase(Struct, frozen=True, kw_only=True):
    """A time in which the rate is the same."""

    name: str
    duration_ms: int
    rate_permille: int = 1000
    """Of the mix's rate: 3000 is three times as much."""


class Spread(Struct, frozen=True, kw_only=True):
    """A distribution of whole numbers by its quantiles, straight between them."""

    points: tuple[tuple[int, int], ...]
    """(permille, value), rising in both, from 0 to 1000 permille."""

    def draw(self, source: random.Random) -> int:
        """One value."""
        at = source.randrange(1000 * _FINE)
        for (low, low_value), (high, high_value) in pairwise(self.points):
            if at < high * _FINE:
                part = at - low * _FINE
                return low_value + (high_value - low_value) * part // ((high - low) * _FINE)
        return self.points[-1][1]


_FINE: Final = 1000

PROMPT_TOKENS: Final = Spread(
    points=((0, 12), (250, 60), (500, 160), (750, 420), (900, 1100), (990, 2600), (1000, 4000))
)
OUTPUT_TOKENS: Final = Spread(
    points=((0, 4), (250, 30), (500, 90), (750, 200), (900, 380), (990, 700), (1000, 1200))
)
"""Chat-like: most are short, some are long, as in public traces of chat services."""

DEFAULT_TENANTS: Final = (
    TenantShare(name="acme", weight=2, tier="gold", languages={"en": 1, "zh": 1}),
    TenantShare(name="globex", weight=5, tier="standard", languages={"en": 4, "zh": 1}),
    TenantShare(name="initech", weight=3, tier="standard", languages={"en": 1, "zh": 3}),
)


def default_phases(
    *, steady_s: int = 60, burst_s: int = 30, recovery_s: int = 60, burst_times: int = 3
) -> tuple[Phase, ...]:
    """Steady, a burst, and as steady as before."""
    return (
        Phase(name="steady", duration_ms=steady_s * 1000),
        Phase(name="burst", duration_ms=burst_s * 1000, rate_permille=burst_times * 1000),
        Phase(name="recovery", duration_ms=recovery_s * 1000),
    )


class MixOptions(Struct, frozen=True, kw_only=True):
    """What the mix is made of. The same options make the same load."""

    rate_milli: int
    """Requests in 1,000 seconds, all tenants together, at 1000 permille."""
    tenants: Sequence[TenantShare] = DEFAULT_TENANTS
    phases: Sequence[Phase] = field(default_factory=default_phases)
    arrivals: Literal["poisson", "even"] = "poisson"
    prompt_tokens: Spread = PROMPT_TOKENS
    output_tokens: Spread = OUTPUT_TOKENS
    model: str | None = None
    stream_permille: int = 1000
    """How many of a thousand requests want deltas."""
    sessions: int = 0
    """How many sessions a tenant's requests are drawn from; 0 for none."""
    seed: int = 0


def plan_mix(options: MixOptions) -> Iterator[Planned]:
    """The load, in order of its due times.

    Raises:
        ValueError: a rate, weight, phase or distribution that cannot be.
    """
    if options.rate_milli < 1:
        raise ValueError(f"rate above 0 expected, {options.rate_milli} in 1000 s found")
    for phase in options.phases:
        if phase.duration_ms < 1 or phase.rate_permille < 0:
            raise ValueError(
                f"phase {phase.name}: a duration above 0 and a rate of 0 or more expected, "
                f"{phase.duration_ms} ms and {phase.rate_permille} permille found"
            )
    for name in ("prompt_tokens", "output_tokens"):
        _check(name, cast(Spread, getattr(options, name)))
    by_name = {tenant.name: tenant for tenant in options.tenants}
    if len(by_name) != len(options.tenants):
        raise ValueError("tenants of different names expected, a name twice found")
    tenants = shares({name: tenant.weight for name, tenant in by_name.items()})
    languages = {name: shares(tenant.languages) for name, tenant in by_name.items()}
    unknown = {name for tenant in options.tenants for name in tenant.languages} - {"en", "zh"}
    if unknown:
        raise ValueError(f"languages en and zh expected, {', '.join(sorted(unknown))} found")
    return _plan(options, by_name, tenants, languages)


def _plan(
    options: MixOptions,
    by_name: Mapping[str, TenantShare],
    tenants: tuple[list[str], list[int]],
    languages: Mapping[str, tuple[list[str], list[int]]],
) -> Iterator[Planned]:
    prompts = Prompts(options.seed)
    # A source for each thing that is drawn: another length distribution moves no arrival.
    who = random.Random(f"{options.seed}|who")
    long = random.Random(f"{options.seed}|long")
    for number, (at_us, phase) in enumerate(_arrivals(options)):
        tenant = by_name[tenants[0][bisect_right(tenants[1], who.randrange(tenants[1][-1]))]]
        names, sums = languages[tenant.name]
        language = cast(TextLanguage, names[bisect_right(sums, who.randrange(sums[-1]))])
        streamed = who.randrange(1000) < options.stream_permille
        session = who.randrange(options.sessions) if options.sessions else None
        tokens = options.prompt_tokens.draw(long)
        yield Planned(
            at_us=at_us,
            tenant=tenant.name,
            tier=tenant.tier,
            phase=phase.name,
            language=language,
            text=_MixText(
                prompts=prompts,
                language=language,
                tokens=min(tokens, PROMPT_TOKENS_MAX[language]),
                number=number,
            ),
            max_tokens=options.output_tokens.draw(long),
            model=options.model,
            stream=streamed,
            deadline_ms=tenant.deadline_ms,
            session=None if session is None else f"session-{session}",
            cut=tokens > PROMPT_TOKENS_MAX[language],
        )


class _MixText(Struct, frozen=True, kw_only=True):
    """Makes one prompt when it is called."""

    prompts: Prompts
    language: TextLanguage
    tokens: int
    number: int

    def __call__(self) -> str:
        return self.prompts.text(self.language, self.tokens, self.number)


def _arrivals(options: MixOptions) -> Iterator[tuple[int, Phase]]:
    source = random.Random(f"{options.seed}|when")
    begin_ns = 0
    for phase in options.phases:
        end_ns = begin_ns + phase.duration_ms * 1_000_000
        # Millionths of a request in a second; no memory crosses the border of a phase.
        rate_micro = options.rate_milli * phase.rate_permille
        if rate_micro:
            mean_ns = 1_000_000 * 1_000_000_000 // rate_micro
            at_ns = begin_ns
            while True:
                gap_ns = mean_ns
                if options.arrivals == "poisson":
                    gap_ns = math.floor(-math.log(1.0 - source.random()) * mean_ns)
                # One nanosecond at least, so that also an absurd rate comes to an end.
                at_ns += max(gap_ns, 1)
                if at_ns >= end_ns:
                    break
                yield at_ns // 1000, phase
        begin_ns = end_ns


def _check(name: str, spread: Spread) -> None:
    points = spread.points
    rising = all(a[0] < b[0] and a[1] <= b[1] for a, b in pairwise(points))
    if len(points) < 2 or points[0][0] != 0 or points[-1][0] != 1000 or not rising:
        raise ValueError(f"{name}: points rising from 0 to 1000 permille expected, {points} found")
    if not 1 <= points[0][1] <= points[-1][1] <= OUTPUT_TOKENS_CEILING:
        raise ValueError(
            f"{name}: values from 1 to {OUTPUT_TOKENS_CEILING} expected, "
            f"{points[0][1]} to {points[-1][1]} found"
        )
