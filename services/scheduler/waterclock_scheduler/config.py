"""Settings: ``[scheduler]``, ``[pools.<name>]`` and ``[ladder]`` of the mesh's configuration."""

import re
from typing import Annotated, Literal

from msgspec import Meta, Struct, field

from waterclock_proto.names import NAME_PATTERN, Label, Language
from waterclock_scheduler.limits import BACKLOG_CEILING, LEASE_MS_MIN

PolicyName = Literal["fcfs", "sjf", "edf"]
Positive = Annotated[int, Meta(ge=1, le=10**9)]
NotNegative = Annotated[int, Meta(ge=0, le=10**9)]
Permille = Annotated[int, Meta(ge=0, le=1000)]


class PoolSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[pools.<name>]``: which requests wait together, and in which order they go."""

    languages: tuple[Language, ...] = ()
    """What it is for. Empty: whatever no other pool is for."""
    models: tuple[Label, ...] = ()
    """What its workers serve. Empty: every model."""
    policy: PolicyName = "fcfs"
    default: bool = False
    """Takes what no pool is for: unknown languages above all."""
    tiers_first: bool = False
    """Higher tiers go first whatever the policy says; the policy orders within a tier. A lower
    tier then waits as long as a higher one is waiting: only its deadline bounds that."""
    backlog_max: Annotated[int, Meta(ge=1, le=BACKLOG_CEILING)] = 10_000
    """Waiting requests; more are refused with ``backlog_full``."""


class ServiceTime(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Predicted execution time: ``base_us`` + tokens × microseconds a token."""

    base_us: NotNegative = 20_000
    prompt_us_per_token: NotNegative = 100
    output_us_per_token: NotNegative = 10_000
    output_tokens_default: Positive = 256
    """Predicted for a tenant of which nothing has completed yet."""


class LadderSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[ladder]``: what is shed, at which depth. A depth is waiting requests for each live worker.

    A rung is climbed when the depth is above its ``above`` for ``rise_ms``, and left when the
    depth has been at or below its ``below`` for ``dwell_ms``, one rung at a time.
    """

    batch_cap_above: NotNegative = 5
    batch_cap_below: NotNegative = 3
    speculation_off_above: NotNegative = 10
    speculation_off_below: NotNegative = 6
    refuse_above: NotNegative = 15
    refuse_below: NotNegative = 9
    batch_cap: Positive = 4
    """Requests in flight for each worker from the first rung on; on the ground its slots count."""
    rise_ms: NotNegative = 500
    """A burst that is gone sooner sheds nothing."""
    dwell_ms: NotNegative = 2_000
    retry_after_ms_min: Positive = 1_000
    retry_after_ms_max: Positive = 60_000
    """Also what is said when nothing has been completed lately."""
    drain_window_ms: Positive = 10_000
    """Over which completions are counted to say when to come back."""

    def __post_init__(self) -> None:
        rungs = (
            ("batch_cap", self.batch_cap_below, self.batch_cap_above),
            ("speculation_off", self.speculation_off_below, self.speculation_off_above),
            ("refuse", self.refuse_below, self.refuse_above),
        )
        for name, below, above in rungs:
            if below >= above:
                raise ValueError(
                    f"{name}_below: expected less than {name}_above ({above}), found {below};"
                    " equal thresholds would make the ladder swing"
                )
        if not self.batch_cap_above < self.speculation_off_above < self.refuse_above:
            raise ValueError(
                "batch_cap_above < speculation_off_above < refuse_above expected, found"
                f" {self.batch_cap_above}, {self.speculation_off_above}, {self.refuse_above}"
            )
        if self.retry_after_ms_min > self.retry_after_ms_max:
            raise ValueError(
                f"retry_after_ms_min: expected at most retry_after_ms_max"
                f" ({self.retry_after_ms_max}), found {self.retry_after_ms_min}"
            )


class SchedulerSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[scheduler]``."""

    tiers: tuple[Label, ...] = ("gold", "standard")
    """From the highest down; one that is not named comes last. For pools with ``tiers_first``."""
    lease_ms: Annotated[int, Meta(ge=LEASE_MS_MIN, le=3_600_000)] = 3_000
    """A worker that was silent for so long has lost what it had."""
    attempts_max: Annotated[int, Meta(ge=1, le=100)] = 3
    """A request that was lost so often has failed."""
    overdue_grace_ms: Positive = 5_000
    """An attempt without an end so long after its deadline is lost, though its worker lives."""
    language_permille_min: Permille = 300
    """Less certain than this counts as undetermined: the default pool takes it."""
    snapshot_interval_s: Positive = 30
    standby: bool = False
    """Wait until no other scheduler is heard before being elected. Set it for the second one."""
    takeover_ms: Annotated[int, Meta(ge=1_000, le=600_000)] = 3_000
    """A standby takes over after so long without a pulse."""
    estimate: ServiceTime = ServiceTime()
    estimates: dict[str, ServiceTime] = {}
    """By model, where one differs: ``[scheduler.estimates.<model>]``."""


class Settings(Struct, frozen=True, kw_only=True):
    """All that the scheduler decides by."""

    scheduler: SchedulerSettings = SchedulerSettings()
    ladder: LadderSettings = LadderSettings()
    pools: dict[str, PoolSettings] = field(
        default_factory=lambda: {"default": PoolSettings(default=True)}
    )
    """In the order of the file, which is the order in which they are asked."""

    def estimate(self, model: str) -> ServiceTime:
        return self.scheduler.estimates.get(model, self.scheduler.estimate)


def mistakes_of(pools: dict[str, PoolSettings]) -> list[str]:
    """What is wrong with the pools together; empty if nothing is."""
    found = [
        f"[pools.{name!r}]: expected a name that matches {NAME_PATTERN}"
        for name in pools
        if re.fullmatch(NAME_PATTERN, name) is None
    ]
    defaults: dict[str, str] = {}
    for name, pool in pools.items():
        if not pool.default:
            continue
        for model in pool.models or ("",):
            if model in defaults:
                found.append(
                    f"[pools.{name}] default: {defaults[model]!r} is the default pool"
                    f" {f'of {model!r}' if model else 'already'}; expected one for each model"
                )
            defaults[model] = name
    for name, pool in pools.items():
        found += [
            f"[pools.{name}] models: {model!r} has no default pool; set default = true in one of"
            " its pools, or requests of an unknown language go nowhere"
            for model in pool.models
            if "" not in defaults and model not in defaults
        ]
    if not defaults:
        found.append("[pools]: expected a pool with default = true, found none")
    return list(dict.fromkeys(found))
