"""What may go wrong, named by what happens next.

* WaterclockError
  - ConfigRefused      the process does not start; every mistake is named at once
  - BusUnavailable     the bus did not answer within its bound; the caller decides
  - StreamMismatch     a stream exists and is not as the mesh needs it; the process does not start
  - StreamRolledBack   the tape is shorter, or other, than what was read; the process starts anew
  - ConsumerTaken      somebody else took over the work queue; the process stops
  - FenceLost          a later election is on the tape; the process stops and publishes nothing
  - RetryLater         the same work may succeed after ``delay_s``
  - PoisonMessage      the message can never be handled; it is counted, logged and passed over

Anything else is a bug: the service stops, and its work comes back to the next one.
"""


class WaterclockError(Exception):
    """Base of everything that the services raise on purpose."""


class ConfigRefused(WaterclockError):
    """Names every mistake that was found, one a line."""

    def __init__(self, mistakes: list[str]) -> None:
        super().__init__("configuration refused:\n" + "\n".join(f"  - {m}" for m in mistakes))
        self.mistakes = mistakes


class BusUnavailable(WaterclockError):
    """Says what was asked, and how long was waited."""


class StreamMismatch(WaterclockError):
    """Says which stream, which field, what was expected and what was found."""


class StreamRolledBack(WaterclockError):
    """Says what had been read and what stands there now."""


class ConsumerTaken(WaterclockError):
    """The consumer was deleted under its reader."""


class FenceLost(WaterclockError):
    """Says the own fence and the higher one that was read."""


class RetryLater(WaterclockError):
    """The same work may succeed after ``delay_s`` seconds."""

    def __init__(self, message: str, *, delay_s: float) -> None:
        super().__init__(message)
        self.delay_s = delay_s


class PoisonMessage(WaterclockError):
    """Says what was expected and what was found; never quotes a prompt."""
