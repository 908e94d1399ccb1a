"""An open loop of small requests from several producers, with every handle kept.

Requests are sent at their times whatever becomes of those before, so that a fault in between
meets a stream of them. Prompts carry words that stand nowhere else (``MARKS``); a seed decides
everything.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from msgspec import Struct

from waterclock.mesh import EmbeddedMesh
from waterclock_producer import Handle, Producer, Submission

MARK_EN = "quillfeather"
MARK_ZH = "獬豸神羊"
MARKS = (MARK_EN, MARK_ZH)

TICK_S = 0.005


class LoadShape(Struct, frozen=True, kw_only=True):
    """What one load looks like."""

    seed: int
    rate: int = 200
    """Requests a second, all tenants together."""
    seconds: float = 3.0
    stream_permille: int = 300
    zh_permille: int = 300
    max_tokens: tuple[int, int] = (2, 12)
    """Least and most; each is drawn evenly."""
    prompt_words: tuple[int, int] = (3, 60)
    deadline_ms: int | None = None


class Producers:
    """One connected producer for each tenant, and everything that was sent through them."""

    def __init__(self, mesh: EmbeddedMesh) -> None:
        self.mesh = mesh
        self.by_tenant: dict[str, Producer] = {}
        self.sent: dict[str, list[Handle]] = {}

    def handles(self) -> list[Handle]:
        return [handle for handles in self.sent.values() for handle in handles]

    def open_handles(self) -> list[Handle]:
        return [handle for handle in self.handles() if not handle.ended]

    async def drive(self, shape: LoadShape) -> list[Handle]:
        """Send the load; returns when the last request was sent, with all of their handles."""
        draw = random.Random(shape.seed)
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        tenants = sorted(self.by_tenant)
        handles: list[Handle] = []
        due_s = 0.0
        while due_s < shape.seconds:
            due_s += draw.expovariate(shape.rate)
            while (early_s := begun_s + due_s - loop.time()) > 0:  # noqa: ASYNC110 - it is a time
                await asyncio.sleep(min(early_s, TICK_S))
            tenant = draw.choice(tenants)
            chinese = draw.randrange(1000) < shape.zh_permille
            words = draw.randint(*shape.prompt_words)
            handle = self.by_tenant[tenant].send(
                Submission(
                    id=f"l{shape.seed}-{len(handles)}",
                    prompt=prompt(draw, words, chinese=chinese),
                    max_tokens=draw.randint(*shape.max_tokens),
                    ignore_eos=True,
                    stream=draw.randrange(1000) < shape.stream_permille,
                    deadline_ms=shape.deadline_ms,
                )
            )
            handles.append(handle)
            self.sent[tenant].append(handle)
        return handles

    def keep(self, tenant: str, handle: Handle) -> Handle:
        """Hold a handle that was not made by ``drive``."""
        self.sent[tenant].append(handle)
        return handle


@asynccontextmanager
async def producers_of(
    mesh: EmbeddedMesh, tenants: Sequence[str] | None = None
) -> AsyncIterator[Producers]:
    """A producer for each tenant, connected."""
    producers = Producers(mesh)
    async with AsyncExitStack() as stack:
        for tenant in tenants or list(mesh.config["tenants"]):
            producer = Producer.connect(
                mesh.bus_url,
                tenant=tenant,
                user=tenant,
                password=mesh.access.tenants[tenant].password,
            )
            producers.by_tenant[tenant] = await stack.enter_async_context(producer)
            producers.sent[tenant] = []
        yield producers


def prompt(draw: random.Random, words: int, *, chinese: bool) -> str:
    """A text in one of two languages, with its mark in the middle."""
    if chinese:
        characters = [draw.choice(_CHINESE) for _ in range(words)]
        return "".join([*characters[: words // 2], MARK_ZH, *characters[words // 2 :]])
    picked = [draw.choice(_ENGLISH) for _ in range(words)]
    return " ".join([*picked[: words // 2], MARK_EN, *picked[words // 2 :]])


def outcomes(handles: Sequence[Handle]) -> Mapping[str, int]:
    """How many handles ended how; ``open`` and ``error`` for the others."""
    found: dict[str, int] = {}
    for handle in handles:
        name = (
            handle.final.outcome
            if handle.final is not None
            else "open"
            if handle.error is None
            else "error"
        )
        found[name] = found.get(name, 0) + 1
    return found


_ENGLISH = [
    "please",
    "explain",
    "why",
    "the",
    "old",
    "harbour",
    "clock",
    "is",
    "slow",
    "in",
    "winter",
    "and",
    "who",
    "repairs",
    "it",
    "every",
    "year",
    "although",
    "nobody",
    "pays",
    "for",
    "the",
    "work",
    "that",
    "they",
    "describe",
    "in",
    "this",
    "very",
    "long",
    "letter",
]
_CHINESE = tuple("请你说明为什么水钟在冬天走得比较慢而且每年都要有人修理它虽然没有谁付钱")
