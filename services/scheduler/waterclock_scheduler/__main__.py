"""Wiring: ``python -m waterclock_scheduler``."""

from waterclock_runtime.config import SettingsLoader
from waterclock_runtime.service import ServiceContext, run_service
from waterclock_scheduler.config import (
    LadderSettings,
    PoolSettings,
    SchedulerSettings,
    Settings,
    mistakes_of,
)
from waterclock_scheduler.service import Scheduler


def settings_of(loader: SettingsLoader) -> Settings | None:
    """The scheduler's sections; None, with the mistakes noted, if one of them is wrong."""
    scheduler = loader.section("scheduler", SchedulerSettings)
    ladder = loader.section("ladder", LadderSettings)
    pools = loader.section("pools", dict[str, PoolSettings])
    if scheduler is None or ladder is None or pools is None:
        return None
    if not pools:
        return Settings(scheduler=scheduler, ladder=ladder)
    for mistake in mistakes_of(pools):
        loader.mistake(mistake)
    return Settings(scheduler=scheduler, ladder=ladder, pools=pools)


def check(loader: SettingsLoader) -> None:
    """Note what is wrong, before anything is connected."""
    settings_of(loader)


async def serve(context: ServiceContext) -> None:
    """Run the scheduler."""
    settings = settings_of(context.loader)
    context.loader.finish()
    assert settings is not None
    scheduler = await Scheduler.open(context, settings)
    await scheduler.run()


def main() -> None:
    """The process."""
    run_service("scheduler", serve, check=check)


if __name__ == "__main__":
    main()
