"""A running mesh with everything that a test of it needs: producers, a watch, and the check."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from drill_mesh import DrillMesh, MeshPlan, make_mesh
from mesh_checks import MeshChecker, Report, check_mesh, check_mesh_and_stop, claim_of
from mesh_watch import Watch
from open_load import MARKS, Producers, producers_of
from waterclock_producer import Handle


class Drill:
    """One mesh under test. ``check`` is how each test of it ends."""

    def __init__(self, mesh: DrillMesh, watch: Watch, producers: Producers) -> None:
        self.mesh = mesh
        self.watch = watch
        self.producers = producers
        self.checker = MeshChecker(mesh, watch, marks=MARKS)
        self._last: Report | None = None

    async def check(self, wait_s: float = 30.0) -> Report:
        """Everything sent has ended, every producer knows it, and nothing is wrong anywhere.

        Raises:
            AssertionError: naming all that is.
        """
        await self.finish(wait_s)
        self._last = await check_mesh(self.checker, wait_s)
        return self._last

    async def before(self) -> Report:
        """What the last check found, to compare with; made now if there was none."""
        return self._last or await self.check()

    async def finish(self, wait_s: float = 30.0) -> None:
        """Wait for all ends, ask again for finals that were lost, and note what producers hold."""
        await self.checker.settle(wait_s)
        producers = self.producers
        for tenant, producer in producers.by_tenant.items():
            await self.checker.finish(producers.sent[tenant], producer)
        self.checker.claims = [
            claim_of(handle, tenant) for tenant, sent in producers.sent.items() for handle in sent
        ]

    async def until(self, what: str, condition: Callable[[], object], wait_s: float = 15.0) -> None:
        """Wait for a condition that is cheap to ask.

        Raises:
            AssertionError: it did not come true in time.
        """
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + wait_s
        while not condition():
            if loop.time() > give_up_s:
                raise AssertionError(f"{what}: not within {wait_s:g} s\n{self.checker.state()}")
            await asyncio.sleep(0.02)

    async def ready(self, names: Sequence[str] | None = None, wait_s: float = 20.0) -> None:
        """Wait until services say that they are ready."""
        await self.mesh.wait_ready(names, wait_s)

    def sent(self, tenant: str) -> list[Handle]:
        return self.producers.sent[tenant]


@asynccontextmanager
async def drilled(
    folder: Path, plan: MeshPlan | None = None, **options: Any
) -> AsyncIterator[Drill]:
    """A mesh that is up; when the block ends well, the last check runs and everything stops."""
    mesh = make_mesh(folder, plan, **options)
    async with mesh, Watch(mesh) as watch, producers_of(mesh) as producers:
        drill = Drill(mesh, watch, producers)
        yield drill
        await drill.finish()
        await check_mesh_and_stop(drill.checker)
