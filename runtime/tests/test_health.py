"""What a process says of itself."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from waterclock_runtime import limits
from waterclock_runtime.health import Health


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the clock that health reads."""
    now_s = 100.0

    def set_to(to_s: float) -> None:
        nonlocal now_s
        now_s = to_s

    clock = SimpleNamespace(monotonic=lambda: now_s)
    monkeypatch.setattr("waterclock_runtime.health.time", clock)
    return set_to


def test_a_service_is_healthy_once_it_is_ready_and_nothing_is_wrong() -> None:
    health = Health()
    assert health.report() == (False, {"healthy": False, "ready": False, "wrong": {}})
    health.ready = True
    health.facts["lag_events"] = 3
    assert health.report() == (
        True,
        {"healthy": True, "ready": True, "wrong": {}, "lag_events": 3},
    )
    health.wrong("cache", "away")
    assert health.report()[1]["wrong"] == {"cache": "away"}
    assert not health.report()[0]
    health.right("cache")
    health.right("cache")
    assert health.report()[0]


def test_what_is_watched_is_asked_at_every_report() -> None:
    health = Health()
    health.ready = True
    why = ""
    health.watch("bus", lambda: why)
    assert health.report()[0]
    why = "away"
    assert health.report()[1]["wrong"] == {"bus": "away"}


def test_a_loop_that_does_not_turn_is_wrong(at: Callable[[float], None]) -> None:
    health = Health()
    health.ready = True
    at(100 + limits.LOOP_STUCK_S)
    assert health.report()[0]
    at(100.5 + limits.LOOP_STUCK_S)
    assert health.report()[1]["wrong"] == {"loop": "has not turned for 5.5 s"}
    health.beat()
    assert health.report()[0]
