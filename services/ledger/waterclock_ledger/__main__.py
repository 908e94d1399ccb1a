"""Wiring: ``python -m waterclock_ledger`` keeps the record of one mesh."""

from waterclock_ledger.config import LedgerSettings, check
from waterclock_ledger.files import LogWriter
from waterclock_ledger.service import LedgerService
from waterclock_ledger.tape import BusTape
from waterclock_runtime.service import ServiceContext, run_service


async def serve(context: ServiceContext) -> None:
    """Keep the record until told to stop."""
    settings = context.settings("ledger", LedgerSettings)

    def on_incarnation(incarnation: str) -> None:
        context.writer.incarnation = incarnation

    service = LedgerService(
        tape=BusTape(context.bus),
        log=LogWriter(context.data_dir),
        emit=context.writer.emit,
        clock=context.clock,
        health=context.health,
        registry=context.registry,
        logger=context.log,
        sync_interval_ms=settings.sync_interval_ms,
        on_incarnation=on_incarnation,
    )
    await service.run(context.stopping)


def main() -> None:
    """The process."""
    run_service("ledger", serve, check=check)


if __name__ == "__main__":
    main()
