"""How long a request will run: an honest guess from what its tenant's requests cost before.

The length of an answer says itself in the answers that the same tenant got from the same
model: their running median, cut to what the request may use at most. The length of the
prompt is no predictor of it, and is used for the time that reading it takes only.
"""

from typing import Final

from msgspec import Struct

from waterclock_scheduler.config import ServiceTime
from waterclock_scheduler.limits import OUTPUTS_REMEMBERED

PREDICTOR: Final = "median64-linear-1"
"""Stands on every ``enqueued`` event; another rule gets another name."""


class Outputs(Struct):
    """Output lengths of one tenant's completed requests on one model, the newest last."""

    recent: list[int]
    median: int = 0
    """The lower median of ``recent``."""


class Estimate(Struct, frozen=True):
    """What an ``enqueued`` event says about a request's size."""

    prompt_tokens: int
    output_tokens: int
    service_us: int


def learn(outputs: Outputs, output_tokens: int, *, cut: bool) -> None:
    """Take one completed request into account.

    ``cut``: the answer ended because it had used its ``max_tokens``, so its real length is
    unknown but not smaller. Counted as if it were the length it would teach that long answers
    are short; so it only counts where it lies above the median.
    """
    if cut and outputs.recent and output_tokens <= outputs.median:
        return
    outputs.recent.append(output_tokens)
    if len(outputs.recent) > OUTPUTS_REMEMBERED:
        del outputs.recent[0]
    outputs.median = sorted(outputs.recent)[(len(outputs.recent) - 1) // 2]


def predict(
    settings: ServiceTime, outputs: Outputs | None, *, prompt_tokens: int, output_tokens_max: int
) -> Estimate:
    """The size of a request of which the prompt and the ceiling of its answer are known."""
    known = settings.output_tokens_default if outputs is None else outputs.median
    output_tokens = min(output_tokens_max, known)
    return Estimate(
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        service_us=settings.base_us
        + settings.prompt_us_per_token * prompt_tokens
        + settings.output_us_per_token * output_tokens,
    )
