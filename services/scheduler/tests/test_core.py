"""What the scheduler decides, case by case."""

from typing import Any

import pytest

from waterclock_proto.events import (
    AttemptLost,
    Cancelled,
    Dispatched,
    Enqueued,
    EventData,
    Expired,
    Failed,
    Rejected,
    RungChanged,
)
from waterclock_scheduler.board import Place, route
from waterclock_scheduler.config import LadderSettings, PoolSettings

from .tape_model import MODEL, Model, settings


def kinds(events: list[EventData]) -> list[str]:
    return [event.TYPE for event in events]


def only(kind: type[Any], events: list[EventData]) -> Any:
    (event,) = [event for event in events if isinstance(event, kind)]
    return event


def keep_hearing(model: Model, ms: int) -> list[EventData]:
    """Time passes; the bus is there, and live workers beat."""
    events: list[EventData] = []
    for _ in range(ms // 100):
        model.wait(100)
        model.board.hear(model.mono_ns)
        model.beat_all()
        events += model.turn()
    return events


def keep_deciding(model: Model, ms: int) -> list[EventData]:
    """The same, while nothing that is published arrives."""
    events: list[EventData] = []
    for _ in range(ms // 100):
        model.wait(100)
        model.board.hear(model.mono_ns)
        model.beat_all()
        events += model.decide()
    return events


def test_an_admitted_request_is_enqueued_and_dispatched_at_once() -> None:
    model = Model()
    worker = model.start_worker()
    admitted = model.admit("a")
    events = model.turn()
    assert kinds(events) == ["enqueued", "dispatched"]
    dispatched = only(Dispatched, events)
    assert (dispatched.attempt, dispatched.worker) == (1, worker.life)
    assert (dispatched.place, dispatched.depth, dispatched.policy) == (0, 1, "fcfs")
    assert dispatched.deadline_us == admitted.deadline_us
    assert dispatched.requests_sequence == admitted.requests_sequence
    model.finish(worker)
    assert model.read() == 1
    assert model.state.requests == {}
    assert model.state.running == {}
    model.check_board()


def test_nothing_is_decided_twice_while_own_events_are_on_their_way() -> None:
    model = Model()
    model.start_worker()
    model.admit("a")
    model.read()
    model.give_features()
    assert kinds(model.decide()) == ["enqueued", "dispatched"]
    assert model.decide() == []
    model.deliver()
    model.read()
    assert model.decide() == []
    model.deliver()
    model.read()
    assert model.decide() == []
    model.check_board()


def test_no_worker_gets_more_than_its_slots_and_the_freest_one_comes_first() -> None:
    model = Model()
    small = model.start_worker("small", slots=1)
    large = model.start_worker("large", slots=3)
    for number in range(6):
        model.admit(f"r{number}")
    given = [e.worker for e in model.turn() if isinstance(e, Dispatched)]
    assert given == [large.life, large.life, large.life, small.life]
    assert model.decide() == []
    model.finish(large)
    assert [e.worker for e in model.turn() if isinstance(e, Dispatched)] == [large.life]


def test_a_draining_worker_gets_nothing_new() -> None:
    model = Model()
    worker = model.start_worker()
    worker.draining = True
    model.beat(worker)
    model.admit("a")
    assert kinds(model.turn()) == ["enqueued"]
    worker.draining = False
    model.beat(worker)
    assert kinds(model.turn()) == ["dispatched"]


def test_requests_wait_for_a_worker_until_their_deadline() -> None:
    model = Model()
    model.admit("a", deadline_ms=500)
    assert kinds(model.turn()) == ["enqueued"]
    model.wait(499)
    assert model.turn() == []
    model.wait(1)
    (event,) = model.turn()
    assert isinstance(event, Expired)
    assert (event.attempt, event.worker, event.phase) == (0, "", "queued")
    assert model.state.requests == {}


def test_expired_work_is_ended_and_not_dispatched_when_a_slot_becomes_free() -> None:
    model = Model()
    for name, deadline_ms in (("late", 100), ("alive", 60_000)):
        model.admit(name, deadline_ms=deadline_ms)
    model.turn()
    model.wait(200)
    model.start_worker(slots=1)
    events = model.turn()
    assert kinds(events) == ["expired", "dispatched"]
    assert only(Dispatched, events).id == "alive"


@pytest.mark.parametrize("phase", ["before", "unread", "read", "waiting"])
def test_what_is_cancelled_before_it_runs_never_runs(phase: str) -> None:
    model = Model()
    if phase == "before":
        model.cancel("a")
    model.admit("a")
    model.read()
    if phase == "unread":
        model.cancel("a")
    if phase in ("read", "waiting"):
        model.give_features()
    if phase == "waiting":
        assert kinds(model.turn()) == ["enqueued"]
    if phase in ("read", "waiting"):
        model.cancel("a")
    model.start_worker()
    (event,) = model.turn()
    assert isinstance(event, Cancelled)
    assert (event.attempt, event.worker, event.phase) == (0, "", "queued")
    assert model.state.requests == {}
    model.check_board()


def test_a_cancel_while_it_runs_is_the_workers_until_the_worker_is_lost() -> None:
    model = Model()
    worker = model.start_worker()
    model.admit("a")
    model.turn()
    model.cancel("a")
    assert model.turn() == []
    worker.alive = False
    assert keep_hearing(model, 2_900) == []
    assert kinds(keep_hearing(model, 100)) == ["attempt_lost", "cancelled"]
    assert model.state.requests == {}


def test_a_cancel_counts_although_the_enqueued_is_still_on_its_way() -> None:
    model = Model()
    model.admit("a")
    model.read()
    model.give_features()
    assert kinds(model.decide()) == ["enqueued"]
    model.cancel("a")
    model.read()
    model.start_worker()
    assert kinds(model.decide()) == ["cancelled"]
    model.settle()


def test_a_cancel_that_is_too_old_does_not_count() -> None:
    model = Model()
    model.cancel("a")
    model.wait(600_001)
    model.admit("a")
    assert kinds(model.turn()) == ["enqueued"]


def test_a_silent_worker_loses_its_attempts_and_another_one_gets_them() -> None:
    model = Model()
    silent = model.start_worker("silent", slots=1)
    model.admit("a")
    model.turn()
    silent.alive = False
    other = model.start_worker("other", slots=1)
    events = keep_hearing(model, 3_000)
    assert kinds(events) == ["attempt_lost", "dispatched"]
    lost = only(AttemptLost, events)
    assert (lost.attempt, lost.worker, lost.reason, lost.pool) == (1, silent.life, "lease", "main")
    assert only(Dispatched, events).attempt == 2
    # What the lost one still says does not count any more.
    assert model.read() == 0
    model.finish(silent)
    assert model.read() == 0
    assert len(model.state.requests) == 1
    model.finish(other)
    assert model.read() == 1


def test_a_new_life_of_the_same_name_ends_the_old_one_at_once() -> None:
    model = Model()
    old = model.start_worker("w", slots=1)
    model.admit("a")
    model.turn()
    new = model.start_worker("w", slots=1)
    events = model.turn()
    assert kinds(events) == ["attempt_lost", "dispatched"]
    assert only(AttemptLost, events).reason == "restarted"
    assert only(Dispatched, events).worker == new.life
    assert not model.beat(old)
    model.check_board()


def test_a_worker_that_drained_and_left_lost_what_it_left() -> None:
    model = Model()
    worker = model.start_worker()
    model.admit("a")
    model.turn()
    worker.draining = True
    model.beat(worker)
    worker.alive = False
    assert only(AttemptLost, keep_hearing(model, 3_000)).reason == "drained"


def test_a_request_that_was_lost_too_often_has_failed() -> None:
    model = Model(settings(attempts_max=2))
    model.admit("a")
    model.turn()
    for attempt in (1, 2):
        worker = model.start_worker(f"w{attempt}")
        assert only(Dispatched, model.turn()).attempt == attempt
        worker.alive = False
        events = keep_hearing(model, 3_000)
    assert kinds(events) == ["attempt_lost", "failed"]
    failed = only(Failed, events)
    assert (failed.reason, failed.attempt, failed.worker) == ("attempts_exhausted", 0, "")
    assert model.state.requests == {}


def test_an_attempt_that_its_living_worker_forgot_is_lost_after_its_deadline() -> None:
    model = Model(settings(overdue_grace_ms=1_000))
    worker = model.start_worker()
    model.admit("a", deadline_ms=500)
    model.turn()
    worker.running.clear()
    assert keep_hearing(model, 1_400) == []
    assert kinds(keep_hearing(model, 100)) == ["attempt_lost", "expired"]
    assert model.state.running == {}


@pytest.mark.parametrize(
    "deafness",
    [
        pytest.param("loop", id="the loop stood still"),
        pytest.param("bus", id="nothing was heard at all"),
    ],
)
def test_no_lease_ends_because_the_scheduler_could_not_hear(deafness: str) -> None:
    model = Model()
    worker = model.start_worker()
    model.admit("a")
    model.turn()
    if deafness == "loop":
        model.wait(10_000)
    else:
        for _ in range(100):
            model.wait(100)
            assert model.decide() == []
    model.board.hear(model.mono_ns)
    assert model.decide() == []
    worker.alive = False
    assert keep_hearing(model, 2_900) == []
    assert kinds(keep_hearing(model, 200)) == ["attempt_lost"]


def test_a_new_leader_gives_lives_that_only_the_tape_knows_a_lease() -> None:
    model = Model()
    worker = model.start_worker()
    model.admit("a")
    model.turn()
    worker.alive = False
    model.start_scheduler(type(model.state)())
    assert keep_hearing(model, 2_900) == []
    assert kinds(keep_hearing(model, 200)) == ["attempt_lost"]


def test_a_new_leader_ends_old_lives_of_names_that_it_heard_before_it_was_elected() -> None:
    model = Model()
    model.start_worker("w")
    model.admit("a")
    model.turn()
    state = type(model.state)()
    model.start_scheduler(state)
    new = model.start_worker("w")
    model.board.losses.clear()
    model.board.adopt(model.mono_ns)
    events = model.turn()
    assert kinds(events) == ["attempt_lost", "dispatched"]
    assert only(Dispatched, events).worker == new.life


def test_a_new_leader_gives_nothing_to_workers_that_fell_silent_before_its_election() -> None:
    model = Model()
    model.start_worker("silent", slots=1)
    model.wait(60_000)
    heard = model.start_worker("heard", slots=1)
    model.admit("a")
    model.admit("b")
    model.board.adopt(model.mono_ns)
    assert [e.worker for e in model.turn() if isinstance(e, Dispatched)] == [heard.life]
    model.check_board()


def test_a_worker_that_comes_back_after_its_lease_gets_new_work() -> None:
    model = Model()
    worker = model.start_worker(slots=1)
    model.admit("a")
    model.turn()
    worker.alive = False
    keep_hearing(model, 3_000)
    worker.alive = True
    model.beat(worker)
    assert only(Dispatched, model.turn()).attempt == 2
    model.check_board()


def test_the_end_that_came_before_the_loss_counts() -> None:
    model = Model()
    worker = model.start_worker("slow", slots=1)
    model.admit("a")
    model.turn()
    worker.alive = False
    model.start_worker("other", slots=1)
    decided = keep_deciding(model, 3_000)
    # Nothing more is said about it before the loss is on the tape.
    assert kinds(decided) == ["attempt_lost"]
    # The worker was alive after all, and its end reaches the tape first.
    model.finish(worker)
    model.deliver()
    assert model.read() == 1
    assert model.turn() == []
    assert model.state.requests == {}
    assert model.state.running == {}
    model.check_board()


def test_a_dispatch_that_is_still_on_its_way_is_lost_when_it_has_arrived() -> None:
    model = Model()
    worker = model.start_worker("w", slots=1)
    model.admit("a", deadline_ms=1_000)
    model.read()
    model.give_features()
    assert kinds(model.decide()) == ["enqueued", "dispatched"]
    worker.alive = False
    assert keep_deciding(model, 20_000) == []
    assert kinds(model.turn()) == ["attempt_lost", "expired"]
    model.check_board()


def test_a_worker_that_came_back_before_the_dispatch_arrived_may_keep_it() -> None:
    model = Model()
    worker = model.start_worker("w", slots=1)
    model.admit("a")
    model.read()
    model.give_features()
    assert kinds(model.decide()) == ["enqueued", "dispatched"]
    worker.alive = False
    assert keep_deciding(model, 4_000) == []
    worker.alive = True
    model.beat(worker)
    assert model.turn() == []
    model.finish(worker)
    assert model.read() == 1
    model.check_board()


def test_losing_an_attempt_that_was_superseded_leaves_the_newer_one_alone() -> None:
    model = Model()
    first = model.start_worker("first", slots=1)
    model.admit("a")
    model.turn()
    first.alive = False
    second = model.start_worker("second", slots=1)
    # The loss never reaches the tape, and yet the next attempt does: a writer that crashed and
    # a bus that turned the order round can do that together.
    assert kinds(keep_deciding(model, 3_000)) == ["attempt_lost"]
    (_, loss) = model.in_transit[0]
    assert isinstance(loss, AttemptLost)
    model.store_dispatch("a", attempt=2, worker=second)
    model.start_scheduler(type(model.state)())
    assert sorted(model.state.running) == sorted([first.life, second.life])
    events = keep_hearing(model, 3_100)
    assert [(e.TYPE, e.attempt) for e in events if isinstance(e, AttemptLost)] == [
        ("attempt_lost", 1)
    ]
    assert kinds(events) == ["attempt_lost"]
    model.finish(second)
    assert model.read() == 1


def test_a_full_backlog_and_a_model_that_nobody_serves_are_refused() -> None:
    pools = {"main": PoolSettings(default=True, models=(MODEL,), backlog_max=2)}
    model = Model(settings(pools))
    for name in ("a", "b", "c"):
        model.admit(name)
    model.admit("d", model="other")
    events = model.turn()
    refused = {e.id: e for e in events if isinstance(e, Rejected)}
    assert {name: e.reason for name, e in refused.items()} == {
        "c": "backlog_full",
        "d": "unknown_model",
    }
    assert refused["c"].retry_after_ms == 60_000
    assert refused["c"].requests_sequence == 3
    assert refused["c"].number is None
    assert refused["d"].retry_after_ms is None
    assert sorted(key[1] for key in model.state.requests) == ["a", "b"]


def test_the_refusing_rung_refuses_what_comes_and_keeps_what_waits() -> None:
    ladder = LadderSettings(rise_ms=0, dwell_ms=100)
    model = Model(settings(ladder=ladder))
    worker = model.start_worker(slots=8)
    for number in range(8 + 16):
        model.admit(f"r{number}")
    events = model.turn()
    changed = only(RungChanged, events)
    assert (changed.rung_from, changed.rung_to, changed.batch_cap) == (0, 3, 4)
    assert changed.actions == ("batch_cap", "speculation_off", "refuse")
    assert (changed.depth, changed.workers, changed.in_flight) == (16, 1, 8)
    assert changed.retry_after_ms == 60_000
    model.admit("late")
    assert only(Rejected, model.turn()).reason == "load_shed"
    # Above the cap nothing is dispatched: 8 run, 4 may.
    for _ in range(4):
        model.finish(worker)
        assert model.turn() == []
    model.finish(worker)
    assert kinds(model.turn()) == ["dispatched"]
    model.check_board()
    # The tape's rung holds for the next leader.
    model.start_scheduler(type(model.state)())
    assert model.board.pools["main"].ladder.rung == 3


def test_retry_after_follows_what_was_completed() -> None:
    model = Model(settings(ladder=LadderSettings(rise_ms=0, retry_after_ms_min=1)))
    worker = model.start_worker(slots=100)
    for number in range(100):
        model.admit(f"r{number}")
    model.turn()
    for _ in range(50):
        model.finish(worker)
    model.read()
    for number in range(66):
        model.admit(f"s{number}")
    model.turn()
    assert model.board.pools["main"].waiting == 16
    model.admit("late")
    # 16 wait, 9 is where the rung is left, 50 ended in ten seconds: 7 · 10 s / 50.
    assert only(Rejected, model.turn()).retry_after_ms == 1_400


def test_work_for_two_models_does_not_wait_for_the_other_ones_worker() -> None:
    model = Model(settings({"main": PoolSettings(default=True)}))
    for name in ("a", "b"):
        model.admit(name, model="big")
        model.wait(1)
    model.admit("c", model="small")
    model.turn()
    model.start_worker("s", models=("small",))
    dispatched = only(Dispatched, model.turn())
    assert (dispatched.id, dispatched.place, dispatched.depth) == ("c", 2, 3)
    model.start_worker("both", models=("small", "big"), slots=1)
    assert only(Dispatched, model.turn()).id == "a"


@pytest.mark.parametrize(
    ("policy", "tiers_first", "expected"),
    [
        pytest.param("fcfs", False, ["a", "b", "c"], id="fcfs"),
        pytest.param("sjf", False, ["c", "a", "b"], id="sjf"),
        pytest.param("edf", False, ["b", "c", "a"], id="edf"),
        pytest.param("fcfs", True, ["b", "a", "c"], id="fcfs, gold first"),
    ],
)
def test_pools_serve_in_the_order_of_their_policy(
    policy: Any, tiers_first: bool, expected: list[str]
) -> None:
    pools = {"main": PoolSettings(default=True, policy=policy, tiers_first=tiers_first)}
    model = Model(settings(pools))
    model.admit("a", deadline_ms=90_000, output_tokens_max=50)
    model.wait(1)
    model.admit("b", deadline_ms=10_000, output_tokens_max=90, tier="gold")
    model.wait(1)
    model.admit("c", deadline_ms=50_000, output_tokens_max=20)
    model.turn()
    model.start_worker(slots=3)
    events = [e for e in model.turn() if isinstance(e, Dispatched)]
    assert [e.id for e in events] == expected
    assert [e.depth for e in events] == [3, 2, 1]


def test_the_prediction_learns_from_what_the_tenant_completed() -> None:
    model = Model()
    worker = model.start_worker()
    model.admit("a", output_tokens_max=1000)
    assert only(Enqueued, model.turn()).output_tokens_predicted == 256
    model.finish(worker, output_tokens=40)
    model.admit("b", output_tokens_max=1000)
    model.admit("c", output_tokens_max=1000, tenant="globex")
    events = {e.id: e for e in model.turn() if isinstance(e, Enqueued)}
    assert events["b"].output_tokens_predicted == 40
    assert events["b"].service_predicted_us == 20_000 + 10 * 100 + 40 * 10_000
    assert events["c"].output_tokens_predicted == 256


def test_a_language_hint_needs_no_body() -> None:
    pools = {
        "zh": PoolSettings(languages=("zh",)),
        "rest": PoolSettings(default=True),
    }
    model = Model(settings(pools))
    model.admit("a", hint="zh")
    model.read()
    assert model.board.take_unread(10, 100) == []
    enqueued = only(Enqueued, model.decide())
    assert (enqueued.pool, enqueued.language, enqueued.language_reason) == ("zh", "zh", "hint")
    assert (enqueued.language_permille, enqueued.prompt_tokens) == (1000, 10)


def test_bodies_are_read_in_bounded_groups_and_put_back_when_they_cannot_be_read() -> None:
    model = Model()
    for number in range(5):
        model.admit(f"r{number}", body_bytes=40)
    model.read()
    board = model.board
    taken = board.take_unread(10, 100)
    assert [request.admitted.id for request in taken] == ["r0", "r1"]
    assert [request.admitted.id for request in board.take_unread(1, 100)] == ["r2"]
    assert [request.admitted.id for request in board.take_unread(10, 1)] == ["r3"]
    model.cancel("r0")
    model.read()
    model.decide()
    board.put_back(taken)
    assert [request.admitted.id for request in board.take_unread(10, 100)] == ["r4", "r1"]
    assert board.entries["acme", "r0"].place is Place.SETTLING


def test_a_small_room_leaves_the_rest_for_the_next_decision() -> None:
    model = Model()
    model.start_worker(slots=4)
    for number in range(4):
        model.admit(f"r{number}")
    model.read()
    model.give_features()
    assert [len(model.decide(room=3)) for _ in range(4)] == [3, 3, 2, 0]
    model.settle()


POOLS = {
    "zh": PoolSettings(languages=("zh",), models=("a",)),
    "a": PoolSettings(languages=("en",), models=("a",), default=True),
    "b": PoolSettings(models=("b",), default=True),
    "other-b": PoolSettings(languages=("other",), models=("b",)),
}


@pytest.mark.parametrize(
    ("model", "language", "expected"),
    [
        pytest.param("a", "zh", "zh", id="the first that is for both"),
        pytest.param("a", "en", "a", id="the default, by language"),
        pytest.param("a", "und", "a", id="an unknown language goes to the model's default"),
        pytest.param("b", "zh", "b", id="a language that the model has no pool for"),
        pytest.param("b", "other", "other-b", id="a special pool behind the default"),
        pytest.param("c", "en", None, id="a model that nobody serves"),
    ],
)
def test_routes(model: str, language: str, expected: str | None) -> None:
    assert route(POOLS, model, language) == expected
