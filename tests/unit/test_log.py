"""Both formats of a log line, with its fields, an exception and odd characters."""

from __future__ import annotations

import json
import logging
import sys

from kvtally.log import JsonFormatter, TextFormatter


def record(**fields: object) -> logging.LogRecord:
    made = logging.makeLogRecord({"name": "kvtally.store", "levelno": logging.WARNING, "levelname": "WARNING"})
    made.msg, made.args = "tier %s degraded", ("disk",)
    made.__dict__.update(fields)
    return made


def test_text_ends_with_the_fields() -> None:
    line = TextFormatter().format(record(code="KV-602", queued_bytes=7))
    assert line.endswith("WARNING kvtally.store: tier disk degraded code=KV-602 queued_bytes=7")


def test_json_is_one_line_with_the_fields_as_members() -> None:
    made = record(path=object(), text='a "b"\n')
    made.created, made.msecs = 0.0, 5.0
    line = JsonFormatter().format(made)
    tree = json.loads(line)
    assert "\n" not in line
    assert (tree["time"], tree["level"], tree["logger"]) == ("1970-01-01T00:00:00.005Z", "warning", "kvtally.store")
    assert (tree["message"], tree["text"]) == ("tier disk degraded", 'a "b"\n')


def test_json_carries_an_exception() -> None:
    try:
        raise OSError("no such device")
    except OSError:
        made = record(exc_info=sys.exc_info())
    assert "no such device" in json.loads(JsonFormatter().format(made))["exception"]
