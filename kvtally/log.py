"""The two formats of log lines. Every module logs with `logging.getLogger(__name__)`.

A line's fields go in `extra={...}`: the text format appends `name=value`, the JSON format adds members. The command
that starts a daemon configures logging, once; libraries (the client in an engine) never do.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Hashable
from enum import StrEnum


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


# Any other attribute of a record came from `extra`.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


def configure(log_format: LogFormat, *, verbose: bool) -> None:
    """Send log lines to stderr; with `verbose`, DEBUG lines too."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format is LogFormat.JSON else TextFormatter())
    logging.basicConfig(level=logging.DEBUG if verbose else logging.INFO, handlers=[handler], force=True)


class TextFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        return " ".join(
            [super().formatMessage(record), *(f"{name}={value}" for name, value in _fields(record).items())]
        )


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class Seldom:
    """Whether to log something again: once a minute for each key. Any thread may ask."""

    AGAIN_S = 60.0
    MOST_KEYS = 1_024

    def __init__(self) -> None:
        self._until_s: dict[Hashable, float] = {}

    def is_due(self, key: Hashable) -> bool:
        now_s = time.monotonic()
        if now_s < self._until_s.get(key, 0.0):
            return False
        if len(self._until_s) >= self.MOST_KEYS:
            self._until_s.clear()
        self._until_s[key] = now_s + self.AGAIN_S
        return True


def _fields(record: logging.LogRecord) -> dict[str, object]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}
