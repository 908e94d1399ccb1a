"""``[ledger]``: how the record is kept."""

from typing import Final

from msgspec import Struct

from waterclock_runtime.config import SettingsLoader

SYNC_INTERVAL_MS_MAX: Final = 60_000


class LedgerSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The record lies in the service's own data folder."""

    sync_interval_ms: int = 200
    """How much a power cut may take from the record; the tape gives it back unless it lost it too.
    0: durable after every batch that was read."""

    def __post_init__(self) -> None:
        if not 0 <= self.sync_interval_ms <= SYNC_INTERVAL_MS_MAX:
            raise ValueError(
                f"sync_interval_ms: expected 0 to {SYNC_INTERVAL_MS_MAX},"
                f" found {self.sync_interval_ms}"
            )


def check(loader: SettingsLoader) -> None:
    """Note the mistakes of this service's section."""
    loader.section("ledger", LedgerSettings)
