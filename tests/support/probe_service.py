"""A service that does nothing but live: what the tests of a service's life run as a process.

``PROBE`` says how it behaves; ``PROBE_LIMITS`` (JSON) changes limits of the runtime, so that a
test need not wait as long as an operator would.
"""

import asyncio
import json
import os
import time

from msgspec import Struct

from runtime_probe import event
from waterclock_runtime import limits
from waterclock_runtime.errors import FenceLost
from waterclock_runtime.service import ServiceContext, run_service
from waterclock_runtime.tape import TapeReader


def _fail(_: int) -> None:
    raise ZeroDivisionError("a bug")


class ProbeSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    slots: int


async def main(context: ServiceContext) -> None:
    """Behave as told."""
    behaviour = os.environ.get("PROBE", "")
    reader = TapeReader(context.bus)
    async for _ in reader:
        if reader.caught_up:
            break
    await reader.close()
    context.health.ready = True
    context.log.info("probe_ready", made_tape=context.made_tape)
    match behaviour:
        case "loses its fence":
            raise FenceLost("own fence 3, but 4 was read")
        case "has a bug":
            raise ZeroDivisionError("a bug")
        case "has a bug in a callback":
            context.writer.emit(event(0), _fail)
        case "wants another section":
            context.settings("scheduler", ProbeSettings)
        case "is stuck":
            time.sleep(3)  # noqa: ASYNC251 - that is the fault
        case "fills the tape":
            for number in range(5_000):
                context.writer.emit(event(number))
                if number % 100 == 0:
                    await asyncio.sleep(0)
        case "does not stop":
            await asyncio.Event().wait()
        case _:
            pass
    await context.stopping.wait()
    if behaviour == "has much to say at the end":
        for number in range(3_000):
            context.writer.emit(event(number))


if __name__ == "__main__":
    for name, value in json.loads(os.environ.get("PROBE_LIMITS", "{}")).items():
        setattr(limits, name, value)
    run_service("worker", main, instance="probe")
