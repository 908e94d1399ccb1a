"""Orders of a queue."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from waterclock_proto.events import Dispatched
from waterclock_scheduler.config import PoolSettings
from waterclock_scheduler.policies import POLICIES, Waiting, expired, in_order, sort_key

from .tape_model import Model, settings

TIERS = ("gold", "standard")


def waiting(
    name: str,
    *,
    arrival: int = 0,
    deadline: int = 1000,
    service: int = 10,
    tier: str = "standard",
    tenant: str = "t",
) -> Waiting:
    return Waiting(
        tenant=tenant,
        id=name,
        tier=tier,
        arrival_us=arrival,
        deadline_us=deadline,
        service_us=service,
    )


QUEUE = [
    waiting("a", arrival=1, deadline=900, service=30),
    waiting("b", arrival=2, deadline=500, service=20),
    waiting("c", arrival=3, deadline=700, service=10, tier="gold"),
    waiting("d", arrival=4, deadline=100, service=5, tier="gold"),
]


@pytest.mark.parametrize(
    ("policy", "tiers", "now_us", "expected"),
    [
        pytest.param("fcfs", (), 0, "abcd", id="first come, first served"),
        pytest.param("sjf", (), 0, "dcba", id="shortest job first"),
        pytest.param("edf", (), 0, "dbca", id="earliest deadline first"),
        pytest.param("fcfs", TIERS, 0, "cdab", id="gold first, then by arrival"),
        pytest.param("edf", TIERS, 0, "dcba", id="gold first, then by deadline"),
        pytest.param("edf", (), 99, "dbca", id="just before a deadline"),
        pytest.param("edf", (), 100, "bca", id="expired work never sorts first"),
        pytest.param("sjf", TIERS, 500, "ca", id="nor anywhere"),
        pytest.param("fcfs", ("silver",), 0, "abcd", id="tiers that are not named are alike"),
    ],
)
def test_orders(policy: str, tiers: tuple[str, ...], now_us: int, expected: str) -> None:
    found = in_order(QUEUE, POLICIES[policy], tiers, now_us=now_us)
    assert "".join(item.id for item in found) == expected


@pytest.mark.parametrize("policy", list(POLICIES))
def test_ties_go_by_arrival_then_by_tenant_then_by_id(policy: str) -> None:
    same: dict[str, Any] = {"arrival": 5, "deadline": 50, "service": 5}
    if policy == "fcfs":
        queue = [waiting("x", **same), waiting("a", tenant="u", **same)]
    else:
        queue = [waiting("z", arrival=4, deadline=50, service=5), waiting("x", **same)]
        queue.append(waiting("a", tenant="u", **same))
    queue += [waiting("y", **same)]
    expected = sorted(queue, key=lambda item: (item.arrival_us, item.tenant, item.id))
    for turned in (queue, queue[::-1]):
        assert in_order(turned, POLICIES[policy], (), now_us=0) == expected


WAITING = st.builds(
    waiting,
    st.text("abc", min_size=1, max_size=3),
    arrival=st.integers(0, 5),
    deadline=st.integers(0, 20),
    service=st.integers(0, 5),
    tier=st.sampled_from(["gold", "standard", "bronze"]),
    tenant=st.sampled_from(["t", "u"]),
)


@given(
    st.lists(WAITING, unique_by=lambda item: (item.tenant, item.id), max_size=20),
    st.sampled_from(list(POLICIES)),
    st.sampled_from([(), TIERS]),
    st.integers(0, 20),
)
def test_the_order_is_total_and_nobody_expired_is_in_it(
    queue: list[Waiting], policy: str, tiers: tuple[str, ...], now_us: int
) -> None:
    found = in_order(queue, POLICIES[policy], tiers, now_us=now_us)
    keys = [sort_key(item, POLICIES[policy], tiers) for item in found]
    assert keys == sorted(keys)
    assert len(set(keys)) == len(keys)
    assert sorted(item.id for item in found) == sorted(
        item.id for item in queue if not expired(item.deadline_us, now_us=now_us)
    )


@given(
    st.lists(
        st.tuples(
            st.sampled_from([50, 500, 900]),
            st.integers(1, 400),
            st.sampled_from(["gold", "standard"]),
            st.integers(0, 100),
        ),
        max_size=25,
    ),
    st.sampled_from(list(POLICIES)),
    st.booleans(),
)
def test_the_scheduler_serves_in_the_order_that_the_plain_sort_gives(
    requests: list[tuple[int, int, str, int]], policy: Any, tiers_first: bool
) -> None:
    pools = {"main": PoolSettings(default=True, policy=policy, tiers_first=tiers_first)}
    model = Model(settings(pools))
    for number, (deadline_ms, tokens, tier, gap_ms) in enumerate(requests):
        model.admit(f"r{number}", deadline_ms=deadline_ms, output_tokens_max=tokens, tier=tier)
        model.wait(gap_ms)
    model.turn()
    queue = [
        waiting(
            entry.key[1],
            tenant=entry.key[0],
            arrival=entry.request.admitted.arrival.wall_us,
            deadline=entry.request.admitted.deadline_us,
            service=entry.service_us,
            tier=entry.request.admitted.tier,
        )
        for entry in model.board.entries.values()
    ]
    model.wait(300)
    expected = in_order(queue, POLICIES[policy], TIERS if tiers_first else (), now_us=model.now_us)
    model.start_worker(slots=100)
    found = [event.id for event in model.turn() if isinstance(event, Dispatched)]
    assert found == [item.id for item in expected]
