"""What writers and readers may rely on, of the real bus and of the one in memory alike."""

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

import pytest
from nats.aio.msg import Msg

from broker_process import BrokerProcess
from fake_wire import FakeWire
from runtime_probe import KEY, connected, event, until
from waterclock_proto.envelope import Chain
from waterclock_proto.subjects import EVENTS
from waterclock_runtime.bus import Bus, Wire, decode_puback


class Side(Protocol):
    """A wire, and what makes it move."""

    wire: Wire

    async def settle(self) -> None:
        """Until everything that was published has been taken and answered."""
        ...

    async def hold(self) -> None:
        """What is published from here on does not leave this process."""
        ...

    async def break_off(self) -> None:
        """The connection breaks, and nothing that is on its way is taken any more."""
        ...

    async def come_back(self) -> None: ...


class InMemory:
    def __init__(self) -> None:
        self.fake = FakeWire()
        self.wire: Wire = self.fake

    async def settle(self) -> None:
        self.fake.take_all()

    async def hold(self) -> None:
        """Nothing leaves unless the test says so."""

    async def break_off(self) -> None:
        self.fake.break_connection()

    async def come_back(self) -> None:
        self.fake.reconnect()


class Real:
    def __init__(self, bus: Bus, broker: BrokerProcess) -> None:
        self.bus = bus
        self.broker = broker
        self.wire: Wire = bus

    async def settle(self) -> None:
        # The library's flush overtakes what waits in its own buffer.
        await until(lambda: self.bus.nc.pending_data_size == 0)
        await self.bus.nc.flush()
        await asyncio.sleep(0.1)

    async def hold(self) -> None:
        self.broker.pause()
        # More than the sockets hold: the rest stays in the client's buffer.
        for _ in range(200):
            self.bus.publish("wc.answer.acme.r", b"x" * 100_000)
            await asyncio.sleep(0)
        assert self.bus.nc.pending_data_size > 0

    async def break_off(self) -> None:
        await asyncio.to_thread(self.broker.kill)
        await until(lambda: not self.bus.connected)

    async def come_back(self) -> None:
        await asyncio.to_thread(self.broker.start)
        await self.bus.wait_connected()


@pytest.fixture(params=["in memory", "real"])
async def side(request: pytest.FixtureRequest) -> AsyncIterator[Side]:
    if request.param == "in memory":
        yield InMemory()
        return
    broker: BrokerProcess = request.getfixturevalue("broker")
    async with connected(broker.url) as bus:
        yield Real(bus, broker)


class Answers:
    """Listens to one inbox."""

    def __init__(self, wire: Wire) -> None:
        self.inbox = wire.new_inbox()
        self.sequences: dict[str, int] = {}
        self.subscription = wire.listen(f"{self.inbox}.*", self._on_answer)

    async def _on_answer(self, message: Msg) -> None:
        answer = decode_puback(message)
        assert answer.error is None
        self.sequences[message.subject.rpartition(".")[2]] = answer.seq


def publish(wire: Wire, chain: Chain, answers: Answers, number: int) -> bytes:
    subject, payload = chain.seal(event(number))
    assert wire.publish(subject, payload, reply=f"{answers.inbox}.{number}")
    return payload


def chain() -> Chain:
    return Chain(service="worker", writer="worker-aaaaaaaaaaaa", key=KEY)


async def test_what_is_published_is_stored_in_its_order_and_answered(side: Side) -> None:
    answers, pen = Answers(side.wire), chain()
    payloads = [publish(side.wire, pen, answers, number) for number in range(50)]
    await side.settle()
    assert answers.sequences == {str(number): number + 1 for number in range(50)}
    for number in (0, 49):
        found = await side.wire.message(EVENTS.name, number + 1)
        assert found is not None
        assert found[:2] == ("wc.event.started.acme.w-1", payloads[number])
        assert found[2] > 1_600_000_000_000_000_000
    assert await side.wire.message(EVENTS.name, 51) is None


async def test_nothing_that_asked_for_a_reply_is_sent_again_after_a_break(side: Side) -> None:
    """Or it would stand before what its writer repeats."""
    answers, pen = Answers(side.wire), chain()
    publish(side.wire, pen, answers, 0)
    await side.settle()
    await side.hold()
    publish(side.wire, pen, answers, 1)
    await side.break_off()
    assert not side.wire.connected
    await side.come_back()
    await side.settle()
    assert await side.wire.message(EVENTS.name, 2) is None
    publish(side.wire, pen, answers, 2)
    await side.settle()
    assert answers.sequences == {"0": 1, "2": 2}


async def test_breaks_and_reconnects_are_told_until_that_is_taken_back(side: Side) -> None:
    told: list[str] = []
    wire = side.wire
    forget = [
        wire.on_break(lambda: told.append("break, connected" if wire.connected else "break")),
        wire.on_reconnect(lambda: told.append("back" if wire.connected else "back, broken")),
    ]
    await side.break_off()
    await side.come_back()
    await until(lambda: len(told) == 2)
    assert told == ["break", "back"]
    for take_back in forget:
        take_back()
    await side.break_off()
    await side.come_back()
    await side.settle()
    assert told == ["break", "back"]


async def test_a_closed_subscription_brings_nothing_more(side: Side) -> None:
    answers, pen = Answers(side.wire), chain()
    publish(side.wire, pen, answers, 0)
    await side.settle()
    answers.subscription.close()
    answers.subscription.close()
    publish(side.wire, pen, answers, 1)
    await side.settle()
    assert answers.sequences == {"0": 1}
    assert await side.wire.message(EVENTS.name, 2) is not None
