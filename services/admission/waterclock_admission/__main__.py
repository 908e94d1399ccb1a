"""Admission as a process: wiring, and nothing else."""

import asyncio

from waterclock_admission import limits
from waterclock_admission.config import AdmissionConfig, read_config
from waterclock_admission.edge import Edge
from waterclock_admission.metrics import Metrics
from waterclock_admission.service import AdmissionService
from waterclock_admission.web_server import WebServer
from waterclock_runtime.config import SettingsLoader
from waterclock_runtime.errors import WaterclockError
from waterclock_runtime.service import ServiceContext, run_service


def check(loader: SettingsLoader) -> None:
    """Note the mistakes of admission's own sections."""
    read_config(loader)


async def serve(context: ServiceContext) -> None:
    """Admission and its HTTP edge, until the process is told to stop."""
    config = read_config(context.loader)
    context.loader.finish()
    assert config is not None
    metrics = Metrics(context.registry, config.terms)
    leaving = asyncio.Event()
    service = AdmissionService(
        config=config,
        bus=context.bus,
        writer=context.writer,
        clock=context.clock,
        log=context.log,
        metrics=metrics,
        health=context.health,
        data_dir=context.data_dir,
        mesh_key=context.mesh_key,
        stopping=leaving,
    )
    edge = Edge(
        config=config,
        bus=context.bus,
        clock=context.clock,
        log=context.log,
        metrics=metrics,
        health=context.health,
        admission=service,
    )
    work = asyncio.create_task(service.run(), name="admission")
    ready = asyncio.create_task(service.ready.wait())
    stopping = asyncio.create_task(context.stopping.wait())
    web: WebServer | None = None
    try:
        await asyncio.wait({work, ready, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if ready.done() and not stopping.done() and not work.done():
            web = await _listen(context, config, edge)
            await asyncio.wait({work, stopping}, return_when=asyncio.FIRST_COMPLETED)
        edge.refuse_new()
        if not work.done():
            # Whoever was let in over HTTP gets its decision before decisions end.
            await edge.settle(limits.SETTLE_WAIT_S)
            leaving.set()
            await asyncio.gather(work, edge.drain(limits.DRAIN_WAIT_S))
    finally:
        leaving.set()
        ready.cancel()
        stopping.cancel()
        if web is not None:
            await web.stop()
        await work


async def _listen(context: ServiceContext, config: AdmissionConfig, edge: Edge) -> WebServer | None:
    if not config.http.enabled:
        return None
    web = WebServer(edge.app, config.http)
    try:
        await web.start()
    except OSError as error:
        raise WaterclockError(
            f"[http] {config.http.host}:{config.http.port}: {error.strerror}; choose another port"
        ) from error
    (context.data_dir / "http-port").write_text(str(web.port))
    context.log.info("http_listening", host=config.http.host, port=web.port)
    return web


def main() -> None:
    """Run until told to stop; exits the process."""
    run_service("admission", serve, check=check)


if __name__ == "__main__":
    main()
