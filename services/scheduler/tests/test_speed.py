"""How many requests pass through fold and decisions in a second; asserts what it computed."""

import sys
import time

import pytest

from waterclock_proto.events import Dispatched
from waterclock_scheduler.config import LadderSettings, PoolSettings

from .tape_model import Model, settings

REQUESTS = 4_000
BATCH = 32
BACKLOG = 8_000


@pytest.mark.bench
@pytest.mark.parametrize(
    ("policy", "backlog"),
    [("fcfs", 0), ("edf", 0), ("sjf", BACKLOG)],
)
def test_requests_per_second(policy: str, backlog: int) -> None:
    """admitted → enqueued → dispatched → completed, own events read back, in batches of 32.

    ``backlog`` requests wait all the time and are never served: queues cost by their length.
    """
    high = LadderSettings(batch_cap_above=10**6, speculation_off_above=10**7, refuse_above=10**8)
    pool = PoolSettings(default=True, policy=policy, backlog_max=BACKLOG * 2)  # pyright: ignore[reportArgumentType]  # of the table
    model = Model(settings({"main": pool}, high))
    for number in range(backlog):
        model.admit(f"waits-{number}", output_tokens_max=90)
        if number % 500 == 499:
            model.turn()
    model.turn()
    assert model.board.pools["main"].waiting == backlog
    # As many slots as a batch is long: each batch fills them, and the backlog stays.
    worker = model.start_worker(slots=BATCH)

    spent_ns = 0
    completed = 0
    number = 0
    while completed < REQUESTS:
        for _ in range(BATCH):
            model.admit(f"r{number}", output_tokens_max=1)
            number += 1
        started_ns = time.perf_counter_ns()
        model.beat(worker)
        model.read()
        model.give_features()
        events = model.decide()
        spent_ns += time.perf_counter_ns() - started_ns
        assert sum(isinstance(event, Dispatched) for event in events) == BATCH
        while model.in_transit:
            model.deliver()
        while worker.running:
            model.finish(worker)
        started_ns = time.perf_counter_ns()
        completed += model.read()
        spent_ns += time.perf_counter_ns() - started_ns
    assert completed == number == REQUESTS
    assert len(model.state.requests) == backlog
    assert model.board.pools["main"].waiting == backlog
    sys.stdout.write(f"\n{policy}, {backlog} waiting: {REQUESTS * 10**9 // spent_ns} requests/s\n")
