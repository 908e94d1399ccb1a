"""The simulated engine is an engine, as a stream and calling back, in time and without."""

from msgspec.structs import replace

from waterclock_worker.engine import Engine
from waterclock_worker.simulated import SimulatedEngine
from waterclock_worker.simulated_profiles import PROFILES

from .engine_contract import EngineContract, Pushed


class TestInstant(EngineContract):
    def make_engine(self) -> Engine:
        return SimulatedEngine(PROFILES["instant"])


class TestInstantPushed(EngineContract):
    def make_engine(self) -> Engine:
        return Pushed(SimulatedEngine(PROFILES["instant"]))


class TestTimed(EngineContract):
    """Steps of about 0.1 ms, so that timers are in play."""

    def make_engine(self) -> Engine:
        return SimulatedEngine(PROFILES["a10g-8b"], speed_permille=300_000)


class TestTimedPushed(EngineContract):
    def make_engine(self) -> Engine:
        return Pushed(SimulatedEngine(PROFILES["a10g-8b"], speed_permille=300_000))


class TestSpeculating(EngineContract):
    def make_engine(self) -> Engine:
        profile = replace(PROFILES["instant"], draft_tokens=3, draft_accept_permille=500)
        return SimulatedEngine(profile)
