"""The clock: integers, one boot, and a step that only a fault test makes."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from waterclock_proto.stamps import Axis
from waterclock_runtime.clock import SIMULATED_STEP_VARIABLE, Clock, boot_id, name_in_namespace

SECOND_US = 1_000_000


class Hand:
    """Both clocks of a host, moved by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wall_ns = 1_700_000_000_000_000_999
        self.mono_ns = 5_000_000_000
        clocks = SimpleNamespace(time_ns=lambda: self.wall_ns, monotonic_ns=lambda: self.mono_ns)
        monkeypatch.setattr("waterclock_runtime.clock.time", clocks)

    def later(self, ns: int) -> None:
        self.wall_ns += ns
        self.mono_ns += ns


@pytest.fixture
def hand(monkeypatch: pytest.MonkeyPatch) -> Hand:
    return Hand(monkeypatch)


def test_a_stamp_says_what_both_clocks_showed(hand: Hand) -> None:
    clock = Clock(environ={}, error_us=250)
    stamp = clock.stamp("worker")
    assert stamp.wall_us == 1_700_000_000_000_000
    assert stamp.mono_ns == 5_000_000_000
    assert (stamp.source, stamp.boot, stamp.error_us) == ("worker", clock.boot, 250)


def test_a_moment_that_was_read_as_monotonic_time_is_placed_in_the_past(hand: Hand) -> None:
    clock = Clock(environ={})
    then_ns = clock.mono_ns()
    hand.later(1_234_567_890)
    stamp = clock.stamp_at("engine", then_ns, error_us=1)
    assert stamp.wall_us == 1_700_000_000_000_000
    assert (stamp.mono_ns, stamp.error_us) == (then_ns, 1)
    assert Axis().place_us(stamp) == stamp.wall_us


def test_an_unknown_error_is_absent_and_not_zero(hand: Hand) -> None:
    assert Clock(environ={}).stamp("worker").error_us is None
    assert Clock(environ={}, error_us=0).stamp("worker").error_us == 0


def test_a_simulated_step_moves_the_wall_clock_alone(hand: Hand, tmp_path: Path) -> None:
    step = tmp_path / "step"
    clock = Clock(environ={SIMULATED_STEP_VARIABLE: str(step)})
    before = clock.stamp("worker")
    for text, expected_us in [
        (str(5 * SECOND_US), 5 * SECOND_US),
        # Half-written or gone: the last step holds.
        ("", 5 * SECOND_US),
        ("x", 5 * SECOND_US),
        (str(-5 * SECOND_US), -5 * SECOND_US),
    ]:
        step.write_text(text)
        hand.later(60_000_000)
        now = clock.stamp("worker")
        assert before.mono_ns is not None
        assert now.mono_ns is not None
        passed_us = (now.mono_ns - before.mono_ns) // 1000
        assert now.wall_us - before.wall_us == passed_us + expected_us
        # On the request's own axis a step is not seen.
        axis = Axis([before])
        assert axis.place_us(now) - axis.place_us(before) == passed_us
    step.unlink()
    hand.later(60_000_000)
    assert clock.now_us() == hand.wall_ns // 1000 - 5 * SECOND_US


def test_the_step_is_not_read_at_every_stamp(hand: Hand, tmp_path: Path) -> None:
    step = tmp_path / "step"
    step.write_text("0")
    clock = Clock(environ={SIMULATED_STEP_VARIABLE: str(step)})
    clock.now_us()
    step.write_text(str(SECOND_US))
    hand.later(1_000_000)
    assert clock.now_us() == hand.wall_ns // 1000
    hand.later(60_000_000)
    assert clock.now_us() == hand.wall_ns // 1000 + SECOND_US


def test_all_processes_of_a_boot_name_it_alike() -> None:
    assert boot_id() == boot_id() == Clock(environ={}).boot
    assert len(boot_id()) == 16
    assert int(boot_id(), 16) >= 0


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("monotonic           0         0\nboottime            0         0\n", False),
        ("monotonic       86400         0\nboottime            0         0\n", True),
        ("monotonic           0  -5000000\nboottime            0         0\n", True),
        ("boottime        86400         0\n", False),
    ],
)
def test_a_time_namespace_with_a_clock_of_its_own_is_another_boot(
    tmp_path: Path, text: str, other: bool
) -> None:
    offsets = tmp_path / "timens_offsets"
    offsets.write_text(text)
    named = name_in_namespace("0123456789abcdef", offsets)
    assert (named != "0123456789abcdef") == other
    assert len(named) == 16


def test_a_kernel_without_time_namespaces_has_one_clock(tmp_path: Path) -> None:
    assert name_in_namespace("0123456789abcdef", tmp_path / "absent") == ("0123456789abcdef")
