"""Budgets in this process's memory: the same rule as the script in Redis, as plain Python.

A budget of so many a minute is a level that refills all the time and never holds more than a
minute's worth. Levels are integers in units of a sixty-millionth: a limit of ``n`` a minute
refills ``n`` units a microsecond, and one request or token costs 60,000,000 of them. So nothing is
ever rounded, and refilling often gives as much as refilling once.
"""

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from waterclock_admission import limits
from waterclock_admission.core import Ask, BudgetAnswer, Terms

UNITS = 60_000_000
"""Of one request or token; also the microseconds of a minute."""


class Level(Struct, kw_only=True):
    """One tenant's budgets at a moment."""

    requests: int
    tokens: int
    at_us: int

    def refill(self, terms: Terms, now_us: int) -> None:
        """Bring the levels up to ``now_us``. A moment before ``at_us`` changes nothing."""
        elapsed_us = min(max(0, now_us - self.at_us), UNITS)
        self.requests = min(
            terms.requests_per_minute * UNITS,
            self.requests + elapsed_us * terms.requests_per_minute,
        )
        self.tokens = min(
            terms.tokens_per_minute * UNITS, self.tokens + elapsed_us * terms.tokens_per_minute
        )
        self.at_us = max(self.at_us, now_us)


class Allowances:
    """Levels and open submissions of every tenant."""

    def __init__(self, terms: Mapping[str, Terms]) -> None:
        self._terms = terms
        self._levels: dict[str, Level] = {}
        self._open: dict[str, dict[str, int]] = {tenant: {} for tenant in terms}
        """Tenant → who is open → until when at the latest (µs)."""

    def ask(self, asks: Sequence[Ask], now_us: int) -> list[BudgetAnswer]:
        """Answer a batch in its order, charging what is granted."""
        answers: list[BudgetAnswer] = []
        for tenant in {ask.tenant for ask in asks}:
            self._bring_up(tenant, now_us)
        for ask in asks:
            if ask.repeats >= 0 and answers[ask.repeats].outcome == "granted":
                answers.append(_REPEATED)
                continue
            answers.append(self._ask(ask))
        return answers

    def release(self, tenant: str, member: str) -> None:
        """The submission is not open any more."""
        members = self._open.get(tenant)
        if members is not None:
            members.pop(member, None)

    def note(self, ask: Ask) -> None:
        """Somebody else granted this ask: it is open here as well."""
        self._open[ask.tenant][ask.member] = ask.expires_us

    def set_level(self, tenant: str, level: Level) -> None:
        """What somebody else's budgets say the tenant has left."""
        self._levels[tenant] = level

    def level(self, tenant: str, now_us: int) -> Level:
        return self._bring_up(tenant, now_us)

    def set_open(self, open_requests: Iterable[tuple[str, str, int]]) -> None:
        """(tenant, member, expires µs) of everything that is open; forgets the rest."""
        self._open = {tenant: {} for tenant in self._terms}
        for tenant, member, expires_us in open_requests:
            if tenant in self._open:
                self._open[tenant][member] = expires_us

    def members(self, tenant: str) -> list[tuple[str, int]]:
        """Who is open, and until when at the latest (ms)."""
        return [(member, expires_us // 1000) for member, expires_us in self._open[tenant].items()]

    def _bring_up(self, tenant: str, now_us: int) -> Level:
        terms = self._terms[tenant]
        level = self._levels.get(tenant)
        if level is None:
            level = self._levels[tenant] = Level(
                requests=terms.requests_per_minute * UNITS,
                tokens=terms.tokens_per_minute * UNITS,
                at_us=now_us,
            )
        level.refill(terms, now_us)
        return level

    def _ask(self, ask: Ask) -> BudgetAnswer:
        terms = self._terms[ask.tenant]
        level = self._levels[ask.tenant]
        members = self._open[ask.tenant]
        # In whole milliseconds, as the script's sorted set has them.
        now_ms = level.at_us // 1000
        if members.get(ask.member, 0) // 1000 > now_ms:
            return _GRANTED
        if terms.concurrency and len(members) >= terms.concurrency:
            for member in [m for m, expires_us in members.items() if expires_us // 1000 <= now_ms]:
                del members[member]
            if len(members) >= terms.concurrency:
                return _CONCURRENCY
        if terms.requests_per_minute and level.requests < UNITS:
            return BudgetAnswer(
                outcome="requests_per_minute",
                retry_after_ms=wait_ms(UNITS - level.requests, terms.requests_per_minute),
            )
        cost = ask.tokens * UNITS
        if terms.tokens_per_minute and level.tokens < cost:
            return BudgetAnswer(
                outcome="tokens_per_minute",
                retry_after_ms=wait_ms(cost - level.tokens, terms.tokens_per_minute),
            )
        if terms.requests_per_minute:
            level.requests -= UNITS
        if terms.tokens_per_minute:
            level.tokens -= cost
        members[ask.member] = ask.expires_us
        return _GRANTED


def wait_ms(units_missing: int, per_minute: int) -> int:
    """Milliseconds until so many units have been refilled, rounded up."""
    return -(-units_missing // (per_minute * 1000))


_GRANTED = BudgetAnswer(outcome="granted")
_REPEATED = BudgetAnswer(outcome="repeated")
_CONCURRENCY = BudgetAnswer(outcome="concurrency", retry_after_ms=limits.CONCURRENCY_RETRY_MS)
