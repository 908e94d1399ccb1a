"""Named orders of a queue: pure keys, smallest first.

Every policy gives one integer for a waiting request. Ties go by arrival, then by tenant and
id, so the order of any two requests is fixed by what stands on the tape. A key does not
depend on the moment, so a queue needs no re-sorting while time passes; what time does change,
that work expires, is settled before anything is ordered: expired work is not in the queue.

* ``fcfs``: by arrival.
* ``sjf``: by predicted service time. Long work may starve under load: only its deadline bounds
  its wait.
* ``edf``: by deadline. In overload it spends itself on work that is nearly late already.
"""

from collections.abc import Callable, Iterable
from typing import Final, TypeAlias

from msgspec import Struct

SortKey: TypeAlias = tuple[int, int, int, str, str]
"""(tier rank, what the policy says, arrival, tenant, id)."""


class Waiting(Struct, frozen=True, kw_only=True):
    """What an order may depend on; all of it stands on the tape."""

    tenant: str
    id: str
    tier: str
    arrival_us: int
    deadline_us: int
    service_us: int
    """Predicted execution time."""


Policy: TypeAlias = Callable[[Waiting], int]


def fcfs(waiting: Waiting) -> int:
    """First come, first served."""
    return waiting.arrival_us


def sjf(waiting: Waiting) -> int:
    """Shortest predicted job first."""
    return waiting.service_us


def edf(waiting: Waiting) -> int:
    """Earliest deadline first."""
    return waiting.deadline_us


POLICIES: Final[dict[str, Policy]] = {"fcfs": fcfs, "sjf": sjf, "edf": edf}


def sort_key(waiting: Waiting, policy: Policy, tiers: tuple[str, ...]) -> SortKey:
    """Where the request stands. ``tiers`` from the highest down; empty if they do not matter."""
    return (
        tiers.index(waiting.tier) if waiting.tier in tiers else len(tiers),
        policy(waiting),
        waiting.arrival_us,
        waiting.tenant,
        waiting.id,
    )


def in_order(
    queue: Iterable[Waiting], policy: Policy, tiers: tuple[str, ...], *, now_us: int
) -> list[Waiting]:
    """The whole queue as it would be served at ``now_us``, without what has expired by then.

    What the scheduler keeps sorted piece by piece must come out like this; so does whoever
    replays an order from the tape.
    """
    alive = [waiting for waiting in queue if not expired(waiting.deadline_us, now_us=now_us)]
    return sorted(alive, key=lambda waiting: sort_key(waiting, policy, tiers))


def expired(deadline_us: int, *, now_us: int) -> bool:
    """A deadline is the first moment at which the answer is worthless."""
    return now_us >= deadline_us
