"""What a scheduler says about its pools twice a second: for whoever watches, and for its standby.

A pulse is no event and no evidence; it may be lost. Hearing another scheduler's pulse keeps a
standby from being elected; hearing its own tells a scheduler that the bus is there.
"""

from typing import Final

import msgspec
from msgspec import Struct

from waterclock_scheduler.board import Board, Pool


class Pulse(Struct, frozen=True, kw_only=True):
    """On ``wc.pulse.<pool>``. Published by the leading scheduler."""

    scheduler: str
    """Its writer's name."""
    fence: int
    pool: str
    depth: int
    """Requests that wait."""
    in_flight: int
    """Requests that a worker has."""
    workers: int
    """Live workers that take new work."""
    slots: int
    """What these take together when nothing is shed."""
    rung: int
    backlog_max: int
    at_us: int
    """Unix time, by the scheduler's clock."""


def pulse_of(board: Board, pool: Pool, *, scheduler: str, fence: int, now_us: int) -> Pulse:
    """How the pool stands."""
    workers = [board.workers[life] for life in pool.lives]
    return Pulse(
        scheduler=scheduler,
        fence=fence,
        pool=pool.name,
        depth=pool.waiting,
        in_flight=pool.running,
        workers=pool.takers,
        slots=sum(worker.slots for worker in workers if not worker.draining),
        rung=pool.ladder.rung,
        backlog_max=pool.settings.backlog_max,
        at_us=now_us,
    )


def encode_pulse(pulse: Pulse) -> bytes:
    return _ENCODER.encode(pulse)


def decode_pulse(payload: bytes) -> Pulse | None:
    """The pulse in a message; None if it is none."""
    try:
        return _DECODER.decode(payload)
    except msgspec.MsgspecError:
        return None


_ENCODER: Final = msgspec.json.Encoder()
_DECODER: Final = msgspec.json.Decoder(Pulse)
