"""Logs of a command that runs: text for people, or one JSON object a line for machines.

Each JSON line has `time` (UTC, RFC 3339), `level` (`info`, `warning`, `error`), `logger`, `event` and `message`. An event's name and its
further fields are stable; messages are for people. What stands under `extra` of a record becomes a field; `exception` is a traceback.

Invariant: nothing of a record begins a line of its own or moves a terminal, whoever chose it: a line of JSON is ASCII, and in text every character that
cannot be printed is its escape, with the lines of a traceback indented.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

from rich.console import Console
from rich.text import Text

from capflow.errors import CapflowError, UsageError
from capflow.text.printable import printable

Format = Literal["text", "json"]
FORMATS: tuple[Format, ...] = ("text", "json")

logger = logging.getLogger("capflow.run")

_OF_ANY_RECORD = {*logging.makeLogRecord({}).__dict__, "message", "asctime", "taskName"}
_TRACEBACK_LENGTH_MAX = 16_384
_DROPPED = "%d lines of the log are dropped: nobody read them in time"


class JsonFormatter(logging.Formatter):
    """Makes one line of JSON of each record."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC)
            .isoformat(timespec="milliseconds")
            .replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": getattr(record, "event", "log"),
            "message": record.getMessage(),
        }
        line |= {key: value for key, value in record.__dict__.items() if key not in _OF_ANY_RECORD and key not in line}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)[-_TRACEBACK_LENGTH_MAX:]
        return _ascii(line)


def _ascii(line: dict[str, Any]) -> str:
    return json.dumps(line, default=str).replace("\x7f", r"\u007f")


def dropped_as_json(lines: int) -> str:
    """Return the line that says how many lines nobody read in time."""
    record = logger.makeRecord(logger.name, logging.WARNING, __file__, 0, _DROPPED, (lines,), None)
    record.__dict__ |= {"event": "log_dropped", "lines": lines}
    return JsonFormatter().format(record) + "\n"


def dropped_as_text(lines: int) -> str:
    """As `dropped_as_json`, for people."""
    return f"capflow: {_DROPPED % lines}\n"


class TextFormatter(logging.Formatter):
    """Makes a line for people of each record, and further ones, indented, of a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the lines."""
        lines = [f"capflow: {printable(record.getMessage())}"]
        if record.exc_info:
            trace = self.formatException(record.exc_info)[-_TRACEBACK_LENGTH_MAX:]
            lines += [f"  {printable(line)}" for line in trace.split("\n")]
        return "\n".join(lines)


class _JsonHandler(logging.StreamHandler[TextIO]):
    """Writes to standard error, and lets nobody write between."""

    def __init__(self, file: TextIO) -> None:
        super().__init__(file)
        self.setFormatter(JsonFormatter())


class _TextHandler(logging.Handler):
    """Shows records above a live line, if there is one."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.INFO)
        self.console = console
        self.setFormatter(TextFormatter())

    def emit(self, record: logging.LogRecord) -> None:
        self.console.print(Text(self.format(record)), soft_wrap=True)


@contextlib.contextmanager
def logs_to(console: Console, log_format: Format, file: TextIO | None = None) -> Iterator[None]:
    """Show what capflow logs, from information on; as JSON, in `file` or standard error, also what other libraries warn of."""
    handler = _TextHandler(console) if log_format == "text" else _JsonHandler(file or sys.stderr)
    ours, root = logging.getLogger("capflow"), logging.getLogger()
    target = ours if log_format == "text" else root
    level, hook = ours.level, threading.excepthook
    target.addHandler(handler)
    ours.setLevel(logging.INFO)
    if log_format == "json":
        threading.excepthook = _log_death
    try:
        yield
    finally:
        target.removeHandler(handler)
        ours.setLevel(level)
        threading.excepthook = hook


def _log_death(args: threading.ExceptHookArgs) -> None:
    """Log what a thread died of."""
    name = args.thread.name if args.thread is not None else "a thread"
    error = args.exc_value or args.exc_type()
    logger.critical("%s ended", name, exc_info=error, extra={"event": "thread_ended", "ended": name})


@contextlib.contextmanager
def failures_as_json() -> Iterator[None]:
    """Say what a command fails with as the last line of its log; the exit code is the one it has otherwise."""
    try:
        yield
    except CapflowError as e:
        extra = {"event": "failed"}
        record = logger.makeRecord(logger.name, logging.ERROR, __file__, 0, str(e), (), None, extra=extra)
        print(JsonFormatter().format(record), file=sys.stderr)
        sys.exit(2 if isinstance(e, UsageError) else 1)
