"""What holds whatever happens: in any order of admissions, losses, crashes, delays, repetitions."""

from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

import msgspec
from hypothesis import example, given, settings
from hypothesis import strategies as st

from waterclock_proto.events import (
    Admitted,
    AttemptLost,
    Cancelled,
    Completed,
    Dispatched,
    EventData,
    Expired,
    Failed,
    Rejected,
    SchedulerElected,
    TerminalData,
)
from waterclock_scheduler.config import LadderSettings, PoolSettings
from waterclock_scheduler.snapshot import Snapshot, thaw
from waterclock_scheduler.state import TapeState

from . import tape_model
from .tape_model import Model, fold

NAMES = tuple(f"r{number}" for number in range(30))
ENDS: tuple[type[TerminalData], ...] = (Completed, Failed, Cancelled, Expired)

WAITS_MS = (300, 2_000, 60_000)
MOVES: dict[str, tuple[int, tuple[Sequence[Any], ...]]] = {
    "admit": (8, (NAMES, WAITS_MS)),
    "cancel": (1, (NAMES,)),
    "read": (8, (range(1, 6),)),
    "features": (6, (("en", "zh", "und"),)),
    "decide": (8, ((1, 3, 1000, 1000),)),
    "deliver": (14, ((0, 0, 0, 1, 2, 5),)),
    "repeat": (2, (range(50),)),
    "turn": (3, ()),
    "finish": (5, (range(4), range(5), ENDS)),
    "wait": (6, ((1, 40, 200, 400),)),
    "beat": (8, (range(4),)),
    "silence": (1, (range(4),)),
    "restart worker": (1, (range(4),)),
    "drain": (1, (range(4),)),
    "restart scheduler": (1, ((True, False),)),
    "snapshot": (1, ()),
}
"""What may happen: how often, beside the others, and with which of which values."""

Step = tuple[Any, ...]
STEP = st.one_of(
    *(
        st.tuples(st.just(name), *(st.sampled_from(list(values)) for values in of))
        for name, (_, of) in MOVES.items()
    )
)


def long_run(seed: int) -> list[Step]:
    """Steps in a number, and in proportions, that single draws of a property do not come to."""
    chance = Random(seed)
    names = chance.choices(list(MOVES), [weight for weight, _ in MOVES.values()], k=160)
    return [(name, *(chance.choice(list(values)) for values in MOVES[name][1])) for name in names]


STEPS = st.one_of(st.lists(STEP, max_size=40), st.integers(0, 2**32).map(long_run))


def mesh() -> Model:
    pools = {
        "zh": PoolSettings(languages=("zh",), backlog_max=3, policy="sjf"),
        "main": PoolSettings(default=True, policy="edf"),
    }
    ladder = LadderSettings(
        batch_cap_above=1,
        batch_cap_below=0,
        speculation_off_above=2,
        speculation_off_below=1,
        refuse_above=6,
        refuse_below=2,
        batch_cap=1,
        rise_ms=0,
        dwell_ms=100,
    )
    model = Model(tape_model.settings(pools, ladder, lease_ms=1_100, overdue_grace_ms=1_000))
    model.start_worker("a", slots=2)
    model.start_worker("b", slots=1)
    model.start_worker("c", pool="zh", slots=2)
    return model


class Run:
    """A model and the steps that may be made with it."""

    def __init__(self) -> None:
        self.model = mesh()
        self.snapshots: list[bytes] = [self.model.snapshot()]
        self.ends: Counter[str] = Counter()

    def step(self, name: str, *given: Any) -> None:
        model = self.model
        workers = list(model.workers.values())
        match name:
            case "admit":
                known = {data.id for data in model.admitted}
                if given[0] not in known:
                    model.admit(given[0], deadline_ms=given[1])
            case "cancel":
                model.cancel(given[0])
            case "read":
                model.read(given[0])
            case "features":
                model.give_features(given[0])
            case "decide":
                model.decide(given[0])
            case "deliver":
                model.deliver(given[0])
            case "repeat":
                model.repeat(given[0])
            case "turn":
                model.turn()
            case "finish":
                model.finish(workers[given[0] % len(workers)], given[1], kind=given[2])
            case "wait":
                model.wait(given[0])
                model.board.hear(model.mono_ns)
            case "beat":
                model.beat(workers[given[0] % len(workers)])
            case "silence":
                workers[given[0] % len(workers)].alive = False
            case "restart worker":
                old = workers[given[0] % len(workers)]
                if old.life == max(w.life for w in workers if w.name == old.name):
                    old.alive = False
                    model.start_worker(old.name, pool=old.pool, slots=old.slots)
            case "drain":
                worker = workers[given[0] % len(workers)]
                worker.draining = True
                model.beat(worker)
            case "restart scheduler":
                state = TapeState()
                if given[0]:
                    snapshot = thaw(self.snapshots[-1])
                    assert isinstance(snapshot, Snapshot)
                    state = snapshot.state
                model.start_scheduler(state)
            case "snapshot":
                self.snapshots.append(model.snapshot())
            case _:
                raise AssertionError(name)

    def settle(self) -> None:
        """New workers come, everything arrives, and everything ends."""
        model = self.model
        for worker in model.workers.values():
            worker.alive = False
        model.start_worker("a", slots=2)
        model.start_worker("c", pool="zh", slots=2)
        model.settle()


class Referee:
    """The rules of the tape said once more, as slowly and plainly as possible."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.open: dict[str, Admitted] = {}
        self.current: dict[str, tuple[int, str]] = {}
        self.lost: dict[str, int] = {}
        self.valid: dict[str, list[EventData]] = {}
        self.busy: dict[str, set[tuple[str, int]]] = {}
        fence = 0
        told: set[object] = set()
        for event in model.tape:
            data = event.data
            if event.source == "/waterclock/scheduler":
                if event.fence < fence:
                    continue
                fence = max(fence, event.fence)
            name = getattr(data, "id", "")
            about = (name, data.TYPE, getattr(data, "attempt", 0))
            if (event.writer, event.counter) in told or (name and about in told):
                continue
            told |= {(event.writer, event.counter), about}
            self._read(name, data)
            for life, attempts in self.busy.items():
                slots = model.workers[life].slots
                assert len(attempts) <= slots, f"{life} has {len(attempts)} of {slots} slots taken"

    def _read(self, name: str, data: EventData) -> None:
        match data:
            case Admitted():
                self.open[name] = data
            case Dispatched():
                assert data.dispatched.wall_us < data.deadline_us, "expired work was dispatched"
                if data.attempt > self.current.get(name, (0, ""))[0]:
                    self.current[name] = (data.attempt, data.worker)
                if data.attempt > self.lost.get(name, 0):
                    self.busy.setdefault(data.worker, set()).add((name, data.attempt))
            case AttemptLost():
                self.lost[name] = max(self.lost.get(name, 0), data.attempt)
                self.busy.get(data.worker, set()).discard((name, data.attempt))
            case TerminalData() | Rejected():
                worker = getattr(data, "worker", "")
                attempt = getattr(data, "attempt", 0)
                self.busy.get(worker, set()).discard((name, attempt))
                newest = self.current.get(name, (0, ""))[0]
                current = newest if newest > self.lost.get(name, 0) else 0
                if name in self.open and current == (attempt if worker else 0):
                    del self.open[name]
                    self.valid.setdefault(name, []).append(data)
            case _:
                pass


@settings(max_examples=400)
@example(long_run(187915141))
@given(STEPS)
def test_every_request_ends_once_and_no_worker_has_more_than_its_slots(
    steps: list[Step],
) -> None:
    run = Run()
    for step in steps:
        run.step(*step)
        run.model.check_board()
        if len(run.model.tape) == run.model.state.position:
            if not run.model.in_transit:
                run.model.check_nothing_intended()
            referee = Referee(run.model)
            assert set(referee.open) == {key[1] for key in run.model.state.requests}
    run.settle()
    referee = Referee(run.model)
    assert referee.open == {}
    assert set(referee.valid) == {data.id for data in run.model.admitted}
    assert all(len(ends) == 1 for ends in referee.valid.values())


@settings(max_examples=200)
@given(STEPS)
def test_the_board_is_empty_when_everything_has_ended(steps: list[Step]) -> None:
    run = Run()
    for step in steps:
        run.step(*step)
    run.settle()
    # What ran superseded, or on lives that went, is declared lost or ends after a while.
    for _ in range(40):
        run.model.wait(100)
        run.model.board.hear(run.model.mono_ns)
        run.model.beat_all()
        run.model.turn()
        for worker in run.model.workers.values():
            while worker.alive and worker.running:
                run.model.finish(worker)
    run.model.read()
    board, state = run.model.board, run.model.state
    assert (board.entries, board.unread, board.read, board.stops) == ({}, {}, {}, {})
    assert (len(board.due), board.outstanding, board.flights) == (0, {}, {})
    assert (board.losses, board.declared, state.running) == ({}, {}, {})
    for pool in board.pools.values():
        assert (pool.waiting, pool.running, pool.lines) == (0, 0, {})
        assert pool.ladder.rung == 0


@settings(max_examples=200)
@given(STEPS)
def test_folding_on_from_any_snapshot_gives_the_state_of_the_whole_tape(
    steps: list[Step],
) -> None:
    run = Run()
    for step in steps:
        run.step(*step)
        run.step("snapshot")
    run.model.read()
    whole = fold(run.model)
    assert whole == run.model.state
    for snapshot in run.snapshots[:: max(1, len(run.snapshots) // 12)]:
        assert fold(run.model, begin=snapshot) == whole


@settings(max_examples=100)
@given(STEPS, st.data())
def test_folding_the_tape_again_changes_nothing(steps: list[Step], data: st.DataObject) -> None:
    run = Run()
    for step in steps:
        run.step(*step)
    model = run.model
    model.read()
    whole = fold(model)
    # A reader that reconnects may be given again what it has read, and its writers repeat
    # what they were not told about.
    for place in data.draw(st.lists(st.integers(0, len(model.tape) - 1), max_size=20)):
        event = model.tape[place]
        if not isinstance(event.data, SchedulerElected):
            model.store(event)
    again = fold(model)
    again.position, again.stored_us = whole.position, whole.stored_us
    for name, seen in again.writers.items():
        seen.position = whole.writers[name].position
    assert again == whole


@settings(max_examples=100)
@given(STEPS)
def test_an_old_leader_that_speaks_on_changes_nothing(steps: list[Step]) -> None:
    run = Run()
    for step in steps:
        run.step(*step)
    model = run.model
    model.read()
    model.give_features()
    model.decide()
    left = list(model.in_transit)
    writer, fence = model.writer, model.fence
    model.start_scheduler(TapeState())
    before = fold(model)
    for counter, event in left:
        model.store(
            tape_model.envelope(
                event, source="scheduler", writer=writer, counter=counter, fence=fence
            )
        )
    after = fold(model)
    after.position, after.stored_us, after.writers = (
        before.position,
        before.stored_us,
        before.writers,
    )
    assert after == before


@given(st.integers(1, 4), st.booleans(), st.data())
def test_any_order_of_a_schedulers_events_gives_the_newest_attempt(
    attempts: int, last_lost: bool, data: st.DataObject
) -> None:
    model = Model()
    worker = model.start_worker(slots=9)
    admitted = model.admit("a")
    model.read()
    model.give_features()
    model.decide()
    (_, enqueued), (_, dispatched) = model.in_transit
    assert isinstance(dispatched, Dispatched)
    events: list[EventData] = [enqueued]
    for attempt in range(1, attempts + 1):
        events.append(msgspec.structs.replace(dispatched, attempt=attempt))
        if attempt < attempts or last_lost:
            events.append(
                AttemptLost(
                    tenant=admitted.tenant,
                    id=admitted.id,
                    attempt=attempt,
                    worker=worker.life,
                    pool="main",
                    reason="lease",
                    lost=model.stamp(),
                )
            )
    for counter in data.draw(st.permutations(range(len(events)))):
        model.store(
            tape_model.envelope(
                events[counter],
                source="scheduler",
                writer="another-writer",
                counter=counter,
                fence=model.fence,
            )
        )
    state = fold(model)
    request = state.requests["acme", "a"]
    assert request.running is not last_lost
    assert request.enqueued is not None
    if not last_lost:
        assert request.attempt == attempts
        assert state.running == {worker.life: {("acme", "a", attempts): "main"}}
    else:
        assert state.running == {}
