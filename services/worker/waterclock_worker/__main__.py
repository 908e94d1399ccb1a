"""Wiring: ``python -m waterclock_worker NAME`` serves ``[workers.NAME]``."""

import re
import sys
from functools import partial

from waterclock_proto.names import NAME_PATTERN
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


def check(name: str, loader: SettingsLoader) -> None:
    """Note the mistakes that only this service can see."""
    workers = loader.section("workers", dict[str, WorkerSettings])
    if workers is None:
        return
    if name not in workers:
        loader.mistake(f"[workers.{name}]: missing; known workers: {sorted(workers)}")
        return
    if len(workers[name].models) > 1:
        loader.mistake(
            f"[workers.{name}] models: the simulated engine serves one,"
            f" found {list(workers[name].models)}"
        )
    if workers[name].profile not in PROFILES:
        loader.mistake(
            f"[workers.{name}] profile: expected one of {sorted(PROFILES)},"
            f" found {workers[name].profile!r}"
        )


async def serve(name: str, context: ServiceContext) -> None:
    """Run one worker."""
    settings = context.settings("workers", dict[str, WorkerSettings])[name]
    await WorkerService(context, settings, build_engine(settings), name=name).run()


def main() -> None:
    """The process."""
    if len(sys.argv) != 2 or re.match(NAME_PATTERN, sys.argv[1]) is None:
        sys.exit("usage: python -m waterclock_worker NAME, as in [workers.NAME]")
    name = sys.argv[1]
    run_service("worker", partial(serve, name), instance=name, check=partial(check, name))


if __name__ == "__main__":
    main()
