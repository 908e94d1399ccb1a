"""What a service reports of the bus's clock holds the truth; both clocks here are one host's."""

import asyncio
from pathlib import Path

import pytest

from broker_process import BrokerProcess
from runtime_probe import Account, connected, event, read_until, until, writing
from waterclock_proto.events import ClockReported
from waterclock_runtime import limits
from waterclock_runtime.clock import SIMULATED_STEP_VARIABLE, Clock
from waterclock_runtime.tape import TapeReader

SECOND_US = 1_000_000


def reports(account: Account) -> list[ClockReported]:
    return [e.data for e in account.envelopes if isinstance(e.data, ClockReported)]


@pytest.mark.parametrize("step_us", [0, 5 * SECOND_US, -5 * SECOND_US])
async def test_the_reported_interval_holds_the_true_offset(
    broker: BrokerProcess, tmp_path: Path, step_us: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SEAL_INTERVAL_S", 0.2)
    monkeypatch.setattr(limits, "TAPE_LOOK_INTERVAL_S", 0.2)
    monkeypatch.setattr(limits, "CLOCK_REPORT_INTERVAL_S", 0.5)
    step = tmp_path / "step"
    step.write_text(str(step_us))
    clock = Clock(environ={SIMULATED_STEP_VARIABLE: str(step)})
    account = Account()
    async with connected(broker.url) as bus, writing(bus, clock=clock) as writer:
        reader = TapeReader(bus)
        reading = asyncio.create_task(read_until(reader, account, lambda _: False))
        writer.emit(event(0))
        await until(lambda: len(reports(account)) >= 3)
        first, *others = reports(account)
        assert (first.samples, first.offset_us_min, first.offset_us_max) == (0, None, None)
        for report in others:
            assert report.boot == clock.boot
            assert report.samples > 0
            low, high = report.offset_us_min, report.offset_us_max
            assert low is not None
            assert high is not None
            # The bus's clock minus the service's, which runs ahead by the step.
            assert low <= -step_us <= high
            assert high - low < SECOND_US
        assert writer.clock_offset_us is not None
        reading.cancel()
        await reader.close()


async def test_a_clock_that_is_stepped_meanwhile_is_seen_and_then_forgotten(
    broker: BrokerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SEAL_INTERVAL_S", 0.1)
    monkeypatch.setattr(limits, "TAPE_LOOK_INTERVAL_S", 0.1)
    monkeypatch.setattr(limits, "CLOCK_REPORT_INTERVAL_S", 0.3)
    monkeypatch.setattr(limits, "CLOCK_SAMPLES_S", 1.5)
    step = tmp_path / "step"
    step.write_text("0")
    clock = Clock(environ={SIMULATED_STEP_VARIABLE: str(step)})
    async with connected(broker.url) as bus, writing(bus, clock=clock) as writer:

        def offset() -> tuple[int, int]:
            return writer.clock_offset_us or (0, 0)

        await until(lambda: writer.clock_offset_us is not None)
        step.write_text(str(SECOND_US))
        # No interval holds both offsets: an empty one says so and is not repaired.
        await until(lambda: offset()[0] > offset()[1])
        await until(lambda: offset()[0] <= -SECOND_US <= offset()[1])
