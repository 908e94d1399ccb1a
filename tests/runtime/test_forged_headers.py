"""A tenant's headers come back with its body, and mean nothing."""

import pytest

from broker_process import BrokerProcess
from runtime_probe import connected


@pytest.mark.parametrize("status", ["100", "404", "503", "409"])
async def test_a_forged_status_on_a_body_is_the_bodys_own_affair(
    broker: BrokerProcess, status: str
) -> None:
    async with connected(broker.url) as bus:
        forged = await bus.store("wc.request.t", b"mine", {"Status": status, "Description": "Idle"})
        honest = await bus.store("wc.request.t", b"yours")
        assert await bus.bodies([forged, honest, honest + 1]) == [b"mine", b"yours", None]
