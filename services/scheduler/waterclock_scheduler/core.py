"""Decisions: which request goes where, when it stops waiting, and what is shed.

``decide`` is never replayed: what it returned stands on the tape. Time is an argument: a stamp
of this host with a monotonic reading; deadlines are compared with its wall clock, leases and
dwell times with its monotonic one.
"""

from typing import Final, Literal

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
from waterclock_proto.stamps import Stamp
from waterclock_scheduler.board import Board, Entry, Loss, Place, Pool, Worker, route
from waterclock_scheduler.estimate import PREDICTOR, predict
from waterclock_scheduler.ladder import (
    RUNG_REFUSE,
    Ladder,
    actions_of,
    batch_cap_of,
    retry_after_ms,
    step,
)
from waterclock_scheduler.limits import DEAF_MS, LOOP_GAP_MS
from waterclock_scheduler.policies import SortKey, expired
from waterclock_scheduler.state import Slot

_MS: Final = 1_000_000
_GROUND: Final = Ladder()


def decide(board: Board, now: Stamp, *, room: int) -> list[EventData]:
    """What to publish now, about ``room`` events at most; the rest is decided the next time.

    Give every event's token to ``board.sent`` before the next call. In this order: attempts
    of lost workers, what must not wait any longer, what is late, what was newly read, free
    slots, the ladder. So nothing expired or cancelled is in a line when slots are given out.
    """
    assert now.mono_ns is not None, "a decision needs a stamp with a monotonic reading"
    now_ns = now.mono_ns
    if board.looked_ns is not None and now_ns - board.looked_ns > LOOP_GAP_MS * _MS:
        board.pardon(now_ns)
    board.looked_ns = now_ns
    events: list[EventData] = []
    _end_leases(board, now_ns)
    _lose_attempts(board, now, events, room)
    _stop(board, now, events, room)
    _expire(board, now, events, room)
    _enqueue(board, now, events, room)
    for pool in board.pools.values():
        if pool.waiting:
            _dispatch(board, pool, now, events, room)
        _climb(board, pool, now, events, room)
    return events


# --- the steps


def _end_leases(board: Board, now_ns: int) -> None:
    if now_ns - board.heard_ns > DEAF_MS * _MS:
        # Not even the own pulse is heard: this silence says nothing about the workers.
        board.pardon(now_ns)
        return
    if now_ns < board.lease_due_ns:
        return
    lease_ns = board.settings.scheduler.lease_ms * _MS
    earliest_ns = now_ns
    for worker in list(board.workers.values()):
        if now_ns - worker.beat_ns >= lease_ns:
            board.unlist_worker(worker)
            del board.workers[worker.life]
            board.lose(worker.life, "drained" if worker.draining else "lease")
        else:
            earliest_ns = min(earliest_ns, worker.beat_ns)
    board.lease_due_ns = earliest_ns + lease_ns


def _lose_attempts(board: Board, now: Stamp, events: list[EventData], room: int) -> None:
    while board.losses and len(events) < room:
        slot = next(iter(board.losses))
        _lose(board, slot, board.losses.pop(slot), now, events)


def _lose(board: Board, slot: Slot, loss: Loss, now: Stamp, events: list[EventData]) -> None:
    """Declare one attempt lost. If it was the current one, its request waits again when the
    loss has been read back."""
    tenant, request_id, attempt = slot
    events.append(
        AttemptLost(
            tenant=tenant,
            id=request_id,
            attempt=attempt,
            worker=loss.life,
            pool=loss.pool,
            reason=loss.reason,
            lost=now,
        )
    )
    board.declared[slot] = None
    entry = board.entries.get((tenant, request_id))
    if entry is not None and entry.place is Place.RUNNING and entry.attempt == attempt:
        board.put(entry, Place.SETTLING)


def _stop(board: Board, now: Stamp, events: list[EventData], room: int) -> None:
    while board.stops and len(events) < room:
        entry = board.entries[next(iter(board.stops))]
        admitted = entry.request.admitted
        if entry.request.cancel:
            events.append(
                Cancelled(
                    tenant=admitted.tenant, id=admitted.id, attempt=0, phase="queued", ended=now
                )
            )
        else:
            events.append(
                Failed(
                    tenant=admitted.tenant,
                    id=admitted.id,
                    attempt=0,
                    reason="attempts_exhausted",
                    detail=f"{entry.attempt} attempts were lost",
                    ended=now,
                )
            )
        board.put(entry, Place.SETTLING)


def _expire(board: Board, now: Stamp, events: list[EventData], room: int) -> None:
    while len(events) < room:
        due = board.due.first()
        if due is None or due[0] > now.wall_us:
            return
        entry = board.entries[due[1:]]
        admitted = entry.request.admitted
        if entry.place is Place.RUNNING:
            slot = (admitted.tenant, admitted.id, entry.attempt)
            if slot in board.flights.get(entry.worker, ()):
                # Not even the dispatch has come back, so nothing can be said about the worker.
                grace_us = board.settings.scheduler.overdue_grace_ms * 1000
                board.postpone(entry, now.wall_us + grace_us)
                continue
            # The worker lives and has not ended what it should have: it has lost it.
            board.losses.pop(slot, None)
            _lose(board, slot, Loss(entry.worker, entry.pool, "lease"), now, events)
            continue
        events.append(
            Expired(tenant=admitted.tenant, id=admitted.id, attempt=0, phase="queued", ended=now)
        )
        board.put(entry, Place.SETTLING)


def _enqueue(board: Board, now: Stamp, events: list[EventData], room: int) -> None:
    while board.read and len(events) < room:
        entry = board.entries[next(iter(board.read))]
        admitted = entry.request.admitted
        features = entry.features
        assert features is not None
        name = route(board.settings.pools, admitted.model, features.language)
        if name is None:
            _refuse(board, entry, None, "unknown_model", now, events)
            continue
        pool = board.pools[name]
        if pool.ladder.rung >= RUNG_REFUSE:
            _refuse(board, entry, pool, "load_shed", now, events)
            continue
        if pool.waiting >= pool.settings.backlog_max:
            _refuse(board, entry, pool, "backlog_full", now, events)
            continue
        estimate = predict(
            board.settings.estimate(admitted.model),
            board.state.outputs.get((admitted.model, admitted.tenant)),
            prompt_tokens=features.prompt_tokens,
            output_tokens_max=admitted.output_tokens_max,
        )
        events.append(
            Enqueued(
                tenant=admitted.tenant,
                id=admitted.id,
                pool=name,
                language=features.language,
                language_reason=features.reason,
                language_permille=features.permille,
                prompt_tokens=estimate.prompt_tokens,
                output_tokens_predicted=estimate.output_tokens,
                service_predicted_us=estimate.service_us,
                predictor=PREDICTOR,
                enqueued=now,
            )
        )
        board.leave(entry)
        entry.pool = name
        entry.service_us = estimate.service_us
        board.put(entry, Place.WAITING)


def _refuse(
    board: Board,
    entry: Entry,
    pool: Pool | None,
    reason: Literal["load_shed", "backlog_full", "unknown_model"],
    now: Stamp,
    events: list[EventData],
) -> None:
    admitted = entry.request.admitted
    events.append(
        Rejected(
            tenant=admitted.tenant,
            id=admitted.id,
            requests_sequence=admitted.requests_sequence,
            reason=reason,
            retry_after_ms=None if pool is None else _retry_after_ms(board, pool, now),
            tier=admitted.tier,
            pool="" if pool is None else pool.name,
            arrival=admitted.arrival,
            edge_accepted=admitted.edge_accepted,
            decided=now,
        )
    )
    board.put(entry, Place.SETTLING)


def _dispatch(board: Board, pool: Pool, now: Stamp, events: list[EventData], room: int) -> None:
    """Give free slots to the first in line, one model's line beside the other's."""
    while len(events) < room:
        head: SortKey | None = None
        model = ""
        for name, line in pool.lines.items():
            free = pool.free.get(name)
            first = line.first()
            if free and first is not None and (head is None or first < head):
                head, model = first, name
        if head is None:
            return
        taker = pool.free[model].first()
        assert taker is not None
        _give(board, pool, head, board.workers[taker[1]], now, events)


def _give(
    board: Board, pool: Pool, head: SortKey, worker: Worker, now: Stamp, events: list[EventData]
) -> None:
    entry = board.entries[head[3:]]
    admitted = entry.request.admitted
    assert entry.place is Place.WAITING
    assert not expired(admitted.deadline_us, now_us=now.wall_us)
    place = (
        0
        if len(pool.lines) == 1
        else sum(line.rank(head) for model, line in pool.lines.items() if model != admitted.model)
    )
    depth = pool.waiting
    board.leave(entry)
    entry.attempt += 1
    entry.worker = worker.life
    board.put(entry, Place.RUNNING)
    slot = (admitted.tenant, admitted.id, entry.attempt)
    board.flights.setdefault(worker.life, {})[slot] = pool.name
    board.list_worker(worker)
    events.append(
        Dispatched(
            tenant=admitted.tenant,
            id=admitted.id,
            attempt=entry.attempt,
            worker=worker.life,
            pool=pool.name,
            policy=pool.settings.policy,
            place=place,
            depth=depth,
            requests_sequence=admitted.requests_sequence,
            body_commitment=admitted.body_commitment,
            model=admitted.model,
            tier=admitted.tier,
            stream=admitted.stream,
            output_tokens_max=admitted.output_tokens_max,
            deadline_us=admitted.deadline_us,
            arrival=admitted.arrival,
            edge_accepted=admitted.edge_accepted,
            received=admitted.received,
            decided=admitted.decided,
            dispatched=now,
        )
    )


def _climb(board: Board, pool: Pool, now: Stamp, events: list[EventData], room: int) -> None:
    assert now.mono_ns is not None
    if len(events) >= room or (not pool.waiting and pool.ladder == _GROUND):
        return
    settings = board.settings.ladder
    ladder = step(
        settings, pool.ladder, depth=pool.waiting, workers=pool.takers, now_ns=now.mono_ns
    )
    rung_from = pool.ladder.rung
    if ladder.rung == rung_from:
        pool.ladder = ladder
        return
    board.set_ladder(pool, ladder)
    events.append(
        RungChanged(
            pool=pool.name,
            rung_from=rung_from,
            rung_to=ladder.rung,
            actions=actions_of(ladder.rung),
            batch_cap=batch_cap_of(settings, ladder.rung),
            retry_after_ms=(
                _retry_after_ms(board, pool, now) if ladder.rung >= RUNG_REFUSE else None
            ),
            depth=pool.waiting,
            workers=pool.takers,
            in_flight=pool.running,
            changed=now,
        )
    )


def _retry_after_ms(board: Board, pool: Pool, now: Stamp) -> int:
    assert now.mono_ns is not None
    return retry_after_ms(
        board.settings.ladder,
        depth=pool.waiting,
        workers=pool.takers,
        drained=pool.drain.drained(now.mono_ns),
    )
