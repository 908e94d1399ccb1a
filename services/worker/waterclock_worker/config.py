"""``[workers.<name>]``: what a worker runs on, and how much at once."""

from typing import Literal

from msgspec import Struct

from waterclock_proto.names import Label, Name


class WorkerSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One worker process serves one pool with one engine."""

    pool: Name
    models: tuple[Label, ...] = ()
    """Names to serve; empty means the profile's own."""
    engine: Literal["simulated"] = "simulated"
    profile: Label = "a10g-8b"
    """Of the simulated engine: what its step times look like."""
    slots: int = 8
    """How many requests it takes at once while nothing is shed."""
    seed: int = 0
    speed_permille: int = 1000
    """Of the simulated engine: 10,000 makes every step take a tenth of its time."""
    drain_s: float = 8.0
    """From SIGTERM: how long running requests may go on before they are left to another worker."""

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise ValueError(f"slots: expected at least 1, found {self.slots}")
        if not 1 <= self.speed_permille <= 10_000_000:
            raise ValueError(f"speed_permille: expected 1 to 10000000, found {self.speed_permille}")
