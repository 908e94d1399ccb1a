"""The fold of the tape, case by case."""

from typing import Any

import pytest

from waterclock_proto.events import (
    AttemptLost,
    CancelRequested,
    Completed,
    Dispatched,
    EventData,
    Expired,
    LogOpened,
    Rejected,
    RungChanged,
    SchedulerElected,
)
from waterclock_scheduler.limits import (
    CANCELS_MAX,
    COUNTERS_REMEMBERED,
    ENDED_MAX,
    OUTPUT_PAIRS_MAX,
    WRITERS_MAX,
)
from waterclock_scheduler.state import Rung, TapeState, apply

from .tape_model import MODEL, Model, envelope


class Tape:
    """Events by named writers; a request ``a`` is admitted to begin with."""

    def __init__(self) -> None:
        self.model = Model()
        self.state = TapeState()
        self.counters: dict[str, int] = {}
        self.sequence = 0
        self.now_us = self.model.now_us
        self.stamp = self.model.stamp()
        self.admit("a")

    def say(
        self,
        data: EventData,
        *,
        source: str = "scheduler",
        writer: str | None = None,
        counter: int | None = None,
        fence: int | None = None,
    ) -> bool:
        writer = writer or f"{source}-1"
        if counter is None:
            counter = self.counters[writer] = self.counters.get(writer, -1) + 1
        if fence is None:
            fence = {"scheduler": 3, "admission": 5}.get(source, 0)
        self.sequence += 1
        return apply(
            self.state,
            envelope(data, source=source, writer=writer, counter=counter, fence=fence),
            sequence=self.sequence,
            stored_us=self.now_us,
        )

    def admit(self, name: str, **more: Any) -> bool:
        data = self.model.admit(name, **more)
        return self.say(data, source="admission")

    def dispatch(self, attempt: int, worker: str = "w-1", name: str = "a", **more: Any) -> bool:
        admitted = self.model.admitted[0]
        return self.say(
            Dispatched(
                tenant="acme",
                id=name,
                attempt=attempt,
                worker=worker,
                pool="main",
                policy="fcfs",
                place=0,
                depth=1,
                requests_sequence=1,
                body_commitment=admitted.body_commitment,
                model=MODEL,
                tier="gold",
                output_tokens_max=10,
                deadline_us=admitted.deadline_us,
                arrival=admitted.arrival,
                received=admitted.received,
                decided=admitted.decided,
                dispatched=self.stamp,
            ),
            **more,
        )

    def lose(self, attempt: int, worker: str = "w-1", name: str = "a") -> bool:
        return self.say(
            AttemptLost(
                tenant="acme",
                id=name,
                attempt=attempt,
                worker=worker,
                pool="main",
                reason="lease",
                lost=self.stamp,
            )
        )

    def complete(self, attempt: int, worker: str = "w-1", name: str = "a") -> bool:
        return self.say(
            Completed(
                tenant="acme",
                id=name,
                attempt=attempt,
                worker=worker,
                finish_reason="stop",
                ended=self.stamp,
            ),
            source="worker",
        )

    def cancel(self, name: str) -> bool:
        return self.say(
            CancelRequested(tenant="acme", id=name, reason="producer", requested=self.stamp),
            source="admission",
        )

    def expire(self, attempt: int = 0, worker: str = "", **more: Any) -> bool:
        return self.say(
            Expired(
                tenant="acme",
                id="a",
                attempt=attempt,
                worker=worker,
                phase="queued",
                ended=self.stamp,
            ),
            **more,
        )

    def rung(self, rung: int, **more: Any) -> bool:
        return self.say(
            RungChanged(
                pool="main",
                rung_from=0,
                rung_to=rung,
                actions=("batch_cap",)[:rung],
                batch_cap=4 if rung else None,
                depth=0,
                workers=1,
                in_flight=0,
                changed=self.stamp,
            ),
            **more,
        )


@pytest.mark.parametrize(
    ("steps", "counted"),
    [
        pytest.param([("dispatch", 1), ("complete", 1)], [True, True], id="the ordinary way"),
        pytest.param([("complete", 1)], [False], id="an end without a dispatch"),
        pytest.param(
            [("dispatch", 1), ("complete", 1), ("complete", 1)],
            [True, True, False],
            id="a second end",
        ),
        pytest.param(
            [("dispatch", 1), ("lose", 1), ("complete", 1)],
            [True, True, False],
            id="an end after the loss",
        ),
        pytest.param(
            [("dispatch", 1), ("lose", 1), ("dispatch", 2), ("complete", 1), ("complete", 2)],
            [True, True, True, False, True],
            id="an end of the attempt before",
        ),
        pytest.param(
            [("dispatch", 2), ("dispatch", 1), ("lose", 1), ("complete", 2)],
            [True, False, True, True],
            id="a dispatch that its loss and the next one overtook",
        ),
        pytest.param(
            [("lose", 1), ("dispatch", 1), ("complete", 1)],
            [True, False, False],
            id="a dispatch that its loss overtook",
        ),
        pytest.param(
            [("dispatch", 1), ("expire", 0), ("lose", 1), ("complete", 1), ("expire", 0)],
            [True, False, True, False, True],
            id="the scheduler ends nothing that a worker has",
        ),
        pytest.param(
            [("dispatch", 1), ("complete", 1), ("dispatch", 1), ("dispatch", 2)],
            [True, True, False, False],
            id="dispatches after the end",
        ),
    ],
)
def test_which_events_count(steps: list[tuple[str, int]], counted: list[bool]) -> None:
    tape = Tape()
    assert [getattr(tape, step)(attempt) for step, attempt in steps] == counted


def test_a_slot_is_taken_from_dispatch_to_end_whatever_became_of_the_request() -> None:
    tape = Tape()
    tape.dispatch(1, "w-1")
    tape.complete(1, "w-1")
    assert tape.state.running == {}
    tape.dispatch(2, "w-2")
    assert tape.state.running == {"w-2": {("acme", "a", 2): "main"}}
    tape.complete(2, "w-2")
    assert tape.state.running == {}
    tape.dispatch(1, "w-3", name="nobody-knows-it")
    assert list(tape.state.running) == ["w-3"]
    tape.lose(1, "w-3", name="nobody-knows-it")
    assert tape.state.running == {}


def test_a_dispatch_after_the_end_and_its_loss_takes_no_slot() -> None:
    tape = Tape()
    tape.dispatch(1)
    tape.complete(1)
    tape.lose(2)
    assert not tape.dispatch(2)
    assert tape.state.running == {}


def test_an_id_is_admitted_once() -> None:
    tape = Tape()
    assert not tape.admit("a")
    tape.dispatch(1)
    tape.complete(1)
    assert not tape.admit("a")
    assert tape.state.requests == {}


def test_a_repetition_by_writer_and_counter_does_not_count() -> None:
    tape = Tape()
    assert tape.rung(1, counter=7)
    assert tape.rung(0, counter=9)
    assert not tape.rung(1, counter=7)
    assert tape.state.rungs == {"main": Rung()}
    assert tape.rung(1, counter=8)
    assert not tape.rung(0, counter=9)
    assert tape.rung(0, counter=8, writer="another")


def test_a_counter_beyond_memory_counts_as_a_repetition() -> None:
    tape = Tape()
    assert tape.rung(1, counter=COUNTERS_REMEMBERED)
    assert not tape.rung(0, counter=0)
    assert tape.rung(0, counter=1)
    assert tape.rung(1, counter=10 * COUNTERS_REMEMBERED)
    assert not tape.rung(0, counter=COUNTERS_REMEMBERED)
    assert tape.rung(0, counter=10 * COUNTERS_REMEMBERED - 1)


def test_the_first_election_of_a_fence_wins_and_lower_fences_are_not_heard() -> None:
    tape = Tape()
    elected = SchedulerElected(elected=tape.stamp)
    assert tape.say(elected, writer="one", fence=4)
    tape.say(elected, writer="two", fence=4)
    assert (tape.state.scheduler_fence, tape.state.leader) == (4, "one")
    assert not tape.dispatch(1, fence=3)
    assert not tape.say(elected, writer="old", fence=2)
    assert tape.dispatch(1, fence=4)
    assert tape.say(elected, writer="two", fence=5)
    assert (tape.state.scheduler_fence, tape.state.leader) == (5, "two")
    # The fences of one service are no fences of the other.
    assert tape.cancel("a")


def test_an_admission_below_the_highest_fence_is_not_heard() -> None:
    tape = Tape()
    data = tape.model.admit("b")
    assert not tape.say(data, source="admission", writer="old", fence=4)
    assert tape.say(data, source="admission", writer="new", fence=6)
    assert tape.state.admission_fence == 6


@pytest.mark.parametrize("source", ["worker", "admission", "ledger"])
def test_nobody_speaks_for_the_scheduler(source: str) -> None:
    tape = Tape()
    assert not tape.dispatch(1, source=source)
    assert not tape.expire(source=source)
    assert not tape.rung(1, source=source)


def test_admissions_refusal_of_another_body_does_not_end_the_request() -> None:
    tape = Tape()
    refusal = Rejected(
        tenant="acme",
        id="a",
        requests_sequence=2,
        reason="id_reused",
        arrival=tape.stamp,
        decided=tape.stamp,
    )
    assert not tape.say(refusal, source="admission")
    assert not tape.say(refusal)
    assert ("acme", "a") in tape.state.requests


def test_a_message_that_was_folded_is_not_folded_again() -> None:
    tape = Tape()
    tape.sequence -= 1
    assert not tape.rung(1)
    assert tape.state.rungs == {}


def test_the_newest_incarnation_is_known() -> None:
    tape = Tape()
    opened = LogOpened(
        incarnation="i1", first_sequence=1, reason="created", opened=tape.model.stamp()
    )
    assert tape.say(opened, source="ledger")
    assert tape.state.incarnation == "i1"


def test_every_memory_is_bounded() -> None:
    tape = Tape()
    for number in range(CANCELS_MAX + 1):
        tape.cancel(f"c{number}")
    assert len(tape.state.cancels) == CANCELS_MAX // 2 + 1
    # A cancel for what has ended is not remembered.
    tape.dispatch(1)
    tape.complete(1)
    assert not tape.cancel("a")
    for number in range(WRITERS_MAX):
        tape.rung(0, writer=f"scheduler-x{number}", counter=0)
        tape.rung(0)
    assert len(tape.state.writers) < WRITERS_MAX
    assert "scheduler-1" in tape.state.writers
    for number in range(max(ENDED_MAX, OUTPUT_PAIRS_MAX) + 1):
        tenant = f"t{number}"
        data = tape.model.admit("x", tenant=tenant)
        tape.say(data, source="admission")
        tape.say(
            Dispatched(
                tenant=tenant,
                id="x",
                attempt=1,
                worker="w-1",
                pool="main",
                policy="fcfs",
                place=0,
                depth=1,
                requests_sequence=1,
                body_commitment=data.body_commitment,
                model=MODEL,
                tier="gold",
                output_tokens_max=10,
                deadline_us=data.deadline_us,
                arrival=data.arrival,
                received=data.received,
                decided=data.decided,
                dispatched=tape.stamp,
            )
        )
        done = Completed(
            tenant=tenant,
            id="x",
            attempt=1,
            worker="w-1",
            finish_reason="stop",
            ended=tape.stamp,
        )
        assert tape.say(done, source="worker")
    assert len(tape.state.ended) <= ENDED_MAX
    assert len(tape.state.outputs) <= OUTPUT_PAIRS_MAX
