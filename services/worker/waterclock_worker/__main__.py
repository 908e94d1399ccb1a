"""Wiring: ``python -m waterclock_worker``."""

import os

from waterclock_runtime.config import SettingsLoader
from waterclock_runtime.service import ServiceContext, run_service
from waterclock_worker.config import WorkerSettings
from waterclock_worker.engine import Engine
from waterclock_worker.service import WorkerService
from waterclock_worker.simulated import SimulatedEngine
from waterclock_worker.simulated_profiles import PROFILES


def build_engine(settings: WorkerSettings) -> Engine:
    """The engine that the settings name."""
    return SimulatedEngine(
        PROFILES[settings.profile],
        model=settings.models[0] if settings.models else None,
        seed=settings.seed,
        speed_permille=settings.speed_permille,
    )


def check(loader: SettingsLoader) -> None:
    """Note the mistakes that only this service can see."""
    settings = loader.section("worker", WorkerSettings)
    if settings is not None and settings.profile not in PROFILES:
        loader.mistake(
            f"[worker] profile: expected one of {sorted(PROFILES)}, found {settings.profile!r}"
        )


async def serve(context: ServiceContext) -> None:
    """Run one worker."""
    settings = context.settings("worker", WorkerSettings)
    await WorkerService(context, settings, build_engine(settings)).run()


def main() -> None:
    """The process."""
    name = os.environ.get("WATERCLOCK_WORKER__NAME", "worker")
    run_service("worker", serve, instance=name, check=check)


if __name__ == "__main__":
    main()
