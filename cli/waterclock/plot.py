"""A picture of both clocks over time, for people; the numbers are in the report."""

# pyright: reportUnknownMemberType=false
# The library's annotations are partial; what is drawn is looked at and not computed with.

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from msgspec import Struct

mpl.use("Agg")
from matplotlib import pyplot as plt  # the backend is chosen first
from matplotlib.ticker import LogLocator, NullFormatter

QUEUE_COLOUR = "#c2410c"
EXEC_COLOUR = "#1d4ed8"


class Point(Struct, frozen=True):
    """One finished request."""

    arrival_us: int
    queue_clock_us: int
    exec_clock_us: int


class Phase(Struct, frozen=True):
    """A stretch of time with a name, such as the burst."""

    name: str
    start_us: int
    end_us: int


def plot_clocks(
    points: Sequence[Point],
    phases: Sequence[Phase],
    path: Path,
    *,
    title: str,
    threshold_ms: int | None = None,
) -> None:
    """Write a PNG: every request under both clocks, and the P99 of each second.

    Raises:
        ValueError: no points.
    """
    if not points:
        raise ValueError("expected at least one finished request to draw, found none")
    start_us = min(point.arrival_us for point in points)
    seconds = [(point.arrival_us - start_us) / 1e6 for point in points]
    figure, axes = plt.subplots(figsize=(11, 5.5), dpi=130)
    for name, colour, values_us in (
        ("queue clock: arrival → end", QUEUE_COLOUR, [p.queue_clock_us for p in points]),
        ("execution clock: execution start → end", EXEC_COLOUR, [p.exec_clock_us for p in points]),
    ):
        values_ms = [value / 1000 for value in values_us]
        axes.scatter(seconds, values_ms, s=7, alpha=0.28, color=colour, linewidths=0)
        by_second: dict[int, list[float]] = {}
        for second, value in zip(seconds, values_ms, strict=True):
            by_second.setdefault(int(second), []).append(value)
        line = [(second + 0.5, _p99(values)) for second, values in sorted(by_second.items())]
        axes.plot(
            *zip(*line, strict=True), color=colour, linewidth=2, label=f"P99 a second, {name}"
        )
    for phase in phases:
        begin, end = (phase.start_us - start_us) / 1e6, (phase.end_us - start_us) / 1e6
        if phase.name == "burst":
            axes.axvspan(begin, end, color="#fde68a", alpha=0.45, zorder=0)
        axes.text(
            (begin + end) / 2, 1.01, phase.name, ha="center", transform=axes.get_xaxis_transform()
        )
    if threshold_ms is not None:
        axes.axhline(threshold_ms, color="#444444", linestyle="--", linewidth=1)
        axes.text(0, threshold_ms, f" {threshold_ms:,} ms", va="bottom", color="#444444")
    axes.set_yscale("log")
    axes.set_xlabel("arrival, seconds from the first request")
    axes.set_ylabel("latency, ms (log)")
    axes.set_title(title, pad=22, loc="left", fontweight="bold")
    axes.grid(visible=True, which="major", alpha=0.25)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.11), ncols=2, frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def _p99(values: Sequence[float]) -> float:
    """Nearest rank."""
    ordered = sorted(values)
    return ordered[-(-99 * len(ordered) // 100) - 1]
