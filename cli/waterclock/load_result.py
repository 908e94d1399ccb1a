"""What a load found, and how people read it."""

from collections.abc import Mapping, Sequence
from typing import Final, Literal

import msgspec
from msgspec import Struct

LOST_NAMED_MAX: Final = 1_000
"""How many lost requests a result names; the count is always of all."""
PERMILLES: Final = (500, 900, 950, 990, 999)


class Quantiles(Struct, frozen=True, kw_only=True):
    """Durations in microseconds: nearest-rank percentiles, each one that was measured."""

    count: int
    min_us: int
    p50_us: int
    p90_us: int
    p95_us: int
    p99_us: int
    p999_us: int
    max_us: int
    mean_us: int
    """Rounded down."""


class Group(Struct, frozen=True, kw_only=True):
    """A part of the load: one tenant, phase or language."""

    sent: int
    outcomes: dict[str, int]
    latency: Quantiles | None
    first_token: Quantiles | None
    queue: Quantiles | None


class LoadResult(Struct, frozen=True, kw_only=True):
    """What a load found. Integers and names only; no text of a prompt or an answer."""

    mode: Literal["open", "closed"]
    run: str
    begun_us: int
    """UTC."""
    sending_us: int
    """First to last send."""
    duration_us: int
    """First send to last end."""
    sent: int
    unsent: int
    """Planned and not sent, because a bound came first."""
    stopped_by: Literal["end of plan", "duration", "request", "error"]
    error: str = ""
    """Why sending ended, if by an error."""
    outcomes: dict[str, int]
    """All sent requests, each once: the outcomes of the protocol, and ``lost``, ``not_stored``,
    ``gone``, ``invalid`` (not sent, because it breaks the protocol) and ``error``."""
    reasons: dict[str, int]
    """Of what was rejected or failed."""
    lost: list[str]
    """``tenant/id`` of requests without an end, at most ``LOST_NAMED_MAX`` of them."""
    recovered: int
    """Ended only after their outcome was asked for again."""
    receipts: dict[str, int]
    """Requests by the outcome in their first receipt; ``missing`` where none came."""
    receipts_doubted: int
    restarted: int
    """Requests of which an attempt was lost after it had sent text."""
    mended: int
    """Streams whose final had text that no delta had brought by then."""
    prompts_cut: int
    resent: int
    gaps: int
    finals_repeated: int
    deadlines_missed: int
    """Completed, and seen here later than their deadline after the send."""
    output_tokens: int
    sent_milli_per_s: int
    """Sends in 1,000 seconds, over ``sending_us``."""
    completed_milli_per_s: int
    """Over ``duration_us``."""
    latency: Quantiles | None
    """Intended send → final, of what was completed."""
    latency_from_send: Quantiles | None
    """Actual send → final, of what was completed."""
    first_token: Quantiles | None
    """Intended send → first delta, of what was completed and streamed."""
    receipt: Quantiles | None
    """Actual send → receipt, of all that got one."""
    lateness: Quantiles | None
    """Intended → actual send."""
    queue: Quantiles | None
    """The mesh's queue clock, of what was completed."""
    execution: Quantiles | None
    """The mesh's execution clock, of what was completed."""
    groups: dict[str, Group]
    """``tenant:…``, ``phase:…``, ``language:…``, ``tier:…``, wherever there are several."""
    problems: list[str]
    """What must not be, in words. Refusals are no problem; a missing answer is."""

    def to_json(self) -> bytes:
        """As one JSON object."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2)


def quantiles(values: Sequence[int]) -> Quantiles | None:
    """The distribution of durations in microseconds; None if there are none.

    Nearest rank: the p-th percentile of n values is the ceil(p·n/100)-th smallest.
    """
    if not values:
        return None
    ordered = sorted(values)
    count = len(ordered)
    p50, p90, p95, p99, p999 = (
        ordered[max(-(-permille * count // 1000), 1) - 1] for permille in PERMILLES
    )
    return Quantiles(
        count=count,
        min_us=ordered[0],
        p50_us=p50,
        p90_us=p90,
        p95_us=p95,
        p99_us=p99,
        p999_us=p999,
        max_us=ordered[-1],
        mean_us=sum(ordered) // count,
    )


def problems_of(result: LoadResult) -> list[str]:
    """What must not be, in words."""
    outcomes = result.outcomes
    found = (
        (outcomes.get("lost", 0), "requests have no end"),
        (outcomes.get("gone", 0), "requests ended, and their answers were gone"),
        (outcomes.get("not_stored", 0), "requests were not acknowledged by the bus"),
        (outcomes.get("error", 0), "requests ended with the producer"),
        (outcomes.get("invalid", 0), "requests break the protocol and were not sent"),
        (outcomes.get("failed", 0), "requests failed"),
        (result.receipts.get("missing", 0), "requests have no receipt"),
        (result.receipts_doubted, "receipts contradict what was submitted"),
    )
    problems = [f"{count:,} {what}" for count, what in found if count]
    if result.stopped_by == "error":
        problems.append(f"sending stopped: {result.error}")
    return problems


def render_load(result: LoadResult) -> str:
    """The result for people: lines of plain text."""
    completed = result.outcomes.get("completed", 0)
    lines = [
        f"{result.mode} loop, run {result.run}",
        f"  {'sent':<10} {result.sent:,} in {_seconds(result.sending_us)}: "
        + _rate(result.sent_milli_per_s),
        f"  {'completed':<10} {completed:,}: {_rate(result.completed_milli_per_s)}",
        f"  {'tokens':<10} {result.output_tokens:,} of output",
        _listed("outcomes", result.outcomes),
    ]
    if result.reasons:
        lines.append(_listed("reasons", result.reasons))
    lines.append(_listed("receipts", result.receipts))
    if result.unsent:
        lines.append(f"  {'unsent':<10} {result.unsent:,}, stopped by {result.stopped_by}")
    events = {
        "recovered": result.recovered,
        "restarted": result.restarted,
        "mended": result.mended,
        "resent": result.resent,
        "gaps": result.gaps,
        "prompts cut": result.prompts_cut,
        "deadlines missed": result.deadlines_missed,
    }
    if any(events.values()):
        lines.append(_listed("events", {name: n for name, n in events.items() if n}))
    lines.append("")
    lines.append(_head("milliseconds"))
    for name, of in (
        ("latency", result.latency),
        ("  from the actual send", result.latency_from_send),
        ("first token", result.first_token),
        ("receipt", result.receipt),
        ("queue clock", result.queue),
        ("execution clock", result.execution),
        ("lateness of the sender", result.lateness),
    ):
        if of is not None:
            lines.append(_row(name, of))
    if result.groups:
        lines += ["", _head("latency by")]
        for name, group in result.groups.items():
            lines.append(
                _row(name, group.latency) if group.latency else f"{name:<24} none completed"
            )
    lines.append("")
    lines += [f"PROBLEM: {problem}" for problem in result.problems] or ["No problem found."]
    if result.lost:
        lines.append(f"lost: {', '.join(result.lost[:20])}{' …' if len(result.lost) > 20 else ''}")
    return "\n".join(lines) + "\n"


def milliseconds(duration_us: int) -> str:
    """``12.345``, exactly."""
    sign = "-" if duration_us < 0 else ""
    return f"{sign}{abs(duration_us) // 1000:,}.{abs(duration_us) % 1000:03d}"


def _seconds(duration_us: int) -> str:
    return f"{duration_us // 1_000_000:,}.{duration_us % 1_000_000 // 1000:03d} s"


def _rate(milli_per_s: int) -> str:
    return f"{milli_per_s // 1000:,}.{milli_per_s % 1000 // 100}/s"


def _listed(name: str, counts: Mapping[str, int]) -> str:
    return f"  {name:<10} " + (", ".join(f"{n:,} {what}" for what, n in counts.items()) or "none")


def _head(name: str) -> str:
    columns = ("count", "p50", "p90", "p95", "p99", "p99.9", "max")
    return f"{name:<24}" + "".join(f"{column:>12}" for column in columns)


def _row(name: str, of: Quantiles) -> str:
    values = (of.p50_us, of.p90_us, of.p95_us, of.p99_us, of.p999_us, of.max_us)
    return f"{name:<24}{of.count:>12,}" + "".join(f"{milliseconds(v):>12}" for v in values)
