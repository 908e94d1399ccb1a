"""Tenants' budgets in Redis or Valkey: one script call a batch, and a written rule without it.

The rule: what Redis last said is mirrored here (levels from its answers, open submissions from
admission's own decisions). While Redis is away or slow the mirror answers, by the same arithmetic
and without a pause; so a tenant gets what it was promised, but budgets are not shared with
anybody else who counts in the same Redis. When Redis is back, the mirror is written to it, so
that what was used in between stays used. Nothing is ever refused, and nothing stops, because
Redis is away.
"""

import asyncio
import contextlib
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import structlog
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError

from waterclock_admission import limits
from waterclock_admission.allowances import Allowances, Level
from waterclock_admission.core import Ask, BudgetAnswer, BudgetOutcome, Terms

SCRIPT = Path(__file__).with_name("budgets.lua").read_text(encoding="utf-8")
SCRIPT_SHA1 = hashlib.sha1(SCRIPT.encode(), usedforsecurity=False).hexdigest()
"""How Redis itself names scripts."""

OUTCOMES: tuple[BudgetOutcome, ...] = (
    "granted",
    "requests_per_minute",
    "tokens_per_minute",
    "concurrency",
    "repeated",
)


class Budgets:
    """All tenants' budgets. ``ask`` never raises and never takes longer than its bound."""

    def __init__(
        self,
        terms: Mapping[str, Terms],
        *,
        url: str,
        prefix: str,
        now_us: Callable[[], int],
        log: structlog.stdlib.BoundLogger,
        observe: Callable[[float], None] = lambda _seconds: None,
    ) -> None:
        self._terms = terms
        self._prefix = prefix
        self._now_us = now_us
        self._log = log
        self._observe = observe
        self._mirror = Allowances(terms)
        self._redis: Redis | None = None
        if url:
            self._redis = cast(Any, Redis).from_url(
                url,
                socket_connect_timeout=1.0,
                # A second try would take longer than the bound; the mirror is there at once.
                retry=Retry(NoBackoff(), 0),
            )
        self._lock = asyncio.Lock()
        self._releases: list[tuple[str, str]] = []
        self._failures = 0
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self.degraded = False
        """Redis is configured, and the mirror answers."""
        self.failures = 0
        """Calls that Redis did not answer in time, or refused."""
        self.on_degraded: Callable[[bool], None] = lambda _degraded: None

    async def open(self, open_requests: Iterable[tuple[str, str, int]]) -> None:
        """Begin with what is open: (tenant, member, expires µs), from the fold."""
        self._mirror.set_open(open_requests)
        if self._redis is None:
            return
        try:
            async with asyncio.timeout(limits.BREAKER_PROBE_S):
                await self._load_levels(list(self._terms))
                await self._reconcile(levels=False)
        except (RedisError, OSError, TimeoutError) as error:
            self._set_degraded(error)
        self._task = asyncio.create_task(self._tend(), name="budgets")

    async def close(self) -> None:
        # The client can swallow a cancellation that meets it while it waits for an answer.
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._redis is not None:
            with contextlib.suppress(RedisError, OSError, TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._redis.aclose()

    async def ask(self, asks: Sequence[Ask]) -> list[BudgetAnswer]:
        """One answer for each, in order; what is granted is charged."""
        if not asks:
            return []
        if self._redis is not None and not self.degraded:
            began_s = asyncio.get_running_loop().time()
            try:
                async with asyncio.timeout(limits.BUDGET_WAIT_MS / 1000):
                    answers = await self._call(asks)
                self._failures = 0
                self._observe(asyncio.get_running_loop().time() - began_s)
                return answers
            except (RedisError, OSError, TimeoutError) as error:
                self.failures += 1
                self._failures += 1
                if self._failures >= limits.BREAKER_FAILURES:
                    self._set_degraded(error)
        return self._mirror.ask(asks, self._now_us())

    def release(self, tenant: str, member: str) -> None:
        """The submission ended, or was granted in vain. Told to Redis with the next call."""
        if tenant not in self._terms:
            return
        self._mirror.release(tenant, member)
        if self._redis is not None and not self.degraded:
            self._releases.append((tenant, member))

    async def _call(self, asks: Sequence[Ask]) -> list[BudgetAnswer]:
        async with self._lock:
            releases, self._releases = self._releases, []
            tenants = list(
                dict.fromkeys([*(ask.tenant for ask in asks), *(tenant for tenant, _ in releases)])
            )
            places = {tenant: place for place, tenant in enumerate(tenants, start=1)}
            call = {
                "tenants": [
                    [terms.requests_per_minute, terms.tokens_per_minute, terms.concurrency]
                    for terms in (self._terms[tenant] for tenant in tenants)
                ],
                "asks": [
                    [
                        places[ask.tenant],
                        ask.member,
                        ask.tokens,
                        ask.expires_us // 1000,
                        ask.repeats + 1,
                    ]
                    for ask in asks
                ],
                "releases": [[places[tenant], member] for tenant, member in releases],
            }
            try:
                try:
                    found = await self._run(tenants, msgspec.json.encode(call))
                except NoScriptError:
                    # The server does not know the script that it was given at the beginning: it
                    # was started again, and has forgotten everything else as well.
                    for tenant in self._terms:
                        await self._write_mirror(tenant, levels=True)
                    found = await self._run(tenants, msgspec.json.encode(call), whole=True)
            except BaseException:
                # Not told, or not known whether: telling twice does no harm.
                self._releases = releases + self._releases
                raise
        answers: list[BudgetAnswer] = []
        for place, ask in enumerate(asks):
            outcome = OUTCOMES[found[2 * place]]
            answers.append(BudgetAnswer(outcome=outcome, retry_after_ms=found[2 * place + 1]))
            if outcome == "granted":
                self._mirror.note(ask)
        at = 2 * len(asks)
        for tenant in tenants:
            self._mirror.set_level(
                tenant, Level(requests=found[at], tokens=found[at + 1], at_us=found[at + 2])
            )
            at += 3
        return answers

    async def _run(
        self, tenants: Sequence[str], call: bytes, now_us: int = 0, *, whole: bool = False
    ) -> list[int]:
        """Run the script, named by its hash or (``whole``) sent as it is."""
        assert self._redis is not None
        keys: list[str] = []
        for tenant in tenants:
            keys += [self._level_key(tenant), self._open_key(tenant)]
        arguments: list[str | bytes] = [*keys, str(now_us), call, str(limits.CONCURRENCY_RETRY_MS)]
        redis = cast(Any, self._redis)
        answer: bytes = await (
            redis.eval(SCRIPT, len(keys), *arguments)
            if whole
            else redis.evalsha(SCRIPT_SHA1, len(keys), *arguments)
        )
        return [int(number) for number in answer.split()]

    async def _tend(self) -> None:
        """Tell releases that no batch carried along; look after Redis while it is away."""
        loop = asyncio.get_running_loop()
        reconciled_s = loop.time()
        while not self._closed:
            await asyncio.sleep(limits.BREAKER_PROBE_S if self.degraded else limits.RELEASE_FLUSH_S)
            try:
                async with asyncio.timeout(limits.BREAKER_PROBE_S):
                    if self.degraded:
                        await self._reconcile(levels=True)
                        self._failures = 0
                        self._releases.clear()
                        self.degraded = False
                        self.on_degraded(False)
                        self._log.info("budgets_restored")
                    elif loop.time() - reconciled_s >= limits.RECONCILE_S:
                        await self._reconcile(levels=False)
                        reconciled_s = loop.time()
                    elif self._releases:
                        await self._call(())
            except (RedisError, OSError, TimeoutError) as error:
                self.failures += 1
                self._set_degraded(error)

    async def _load_levels(self, tenants: list[str]) -> None:
        """Begin the mirror with the levels that Redis has from before."""
        if not tenants:
            return
        call = {
            "tenants": [
                [terms.requests_per_minute, terms.tokens_per_minute, terms.concurrency]
                for terms in (self._terms[tenant] for tenant in tenants)
            ],
            "asks": [],
            "releases": [],
        }
        found = await self._run(tenants, msgspec.json.encode(call), whole=True)
        for place, tenant in enumerate(tenants):
            requests, tokens, at_us = found[3 * place : 3 * place + 3]
            self._mirror.set_level(tenant, Level(requests=requests, tokens=tokens, at_us=at_us))

    async def _reconcile(self, *, levels: bool) -> None:
        """Make Redis say what the mirror says: who is open; after an absence also the levels."""
        for tenant in self._terms:
            # Nobody may be granted anything between the reading and the writing.
            async with self._lock:
                await self._write_mirror(tenant, levels=levels)

    async def _write_mirror(self, tenant: str, *, levels: bool) -> None:
        pipeline = cast(Any, self._redis).pipeline(transaction=True)
        pipeline.delete(self._open_key(tenant))
        members = self._mirror.members(tenant)
        for at in range(0, len(members), limits.RECONCILE_CHUNK):
            chunk = dict(members[at : at + limits.RECONCILE_CHUNK])
            pipeline.zadd(self._open_key(tenant), chunk)
        if members:
            pipeline.expire(self._open_key(tenant), limits.FORGET_AFTER_S)
        if levels:
            level = self._mirror.level(tenant, self._now_us())
            pipeline.set(
                self._level_key(tenant),
                f"{level.requests} {level.tokens} {level.at_us}",
                ex=limits.FORGET_AFTER_S,
            )
        await pipeline.execute()

    def _set_degraded(self, error: Exception) -> None:
        self._releases.clear()
        if self.degraded:
            return
        self.degraded = True
        self.on_degraded(True)
        self._log.warning("budgets_degraded", error=repr(error))

    # All keys of one installation share a hash tag: one script call needs one slot of a cluster.

    def _level_key(self, tenant: str) -> str:
        return f"{{{self._prefix}}}:budget:{tenant}:level"

    def _open_key(self, tenant: str) -> str:
        return f"{{{self._prefix}}}:budget:{tenant}:open"
