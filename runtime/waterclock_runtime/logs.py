"""Logs are events with values: JSON lines on standard error, one an event, ids bound."""

import logging
import sys
from typing import Literal

import structlog

LogLevel = Literal["debug", "info", "warning", "error"]


def configure_logs(*, service: str, level: LogLevel, pretty: bool) -> structlog.stdlib.BoundLogger:
    """Set the process's logging up once. Never pass a prompt or an answer as a value."""
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(message)s")
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.dev.ConsoleRenderer() if pretty else structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    log: structlog.stdlib.BoundLogger = structlog.get_logger().bind(service=service)
    return log
