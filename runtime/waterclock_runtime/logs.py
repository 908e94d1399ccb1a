"""Logs are events with values: JSON lines on standard error, one an event, ids bound.

What libraries log through the standard library comes out in the same form, from warnings on.
"""

import logging
import sys
from typing import Any, Literal

import structlog

LogLevel = Literal["debug", "info", "warning", "error"]


def configure_logs(*, service: str, level: LogLevel, pretty: bool) -> structlog.stdlib.BoundLogger:
    """Set the process's logging up once. Never pass a prompt or an answer as a value."""
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    renderer: Any = (
        structlog.dev.ConsoleRenderer() if pretty else structlog.processors.JSONRenderer()
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[_bound(service), *shared],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    log: structlog.stdlib.BoundLogger = structlog.get_logger().bind(service=service)
    return log


def _bound(service: str) -> structlog.typing.Processor:
    def bind(
        _logger: Any, _name: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        event["service"] = service
        return event

    return bind
